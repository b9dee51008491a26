"""Direct reads without a GPU: files read by threads with pread, into a buffer in host memory, checked by xxhash there.

In place of engine_plugin.copy.gds and .stage; what goes through is the same.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from engine_plugin.copy.contract import Fragments
from engine_plugin.copy.reads import HALVES, DirectReads


class _Read:
    def __init__(self, future: concurrent.futures.Future[int], waited: threading.Event) -> None:
        self._future, self._waited = future, waited

    def get(self) -> int:
        self._waited.set()
        return self._future.result()


class PlainFiles:
    """Attributes:
    go: Reads wait for this; set at first.
    entered: A read has begun.
    waited: Somebody waits for a read, or has.
    broken: What reads raise.
    reading: Reads under way.
    """

    how = "gds_compat"

    def __init__(self) -> None:
        self._threads = concurrent.futures.ThreadPoolExecutor(4)
        self.go, self.entered, self.waited = threading.Event(), threading.Event(), threading.Event()
        self.go.set()
        self.broken: Exception | None = None
        self._lock = threading.Lock()
        self.reading = 0
        self.closed = False

    def read(self, path: str, offset: int, size_bytes: int, into: memoryview) -> _Read:
        return _Read(self._threads.submit(self._read, path, offset, into[:size_bytes]), self.waited)

    def _read(self, path: str, offset: int, into: memoryview) -> int:
        with self._lock:
            self.reading += 1
        try:
            self.entered.set()
            assert self.go.wait(60)
            if self.broken is not None:
                raise self.broken
            with open(path, "rb") as file:
                return os.preadv(file.fileno(), [into], offset)
        finally:
            with self._lock:
                self.reading -= 1

    def tidy(self) -> None:
        assert not self.reading

    def close(self) -> None:
        self._threads.shutdown()
        self.closed = True


class HostStage:
    def __init__(self, block_bytes: int, rows: int) -> None:
        self.rows = rows
        self.memory = np.zeros((HALVES, rows, block_bytes), np.uint8)
        self.closed = False

    def mark(self) -> None: ...

    def place(self, half: int, row: int) -> Any:
        return memoryview(self.memory[half, row])  # type: ignore[arg-type]

    def checks(self, half: int, count: int) -> list[int]:
        return [xxhash.xxh3_64_intdigest(row) for row in self.memory[half, :count]]

    def scatter(self, half: int, fragments: Fragments, after: None) -> None:
        start = self.memory[half].ctypes.data
        arrays = (fragments.kv.tolist(), fragments.pool.tolist(), fragments.size.tolist())
        for kv, place, size in zip(*arrays, strict=True):
            assert place + size <= self.memory[half].nbytes
            ctypes.memmove(kv, start + place, size)

    def settle(self, half: int) -> None: ...

    def close(self) -> None:
        self.closed = True


def host_reads(
    block_bytes: int, rows: int = 2, now: Callable[[], float] = time.monotonic
) -> tuple[DirectReads, PlainFiles]:
    """Direct reads, and the files to make them fail."""
    files = PlainFiles()
    return DirectReads(files, HostStage(block_bytes, rows), block_bytes, now), files
