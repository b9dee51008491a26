"""Stores end when their bytes are there, also where nobody looks; an engine is called by one thread at a time."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine_plugin.copy.contract import CopyEngine, CopyStats, Fragments, Then
from engine_plugin.copy.watched import WatchedCopies

NOTHING = Fragments(*(np.zeros(0, np.uint64) for _ in range(3)))


class Looked(CopyEngine):
    """Jobs that end in a poll after their bytes have arrived, as on a GPU."""

    def __init__(self) -> None:
        self.jobs: deque[Then] = deque()
        self.arrived = threading.Event()
        self.polls = 0
        self.fail = False
        self._inside = threading.Lock()

    def _alone(self) -> Any:
        assert self._inside.acquire(blocking=False), "two threads at a time"
        return self._inside

    def use_pool(self, pool: Any) -> None:
        self._alone().release()

    def store(self, fragments: Fragments, then: Then, *, beside_compute: bool = False) -> Any:
        inside = self._alone()
        try:
            if self.fail:
                raise RuntimeError("no pool")
            self.jobs.append(then)
            return object()
        finally:
            inside.release()

    load = store

    def poll(self) -> None:
        inside = self._alone()
        self.polls += 1
        while self.jobs and self.arrived.is_set():
            self.jobs.popleft()(0.0, None)
        inside.release()

    def wait(self, copies: Any) -> None:
        self.arrived.set()
        self.poll()

    def stats(self) -> CopyStats:
        return CopyStats()

    def close(self) -> None:
        self.poll()


@pytest.fixture
def watched() -> Iterator[tuple[Looked, WatchedCopies]]:
    engine = Looked()
    copies = WatchedCopies(engine)
    yield engine, copies
    copies.close()


def test_a_store_ends_though_nobody_looks(watched: tuple[Looked, WatchedCopies]) -> None:
    engine, copies = watched
    over = threading.Event()
    copies.store(NOTHING, lambda _seconds, _error: over.set())
    assert not over.wait(0.02)
    engine.arrived.set()
    assert over.wait(20)


def test_nobody_looks_while_no_store_is_under_way(watched: tuple[Looked, WatchedCopies]) -> None:
    engine, copies = watched
    engine.fail = True
    with pytest.raises(RuntimeError):
        copies.store(NOTHING, lambda _seconds, _error: None)
    engine.fail = False
    copies.load(NOTHING, lambda _seconds, _error: None)
    before = engine.polls
    assert not engine.arrived.wait(0.05)
    assert engine.polls <= before + 1
    copies.wait([])
    assert not engine.jobs


def test_the_engine_is_called_by_one_thread_at_a_time(watched: tuple[Looked, WatchedCopies]) -> None:
    engine, copies = watched
    engine.arrived.set()
    rng = random.Random(0)
    ended: list[BaseException | None] = []
    begun = 0
    for _ in range(2000):
        begin = rng.choice((None, copies.store, copies.load))
        if begin is None:
            copies.poll()
        else:
            begin(NOTHING, lambda _seconds, error: ended.append(error))
            begun += 1
    copies.poll()
    assert ended == [None] * begun
