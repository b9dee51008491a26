"""Stores of the engine: slots taken, copied by the workers, published or given back.

A store is published only when every worker has said that its part is done: with a word of its own as soon as it is
(see acks), or with the completion that the engine passes on after a step. Where the engine will pass none on (a reset
drops the completions of stores under way), the store waits for the workers' own reports and its slots go back: never
before, since a worker may still be writing into them. A worker that has not reported for long is asked; what it does
not know of, it will never write, so that a report that was lost holds no slots.

Scheduler thread only, but for `_note_outcomes` and `_commits_of`. Knows nothing of vLLM.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

from engine_plugin.vllm.acks import AckAddress, Acks
from engine_plugin.vllm.announced import Announced
from engine_plugin.vllm.link import Commit, DaemonLink
from engine_plugin.vllm.offers import Offers
from engine_plugin.vllm.runs import by_group, hash_of
from engine_plugin.vllm.stock import Slots

#: Keys known to be in the daemon: they are not copied again.
KNOWN_MAX: Final = 262_144
#: For this long; the daemon may have evicted the block since.
KNOWN_S: Final = 60.0
#: How long an engine without requests goes on stepping for reports of workers that its reset has cut off.
REPORTS_S: Final = 10.0
#: Workers that have not reported a store for this long are asked about it, and again after as long. No copy takes that
#: long, and asking about one that does costs nothing.
ASK_S: Final = 5.0


class KnownKeys:
    """Keys that were in the daemon a short while ago, in one generation of its pool."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until: OrderedDict[bytes, float] = OrderedDict()
        self._generation: bytes | None = None

    def settle(self, generation: bytes | None) -> None:
        """Forgets everything if the pool is another one."""
        if generation is not None and generation != self._generation:
            self._until.clear()
            self._generation = generation

    def add(self, keys: Iterable[bytes], generation: bytes) -> None:
        self.settle(generation)
        until = self._now() + KNOWN_S
        for key in keys:
            self._until[key] = until
            self._until.move_to_end(key)
        while len(self._until) > KNOWN_MAX:
            self._until.popitem(last=False)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Keys that are not there any more."""
        for key in keys:
            self._until.pop(key, None)

    def clear(self) -> None:
        self._until.clear()

    def __contains__(self, key: bytes) -> bool:
        return self._until.get(key, 0.0) > self._now()


@dataclasses.dataclass(slots=True, eq=False)
class Store:
    """One store under way.

    Attributes:
        ticket: Names it towards the workers.
        keys: What its slots are for, group after group, each in prefix order.
        parents: By group, the key before the first one, where it is known.
        asked: When it began, or its workers were last asked about it.
        acks: Ranks of the workers whose copy is over.
        failed: A worker could not copy its part.
        lost: A worker's report of it was lost.
        orphan: The engine will not tell of its end.
        settled_here: Its end is decided by this thread: no worker's word between steps counts any more.
    """

    ticket: int
    keys: Sequence[bytes]
    slots: Slots
    parents: Mapping[int, bytes]
    apart: bytes = b""
    asked: float = 0.0
    acks: set[int] = dataclasses.field(default_factory=set)
    failed: bool = False
    lost: bool = False
    orphan: bool = False
    settled_here: bool = False


class Stores:
    """See the module.

    Args:
        workers: Number of workers that copy their part of each store: the first ranks.
        ready_generation: Gives the generation that all workers have mapped; None while they differ.
        ask_about: Asks, without waiting, which keys of a prefix are in the daemon; they become known.
        announced: Told what can be loaded and what cannot.
        offers: Says which of the blocks that are not there are to be stored now; None: all of them.
        windowed: Groups of which the end of a prefix is needed only.
        acks: Hears from workers between steps; None: nothing is published before a step has ended.
    """

    def __init__(
        self,
        link: DaemonLink,
        *,
        workers: int,
        known: KnownKeys,
        ready_generation: Callable[[], bytes | None],
        ask_about: Callable[[Sequence[bytes], bytes], None],
        announced: Announced | None = None,
        offers: Offers | None = None,
        windowed: Collection[int] = (),
        acks: Acks | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._acks = acks
        self._offers = offers or Offers()
        self._windowed = windowed
        self._ask_about = ask_about
        self._announced = announced or Announced(on=False)
        self._ranks = frozenset(range(workers))
        self._known = known
        self._ready_generation = ready_generation
        self._now = now
        self._reports_until = 0.0
        self._tickets = 0
        self._under_way: dict[int, Store] = {}
        self._by_key: dict[bytes, Store] = {}
        self._outcomes: deque[tuple[Sequence[bytes], bytes, bytes, np.ndarray]] = deque()
        self.counts: Counter[tuple[str, str]] = Counter()

    def prepare(
        self,
        keys: Sequence[bytes],
        parents: Mapping[int, bytes],
        end_of: Callable[[bytes], int] | None = None,
        apart: bytes = b"",
    ) -> Store | None:
        """Slots for those of the keys that are neither there nor on their way; fewer where the stock is short, the
        front of the prefix first. None where there is nothing to store or nowhere to store it.

        Args:
            keys: Group after group, each in prefix order.
            parents: By group, the key before the first one, where it is known.
            end_of: Gives the token at which a key's block ends; None: there is one group.
            apart: What makes other KV of the same tokens and is not in the keys.
        """
        self.take_outcomes()
        self._known.settle(self._ready_generation())
        wanted = [key for key in keys if key not in self._known and key not in self._by_key]
        early = len(wanted)
        wanted = self._offers.due(wanted)
        if early > len(wanted):
            self._skip("threshold", early - len(wanted))
            self._link.need_not(early - len(wanted))
        if not wanted:
            return None
        if not self._link.attached:
            self._skip("unavailable", len(wanted))
            return None
        slots = self._link.take_slots(len(wanted))
        if len(slots) and slots.generation != self._ready_generation():
            self._link.abort(slots)
            self._skip("worker_detached", len(wanted))
            return None
        if len(slots) < len(wanted):
            # No lookup has announced these: the engine has them in its own prefix cache. Most are likely there; the
            # question makes them known, and fresh in the daemon's eyes, for the next time they are offered.
            self._skip("no_slots", len(wanted) - len(slots))
            self._ask_about(keys, apart)
        if not len(slots):
            return None
        self._tickets += 1
        chosen = wanted[: len(slots)]
        if end_of is not None and len(chosen) < len(wanted):
            # Of the front of a prefix all groups are needed.
            fits = set(sorted(wanted, key=end_of)[: len(slots)])
            chosen = [key for key in wanted if key in fits]
        before = {key: previous for previous, key in itertools.pairwise(keys)}
        first = {group: members[0] for group, members in by_group(chosen).items()}
        offered_first = {members[0] for members in by_group(keys).values()}
        known = {group: before[key] for group, key in first.items() if key not in offered_first}
        store = Store(self._tickets, chosen, slots, {**parents, **known}, apart, self._now())
        self._under_way[store.ticket] = store
        for key in chosen:
            self._by_key[key] = store
        if self._acks is not None:
            self._acks.expect(store.ticket, self._ranks, functools.partial(self._commits_of, store))
        return store

    @property
    def ack_address(self) -> AckAddress | None:
        """Where workers send their word to."""
        return self._acks.address if self._acks is not None else None

    def leading(self, keys: Sequence[bytes], *, under_way: bool) -> int:
        """Length of the leading run of keys that are in the daemon, as far as is known, or on their way there too."""
        for place, key in enumerate(keys):
            if key not in self._known and not (under_way and key in self._by_key):
                return place
        return len(keys)

    def _skip(self, reason: str, count: int) -> None:
        self.counts["skipped", reason] += count

    def report(
        self,
        done: Mapping[int, Collection[int]],
        failed: Iterable[int],
        lost: Mapping[int, Collection[int]] = MappingProxyType({}),
    ) -> None:
        """What workers have reported.

        Args:
            done: Ranks whose copy is over, by ticket.
            failed: Tickets of which a worker could not copy its part.
            lost: Ranks that were asked about a ticket and know nothing of it.
        """
        for ticket in failed:
            store = self._under_way.get(ticket)
            if store is not None:
                store.failed = True
        for ticket, ranks in lost.items():
            store = self._under_way.get(ticket)
            # Who has reported its part is through with it, and knows nothing of it any more: others are slower.
            if store is not None and not store.acks.issuperset(self._ranks.intersection(ranks)):
                store.lost = store.failed = True
        for ticket, ranks in done.items():
            store = self._under_way.get(ticket)
            if store is None:
                continue
            store.acks |= self._ranks.intersection(ranks)
            if len(store.acks) == len(self._ranks) and (store.orphan or store.lost) and self._withdrawn(store):
                self._give_back(store, "lost" if store.lost else "dropped")

    def late(self) -> list[int]:
        """Tickets of stores that workers are to be asked about now: they have not reported them for long."""
        now = self._now()
        late = [store for store in self._under_way.values() if store.asked + ASK_S <= now]
        for store in late:
            store.asked = now
        return [store.ticket for store in late]

    def distrust(self) -> None:
        """What is being copied may be wrong: none of the stores under way is published."""
        for store in list(self._under_way.values()):
            if self._withdrawn(store):
                store.failed = True

    def complete(self, keys: Collection[bytes], success: bool = True) -> None:
        """The engine says that a store is through on all workers. Unknown and repeated completions are ignored."""
        for store in {self._by_key[key] for key in keys if key in self._by_key}:
            if store.orphan or not self._withdrawn(store):
                continue
            if len(store.acks) < len(self._ranks):
                store.orphan = True  # a worker may still be writing: its own report decides
                self._reports_until = self._now() + REPORTS_S
                continue
            if store.failed or not success:
                self._give_back(store, "copy_failed")
                continue
            self._forget(store)
            for commit in self._commits_of(store):
                self._link.commit(commit)

    def _withdrawn(self, store: Store) -> bool:
        """Takes a store's end into this thread's hands. False: it has been published already, and is forgotten."""
        if self._acks is not None and not store.settled_here and self._acks.withdraw(store.ticket):
            self._forget(store)
            return False
        store.settled_here = True
        return True

    def _commits_of(self, store: Store) -> list[Commit]:
        """One for each group. Those of which a whole prefix is needed come last: who waits for a prefix to be there
        then finds the rest there too.
        """
        commits: list[tuple[bool, Commit]] = []
        done = 0
        for group, keys in by_group(store.keys).items():
            slots, done = store.slots.part(done, done + len(keys)), done + len(keys)
            parent = store.parents.get(group)
            commit = Commit(
                slots,
                [hash_of(key, store.apart) for key in keys],
                hash_of(parent, store.apart) if parent is not None else None,
                done=functools.partial(self._note_outcomes, keys, store.apart, slots.generation),
            )
            commits.append((group not in self._windowed, commit))
        return [commit for _, commit in sorted(commits, key=lambda each: each[0])]

    def reset(self) -> None:
        """The engine forgets its stores under way: none of them is published from now on."""
        for store in list(self._under_way.values()):
            if not self._withdrawn(store):
                continue
            store.orphan = True
            if len(store.acks) == len(self._ranks):
                self._give_back(store, "dropped")
        self._reports_until = self._now() + REPORTS_S
        self._by_key.clear()
        self._outcomes.clear()
        self._known.clear()

    @property
    def any_under_way(self) -> bool:
        """Whether a store's end is still to come."""
        return bool(self._under_way)

    def waits_for_workers(self) -> bool:
        """Whether slots of before a reset are still held for workers that may be writing into them. Only steps of the
        engine bring their reports; after a while the slots are left to the next request's steps, or to the session's
        end.
        """
        return self._now() < self._reports_until and any(store.orphan for store in self._under_way.values())

    def _note_outcomes(self, keys: Sequence[bytes], apart: bytes, generation: bytes, outcomes: np.ndarray) -> None:
        """On the link's thread."""
        self._outcomes.append((keys, apart, generation, outcomes))

    def take_outcomes(self) -> None:
        """Learns from what the link has published."""
        while self._outcomes:
            keys, apart, generation, outcomes = self._outcomes.popleft()
            present = [key for key, outcome in zip(keys, outcomes.tolist(), strict=True) if outcome in (1, 2)]
            self._known.add(present, generation)
            self._announced.there(present, apart)
            self._announced.never(set(keys).difference(present))

    def _give_back(self, store: Store, reason: str) -> None:
        self._forget(store)
        self._link.abort(store.slots)
        self._announced.never(store.keys)
        self._skip(reason, len(store.keys))

    def _forget(self, store: Store) -> None:
        self._under_way.pop(store.ticket, None)
        for key in store.keys:
            if self._by_key.get(key) is store:
                del self._by_key[key]
