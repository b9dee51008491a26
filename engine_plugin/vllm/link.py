"""The scheduler's line to the daemon: one background thread, so that the scheduler thread never waits on anybody.

The scheduler hands in work and collects results; every method but `close` returns at once, and `take_slots` soon. What
the thread does in a turn, in this order, since loads go before stores at every queue:

    flush       a reset of the engine's caches; nothing is promised until it has succeeded
    queries     one Acquire for all that the last step asked (hit and pin in one step), and a claim for each where
                blocks are taken away; the slots that the misses will need are reserved before the answer is given, so
                that the stores of the very next step find them (after it, where the engine waits for nothing else)
    coming      queries whose blocks are being brought up from disk are asked again when it is time
    commits     one call per store, in prefix order
    aborts      slots back, also those whose commit got no answer
    releases    pins back, and blocks away that were claimed and loaded
    stock       empty slots topped up, or returned when nothing was stored for a while or the daemon is stopping
    questions   which keys are there, for nobody who waits

Knows nothing of vLLM.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from engine_plugin.vllm.calls import Calls
from engine_plugin.vllm.coming import NOTHING_EXPECTED, Coming, Grant, Pins, Query, Reply
from engine_plugin.vllm.guard import limited_log
from engine_plugin.vllm.rates import LoadPolicy
from engine_plugin.vllm.runs import gather, split
from engine_plugin.vllm.stock import Slots, SlotStock

log = logging.getLogger("vllm.kvstore")

#: After a verdict that did not come in time, lookups are misses for this long before the next one may try.
BREAK_S: Final = 1.0
#: Turns come at least this often, for what has to be tried again.
_TICK_S: Final = 0.5
_KEYS_PER_CALL_MAX: Final = 16_384


@dataclasses.dataclass(slots=True)
class Commit:
    """Filled slots to be published under keys that follow one another."""

    slots: Slots
    hashes: Sequence[bytes]
    parent: bytes | None
    kv_group: int = 0
    done: Callable[[np.ndarray], None] | None = None


#: Keys, and what is called with which of them are there; with None where there is no answer.
Question = tuple[Sequence[bytes], Callable[[list[bool] | None], None]]


@dataclasses.dataclass(slots=True)
class _Work:
    flush: bool = False
    queries: list[Query] = dataclasses.field(default_factory=list)
    commits: list[Commit] = dataclasses.field(default_factory=list)
    aborts: list[Slots] = dataclasses.field(default_factory=list)
    releases: list[Grant] = dataclasses.field(default_factory=list)
    removals: list[Grant] = dataclasses.field(default_factory=list)
    questions: list[Question] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        lists = self.queries, self.commits, self.aborts, self.releases, self.removals, self.questions
        return self.flush or any(lists)


class DaemonLink:
    """See the module.

    Threads: all methods are for the scheduler thread, but `turn` and what it calls, which is the link's own thread.
    `_lock` guards the fields that both touch.

    Args:
        client: This process's session with the daemon; owned and closed by the link.
        stock_max: Most empty slots held in reserve.
        coming_s: Longest time that a query waits for blocks that are being brought up from disk.
        policy: Says how long they are worth waiting for, and learns how long they take; None: as long as that.
        extents_min: Gives how many blocks on the disk are worth reading past the pool; 0: none are.
        threaded: False: there is no thread, and `turn` is called by a test.
    """

    def __init__(
        self,
        client: Any,
        *,
        stock_max: int,
        coming_s: float = 5.0,
        policy: LoadPolicy | None = None,
        extents_min: Callable[[], int] = lambda: 0,
        now: Callable[[], float] = time.monotonic,
        threaded: bool = True,
    ) -> None:
        self._client = client
        self._coming_s = coming_s
        self._policy = policy
        self._extents_min = extents_min
        self._now = now
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._answered = threading.Event()
        self._work = _Work()
        self._retry: list[Slots] = []  # owned by the thread: aborts that got no answer
        self._retry_releases: list[Grant] = []  # likewise
        self._retry_removals: list[Grant] = []  # likewise
        self._coming: list[Coming] = []  # likewise
        self._replies: list[Reply] = []
        self._stock = SlotStock(stock_max, now)
        self._broken_until = 0.0
        self._flushes_wanted = 0
        self._flushes_done = 0
        self._stop = False
        self._was_attached: bool | None = None
        self._calls = Calls()
        self._thread = threading.Thread(target=self._run, name="kvstore-link", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    # -- scheduler thread ----------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether the daemon knows this engine now."""
        return bool(self._client.attached)

    def why_not(self) -> str:
        """Why no lookup can be asked now; empty if it can."""
        if not self._client.attached:
            return "unavailable"
        if self._flushes_done != self._flushes_wanted:
            return "flushing"
        return "silent" if self._now() < self._broken_until else ""

    def ask(self, queries: list[Query]) -> None:
        """Ships the questions of a step as one batch. Each gets one reply, unless it is forgotten before."""
        with self._lock:
            self._work.queries += queries
            self._wake.notify()

    def replies(self) -> list[Reply]:
        """Takes the replies that have come in."""
        with self._lock:
            self._answered.clear()
            found, self._replies = self._replies, []
        return found

    def wait_answer(self, timeout_s: float) -> bool:
        """Gives the interpreter to other threads until a reply has come in or a very short time is over. Returns
        whether one is in.
        """
        return self._answered.wait(timeout_s)

    def note_silence(self) -> None:
        """A reply did not come in time: answer misses for a while instead of waiting again."""
        self._broken_until = self._now() + BREAK_S

    def take_slots(self, count: int) -> Slots:
        """Takes up to `count` empty slots from the stock, for which it waits a moment where they are on their way; the
        thread tops it up behind.
        """
        slots = self._stock.take(count)
        with self._lock:
            self._wake.notify()
        return slots

    def need_not(self, count: int) -> None:
        """So many slots, of those that misses have announced, will not be taken."""
        self._stock.announce(-count)

    def set_busy(self, busy: bool) -> None:
        """Whether the engine has requests, which may store."""
        self._stock.set_busy(busy)

    def commit(self, commit: Commit) -> None:
        """Publishes filled slots behind."""
        with self._lock:
            self._work.commits.append(commit)
            self._wake.notify()

    def abort(self, slots: Slots) -> None:
        """Returns slots behind. No worker may still write into them."""
        if len(slots):
            with self._lock:
                self._work.aborts.append(slots)
                self._wake.notify()

    def release(self, pins: Iterable[Pins], *, remove: bool = False) -> None:
        """Gives pins back behind; with `remove`, claimed blocks leave every tier."""
        pins = list(pins)
        with self._lock:
            for each in pins:
                (self._work.removals if remove and each.claimed else self._work.releases).extend(each.leases)
            self._wake.notify()

    def forget(self, query: Query) -> None:
        """Nobody waits for the answer any more: what is pinned for it is given back behind, now or when it comes in."""
        with self._lock:
            query.wanted = False
            here, self._replies = self._replies, []
            for reply in here:
                self._keep(reply)
            self._wake.notify()

    def flush(self) -> None:
        """Forgets every block of the namespace, and what waits to be published. Until that has succeeded nothing can
        be asked.
        """
        with self._lock:
            self._work.aborts += [commit.slots for commit in self._work.commits]
            self._work.commits.clear()
            self._work.flush = True
            self._flushes_wanted += 1
            self._wake.notify()

    def ask_whether_there(self, keys: Sequence[bytes], then: Callable[[list[bool] | None], None]) -> None:
        """Asks behind which keys are there, in any order; `then` is called on the link's thread, once."""
        with self._lock:
            self._work.questions.append((keys, then))
            self._wake.notify()

    def take_counts(self) -> Counter[tuple[str, str]]:
        """Events since the last call."""
        return self._calls.take_counts()

    def close(self, timeout_s: float = 3.0) -> None:
        """Gives everything back and detaches. Bounded; what could not be given back goes with the session."""
        with self._lock:
            self._stop = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
        else:
            self.turn()
        with contextlib.suppress(Exception):
            self._client.close()

    # -- the link's own thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        over = False
        while not over:
            with self._lock:
                pause = self._pause_s()
                if not (self._work or self._stop or pause <= 0):
                    self._wake.wait(pause)
            try:
                over = self.turn()
            except Exception:  # a defect here must not end the thread: misses would never end
                over = self._stop
                limited_log("link turn", logging.ERROR, "kvstore: the link's turn failed", exc_info=True)

    def _pause_s(self) -> float:
        """How long until there may be something to do."""
        pauses = [_TICK_S]
        stock = self._stock.pause_s() if self._client.attached and not self._client.draining else None
        if stock is not None:
            pauses.append(stock)
        if self._coming:
            now = self._now()
            pauses += [coming.due - now if coming.query.wanted else 0.0 for coming in self._coming]
        return min(pauses)

    def turn(self) -> bool:
        """Does what has been handed in so far. Returns whether it was the last turn."""
        with self._lock:
            work, self._work = self._work, _Work()
            stop = self._stop
            flushes = self._flushes_wanted
        self._note_attachment()
        if self._flushes_done != flushes and not self._calls.call("flush", self._client.flush)[1]:
            self._flushes_done = flushes  # else the next turn tries again; nothing is promised until it has worked
        if work.queries:
            work.releases += self._do_queries(work.queries)
        if self._coming:
            work.releases += self._do_coming(stop)
        for commit in work.commits:
            self._do_commit(commit)
        unused = self._stock.surplus(all_of_it=stop or self._client.draining)  # a stopping daemon waits for them
        if len(unused):
            work.aborts.append(unused)
        aborts, self._retry = self._retry + work.aborts, []
        for slots in aborts:
            self._do_abort(slots)
        releases, self._retry_releases = self._retry_releases + work.releases, []
        removals, self._retry_removals = self._retry_removals + work.removals, []
        self._retry_releases = self._do_release(releases, remove=False)
        self._retry_removals = self._do_release(removals, remove=True)
        if not stop:
            self._do_stock()
        for keys, then in work.questions:
            able = self._client.attached and not stop
            then(self._calls.call("present", self._client.present, keys)[0] if able else None)
        return stop

    def _note_attachment(self) -> None:
        attached = bool(self._client.attached)
        if attached != self._was_attached:
            if attached:
                log.info("kvstore: attached to the daemon")
            elif self._was_attached:
                log.warning("kvstore: the daemon is gone; going on without the cache until it is back")
            self._was_attached = attached

    def _do_queries(self, queries: list[Query]) -> list[Grant]:
        """Returns leases that are not needed."""
        now = self._now()
        wanted = [query for query in queries if query.wanted and query.deadline > now]
        self._answer([Reply(query, problem="expired") for query in queries if query.wanted and query.deadline <= now])
        replies = []
        pinned = [query for query in wanted if query.pin]
        least = self._extents_min() if any(map(_may_be_direct, pinned)) else 0
        answers = self._acquire(pinned, [query.hashes for query in pinned], least)
        for query, (lease, problem) in zip(pinned, answers, strict=True):
            pins = Pins.of(lease) if lease is not None else None
            expected = lease is not None and query.expected.still(pins.leading if pins is not None else 0, self._now())
            worth_s = self._worth_s(query, lease) if lease is not None and lease.pending else 0.0
            patience_s = min(self._coming_s, worth_s)
            if lease is not None and (expected or patience_s > 0):
                query.deadline = self._now() + query.silence_s
                query.coming = True
                query.alone = False  # others may come meanwhile, whose stores would wait
                self._coming.append(self._begin_waiting(query, lease, patience_s, worth_s))
            elif lease is not None:
                why = "slow" if query.wait else "not_allowed"
                replies.append(Reply.of(query, pins, problem, lease.pending, why))
            else:
                replies.append(Reply.of(query, None, problem))
        for query in wanted:
            if not query.pin:
                generation = self._client.generation or b""
                first_run = query.hashes[: query.runs[0]] if query.runs else query.hashes
                available, problem = self._calls.call("lookup", self._client.lookup, first_run)
                replies.append(Reply(query, None, int(available or 0), generation, problem))
        unneeded = self._claim(replies)
        self._answer_with_slots(replies)
        return unneeded

    def _begin_waiting(self, query: Query, lease: Grant, patience_s: float, worth_s: float) -> Coming:
        first_s = self._policy.first_s(lease.pending, lease.below_s) if self._policy is not None else 0.0
        return Coming(query, lease, self._now(), patience_s, worth_s or math.inf, first_s)

    def _worth_s(self, query: Query, lease: Grant) -> float:
        """How long blocks that are on their way are worth waiting for: what they take to compute; 0: not at all."""
        if not query.wait:
            return 0.0
        if self._policy is None:
            return math.inf
        return self._policy.wait_s(lease.pending_from, lease.pending, query.at_stake(lease.pending), lease.below_s)

    def _claim(self, replies: list[Reply]) -> list[Grant]:
        """Makes claims of pins, where that is wanted: what another engine has claimed is not there for this one.
        Returns the leases that are not needed any more.
        """
        unneeded: list[Grant] = []
        for reply in replies:
            pins = reply.pins
            if pins is None or not reply.query.drop:
                continue
            # The pins are held until the claim is made, so that nothing leaves in between.
            lease, problem = self._calls.call(
                "claim", self._client.claim, reply.query.hashes[: reply.available], kv_group=reply.query.kv_group
            )
            unneeded += pins.leases
            if lease is not None and lease.generation != pins.generation:
                unneeded.append(lease)
                lease, problem = None, "stale"
            reply.pins = Pins.of(lease, claimed=True) if lease is not None else None
            reply.problem = problem
            claimed = len(reply.pins.offsets) if reply.pins is not None else 0
            reply.taken, reply.available = reply.available - claimed, claimed
        return unneeded

    def _do_coming(self, stop: bool) -> list[Grant]:
        """Asks again where it is time, and answers where there is nothing more to wait for. Returns leases that are not
        needed.
        """
        now = self._now()
        due = [] if stop else [coming for coming in self._coming if coming.query.wanted and coming.due <= now]
        answers = self._acquire([coming.query for coming in due], [coming.rest() for coming in due])
        now = self._now()
        unneeded: list[Grant] = []
        for coming, (lease, problem) in zip(due, answers, strict=True):
            if lease is not None:
                unneeded += coming.take(lease, now)
                coming.query.deadline = now + coming.query.silence_s
            else:
                coming.fail(problem)
        replies = []
        kept = []
        for coming in self._coming:
            if stop or not coming.query.wanted:
                unneeded += coming.pins.leases if coming.pins is not None else ()
            elif coming.over(now):
                if self._policy is not None and not coming.problem and coming.query.expected is NOTHING_EXPECTED:
                    self._policy.note_coming(coming.tier, coming.gained(), coming.waited_s(now))
                replies.append(Reply.of(coming.query, coming.pins, coming.problem, coming.pending))
            else:
                kept.append(coming)
        self._coming = kept
        unneeded += self._claim(replies)
        self._answer_with_slots(replies)
        return unneeded

    def _acquire(
        self, queries: list[Query], hashes: list[Sequence[bytes]], extents_min: int = 0
    ) -> list[tuple[Grant | None, str]]:
        """Acquires in as few calls as their size allows: a lease or a problem for each query."""
        answers: list[tuple[Grant | None, str]] = []
        while len(answers) < len(queries):
            first = len(answers)
            asked: list[tuple[int, Sequence[bytes]]] = []
            parts: list[int] = []  # of each query in this call: how many runs
            least: list[int] = []  # of each run, see Client.acquire
            keys = 0
            for query, wanted in zip(queries[first:], hashes[first:], strict=True):
                keys += len(wanted)
                if parts and keys > _KEYS_PER_CALL_MAX:
                    break
                runs = split(wanted, query.runs) if query.runs else [wanted]
                asked += [(query.kv_group, run) for run in runs]
                least += [extents_min if _may_be_direct(query) else 0] * len(runs)
                parts.append(len(runs))
            token_s = self._policy.token_s if self._policy is not None else 0.0
            leases, problem = self._calls.call(
                "acquire", self._client.acquire, asked, extents_min=least, token_s=token_s
            )
            if problem:
                answers += [(None, problem)] * len(parts)
                continue
            if self._policy is not None:
                self._policy.note_told(leases[0].token_s)
            for query, count in zip(queries[first:], parts, strict=False):
                taken, leases = leases[:count], leases[count:]
                answers.append((gather(taken, query.runs) if query.runs else taken[0], ""))
        return answers

    def _answer_with_slots(self, replies: list[Reply]) -> None:
        """Answers, once the slots are reserved that the stores of what is missing will need, or before, where nobody
        else is kept waiting if a store has to wait for them.
        """
        missing = sum(len(reply.query.hashes) - reply.available for reply in replies if not reply.problem)
        if missing:
            self._stock.announce(missing)
            if all(reply.query.alone for reply in replies):
                with self._stock.on_their_way():
                    self._answer(replies)
                    self._do_stock()
                return
            self._do_stock()
        self._answer(replies)

    def _answer(self, replies: list[Reply]) -> None:
        if replies:
            if not all(reply.problem for reply in replies):
                self._broken_until = 0.0
            with self._lock:
                for reply in replies:
                    self._keep(reply)
                self._answered.set()

    def _keep(self, reply: Reply) -> None:
        """With the lock: keeps a reply for who waits for it; nobody else would take it."""
        if reply.query.wanted:
            self._replies.append(reply)
        elif reply.pins is not None:
            self._work.releases += reply.pins.leases

    def _do_commit(self, commit: Commit) -> None:
        slots = commit.slots
        outcomes, problem = self._calls.call(
            "commit",
            self._client.commit,
            slots.generation,
            slots.offsets,
            commit.hashes,
            kv_group=commit.kv_group,
            parent=commit.parent,
            epochs=slots.epochs,
        )
        if problem:
            if commit.done is not None:
                commit.done(np.zeros(len(slots), np.uint8))
            self._calls.count("not_published", problem, len(slots))
            if problem != "stale":
                # It may have been done: the daemon ignores an abort of what is published, and by their epochs one of
                # slots that it has handed out anew.
                self._retry.append(slots)
        elif commit.done is not None:
            commit.done(outcomes)
        if not problem:
            stored, exists = int((outcomes == 1).sum()), int((outcomes == 2).sum())
            self._calls.count("published", "stored", stored)
            self._calls.count("published", "exists", exists)
            self._calls.count("not_published", "not_reserved", len(outcomes) - stored - exists)

    def _do_abort(self, slots: Slots) -> None:
        if slots.generation != self._client.generation:
            return  # the pool is gone, or the session is: then the daemon takes them back itself
        problem = self._calls.call("abort", self._client.abort, slots.generation, slots.offsets, slots.epochs)[1]
        if problem in ("deadline", "draining"):
            self._retry.append(slots)

    def _do_release(self, leases: list[Grant], *, remove: bool) -> list[Grant]:
        """Returns those that are to be tried again."""
        if not leases:
            return []
        problem = self._calls.call("release", self._client.release, leases, remove=remove)[1]
        return leases if problem in ("deadline", "draining") else []

    def _do_stock(self) -> None:
        generation = self._client.generation
        if not self._client.attached or generation is None or self._client.draining:
            return
        self._stock.settle(generation)
        count = self._stock.lacks()
        if not count:
            return
        reservation, problem = self._calls.call("reserve", self._client.reserve, count)
        if problem:
            self._stock.fill(count, None)
            return
        slots = Slots(reservation.generation, reservation.offsets, reservation.epochs)
        self._stock.fill(count, slots, populating=reservation.shortfall == "populating")
        self._calls.count("shortfall", str(reservation.shortfall), count - len(slots))


def _may_be_direct(query: Query) -> bool:
    """Whether what a query finds on the disk may be read past the pool: only where it is all that there is to ask."""
    return query.direct and query.wait and not query.drop and not query.runs and query.expected is NOTHING_EXPECTED
