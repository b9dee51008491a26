"""One batch of a disk tier on its way through the I/O threads, and how it ends when the medium does not answer."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvstore.tiers.io_threads import IoThreads, Job, Lane
from kvstore.tiers.transfer import Piece, Run, deal_runs, plan_runs

#: Bytes of one job: not so few that the threads' hand-over costs more than the transfer, not so many that one thread
#: has them all or a load waits long behind a store.
JOB_BYTES_MIN: Final = 512 << 10
JOB_BYTES_MAX: Final = 4 << 20

#: How much longer than its deadline a transfer that has begun may take before the medium counts as hung.
GRACE_S: Final = 1.0

Results = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How a batch ended.

    Attributes:
        moved: (place, result) of each block that a thread was through with.
        withdrawn: Places that no thread touched.
        hung: Jobs that a thread still has, with their places; the buffers are lost until they end.
        cancelled: The task was cancelled meanwhile.
    """

    moved: Results
    withdrawn: list[int]
    hung: list[tuple[Job[Results], list[int]]]
    cancelled: bool


async def run_batch(
    threads: IoThreads,
    lane: Lane,
    lanes: int,
    call: Callable[[Sequence[Run]], Results],
    pieces: Sequence[Piece],
    files: Sequence[tuple[int, int]],
    deadline: float,
) -> Ended:
    """Has threads move pieces, in runs of neighbours, until a deadline.

    Cancelling the task takes back what no thread has begun, and then still waits for the rest until the deadline, since
    the buffers are borrowed.

    Args:
        lanes: Threads of the lane.
        files: Descriptor and extent size for each piece.
        deadline: By the loop's clock.
    """
    runs = plan_runs([fd for fd, _ in files], [stride for _, stride in files], pieces)
    jobs: list[tuple[Job[Results], list[int]]] = []
    for dealt in deal_runs(runs, lanes, JOB_BYTES_MIN, JOB_BYTES_MAX):
        places = [piece.place for run in dealt for piece in run.pieces]
        jobs.append((threads.submit(lane, functools.partial(call, dealt)), places))
    cancelled = await _until([job for job, _ in jobs], threads, deadline)
    # A deadline that was short says nothing about the medium: what a thread has begun may end.
    begun = [job for job, _ in jobs if not job.future.done() and not threads.withdraw(job)]
    cancelled |= await _until(begun, threads, asyncio.get_running_loop().time() + GRACE_S)
    ended = Ended([], [], [], cancelled)
    for job, places in jobs:
        if job.future.cancelled():
            ended.withdrawn.extend(places)
        elif job.future.done():
            ended.moved.extend(job.future.result())
        else:
            ended.hung.append((job, places))
    return ended


async def _until(jobs: list[Job[Any]], threads: IoThreads, deadline: float) -> bool:
    """Waits for jobs. Whether the task was cancelled."""
    loop = asyncio.get_running_loop()
    cancelled = False
    waiting = {job.future for job in jobs}
    while waiting and (left := deadline - loop.time()) > 0:
        try:
            _, waiting = await asyncio.wait(waiting, timeout=left)
        except asyncio.CancelledError:
            cancelled = True
            for job in jobs:
                if not job.future.done():
                    threads.withdraw(job)
            waiting = {job.future for job in jobs if not job.future.done()}
    return cancelled


def as_bytes(buffer: memoryview) -> memoryview:
    """A buffer of bytes over the same memory."""
    return buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
