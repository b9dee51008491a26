"""A direction's streams and buffers, and its jobs under way."""

from __future__ import annotations

import concurrent.futures
import logging
from collections import deque
from typing import Any, Final

import torch

from engine_plugin.copy.contract import Then
from engine_plugin.copy.cudart import CudaRuntime
from engine_plugin.copy.registration import Registration

log = logging.getLogger("vllm.kvstore")

#: Buffers of a direction: one is filled, one is emptied, one is between the two.
STAGES: Final = 3
#: Events around a part of a job.
Part = tuple[torch.cuda.Event, torch.cuda.Event]


class Job:
    """A job under way: over when all its parts are."""

    __slots__ = ("error", "futures", "keep", "layers", "over", "parts", "ready", "registration", "size_bytes", "then")

    def __init__(self, then: Then, size_bytes: int, registration: Registration, writing: torch.cuda.Stream) -> None:
        self.then = then
        self.size_bytes = size_bytes
        self.registration = registration
        #: What was on the caller's stream before is over.
        self.ready = mark(writing)
        self.parts: list[Part] = []
        self.futures: list[concurrent.futures.Future[Part]] = []  # parts that a thread is queueing
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
            waited = max(0.0, started.elapsed_time(self.ready))  # a load fills its buffers while it waits
            longest = max(longest, started.elapsed_time(ended) - waited)
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


class Lane:
    """Streams, buffers and jobs of one direction."""

    def __init__(self, device: torch.device, runtime: CudaRuntime, *, priority: int, stage_bytes: int) -> None:
        self._handles = [runtime.new_stream(priority) for _ in range(3)]
        self.copies, self.kernels, self.pageable = (
            torch.cuda.ExternalStream(handle, device=device) for handle in self._handles
        )
        #: Queues what takes the host long.
        self.thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="kvstore-queue")
        self.jobs: deque[Job] = deque()
        self.stage_bytes = stage_bytes
        self.stage: torch.Tensor | None = None
        self.filled = [torch.cuda.Event() for _ in range(STAGES)]
        self.emptied = [torch.cuda.Event() for _ in range(STAGES)]
        self.turn = 0
        self._runtime = runtime
        if stage_bytes:
            try:
                self.stage = torch.empty(STAGES * stage_bytes, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:
                log.warning(
                    "kvstore: no GPU memory for %d MB of buffers; copies are slower", STAGES * stage_bytes >> 20
                )

    def close(self) -> None:
        """Gives memory and streams back; no job is under way."""
        self.thread.shutdown(wait=True)
        self.stage = None
        for handle in self._handles:
            self._runtime.end_stream(handle)
