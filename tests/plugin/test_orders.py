"""Lookups, stores and the link against a daemon in memory, in random orders of events.

A small model of vLLM's scheduler and workers drives them as the stock connector does: lookups until an answer, a load
or a computation, stores of what was computed, completions that come late or never, preemption, abort, reset. The
daemon dies, comes back, falls silent and evicts. Whatever the order: a load that counts as good has the right bytes,
no request waits for ever, and nothing is held at the end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable

import numpy as np
import pytest

from engine_plugin.vllm.link import BREAK_S, DaemonLink
from engine_plugin.vllm.lookups import ANSWERS_MAX, LoadPlan, Lookups, Verdict, hash_of
from engine_plugin.vllm.stock import STOCK_BASE, STOCK_IDLE_S, STOCK_UNUSED_S
from engine_plugin.vllm.stores import KNOWN_S, KnownKeys, Store, Stores
from tests.plugin.fakes import SLOT_BYTES, FakeClient, FakeDaemon

WORKERS = 2
GROUP = bytes(4)


def key_of(chain: int, place: int) -> bytes:
    return hashlib.sha256(f"{chain}/{place}".encode()).digest() + GROUP


def content_of(key: bytes, rank: int) -> np.ndarray:
    half = SLOT_BYTES // WORKERS
    return np.frombuffer(hashlib.sha512(hash_of(key) + bytes([rank])).digest()[:half], np.uint8)


@dataclasses.dataclass
class Request:
    id: str
    keys: list[bytes]
    computed: int = 0
    waited: int = 0
    state: str = "waiting"
    load: Load | None = None


@dataclasses.dataclass
class Load:
    keys: list[bytes]
    plan: LoadPlan
    left: int = WORKERS
    failed: bool = False


@dataclasses.dataclass
class Copy:
    """One worker's part of a store."""

    store: Store
    rank: int
    stale: bool = False


class Engine:
    """The part of an engine that the plugin sees. Time moves by the step."""

    def __init__(self, daemon: FakeDaemon, *, pin: bool = True) -> None:
        self.time = 100.0
        self.daemon = daemon
        self.client = FakeClient(daemon)
        self.mapped = [self.client.arena] * WORKERS
        self.link = DaemonLink(self.client, stock_max=24, now=lambda: self.time, threaded=False)
        known = KnownKeys(lambda: self.time)
        self.lookups = Lookups(
            self.link,
            deadline_s=0.5,
            now=lambda: self.time,
            ready_generation=self.ready_generation,
            on_present=known.add,
            pin=pin,
        )
        self.stores = Stores(
            self.link,
            workers=WORKERS,
            known=known,
            ready_generation=self.ready_generation,
            ask_about=self.lookups.ask_about,
        )
        self.requests: dict[str, Request] = {}
        self.copies: list[Copy] = []
        self.acks: dict[int, int] = {}
        self.loaded = 0
        self.failed = 0

    def ready_generation(self) -> bytes | None:
        generations = {arena.generation if arena is not None else b"" for arena in self.mapped}
        return (generations.pop() or None) if len(generations) == 1 else None

    def attach(self) -> None:
        self.client.attach()
        self.mapped = [self.client.arena] * WORKERS

    def submit(self, id_: str, keys: list[bytes]) -> Request:
        self.link.set_busy(True)
        self.requests[id_] = Request(id_, keys)
        return self.requests[id_]

    def schedule(self, turn: bool = True) -> None:
        """One scheduler step."""
        started = []
        for request in self.requests.values():
            if request.state != "waiting":
                continue
            hits = 0
            retry = False
            for key in request.keys:
                verdict = self.lookups.lookup(request.id, key)
                retry |= verdict is Verdict.RETRY
                hits += verdict is Verdict.HIT
                if verdict is Verdict.MISS:
                    break
            if retry:
                request.waited += 1
                continue
            request.waited = 0
            if hits:
                keys = request.keys[:hits]
                plan = self.lookups.prepare_load(request.id, keys)
                assert plan is not None, "a promised block must be loadable"
                request.load = Load(keys, plan)
                request.state = "loading"
            else:
                request.state = "running"
                started.append(request.id)
        self.lookups.step_end(started, [])
        for request in self.requests.values():
            if request.state == "running" and request.computed < len(request.keys):
                step = request.keys[request.computed : request.computed + 4]
                parent = request.keys[request.computed - 1] if request.computed else None
                request.computed += len(step)
                store = self.stores.prepare(step, parent)
                if store is not None:
                    self.copies += [Copy(store, rank) for rank in range(WORKERS)]
        self.time += 0.01
        if turn:
            self.link.turn()

    def copy_one(self, rng: random.Random) -> None:
        """A worker finishes its part of some store."""
        if not self.copies:
            return
        copy = self.copies.pop(rng.randrange(len(self.copies)))
        store, arena = copy.store, self.mapped[copy.rank]
        good = arena is not None and arena.generation == store.slots.generation and rng.random() < 0.9
        if good and arena is not None:
            half = SLOT_BYTES // WORKERS
            for key, offset in zip(store.keys, store.slots.offsets, strict=True):
                if arena is self.daemon.arena:
                    assert int(offset) // SLOT_BYTES in self.daemon.reserved, "a worker writes into a slot of others"
                arena.slot(int(offset))[copy.rank * half : (copy.rank + 1) * half] = content_of(key, copy.rank)
        self.stores.report({store.ticket: 1}, () if good else (store.ticket,))
        self.acks[store.ticket] = self.acks.get(store.ticket, 0) + 1
        if self.acks[store.ticket] == WORKERS and not copy.stale:
            self.stores.complete(set(store.keys))
            if rng.random() < 0.1:
                self.stores.complete(set(store.keys))  # a completion that comes twice

    def load_one(self, rng: random.Random) -> None:
        """A worker finishes its part of some load."""
        loading = [request for request in self.requests.values() if request.load is not None]
        if not loading:
            return
        request = rng.choice(loading)
        load = request.load
        assert load is not None
        rank = WORKERS - load.left
        arena = self.mapped[rank]
        if arena is None or arena.generation != load.plan.generation:
            load.failed = True
        else:
            half = SLOT_BYTES // WORKERS
            parts = [arena.slot(int(o))[rank * half : (rank + 1) * half].copy() for o in load.plan.offsets]
            if not np.array_equal(arena.epochs_of(load.plan.offsets), load.plan.epochs):
                load.failed = True
            else:
                for key, part in zip(load.keys, parts, strict=True):
                    assert np.array_equal(part, content_of(key, rank)), "wrong bytes"
        load.left -= 1
        if load.left:
            return
        if load.failed:
            self.failed += 1
            self.lookups.load_failed(request.id)
        else:
            self.loaded += len(load.keys)
            request.computed = len(load.keys)
        self.lookups.load_done(request.id)
        request.load = None
        if request.state == "aborted":
            del self.requests[request.id]
            self.link.set_busy(bool(self.requests))
        else:
            request.state = "waiting" if load.failed else "running"

    def finish(self, request: Request) -> None:
        self.lookups.finished(request.id)
        if request.load is not None:
            request.state = "aborted"  # the load goes on
        else:
            del self.requests[request.id]
        self.link.set_busy(bool(self.requests))

    def preempt(self, request: Request) -> None:
        if request.state == "running":
            request.state = "waiting"
            request.computed = 0
            self.lookups.step_end([], [request.id])

    def reset(self) -> None:
        self.lookups.reset()
        self.stores.reset()
        self.link.flush()
        for copy in self.copies:
            copy.stale = True
        for request in list(self.requests.values()):
            if request.load is not None:  # the engine drops its completion, and goes on as after a load
                request.load = None
                request.state = "running"
                request.computed = 0

    def run_out(self, rng: random.Random) -> None:
        """Everything comes to its end."""
        self.daemon.silent = False
        if not self.daemon.up:
            self.daemon.start()
        self.attach()
        for _ in range(400):
            self.schedule()
            self.copy_one(rng)
            self.load_one(rng)
            for request in list(self.requests.values()):
                assert request.waited < 120, "a request waits for ever"
                if request.state == "running" and request.computed >= len(request.keys):
                    self.finish(request)
            if not self.requests and not self.copies:
                break
        assert not self.requests
        assert not self.copies


@pytest.mark.parametrize("seed", range(150))
def test_any_order_of_events(seed: int) -> None:
    rng = random.Random(seed)
    daemon = FakeDaemon(slots=48)
    engine = Engine(daemon)
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

    events: list[tuple[Callable[[], object], int]] = [
        (new_request, 6),
        (engine.schedule, 20),
        (lambda: engine.schedule(turn=False), 6),
        (engine.link.turn, 6),
        (lambda: engine.copy_one(rng), 16),
        (lambda: engine.load_one(rng), 16),
        (lambda: on_some(engine.finish), 3),
        (lambda: on_some(engine.preempt), 2),
        (evict, 4),
        (restart, 1),
        (engine.attach, 2),
        (remap_one, 1),
        (silence, 1),
        (later, 2),
        (engine.reset, 1),
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
    daemon.check()
    assert not daemon.leases
    assert not daemon.reserved
    for key, slot in daemon.blocks.items():
        whole = np.concatenate([content_of(key + GROUP, rank) for rank in range(WORKERS)])
        assert np.array_equal(daemon.arena.memory[slot], whole), "a block was published that nobody filled"


def stored(chain: int, count: int, slots: int = 64) -> tuple[FakeDaemon, list[bytes]]:
    """A daemon with a chain in it."""
    daemon = FakeDaemon(slots)
    rng = random.Random(0)
    engine = Engine(daemon)
    keys = [key_of(chain, place) for place in range(count)]
    engine.submit("first", keys)
    while len(daemon.blocks) < count:
        engine.schedule()
        rng.random = lambda: 0.5  # type: ignore[method-assign]  # no copy fails
        engine.copy_one(rng)
    engine.link.close()
    return daemon, keys


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
    engine.finish(engine.requests["request"])
    engine.link.turn()
    assert daemon.leases
    engine.schedule()
    engine.link.turn()
    assert not daemon.leases


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
