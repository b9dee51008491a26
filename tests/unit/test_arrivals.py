"""Slots that bytes arrive in: the books balance whatever happens to their session meanwhile."""

from __future__ import annotations

import pytest

from kvstore import arrivals
from kvstore.arena import Arena
from kvstore.blocks import Namespace
from kvstore.errors import InvalidRequest, StaleGeneration
from kvstore.hierarchy import Hierarchy
from kvstore.leases import Session
from kvstore.outcomes import Outcome
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

    def begin(
        self, session: Session, offsets: list[int], epochs: list[int], end: int = SIZE, *, first: int = 0
    ) -> None:
        self.hierarchy.arrivals.begin(session, offsets, epochs, first, end)
        check_invariants(self.hierarchy)

    def finish(self, offsets: list[int], end: int = SIZE, *, first: int = 0, received: int | None = None) -> None:
        whole = len(offsets) if received is None else received
        self.hierarchy.arrivals.finish(offsets, first, end, received=whole)
        check_invariants(self.hierarchy)

    def send(self, session: Session, offsets: list[int], first: int = 0, end: int = SIZE) -> None:
        self.begin(session, offsets, self.hierarchy.arrivals.epochs_of(offsets), end, first=first)
        self.finish(offsets, end, first=first)

    def commit(self, session: Session, offsets: list[int], *, arrived: bool = False) -> list[Outcome]:
        keys = [b"%d" % offset for offset in offsets]
        return self.hierarchy.commit(session, self.keyspace, offsets, keys, arrived=arrived)

    def refuses(self, session: Session, offsets: list[int]) -> None:
        """Nothing of them is published, and the session still holds them."""
        with pytest.raises(InvalidRequest, match="have not all arrived"):
            self.commit(session, offsets, arrived=True)
        check_invariants(self.hierarchy)
        assert not self.keyspace.blocks and session.reserved.keys() >= set(offsets)


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
    books = world.hierarchy.arrivals
    with pytest.raises(StaleGeneration):
        books.check_readable(scheduler, offsets, epochs, SIZE)
    world.commit(scheduler, offsets)
    lease = world.hierarchy.acquire(scheduler, world.keyspace, [b"%d" % offsets[0]])
    assert lease is not None
    books.check_readable(worker, offsets, epochs, SIZE)
    with pytest.raises(InvalidRequest):
        books.check_readable(worker, offsets, epochs, SIZE + 1)
    with pytest.raises(StaleGeneration):
        books.check_readable(stranger, offsets, epochs, SIZE)
    world.hierarchy.release(scheduler, [lease.id])
    with pytest.raises(StaleGeneration):
        books.check_readable(worker, offsets, epochs, SIZE)


def test_a_slot_that_nothing_was_sent_for_is_not_published(world: World) -> None:
    session = world.session()
    offsets, _ = world.reserve(session, 3)
    world.refuses(session, offsets)
    world.send(session, offsets[:2])
    world.refuses(session, offsets)
    assert world.commit(session, offsets[:2], arrived=True) == [Outcome.STORED] * 2
    world.hierarchy.end_session(session)
    check_idle(world.hierarchy)
    # The slots of before are not full for whoever has them next.
    other = world.session()
    everything, _ = world.reserve(other, 10_000)
    assert set(offsets) <= set(everything)
    with pytest.raises(InvalidRequest):
        world.commit(other, offsets[2:], arrived=True)


@pytest.mark.parametrize(
    "parts",
    [
        [(0, SIZE - 1)],
        [(1, SIZE)],
        [(0, 100), (101, SIZE)],
        [(0, 0)],
        [(0, SIZE // 2)] * 2,
    ],
)
def test_a_slot_that_was_filled_in_part_is_not_published(world: World, parts: list[tuple[int, int]]) -> None:
    session = world.session()
    offsets, _ = world.reserve(session)
    for first, end in parts:
        world.send(session, offsets, first, end)
    world.refuses(session, offsets)
    world.send(session, offsets, 0, 101)
    world.send(session, offsets, 50, SIZE)
    assert world.commit(session, offsets, arrived=True) == [Outcome.STORED]


@pytest.mark.parametrize("parts", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [0, 2, 1, 1, 3]])
def test_parts_make_up_a_slot_in_any_order(world: World, parts: list[int]) -> None:
    session = world.session()
    offsets, _ = world.reserve(session)
    quarter = SIZE // 4
    for part in parts:
        world.refuses(session, offsets)
        world.send(session, offsets, part * quarter, (part + 1) * quarter)
    assert world.commit(session, offsets, arrived=True) == [Outcome.STORED]


def test_a_write_that_broke_off_leaves_a_hole_until_it_is_repeated(world: World) -> None:
    session = world.session()
    offsets, epochs = world.reserve(session, 3)
    world.send(session, offsets)  # full, and then half overwritten
    world.begin(session, offsets, epochs)
    world.finish(offsets, received=1)
    world.refuses(session, offsets[1:])
    assert world.commit(session, offsets[:1], arrived=True) == [Outcome.STORED]
    world.hierarchy.delete(world.keyspace, [b"%d" % offsets[0]])
    world.send(session, offsets[1:])
    assert world.commit(session, offsets[1:], arrived=True) == [Outcome.STORED] * 2


def test_writes_that_meet_a_failed_one_do_not_count(world: World) -> None:
    session = world.session()
    offsets, epochs = world.reserve(session)
    world.begin(session, offsets, epochs)
    world.begin(session, offsets, epochs)
    world.finish(offsets, received=0)
    world.finish(offsets)  # whole, but the other one wrote to the same bytes at the same time
    world.refuses(session, offsets)
    world.send(session, offsets)
    assert world.commit(session, offsets, arrived=True) == [Outcome.STORED]


def test_members_of_a_group_leave_out_what_nobody_uses(world: World) -> None:
    scheduler, worker = world.session("g"), world.session("g")
    offsets, epochs = world.reserve(scheduler, 2)
    world.refuses(scheduler, offsets)
    world.send(worker, offsets, 0, 1000)
    world.begin(worker, offsets, epochs, 3000, first=2000)
    world.finish(offsets, 3000, first=2000, received=1)
    with pytest.raises(InvalidRequest):
        world.commit(scheduler, offsets, arrived=True)
    assert world.commit(scheduler, offsets[:1], arrived=True) == [Outcome.STORED]
    world.send(worker, offsets[1:], 2000, 3000)
    assert world.commit(scheduler, offsets[1:], arrived=True) == [Outcome.STORED]


def test_more_pieces_than_are_remembered_never_make_a_whole(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "_SPANS_MAX", 3)
    session = world.session()
    offsets, _ = world.reserve(session)
    for at in [*range(0, SIZE, 8192), *range(4096, SIZE, 8192)]:
        world.send(session, offsets, at, at + 4096)
    world.refuses(session, offsets)
    world.send(session, offsets)
    assert world.commit(session, offsets, arrived=True) == [Outcome.STORED]
