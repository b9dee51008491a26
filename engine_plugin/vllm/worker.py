"""vLLM's OffloadingWorker: plans the copies of one rank between KV memory and the pool.

A load is good only if the pool is still the one that was pinned and, after the copy, every slot still has the epoch it
was pinned with. The mapping stays valid when the daemon dies, so that a copy under way ends with right bytes.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Any, Final

import numpy as np
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from engine_plugin.copy.contract import Copy, CopyEngine, Fragments
from engine_plugin.copy.reads import DirectRead
from engine_plugin.vllm.acks import AckSender
from engine_plugin.vllm.direct import Opening
from engine_plugin.vllm.far import FarCopies, FarCopy
from engine_plugin.vllm.guard import guarded, limited_log, note_failure, nothing
from engine_plugin.vllm.layout import RankLayout, copies_of
from engine_plugin.vllm.messages import SlotSpec, WorkerReport, no_slots
from kvstore.errors import Damage, RetryLater, StaleGeneration
from kvstore.remote import RemoteArena

#: Lost stores that are remembered, in case they are asked for after all. They come in order, and late by a few steps.
_GIVEN_UP_MAX: Final = 4096
#: Stands for the places of blocks that are not in the pool, which no pool reaches.
_BEYOND: Final = np.uint64(1 << 62)
#: Steps in which a load that has ended well is left to a scheduler that asks between steps: it does so after the step
#: that sees the end, or, where the load began in that one, after the next.
_HELD_MAX: Final = 2


@dataclasses.dataclass(slots=True)
class _Outcome:
    job_id: int
    spec: SlotSpec
    is_load: bool
    problem: str
    size_bytes: int
    time_s: float
    held: int = 0  # how often it was left to who asks between steps

    @property
    def is_good_load(self) -> bool:
        return self.is_load and not self.problem


class _Together:
    """Several copies that are one job: it is over when all of them are, and as good as the worst of them.

    Threads: `over` on whichever the engine has.
    """

    def __init__(self, over: Callable[[float, BaseException | None], None]) -> None:
        self._over = over
        self._lock = threading.Lock()
        self._left = 1  # the caller's own, until all are begun
        self._seconds = 0.0
        self._error: BaseException | None = None

    def one_more(self) -> None:
        """Another copy is about to begin."""
        with self._lock:
            self._left += 1

    def over(self, seconds: float, error: BaseException | None) -> None:
        """One of them is over."""
        with self._lock:
            self._left -= 1
            self._seconds += seconds
            self._error = self._error or error
            if self._left:
                return
        self._over(self._seconds, self._error)


class KVStoreWorker(OffloadingWorker):
    """See the module. One per rank.

    Threads: vLLM calls from one thread; copies may end on a thread of the engine's, which only puts into `_finished`.

    Args:
        client: This process's session with the daemon; owned and closed here.
        engine: Moves the bytes; owned and closed here.
        direct: Reads blocks on the disk past the pool, where it can; likewise.
    """

    def __init__(
        self,
        layout: RankLayout,
        *,
        client: Any,
        engine: CopyEngine,
        rank: int,
        direct: Opening,
    ) -> None:
        self._layout = layout
        self._client = client
        self._engine = engine
        self._far = FarCopies(engine)
        self._direct = direct
        self._rank = rank
        self._under_way: dict[int, Copy] = {}
        self._far_under_way: dict[int, FarCopy] = {}
        self._direct_under_way: dict[int, DirectRead] = {}
        self._finished: deque[_Outcome] = deque()
        self._tickets: dict[int, int] = {}  # of stores that were begun and are not reported, by job
        self._given_up: dict[int, None] = {}  # tickets that the scheduler counts as lost, oldest first
        self._acks = AckSender()
        self._last_attached: bytes | None = None
        self._moved: Counter[str] = Counter()
        self._read_direct: tuple[Any, int] = (None, 0)
        self._last_registered = (0, "")
        self._report = WorkerReport()
        self._failed_loads: set[str] = set()
        self.hook_errors: Counter[str] = Counter()
        #: The model computes in the step that asks for copies; set by the connector.
        self.beside_compute = False
        #: Both set by the connector: `get_finished` leaves loads that have ended well, for a few times, to who asks
        #: between steps; and who does wants nothing else.
        self.holds_good_loads = False
        self.only_good_loads = False
        self._loads: set[int] = set()  # jobs that are not reported
        self._expected: SlotSpec | None = None

    # -- vLLM's interface ----------------------------------------------------------------------------------------------

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, SlotSpec)
        self._tickets[job_id] = dst_spec.ticket
        if dst_spec.ticket in self._given_up:
            dst_spec = no_slots()
        self._submit(job_id, src_spec, dst_spec, is_load=False)
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        self._loads.add(job_id)
        self._submit(job_id, dst_spec, src_spec, is_load=True)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Every job that is over. Success is always said: vLLM takes a failure here as a defect of its own. What
        failed is told through `take_failed_loads` and `take_report`.
        """
        self._poll()
        if not self.only_good_loads:
            self._expect(None)  # its load would have come with this step
        results = []
        left: deque[_Outcome] = deque()
        while self._finished:
            outcome = self._finished.popleft()
            if self._leaves(outcome):
                left.appendleft(outcome)
                continue
            self._loads.discard(outcome.job_id)
            self._under_way.pop(outcome.job_id, None)
            self._tickets.pop(outcome.job_id, None)
            self._far_under_way.pop(outcome.job_id, None)
            self._direct_under_way.pop(outcome.job_id, None)
            self._note(outcome)
            size, seconds = (None, None) if outcome.problem else (outcome.size_bytes, outcome.time_s)
            results.append(TransferResult(outcome.job_id, True, size, seconds))
        self._finished.extendleft(left)
        return results

    def _leaves(self, outcome: _Outcome) -> bool:
        """Whether `get_finished` tells of it another time."""
        if self.only_good_loads:
            return not outcome.is_good_load
        if self.holds_good_loads and outcome.is_good_load and outcome.held < _HELD_MAX:
            outcome.held += 1
            return True
        return False

    def _poll(self) -> None:
        self._engine.poll()
        self._far.poll()
        self._direct.poll()

    @guarded(nothing)
    def wait(self, job_ids: set[int]) -> None:
        self._engine.wait([self._under_way[job_id] for job_id in job_ids if job_id in self._under_way])
        self._far.wait([self._far_under_way[job_id] for job_id in job_ids if job_id in self._far_under_way])
        self._direct.wait([self._direct_under_way[job_id] for job_id in job_ids if job_id in self._direct_under_way])

    @guarded(nothing)
    def finish(self) -> None:
        """Returns once no copy touches KV memory any more."""
        self._engine.wait(list(self._under_way.values()))
        self._far.wait(list(self._far_under_way.values()))
        self._direct.wait(list(self._direct_under_way.values()))

    def shutdown(self) -> None:
        # Each by itself: whatever one leaves behind, the session's end gives back what this worker holds.
        for owned in (self._direct, self._far, self._engine, self._acks, self._client):
            try:
                owned.close()
            except Exception:
                note_failure(self, "shutdown")

    def asked_about(self, tickets: Collection[int]) -> None:
        """The scheduler has not heard of these stores for long. What is neither under way nor about to be reported will
        not be begun either, whatever has become of it.
        """
        for ticket in set(tickets).difference(self._tickets.values(), self._report.stores_done):
            self._given_up[ticket] = None
            self._report.stores_done[ticket] = {self._rank}
            self._report.stores_lost[ticket] = {self._rank}
        while len(self._given_up) > _GIVEN_UP_MAX:
            del self._given_up[next(iter(self._given_up))]

    # -- for the connector ---------------------------------------------------------------------------------------------

    def take_failed_loads(self) -> set[str]:
        """Requests whose load failed, among the jobs that `get_finished` has told since the last call."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def expect_load(self, spec: SlotSpec) -> None:
        """A load of these slots, or of the first of them, comes with the step that is being made, if nothing comes
        between: begins to read, where the load will read whole slots.
        """
        arena, layout = self._client.arena, self._layout
        if (
            arena is None
            or isinstance(arena, RemoteArena)
            or arena.generation != spec.generation
            or spec.format != layout.format
            or spec.extents
            or len(layout.groups) > 1
            or int(layout.groups[0].size.sum()) != layout.format.kv_block_bytes
            or not len(spec.offsets)
            or int(spec.offsets.max()) + layout.format.slot_bytes > arena.size_bytes
        ):
            return
        self._expect(None)
        self._expected = spec
        self._engine.use_pool(arena)
        starts = spec.offsets.astype(np.uint64, copy=False) + np.uint64(arena.address + layout.part)
        self._engine.expect_load(starts, layout.format.part_bytes)

    def _expect(self, spec: SlotSpec | None) -> None:
        """What was read is used by a load that begins with the same slots in the same epochs only: where these still
        have them when it ends, nothing has been written to them since before it was read.
        """
        if self._expected is None or spec is None or not _begin_alike(self._expected, spec):
            self._engine.expect_nothing()
            self._expected = None

    @property
    def loading(self) -> bool:
        """Whether loads are under way or not reported."""
        return bool(self._loads)

    def good_load_ended(self) -> bool:
        """Whether `get_finished` would tell of a load that has ended well."""
        self._poll()
        return any(outcome.is_good_load for outcome in list(self._finished))

    def take_loads_done(self) -> WorkerReport:
        """The part of the report that is about loads which have ended well."""
        done, self._report.loads_done = self._report.loads_done, {}
        return WorkerReport(loads_done=done)

    def take_report(self) -> WorkerReport:
        """What the scheduler should know since the last call; empty where nothing has changed."""
        arena = self._client.arena if self._client.attached else None
        attached = arena.generation if arena is not None else b""
        # Registration begins before the first copy, and a mapping whose daemon is gone is let go of.
        self._engine.use_pool(arena.staging if isinstance(arena, RemoteArena) else arena)
        if attached != self._last_attached:
            self._last_attached = attached
            self._report.attached[self._rank] = attached
        self._report.hook_errors.update(self.hook_errors)
        self.hook_errors.clear()
        self._report_copies()
        self._report_direct()
        report, self._report = self._report, WorkerReport()
        return report

    def _report_copies(self) -> None:
        """What the copy engine did since the last call, and how far the pool is registered."""
        stats = self._engine.stats()
        moved = Counter(stats.bytes_by_path) - self._moved
        self._moved = Counter(stats.bytes_by_path)
        self._report.copied_bytes.update(moved)
        registered = (stats.registered_bytes, stats.register_error)
        if registered != self._last_registered:
            self._last_registered = registered
            self._report.registered[self._rank] = registered

    def _report_direct(self) -> None:
        """Whether blocks on the disk can be read past the pool, and what was read so since the last call."""
        # On another host there is nothing to read.
        news = self._direct.settle(self._client.gds) if not isinstance(self._client.arena, RemoteArena) else None
        if news is not None:
            self._report.gds[self._rank] = news
        reads = self._direct.reads
        if reads is not None:
            (reader, before), self._read_direct = self._read_direct, (reads, reads.read_bytes)
            read_bytes = self._read_direct[1] - (before if reader is reads else 0)
            if read_bytes:
                self._report.copied_bytes[reads.how] = read_bytes

    # -- copies --------------------------------------------------------------------------------------------------------

    def _submit(self, job_id: int, kv_spec: GPULoadStoreSpec, slot_spec: LoadStoreSpec, *, is_load: bool) -> None:
        assert isinstance(slot_spec, SlotSpec)
        try:
            problem = self._start(job_id, kv_spec, slot_spec, is_load)
        except Exception:
            self.hook_errors["submit_load" if is_load else "submit_store"] += 1
            limited_log("submit", logging.ERROR, "kvstore: a copy could not be started", exc_info=True)
            problem = "error"
        if problem:
            self._finished.append(_Outcome(job_id, slot_spec, is_load, problem, 0, 0.0))

    def _start(self, job_id: int, kv_spec: GPULoadStoreSpec, spec: SlotSpec, is_load: bool) -> str:
        """Starts a copy; says why where it cannot."""
        arena = self._client.arena
        if not spec.generation:
            return "not_pinned"
        if arena is None:
            return "worker_detached"
        if arena.generation != spec.generation:
            return "generation"
        if spec.format != self._layout.format:
            return "layout"
        if not len(spec.offsets) and not len(kv_spec.block_ids):
            self._finished.append(_Outcome(job_id, spec, is_load, "", 0, 0.0))
            return ""
        if spec.extents and self._direct.reads is None:
            return "no_gds"
        is_far = isinstance(arena, RemoteArena)

        def over(seconds: float, error: BaseException | None) -> None:
            problem = "error"  # whatever happens here, the job is over: its request would wait for ever
            try:
                if isinstance(error, Damage):
                    problem = "damaged"
                    limited_log("damage", logging.WARNING, "kvstore: %s", error)
                elif isinstance(error, RetryLater):
                    problem = "epoch" if isinstance(error, StaleGeneration) else "transfer"
                elif error is not None:
                    limited_log("copy", logging.ERROR, "kvstore: a copy failed: %r", error)
                elif spec.extents and self._client.arena is not arena:
                    problem = "generation"  # the lease went with the daemon
                else:
                    # From another host the bytes came checked.
                    problem = "epoch" if is_load and not is_far and not self._still_pinned(arena, spec) else ""
            except Exception:  # raised further, it would end the engine
                self.hook_errors["copy_over"] += 1
                limited_log("over", logging.ERROR, "kvstore: the end of a copy could not be judged", exc_info=True)
            self._finished.append(_Outcome(job_id, spec, is_load, problem, size_bytes, seconds))
            if spec.acks is not None:
                self._acks.send(spec.acks, spec.ticket, self._rank, not problem)

        size_bytes = 0
        job = (
            kv_spec.block_ids,
            list(kv_spec.group_sizes),
            list(kv_spec.block_indices),
            self._slots_of(spec),
        )
        if isinstance(arena, RemoteArena):
            kv, pool, size = copies_of(self._layout, *job, is_load=is_load)
            if not len(size):  # other ranks hold these bytes too, and it is their turn
                over(0.0, None)
                return ""
            size_bytes = int(size.sum())
            slots = job[-1], spec.epochs
            self._far_under_way[job_id] = self._far.begin(arena, slots, (kv, pool, size), over, is_load=is_load)
            return ""
        if len(spec.offsets) and int(spec.offsets.max()) + self._layout.format.slot_bytes > arena.size_bytes:
            raise ValueError("a slot lies outside of the pool")
        self._engine.use_pool(arena)
        if is_load:
            self._expect(spec)
        begin = self._engine.load if is_load else self._engine.store
        kv, pool, size = copies_of(self._layout, *job, is_load=is_load)
        size_bytes = int(size.sum())
        together = _Together(over)
        problem: BaseException | None = None
        try:
            if spec.extents:
                kv, pool, size = self._begin_direct(job_id, spec, (kv, pool, size), together)
            if len(size):
                pool = pool + np.uint64(arena.address)
                fragments = Fragments(*(np.ascontiguousarray(array, np.uint64) for array in (kv, pool, size)))
                together.one_more()
                try:
                    copy = begin(fragments, together.over, beside_compute=self.beside_compute)
                except BaseException as error:
                    together.over(0.0, error)  # nothing was begun
                    raise
                self._under_way[job_id] = copy
        except Exception as error:
            if job_id not in self._direct_under_way:
                raise
            problem = error  # what was begun still writes: the job ends with it
        together.over(0.0, problem)
        return ""

    @staticmethod
    def _slots_of(spec: SlotSpec) -> np.ndarray:
        """Where the blocks of a job begin: in the pool, and for those on the disk one after the other beyond it."""
        slots = spec.offsets.astype(np.uint64, copy=False)
        if spec.extents:
            assert spec.format is not None
            beyond = np.array([extent is not None for extent in spec.extents], bool)
            slots = slots.copy()
            slots[beyond] = _BEYOND + np.arange(beyond.sum(), dtype=np.uint64) * np.uint64(spec.format.slot_bytes)
        return slots

    def _begin_direct(
        self, job_id: int, spec: SlotSpec, fragments: tuple[np.ndarray, np.ndarray, np.ndarray], together: _Together
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Begins the part of a load that is read past the pool. Returns the fragments of the rest."""
        kv, pool, size = fragments
        on_disk = pool >= _BEYOND
        extents = [extent for extent in spec.extents if extent is not None]
        together.one_more()
        try:
            self._direct_under_way[job_id] = self._direct.reads.begin(
                extents, Fragments(kv[on_disk], pool[on_disk] - _BEYOND, size[on_disk]), together.over
            )
        except BaseException as error:
            together.over(0.0, error)  # nothing was begun
            raise
        return kv[~on_disk], pool[~on_disk], size[~on_disk]

    @staticmethod
    def _still_pinned(arena: Any, spec: SlotSpec) -> bool:
        """After the copy: whether the slots were the pinned ones all along."""
        offsets, epochs = spec.offsets, spec.epochs
        if spec.extents:
            pinned = [extent is None for extent in spec.extents]
            offsets, epochs = offsets[pinned], epochs[pinned]
        return np.array_equal(arena.epochs_of(offsets), epochs)

    def _note(self, outcome: _Outcome) -> None:
        spec = outcome.spec
        if not outcome.is_load:
            self._report.stores_done.setdefault(spec.ticket, set()).add(self._rank)
            if outcome.problem:
                self._report.stores_failed.add(spec.ticket)
        elif outcome.problem:
            self._failed_loads.add(spec.req_id)
            self._report.loads_failed[spec.req_id] = outcome.problem
            limited_log("load", logging.WARNING, "kvstore: a load failed (%s); it is computed instead", outcome.problem)
        else:
            self._report.loads_done[spec.req_id] = outcome.time_s


def _begin_alike(one: SlotSpec, other: SlotSpec) -> bool:
    """Whether as many slots as the shorter of two has are the same in both, in the same epochs."""
    common = slice(min(len(one.offsets), len(other.offsets)))
    return (
        one.generation == other.generation
        and np.array_equal(one.offsets[common], other.offsets[common])
        and np.array_equal(one.epochs[common], other.epochs[common])
    )
