"""Schedules around select and drop_select. A loop that is moved by hand decides who goes first; nothing sleeps."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator

import pytest

from kvstore.arena import Arena
from kvstore.blocks import Namespace
from kvstore.directory import Keyspace
from kvstore.hierarchy import Hierarchy
from kvstore.leases import Lease, Session
from kvstore.outcomes import Outcome
from kvstore.pool import Shortfall
from kvstore.testing import FakeClock, SteppedLoop, check_idle, check_invariants

MIB = 1 << 20
Selecting = asyncio.Task[Lease | None]


@dataclasses.dataclass
class Scene:
    """A pool of 15 slots of 2 MiB, and two sessions."""

    loop: SteppedLoop
    hierarchy: Hierarchy
    space: Keyspace
    one: Session
    other: Session

    def store(self, *keys: bytes, by: Session | None = None) -> list[Outcome]:
        session = by or self.one
        offsets = self.hierarchy.reserve(session, self.space, len(keys)).offsets
        return self.hierarchy.commit(session, self.space, offsets, keys[: len(offsets)])

    def fill(self, prefix: bytes = b"cold") -> None:
        """Stores more than fits, so that whatever is not pinned has left."""
        self.store(*[prefix + b"%d" % index for index in range(100)], by=self.other)

    def select(self, *keys: bytes, by: Session | None = None, drop: bool = False, wait_s: float = 60) -> Selecting:
        call = self.hierarchy.select(by or self.one, self.space, keys, drop=drop, wait_s=wait_s)
        task = self.loop.create_task(call)
        self.loop.settle()
        return task

    def attach(self, group: str = "") -> Session:
        return self.hierarchy.sessions.attach("test", 0, group, 0)


@pytest.fixture
def scene(stepped_loop: SteppedLoop) -> Iterator[Scene]:
    arena = Arena(32 * MIB, "off")
    arena.add_populated(arena.size_bytes)
    hierarchy = Hierarchy(arena, FakeClock())
    namespace = Namespace("m", "x", 64, 2 * MIB)
    (space,) = hierarchy.namespaces.open(namespace.identity(), namespace.group_bytes).keyspaces
    sessions = [hierarchy.sessions.attach("test", 0, "", 0) for _ in range(2)]
    scene = Scene(stepped_loop, hierarchy, space, *sessions)
    yield scene
    check_invariants(hierarchy)
    for session in list(hierarchy.sessions):
        hierarchy.end_session(session)
    stepped_loop.advance(3600)
    check_idle(hierarchy)
    arena.close()


def won(*tasks: Selecting) -> list[Selecting]:
    """Those that got something."""
    return [task for task in tasks if task.done() and not task.cancelled() and task.result() is not None]


def lease_of(task: Selecting) -> Lease:
    lease = task.result()
    assert lease is not None
    return lease


# -- hit versus evict ----------------------------------------------------------------------------------------------


def test_a_hit_before_the_eviction_keeps_the_block(scene: Scene) -> None:
    scene.store(b"a")
    lease = scene.hierarchy.acquire(scene.one, scene.space, [b"a"])
    scene.fill()
    assert lease is not None and scene.hierarchy.lookup(scene.space, [b"a"]) == 1
    scene.hierarchy.release(scene.one, [lease.id])


def test_a_hit_after_the_eviction_is_a_miss(scene: Scene) -> None:
    scene.store(b"a")
    scene.fill()
    assert scene.hierarchy.acquire(scene.one, scene.space, [b"a"]) is None


def test_an_eviction_between_the_wake_up_and_the_grant_is_waited_out(scene: Scene) -> None:
    """The key came, and was gone again before the waiter could look."""
    waiter = scene.select(b"a", by=scene.one)
    scene.store(b"a")
    scene.fill()
    scene.loop.settle()
    assert not waiter.done() and scene.hierarchy.waiting == 1
    scene.store(b"a")
    scene.loop.settle()
    assert won(waiter)


@pytest.mark.parametrize("remove", ["delete", "flush", "evict"])
def test_a_removal_between_the_wake_up_and_the_grant_is_waited_out(scene: Scene, remove: str) -> None:
    waiter = scene.select(b"a", drop=True)
    scene.store(b"a")
    if remove == "delete":
        scene.hierarchy.delete(scene.space, [b"a"])
    elif remove == "flush":
        scene.hierarchy.flush(None, 10)
    else:
        scene.hierarchy.pool.evict(1 << 40, 100)
    scene.loop.settle()
    assert not waiter.done()
    scene.store(b"a")
    scene.loop.settle()
    assert won(waiter)


# -- double commit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_commits_of_a_key_the_first_one_counts(scene: Scene, first: int) -> None:
    sessions = [scene.one, scene.other]
    slots = [scene.hierarchy.reserve(session, scene.space, 1).offsets for session in sessions]
    order = [first, 1 - first]
    outcomes = [scene.hierarchy.commit(sessions[turn], scene.space, slots[turn], [b"a"]) for turn in order]
    assert outcomes == [[Outcome.STORED], [Outcome.EXISTS]]
    assert scene.space.blocks[b"a"].offset == slots[first][0]
    assert not scene.one.reserved and not scene.other.reserved


def test_a_commit_of_a_key_that_is_leased_and_deleted_is_a_new_block(scene: Scene) -> None:
    scene.store(b"a")
    old = scene.hierarchy.acquire(scene.one, scene.space, [b"a"])
    scene.hierarchy.delete(scene.space, [b"a"])
    assert scene.store(b"a", by=scene.other) == [Outcome.STORED]
    new = scene.hierarchy.acquire(scene.other, scene.space, [b"a"])
    assert old is not None and new is not None and old.blocks[0] is not new.blocks[0]
    assert old.blocks[0].offset != new.blocks[0].offset


def test_a_slot_is_committed_once(scene: Scene) -> None:
    offsets = scene.hierarchy.reserve(scene.one, scene.space, 1).offsets
    commit = scene.hierarchy.commit
    assert commit(scene.other, scene.space, offsets, [b"x"]) == [Outcome.NOT_RESERVED]
    assert commit(scene.one, scene.space, offsets, [b"a"]) == [Outcome.STORED]
    assert commit(scene.one, scene.space, offsets, [b"b"]) == [Outcome.NOT_RESERVED]
    assert scene.hierarchy.lookup(scene.space, [b"b"]) == 0 and scene.hierarchy.lookup(scene.space, [b"a"]) == 1


# -- drop_select ---------------------------------------------------------------------------------------------------


def test_exactly_one_of_many_waiters_wins_each_time(scene: Scene) -> None:
    waiters = [scene.select(b"a", by=scene.attach(), drop=True) for _ in range(16)]
    assert scene.hierarchy.waiting == 16
    for left in range(16, 0, -1):
        scene.store(b"a")
        scene.loop.settle()
        (winner,) = won(*waiters)
        lease = lease_of(winner)
        assert scene.hierarchy.waiting == left - 1
        check_invariants(scene.hierarchy)
        assert scene.hierarchy.release(lease.session, [lease.id], remove=True) == (1, 1)
        waiters.remove(winner)
        scene.loop.settle()
        assert not won(*waiters) and scene.hierarchy.lookup(scene.space, [b"a"]) == 0
    assert not waiters


def test_a_winner_that_gives_back_or_dies_loses_nothing(scene: Scene) -> None:
    waiters = [scene.select(b"a", b"b", by=scene.attach(), drop=True) for _ in range(16)]
    scene.store(b"a", b"b")
    for turn in range(16):
        scene.loop.settle()
        (winner,) = won(*waiters)
        lease = lease_of(winner)
        assert len(lease.blocks) == 2
        waiters.remove(winner)
        if turn % 2:
            scene.hierarchy.release(lease.session, [lease.id])
        else:
            scene.hierarchy.end_session(lease.session)
        check_invariants(scene.hierarchy)
    scene.loop.settle()
    assert scene.hierarchy.lookup(scene.space, [b"a", b"b"]) == 2


def test_a_winner_of_a_group_that_dies_gives_its_claim_back_before_its_pins(scene: Scene) -> None:
    """Its fellow may still be copying, so the slot stays; but nobody may have to wait for that."""
    member, fellow = scene.attach("e"), scene.attach("e")
    scene.store(b"a")
    first = scene.select(b"a", by=member, drop=True)
    second = scene.select(b"a", drop=True)
    assert won(first, second) == [first]
    scene.hierarchy.end_session(member)
    scene.loop.settle()
    lease = lease_of(second)
    assert lease.blocks[0].pins == 2
    scene.hierarchy.release(scene.one, [lease.id], remove=True)
    check_invariants(scene.hierarchy)
    assert lease.blocks[0].pins == 1
    scene.hierarchy.end_session(fellow)
    assert lease.blocks[0].pins == 0


def test_ordinary_readers_do_not_wait_for_a_claim(scene: Scene) -> None:
    scene.store(b"a")
    claim = scene.select(b"a", drop=True)
    reader = scene.select(b"a", by=scene.other)
    assert won(claim, reader) == [claim, reader]
    lease = lease_of(claim)
    assert scene.hierarchy.release(scene.one, [lease.id], remove=True) == (1, 1)
    check_invariants(scene.hierarchy)
    assert lease.blocks[0].pins == 1, "the reader still reads"


def test_two_claims_that_overlap_do_not_deadlock(scene: Scene) -> None:
    scene.store(b"a", b"b")
    second_half = scene.select(b"b", drop=True)
    both = scene.select(b"a", b"b", by=scene.other, drop=True)
    (winner,) = won(second_half, both)
    assert winner is second_half
    # Who waits claims nothing meanwhile: the first half is free for others.
    first_half = scene.select(b"a", by=scene.attach(), drop=True)
    assert won(first_half)
    for task in (first_half, second_half):
        lease = lease_of(task)
        scene.hierarchy.release(lease.session, [lease.id])
    scene.loop.settle()
    assert len(lease_of(both).blocks) == 2


def test_a_claim_ends_as_a_shorter_run_when_time_is_up(scene: Scene) -> None:
    scene.store(b"a")
    waiter = scene.select(b"a", b"b", drop=True, wait_s=5)
    assert not waiter.done()
    scene.loop.advance(5)
    assert [block.key for block in lease_of(waiter).blocks] == [b"a"]
    assert scene.hierarchy.counts.misses["absent"] == 1


def test_a_block_held_by_a_view_after_its_removal_can_be_stored_and_claimed_anew(scene: Scene) -> None:
    scene.store(b"a")
    first = lease_of(scene.select(b"a", drop=True))
    assert scene.hierarchy.release(scene.one, [first.id], remove=True, hold=True) == (1, 1)
    waiter = scene.select(b"a", by=scene.other, drop=True)
    assert not waiter.done()
    scene.store(b"a")
    scene.loop.settle()
    second = lease_of(waiter)
    assert second.blocks[0] is not first.blocks[0]
    assert scene.hierarchy.release(scene.one, [first.id]) == (1, 0)
    check_invariants(scene.hierarchy)
    assert scene.hierarchy.lookup(scene.space, [b"a"]) == 1


# -- waiting -------------------------------------------------------------------------------------------------------


def test_each_key_of_a_run_is_waited_for_in_turn(scene: Scene) -> None:
    waiter = scene.select(b"a", b"b", b"c")
    for key in (b"b", b"c"):
        scene.store(key)
        scene.loop.settle()
        assert not waiter.done() and list(scene.space.waiters) == [b"a"]
    scene.store(b"a")
    scene.loop.settle()
    assert len(lease_of(waiter).blocks) == 3


@pytest.mark.parametrize("woken", [False, True])
@pytest.mark.parametrize("drop", [False, True])
def test_a_waiter_that_is_cancelled_holds_nothing(scene: Scene, woken: bool, drop: bool) -> None:
    """Also where the cancellation comes at the same moment as what it waited for; others get that."""
    cancelled = scene.select(b"a", drop=drop)
    patient = scene.select(b"a", by=scene.other, drop=drop)
    if woken:
        scene.store(b"a")
    cancelled.cancel()
    scene.loop.settle()
    assert cancelled.cancelled() and not scene.one.leases
    if not woken:
        scene.store(b"a")
        scene.loop.settle()
    assert won(patient)


def test_a_time_out_at_the_same_moment_as_the_wake_up_is_a_hit(scene: Scene) -> None:
    waiter = scene.select(b"a", wait_s=5)
    scene.store(b"a")
    scene.loop.advance(5)
    assert won(waiter)


@pytest.mark.parametrize("woken", [False, True])
def test_a_session_that_ended_while_it_waited_gets_nothing(scene: Scene, woken: bool) -> None:
    waiter = scene.select(b"a", wait_s=5)
    if woken:
        scene.store(b"a", by=scene.other)
    scene.hierarchy.end_session(scene.one)
    scene.loop.advance(5)
    assert waiter.result() is None and not scene.one.leases


def test_a_request_that_was_given_up_gets_nothing(scene: Scene) -> None:
    call = scene.hierarchy.select(scene.one, scene.space, [b"a"], drop=False, wait_s=60, request_id=7)
    waiter = scene.loop.create_task(call)
    scene.loop.settle()
    scene.hierarchy.forget(scene.one, 7)
    scene.store(b"a", by=scene.other)
    scene.loop.settle()
    assert waiter.result() is None and not scene.one.leases


def test_a_draining_daemon_lets_nobody_wait(scene: Scene) -> None:
    scene.store(b"a")
    waiters = [scene.select(b"a", b"b"), scene.select(b"c")]
    scene.hierarchy.draining = True
    scene.hierarchy.wake_all()
    scene.loop.settle()
    assert [len(lease_of(waiters[0]).blocks), waiters[1].result()] == [1, None]
    assert scene.select(b"d").result() is None


# -- reservations --------------------------------------------------------------------------------------------------


@pytest.fixture
def unpopulated(stepped_loop: SteppedLoop) -> Iterator[Callable[[], tuple[Hierarchy, Session, Keyspace]]]:
    arenas: list[Arena] = []

    def make() -> tuple[Hierarchy, Session, Keyspace]:
        arenas.append(Arena(32 * MIB, "off"))
        hierarchy = Hierarchy(arenas[-1], FakeClock())
        namespace = Namespace("m", "x", 64, 2 * MIB)
        (space,) = hierarchy.namespaces.open(namespace.identity(), namespace.group_bytes).keyspaces
        return hierarchy, hierarchy.sessions.attach("test", 0, "", 0), space

    yield make
    for arena in arenas:
        arena.close()


def test_a_reservation_waits_for_memory(
    stepped_loop: SteppedLoop, unpopulated: Callable[[], tuple[Hierarchy, Session, Keyspace]]
) -> None:
    hierarchy, session, space = unpopulated()
    calls = [stepped_loop.create_task(hierarchy.reserve_within(session, space, 2, 5)) for _ in range(2)]
    stepped_loop.settle()
    for _ in range(3):
        hierarchy.add_populated(2 * MIB)
        stepped_loop.settle()
    stepped_loop.advance(5)
    got = [call.result() for call in calls]
    assert sorted(len(each.offsets) for each in got) == [1, 2]
    assert {each.shortfall for each in got} == {None, Shortfall.POPULATING}
    assert hierarchy.counts.refused["populating"] == 1
    check_invariants(hierarchy)


@pytest.mark.parametrize("woken", [False, True])
def test_a_reservation_that_is_cancelled_while_it_waits_takes_nothing(
    stepped_loop: SteppedLoop, unpopulated: Callable[[], tuple[Hierarchy, Session, Keyspace]], woken: bool
) -> None:
    """Nor does one whose cancellation comes together with the memory."""
    hierarchy, session, space = unpopulated()
    hierarchy.add_populated(2 * MIB)
    call = stepped_loop.create_task(hierarchy.reserve_within(session, space, 3, 60))
    stepped_loop.settle()
    assert len(session.reserved) == 1
    if woken:
        hierarchy.add_populated(8 * MIB)
    call.cancel()
    stepped_loop.settle()
    assert call.cancelled() and not session.reserved
    check_invariants(hierarchy)


def test_a_session_that_ended_while_it_waited_for_memory_takes_nothing(
    stepped_loop: SteppedLoop, unpopulated: Callable[[], tuple[Hierarchy, Session, Keyspace]]
) -> None:
    hierarchy, session, space = unpopulated()
    fellows = [hierarchy.sessions.attach("test", 0, "e", 0) for _ in range(2)]
    hierarchy.add_populated(2 * MIB)
    call = stepped_loop.create_task(hierarchy.reserve_within(fellows[0], space, 3, 60))
    stepped_loop.settle()
    hierarchy.end_session(fellows[0])
    hierarchy.add_populated(8 * MIB)
    stepped_loop.settle()
    assert not call.result().offsets
    assert not fellows[0].reserved, "nobody was told of these slots, so nobody can be filling them"
    for each in (session, fellows[1]):
        hierarchy.end_session(each)
    check_idle(hierarchy)
