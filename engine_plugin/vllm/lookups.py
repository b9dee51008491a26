"""Lookups of the engine's requests: asked, answered, pinned, given back.

A request's life here::

    (unknown) -lookup-> GATHERING -step_end-> ASKED -reply-> ANSWERED -prepare_load-> LOADING -load_done-> (unknown)

* The engine asks for every key of a request in one scheduler step, group by group and in prefix order, and goes on past
  a RETRY; so the first step gathers the whole list and it goes out as one query when the step ends. Keys of sliding
  windows follow as a second one, when it is known where the prefix ends.
* ANSWERED holds the pins, so that HIT is still true when the engine makes room for it some steps later. It ends when
  the request starts, is preempted, or finishes.
* Every answer has a deadline. A daemon that is away is a MISS at once; one that is silent is a MISS at the deadline.
  While blocks are on their way up from disk the link moves the deadline on, and answers within a time of its own.

Scheduler thread only. Knows nothing of vLLM; keys are a block hash followed by four bytes of group.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from engine_plugin.vllm.announced import Announced
from engine_plugin.vllm.coming import NOTHING_EXPECTED, Expected, Pins, Query, Reply
from engine_plugin.vllm.link import DaemonLink
from engine_plugin.vllm.plan import LoadPlan
from engine_plugin.vllm.rates import LoadPolicy
from engine_plugin.vllm.runs import by_group, group_of, hash_of, runs_of
from engine_plugin.vllm.worth import Block, Worth

#: Requests that may hold an answer at a time. The engine asks for its whole queue, and each answer pins blocks.
ANSWERS_MAX: Final = 64
#: Those of them that may wait for what another engine has promised: the other requests must find a place meanwhile.
PROMISED_MAX: Final = ANSWERS_MAX * 3 // 4
#: How long an answer that nobody waits for is of use.
ASIDE_S: Final = 10.0
#: Copies that a load found damaged or gone; they are not promised again.
DISTRUSTED_MAX: Final = 65_536
#: Steps that an answer waits for the workers to report that they have mapped its pool: reports come with steps, and an
#: engine that had nothing to do while the daemon was restarted has made none.
REPORT_STEPS: Final = 3
#: Steps that a request waits before its engine may rest: most answers come in one or two.
REST_STEPS: Final = 20


class Verdict(enum.IntEnum):
    HIT = 0
    MISS = 1
    RETRY = 2


class _Phase(enum.Enum):
    GATHERING = enum.auto()
    ASKED = enum.auto()
    ANSWERED = enum.auto()
    LOADING = enum.auto()


#: Names of what is needed for each block: looking members up in their classes takes as long as all the rest.
_ANSWERED, _GATHERING, _HIT, _RETRY = _Phase.ANSWERED, _Phase.GATHERING, Verdict.HIT, Verdict.RETRY


@dataclasses.dataclass(slots=True, eq=False)
class _Request:
    phase: _Phase = _Phase.GATHERING
    keys: dict[bytes, None] = dataclasses.field(default_factory=dict)  # in the order in which they were asked for
    query: Query | None = None
    pins: Pins | None = None
    found: dict[bytes, int] = dataclasses.field(default_factory=dict)  # key -> its number among the pins
    refused: bool = False  # ANSWERED without an answer
    asked_step: int = 0
    loading_since: float = 0.0
    loading: int = 0  # bytes
    loading_direct: int = 0  # those of them that are read past the pool
    unwanted: bool = False  # its load is of no use to anybody: it failed, or the request has ended


_WINDOWS: Final = "\0windows"


def _windows_of(req_id: str) -> str:
    """What is asked of a request's windows is a request of its own, which ends with it."""
    return req_id + _WINDOWS


class Lookups:
    """See the module.

    Args:
        ready_generation: Gives the generation that all workers have mapped; None while they differ.
        on_present: Told which keys an answer has shown to be in the daemon, and in which generation of its pool.
        on_absent: Told which keys it has shown not to be there, so that they are stored when they have been computed.
        pin: False for an engine that stores but never loads: everything is a miss, but what is there is learned.
        expect: Gives what another engine has promised of a request's keys.
        apart: Gives what makes other KV of a request's tokens and is not in their keys.
        announced: Told what can be loaded and what cannot.
        drop: Blocks are claimed when they are found, and removed when they are loaded.
        policy: Says whether what is there is faster to load than to compute; None: it always is.
        blocks: What a block of each group is.
        windowed: Groups of which the end of a prefix is needed only, and how many of its blocks; None: there is one
            group, and it is not one of those.
        only_windows: All groups are such.
        end_of: Gives the token of a request at which a key's block ends; needed with `only_windows`.
    """

    def __init__(
        self,
        link: DaemonLink,
        *,
        deadline_s: float,
        now: Callable[[], float],
        ready_generation: Callable[[], bytes | None],
        on_present: Callable[[Sequence[bytes], bytes], None],
        on_absent: Callable[[Sequence[bytes]], None] = lambda _keys: None,
        pin: bool = True,
        expect: Callable[[str, Sequence[bytes]], Expected] = lambda _req_id, _keys: NOTHING_EXPECTED,
        apart: Callable[[str], bytes] = lambda _req_id: b"",
        announced: Announced | None = None,
        drop: bool = False,
        policy: LoadPolicy | None = None,
        blocks: Mapping[int, Block] | None = None,
        windowed: Mapping[int, int] | None = None,
        only_windows: bool = False,
        end_of: Callable[[str, bytes], int | None] = lambda _req_id, _key: None,
    ) -> None:
        self._link = link
        self._worth = Worth(blocks or {}, windowed or {}, end_of)
        self._only_windows = only_windows
        self._windowed = windowed
        self._windows_later = windowed if windowed and not only_windows else None
        self._expect = expect
        self._apart = apart
        self._announced = announced or Announced(on=False)
        self._drops = drop
        self._policy = policy
        self._only_pool: set[str] = set()
        self._deadline_s = deadline_s
        self._now = now
        self._ready_generation = ready_generation
        self._on_present = on_present
        self._on_absent = on_absent
        self._pin = pin
        self._requests: dict[str, _Request] = {}
        self._by_query: dict[Query, str] = {}
        self._asides: dict[Query, Sequence[bytes]] = {}  # questions of no request
        self._gathering: list[str] = []
        self._holders: set[str] = set()  # requests that have asked or hold pins, and whose load has not begun
        self._distrusted: OrderedDict[bytes, tuple[bytes, int, int]] = OrderedDict()
        #: Keys whose blocks could not be read past the pool: the daemon reads them, and finds out what is wrong.
        self._not_direct: OrderedDict[bytes, None] = OrderedDict()
        self._replies_taken = False
        self._early: dict[Query, tuple[Reply, int]] = {}  # answers that wait for workers, and since which step
        self._steps = 0
        self._deferred = ""  # request whose last lookup in this step was deferred
        self.counts: Counter[tuple[str, str]] = Counter()

    # -- the engine asks -----------------------------------------------------------------------------------------------

    def lookup(self, req_id: str, key: bytes) -> Verdict:
        """Whether a block can be loaded. Never waits."""
        if self._windows_later is not None and group_of(key) in self._windows_later:
            return self._lookup_window(req_id, key, self._windows_later[group_of(key)])
        request = self._requests.get(req_id)
        if request is None:
            return self._first(req_id, key)
        # The two that are asked for each block come first.
        phase = request.phase
        if phase is _ANSWERED and key in request.found:
            return _HIT
        if phase is _GATHERING:
            request.keys[key] = None
            return _RETRY
        if phase is _ANSWERED:
            if request.refused or key in request.keys:
                return Verdict.MISS
            # The list has changed (a local prefix was evicted, or tokens were generated): ask for the new one.
            self._drop(req_id, request)
            return self._first(req_id, key)
        if phase is _Phase.ASKED:
            self._take_replies()
            return self._defer(req_id) if request.query is not None else self.lookup(req_id, key)
        return Verdict.MISS  # LOADING: the engine does not ask while a load runs

    def _first(self, req_id: str, key: bytes) -> Verdict:
        problem = self._link.why_not()
        if problem:
            self.counts["misses", problem] += 1
            return Verdict.MISS
        if len(self._holders) >= (PROMISED_MAX if self._expect(req_id, [key]).keys else ANSWERS_MAX):
            return self._defer(req_id)
        self._requests[req_id] = _Request(keys={key: None})
        self._gathering.append(req_id)
        self._holders.add(req_id)
        return Verdict.RETRY

    def _defer(self, req_id: str) -> Verdict:
        """Has the engine ask again in a later step, at the price of two keys instead of the whole prefix: it goes on
        past a RETRY, and stops at a MISS without taking back that it has to ask again. Not so with several groups,
        where a group without any hit is an answer.
        """
        if self._windowed is not None:
            return Verdict.RETRY
        if self._deferred == req_id:
            self._deferred = ""
            return Verdict.MISS
        self._deferred = req_id
        return Verdict.RETRY

    def _lookup_window(self, req_id: str, key: bytes, most: int) -> Verdict:
        """The same in a group of which the end of a prefix is needed only. Where it ends is known when the other groups
        have been answered; then the engine asks from there backwards, and no more than a window of each group goes out.
        """
        request = self._requests.get(req_id)
        if request is not None and request.phase in (_Phase.GATHERING, _Phase.ASKED):
            return Verdict.RETRY
        if request is None or request.phase is _Phase.LOADING or not request.found:
            return Verdict.MISS
        windows = self._requests.get(_windows_of(req_id))
        if windows is None:
            windows = self._requests[_windows_of(req_id)] = _Request()
            self._gathering.append(_windows_of(req_id))
        if windows.phase is _Phase.ASKED:
            self._take_replies()
        if windows.phase is _Phase.ASKED:
            return Verdict.RETRY
        if windows.phase is _Phase.GATHERING:
            group = group_of(key)
            if key in windows.keys or sum(group_of(other) == group for other in windows.keys) < most:
                windows.keys[key] = None
                return Verdict.RETRY
            return Verdict.MISS
        if key not in windows.found or windows.pins is None or request.pins is None:
            return Verdict.MISS
        # The daemon may have been restarted between the two answers.
        return Verdict.HIT if windows.pins.generation == request.pins.generation else Verdict.MISS

    def restrict(self, req_id: str) -> None:
        """A request that has just come does not want to wait for blocks from below the pool."""
        self._only_pool.add(req_id)

    def ask_about(self, keys: Sequence[bytes], apart: bytes = b"") -> None:
        """Asks which keys of a prefix are there, for nobody in particular: nothing is pinned, nobody waits."""
        if self._link.why_not() or len(self._asides) >= ANSWERS_MAX:
            return
        keys = self._prefix(keys)
        if not keys:
            return
        query = Query([hash_of(key, apart) for key in keys], self._now() + ASIDE_S, pin=False)
        self._asides[query] = keys
        self._link.ask([query])

    def _prefix(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Those of the first group of which a prefix is needed from its start."""
        if self._windowed is None:
            return keys
        return next((members for group, members in by_group(keys).items() if group not in self._windowed), [])

    def waiting(self) -> bool:
        """Whether a request waits for an answer."""
        return bool(self._by_query)

    def all_wait(self, alive: Collection[str]) -> bool:
        """Whether each of these requests, and no other, has been waiting for an answer for several steps."""
        if self._early:  # it waits for reports of workers, which come with steps
            return False
        waiting = {req_id.removesuffix(_WINDOWS) for req_id in self._by_query.values()}
        return waiting == set(alive) and all(
            self._steps - self._requests[req_id].asked_step >= REST_STEPS for req_id in self._by_query.values()
        )

    def due(self) -> float:
        """When the first answer is overdue; now, where none is waited for."""
        return min((query.deadline for query in self._by_query), default=0.0)

    def loading(self) -> bool:
        """Whether a request waits for its load."""
        return any(request.phase is _Phase.LOADING for request in self._requests.values())

    def step_end(self, started: Iterable[str], preempted: Iterable[str]) -> None:
        """Ships what the step has gathered; drops answers of requests that have begun to run or were preempted."""
        self._steps += 1
        self._deferred = ""
        self._replies_taken = False
        for req_id in (*started, *preempted):
            request = self._requests.get(req_id)
            if request is not None and request.phase is not _Phase.LOADING:
                self._drop(req_id, request)
        self._take_replies()
        self._replies_taken = False
        self.ask_now()

    def ask_now(self, *, alone: bool = False) -> bool:
        """Ships what the step has gathered so far: the answers can be had in this step. Says whether it ships any. For
        `alone` see Query.
        """
        queries = []
        for req_id in self._gathering:
            request = self._requests.get(req_id)
            if request is None or request.phase is not _Phase.GATHERING:
                continue
            deadline = self._now() + self._deadline_s
            keys = list(request.keys)
            prefix = self._prefix(keys)
            apart = self._apart(req_id.removesuffix(_WINDOWS))
            tokens, whole = self._stake(req_id, keys)
            request.query = Query(
                [hash_of(key, apart) for key in keys],
                deadline,
                self._pin,
                silence_s=self._deadline_s,
                expected=self._expect(req_id, prefix) if prefix else NOTHING_EXPECTED,
                drop=self._drops,
                wait=req_id.removesuffix(_WINDOWS) not in self._only_pool,
                # With several groups a load is put together from several answers, all of which are to be in the pool.
                direct=self._windowed is None and not any(key in self._not_direct for key in keys),
                runs=runs_of(keys, self._windowed) if self._windowed is not None else (),
                tokens=tokens,
                whole=whole,
                alone=alone,
            )
            request.phase, request.asked_step = _Phase.ASKED, self._steps
            self._by_query[request.query] = req_id
            queries.append(request.query)
        self._gathering.clear()
        if queries:
            self._replies_taken = False
            self._link.ask(queries)
        return bool(queries)

    # -- what it is worth ----------------------------------------------------------------------------------------------

    def _stake(self, req_id: str, keys: Sequence[bytes]) -> tuple[int, bool]:
        """Tokens that are computed without the blocks of a query; and whether without any one of them."""
        if req_id.endswith(_WINDOWS):
            prefix = self._requests[req_id.removesuffix(_WINDOWS)]
            return self._worth.tokens(req_id, prefix.keys, prefix.found), True
        return self._worth.tokens(req_id, keys, keys), self._only_windows

    def _is_slow(self, req_id: str, asked: Collection[bytes], found: Collection[bytes]) -> bool:
        """Whether what was found of a request is slower to load than to compute."""
        if self._policy is None or not found or req_id.endswith(_WINDOWS):
            return False  # windows were asked for because the prefix is loaded
        tokens = self._worth.tokens(req_id, asked, found)
        size_bytes = self._worth.size_bytes(found)
        if self._windows_later:
            size_bytes += self._worth.windows_bytes(tokens)
        return not self._policy.loads(size_bytes, tokens)

    # -- the daemon answers --------------------------------------------------------------------------------------------

    def _take_replies(self) -> None:
        """Once per step: takes what has come in, and gives up on what has not come in time."""
        if self._replies_taken:
            return
        self._replies_taken = True
        for reply in [*(reply for reply, _ in self._early.values()), *self._link.replies()]:
            aside = self._asides.pop(reply.query, None)
            if aside is not None:
                if reply.available:
                    self._on_present(aside[: reply.available], reply.generation)
                continue
            req_id = self._by_query.get(reply.query)
            if req_id is not None and not self._too_early(reply):
                self._early.pop(reply.query, None)
                del self._by_query[reply.query]
                self._answer(req_id, self._requests[req_id], reply)
        if not self._by_query:
            return
        now = self._now()
        late = [query for query in self._by_query if query.deadline <= now and query not in self._early]
        for query in late:
            req_id = self._by_query.pop(query)
            self._link.forget(query)
            self._refuse(req_id, self._requests[req_id], "silent")
        if late:
            self._link.note_silence()

    def _too_early(self, reply: Reply) -> bool:
        """Whether the workers may still be about to report that they have mapped the pool that an answer is about."""
        if reply.pins is None or reply.pins.generation == self._ready_generation():
            return False
        _, since = self._early.setdefault(reply.query, (reply, self._steps))
        return self._steps - since < REPORT_STEPS

    def _answer(self, req_id: str, request: _Request, reply: Reply) -> None:
        if reply.query.expected.keys:
            leading = reply.pins.leading if reply.pins is not None else reply.available
            self.counts["pd", "complete" if leading >= reply.query.expected.keys else "incomplete"] += 1
        if reply.problem:
            self._refuse(req_id, request, reply.problem)
            return
        keys = list(request.keys)
        pins = reply.pins
        query = reply.query
        here = keys[: reply.available] if pins is None or pins.places is None else [keys[i] for i in pins.places]
        if here:
            self._on_present(here, reply.generation)
            self._announced.there(here, self._apart(req_id.removesuffix(_WINDOWS)))
        if self._windowed is None and reply.available + reply.late + reply.taken < len(keys):
            for key in keys[reply.available :] if self._not_direct else ():
                self._not_direct.pop(key, None)  # what will be there under this key is another copy
            self._on_absent(keys[reply.available :])
            self._announced.gone(keys[reply.available :])
        if pins is not None and pins.generation != self._ready_generation():
            # The workers have mapped another pool, or none: they could not load this.
            self._link.release([pins])
            self._refuse(req_id, request, "worker_detached")
            return
        found = {key: number for number, key in enumerate(here)} if pins is not None else {}
        if pins is not None and self._distrusted:
            found = self._trusted(found, pins)
        kept = self._without_slow_reads(req_id, found, pins)
        slow, found = len(found) - len(kept), kept
        if self._is_slow(req_id, request.keys, found):
            slow, found = slow + len(found), {}
        if slow:
            self.counts["misses", "slow"] += slow
        ready = len(found)
        if not ready:
            self._holders.discard(req_id)
            if pins is not None:
                self._link.release([pins])
                pins = None
        request.phase = _Phase.ANSWERED
        request.query = None
        request.pins, request.found = pins, found
        self.counts["hits", ""] += ready
        self.counts["misses", reply.why_late] += reply.late
        self.counts["misses", "claimed"] += reply.taken
        self.counts["misses", "absent"] += len(keys) - ready - slow - reply.late - reply.taken
        if (reply.late or query.coming) and query.expected is NOTHING_EXPECTED:
            self.counts["decisions", "wait" if query.coming else "compute_below"] += 1

    def _without_slow_reads(self, req_id: str, found: dict[bytes, int], pins: Pins | None) -> dict[bytes, int]:
        """What was found, without what would have to be read past the pool if that is slower than computing it."""
        if pins is None or not pins.extents or self._policy is None:
            return found
        here = {key: number for key, number in found.items() if number < len(pins.offsets)}
        below = [key for key in found if key not in here]
        tokens = self._worth.tokens(req_id, below, below)
        return found if self._policy.direct_pays(self._worth.size_bytes(below), tokens, pins.below_s) else here

    def _refuse(self, req_id: str, request: _Request, reason: str) -> None:
        self._holders.discard(req_id)
        self.counts["misses", reason] += len(request.keys)
        request.phase = _Phase.ANSWERED
        request.query = request.pins = None
        request.found = {}
        request.refused = True

    def _trusted(self, found: dict[bytes, int], pins: Pins) -> dict[bytes, int]:
        """Those of the keys whose copies have not failed in a load. Of a prefix, what follows one that has is left out
        too: the engine would not ask for it.
        """
        trusted: dict[bytes, int] = {}
        for key, number in found.items():
            bad = self._distrusted.get(key) if number < len(pins.offsets) else None
            if bad is not None and bad == (pins.generation, int(pins.offsets[number]), int(pins.epochs[number])):
                self.counts["misses", "distrusted"] += 1
                if pins.places is None:
                    break
                continue
            if bad is not None:
                del self._distrusted[key]  # stored again since: another copy
            trusted[key] = number
        return trusted

    # -- loads ---------------------------------------------------------------------------------------------------------

    def about_to_load(self, req_id: str) -> LoadPlan | None:
        """Where the blocks lie that were found for a request, which loads them, or those of them that come first, as
        soon as the engine has room for it; None where not all of them are in the pool, or there are several groups.
        """
        request = self._requests.get(req_id)
        if request is None or request.phase is not _ANSWERED or self._windowed is not None:
            return None
        pins = request.pins
        if pins is None or pins.extents:
            return None
        return LoadPlan.of(
            pins.generation, pins.offsets, pins.epochs, (), np.fromiter(request.found.values(), np.int64)
        )

    def prepare_load(self, req_id: str, keys: Collection[bytes]) -> LoadPlan | None:
        """Where the keys lie; None where they are not all pinned for this request. The pins stay until `load_done`."""
        request, windows = self._requests.get(req_id), self._requests.get(_windows_of(req_id))
        if request is None or request.phase is not _Phase.ANSWERED or request.pins is None:
            return None
        found, pins = request.found, request.pins
        offsets, epochs = pins.offsets, pins.epochs
        if windows is not None and windows.pins is not None and windows.pins.generation == pins.generation:
            if pins.extents or windows.pins.extents:  # never asked for, and numbers behind the offsets would clash
                return None
            found = {**found, **{key: len(offsets) + number for key, number in windows.found.items()}}
            offsets = np.concatenate((offsets, windows.pins.offsets))
            epochs = np.concatenate((epochs, windows.pins.epochs))
        numbers = np.fromiter((found.get(key, -1) for key in keys), np.int64, len(keys))
        if len(numbers) and int(numbers.min()) < 0:
            return None
        request.phase = _Phase.LOADING
        request.loading_since, request.loading = self._now(), self._worth.size_bytes(keys)
        self._holders.discard(req_id)
        plan = LoadPlan.of(pins.generation, offsets, epochs, pins.extents, numbers)
        request.loading_direct = self._worth.size_bytes(plan.direct(keys))
        return plan

    def load_done(self, req_id: str, copy_s: float | None = None) -> None:
        """The workers are through with a load, well or badly: gives its pins back, or the blocks away that were claimed
        for it.

        Args:
            copy_s: How long its copies took on the slowest worker; None: not known.
        """
        request = self._requests.get(req_id)
        if request is None or request.phase is not _Phase.LOADING:
            return
        if not request.unwanted and copy_s is not None and self._policy is not None:
            if request.loading_direct:
                self._policy.note_direct(request.loading_direct, copy_s)
            else:
                self._policy.note_load(request.loading, copy_s, self._now() - request.loading_since)
        for key in request.found if self._not_direct and not request.unwanted else ():
            self._not_direct.pop(key, None)  # the daemon has read it, and found nothing wrong
        remove = self._drops and not request.unwanted
        if remove:
            self._announced.gone(request.keys)
        self._drop(req_id, request, remove=remove)

    def load_failed(self, req_id: str) -> None:
        """The load of a request failed: its copies are not promised again until they are stored anew."""
        request = self._requests.get(req_id)
        if request is None or request.phase is not _Phase.LOADING:
            return
        request.unwanted = True
        windows = self._requests.get(_windows_of(req_id))
        for part in (request, windows) if windows is not None else (request,):
            self._announced.gone(part.keys)
            pins = part.pins
            if pins is None:
                continue
            for key, number in part.found.items():
                if number >= len(pins.offsets):
                    self._not_direct[key] = None
                if request.loading_direct:
                    continue  # asked for again they all come from the pool: whether that part was bad is seen then
                self._distrusted[key] = (pins.generation, int(pins.offsets[number]), int(pins.epochs[number]))
                self._distrusted.move_to_end(key)
        for kept in (self._distrusted, self._not_direct):
            while len(kept) > DISTRUSTED_MAX:
                kept.popitem(last=False)

    def is_direct(self, req_id: str) -> bool:
        """Whether a load under way, or its end, is of blocks that are read past the pool."""
        request = self._requests.get(req_id)
        return request is not None and request.loading_direct > 0

    # -- ends ----------------------------------------------------------------------------------------------------------

    def finished(self, req_id: str) -> None:
        """A request has ended. A load that still runs keeps its pins until it is through."""
        self._only_pool.discard(req_id)
        request = self._requests.get(req_id)
        if request is None:
            return
        if request.phase is _Phase.LOADING:
            request.unwanted = True
        else:
            self._drop(req_id, request)

    def reset(self) -> None:
        """Forgets everything and gives every pin back, those of running loads too: the engine will not tell of their
        end. A load that loses its pin under way is told by its epochs and fails.
        """
        while self._requests:
            self._drop(*next(iter(self._requests.items())))
        self._gathering.clear()
        self._asides.clear()
        self._distrusted.clear()
        self._not_direct.clear()
        self._announced.all_gone()

    def _drop(self, req_id: str, request: _Request, *, remove: bool = False) -> None:
        if request.pins is not None:
            self._link.release([request.pins], remove=remove)
        if request.query is not None:
            self._by_query.pop(request.query, None)
            self._link.forget(request.query)
            early = self._early.pop(request.query, None)
            if early is not None and early[0].pins is not None:
                self._link.release([early[0].pins])
        self._holders.discard(req_id)
        request.pins = request.query = None
        del self._requests[req_id]
        windows = self._requests.get(_windows_of(req_id))
        if windows is not None:
            self._drop(_windows_of(req_id), windows)
