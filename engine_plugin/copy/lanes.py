"""A direction's streams, buffers and tables, and its jobs under way."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
from collections import defaultdict, deque
from typing import Final

import numpy as np
import torch

from engine_plugin.copy.contract import Then
from engine_plugin.copy.cudart import CudaRuntime
from engine_plugin.copy.plan import Section
from engine_plugin.copy.registration import Registration
from kvstore.threads import started_pool

log = logging.getLogger("vllm.kvstore")

#: GPU cycles, some 0.2 ms, by which a store begins later than the caller's stream lets it. At that same moment the few
#: bytes of the tokens that a step has sampled set out for the host, and a copy engine that has begun with a store's
#: copies goes on with those: every third prompt's first token came 20 ms late.
_GIVE_WAY_CYCLES: Final = 400_000
#: Columns of the smallest table; each larger one has twice as many.
_COLUMNS_MIN: Final = 512
#: Events around a part of a job.
Part = tuple[torch.cuda.Event, torch.cuda.Event]


class Table:
    """What a kernel is to move, see kernels.move: int64 [3, columns].

    Attributes:
        here: In pinned memory, which the GPU can read; `rows` is the same memory.
        there: The same on the GPU.
        itself: A table of its own bytes, in pinned memory: from `here` to `there`, in pieces of piece_bytes.
        pieces: How many.
    """

    def __init__(self, columns: int, device: torch.device) -> None:
        self.columns = columns
        self.here = torch.empty((3, columns), dtype=torch.int64, pin_memory=True)
        self.rows = self.here.numpy().view(np.uint64)
        self.there = torch.empty((3, columns), dtype=torch.int64, device=device)
        self.piece_bytes = min(columns * 8, 16384)
        at = np.arange(0, 3 * columns * 8, self.piece_bytes)
        self.pieces = len(at)
        words = np.full(len(at), self.piece_bytes // 8)
        self.itself = torch.from_numpy(
            np.stack((self.there.data_ptr() + at, self.here.data_ptr() + at, words))
        ).pin_memory()


class Job:
    """A job under way: over when all its parts are."""

    __slots__ = (
        "error",
        "futures",
        "is_load",
        "layers",
        "over",
        "parts",
        "ready",
        "registration",
        "size_bytes",
        "tables",
        "then",
    )

    def __init__(
        self, then: Then, size_bytes: int, registration: Registration, ready: torch.cuda.Event | None, *, is_load: bool
    ) -> None:
        self.then = then
        self.is_load = is_load
        self.size_bytes = size_bytes
        self.registration = registration
        #: What was on the caller's stream before is over; None: it was when the job began.
        self.ready = ready
        self.parts: list[Part] = []
        self.futures: list[concurrent.futures.Future[Part]] = []  # parts that a thread is queueing
        self.layers: list[torch.cuda.Event] = []
        self.tables: list[Table] = []  # what the GPU reads until the job is over
        self.error: BaseException | None = None
        self.over = False

    def follow_caller(self, stream: torch.cuda.Stream) -> None:
        """Has a stream wait for what was on the caller's before."""
        if self.ready is not None:
            stream.wait_event(self.ready)
            if not self.is_load:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(_GIVE_WAY_CYCLES)

    def wait_layer(self, layer: int) -> None:
        """Makes the current stream wait for the fragments of one layer; see CudaCopyEngine.load_by_layer."""
        self.layers[layer].wait()

    def arrived(self) -> bool:
        """Whether every part is over; an error of one is kept."""
        if self.futures:
            if not all(future.done() for future in self.futures):
                return False
            self._collect()
        return all(ended.query() for _, ended in self.parts)

    def synchronize(self) -> None:
        """Waits for every part."""
        self._collect()
        for _, ended in self.parts:
            ended.synchronize()

    def seconds(self) -> float:
        """Of the slowest part, without what it waited for. All are over."""
        longest = 0.0
        for started, ended in self.parts:
            waited = started.elapsed_time(self.ready) if self.ready is not None else 0.0
            longest = max(longest, started.elapsed_time(ended) - max(0.0, waited))  # a load fills its buffers meanwhile
        return longest / 1e3

    def _collect(self) -> None:
        for future in self.futures:
            try:
                self.parts.append(future.result())
            except BaseException as error:
                self.error = error
        self.futures = []


def mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event, now, on a stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


@dataclasses.dataclass(slots=True)
class Expected:
    """Buffers that were filled for a load before it came: the next ones in turn.

    Attributes:
        started: Before the first of their copies.
        section: What they hold.
    """

    started: torch.cuda.Event
    section: Section

    def holds(self, window: int, pool: np.ndarray, size: np.ndarray) -> bool:
        """Whether the buffer of this window of a load has just that: these addresses in the pool, and these sizes."""
        if window >= len(self.section.buffers):
            return False
        part = slice(*self.section.copy_bounds[window : window + 2])
        copies = self.section.copies
        return np.array_equal(copies.pool[part], pool) and np.array_equal(copies.size[part], size)


class Lane:
    """Streams, buffers and jobs of one direction."""

    def __init__(
        self, device: torch.device, runtime: CudaRuntime, *, priority: int, stages: int, stage_bytes: int
    ) -> None:
        self._handles = [runtime.new_stream(priority) for _ in range(3)]
        self.copies, self.kernels, self.pageable = (
            torch.cuda.ExternalStream(handle, device=device) for handle in self._handles
        )
        #: Queues what takes the host long.
        self.thread = started_pool(1, "kvstore-queue")
        self.jobs: deque[Job] = deque()
        self.stages = stages
        self.stage_bytes = stage_bytes
        self.stage: torch.Tensor | None = None
        self.stage_address = 0
        #: Handles of events, by buffer.
        self.filled = [runtime.new_event() for _ in range(stages)]
        self.emptied = [runtime.new_event() for _ in range(stages)]
        self.turn = 0
        self.expected: Expected | None = None
        #: Behind the copies for what was expected last: no job is under way because of them.
        self.expected_read: torch.cuda.Event | None = None
        self._device = device
        self._tables: defaultdict[int, list[Table]] = defaultdict(list)  # not in use, by columns
        self._marks: list[torch.cuda.Event] = []
        self._runtime = runtime
        if stage_bytes:
            try:
                self.stage = torch.empty(stages * stage_bytes, dtype=torch.uint8, device=device)
                self.stage_address = self.stage.data_ptr()
            except torch.OutOfMemoryError:
                log.warning(
                    "kvstore: no GPU memory for %d MB of buffers; copies are slower", stages * stage_bytes >> 20
                )

    def take_expected(self) -> Expected | None:
        """What the next buffers hold already. For whoever is about to use them, whatever for: it is said once."""
        expected, self.expected = self.expected, None
        return expected

    def take_table(self, columns: int) -> Table:
        """A table with room for so many columns. One that was used before costs nothing; memory for a new one may make
        the driver wait for all that the GPU does.
        """
        room = max(_COLUMNS_MIN, 1 << (columns - 1).bit_length())
        unused = self._tables[room]
        return unused.pop() if unused else Table(room, self._device)

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event with a time, now, on a stream. One that was used before costs half as much."""
        try:
            event = self._marks.pop()  # on whatever thread
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def give_marks(self, parts: list[Part]) -> None:
        """Takes the events of a job back that is over."""
        for part in parts:
            self._marks += part

    def give_tables(self, tables: list[Table]) -> None:
        """Takes tables back that no kernel reads any more."""
        for table in tables:
            self._tables[table.columns].append(table)
        tables.clear()

    def close(self) -> None:
        """Gives memory and streams back; no job is under way."""
        self.thread.shutdown(wait=True)
        self.stage = None
        self._tables.clear()
        for event in (*self.filled, *self.emptied):
            self._runtime.end_event(event)
        for handle in self._handles:
            self._runtime.end_stream(handle)
