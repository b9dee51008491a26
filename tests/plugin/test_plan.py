"""What is planned for buffers, against a plan made fragment by fragment."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from engine_plugin.copy import plan, runs
from engine_plugin.copy.contract import Fragments

BASE = 1 << 20
BUFFERS_AT = 1 << 40
#: Where a byte in KV memory or in the pool lies in a buffer.
Places = dict[int, int]


def random_job(rng: np.random.Generator) -> tuple[Fragments, int, int]:
    """Fragments, bytes of a buffer, and of a registration."""
    count = int(rng.integers(1, 70))
    if rng.random() < 0.5:
        size = np.full(count, int(rng.integers(1, 900)), np.uint64)
    else:
        size = rng.integers(1, 900, count).astype(np.uint64)
    gap = np.where(rng.random(count) < rng.choice([0.0, 0.2, 1.0]), rng.integers(1, 3000, count), 0).astype(np.uint64)
    pool = np.uint64(BASE) + np.cumsum(gap + size) - size
    kv = np.uint64(1 << 30) + rng.permutation(count).astype(np.uint64) * np.uint64(1000)
    order = np.arange(count)
    if rng.random() < 0.5:  # blocks in another order than they have in the pool
        order = np.roll(order, int(rng.integers(count)))
    if rng.random() < 0.2:
        order = rng.permutation(count)
    fragments = Fragments(kv[order], pool[order], size[order])
    return fragments, int(rng.integers(900, 5000)), int(rng.choice([512, 1000, 4096, 1 << 20]))


def by_hand(fragments: Fragments, room: int, turn: int, count: int) -> list[tuple[int, Places, Places, int]]:
    """By window: its buffer, where the bytes of KV memory and of the pool lie in it, and how many stretches of the pool
    there are if registrations do not count.
    """
    windows: list[tuple[int, Places, Places, int]] = []
    filled, last = room + 1, -1
    for kv, pool, size in zip(fragments.kv.tolist(), fragments.pool.tolist(), fragments.size.tolist(), strict=True):
        if filled + size > room:
            windows.append(((turn + len(windows)) % count, {}, {}, 0))
            filled, last = 0, -1
        buffer, in_kv, in_pool, stretches = windows[-1]
        for byte in range(size):
            place = BUFFERS_AT + buffer * room + filled + byte
            in_kv[kv + byte] = in_pool[pool + byte] = place
        windows[-1] = (buffer, in_kv, in_pool, stretches + (pool != last))
        filled, last = filled + size, pool + size
    return windows


def places(outside: np.ndarray, buffer: np.ndarray, size: np.ndarray) -> Places:
    pairs = [
        (int(out) + byte, int(inside) + byte)
        for out, inside, length in zip(outside, buffer, size, strict=True)
        for byte in range(int(length))
    ]
    assert len(dict(pairs)) == len(pairs), "a byte is moved twice"
    return dict(pairs)


@pytest.mark.parametrize("seed", range(60))
def test_every_window_is_what_a_plan_by_hand_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    fragments, room, chunk = random_job(rng)
    longest, count, turn = int(rng.choice([100, 65_536])), int(rng.integers(1, 4)), int(rng.integers(3))
    turn %= count
    monkeypatch.setattr(plan, "PIECE_BYTES", longest)
    monkeypatch.setattr(plan, "_SECTION_FACTOR", 2)
    expected = by_hand(fragments, room, turn, count)
    buffers = plan.Buffers(BUFFERS_AT, room, count, turn)
    sections = list(plan.sections(fragments, runs.breaks_of(fragments), buffers, BASE, chunk))
    lengths = [len(section.buffers) for section in sections]
    assert sum(lengths) == len(expected)
    assert all(length == count << index for index, length in enumerate(lengths[:-1]))
    assert lengths[-1] <= count << (len(lengths) - 1)
    windows = iter(expected)
    for section in sections:
        pieces, copies = section.pieces, section.copies
        assert (section.piece_bounds[0], section.piece_bounds[-1]) == (0, len(pieces))
        assert (section.copy_bounds[0], section.copy_bounds[-1]) == (0, len(copies))
        assert int(pieces.size.max()) <= longest
        start = copies.pool - np.uint64(BASE)
        assert (start // chunk == (start + copies.size - np.uint64(1)) // chunk).all(), "a copy spans registrations"
        for array in (pieces.kv, pieces.pool, pieces.size, copies.kv, copies.pool, copies.size):
            assert array.dtype == np.uint64
            assert array.flags.c_contiguous
        bounds = zip(itertools.pairwise(section.piece_bounds), itertools.pairwise(section.copy_bounds), strict=True)
        for buffer, (moved, copied) in zip(section.buffers, bounds, strict=True):
            wanted, in_kv, in_pool, stretches = next(windows)
            assert buffer == wanted
            part = slice(*moved)
            assert places(pieces.kv[part], pieces.pool[part], pieces.size[part]) == in_kv
            part = slice(*copied)
            assert places(copies.pool[part], copies.kv[part], copies.size[part]) == in_pool
            if chunk == 1 << 20:
                assert copied[1] - copied[0] == stretches, "more copies than needed"


def test_a_long_job_is_planned_in_few_sections() -> None:
    size = np.full(4096, 8, np.uint64)
    at = np.arange(4096, dtype=np.uint64) * np.uint64(8)
    fragments = Fragments(at + np.uint64(1 << 30), at + np.uint64(BASE), size)
    buffers = plan.Buffers(BUFFERS_AT, 64, 2, 1)
    sections = list(plan.sections(fragments, runs.breaks_of(fragments), buffers, BASE, 1 << 20))
    assert [len(section.buffers) for section in sections] == [2, 32, 478]
