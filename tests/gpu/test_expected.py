"""What is read for a load before it comes, on a real GPU."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

SLOT = 1 << 20
LAYERS = 32


class Rig:
    """An engine whose buffers have four slots each, and KV memory with a block for each slot."""

    def __init__(self, slots: int = 64) -> None:
        from engine_plugin.copy.cuda import CudaCopyEngine
        from tests.gpu.rig import KV, Ends, Pool, wait_registered

        self.pool = Pool(slots * SLOT)
        self.pool.bytes[:] = np.random.default_rng(1).integers(0, 256, slots * SLOT, np.uint8)
        self.engine = CudaCopyEngine("cuda", stage_bytes=4 * SLOT, chunk_bytes=8 << 20)
        self.engine.use_pool(self.pool)
        wait_registered(self.engine, self.pool)
        self.kv = KV("separate", LAYERS, slots, SLOT // LAYERS)
        self.ends = Ends()

    def expect(self, slots: list[int]) -> None:
        starts = np.array(slots, np.uint64) * np.uint64(SLOT) + np.uint64(self.pool.address)
        self.engine.expect_load(starts, SLOT)

    def load(self, slots: list[int]) -> None:
        """Loads slots into blocks of other numbers, and compares."""
        blocks = [(slot + 7) % self.kv.blocks for slot in slots]
        fragments = self.kv.fragments(blocks, self.pool, [slot * SLOT for slot in slots])
        self.engine.wait([self.engine.load(fragments, self.ends)])
        assert self.ends.errors[-1] is None
        for slot, block in zip(slots, blocks, strict=True):
            assert np.array_equal(self.kv.block(block), self.pool.bytes[slot * SLOT : (slot + 1) * SLOT])


@pytest.fixture
def rig() -> Any:
    rig = Rig()
    yield rig
    rig.engine.close()


def test_an_expected_load_is_right_and_is_not_read_twice(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_plugin.copy.cuda import LOAD_STAGES

    copied: list[int] = []
    fill = rig.engine._fill

    def counted(lane: Any, buffer: int, copies: Any, begin: int, end: int) -> None:
        copied.append(int(copies.size[begin:end].sum()))
        fill(lane, buffer, copies, begin, end)

    monkeypatch.setattr(rig.engine, "_fill", counted)
    for seed in range(20):
        slots = random.Random(seed).sample(range(64), 5 + seed)
        if seed % 3 == 0:
            slots = list(range(seed, seed + 12))
        copied.clear()
        rig.expect(slots)
        ahead = min(len(slots), 4 * LOAD_STAGES)
        assert sum(copied) == ahead * SLOT
        rig.load(slots)
        assert sum(copied) == len(slots) * SLOT


def test_another_load_than_the_expected_one_is_right(rig: Rig) -> None:
    rng = random.Random(2)
    for trip in range(60):
        expected = rng.sample(range(64), rng.randint(1, 20))
        slots = rng.sample(range(64), rng.randint(1, 20))
        rig.expect(expected)
        if rng.random() < 0.5:
            slots = expected[: rng.randint(1, len(expected))] + [s for s in slots if s not in expected]
        if rng.random() < 0.3:
            rig.load([trip % 64])
        rig.load(slots)


def test_what_was_expected_is_forgotten(rig: Rig) -> None:
    slots = [9, 3, 5, 40, 22, 30, 1, 60, 8]
    rig.expect(slots)
    rig.engine._load.copies.synchronize()
    rig.pool.bytes[:] = np.roll(rig.pool.bytes, 12_345)
    rig.engine.expect_nothing()
    rig.load(slots)
    rig.expect(slots)  # and with the pool that it is of
    rig.engine.use_pool(None)
    rig.engine.use_pool(rig.pool)
    assert rig.engine._load.expected is None
    rig.expect(slots)  # before anything is registered, or after
