"""Pools that do what they were given, or nothing of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvstore.threads import started_pool
from kvstore.tiers.side_threads import SideThreads


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


@pytest.mark.parametrize("there", [1, 2, 4])
def test_side_threads_do_with_those_that_there_are(there: int, monkeypatch: pytest.MonkeyPatch) -> None:
    no_threads_after(there, monkeypatch)
    before = threading.active_count()
    with SideThreads(4, "kvstore-test") as threads:
        assert threading.active_count() == before + there
        assert list(threads.map(lambda number: 2 * number, range(100), 3)) == [2 * number for number in range(100)]
    assert threading.active_count() == before


def test_what_one_side_thread_raises_ends_the_rest() -> None:
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        if number == 2:
            raise OSError("broken")
        return number

    with SideThreads(2, "kvstore-test") as threads:
        results = threads.map(work, range(1000), 3)
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(OSError, match="broken"):
            next(results)
    assert len(begun) < 10
