"""Lookups, stores and the link against a daemon in memory, in random orders of events.

The daemon dies, comes back, falls silent, evicts, and brings blocks up from disk, or does not. Whatever the order: a
load that counts as good has the right bytes, no request waits for ever, and nothing is held at the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from engine_plugin.vllm.link import BREAK_S
from engine_plugin.vllm.lookups import ANSWERS_MAX, REPORT_STEPS, Verdict
from engine_plugin.vllm.runs import hash_of
from engine_plugin.vllm.stock import STOCK_BASE, STOCK_IDLE_S, STOCK_UNUSED_S
from engine_plugin.vllm.stores import ASK_S, KNOWN_S, REPORTS_S, Store
from tests.plugin.engine_model import GROUP, WORKERS, Engine, Request, content_of, key_of, stored
from tests.plugin.fakes import SLOT_BYTES, FakeDaemon

#: In `make test`; the others in `make test-orders`.
FEW = 300
MANY = 10_000


@pytest.mark.parametrize("first", range(0, FEW, 50))
def test_any_order_of_events(first: int) -> None:
    for seed in range(first, first + 50):
        one_order(seed)


@pytest.mark.orders
@pytest.mark.parametrize("first", range(FEW, MANY, 100))
def test_ten_thousand_orders_of_events(first: int) -> None:
    for seed in range(first, first + 100):
        one_order(seed)


def one_order(seed: int) -> None:
    """One sequence of events: an engine of vLLM 0.32 or 0.33, one daemon and its later lives."""
    rng = random.Random(seed)
    daemon = FakeDaemon(slots=48)
    daemon.coming_max = 4
    engine = Engine(daemon, version=rng.choice((32, 33)), auto=rng.random() < 0.3)
    number = 0

    def new_request() -> None:
        nonlocal number
        number += 1
        chain = rng.randrange(6)
        shared = rng.randrange(1, 9)
        own = [key_of(1000 + number, place) for place in range(rng.randrange(3))]
        engine.submit(f"request {number}", [key_of(chain, place) for place in range(shared)] + own)

    def on_some(do: Callable[[Request], None]) -> None:
        alive = [request for request in engine.requests.values() if request.state != "aborted"]
        if alive:
            do(rng.choice(alive))

    def copy_down() -> None:
        if daemon.up and daemon.blocks:
            daemon.copy_down(rng.choice(sorted(daemon.blocks)))

    def lose_copy() -> None:
        if daemon.disk:
            del daemon.disk[rng.choice(sorted(daemon.disk))]

    def evict() -> None:
        if daemon.up and daemon.blocks:
            daemon.evict(rng.choice(sorted(daemon.blocks)))

    def restart() -> None:
        if daemon.up:
            daemon.die()
        else:
            daemon.start()

    def silence() -> None:
        daemon.silent = not daemon.silent

    def later() -> None:
        engine.time += rng.choice((0.1, 0.6, BREAK_S, STOCK_IDLE_S, KNOWN_S))

    def remap_one() -> None:
        engine.client.attach()
        engine.mapped[rng.randrange(WORKERS)] = engine.client.arena

    def lose_acknowledgement() -> None:
        """A worker's report of a store that never comes, whatever has become of its copy."""
        lost = rng.choice((engine.copies, engine.ended))
        if lost and rng.random() < 0.5:
            lost.pop(rng.randrange(len(lost)))  # type: ignore[attr-defined]

    def foreign_acknowledgements() -> None:
        """Of stores and loads that are over, or never were."""
        done, failed, lost = (rng.randrange(1000, 2000) for _ in range(3))
        engine.stores.report({done: {0}}, [failed], {lost: {0}})
        engine.acks.heard(rng.randrange(1000, 2000), 0, True)
        engine.stores.complete([key_of(99, 99)])
        engine.lookups.load_done(f"request {rng.randrange(number + 1)} of another engine")
        engine.lookups.load_failed("nobody")
        engine.lookups.finished("nobody")

    def trample() -> None:
        if daemon.up and daemon.blocks and rng.random() < 0.3:
            daemon.trample(rng.choice(sorted(daemon.blocks)))

    def measure() -> None:
        """The engine's rates change, so that it computes what it loaded before, and the other way round."""
        engine.policy.note_step(1000, 1000, rng.choice((0.01, 1.0, 100.0)))

    events: list[tuple[Callable[[], object], int]] = [
        (new_request, 6),
        (engine.schedule, 20),
        (lambda: engine.schedule(turn=False), 6),
        (engine.link.turn, 6),
        (lambda: engine.copy_one(rng), 16),
        (lambda: engine.report_one(rng), 6),
        (lambda: engine.load_one(rng), 16),
        (lambda: on_some(engine.finish), 3),
        (lambda: on_some(engine.preempt), 2),
        (evict, 4),
        (copy_down, 6),
        (lose_copy, 1),
        (lambda: engine.come_up(rng), 10),
        (restart, 1),
        (engine.attach, 2),
        (remap_one, 1),
        (silence, 1),
        (later, 2),
        (engine.reset, 1),
        (lose_acknowledgement, 1),
        (foreign_acknowledgements, 1),
        (trample, 1),
        (measure, 1),
    ]
    steps = [event for event, weight in events for _ in range(weight)]
    for _ in range(250):
        rng.choice(steps)()
        if daemon.up:
            daemon.check()
    engine.run_out(rng)
    engine.time += 2 * STOCK_IDLE_S
    engine.link.turn()
    engine.link.turn()
    while daemon.coming:
        engine.come_up(rng)
    daemon.check()
    assert not daemon.leases
    assert not daemon.gone
    assert not daemon.reserved, "a report that was lost holds slots"
    engine.link.close()
    assert not daemon.reserved
    for key, slot in daemon.blocks.items():
        whole = np.concatenate([content_of(key + GROUP, rank) for rank in range(WORKERS)])
        assert np.array_equal(daemon.arena.memory[slot], whole), "a block was published that nobody filled"


def test_a_request_is_one_call_and_one_step() -> None:
    daemon, keys = stored(1, 8)
    engine = Engine(daemon)
    daemon.calls.clear()
    for number in range(3):
        engine.submit(f"request {number}", keys)
    engine.schedule()
    assert daemon.calls.count("acquire") == 1
    engine.schedule()
    assert [request.state for request in engine.requests.values()] == ["loading"] * 3
    assert daemon.calls.count("acquire") == 1


def test_a_request_that_waits_asks_for_two_keys_a_step() -> None:
    daemon, keys = stored(1, 20)
    engine = Engine(daemon)
    for number in range(ANSWERS_MAX + 40):  # some have asked, and the others may not yet
        engine.submit(f"request {number}", keys)
    engine.schedule(turn=False)
    for _ in range(5):
        before = engine.asked
        engine.schedule(turn=False)
        assert engine.asked - before == 2 * (ANSWERS_MAX + 40)
        assert all(request.state == "waiting" for request in engine.requests.values())
    engine.link.turn()
    engine.schedule()
    assert sum(request.state == "loading" for request in engine.requests.values()) == ANSWERS_MAX


def test_stores_find_the_slots_that_their_lookup_announced() -> None:
    daemon = FakeDaemon(64)
    engine = Engine(daemon)
    keys = [key_of(2, place) for place in range(20)]
    engine.submit("request", keys)
    engine.schedule()
    daemon.silent = True  # nothing can be fetched any more: what is stored now was announced
    while engine.requests["request"].computed < len(keys):
        engine.schedule()
    assert sum(len(copy.store.keys) for copy in engine.copies if copy.rank == 0) == 20


def test_what_a_lookup_misses_is_stored_again_however_fresh_the_memory_of_it() -> None:
    daemon, keys = stored(2, 6)
    engine = Engine(daemon)
    first = engine.submit("first", keys)
    engine.schedule()
    engine.schedule()
    while first.load is not None:
        engine.load_one(random.Random(0))
    engine.link.turn()
    for key in keys[3:]:
        daemon.evict(hash_of(key))
    engine.submit("second", keys)
    engine.schedule()
    engine.schedule()
    second = engine.requests["second"]
    while second.load is not None:
        engine.load_one(random.Random(0))
    engine.schedule()
    assert [len(copy.store.keys) for copy in engine.copies if copy.rank == 0] == [3]


def test_an_idle_engine_returns_its_stock() -> None:
    daemon = FakeDaemon(64)
    engine = Engine(daemon)
    engine.submit("request", [key_of(3, place) for place in range(6)])
    engine.schedule()
    assert len(daemon.reserved) == 6 + STOCK_BASE
    engine.finish(engine.requests["request"])
    engine.time += STOCK_IDLE_S + 1
    engine.link.turn()
    assert not daemon.reserved


def test_a_step_may_take_long() -> None:
    """The slots that a lookup announced are still there when a long step ends."""
    daemon = FakeDaemon(64)
    engine = Engine(daemon)
    engine.submit("request", [key_of(3, place) for place in range(8)])
    engine.schedule()
    engine.schedule()
    engine.time += STOCK_UNUSED_S - 1
    engine.link.turn()
    daemon.silent = True
    engine.schedule()
    assert sum(len(copy.store.keys) for copy in engine.copies if copy.rank == 0) == 8


def test_a_silent_daemon_costs_one_deadline_and_then_nothing_for_a_while() -> None:
    daemon, keys = stored(4, 8)
    engine = Engine(daemon)
    daemon.silent = True
    engine.submit("first", keys)
    began = engine.time
    while engine.requests["first"].state == "waiting":
        engine.schedule(turn=False)
    assert 0.5 <= engine.time - began < 0.6
    engine.submit("second", keys)
    engine.schedule(turn=False)
    assert engine.requests["second"].state == "running"
    engine.time += BREAK_S
    daemon.silent = False
    engine.submit("third", keys)
    engine.schedule()
    engine.schedule()
    assert engine.requests["third"].state == "loading"


def test_an_answer_that_comes_too_late_is_given_back() -> None:
    daemon, keys = stored(5, 4)
    engine = Engine(daemon)
    engine.submit("request", keys)
    engine.schedule(turn=False)
    engine.link.turn()
    assert daemon.leases
    engine.finish(engine.requests["request"])
    engine.schedule()
    engine.link.turn()
    assert not daemon.leases


def test_an_answer_that_came_before_its_request_ended_is_given_back_without_a_further_step() -> None:
    daemon, keys = stored(5, 4)
    engine = Engine(daemon)
    engine.submit("request", keys)
    engine.schedule()
    assert daemon.leases
    engine.finish(engine.requests["request"])
    engine.link.turn()
    assert not daemon.leases


def test_workers_that_have_attached_and_not_said_so_yet_cost_no_miss() -> None:
    """An engine without requests makes no steps, and so hears nothing of its workers while the daemon is restarted."""
    daemon, keys = stored(5, 4)
    for key in keys:
        daemon.copy_down(hash_of(key))
    engine = Engine(daemon)
    daemon.die()
    daemon.start()
    daemon.promote([hash_of(key) for key in keys])
    for key in list(daemon.coming):
        daemon.come_up(key)
    engine.client.attach()
    request = engine.submit("request", keys)
    engine.schedule()
    engine.schedule()
    assert request.state == "waiting"
    engine.attach()  # the report of the first step has come in
    engine.schedule()
    assert request.state == "loading"


@pytest.mark.parametrize("ends", [False, True])
def test_workers_that_do_not_attach_cost_a_few_steps(ends: bool) -> None:
    daemon, keys = stored(5, 4)
    engine = Engine(daemon)
    engine.mapped = [None] * WORKERS
    request = engine.submit("request", keys)
    for _ in range(2 if ends else REPORT_STEPS + 2):
        engine.schedule()
    if ends:
        engine.finish(request)
    else:
        assert request.state == "running"
        assert engine.lookups.counts["misses", "worker_detached"] == 4
    engine.link.turn()
    assert not daemon.leases


def test_a_question_that_nobody_waits_for_any_more_is_not_asked() -> None:
    daemon, keys = stored(5, 4)
    engine = Engine(daemon)
    daemon.calls.clear()
    engine.submit("request", keys)
    engine.schedule(turn=False)
    engine.finish(engine.requests["request"])
    engine.link.turn()
    assert "acquire" not in daemon.calls


def test_blocks_of_a_failed_load_are_not_promised_until_they_are_stored_again() -> None:
    daemon, keys = stored(6, 4)
    engine = Engine(daemon)
    request = engine.submit("request", keys)
    engine.schedule()
    engine.schedule()
    assert request.load is not None
    request.load.failed = True
    rng = random.Random(0)
    engine.load_one(rng)
    engine.load_one(rng)
    assert engine.failed == 1
    engine.schedule()
    engine.schedule()
    assert request.state == "running"  # computed instead
    engine.submit("other", keys)
    engine.schedule()
    engine.schedule()
    assert engine.requests["other"].state == "running"

    while daemon.leases:
        engine.link.turn()
    for key in keys:
        daemon.evict(hash_of(key))
    fresh, _ = stored(6, 4)
    for key, slot in fresh.blocks.items():  # another engine stores them again
        free = min(daemon.free)
        daemon.free.remove(free)
        daemon.blocks[key] = free
        daemon.arena.memory[free] = fresh.arena.memory[slot]
    engine.submit("later", keys)
    engine.schedule()
    engine.schedule()
    assert engine.requests["later"].state == "loading"


def test_a_reset_publishes_nothing_of_before_and_promises_nothing_until_it_is_through() -> None:
    daemon, keys = stored(7, 4)
    engine = Engine(daemon)
    rng = random.Random(0)
    rng.random = lambda: 0.5  # type: ignore[method-assign]
    engine.submit("old", [key_of(8, place) for place in range(4)])
    engine.schedule()
    engine.schedule()
    assert engine.copies
    engine.reset()
    daemon.silent = True
    engine.link.turn()
    engine.submit("new", keys)
    engine.schedule(turn=False)
    assert engine.requests["new"].state == "running"  # the flush is not through: no promise
    daemon.silent = False
    while engine.copies:
        engine.copy_one(rng)
    engine.link.turn()
    assert not {hash_of(key_of(8, place)) for place in range(4)} & set(daemon.blocks)


def test_a_rank_that_has_reported_a_store_does_not_lose_it_where_it_is_asked_again() -> None:
    """It has forgotten the store since; another rank is still copying."""
    daemon = FakeDaemon(64)
    engine = Engine(daemon)
    keys = [key_of(8, place) for place in range(4)]
    engine.submit("request", keys)
    engine.schedule()
    engine.schedule()
    first, second = engine.copies
    rng = random.Random(0)
    rng.random = lambda: 0.8  # type: ignore[method-assign]  # no word between steps, no failure
    engine.copies = [first]
    engine.copy_one(rng)
    engine.copies = [second]
    engine.time += ASK_S
    engine.schedule()
    engine.copy_one(rng)
    engine.link.turn()
    assert {hash_of(key) for key in keys} == set(daemon.blocks)
    assert not engine.stores.counts["skipped", "lost"]


def test_an_engine_without_requests_goes_on_for_the_reports_that_a_reset_has_cut_off() -> None:
    daemon = FakeDaemon(64)
    engine = Engine(daemon)
    rng = random.Random(0)
    engine.submit("request", [key_of(8, place) for place in range(4)])
    engine.schedule()
    engine.schedule()
    assert not engine.stores.waits_for_workers()  # vLLM counts its own jobs
    engine.finish(engine.requests["request"])
    engine.reset()
    assert engine.stores.waits_for_workers()
    while engine.copies or engine.ended:
        engine.copy_one(rng)
        engine.report_one(rng)
    assert not engine.stores.waits_for_workers()

    engine.submit("other", [key_of(9, place) for place in range(4)])
    engine.schedule()
    engine.schedule()
    assert engine.copies
    engine.reset()
    engine.time += REPORTS_S  # a worker that never reports does not keep the engine awake
    assert not engine.stores.waits_for_workers()


def storing() -> tuple[FakeDaemon, Engine, list[bytes], Store]:
    """An engine whose workers are about to copy the blocks of a request."""
    daemon = FakeDaemon(64)
    engine = Engine(daemon)
    keys = [key_of(8, place) for place in range(4)]
    engine.submit("request", keys)
    engine.schedule()
    engine.schedule()
    return daemon, engine, keys, engine.copies[0].store


def test_a_report_that_was_lost_is_asked_for_and_its_slots_go_back() -> None:
    daemon, engine, _, store = storing()
    assert [copy.rank for copy in engine.copies] == [0, 1]
    engine.finish(engine.requests["request"])
    del engine.copies[0]
    engine.time += ASK_S
    engine.schedule()
    assert store.lost and store.acks == {0}
    held = {int(offset) // SLOT_BYTES for offset in store.slots.offsets}
    assert held <= daemon.reserved  # the other worker still copies
    engine.time += 2 * STOCK_IDLE_S
    engine.copy_one(random.Random(0))
    engine.report_one(random.Random(0))
    engine.link.turn()
    assert not daemon.reserved
    assert not daemon.blocks
    assert engine.stores.counts["skipped", "lost"] == 4


def test_a_store_is_published_when_its_last_worker_says_so_and_not_twice() -> None:
    daemon, engine, keys, store = storing()
    ticket = store.ticket
    engine.acks.heard(ticket, 0, True)
    engine.acks.heard(ticket, 0, True)
    engine.link.turn()
    assert not daemon.blocks
    engine.acks.heard(ticket, 1, True)
    engine.link.turn()
    assert set(daemon.blocks) == {hash_of(key) for key in keys}
    daemon.calls.clear()
    engine.stores.report({ticket: {0, 1}}, ())
    engine.stores.complete(set(keys))
    engine.link.turn()
    assert "commit" not in daemon.calls
    assert not engine.stores.any_under_way


@pytest.mark.parametrize("how", ["reset", "distrust", "bad"])
def test_what_is_withdrawn_is_not_published_by_a_late_word(how: str) -> None:
    daemon, engine, keys, store = storing()
    ticket = store.ticket
    engine.acks.heard(ticket, 0, how != "bad")
    if how == "reset":
        engine.reset()
    elif how == "distrust":
        engine.stores.distrust()
    engine.acks.heard(ticket, 1, True)
    engine.stores.report({ticket: {0, 1}}, {ticket} if how == "bad" else ())
    engine.stores.complete(set(keys))
    engine.link.turn()
    assert not daemon.blocks
    assert not engine.stores.any_under_way


def test_requests_that_hold_answers_are_bounded() -> None:
    daemon, keys = stored(9, 2)
    engine = Engine(daemon)
    for number in range(ANSWERS_MAX + 5):
        engine.lookups.lookup(f"request {number}", keys[0])
    engine.lookups.step_end([], [])
    engine.link.turn()
    assert len(daemon.leases) == ANSWERS_MAX
    assert engine.lookups.lookup("one more", keys[0]) is Verdict.RETRY
    engine.lookups.finished("request 0")
    engine.lookups.lookup("one more", keys[0])
    engine.lookups.step_end([], [])
    engine.link.turn()
    assert engine.lookups.lookup("one more", keys[0]) is Verdict.HIT


def test_an_engine_that_only_stores_learns_what_is_there_and_pins_nothing() -> None:
    daemon, keys = stored(10, 6)
    engine = Engine(daemon, pin=False)
    engine.submit("request", keys)
    for _ in range(6):
        engine.schedule()
    assert engine.requests["request"].computed == 6
    assert not engine.copies
    assert not daemon.leases
