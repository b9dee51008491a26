"""A small model of vLLM's scheduler and workers around lookups, stores and the link, with a daemon in memory.

It drives them as the stock connector does: lookups until an answer, a load or a computation, stores of what was
computed, completions that come late or never, preemption, abort, reset. Loaded bytes are checked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random

import numpy as np

from engine_plugin.vllm.acks import Acks
from engine_plugin.vllm.coming import NOTHING_EXPECTED, Expected
from engine_plugin.vllm.link import DaemonLink
from engine_plugin.vllm.lookups import Lookups, Verdict
from engine_plugin.vllm.offers import Offers
from engine_plugin.vllm.plan import LoadPlan
from engine_plugin.vllm.rates import LoadPolicy
from engine_plugin.vllm.runs import hash_of
from engine_plugin.vllm.stores import ASK_S, KnownKeys, Store, Stores
from engine_plugin.vllm.worth import Block
from tests.plugin.fakes import SLOT_BYTES, FakeClient, FakeDaemon

WORKERS = 2
#: Of a block.
TOKENS = 16
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

    def __init__(
        self,
        daemon: FakeDaemon,
        *,
        version: int = 32,
        pin: bool = True,
        drop: bool = False,
        auto: bool = False,
        offers: Offers | None = None,
    ) -> None:
        self.version = version
        self.time = 100.0
        self.daemon = daemon
        self.client = FakeClient(daemon)
        self.mapped = [self.client.arena] * WORKERS
        self.policy = LoadPolicy(SLOT_BYTES, lambda: self.time, auto=auto)
        self.link = DaemonLink(
            self.client,
            stock_max=0 if drop else 24,
            policy=self.policy,
            now=lambda: self.time,
            threaded=False,
        )
        self.expected: dict[str, Expected] = {}  # by request
        known = KnownKeys(lambda: self.time)
        self.lookups = Lookups(
            self.link,
            deadline_s=0.5,
            now=lambda: self.time,
            ready_generation=self.ready_generation,
            on_present=known.add,
            on_absent=known.discard,
            pin=pin,
            expect=lambda req_id, _keys: self.expected.get(req_id, NOTHING_EXPECTED),
            drop=drop,
            policy=self.policy,
            blocks={0: Block(TOKENS, SLOT_BYTES)},
        )
        self.acks = Acks(self.link.commit, listen=False)
        self.stores = Stores(
            self.link,
            workers=WORKERS,
            known=known,
            ready_generation=self.ready_generation,
            ask_about=self.lookups.ask_about,
            offers=offers,
            acks=self.acks,
            now=lambda: self.time,
        )
        self.requests: dict[str, Request] = {}
        self.copies: list[Copy] = []
        self.ended: list[tuple[Copy, bool]] = []  # good or not; not reported so far
        self.reported: dict[int, int] = {}  # by ticket, ranks
        self.loaded = 0
        self.asked = 0  # lookups
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
                self.asked += 1
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
        if self.version == 32:
            self.lookups.step_end(started, [])
        for request in self.requests.values():
            if request.state == "running" and request.computed < len(request.keys):
                step = request.keys[request.computed : request.computed + 4]
                parent = request.keys[request.computed - 1] if request.computed else None
                request.computed += len(step)
                store = self.stores.prepare(step, {0: parent} if parent is not None else {})
                if store is not None:
                    self.copies += [Copy(store, rank) for rank in range(WORKERS)]
        if self.version == 33:
            self.lookups.step_end(started, [])  # the last call of a step
        self.time += 0.01
        here = {(copy.store.ticket, copy.rank) for copy in (*self.copies, *(copy for copy, _ in self.ended))}
        for ticket in self.stores.late():
            lost = {rank for rank in range(WORKERS) if (ticket, rank) not in here}
            self.stores.report({ticket: lost}, (), {ticket: lost} if lost else {})
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
        if rng.random() < 0.7:
            self.acks.heard(store.ticket, copy.rank, good)  # the other ones are lost on the way
            if rng.random() < 0.1:
                self.acks.heard(store.ticket, copy.rank, good)
            if rng.random() < 0.5:
                self.ended.append((copy, good))  # the step's report comes later
                return
        self.report(copy, good, rng)

    def report_one(self, rng: random.Random) -> None:
        """A step tells of a copy that ended a while ago."""
        if self.ended:
            self.report(*self.ended.pop(rng.randrange(len(self.ended))), rng)

    def report(self, copy: Copy, good: bool, rng: random.Random) -> None:
        store = copy.store
        for _ in range(1 if rng.random() < 0.9 else 2):  # a report that comes twice
            self.stores.report({store.ticket: {copy.rank}}, () if good else (store.ticket,))
        self.reported[store.ticket] = self.reported.get(store.ticket, 0) + 1
        if self.reported[store.ticket] == WORKERS and not copy.stale:
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
        self.lookups.load_done(request.id, 0.001)
        if rng.random() < 0.1:
            self.lookups.load_done(request.id)  # a completion that comes twice
        request.load = None
        if request.state == "aborted":
            del self.requests[request.id]
            self.link.set_busy(bool(self.requests))
        else:
            request.state = "waiting" if load.failed else "running"

    def come_up(self, rng: random.Random) -> None:
        """The daemon has read one block from disk."""
        if self.daemon.up and self.daemon.coming:
            self.daemon.come_up(rng.choice(sorted(self.daemon.coming)))

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
        for copy in (*self.copies, *(copy for copy, _ in self.ended)):
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
            self.report_one(rng)
            self.load_one(rng)
            self.come_up(rng)
            for request in list(self.requests.values()):
                assert request.waited < 120, "a request waits for ever"
                if request.state == "running" and request.computed >= len(request.keys):
                    self.finish(request)
            if not self.requests and not self.copies and not self.ended:
                break
        assert not self.requests
        assert not self.copies
        for _ in range(2):  # workers are asked about what was never reported
            self.time += ASK_S
            self.schedule()


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
