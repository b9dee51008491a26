"""The copy engine for KV memory on a GPU.

Streams: two for stores and two for loads, so that neither queues behind the other; of the two, one drives the copy
engine and one the multiprocessors. Loads go first, as a request waits for them. Stores go before the model's own
kernels too: what they need is short, and behind a large matrix product it would come too late to keep the bus busy
(measured in vLLM during a prefill: 25 instead of 50 GB/s). Every job is cut into parts by where its bytes lie
(registered or not) and each part goes the way that paths.choose names.

    staged     load:  copy engine, pool -> buffer; event; kernel, buffer -> KV memory; event frees the buffer
                      (what needs no table goes before the table is made)
               store: kernel, KV memory -> buffer; event; copy engine, buffer -> pool; event frees the buffer
               A direction has several buffers, so that copy engine and kernel work at the same time.
    batch      copy engine alone; queued by a thread where there are many fragments
    kernel     multiprocessors alone
    pageable   the batch call for memory that is not registered, during which the driver makes its caller wait

A kernel finds its fragments in a table in pinned memory. It reads a short one where it is; a long one is fetched by a
kernel too, since the copy engine would put it behind all that a load under way has queued.

What is written to KV memory waits for an event on the caller's stream, as does what is read from it; what fills a
buffer from the pool waits for nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Collection
from itertools import pairwise
from typing import Final

import numpy as np
import torch

from engine_plugin.copy import expected, paths, plan, runs
from engine_plugin.copy.contract import CopyEngine, CopyStats, Fragments, Pool, Then
from engine_plugin.copy.copies import Copies
from engine_plugin.copy.cudart import CudaRuntime
from engine_plugin.copy.kernels import ONE_RUN, STAGED, TO_GPU, TO_HOST
from engine_plugin.copy.lanes import Expected, Job, Lane, Part, mark
from engine_plugin.copy.launches import Launch, Launches
from engine_plugin.copy.registration import CHUNK_BYTES, Registration

log = logging.getLogger("vllm.kvstore")

#: Of one buffer: long enough that starting and ending a copy costs little (600 us at 55 GB/s) and the host is not kept
#: busy with queueing, or of two jobs handed in together the second would come late; short enough that the first and the
#: last one, which nothing overlaps, cost little too.
STAGE_BYTES: Final = 32 << 20
#: Buffers of each direction. With two of them one is between GPU and pool while the kernel is through with the other
#: long before. Of a load that is expected as many are filled as there are, which keeps the bus busy for 2.4 ms: about
#: as long as vLLM takes to find memory for it and to make the step that it comes with.
STORE_STAGES: Final = 2
LOAD_STAGES: Final = 4
#: Of the streams, as CUDA counts: less is sooner, and 0 is what the model's kernels have.
STORE_PRIORITY: Final = -1
LOAD_PRIORITY: Final = -2
#: Fragments of one batch call: some 130 us of the host, during which the driver lets nobody else launch.
_BATCH_PART: Final = 256


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
        """Takes its buffers ((STORE_STAGES + LOAD_STAGES) * stage_bytes of GPU memory) and compiles the kernel.

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
            self._store, self._load = (
                Lane(self.device, self._runtime, priority=priority, stages=stages, stage_bytes=stage_bytes)
                for priority, stages in ((STORE_PRIORITY, STORE_STAGES), (LOAD_PRIORITY, LOAD_STAGES))
            )
            self._launches = Launches(self.device, self._runtime)
            self._has_kernels = self._prepare_kernels()
        self._registration: Registration | None = None
        self._retired: list[Registration] = []
        self._mapped = False
        self._bytes: Counter[str] = Counter()
        self._failed = 0

    def _prepare_kernels(self) -> bool:
        """Whether there are kernels. Where that fails (Triton wants a compiler for C), nothing is staged, and the batch
        call moves everything.
        """
        try:
            self._launches.prepare((self._store, self._load))
        except Exception as error:
            log.error("kvstore: there are no kernels for this GPU (%s); copies are slower", str(error) or repr(error))
            for lane in (self._store, self._load):
                lane.stage = None
            return False
        return True

    # -- the pool ------------------------------------------------------------------------------------------------------

    def use_pool(self, pool: Pool | None) -> None:
        current = self._registration
        if pool is (current.pool if current is not None else None):
            return
        if current is not None:
            self._registration = None
            self._retired.append(current)
            expected.forget(self._load)
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

    def store(self, fragments: Fragments, then: Then, *, beside_compute: bool = False) -> Job:
        return self._begin(self._store, fragments, then, is_load=False, beside_compute=beside_compute)

    def load(self, fragments: Fragments, then: Then, *, beside_compute: bool = False) -> Job:
        return self._begin(self._load, fragments, then, is_load=True, beside_compute=beside_compute)

    def expect_load(self, starts: np.ndarray, size_bytes: int) -> None:
        """See the contract. Fills the buffers, if they end where the load's own do."""
        self.expect_nothing()
        registration, before = self._registration, self._load.expected_read
        if registration is None or self._path not in ("auto", "staged"):
            return
        if before is not None and not before.query():
            return  # a request that waits for memory is announced in each step: reads would pile up before its load
        with self._current():
            section = expected.filling(self._load, registration, starts, size_bytes, self._chunk_bytes)
            if section is None:
                return
            copies = Copies(self._runtime, section.copies, is_load=True)
            try:
                for buffer, (begin, end) in zip(section.buffers, pairwise(section.copy_bounds), strict=True):
                    self._fill(self._load, buffer, copies, begin, end)
            except BaseException:
                self.expect_nothing()
                raise
            finally:
                self._load.expected_read = mark(self._load.copies)

    def expect_nothing(self) -> None:
        self._load.take_expected()

    def load_by_layer(self, fragments: Fragments, layer_ends: Collection[int], then: Then) -> Job:
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
        lane: Lane,
        fragments: Fragments,
        then: Then,
        *,
        is_load: bool,
        beside_compute: bool = False,
        layer_ends: Collection[int] = (),
    ) -> Job:
        registration = self._registration
        if registration is None:
            raise RuntimeError("no pool was given")
        with self._current():
            known = registration.registered_bytes
            if known and not self._mapped and self._has_kernels:
                address = registration.pool.address
                self._mapped = self._runtime.device_pointer(address) == address
            # Before anything that the host can do while the bus is busy, of which this stream's state takes it longest.
            whole = is_load and not layer_ends and not beside_compute
            run = self._begin_run(lane, registration, fragments, known) if whole else None
            writing = torch.cuda.current_stream()
            # An event on an idle stream may come late all the same: streams share hardware queues, and this one's may
            # be full of a store under way.
            ready = None if writing.query() else mark(writing)
            beside_compute = beside_compute or ready is not None
            job = Job(then, fragments.size_bytes, registration, ready, is_load=is_load)
            registration.jobs += 1
            lane.jobs.append(job)
            try:
                if run is not None:
                    self._end_run(lane, job, fragments, *run)
                elif layer_ends:
                    self._queue_layers(lane, job, fragments, list(layer_ends), known)
                else:
                    self._queue(lane, job, fragments, known, is_load, beside_compute)
            except BaseException as error:
                # Parts of it may be queued: it ends, badly, when they are over.
                job.error = error
                with contextlib.suppress(Exception):  # the GPU is lost
                    job.parts += [(lane.mark(stream), lane.mark(stream)) for stream in (lane.copies, lane.kernels)]
        return job

    def _current(self) -> contextlib.AbstractContextManager[object]:
        """Makes the device the current one, where it is not: that costs as much as a copy."""
        if torch.cuda.current_device() == self.device.index:
            return contextlib.nullcontext()
        return torch.cuda.device(self.device)

    def _queue(
        self, lane: Lane, job: Job, fragments: Fragments, known: int, is_load: bool, beside_compute: bool
    ) -> None:
        """Queues every part of a job."""
        pool = job.registration.pool
        if self._path == "pageable":
            known = 0
        breaks = runs.breaks_of(fragments)
        fast, slow = fragments, None
        if known < pool.size_bytes or job.size_bytes < paths.STAGED_RUN_BYTES_MIN * (len(breaks) + 1):
            fast = runs.in_pool_order(fragments)
            if known < pool.size_bytes:
                ends = fast.pool + fast.size
                inside = int(np.searchsorted(ends, np.uint64(pool.address + known), side="right"))
                fast, slow = runs.take(fast, slice(inside)), runs.take(fast, slice(inside, None))
            breaks = runs.breaks_of(fast)
        if slow is not None and len(slow):
            self._queue_batch(lane, job, slow, lane.pageable, is_load, threaded=True)
            self._bytes["pageable"] += slow.size_bytes
        if not len(fast):
            return
        size_bytes = job.size_bytes if slow is None else fast.size_bytes
        mean_run = size_bytes // (len(breaks) + 1)
        path = self._path_of(lane, size_bytes, len(fast), mean_run, beside_compute=beside_compute, is_load=is_load)
        if path == "staged" and lane.stage is not None and int(fast.size.max()) <= lane.stage_bytes:
            self._queue_staged(lane, job, fast, breaks, is_load)
        elif path == "kernel" and self._mapped:
            self._queue_kernel(lane, job, fast, is_load)
        else:
            path = "batch"
            self._queue_batch(lane, job, fast, lane.copies, is_load, threaded=len(fast) > _BATCH_PART)
        self._bytes[path] += size_bytes

    def _path_of(
        self, lane: Lane, size_bytes: int, count: int, mean_run: int, *, beside_compute: bool, is_load: bool
    ) -> str:
        """The way of a job, or of the part of it that is registered."""
        if self._path not in ("auto", "pageable"):
            return self._path
        return paths.choose(
            size_bytes,
            count,
            mean_run,
            staging=lane.stage is not None,
            mapped=self._mapped,
            beside_compute=beside_compute,
            is_load=is_load,
        )

    def _begin_run(
        self, lane: Lane, registration: Registration, fragments: Fragments, known: int
    ) -> tuple[int, torch.cuda.Event, int] | None:
        """Has a load of one run, such as a block, that one buffer holds copied into a buffer.

        Returns:
            The buffer's number, an event at the beginning of the copy, and the bytes. None: the load is not of one run
            or goes another way.
        """
        pool, size = fragments.pool, fragments.size
        count = len(size)
        if not count or lane.stage is None or self._path not in ("auto", "staged"):
            return None
        start = pool.item(0)
        size_bytes: int = pool.item(-1) + size.item(-1) - start
        if not 0 < size_bytes <= lane.stage_bytes:
            return None
        address = registration.pool.address
        if not address <= start <= address + known - size_bytes:
            return None
        # Where the ends are as far apart as they would be, the rest is looked at while the bus is busy.
        likely = count * size.item(0) == size_bytes
        if not likely and len(runs.breaks_of(fragments)):
            return None
        if self._path_of(lane, size_bytes, count, size_bytes, beside_compute=False, is_load=True) != "staged":
            return None
        lane.take_expected()
        buffer = lane.turn
        lane.turn = (buffer + 1) % lane.stages
        stream, stage = lane.copies.cuda_stream, lane.stage_address + buffer * lane.stage_bytes
        useful = False
        try:
            if lane.jobs:  # else every kernel that read a buffer is over, with its job
                self._runtime.wait(stream, lane.emptied[buffer])
            done = 0
            while done < size_bytes:  # a copy must not span two registrations
                room = self._chunk_bytes - (start + done - address) % self._chunk_bytes
                step = min(room, size_bytes - done)
                self._runtime.copy(stage + done, start + done, step, stream)
                done += step
            self._runtime.record(lane.filled[buffer], stream)
            useful = not likely or not len(runs.breaks_of(fragments))
        finally:
            if not useful:  # no job is over only after this
                lane.expected_read = mark(lane.copies)
        if not useful:
            return None
        # On the other stream, where it says the same and nothing waits for it.
        return buffer, lane.mark(lane.kernels), size_bytes

    def _end_run(
        self, lane: Lane, job: Job, fragments: Fragments, buffer: int, started: torch.cuda.Event, size_bytes: int
    ) -> None:
        """Spreads what is in a buffer."""
        stage = lane.stage_address + buffer * lane.stage_bytes
        in_stage = fragments.pool - fragments.pool[0] + np.uint64(stage)
        pieces = runs.split(Fragments(fragments.kv, in_stage, fragments.size), plan.PIECE_BYTES)
        launch = self._launches.of(lane, job, pieces, True, ONE_RUN)
        job.follow_caller(lane.kernels)
        stream = lane.kernels.cuda_stream
        self._runtime.wait(stream, lane.filled[buffer])
        launch(0, len(pieces))
        job.parts.append((started, lane.mark(lane.kernels)))  # first, as somebody may wait for it
        self._runtime.record(lane.emptied[buffer], stream)
        self._bytes["staged"] += size_bytes

    def _queue_staged(self, lane: Lane, job: Job, fragments: Fragments, breaks: np.ndarray, is_load: bool) -> None:
        """Queues a job section by section, so that the first bytes move while the host plans the others."""
        buffers = plan.Buffers(lane.stage_address, lane.stage_bytes, lane.stages, lane.turn)
        filled = lane.take_expected() if is_load else None
        started: torch.cuda.Event | None = None
        for section in plan.sections(fragments, breaks, buffers, job.registration.pool.address, self._chunk_bytes):
            lane.turn = (section.buffers[-1] + 1) % lane.stages
            copies = Copies(self._runtime, section.copies, is_load=is_load)
            if is_load:  # what needs no table comes before the table
                begun = started or (filled.started if filled is not None else lane.mark(lane.copies))
                self._fill_first(lane, section, copies, filled if started is None else None)
            launch = self._launches.of(lane, job, section.pieces, is_load, STAGED)
            if started is None:
                job.follow_caller(lane.kernels)
                started = begun if is_load else lane.mark(lane.kernels)
            (self._load_section if is_load else self._store_section)(lane, section, copies, launch)
        assert started is not None
        job.parts.append((started, lane.mark(lane.kernels if is_load else lane.copies)))

    def _fill_first(self, lane: Lane, section: plan.Section, copies: Copies, filled: Expected | None) -> None:
        """Fills the buffers of the first windows of a section.

        Args:
            filled: What they hold already.
        """
        bounds = section.copy_bounds
        for window, buffer in enumerate(section.buffers[: lane.stages]):
            part = slice(bounds[window], bounds[window + 1])
            if filled is None or not filled.holds(window, section.copies.pool[part], section.copies.size[part]):
                self._fill(lane, buffer, copies, part.start, part.stop)

    def _load_section(self, lane: Lane, section: plan.Section, copies: Copies, launch: Launch) -> None:
        """Multiprocessors: buffer to KV memory; copy engine: the next from the pool to that buffer."""
        wait, record, spread = self._runtime.wait, self._runtime.record, lane.kernels.cuda_stream
        bounds, pieces, count = section.copy_bounds, section.piece_bounds, len(section.buffers)
        for window, buffer in enumerate(section.buffers):
            wait(spread, lane.filled[buffer])
            launch(pieces[window], pieces[window + 1])
            record(lane.emptied[buffer], spread)
            following = window + lane.stages
            if following < count:
                self._fill(lane, buffer, copies, bounds[following], bounds[following + 1])

    def _fill(self, lane: Lane, buffer: int, copies: Copies, begin: int, end: int) -> None:
        """Has the copy engine fill a buffer from the pool, once what it held before is spread."""
        stream = lane.copies.cuda_stream
        self._runtime.wait(stream, lane.emptied[buffer])
        copies.queue(begin, end, stream)
        self._runtime.record(lane.filled[buffer], stream)

    def _store_section(self, lane: Lane, section: plan.Section, copies: Copies, launch: Launch) -> None:
        """Multiprocessors: KV memory to buffer; copy engine: buffer to pool."""
        wait, record = self._runtime.wait, self._runtime.record
        gather, send = lane.kernels.cuda_stream, lane.copies.cuda_stream
        bounds, pieces = section.copy_bounds, section.piece_bounds
        for window, buffer in enumerate(section.buffers):
            wait(gather, lane.emptied[buffer])
            launch(pieces[window], pieces[window + 1])
            record(lane.filled[buffer], gather)
            wait(send, lane.filled[buffer])
            copies.queue(bounds[window], bounds[window + 1], send)
            record(lane.emptied[buffer], send)

    def _queue_kernel(self, lane: Lane, job: Job, fragments: Fragments, is_load: bool) -> None:
        pieces = runs.split(fragments, plan.PIECE_BYTES)
        launch = self._launches.of(lane, job, pieces, is_load, TO_GPU if is_load else TO_HOST)
        job.follow_caller(lane.kernels)
        started = lane.mark(lane.kernels)
        launch(0, len(pieces))
        job.parts.append((started, lane.mark(lane.kernels)))

    def _queue_layers(self, lane: Lane, job: Job, fragments: Fragments, ends: list[int], known: int) -> None:
        """Queues layer by layer: one launch, or one batch, for each."""
        pool = job.registration.pool
        fast = self._mapped and int((fragments.pool + fragments.size).max()) <= pool.address + known
        stream = lane.kernels if fast else lane.copies
        launch = self._launches.of(lane, job, fragments, True, TO_GPU) if fast else None
        job.follow_caller(stream)
        started = lane.mark(stream)
        begin = 0
        for end in ends:
            if launch is not None:
                launch(begin, end)
            else:
                layer = runs.cut_at_borders(runs.take(fragments, slice(begin, end)), pool.address, self._chunk_bytes)
                Copies(self._runtime, layer, is_load=True).queue_batch(0, len(layer), stream.cuda_stream)
            event = torch.cuda.Event()
            event.record(stream)
            job.layers.append(event)
            begin = end
        job.parts.append((started, lane.mark(stream)))
        self._bytes["kernel" if fast else "pageable"] += job.size_bytes

    def _queue_batch(
        self,
        lane: Lane,
        job: Job,
        fragments: Fragments,
        stream: torch.cuda.Stream,
        is_load: bool,
        *,
        threaded: bool,
    ) -> None:
        """Queues batch calls, from a thread where they take the host long: half a microsecond for each fragment, and
        for memory that is not registered as long as the copy itself.
        """
        cut = runs.cut_at_borders(fragments, job.registration.pool.address, self._chunk_bytes)
        copies = Copies(self._runtime, cut, is_load=is_load)

        def run() -> Part:
            job.follow_caller(stream)
            started = lane.mark(stream)
            try:
                # In parts, so that the driver's locks are free in between for who launches the model's kernels.
                for begin in range(0, len(copies), _BATCH_PART):
                    copies.queue_batch(begin, min(begin + _BATCH_PART, len(copies)), stream.cuda_stream)
            except BaseException as error:
                job.error = error  # the parts before are queued: the job is not over before them
            return started, lane.mark(stream)

        def run_on_thread() -> Part:
            torch.cuda.set_device(self.device)
            return run()

        if threaded:
            job.futures.append(lane.thread.submit(run_on_thread))
        else:
            job.parts.append(run())

    # -- ends ----------------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        for lane in (self._load, self._store):
            while lane.jobs and self._end_first(lane, waits=False):
                pass
        if self._retired:
            self._end_retired()

    def wait(self, copies: Collection[Job]) -> None:
        for job in copies:
            lane = self._load if job.is_load else self._store
            # Jobs of a direction end in order, though an earlier one may go a slower way.
            while not job.over and lane.jobs:
                self._end_first(lane, waits=True)
        if self._retired:
            self._end_retired()

    def _end_first(self, lane: Lane, *, waits: bool) -> bool:
        """Ends the first job of a lane, if it is over. Returns whether it was; if it waits, it is."""
        job, seconds = lane.jobs[0], 0.0
        try:
            if waits:
                job.synchronize()
            elif not job.arrived():
                return False
            if job.error is None:
                seconds = job.seconds()
        except Exception as error:  # the GPU is lost: no event will ever be over
            job.error = error
        lane.jobs.popleft()
        self._failed += job.error is not None
        lane.give_tables(job.tables)
        lane.give_marks(job.parts)
        job.registration.jobs -= 1
        job.over = True
        job.then(seconds, job.error)
        return True

    def close(self) -> None:
        self.wait([*self._load.jobs, *self._store.jobs])
        expected.forget(self._load)
        registrations = [*self._retired, *([self._registration] if self._registration is not None else [])]
        self._registration = None
        self._retired = []
        for registration in registrations:
            registration.end()
        for registration in registrations:
            registration.join()
        for lane in (self._load, self._store):
            lane.close()
