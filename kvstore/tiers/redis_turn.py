"""Who may touch borrowed buffers, and until when.

A call hands its blocks to threads in pieces, one Turn each, and must not return before no thread touches a buffer any
more, whatever hangs. Two cases: a thread that still looks for a connection (a name that does not resolve, a server that
does not greet) has touched nothing; it is told not to begin, and nobody waits for it. A thread that moves bytes sits in
send or receive on a socket; that socket is shut down, which wakes it at once, and it is waited for. So no call ever
has to say BUFFER_LOST.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from kvstore.tiers.io_threads import IoThreads, Job, Lane

R = TypeVar("R")
#: Beyond the stall limit of a socket, so that it is the thread that notices first and says what happened.
_GRACE_S: Final = 0.05


class Turn:
    """One piece of a call, on one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._abandoned = False

    @property
    def abandoned(self) -> bool:
        return self._abandoned

    def begin(self, connected: socket.socket) -> bool:
        """The thread wants to touch the buffers. False: it must not, ever."""
        with self._lock:
            if self._abandoned:
                return False
            self._socket = connected
            return True

    def end(self) -> None:
        """The thread will not touch the buffers any more."""
        with self._lock:
            self._socket = None

    def abandon(self) -> bool:
        """The call wants its buffers back. False: a thread is about to let go of them and has to be waited for."""
        with self._lock:
            self._abandoned = True
            if self._socket is None:
                return True
            try:
                # Past ssl's own method, which would drop its state under the thread that reads.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            except OSError:
                pass  # it was lost already, so the thread is awake
            return False


class Stopper:
    """Stops a batch that makes several calls one after another, whichever is under way, and those to come."""

    def __init__(self) -> None:
        self.stopped = False
        self._call: Call[Any] | None = None

    def watch(self, call: Call[R]) -> Call[R]:
        """From now on this is the call to stop."""
        self._call = call
        if self.stopped:
            call.stop()
        return call

    def stop(self) -> None:
        self.stopped = True
        if self._call is not None:
            self._call.stop()


class Progress:
    """When a server last did anything; written by all threads."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    def note(self) -> None:
        self.at = time.monotonic()


class Call(Generic[R]):
    """Pieces of work on threads that are waited for together. On the event loop.

    Args:
        until: Latest end, by time.monotonic.
        stall_s: Longest time without progress of any server.
    """

    def __init__(self, threads: IoThreads, lane: Lane, until: float, stall_s: float, progress: Progress) -> None:
        self._threads = threads
        self._lane = lane
        self.until = until
        self._begun = time.monotonic()
        self._stall_s = stall_s + _GRACE_S
        self._progress = progress
        self._pieces: list[tuple[Job[R], Turn]] = []
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def stop(self) -> None:
        """Gives up what is not finished; wait() then returns soon."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    def submit(self, work: Callable[[Turn], R]) -> None:
        """Queues a piece."""
        turn = Turn()
        self._pieces.append((self._threads.submit(self._lane, lambda: work(turn)), turn))

    async def wait(self) -> list[tuple[R | None, bool]]:
        """Results of the pieces, in order, None for those that were given up; and whether they were begun and stalled.

        Must not be cancelled: see run_to_end.
        """
        pending: set[asyncio.Future[Any]] = {job.future for job, _ in self._pieces}
        stalled = False
        while pending and not self._stopped.done():
            now = time.monotonic()
            stall_at = max(self._begun, self._progress.at) + self._stall_s
            if now >= min(self.until, stall_at):
                # A caller that leaves no time says nothing about the servers.
                stalled = now >= stall_at
                break
            _, pending = await asyncio.wait(
                pending | {self._stopped},
                timeout=min(self.until, stall_at) - now,
                return_when=asyncio.FIRST_COMPLETED,
            )
            pending.discard(self._stopped)
        results: list[tuple[R | None, bool]] = []
        to_wait_for = []
        withdrawn = set()
        for job, turn in self._pieces:
            if job.future.done():
                continue
            if self._threads.withdraw(job):
                withdrawn.add(job)
            elif not turn.abandon():
                to_wait_for.append(job.future)
        if to_wait_for:
            await asyncio.wait(to_wait_for)
        for job, _ in self._pieces:
            # A thread that is not waited for: its result, if ever there is one, is dropped.
            got = job.future.result() if job.future.done() and not job.future.cancelled() else None
            results.append((got, got is None and stalled and job not in withdrawn))
        self._pieces.clear()
        return results


async def run_to_end(stop: Callable[[], None], work: Any) -> Any:
    """Awaits a coroutine that must not be cut off: if the caller is cancelled, it is told to stop and still awaited."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop()
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                continue
        if not task.cancelled():
            task.exception()
        raise
