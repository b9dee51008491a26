"""Pools that do what they were given, or nothing of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvstore.threads import started_pool


def no_threads_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which so many more can be had."""
    start: Callable[[threading.Thread], None] = threading.Thread.start
    left = count

    def limited(thread: threading.Thread) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


def test_a_pool_works_where_no_more_threads_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = started_pool(3, "kvstore-test")
    no_threads_after(0, monkeypatch)
    together = threading.Barrier(3, timeout=60)
    calls = [pool.submit(together.wait) for _ in range(3)]
    assert sorted(call.result(60) for call in calls) == [0, 1, 2]
    pool.shutdown()
    with pytest.raises(RuntimeError):
        pool.submit(together.wait)


def test_a_pool_that_cannot_be_had_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    no_threads_after(2, monkeypatch)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="can't start"):
        started_pool(3, "kvstore-test")
    assert threading.active_count() == before
