"""`kvstore.drop_on_load`: exactly one engine gets the blocks, and they are gone when it has loaded them."""

from __future__ import annotations

import random

import pytest

from engine_plugin.vllm.runs import hash_of
from engine_plugin.vllm.stock import STOCK_IDLE_S
from tests.plugin.engine_model import Engine, Request, key_of, stored
from tests.plugin.fakes import FakeDaemon

BLOCKS = 6


def consumers(count: int = 2) -> tuple[FakeDaemon, list[bytes], list[Engine]]:
    daemon, keys = stored(1, BLOCKS)
    return daemon, keys, [Engine(daemon, drop=True) for _ in range(count)]


def ask(engine: Engine, keys: list[bytes], name: str = "request") -> Request:
    request = engine.submit(name, keys)
    engine.schedule()
    engine.schedule()
    return request


def load(engine: Engine, request: Request, failed: bool = False) -> None:
    assert request.load is not None
    request.load.failed = failed
    while request.load is not None:
        engine.load_one(random.Random(0))
    engine.link.turn()


def test_one_engine_gets_the_blocks_and_they_are_gone() -> None:
    daemon, keys, (first, second) = consumers()
    for key in keys:
        daemon.copy_down(hash_of(key))
    winner, loser = ask(first, keys), ask(second, keys)
    assert winner.state == "loading"
    assert loser.state == "running"
    assert second.lookups.counts["misses", "claimed"] == BLOCKS
    assert set(daemon.blocks) == {hash_of(key) for key in keys}  # until the load is confirmed
    load(first, winner)
    assert not daemon.blocks
    assert not daemon.disk
    assert daemon.dropped == [hash_of(key) for key in keys]
    for engine in (first, second):
        engine.link.turn()
    assert not daemon.leases
    daemon.check()


def test_two_requests_of_one_engine_do_not_share_a_claim() -> None:
    daemon, keys, (engine,) = consumers(1)
    one, two = engine.submit("one", keys), engine.submit("two", keys)
    engine.schedule()
    engine.schedule()
    assert [one.state, two.state] == ["loading", "running"]
    load(engine, one)
    assert not daemon.blocks


@pytest.mark.parametrize("ends", ["failed load", "aborted before", "aborted while loading", "reset", "preempted"])
def test_otherwise_the_next_one_gets_them(ends: str) -> None:
    daemon, keys, (first, second) = consumers()
    request = first.submit("request", keys)
    first.schedule()
    if ends == "failed load":
        first.schedule()
        load(first, request, failed=True)
    elif ends == "aborted before":
        first.finish(request)
    elif ends == "aborted while loading":
        first.schedule()
        first.finish(request)
        load(first, request)
    elif ends == "preempted":
        first.lookups.step_end([], ["request"])
    else:
        first.schedule()
        first.lookups.reset()
    first.link.turn()
    assert not daemon.leases
    winner = ask(second, keys)
    assert winner.state == "loading"
    load(second, winner)
    assert not daemon.blocks


def test_blocks_from_disk_are_claimed_when_they_are_up() -> None:
    daemon, keys, (first, second) = consumers()
    for key in keys:
        daemon.copy_down(hash_of(key))
        daemon.evict(hash_of(key))
    winner = ask(first, keys)
    assert winner.state == "waiting"
    for key in list(daemon.coming):
        daemon.come_up(key)
    for _ in range(3):
        first.schedule()
    assert ask(second, keys).state == "running"
    load(first, winner)
    assert not daemon.blocks
    assert not daemon.disk


def test_a_daemon_that_dies_before_the_confirmation_keeps_what_is_on_disk() -> None:
    daemon, keys, (first, second) = consumers()
    for key in keys:
        daemon.copy_down(hash_of(key))
    winner = ask(first, keys)
    daemon.die()
    load(first, winner)
    daemon.start()
    first.attach()
    second.attach()
    first.link.turn()
    assert len(daemon.disk) == BLOCKS
    assert not daemon.leases


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_events(seed: int) -> None:
    """However claims end: each copy is loaded to its end at most once, and nothing is held when all is over."""
    rng = random.Random(seed)
    daemon = FakeDaemon(48)
    producer = Engine(daemon)
    engines = [Engine(daemon, drop=True) for _ in range(2)]
    for number in range(300):
        engine = rng.choice(engines)
        alive = [request for request in engine.requests.values() if request.state != "aborted"]
        match rng.randrange(14):
            case 0 | 1:
                chain = [key_of(rng.randrange(4), place) for place in range(rng.randrange(1, 6))]
                producer.submit(f"p{number}", chain)
            case 2 | 3:
                chain = [key_of(rng.randrange(4), place) for place in range(rng.randrange(1, 6))]
                engine.submit(f"c{number}", chain)
            case 4 if alive:
                engine.finish(rng.choice(alive))
            case 5 if alive:
                engine.preempt(rng.choice(alive))
            case 6 if rng.random() < 0.2:
                engine.reset()
            case 7 if daemon.blocks:
                daemon.copy_down(rng.choice(sorted(daemon.blocks)))
            case 8:
                engine.come_up(rng)
            case 9 | 10:
                producer.schedule()
                producer.copy_one(rng)
                producer.copy_one(rng)
            case _:
                engine.schedule()
                engine.load_one(rng)
        daemon.check()
    for engine in (producer, *engines):
        engine.run_out(rng)
        engine.time += 2 * STOCK_IDLE_S
        engine.link.turn()
        engine.link.turn()
    while daemon.coming:
        producer.come_up(rng)
    assert not daemon.leases
    assert not daemon.claims
    assert not daemon.reserved
    assert not daemon.gone
    daemon.check()
