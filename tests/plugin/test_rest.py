"""An engine that waits for blocks and nothing else makes no steps meanwhile."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from engine_plugin.vllm.coming import Expected
from engine_plugin.vllm.lookups import REST_STEPS
from engine_plugin.vllm.rest import GIVE_WAY_S, LOADING_MAX_S, LOOK_S, REST_MAX_S, Rest
from tests.plugin.engine_model import Engine, key_of
from tests.plugin.fakes import FakeDaemon


class Loop:
    """An engine's loop. Time passes while it waits."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[str] = queue.Queue()
        self.time = 0.0
        self.answer_at = self.sent_at = float("inf")
        self.rest = Rest(self.wait, lambda: self.input_queue, lambda: self.time)

    def wait(self, seconds: float) -> bool:
        self.time += seconds
        if self.time >= self.sent_at and self.input_queue.empty():
            self.input_queue.put("a request")
        return self.time >= self.answer_at

    def run(self, due: Any) -> float:
        """Returns how long it has rested."""
        began = self.time
        self.rest.rest(due)
        return self.time - began


def test_an_engine_rests_until_an_answer_is_in() -> None:
    loop = Loop()
    loop.answer_at = 3.0
    assert loop.run(lambda: loop.time + 0.5) == pytest.approx(3.0, abs=2 * GIVE_WAY_S)


def test_whatever_is_sent_to_it_ends_the_rest() -> None:
    loop = Loop()
    loop.sent_at = 1.0
    assert loop.run(lambda: loop.time + 0.5) == pytest.approx(1.0, abs=2 * GIVE_WAY_S)


def test_so_does_an_answer_that_is_overdue() -> None:
    loop = Loop()
    assert loop.run(lambda: min(loop.time + 0.5, 2.0)) == pytest.approx(2.0, abs=2 * GIVE_WAY_S)


def test_no_rest_is_endless() -> None:
    loop = Loop()
    assert loop.run(lambda: loop.time + 0.5) == pytest.approx(REST_MAX_S, abs=2 * GIVE_WAY_S)


def test_where_nobody_knows_what_is_sent_the_pause_is_short() -> None:
    loop = Loop()
    loop.rest = Rest(loop.wait, lambda: None, lambda: loop.time)
    assert loop.run(lambda: loop.time + 0.5) == pytest.approx(GIVE_WAY_S)


def test_a_load_is_waited_for_until_it_ends_or_there_is_something_else_to_do() -> None:
    def waited(loop: Loop, ends: float) -> float:
        began = loop.time
        loop.rest.until(lambda: loop.time >= ends)
        return loop.time - began

    assert waited(Loop(), 0.003) == pytest.approx(0.003, abs=2 * LOOK_S)
    assert waited(Loop(), 1.0) == pytest.approx(LOADING_MAX_S, abs=2 * LOOK_S)
    for event in ("answer_at", "sent_at"):
        loop = Loop()
        setattr(loop, event, 0.001)
        assert waited(loop, 1.0) == pytest.approx(0.001, abs=2 * LOOK_S)
    loop.rest = Rest(loop.wait, lambda: None, lambda: loop.time)
    assert waited(loop, 1.0) == 0.0


def test_all_wait_says_whether_there_is_anything_else_to_do() -> None:
    daemon = FakeDaemon(64)
    engine = Engine(daemon)
    keys = [key_of(1, place) for place in range(4)]
    engine.expected = {"early": Expected(4, 0, 1000.0), "too": Expected(4, 0, 1000.0)}
    engine.submit("early", keys)
    engine.submit("too", keys)
    for _ in range(REST_STEPS + 1):
        assert not engine.lookups.all_wait(engine.requests)
        engine.schedule()
    assert engine.lookups.all_wait(engine.requests)
    assert engine.lookups.due() > engine.time
    engine.submit("other", [key_of(2, 0)])  # is not promised to anybody: it is computed
    for _ in range(3):
        engine.schedule()
        assert not engine.lookups.all_wait(engine.requests)
    engine.finish(engine.requests["other"])
    assert engine.lookups.all_wait(engine.requests)
    engine.time = 1000.0  # what was promised has not come
    engine.schedule()
    engine.schedule()
    assert not engine.lookups.all_wait(engine.requests)
    assert engine.lookups.due() == 0.0
