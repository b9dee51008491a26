"""Calls that are begun outside of a task and have to wait after all: for a tier that uses timeouts, for room."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvstore.arena import Arena
from kvstore.blocks import Namespace
from kvstore.framed import FramedConnection
from kvstore.hierarchy import Hierarchy
from kvstore.service import EngineService, Gate, local_methods
from kvstore.testing import FakeClock, SteppedLoop
from kvstore.testing.tiers import DictTier
from kvstore.wire.frames import FAILED, METHODS, Splitter, error_in, packed
from kvstore.wire.v1 import engine_pb2

MIB = 1 << 20


class TimedTier(DictTier):
    """Answers within a timeout, as every tier that is somewhere else."""

    async def stat(self, keys: Sequence[bytes]) -> list[int | None]:
        async with asyncio.timeout(5):
            await asyncio.sleep(0)
            return await super().stat(keys)

    async def delete(self, keys: Sequence[bytes]) -> int:
        async with asyncio.timeout(5):
            await asyncio.sleep(0)
            return await super().delete(keys)


class Scene(asyncio.Transport):
    """An engine's session, with a connection by hand, in a pool that has no memory so far."""

    def __init__(self, loop: SteppedLoop) -> None:
        super().__init__()
        self.loop = loop
        self.arena = Arena(32 * MIB, "off")
        self.tier = TimedTier()
        self.hierarchy = Hierarchy(self.arena, FakeClock(), [self.tier])
        self.gate = Gate(None)
        namespace = Namespace("m", "x", 64, 2 * MIB)
        entry = self.hierarchy.namespaces.open(namespace.identity(), namespace.group_bytes)
        self.session = self.hierarchy.sessions.attach("test", 0, "", 0)
        self.session.mapped = self.session.group.mapped = True
        self.who = {"session": self.session.id, "namespace": entry.digest}
        service = EngineService(
            self.hierarchy,
            self.gate,
            generation=b"life",
            block_size=64,
            gds="off",
            handoff_path="",
            keys_max=100,
            sessions_max=10,
            wait_s_max=60.0,
            data_address=str,
        )

        async def make() -> FramedConnection:
            return FramedConnection(local_methods(service), MIB, self.gate.count_error, lambda: None)

        self.connection = loop.run_until_complete(make())
        self.connection.connection_made(self)
        self.replies: dict[int, Any] = {}
        self._asked: dict[int, str] = {}
        self._splitter = Splitter()

    def ask(self, method: str, **fields: Any) -> int:
        """Has a call arrive with the loop's next turn. Returns its number."""
        number = len(self._asked) + 1
        self._asked[number] = method
        frame = packed(METHODS[method].number, number, METHODS[method].request(**fields).SerializeToString())

        def received() -> None:
            self.connection.get_buffer(-1)[: len(frame)] = frame
            self.connection.buffer_updated(len(frame))

        self.loop.call_soon(received)
        return number

    def answer(self, method: str, **fields: Any) -> Any:
        number = self.ask(method, **fields)
        self.loop.settle()
        return self.replies[number]

    def populate(self) -> None:
        self.hierarchy.add_populated(self.arena.size_bytes)

    # Of asyncio.Transport:

    def write(self, data: Any) -> None:
        for frame in self._splitter.feed(data):
            assert frame.payload is not None
            assert frame.kind != FAILED, error_in(frame.payload)
            self.replies[frame.number] = METHODS[self._asked[frame.number]].reply.FromString(frame.payload)

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def abort(self) -> None:
        self.loop.call_soon(self.connection.connection_lost, None)


@pytest.fixture
def scene(stepped_loop: SteppedLoop) -> Iterator[Scene]:
    scene = Scene(stepped_loop)
    yield scene
    scene.connection.close()
    stepped_loop.settle()
    scene.arena.close()


def store_below(scene: Scene, *keys: bytes) -> None:
    """Stores blocks, and has them only in the tier."""
    slots = scene.answer("Reserve", **scene.who, count=len(keys))
    scene.answer("Commit", **scene.who, offsets=slots.offsets, epochs=slots.epochs, keys=keys)
    assert scene.hierarchy.pool.evict(scene.arena.size_bytes, 100) == len(keys)


def test_acquire_and_lookup_ask_the_tiers(scene: Scene) -> None:
    scene.populate()
    store_below(scene, b"a", b"b")
    assert scene.answer("Lookup", **scene.who, keys=[b"a", b"b", b"c"]).available == 2
    queries = [engine_pb2.Query(keys=[b"a", b"b"]), engine_pb2.Query(keys=[b"c"])]
    grants = scene.answer("Acquire", **scene.who, queries=queries).grants
    assert [(grant.ready, grant.pending) for grant in grants] == [(0, 2), (0, 0)]
    grants = scene.answer("Acquire", **scene.who, queries=queries).grants
    assert [(grant.ready, grant.pending) for grant in grants] == [(2, 0), (0, 0)]
    assert not scene.gate.errors


def test_a_claim_is_confirmed_in_every_tier(scene: Scene) -> None:
    scene.populate()
    store_below(scene, b"a")
    grant = scene.answer("Select", **scene.who, query=engine_pb2.Query(keys=[b"a"]), drop=True, wait_ms=1000).grant
    assert grant.ready == 1
    reply = scene.answer("Release", session=scene.session.id, leases=[grant.lease], remove=True)
    assert (reply.released, reply.removed) == (1, 1)
    assert not list(scene.tier.scan())
    assert scene.answer("Lookup", **scene.who, keys=[b"a"]).available == 0


def test_what_is_asked_after_a_removal_comes_after_it(scene: Scene) -> None:
    scene.populate()
    scene.hierarchy.namespaces.entries[scene.who["namespace"]].pool_only = True
    slots = scene.answer("Reserve", **scene.who, count=1)
    scene.answer("Commit", **scene.who, offsets=slots.offsets, epochs=slots.epochs, keys=[b"a"])
    query = engine_pb2.Query(keys=[b"a"])
    grant = scene.answer("Select", **scene.who, query=query, drop=True, wait_ms=1000).grant
    scene.ask("Release", session=scene.session.id, leases=[grant.lease], remove=True)
    look = scene.ask("Lookup", **scene.who, keys=[b"a"])  # at once, where the removal becomes a task
    scene.loop.settle()
    assert scene.replies[look].available == 0


def test_room_that_is_made_before_a_reservation_waits_for_it_is_told(scene: Scene) -> None:
    waiting = scene.ask("Reserve", **scene.who, count=2, wait_ms=1000)
    scene.loop.call_soon(scene.populate)  # in the turn in which the call is begun, before it has a task
    scene.loop.settle()
    assert len(scene.replies[waiting].offsets) == 16
    assert scene.loop.time() == 0


def test_a_reservation_whose_connection_ends_before_it_waits_takes_nothing(scene: Scene) -> None:
    scene.ask("Reserve", **scene.who, count=2, wait_ms=1000)
    scene.connection.close()
    scene.loop.settle()
    scene.populate()
    scene.loop.settle()
    assert not scene.session.reserved
    assert not scene.replies
