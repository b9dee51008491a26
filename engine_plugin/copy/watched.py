"""A copy engine whose stores end when they end, and not when the caller next looks.

vLLM's worker looks at its copies once in a step. Where nothing but `poll` ends a job, as on a GPU, a thread polls while
stores are under way, so that what follows from a store's end does not wait for the step. Loads do not make it run: only
a step takes note of their end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any, Final

import numpy as np

from engine_plugin.copy.contract import Copy, CopyEngine, CopyStats, Fragments, Pool, Then

#: Pause between two looks: a small part of a step, and long against what a look costs (some microseconds a job).
LOOK_S: Final = 0.001


class WatchedCopies(CopyEngine):
    """See the module. Owns the engine that does the work, and calls it from one thread at a time.

    Args:
        enter: Called on the thread before its first look, to choose its device.
    """

    def __init__(self, engine: CopyEngine, enter: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._enter = enter
        self._lock = threading.Lock()
        self._wake = threading.Condition()
        self._stores = 0  # under way; guarded by _wake
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="kvstore-copy-watch", daemon=True)
        self._thread.start()

    def use_pool(self, pool: Pool | None) -> None:
        with self._lock:
            self._engine.use_pool(pool)

    def store(self, fragments: Fragments, then: Then, *, beside_compute: bool = False) -> Copy:
        def over(seconds: float, error: BaseException | None) -> None:
            self._count(-1)
            then(seconds, error)

        self._count(1)
        try:
            with self._lock:
                return self._engine.store(fragments, over, beside_compute=beside_compute)
        except BaseException:
            self._count(-1)  # nothing was begun
            raise

    def load(self, fragments: Fragments, then: Then, *, beside_compute: bool = False) -> Copy:
        with self._lock:
            return self._engine.load(fragments, then, beside_compute=beside_compute)

    def expect_load(self, starts: np.ndarray, size_bytes: int) -> None:
        with self._lock:
            self._engine.expect_load(starts, size_bytes)

    def expect_nothing(self) -> None:
        with self._lock:
            self._engine.expect_nothing()

    def poll(self) -> None:
        with self._lock:
            self._engine.poll()

    def wait(self, copies: Collection[Any]) -> None:
        with self._lock:
            self._engine.wait(copies)

    def stats(self) -> CopyStats:
        return self._engine.stats()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        with self._lock:
            self._engine.close()

    def _count(self, change: int) -> None:
        with self._wake:
            self._stores += change
            if change > 0:
                self._wake.notify()

    def _watch(self) -> None:
        self._enter()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stores or self._closed)
                self._wake.wait_for(lambda: self._closed, LOOK_S)
                if self._closed:
                    return
            self.poll()
