"""A loop that looks before it sleeps, by a clock that moves with each reading."""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import Iterator

import pytest

from kvstore.clock import SystemClock
from kvstore.looking import LookingSelector
from kvstore.testing import FakeClock
from tests.support import PATIENCE_S

READING_S = 0.0001
LOOK_S = 50 * READING_S


class Ticking(FakeClock):
    """Each reading takes a tenth of a millisecond, or as long as the test says."""

    reading_s = READING_S

    def monotonic(self) -> float:
        self.advance(self.reading_s)
        return super().monotonic()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """What the system was asked to wait for; it finds nothing."""
    timeouts: list[float | None] = []

    def select(self: selectors.EpollSelector, timeout: float | None = None) -> list[object]:
        timeouts.append(timeout)
        return []

    monkeypatch.setattr(selectors.EpollSelector, "select", select)
    return timeouts


@pytest.fixture
def clock() -> Ticking:
    return Ticking()


@pytest.fixture
def looking(clock: Ticking) -> Iterator[LookingSelector]:
    with LookingSelector(LOOK_S, clock) as selector:
        yield selector


def test_it_sleeps_while_nothing_is_expected(looking: LookingSelector, asked: list[float | None]) -> None:
    for timeout in (None, 60.0, None):
        assert looking.select(timeout) == []
    assert asked == [None, 60.0, None]


def test_after_each_call_it_looks_once_and_for_so_long(looking: LookingSelector, asked: list[float | None]) -> None:
    for _ in range(2):
        asked.clear()
        looking.expect()
        assert looking.select(None) == []
        looks = len(asked)
        assert asked == [0] * looks
        assert LOOK_S / READING_S - 3 <= looks <= LOOK_S / READING_S + 3
        # From here on the loop costs nothing until the next call.
        for _ in range(3):
            looking.select(None)
        assert asked[looks:] == [None] * 3


def test_a_timer_ends_a_look_and_not_what_is_left_of_it(looking: LookingSelector, asked: list[float | None]) -> None:
    looking.expect()
    looking.select(LOOK_S / 2)
    assert 0 < len(asked) < LOOK_S / READING_S * 0.6
    before = len(asked)
    looking.select(None)
    assert set(asked) == {0}
    assert len(asked) > before + 5
    looking.select(None)
    assert asked[-1] is None


def test_where_others_want_the_cpu_it_sleeps(
    looking: LookingSelector, asked: list[float | None], clock: Ticking
) -> None:
    looking.expect()
    clock.reading_s = 20 * READING_S  # the look that is begun now takes that long
    looking.select(None)
    assert set(asked) == {0} and len(asked) <= 2
    clock.reading_s = READING_S
    asked.clear()
    for _ in range(3):
        looking.expect()
        looking.select(None)
    assert asked == [None] * 3
    clock.advance(1.0)
    asked.clear()
    looking.expect()
    looking.select(None)
    assert len(asked) > 10 and set(asked) == {0}


def test_a_loop_that_has_work_does_not_look(looking: LookingSelector, asked: list[float | None]) -> None:
    looking.expect()
    looking.select(0)
    assert asked == [0]


def test_without_time_to_look_it_never_does(asked: list[float | None]) -> None:
    with LookingSelector(0.0, Ticking()) as selector:
        selector.expect()
        selector.select(None)
    assert asked == [None]


def test_what_comes_is_found_at_once(looking: LookingSelector) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        looking.register(ours, selectors.EVENT_READ)
        theirs.send(b"x")
        looking.expect()
        ((key, events),) = looking.select(None)
        assert (key.fileobj, events) == (ours, selectors.EVENT_READ)


def test_a_loop_on_it_runs_timers_threads_and_sockets() -> None:
    async def work(selector: LookingSelector) -> list[str]:
        loop = asyncio.get_running_loop()
        selector.expect()
        done = [await asyncio.sleep(0.001, "timer"), await asyncio.to_thread(lambda: "thread")]
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        loop.call_later(0.001, theirs.send, b"socket")
        selector.expect()
        done.append((await reader.read(6)).decode())
        writer.close()
        return done

    selector = LookingSelector(PATIENCE_S, SystemClock())
    ours, theirs = socket.socketpair()
    with theirs, asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        assert runner.run(work(selector)) == ["timer", "thread", "socket"]
