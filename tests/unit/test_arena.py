"""Geometry, budget and epochs of the pool."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvstore.arena import GRANULE_BYTES, Arena, ArenaView, Segment, slot_bytes_for
from kvstore.errors import ConfigError

MIB = 1 << 20
NewArena = Callable[[int], Arena]


def populated(budget_bytes: int) -> Arena:
    arena = Arena(budget_bytes, "off")
    arena.add_populated(arena.size_bytes)
    return arena


@pytest.fixture
def new_arena() -> Iterator[NewArena]:
    """Makes arenas that are closed afterwards."""
    made: list[Arena] = []

    def make(budget_bytes: int) -> Arena:
        made.append(populated(budget_bytes))
        return made[-1]

    yield make
    for arena in made:
        arena.close()


def fill(arena: Arena, slot_bytes: int) -> list[int]:
    """Every slot of a size that fits."""
    offsets: list[int] = []
    while taken := arena.allocate(slot_bytes, 1 << 20):
        offsets += taken
    return offsets


def free(arena: Arena, offsets: list[int]) -> None:
    for offset in offsets:
        arena.free(offset, arena.segment_of(offset), reserved=True)


def epochs(arena: Arena, offsets: list[int]) -> list[int]:
    return [int(epoch) for epoch in arena.epochs_of(np.array(offsets, dtype=np.uint64))]


@given(block_bytes=st.integers(64 << 10, 40 * MIB))
@settings(max_examples=150, deadline=None, database=None)
def test_a_segment_wastes_less_than_5_percent(block_bytes: int) -> None:
    """Of every block of at least 64 KiB, in a pool that has room for segments of the size they should have."""
    arena = populated(1 << 30)  # mapped, never touched
    try:
        slot_bytes = slot_bytes_for(block_bytes)
        assert slot_bytes >= block_bytes and slot_bytes % 512 == 0
        (offset,) = arena.allocate(slot_bytes, 1)
        segment = arena.segment_of(offset)
        taken = segment.granules * GRANULE_BYTES
        assert 1 - segment.slots * block_bytes / taken < 0.05
        free(arena, [offset])
    finally:
        arena.close()


@given(budget=st.integers(16 * MIB, 96 * MIB), block_bytes=st.integers(1, 3 * MIB))
@settings(max_examples=60, deadline=None, database=None)
def test_the_budget_is_never_exceeded(budget: int, block_bytes: int) -> None:
    arena = populated(budget)
    try:
        assert arena.committed_bytes <= budget
        offsets = fill(arena, slot_bytes_for(block_bytes))
        assert offsets and len(set(offsets)) == len(offsets)
        assert arena.committed_bytes <= budget
        free(arena, offsets)
        assert arena.committed_bytes <= budget and not arena.classes
    finally:
        arena.close()


def test_blocks_of_4_kib_make_granules_retire_and_large_ones_bring_them_back(new_arena: NewArena) -> None:
    arena = new_arena(64 * MIB)
    granules = arena.free_granules
    small = fill(arena, 4096)
    assert arena.retired_granules and arena.committed_bytes <= arena.budget_bytes
    # Nearly all of the budget is in use: what was retired is what bookkeeping needs.
    assert len(small) * (4096 + 400) > 0.94 * arena.budget_bytes
    free(arena, small)
    assert not arena.retired_granules and arena.free_granules == granules
    assert len(fill(arena, GRANULE_BYTES)) == granules


def test_a_retired_granule_reads_as_zeros_and_takes_bytes_again(new_arena: NewArena) -> None:
    arena = new_arena(32 * MIB)
    pool = arena.memory.buffer
    pool[:] = b"x" * len(pool)
    small = fill(arena, 4096)
    end = bytes(pool[-GRANULE_BYTES:])
    assert end == bytes(GRANULE_BYTES)
    free(arena, small)
    pool[-8:] = b"12345678"
    assert bytes(pool[-8:]) == b"12345678"
    pool.release()


def test_a_retired_granule_stays_so_while_somebody_may_have_pinned_its_memory(new_arena: NewArena) -> None:
    arena = new_arena(64 * MIB)
    arena.opened_by(b"one"), arena.opened_by(b"two")
    small = fill(arena, 4096)
    retired = arena.retired_granules
    arena.opened_by(b"late")  # what it pins is what comes back
    arena.closed_by(b"one")
    free(arena, small)
    assert retired and arena.retired_granules == retired
    taken = fill(arena, GRANULE_BYTES)
    assert len(taken) == arena.size_bytes // GRANULE_BYTES - retired
    arena.closed_by(b"two")
    assert not arena.retired_granules and len(fill(arena, GRANULE_BYTES)) == retired


def test_pinned_memory_is_not_the_pools_any_more_once_it_went_back(new_arena: NewArena) -> None:
    """Why the one before is so: a pipe holds pages as a GPU does that registered them."""
    arena = new_arena(16 * MIB)
    pool, last = arena.memory.buffer, arena.size_bytes - 4096
    pool[last : last + 4] = b"then"
    reader, writer = os.pipe()
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        piece = (ctypes.c_void_p * 2)(arena.memory.address + last, 4)
        if libc.vmsplice(writer, piece, ctypes.c_ulong(1), 0) != 4:
            pytest.skip(f"vmsplice: {os.strerror(ctypes.get_errno())}")
        arena.memory.discard(last - 4096 * 511, GRANULE_BYTES)
        arena.memory.populate(last - 4096 * 511, GRANULE_BYTES)
        pool[last : last + 4] = b"now!"
        assert os.read(reader, 4) == b"then"
    finally:
        os.close(reader), os.close(writer)
        pool.release()


def test_slots_come_from_populated_memory_only() -> None:
    arena = Arena(32 * MIB, "off")
    try:
        assert not arena.allocate(MIB, 1)
        arena.add_populated(3 * MIB)  # one granule and a half
        taken = fill(arena, MIB)
        assert sorted(taken) == [0, MIB]
        arena.add_populated(MIB)
        assert sorted(fill(arena, MIB)) == [2 * MIB, 3 * MIB]
        assert not arena.populated
        arena.add_populated(1 << 40)
        assert arena.populated and arena.populated_bytes == arena.size_bytes
    finally:
        arena.close()


def test_an_empty_segment_dissolves(new_arena: NewArena) -> None:
    arena = new_arena(64 * MIB)
    before = arena.free_granules
    (one, other) = arena.allocate(65536, 2)
    segment = arena.fill(one, "a block")
    assert arena.segment_of(one) is arena.segment_of(other) is segment
    free(arena, [other])
    assert 65536 in arena.classes
    arena.free(one, segment, reserved=False)
    assert not arena.classes and arena.free_granules == before


def test_slots_do_not_overlap_whatever_sizes_are_mixed(new_arena: NewArena) -> None:
    arena = new_arena(64 * MIB)
    taken: list[tuple[int, int]] = []
    for size in (4096, 4608, 70144, 999424, 3 * MIB, 5 * MIB) * 3:
        taken += [(offset, size) for offset in arena.allocate(size, 3)]
    assert len(taken) > 40
    taken.sort()
    for (offset, size), (following, _) in itertools.pairwise(taken):
        assert offset + size <= following
    assert taken[-1][0] + taken[-1][1] <= arena.size_bytes


def test_an_epoch_changes_each_time_a_slot_is_handed_out(new_arena: NewArena) -> None:
    arena = new_arena(32 * MIB)
    keep = arena.allocate(65536, 1)  # keeps the segment
    seen = set()
    for _ in range(5):
        (offset,) = arena.allocate(65536, 1)
        seen.add((offset, *epochs(arena, [offset])))
        free(arena, [offset])
    assert len(seen) == 5
    assert epochs(arena, keep) == epochs(arena, keep)


@pytest.mark.parametrize(("first", "second"), [(65536, 5 * MIB), (5 * MIB, 65536), (4608, MIB), (MIB, 4608)])
def test_every_epoch_changes_when_a_segment_gets_another_slot_size(
    new_arena: NewArena, first: int, second: int
) -> None:
    """A reader whose session is over has to notice, wherever in the segment its slot began."""
    arena = new_arena(32 * MIB)
    old = fill(arena, first)
    before = dict(zip(old, epochs(arena, old), strict=True))
    free(arena, old)
    new = fill(arena, second)
    after = dict(zip(old, epochs(arena, old), strict=True))
    for offset, epoch in before.items():
        overlaps = any(offset < other + second and other < offset + first for other in new)
        assert after[offset] != epoch or not overlaps


def test_windows_are_runs_of_free_granules_and_movable_segments(new_arena: NewArena) -> None:
    arena = new_arena(32 * MIB)
    offsets = fill(arena, GRANULE_BYTES)
    segments = [arena.segment_of(offset) for offset in offsets]
    fixed = segments[2]

    def movable(segment: Segment) -> bool:
        return segment is not fixed

    found = list(arena.windows(4, segments, movable))
    assert found
    for run in found:
        assert fixed not in run and sum(segment.granules for segment in run) >= 4
        bases = sorted(segment.base for segment in run)
        assert bases == list(range(bases[0], bases[-1] + 1, GRANULE_BYTES)), "a run has no gaps"
    assert not list(arena.windows(len(segments), segments, movable))
    free(arena, [segments[3].base, segments[4].base])
    (run,) = arena.windows(4, [segments[5]], movable)
    assert {segment.base for segment in run} <= {segment.base for segment in segments[5:]}


def test_a_view_sees_the_bytes_and_the_epochs_but_cannot_write_epochs(new_arena: NewArena) -> None:
    arena = new_arena(32 * MIB)
    view = ArenaView(arena.memory.fd, arena.epochs_fd, arena.size_bytes, b"12345678")
    (offset,) = arena.allocate(65536, 1)
    view.as_numpy()[offset : offset + 5] = np.frombuffer(b"hello", dtype=np.uint8)
    shown = arena.memory.buffer
    assert bytes(shown[offset : offset + 5]) == b"hello"
    shown.release()
    where = np.array([offset], dtype=np.uint64)
    assert view.epochs_of(where).tolist() == arena.epochs_of(where).tolist() != [0]
    with pytest.raises(ValueError):
        view._epochs[0] = 7
    free(arena, [offset])


def test_a_pool_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"15000000.*16777216"):
        Arena(15_000_000, "off")
