"""Who gets slots, who leaves for them, and what a group of sessions may take."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import structlog
from hypothesis import HealthCheck, given, settings

from kvstore.arena import Arena
from kvstore.blocks import Namespace
from kvstore.errors import InvalidRequest, LimitExceeded, SizeMismatch, UnknownNamespace, UnknownSession
from kvstore.hierarchy import Hierarchy
from kvstore.namespaces import NAMESPACES_MAX, Namespaces
from kvstore.outcomes import Outcome
from kvstore.pool import Shortfall
from kvstore.testing import FakeClock, check_invariants
from tests.unit.conftest import MIB, Pool


def keys(count: int, prefix: str = "k") -> list[bytes]:
    return [f"{prefix}{index}".encode() for index in range(count)]


# -- directory -----------------------------------------------------------------------------------------------------


def test_lookup_gives_the_leading_run_and_pins_nothing(pool: Pool) -> None:
    session, space = pool.attach(), pool.space(MIB)
    pool.store(session, space, [b"a", b"b", b"d"])
    look = pool.hierarchy.lookup
    assert look(space, [b"a", b"b", b"c", b"d"]) == 2
    assert look(space, [b"c", b"a"]) == 0 and look(space, []) == 0 and look(space, [b"d"]) == 1
    assert not session.leases


def test_a_namespace_with_another_size_is_refused_with_both(pool: Pool) -> None:
    space = pool.space(1000)
    with pytest.raises(SizeMismatch, match=r"1000.*2000"):
        pool.hierarchy.namespaces.open(space.namespace.identity, [2000])
    assert pool.hierarchy.namespaces.open(space.namespace.identity, [1000]) is space.namespace


def test_a_setting_that_keeps_two_engines_apart_by_mistake_is_named() -> None:
    first = Namespace(model="m", dtype="bf16", block_size=16, block_bytes=1000, hash_seed="1")
    others = {
        "hash_seed": dataclasses.replace(first, hash_seed="2"),
        "layout": dataclasses.replace(first, layout="NHD"),
        "": dataclasses.replace(first, tenant="b"),  # on purpose
        " ": dataclasses.replace(first, block_size=32, dtype="fp8"),  # another thing altogether
    }
    told = []
    for name, other in others.items():
        # A daemon of its own each time: a third namespace may be near two others.
        namespaces = Namespaces([])
        namespaces.open(first.identity(), first.group_bytes)
        with structlog.testing.capture_logs() as lines:
            namespaces.open(other.identity(), other.group_bytes)
            namespaces.open(other.identity(), other.group_bytes)
        told += [(name, line["setting"], line["values"]) for line in lines]
    assert told == [("hash_seed", "hash_seed", ["1", "2"]), ("layout", "layout", ["", "NHD"])]


def test_namespaces_and_groups_have_a_ceiling_that_is_named(pool: Pool) -> None:
    for index in range(NAMESPACES_MAX):
        pool.space(4096, model=f"m{index}")
    with pytest.raises(LimitExceeded, match=r"4096.*namespaces_max"):
        pool.space(4096, model="one more")
    with pytest.raises(LimitExceeded, match="groups_max"):
        pool.space(4096, *[4096] * 64, model="m0")


@pytest.mark.parametrize(
    ("digest", "group", "error"),
    [(b"x" * 16, 0, UnknownNamespace), (b"x", 0, InvalidRequest), (None, 1, InvalidRequest)],
)
def test_an_unknown_keyspace_is_refused(pool: Pool, digest: bytes | None, group: int, error: type[Exception]) -> None:
    space = pool.space(4096)
    with pytest.raises(error):
        pool.hierarchy.namespaces.keyspace(digest or space.namespace.digest, group)


def test_blocks_of_one_namespace_do_not_answer_in_another(pool: Pool) -> None:
    session = pool.attach()
    one, other = pool.space(4096, 4096), pool.space(4096, model="other")
    pool.store(session, one, [b"a"])
    assert not pool.hierarchy.lookup(other, [b"a"])
    assert not pool.hierarchy.lookup(one.namespace.keyspaces[1], [b"a"])


@pytest.mark.parametrize("bad", [[b""], [b"a", b""], [b"x" * 129]])
def test_a_commit_with_a_bad_key_changes_nothing(pool: Pool, bad: list[bytes]) -> None:
    session, space = pool.attach(), pool.space(4096)
    got = pool.hierarchy.reserve(session, space, 2)
    with pytest.raises(InvalidRequest, match="key"):
        pool.hierarchy.commit(session, space, got.offsets[: len(bad)], bad)
    with pytest.raises(InvalidRequest, match="2 slots and 1 keys"):
        pool.hierarchy.commit(session, space, got.offsets, [b"a"])
    assert list(session.reserved) == got.offsets and not space.blocks
    assert pool.hierarchy.commit(session, space, got.offsets, [b"x" * 128, b"a"]) == [Outcome.STORED] * 2


# -- eviction ------------------------------------------------------------------------------------------------------


@given(
    steps=st.lists(
        st.tuples(st.sampled_from("ssssaard"), st.integers(0, 3), st.integers(0, 11), st.integers(1, 6)),
        min_size=10,
        max_size=60,
    )
)
@settings(max_examples=80, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_a_suffix_leaves_before_its_prefix(steps: list[tuple[str, int, int, int]]) -> None:
    """Whatever is stored, read and pinned: an evicted block leaves nothing behind that continues it, unless pinned."""
    arena = Arena(20 * MIB, "off")
    try:
        hierarchy = Hierarchy(arena, FakeClock())
        pool = Pool(hierarchy, FakeClock())
        hierarchy.add_populated(arena.size_bytes)
        session, space = pool.attach(), pool.space(MIB - 4096)
        chains = [[f"{chain if index > 4 else 0}/{index}".encode() for index in range(12)] for chain in range(4)]
        parent_of = {key: before for chain in chains for before, key in itertools.pairwise(chain)}
        leases: list[int] = []
        # Left behind while they were pinned. What is stored again before them does not know them.
        orphans: set[bytes] = set()
        for what, chain, start, count in steps:
            if what == "s":
                # From the root on, as an engine stores: a prefix is there, or is stored now.
                run = chains[chain][: start + 1]
                there = hierarchy.lookup(space, run)
                known = set(space.blocks)
                got = hierarchy.reserve(session, space, len(run) - there)
                still = hierarchy.lookup(space, run[:there])
                if still < there:  # its own prefix left for it: an engine would start again
                    hierarchy.abort(session, got.offsets)
                else:
                    stored = run[there : there + len(got.offsets)]
                    hierarchy.commit(session, space, got.offsets, stored, run[there - 1] if there else b"")
                for key in known - set(space.blocks):
                    for follower, parent in parent_of.items():
                        block = space.blocks.get(follower)
                        if parent == key and block is not None and follower not in run[there:]:
                            assert block.pins or follower in orphans
                            orphans.add(follower)
                orphans &= set(space.blocks)
            elif what == "a":
                lease = hierarchy.acquire(session, space, chains[chain][start : start + count])
                if lease is not None:
                    leases.append(lease.id)
            elif what == "r" and leases:
                hierarchy.release(session, [leases.pop(start % len(leases))])
            elif what == "d":
                hierarchy.pool.evict(count * MIB, 3)
            check_invariants(hierarchy)
    finally:
        arena.close()


def test_reading_the_middle_of_a_chain_keeps_its_beginning(pool: Pool) -> None:
    session, space = pool.attach(), pool.space(MIB)
    chain, other = keys(10), keys(10, "o")
    pool.store(session, space, chain)
    pool.store(session, space, other)
    lease = pool.hierarchy.acquire(session, space, chain[5:7])
    assert lease is not None
    pool.hierarchy.release(session, [lease.id])
    pool.hierarchy.pool.evict(pool.hierarchy.pool.free_bytes + 13 * MIB, 100)
    assert pool.hierarchy.lookup(space, chain) == 7 and pool.hierarchy.lookup(space, other) == 0


def test_what_is_pinned_stays_and_a_refusal_says_so(pool: Pool) -> None:
    session, space = pool.attach(), pool.space(MIB)
    stored = pool.store(session, space, keys(1000))
    lease = pool.hierarchy.acquire(session, space, keys(stored))
    assert lease is not None and len(lease.blocks) == stored
    got = pool.hierarchy.reserve(session, space, 5)
    assert (got.offsets, got.shortfall) == ([], Shortfall.PINNED)
    pool.check()
    pool.hierarchy.release(session, [lease.id])
    assert len(pool.hierarchy.reserve(session, space, 5).offsets) == 5


def test_a_block_that_was_pinned_when_its_turn_came_leaves_later(pool: Pool) -> None:
    session, space = pool.attach(), pool.space(MIB)
    stored = pool.store(session, space, keys(1000))
    lease = pool.hierarchy.acquire(session, space, keys(stored)[:2])
    assert lease is not None
    assert pool.store(session, space, keys(1000, "n")) == stored - 2
    assert pool.hierarchy.lookup(space, keys(stored)) == 2
    pool.hierarchy.release(session, [lease.id])
    pool.check()
    assert pool.store(session, space, keys(1000, "m")) == stored
    assert pool.hierarchy.lookup(space, keys(1)) == 0


def test_a_deleted_block_keeps_its_bytes_until_the_last_reader_has_left(pool: Pool) -> None:
    first, second, space = pool.attach(), pool.attach(), pool.space(MIB)
    pool.store(first, space, [b"a"])
    leases = [pool.hierarchy.acquire(session, space, [b"a"]) for session in (first, second)]
    assert pool.hierarchy.delete(space, [b"a"]) == 1 and pool.hierarchy.lookup(space, [b"a"]) == 0
    before = [pool.hierarchy.locations(lease)[1].tolist() for lease in leases if lease]
    pool.store(second, space, keys(1000))
    pool.check()
    for session, lease in zip((first, second), leases, strict=True):
        assert lease is not None
        assert [pool.hierarchy.locations(lease)[1].tolist()] * 2 == before
        used = pool.hierarchy.pool.used_bytes
        pool.hierarchy.release(session, [lease.id])
    assert pool.hierarchy.pool.used_bytes == used - MIB


# -- sizes ---------------------------------------------------------------------------------------------------------


def test_segments_move_to_the_size_that_is_asked_for(pool: Pool) -> None:
    session = pool.attach()
    small, large = pool.space(64 << 10), pool.space(5 * MIB, model="large")
    pool.store(session, small, keys(10_000))
    assert pool.store(session, large, keys(3, "l")) == 3
    assert pool.hierarchy.pool.segment_moves and pool.hierarchy.lookup(large, keys(3, "l")) == 3
    pool.check()
    # The coldest small ones left. Stored last to first in one chain, those are its end.
    assert pool.hierarchy.lookup(small, keys(10_000)) == len(small.blocks) > 100
    assert pool.store(session, small, keys(10_000, "again")) > 300
    pool.check()


def test_a_size_whose_blocks_are_all_pinned_gets_room_from_younger_ones_of_another(pool: Pool) -> None:
    session = pool.attach()
    one, other = pool.space(MIB), pool.space(MIB + 4096, model="other")
    pool.store(session, one, keys(4))
    lease = pool.hierarchy.acquire(session, one, keys(4))
    pool.store(session, other, keys(1000))
    assert lease is not None and other.blocks
    got = pool.hierarchy.reserve(session, one, 1)
    assert len(got.offsets) == 1 and got.shortfall is None
    pool.check()


def test_a_segment_in_which_somebody_writes_is_not_emptied_for_another_size(pool: Pool) -> None:
    session, arena = pool.attach(), pool.hierarchy.arena
    small, large = pool.space(64 << 10), pool.space(5 * MIB, model="large")
    offsets = pool.hierarchy.reserve(session, small, 10_000).offsets
    kept = {arena.segment_of(offset).base: offset for offset in offsets}
    filled = [offset for offset in offsets if offset not in kept.values()]
    pool.hierarchy.commit(session, small, filled, keys(len(filled)))
    assert pool.hierarchy.reserve(session, large, 1).shortfall is Shortfall.PINNED
    assert len(small.blocks) == len(filled) > 100
    pool.check()


def test_a_block_that_can_never_fit_is_told_so(pool: Pool) -> None:
    session = pool.attach()
    got = pool.hierarchy.reserve(session, pool.space(33 * MIB), 1)
    assert (got.offsets, got.shortfall) == ([], Shortfall.TOO_LARGE)


# -- shares and groups ---------------------------------------------------------------------------------------------


def test_a_share_is_enforced_and_only_its_own_blocks_leave_for_it(pool: Pool) -> None:
    space = pool.space(MIB)
    neighbour, member = pool.attach("a"), pool.attach("b", 5 * MIB)
    pool.store(neighbour, space, keys(8, "n"))
    assert pool.store(member, space, keys(5)) == 5
    lease = pool.hierarchy.acquire(member, space, keys(2))
    assert lease is not None
    got = pool.hierarchy.reserve(member, space, 5)
    assert (len(got.offsets), got.shortfall) == (3, Shortfall.SHARE)
    assert member.group.used_bytes == 5 * MIB
    assert pool.hierarchy.lookup(space, keys(8, "n")) == 8 and pool.hierarchy.lookup(space, keys(5)) == 2
    pool.check()
    # What neighbours stored is nobody's loss: reading it costs the share nothing.
    assert pool.hierarchy.acquire(member, space, keys(8, "n")) is not None


def test_a_block_larger_than_the_share_can_never_fit(pool: Pool) -> None:
    got = pool.hierarchy.reserve(pool.attach("b", MIB), pool.space(MIB + 1), 1)
    assert got.shortfall is Shortfall.TOO_LARGE


def test_members_of_a_group_share_one_share_and_must_agree_on_it(pool: Pool) -> None:
    space = pool.space(MIB)
    scheduler, worker = pool.attach("e", 4 * MIB), pool.attach("e")
    assert pool.store(scheduler, space, keys(3)) == 3
    assert len(pool.hierarchy.reserve(worker, space, 4).offsets) == 4
    assert pool.hierarchy.lookup(space, keys(3)) == 0 and worker.group.used_bytes == 4 * MIB
    with pytest.raises(InvalidRequest, match=r"4194304.*1000"):
        pool.attach("e", 1000)


def test_what_a_dead_member_held_stays_until_the_last_one_is_gone(pool: Pool) -> None:
    space = pool.space(MIB)
    scheduler, worker, reader = pool.attach("e"), pool.attach("e"), pool.attach()
    pool.store(reader, space, [b"a", b"b"])
    lease = pool.hierarchy.acquire(scheduler, space, [b"a"])
    got = pool.hierarchy.reserve(scheduler, space, 2)
    pool.hierarchy.end_session(scheduler)
    pool.hierarchy.end_session(scheduler)
    pool.check()
    with pytest.raises(UnknownSession):
        pool.hierarchy.sessions.session(scheduler.id)
    pool.store(reader, space, keys(1000))
    assert lease is not None and lease.blocks[0].pins == 1 and set(scheduler.reserved) == set(got.offsets)
    pool.hierarchy.end_session(worker)
    pool.check()
    assert not scheduler.leases and not scheduler.reserved and lease.blocks[0].pins == 0


def test_a_session_without_a_group_is_alone(pool: Pool) -> None:
    space = pool.space(MIB)
    one, other = pool.attach(), pool.attach()
    pool.hierarchy.reserve(one, space, 3)
    pool.hierarchy.end_session(one)
    assert not one.reserved and len(pool.hierarchy.sessions) == 1 and not other.ended
    pool.check()


def test_sessions_have_an_age(pool: Pool) -> None:
    session = pool.attach()
    pool.clock.advance(7.5)
    assert pool.hierarchy.sessions.age_s(session) == 7.5


# -- population ----------------------------------------------------------------------------------------------------


def test_slots_are_refused_while_memory_is_on_its_way_and_nothing_leaves(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(populated=False)
    session, space = pool.attach(), pool.space(MIB)
    assert pool.hierarchy.reserve(session, space, 1).shortfall is Shortfall.POPULATING
    pool.hierarchy.add_populated(2 * MIB)
    assert pool.store(session, space, keys(2)) == 2
    assert pool.hierarchy.reserve(session, space, 1).shortfall is Shortfall.POPULATING
    assert pool.hierarchy.lookup(space, keys(2)) == 2


def test_where_memory_ended_early_the_pool_is_what_there_is(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(populated=False)
    session, space = pool.attach(), pool.space(MIB)
    pool.hierarchy.add_populated(4 * MIB)
    pool.hierarchy.end_population()
    assert pool.store(session, space, keys(6)) == 4
    assert pool.store(session, space, keys(3, "n")) == 3
    pool.check()


def test_a_draining_daemon_takes_commits_but_gives_no_slots(pool: Pool) -> None:
    session, space = pool.attach(), pool.space(MIB)
    got = pool.hierarchy.reserve(session, space, 1)
    pool.hierarchy.draining = True
    assert pool.hierarchy.reserve(session, space, 1).shortfall is Shortfall.DRAINING
    assert pool.hierarchy.commit(session, space, got.offsets, [b"a"]) == [Outcome.STORED]
