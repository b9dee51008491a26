"""Threads that move bytes for an event loop: some that only read, some that only write, loads first.

Not concurrent.futures: a job that has not started can be taken back (its buffers are then untouched), a reader that
waits for a thread keeps writers from starting, and a thread that hangs in the kernel keeps neither the loop nor the end
of the process waiting.
"""

from __future__ import annotations

import asyncio
import collections
import enum
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

R = TypeVar("R")


class Lane(enum.StrEnum):  # strings hash faster than members of a plain Enum
    """What kind of thread takes a job."""

    READ = "read"
    WRITE = "write"  # takes nothing while a read waits
    COMMIT = "commit"  # one thread, the only one that writes the index
    KEEP = "keep"  # one thread: files made, removed, pre-written, probed


class Job(Generic[R]):
    """One call on a thread. Its future is done on the loop, also when it was withdrawn (cancelled)."""

    __slots__ = ("call", "future", "lane", "started")

    def __init__(self, lane: Lane, call: Callable[[], R], future: asyncio.Future[R]) -> None:
        self.lane = lane
        self.call = call
        self.future = future
        self.started = False


class IoThreads:
    """The threads and their queues. Made, fed and closed on one event loop."""

    def __init__(self, name: str, threads: dict[Lane, int]) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._wake = {lane: threading.Condition(self._lock) for lane in Lane}
        self._queues: dict[Lane, collections.deque[Job[Any]]] = {lane: collections.deque() for lane in Lane}
        #: Jobs that are not finished: queued and running ones. Owned by the loop.
        self.depth: dict[Lane, int] = dict.fromkeys(Lane, 0)
        self._done: collections.deque[tuple[Job[Any], Any, BaseException | None]] = collections.deque()
        #: The loop was told of what is in _done, and has not looked yet.
        self._told = False
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"{name}-{lane.value}-{index}", daemon=True)
            for lane, count in threads.items()
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, lane: Lane, call: Callable[[], R]) -> Job[R]:
        """Queues a call. Loop only."""
        job = Job(lane, call, self._loop.create_future())
        self.depth[lane] += 1
        with self._lock:
            self._queues[lane].append(job)
            self._wake[lane].notify()
        return job

    async def call(self, lane: Lane, call: Callable[[], R]) -> R:
        """Runs a call on a thread. If the task is cancelled, the call goes on."""
        return await asyncio.shield(self.submit(lane, call).future)

    def withdraw(self, job: Job[Any]) -> bool:
        """Takes back a job. False: a thread has it, or is through with it. Loop only."""
        with self._lock:
            if job.started:
                return False
            self._queues[job.lane].remove(job)
            job.started = True
            self._let_writers_go()
        self._settle(job)
        job.future.cancel()
        return True

    def close(self, wait_s: float) -> bool:
        """Ends the threads once their queues are empty. False: one still hangs after wait_s; it is left behind."""
        with self._lock:
            self._closing = True
            for condition in self._wake.values():
                condition.notify_all()
        for thread in self._threads:
            thread.join(wait_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _settle(self, job: Job[Any]) -> None:
        self.depth[job.lane] -= 1

    def _let_writers_go(self) -> None:
        if not self._queues[Lane.READ]:
            self._wake[Lane.WRITE].notify_all()

    # -- on the threads ------------------------------------------------------------------------------------------------

    def _run(self, lane: Lane) -> None:
        while (job := self._next(lane)) is not None:
            result: Any = None
            failure: BaseException | None = None
            try:
                result = job.call()
            except BaseException as error:
                failure = error
            self._done.append((job, result, failure))
            del job, result, failure  # a borrowed buffer must not live on in this frame while it waits
            with self._lock:
                told, self._told = self._told, True
            if told:
                continue
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

    def _next(self, lane: Lane) -> Job[Any] | None:
        queue, reads = self._queues[lane], self._queues[Lane.READ]
        with self._lock:
            while not queue or (lane is Lane.WRITE and reads):
                if self._closing and not queue:
                    return None
                self._wake[lane].wait()
            job = queue.popleft()
            job.started = True
            if lane is Lane.READ:
                self._let_writers_go()
            return job

    # -- on the loop again ---------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        with self._lock:
            self._told = False  # what comes from now on is told anew
        while self._done:
            job, result, failure = self._done.popleft()
            self._settle(job)
            if job.future.cancelled():
                continue
            if failure is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(failure)
