"""The copy engine for KV memory on a GPU.

Streams: two for stores and two for loads, so that neither queues behind the other; of the two, one drives the copy
engine and one the multiprocessors. Loads go first, as a request waits for them. Stores go before the model's own
kernels too: what they need is short, and behind a large matrix product it would come too late to keep the bus busy
(measured in vLLM during a prefill: 25 instead of 50 GB/s). Every job is cut into parts by where its bytes lie
(registered or not) and each part goes the way that paths.choose names.

    staged     load:  copy engine, pool -> buffer; event; kernel, buffer -> KV memory; event frees the buffer
               store: kernel, KV memory -> buffer; event; copy engine, buffer -> pool; event frees the buffer
               A direction has several buffers, so that copy engine and kernel work at the same time.
    batch      copy engine alone
    kernel     multiprocessors alone
    pageable   the batch call from a thread, since the driver makes its caller wait for memory that is not registered

What is written to KV memory waits for an event on the caller's stream, as does what is read from it; what fills a
buffer from the pool waits for nothing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Any, Final

import numpy as np
import torch

from engine_plugin.copy import kernels, paths, runs
from engine_plugin.copy.contract import CopyEngine, CopyStats, Fragments, Pool, Then
from engine_plugin.copy.cudart import CudaRuntime
from engine_plugin.copy.registration import CHUNK_BYTES, Registration

log = logging.getLogger("vllm.kvstore")

#: Buffers of a direction: one is filled, one is emptied, one is between the two.
STAGES: Final = 3
#: Of one buffer: long enough that starting and ending a copy costs little (300 us at 55 GB/s), short enough that the
#: first and the last one, which nothing overlaps, cost little too.
STAGE_BYTES: Final = 16 << 20
#: Up to so many runs of a buffer are copied one by one, which costs the host less than a batch of as many.
_SINGLE_COPIES_MAX: Final = 8
#: No program moves more than this of one fragment, so that few long fragments are spread as well.
_PIECE_BYTES: Final = 64 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class Tuning:
    """How a kernel is launched; see kernels.move."""

    programs: int
    chunk_bytes: int
    warps: int


#: GPU memory to GPU memory: short, so it may be wide.
STAGED: Final = Tuning(programs=32, chunk_bytes=32768, warps=8)
#: Over the bus, by direction.
TO_HOST: Final = Tuning(programs=16, chunk_bytes=16384, warps=8)
TO_GPU: Final = Tuning(programs=16, chunk_bytes=16384, warps=8)


class _Lane:
    """Streams, buffers and jobs of one direction."""

    def __init__(self, device: torch.device, *, priority: int, stage_bytes: int) -> None:
        self.copies = torch.cuda.Stream(device, priority=priority)
        self.kernels = torch.cuda.Stream(device, priority=priority)
        self.pageable = torch.cuda.Stream(device, priority=priority)
        self.jobs: deque[_Job] = deque()
        self.stage_bytes = stage_bytes
        self.stage: torch.Tensor | None = None
        self.filled = [torch.cuda.Event() for _ in range(STAGES)]
        self.emptied = [torch.cuda.Event() for _ in range(STAGES)]
        self.turn = 0
        if stage_bytes:
            try:
                self.stage = torch.empty(STAGES * stage_bytes, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:
                log.warning(
                    "kvstore: no GPU memory for %d MB of buffers; copies are slower", STAGES * stage_bytes >> 20
                )


class _Job:
    """A job under way: its parts are over when their events are."""

    __slots__ = (
        "ended",
        "error",
        "futures",
        "keep",
        "layers",
        "over",
        "ready",
        "registration",
        "size_bytes",
        "started",
        "then",
    )

    def __init__(self, then: Then, size_bytes: int, registration: Registration) -> None:
        self.then = then
        self.size_bytes = size_bytes
        self.registration = registration
        #: What was on the caller's stream before is over.
        self.ready = torch.cuda.Event(enable_timing=True)
        self.ready.record()
        self.started = torch.cuda.Event(enable_timing=True)
        self.ended: list[torch.cuda.Event] = []
        self.futures: list[concurrent.futures.Future[torch.cuda.Event]] = []
        self.layers: list[torch.cuda.Event] = []
        self.keep: list[Any] = []  # what the GPU reads until the job is over
        self.error: BaseException | None = None
        self.over = False

    def wait_layer(self, layer: int) -> None:
        """Makes the current stream wait for the fragments of one layer; see CudaCopyEngine.load_by_layer."""
        self.layers[layer].wait()

    def arrived(self) -> bool:
        """Whether every part is over; an error of one is kept."""
        if self.futures:
            if not all(future.done() for future in self.futures):
                return False
            self._collect()
        return all(event.query() for event in self.ended)

    def synchronize(self) -> None:
        """Waits for every part."""
        self._collect()
        for event in self.ended:
            event.synchronize()

    def _collect(self) -> None:
        for future in self.futures:
            try:
                self.ended.append(future.result())
            except BaseException as error:
                self.error = error
        self.futures = []


class CudaCopyEngine(CopyEngine):
    """See the module. One for each process and GPU."""

    def __init__(
        self,
        device: torch.device | str | int,
        path: str = "auto",
        *,
        stage_bytes: int = STAGE_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Takes its buffers (2 * STAGES * stage_bytes of GPU memory) and compiles the kernel.

        Args:
            path: One of paths.CHOICES.
            chunk_bytes: What is registered at once; a fragment must not be longer.

        Raises:
            CudaError: the CUDA runtime is not there or too old.
            ValueError: no such path.
        """
        if path not in paths.CHOICES:
            raise ValueError(f"there is no copy path {path!r}; there are {', '.join(paths.CHOICES)}")
        named = torch.device(device)
        # Threads set their device by it, which needs the index.
        self.device = torch.device("cuda", torch.cuda.current_device() if named.index is None else named.index)
        self._path = path
        self._chunk_bytes = chunk_bytes
        self._runtime = CudaRuntime()
        with torch.cuda.device(self.device):
            self._store = _Lane(self.device, priority=-1, stage_bytes=stage_bytes)
            self._load = _Lane(self.device, priority=-2, stage_bytes=stage_bytes)
            # What most jobs need, so that the first of them does not wait for a compiler.
            self._movers: dict[tuple[int, int, int, bool], kernels.Mover] = {}
            for tuning in {STAGED, TO_HOST, TO_GPU}:
                for common in (tuning.chunk_bytes, 16384, 8192, 4096, 16):
                    self._mover(16, common, tuning)
            torch.cuda.synchronize()
        self._registration: Registration | None = None
        self._retired: list[Registration] = []
        self._mapped = False
        self._bytes: Counter[str] = Counter()
        self._failed = 0
        self._pageable = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="kvstore-pageable")

    # -- the pool ------------------------------------------------------------------------------------------------------

    def use_pool(self, pool: Pool | None) -> None:
        current = self._registration
        if pool is (current.pool if current is not None else None):
            return
        if current is not None:
            self._registration = None
            self._retired.append(current)
            self._end_retired()
        if pool is not None:
            self._registration = Registration(
                pool, self._runtime, lambda: torch.cuda.set_device(self.device), self._chunk_bytes
            )

    def _end_retired(self) -> None:
        for registration in [each for each in self._retired if not each.jobs]:
            registration.end()
            self._retired.remove(registration)

    def stats(self) -> CopyStats:
        registration = self._registration
        stats = CopyStats(dict(self._bytes), self._failed)
        if registration is not None:
            stats.registered_bytes = registration.registered_bytes
            stats.pool_bytes = registration.pool.size_bytes
            stats.registering = registration.under_way
            stats.register_error = registration.error
            stats.register_seconds = registration.seconds
        return stats

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def store(self, fragments: Fragments, then: Then) -> _Job:
        return self._begin(self._store, fragments, then, is_load=False)

    def load(self, fragments: Fragments, then: Then) -> _Job:
        return self._begin(self._load, fragments, then, is_load=True)

    def load_by_layer(self, fragments: Fragments, layer_ends: Collection[int], then: Then) -> _Job:
        """Loads the fragments in their order, with an event after each layer for `wait_layer`, so that attention on
        the first layer may begin while the second is still coming.

        Args:
            layer_ends: For each layer, how many fragments it and those before it have.

        Raises:
            RuntimeError: nothing was begun, and `then` will not be called.
        """
        return self._begin(self._load, fragments, then, is_load=True, layer_ends=layer_ends)

    def _begin(
        self,
        lane: _Lane,
        fragments: Fragments,
        then: Then,
        *,
        is_load: bool,
        layer_ends: Collection[int] = (),
    ) -> _Job:
        registration = self._registration
        if registration is None:
            raise RuntimeError("no pool was given")
        with torch.cuda.device(self.device):
            job = _Job(then, fragments.size_bytes, registration)
            known = registration.registered_bytes
            if known and not self._mapped:
                address = registration.pool.address
                self._mapped = self._runtime.device_pointer(address) == address
            registration.jobs += 1
            lane.jobs.append(job)
            try:
                if layer_ends:
                    self._queue_layers(lane, job, fragments, list(layer_ends), known)
                else:
                    self._queue(lane, job, fragments, known, is_load)
            except BaseException as error:
                # Parts of it may be queued: it ends, badly, when they are over.
                job.error = error
                for stream in (lane.copies, lane.kernels):
                    self._end_on(job, stream)
        return job

    def _queue(self, lane: _Lane, job: _Job, fragments: Fragments, known: int, is_load: bool) -> None:
        """Queues every part of a job."""
        fast = fragments = runs.in_pool_order(fragments)
        pool = job.registration.pool
        if known < pool.size_bytes or self._path == "pageable":
            end = pool.address + (0 if self._path == "pageable" else known)
            inside = int(np.searchsorted(fragments.pool + fragments.size, end, side="right"))
            fast, slow = runs.take(fragments, slice(inside)), runs.take(fragments, slice(inside, None))
            if len(slow):
                self._queue_pageable(lane, job, slow, is_load)
            if not len(fast):
                return
        path = self._path
        if path in ("auto", "pageable"):
            path = paths.choose(
                fast.size_bytes,
                len(fast),
                lambda: runs.mean_run_bytes(fast),
                staging=lane.stage is not None,
                mapped=self._mapped,
            )
        if path == "staged" and lane.stage is not None and int(fast.size.max()) <= lane.stage_bytes:
            self._queue_staged(lane, job, fast, is_load)
        elif path == "kernel" and self._mapped:
            self._queue_kernel(lane, job, fast, is_load)
        else:
            path = "batch"
            self._queue_batch(lane, job, fast, is_load)
        self._bytes[path] += fast.size_bytes

    def _queue_staged(self, lane: _Lane, job: _Job, fragments: Fragments, is_load: bool) -> None:
        assert lane.stage is not None
        bounds = runs.windows(fragments.size, lane.stage_bytes)
        count = len(bounds) - 1
        # Every window has a buffer, in turn; in it the fragments lie one after the other.
        buffers = (lane.turn + np.arange(count)) % STAGES
        lane.turn = (lane.turn + count) % STAGES
        before = np.cumsum(fragments.size) - fragments.size
        shift = (
            lane.stage.data_ptr() + buffers.astype(np.int64) * lane.stage_bytes - before[bounds[:-1]].astype(np.int64)
        )
        in_stage = (before.astype(np.int64) + np.repeat(shift, np.diff(bounds))).astype(np.uint64)
        staged = Fragments(fragments.kv, in_stage, fragments.size)
        pieces = runs.split(staged, _PIECE_BYTES)
        if len(pieces) == len(staged):
            piece_bounds = bounds
        else:
            ends = np.cumsum(-(-fragments.size.astype(np.int64) // _PIECE_BYTES))
            piece_bounds = np.concatenate(([0], ends))[bounds]
        first, run_bytes = runs.runs_of(fragments, bounds[:-1])
        whole = runs.cut_at_borders(
            Fragments(in_stage[first], fragments.pool[first], run_bytes),
            job.registration.pool.address,
            self._chunk_bytes,
        )
        run_before = np.cumsum(whole.size) - whole.size
        run_bounds = np.searchsorted(run_before, np.append(before[bounds[:-1]], fragments.size_bytes))
        copies, kernel_stream = lane.copies, lane.kernels
        buffer_of = buffers.tolist()
        run_bound, piece_bound = run_bounds.tolist(), piece_bounds.tolist()

        def send(window: int) -> None:
            """Copy engine: buffer from or to the pool."""
            part = slice(run_bound[window], run_bound[window + 1])
            ends = (whole.kv[part], whole.pool[part])
            self._copy_runs(copies, *(ends if is_load else ends[::-1]), whole.size[part], still=is_load)

        def spread(window: int) -> None:
            """Multiprocessors: buffer to or from KV memory."""
            launch(piece_bound[window], piece_bound[window + 1])

        if is_load:
            job.started.record(copies)
            ahead = min(count, STAGES)
            for window in range(ahead):  # what needs no table comes before the table
                copies.wait_event(lane.emptied[buffer_of[window]])
                send(window)
                lane.filled[buffer_of[window]].record(copies)
            kernel_stream.wait_event(job.ready)
            launch = self._launcher(lane, job, pieces, is_load, STAGED)
            for window in range(count):
                buffer = buffer_of[window]
                kernel_stream.wait_event(lane.filled[buffer])
                spread(window)
                lane.emptied[buffer].record(kernel_stream)
                if window + ahead < count:
                    copies.wait_event(lane.emptied[buffer])
                    send(window + ahead)
                    lane.filled[buffer].record(copies)
            self._end_on(job, kernel_stream)
            return
        launch = self._launcher(lane, job, pieces, is_load, STAGED)
        kernel_stream.wait_event(job.ready)
        job.started.record(kernel_stream)
        for window in range(count):
            buffer = buffer_of[window]
            kernel_stream.wait_event(lane.emptied[buffer])
            spread(window)
            lane.filled[buffer].record(kernel_stream)
            copies.wait_event(lane.filled[buffer])
            send(window)
            lane.emptied[buffer].record(copies)
        self._end_on(job, copies)

    def _copy_runs(
        self, stream: torch.cuda.Stream, dst: np.ndarray, src: np.ndarray, size: np.ndarray, *, still: bool
    ) -> None:
        if len(size) <= _SINGLE_COPIES_MAX:
            for ends in zip(dst.tolist(), src.tolist(), size.tolist(), strict=True):
                self._runtime.copy(*ends, stream.cuda_stream)
        else:
            self._runtime.copy_batch(dst, src, size, stream.cuda_stream, source_is_still=still)

    def _queue_kernel(self, lane: _Lane, job: _Job, fragments: Fragments, is_load: bool) -> None:
        pieces = runs.split(fragments, _PIECE_BYTES)
        launch = self._launcher(lane, job, pieces, is_load, TO_GPU if is_load else TO_HOST)
        lane.kernels.wait_event(job.ready)
        job.started.record(lane.kernels)
        launch(0, len(pieces))
        self._end_on(job, lane.kernels)

    def _queue_layers(self, lane: _Lane, job: _Job, fragments: Fragments, ends: list[int], known: int) -> None:
        """Queues layer by layer: one launch, or one batch, for each."""
        pool = job.registration.pool
        fast = self._mapped and int((fragments.pool + fragments.size).max()) <= pool.address + known
        stream = lane.kernels if fast else lane.copies
        launch = self._launcher(lane, job, fragments, True, TO_GPU) if fast else None
        stream.wait_event(job.ready)
        job.started.record(stream)
        begin = 0
        for end in ends:
            if launch is not None:
                launch(begin, end)
            else:
                layer = runs.cut_at_borders(runs.take(fragments, slice(begin, end)), pool.address, self._chunk_bytes)
                self._runtime.copy_batch(layer.kv, layer.pool, layer.size, stream.cuda_stream, source_is_still=True)
            event = torch.cuda.Event()
            event.record(stream)
            job.layers.append(event)
            begin = end
        self._end_on(job, stream)
        self._bytes["kernel" if fast else "pageable"] += job.size_bytes

    def _queue_batch(self, lane: _Lane, job: _Job, fragments: Fragments, is_load: bool) -> None:
        lane.copies.wait_event(job.ready)
        job.started.record(lane.copies)
        self._batch(lane.copies, job, fragments, is_load)
        self._end_on(job, lane.copies)

    def _queue_pageable(self, lane: _Lane, job: _Job, fragments: Fragments, is_load: bool) -> None:
        job.started.record()

        def run() -> torch.cuda.Event:
            torch.cuda.set_device(self.device)
            lane.pageable.wait_event(job.ready)
            self._batch(lane.pageable, job, fragments, is_load)
            ended = torch.cuda.Event(enable_timing=True)
            ended.record(lane.pageable)
            return ended

        job.futures.append(self._pageable.submit(run))
        self._bytes["pageable"] += fragments.size_bytes

    def _batch(self, stream: torch.cuda.Stream, job: _Job, fragments: Fragments, is_load: bool) -> None:
        cut = runs.cut_at_borders(fragments, job.registration.pool.address, self._chunk_bytes)
        dst, src = (cut.kv, cut.pool) if is_load else (cut.pool, cut.kv)
        self._runtime.copy_batch(dst, src, cut.size, stream.cuda_stream, source_is_still=is_load)

    def _launcher(
        self, lane: _Lane, job: _Job, pieces: Fragments, is_load: bool, tuning: Tuning
    ) -> Callable[[int, int], None]:
        """Sends the table of a kernel, on the lane's stream; launches of it then name a range of it."""
        aligned = runs.alignment(pieces.kv, pieces.pool, pieces.size)
        common = runs.alignment(pieces.size, most=tuning.chunk_bytes)
        table = torch.empty((3, len(pieces)), dtype=torch.int64, pin_memory=True)
        rows = table.numpy().view(np.uint64)
        rows[0], rows[1] = (pieces.kv, pieces.pool) if is_load else (pieces.pool, pieces.kv)
        np.floor_divide(pieces.size, np.uint64(kernels.word_size(aligned)), out=rows[2])
        with torch.cuda.stream(lane.kernels):
            on_gpu = table.to(self.device, non_blocking=True)
            mover = self._mover(aligned, common, tuning)
        job.keep += [table, on_gpu]
        stream = lane.kernels.cuda_stream
        return lambda first, end: mover(on_gpu, first, end, tuning.programs, stream)

    def _mover(self, aligned: int, common: int, tuning: Tuning) -> kernels.Mover:
        """The kernel for fragments that are aligned so, and whose sizes a power of two divides."""
        chunk_bytes, even = kernels.chunk_for(common, tuning.chunk_bytes)
        key = (aligned, chunk_bytes, tuning.warps, even)
        if key not in self._movers:
            self._movers[key] = kernels.Mover(self.device, *key)
        return self._movers[key]

    def _end_on(self, job: _Job, stream: torch.cuda.Stream) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        job.ended.append(event)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        for lane in (self._load, self._store):
            while lane.jobs:
                job = lane.jobs[0]
                try:
                    if not job.arrived():
                        break
                except Exception as error:  # the GPU is lost: no event will ever be over
                    job.error = error
                lane.jobs.popleft()
                self._end(job)
        if self._retired:
            self._end_retired()

    def wait(self, copies: Collection[_Job]) -> None:
        for job in copies:
            lane = self._load if job in self._load.jobs else self._store
            while not job.over:  # jobs of a direction end in order, though an earlier one may go a slower way
                with contextlib.suppress(Exception):  # the GPU is lost: poll ends the job, with the error
                    lane.jobs[0].synchronize()
                self.poll()

    def _end(self, job: _Job) -> None:
        seconds = 0.0
        if job.error is not None:
            self._failed += 1
        elif job.ended:
            last = max(job.started.elapsed_time(event) for event in job.ended)
            waited = job.started.elapsed_time(job.ready)  # a load fills its buffers while it waits
            seconds = (last - max(0.0, waited)) / 1e3
        job.keep.clear()
        job.registration.jobs -= 1
        job.over = True
        job.then(seconds, job.error)

    def close(self) -> None:
        self.wait([*self._load.jobs, *self._store.jobs])
        self._pageable.shutdown(wait=True)
        registrations = [*self._retired, *([self._registration] if self._registration is not None else [])]
        self._registration = None
        self._retired = []
        for registration in registrations:
            registration.end()
        for registration in registrations:
            registration.join()
        self._load.stage = self._store.stage = None
