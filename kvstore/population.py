"""Gives the pool its memory, in the background, while the daemon serves already."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from kvstore.backing import HUGE_PAGE_BYTES, SharedMemory

#: One step: small enough that the first slots are there within 100 ms, large enough to be little overhead.
CHUNK_BYTES: Final = 32 * HUGE_PAGE_BYTES


class Populator:
    """Threads that populate the pool from its start to its end.

    Args:
        report: Called in one of the threads with the length of each further piece that has its memory, in order of
            address.
        failed: Called in one of the threads, once, where the machine has no more memory; what was reported stays good.
    """

    def __init__(
        self,
        memory: SharedMemory,
        threads: int,
        report: Callable[[int], None],
        failed: Callable[[MemoryError], None],
    ) -> None:
        self._memory = memory
        self._report = report
        self._failed = failed
        self._lock = threading.Lock()  # guards the three below
        self._next = 0
        self._reported = 0
        self._done: set[int] = set()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"populate-{index}", daemon=True) for index in range(threads)
        ]

    def start(self) -> None:
        """Begins; returns at once."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends early and waits for the threads: at most one chunk each."""
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                start = self._next
                self._next += CHUNK_BYTES
            length = min(CHUNK_BYTES, self._memory.size_bytes - start)
            if length <= 0:
                return
            try:
                self._memory.populate(start, length)
            except MemoryError as error:
                first = not self._stop.is_set()
                self._stop.set()
                if first:
                    self._failed(error)
                return
            self._finish(start)

    def _finish(self, start: int) -> None:
        """Reports what is complete from the start on. Under the lock, so that reports come in order."""
        with self._lock:
            self._done.add(start)
            begin = self._reported
            while self._reported in self._done:
                self._done.remove(self._reported)
                self._reported = min(self._reported + CHUNK_BYTES, self._memory.size_bytes)
            if self._reported > begin:
                self._report(self._reported - begin)
