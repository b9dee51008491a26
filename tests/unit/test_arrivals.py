"""Slots that bytes arrive in: the books balance whatever happens to their session meanwhile."""

from __future__ import annotations

import pytest

from kvstore.arena import Arena
from kvstore.blocks import Namespace
from kvstore.errors import InvalidRequest, StaleGeneration
from kvstore.hierarchy import Hierarchy, Outcome
from kvstore.leases import Session
from kvstore.testing import FakeClock
from kvstore.testing.books import check_idle, check_invariants

SIZE = 64 << 10


class World:
    """A hierarchy with one keyspace, and sessions in it."""

    def __init__(self) -> None:
        arena = Arena(32 << 20, "off")
        arena.add_populated(arena.size_bytes)
        self.hierarchy = Hierarchy(arena, FakeClock())
        namespace = Namespace(model="arrivals", dtype="x", block_size=1, block_bytes=SIZE)
        entry = self.hierarchy.namespaces.open(namespace.identity(), namespace.group_bytes)
        self.keyspace = entry.keyspaces[0]

    def session(self, group: str = "") -> Session:
        return self.hierarchy.sessions.attach("test", 1, group, 0)

    def reserve(self, session: Session, count: int = 1) -> tuple[list[int], list[int]]:
        offsets = self.hierarchy.reserve(session, self.keyspace, count).offsets
        return offsets, self.hierarchy.arrivals.epochs_of(offsets)

    def begin(self, session: Session, offsets: list[int], epochs: list[int], end: int = SIZE) -> None:
        self.hierarchy.arrivals.begin(session, offsets, epochs, end)
        check_invariants(self.hierarchy)

    def finish(self, offsets: list[int]) -> None:
        self.hierarchy.arrivals.finish(offsets)
        check_invariants(self.hierarchy)

    def commit(self, session: Session, offsets: list[int]) -> list[Outcome]:
        return self.hierarchy.commit(session, self.keyspace, offsets, [b"%d" % offset for offset in offsets])


@pytest.fixture
def world() -> World:
    return World()


def test_half_filled_slots_are_not_published(world: World) -> None:
    session = world.session()
    offsets, epochs = world.reserve(session, 2)
    world.begin(session, offsets[:1], epochs[:1])
    assert world.commit(session, offsets) == [Outcome.NOT_RESERVED, Outcome.STORED]
    world.finish(offsets[:1])
    assert world.commit(session, offsets[:1]) == [Outcome.STORED]
    world.hierarchy.end_session(session)
    check_idle(world.hierarchy)


@pytest.mark.parametrize("end", ["abort", "session", "forget"])
def test_a_slot_that_was_given_back_waits_for_its_writers(world: World, end: str) -> None:
    session, other = world.session("g"), world.session()
    offsets = world.hierarchy.reserve(session, world.keyspace, 2, request_id=7).offsets
    epochs = world.hierarchy.arrivals.epochs_of(offsets)
    world.begin(session, offsets, epochs)
    world.begin(session, offsets[:1], epochs[:1])  # another rank, another part
    if end == "abort":
        assert world.hierarchy.abort(session, offsets) == 2
    elif end == "forget":
        world.hierarchy.forget(session, 7)
    else:
        world.hierarchy.end_session(session)
    check_invariants(world.hierarchy)
    everything, _ = world.reserve(other, 10_000)
    assert not set(offsets) & set(everything)
    world.finish(offsets)
    assert world.reserve(other, 10)[0] == offsets[1:]
    world.finish(offsets[:1])
    assert world.reserve(other, 10)[0] == offsets[:1]
    for each in (session, other):
        world.hierarchy.end_session(each)
    check_idle(world.hierarchy)


def test_who_may_write(world: World) -> None:
    scheduler, worker, stranger = world.session("g"), world.session("g"), world.session()
    offsets, epochs = world.reserve(scheduler)
    world.begin(worker, offsets, epochs)
    world.finish(offsets)
    for session, at, mark, bytes_ in (
        (stranger, offsets, epochs, SIZE),
        (worker, offsets, [epochs[0] + 1], SIZE),
        (worker, [offsets[0] + SIZE], epochs, SIZE),
        (worker, [1 << 60], epochs, SIZE),
    ):
        with pytest.raises(StaleGeneration):
            world.begin(session, at, mark, bytes_)
    with pytest.raises(InvalidRequest):
        world.begin(worker, offsets, epochs, SIZE + 1)
    with pytest.raises(InvalidRequest):
        world.begin(worker, offsets * 2, epochs * 2)
    # What a member that ended had reserved is still there for the others.
    world.hierarchy.end_session(scheduler)
    world.begin(worker, offsets, epochs)
    world.hierarchy.end_session(worker)
    with pytest.raises(StaleGeneration):
        world.begin(stranger, offsets, epochs)
    world.finish(offsets)
    world.hierarchy.end_session(stranger)
    check_idle(world.hierarchy)


def test_who_may_read(world: World) -> None:
    scheduler, worker, stranger = world.session("g"), world.session("g"), world.session()
    offsets, epochs = world.reserve(scheduler)
    arrivals = world.hierarchy.arrivals
    with pytest.raises(StaleGeneration):
        arrivals.check_readable(scheduler, offsets, epochs, SIZE)
    world.commit(scheduler, offsets)
    lease = world.hierarchy.acquire(scheduler, world.keyspace, [b"%d" % offsets[0]])
    assert lease is not None
    arrivals.check_readable(worker, offsets, epochs, SIZE)
    with pytest.raises(InvalidRequest):
        arrivals.check_readable(worker, offsets, epochs, SIZE + 1)
    with pytest.raises(StaleGeneration):
        arrivals.check_readable(stranger, offsets, epochs, SIZE)
    world.hierarchy.release(scheduler, [lease.id])
    with pytest.raises(StaleGeneration):
        arrivals.check_readable(worker, offsets, epochs, SIZE)
