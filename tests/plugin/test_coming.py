"""Blocks that the daemon brings up from disk while a request waits."""

from __future__ import annotations

import random

from engine_plugin.vllm.coming import PAUSE_MAX_S, STALL_S
from engine_plugin.vllm.runs import hash_of
from engine_plugin.vllm.stock import STOCK_BASE
from tests.plugin.engine_model import Engine, Request, stored
from tests.plugin.fakes import FakeDaemon

STEP_S = 0.01
DEADLINE_S = 0.5  # of a verdict, in the model
COMING_S = 5.0


def on_disk(count: int, ready: int = 0, coming_max: int = 64) -> tuple[FakeDaemon, Engine, Request]:
    """A request for a chain of which all but the first blocks is on disk only, and has been asked for."""
    daemon, keys = stored(1, count)
    for key in keys:
        daemon.copy_down(hash_of(key))
    for key in keys[ready:]:
        daemon.evict(hash_of(key))
    daemon.coming_max = coming_max
    daemon.calls.clear()
    engine = Engine(daemon)
    request = engine.submit("request", keys)
    engine.schedule()
    return daemon, engine, request


def come_up(daemon: FakeDaemon, count: int = 64) -> None:
    """The next blocks of the chain."""
    keys = [key for key in daemon.disk if key in daemon.coming][:count]
    for key in keys:
        daemon.come_up(key)


def load(engine: Engine, request: Request) -> int:
    """Runs the load, whose bytes the model checks. Returns how many blocks it had."""
    assert request.load is not None
    count = len(request.load.keys)
    while request.load is not None:
        engine.load_one(random.Random(0))
    return count


def steps(engine: Engine, request: Request, most: int) -> int:
    """Steps until the request no longer waits."""
    for number in range(most):
        if request.state != "waiting":
            return number
        engine.schedule()
    return most


def test_a_request_waits_until_its_blocks_are_up() -> None:
    daemon, engine, request = on_disk(8)
    assert steps(engine, request, 20) == 20
    assert engine.lookups.waiting()
    assert not engine.lookups.loading()
    come_up(daemon)
    assert steps(engine, request, 4) < 4
    assert load(engine, request) == 8
    engine.link.turn()
    assert not daemon.leases


def test_waiting_longer_than_a_verdict_may_take_is_no_silence() -> None:
    daemon, engine, request = on_disk(8, ready=2)
    waited = steps(engine, request, 90)
    assert waited * STEP_S > DEADLINE_S
    assert request.state == "waiting"
    assert not engine.link.why_not()
    come_up(daemon)
    steps(engine, request, 4)
    assert load(engine, request) == 8


def test_an_answer_in_the_last_moment_is_a_sign_of_life() -> None:
    daemon, keys = stored(1, 4)
    for key in keys:
        daemon.copy_down(hash_of(key))
        daemon.evict(hash_of(key))
    engine = Engine(daemon)
    request = engine.submit("request", keys)
    for _ in range(int(DEADLINE_S / STEP_S) - 1):
        engine.schedule(turn=False)
    engine.link.turn()
    for _ in range(int(DEADLINE_S / STEP_S) - 5):
        engine.schedule(turn=False)
        assert request.state == "waiting"


def test_a_prefix_larger_than_what_comes_up_at_a_time_comes_in_pieces_that_stay_pinned() -> None:
    daemon, engine, request = on_disk(12, ready=1, coming_max=3)
    pieces = 0
    while request.state == "waiting":
        assert len(daemon.coming) <= 3
        come_up(daemon)
        pieces += 1
        for _ in range(4):
            engine.schedule()
        for key in sorted(daemon.blocks):
            daemon.evict(key)  # whatever is not pinned leaves
        assert max((daemon.pins(slot) for slot in range(daemon.slots)), default=0) <= 2
        assert pieces < 12
    assert pieces >= 3
    assert load(engine, request) == 12
    engine.link.turn()
    assert not daemon.leases


def test_what_does_not_come_up_is_computed() -> None:
    daemon, engine, request = on_disk(8, ready=3)
    began = engine.time
    steps(engine, request, 1000)
    assert STALL_S <= engine.time - began < STALL_S + 0.1
    assert load(engine, request) == 3
    assert engine.lookups.counts["misses", "late"] == 5
    assert engine.lookups.counts["misses", "absent"] == 0
    assert len(daemon.reserved) == 5 + STOCK_BASE  # for what is computed instead


def test_a_disk_that_is_too_slow_is_waited_for_in_bounds() -> None:
    daemon, engine, request = on_disk(16)
    began = engine.time
    while request.state == "waiting":
        come_up(daemon, 1)
        for _ in range(int(0.9 / STEP_S)):
            engine.schedule()
        assert engine.time - began < COMING_S + 1
    assert engine.time - began >= COMING_S
    assert 4 <= load(engine, request) <= 6


def test_a_copy_that_is_lost_on_disk_ends_the_wait() -> None:
    daemon, engine, request = on_disk(8, ready=2)
    lost = [key for key in daemon.disk if key in daemon.coming][2]
    copy = daemon.disk.pop(lost)
    for key in list(daemon.coming):
        daemon.come_up(key)
    assert steps(engine, request, 6) < 6
    assert load(engine, request) == 4
    daemon.disk[lost] = copy


def test_few_calls_are_made_meanwhile() -> None:
    daemon, engine, request = on_disk(8)
    steps(engine, request, int(0.9 / STEP_S))
    asked = daemon.calls.count("acquire")
    for _ in range(100):
        engine.link.turn()  # woken by something else
    assert daemon.calls.count("acquire") == asked
    assert asked <= 0.9 / PAUSE_MAX_S + 15


def test_an_aborted_request_leaves_nothing_pinned() -> None:
    daemon, engine, request = on_disk(8, ready=3)
    assert daemon.leases
    engine.finish(request)
    engine.link.turn()
    assert not daemon.leases
    asked = daemon.calls.count("acquire")
    engine.time += 1
    engine.link.turn()
    assert daemon.calls.count("acquire") == asked


def test_a_reset_leaves_nothing_pinned() -> None:
    daemon, engine, _request = on_disk(8, ready=3)
    engine.reset()
    engine.link.turn()
    assert not daemon.leases


def test_a_closed_link_leaves_nothing_pinned() -> None:
    daemon, engine, _request = on_disk(8, ready=3)
    engine.link.close()
    assert not daemon.leases


def test_a_daemon_that_falls_silent_meanwhile_costs_one_deadline() -> None:
    daemon, engine, request = on_disk(8, ready=3)
    steps(engine, request, 10)
    began = engine.time
    while request.state == "waiting":
        engine.schedule(turn=False)  # the link hangs in a call
    assert engine.time - began < DEADLINE_S + 0.1
    assert request.state == "running"
    assert engine.link.why_not() == "silent"
    engine.link.turn()
    assert not daemon.leases


def test_a_call_without_an_answer_leaves_what_has_come_up() -> None:
    daemon, engine, request = on_disk(8, ready=3)
    daemon.silent = True
    assert steps(engine, request, 6) < 6
    daemon.silent = False
    assert load(engine, request) == 3


def test_a_daemon_that_dies_meanwhile_costs_a_miss() -> None:
    daemon, engine, request = on_disk(8, ready=3)
    daemon.die()
    assert steps(engine, request, 6) < 6
    assert request.state == "running"
    assert engine.lookups.counts["misses", "unavailable"] == 8


def test_pins_of_an_earlier_life_are_not_mixed_with_new_ones() -> None:
    daemon, engine, request = on_disk(8, ready=3)
    daemon.die()
    daemon.start()
    daemon.promote([hash_of(key) for key in request.keys])
    come_up(daemon)
    engine.attach()
    assert steps(engine, request, 6) < 6
    assert request.state == "running"
    assert engine.lookups.counts["misses", "stale"] == 8
    engine.link.turn()
    assert not daemon.leases


def test_an_engine_that_only_stores_does_not_wait() -> None:
    daemon, keys = stored(1, 6)
    for key in keys:
        daemon.copy_down(hash_of(key))
        daemon.evict(hash_of(key))
    engine = Engine(daemon, pin=False)
    request = engine.submit("request", keys)
    for _ in range(5):
        engine.schedule()
    assert request.computed == 6
    assert not engine.copies
    assert not daemon.coming
