"""The CUDA engine on a simulated GPU that does what is queued in every order that streams and events allow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine_plugin.copy import cuda, launches, paths, plan
from engine_plugin.copy.contract import Fragments
from tests.vllm import sim_gpu

BLOCKS = 96


class Pool:
    def __init__(self, size_bytes: int, populated_bytes: int) -> None:
        self.bytes = np.zeros(size_bytes, np.uint8)
        self.address = self.bytes.ctypes.data
        self.size_bytes = size_bytes
        self.populated_bytes = populated_bytes


class Rig:
    """KV memory of a few layers, a pool, and an engine with small buffers."""

    def __init__(
        self,
        device: sim_gpu.Device,
        seed: int,
        path: str,
        shape: tuple[int, int, int] | None = None,
        populated: float = 1.0,
    ) -> None:
        """
        Args:
            shape: Bytes of a page, layers, and blocks that a buffer holds; else all is random.
            populated: Part of the pool, where a shape is given.
        """
        self.device, self.rng, self.bits = device, random.Random(seed), np.random.default_rng(seed)
        rng = self.rng
        random_shape = (rng.choice([64, 200, 1001, 4096]), rng.randint(1, 6), rng.randint(1, 5))
        self.page, self.layers, held = shape or random_shape
        self.slot = self.layers * self.page
        if shape is None and rng.random() < 0.5:
            self.slot = -(-self.slot // 512) * 512
        self.kv = [self.bits.integers(0, 256, (BLOCKS, self.page), np.uint8) for _ in range(self.layers)]
        self.chunk = chunk = max(self.page, rng.choice([self.slot, 3 * self.slot + 40, 1 << 20]))
        size = BLOCKS * self.slot
        if shape is None:
            populated = 1 if rng.random() < 0.8 else 0.5
        self.pool = Pool(size, int(size * populated))
        self.engine = cuda.CudaCopyEngine("cuda", path, stage_bytes=held * self.layers * self.page, chunk_bytes=chunk)
        self.use_pool()
        self.errors: list[BaseException | None] = []

    def use_pool(self) -> None:
        self.engine.use_pool(self.pool)
        known = self.pool.populated_bytes
        if known < self.pool.size_bytes:
            known = known // self.chunk * self.chunk
        while (stats := self.engine.stats()).registered_bytes < known:
            assert not stats.register_error

    def then(self, seconds: float, error: BaseException | None) -> None:
        self.errors.append(error)

    def fragments(self, blocks: list[int], slots: list[int]) -> Fragments:
        rows = [
            (tensor.ctypes.data + block * self.page, self.pool.address + slot * self.slot + layer * self.page)
            for block, slot in zip(blocks, slots, strict=True)
            for layer, tensor in enumerate(self.kv)
        ]
        if self.rng.random() < 0.2:
            self.rng.shuffle(rows)
        kv, pool = (np.array(column, np.uint64) for column in zip(*rows, strict=True))
        return Fragments(kv, pool, np.full(len(kv), self.page, np.uint64))

    def write(self, blocks: list[int]) -> None:
        """Queues new bytes for some blocks on the caller's stream."""
        fresh = [self.bits.integers(0, 256, (len(blocks), self.page), np.uint8) for _ in self.kv]

        def steps() -> sim_gpu.Steps:
            for tensor, rows in zip(self.kv, fresh, strict=True):
                for block, row in zip(blocks, rows, strict=True):
                    tensor[block] = row
                    yield

        self.device.queue(0, steps())

    def split(self, numbers: list[int]) -> Iterator[list[int]]:
        while numbers:
            count = 1 if self.rng.random() < 0.3 else self.rng.randint(1, len(numbers))
            yield numbers[:count]
            del numbers[:count]

    def some(self, count: int, among: range) -> list[int]:
        if self.rng.random() < 0.4:  # neighbours make longer runs
            first = self.rng.randrange(among.start, among.stop - count + 1)
            return list(range(first, first + count))
        return self.rng.sample(among, count)

    def block(self, block: int) -> bytes:
        return b"".join(tensor[block].tobytes() for tensor in self.kv)

    def stored(self, slot: int) -> bytes:
        return self.pool.bytes[slot * self.slot :][: self.layers * self.page].tobytes()


def small_sizes(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Everything that is decided by size is decided both ways within a few kilobytes."""
    monkeypatch.setattr(paths, "STAGED_RUN_BYTES_MIN", 1000)
    monkeypatch.setattr(paths, "STAGED_STORE_BYTES_MIN", 2000)
    monkeypatch.setattr(paths, "BESIDE_FRAGMENT_BYTES_MIN", 1000)
    monkeypatch.setattr(plan, "PIECE_BYTES", 1024)
    monkeypatch.setattr(plan, "_SECTION_FACTOR", 2)
    monkeypatch.setattr(launches, "_TABLE_READ_MAX", 6)
    monkeypatch.setattr(launches, "_TABLES", (512,))
    monkeypatch.setattr(cuda, "_BATCH_PART", 20)
    return monkeypatch


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return small_sizes(monkeypatch)


@pytest.mark.parametrize("path", ["auto", "staged", "kernel", "batch", "pageable"])
@pytest.mark.parametrize("seed", range(12))
def test_no_byte_is_wrong_whatever_comes_first(small: Any, seed: int, path: str) -> None:
    rig = Rig(sim_gpu.install(small, seed), seed, path)
    rng, engine = rig.rng, rig.engine
    half = BLOCKS // 2
    before = [rig.bits.integers(0, 256, rig.slot, np.uint8) for _ in range(BLOCKS)]
    rig.pool.bytes[:] = np.concatenate(before)
    for _ in range(3):
        # Stores of the lower half of the blocks to the lower half of the slots, and loads of the upper halves.
        count = rng.randint(1, half)
        stored = dict(zip(rig.some(count, range(half)), rig.some(count, range(half)), strict=True))
        loaded = dict(zip(rig.some(count, range(half, BLOCKS)), rig.some(count, range(half, BLOCKS)), strict=True))
        rest = {block: rig.block(block) for block in range(BLOCKS) if block not in loaded}
        slots = {slot: rig.stored(slot) for slot in range(BLOCKS) if slot not in stored.values()}
        pieces = [(True, piece) for piece in rig.split(list(loaded))]
        pieces += [(False, piece) for piece in rig.split(list(stored))]
        rng.shuffle(pieces)
        jobs = []
        for index, (is_load, blocks) in enumerate(pieces):
            part = [(loaded if is_load else stored)[block] for block in blocks]
            if rng.random() < 0.5:
                rig.write(blocks)
            if rng.random() < 0.4:  # this load, or one that follows others
                coming = [[loaded[block] for block in blocks] for load, blocks in pieces[index:] if load]
                expected = rng.choice([*coming[:2], [half, half + 2]])
                starts = np.array(expected, np.uint64) * np.uint64(rig.slot) + np.uint64(rig.pool.address)
                engine.expect_load(starts, rig.layers * rig.page)
            begin = engine.load if is_load else engine.store
            jobs.append(begin(rig.fragments(blocks, part), rig.then, beside_compute=rng.random() < 0.2))
            if rng.random() < 0.3:
                engine.poll()
        rig.device.some()
        engine.wait(jobs)
        assert rig.errors == [None] * len(jobs)
        rig.errors.clear()
        for block, slot in (stored | loaded).items():
            assert rig.block(block) == rig.stored(slot)
        for block, was in rest.items():
            assert block in stored or rig.block(block) == was, "a bystander"
        for slot, was in slots.items():
            assert rig.stored(slot) == was, "a bystander in the pool"
    engine.close()


@pytest.mark.parametrize("seed", range(10))
def test_what_was_read_for_another_load_is_not_used(small: Any, seed: int) -> None:
    rig = Rig(sim_gpu.install(small, seed), seed, "auto", shape=(512, 4, 3))
    rng, engine, used = rig.rng, rig.engine, 0
    for _ in range(25):
        rig.pool.bytes[:] = rig.bits.integers(0, 256, len(rig.pool.bytes), np.uint8)
        coming = rng.sample(range(BLOCKS), rng.randint(4, 12))
        engine.expect_load(np.array(coming, np.uint64) * np.uint64(rig.slot) + np.uint64(rig.pool.address), rig.slot)
        if rng.random() < 0.3:  # what is in the pool has changed
            engine._load.copies.synchronize()
            rig.pool.bytes[:] = rig.bits.integers(0, 256, len(rig.pool.bytes), np.uint8)
            engine.expect_nothing()
        slots = coming
        if rng.random() < 0.4:
            slots = rng.sample(range(BLOCKS), rng.randint(4, 12))
        jobs = []
        if rng.random() < 0.4:  # a load of one run comes first
            jobs.append(engine.load(rig.fragments([0], [rng.randrange(BLOCKS)]), rig.then))
        blocks = [block + 1 for block in rng.sample(range(BLOCKS - 1), len(slots))]
        engine._runtime.copied.clear()
        jobs.append(engine.load(rig.fragments(blocks, slots), rig.then))
        used += sum(size for _, _, size in engine._runtime.copied) < len(slots) * rig.slot
        engine.wait(jobs)
        for block, slot in zip(blocks, slots, strict=True):
            assert rig.block(block) == rig.stored(slot)
    assert used
    assert not any(rig.errors)
    engine.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_load_that_looks_like_one_run_and_is_none(small: Any, seed: int) -> None:
    rig = Rig(sim_gpu.install(small, seed), seed, "auto", shape=(512, 8, 3))
    engine, order = rig.engine, [0, 3, 3, 1, 5, 5, 1, 7]  # a place may be read twice
    for _ in range(3):
        rig.pool.bytes[:] = rig.bits.integers(0, 256, len(rig.pool.bytes), np.uint8)
        blocks = rig.rng.sample(range(BLOCKS - 1), 6)
        jobs = []
        for block in blocks:
            pieces = rig.fragments([block], [block + 1])
            pieces = Fragments(*(np.sort(array) for array in (pieces.kv, pieces.pool, pieces.size)))
            # From its places in the pool to others in KV memory: the first and the last stay.
            jobs.append(engine.load(Fragments(pieces.kv, pieces.pool[order], pieces.size), rig.then))
            assert engine._load.expected_read is not None
        engine.wait(jobs)
        for block in blocks:
            pages = rig.pool.bytes[(block + 1) * rig.slot :][: rig.slot].reshape(8, 512)
            kv = sorted(rig.kv, key=lambda tensor: tensor.ctypes.data)
            assert all(np.array_equal(tensor[block], pages[page]) for tensor, page in zip(kv, order, strict=True))
    engine.wait([engine.load(Fragments(pieces.kv, pieces.pool[order], pieces.size), rig.then)])
    assert set(engine.stats().bytes_by_path) == {"kernel"}
    engine.use_pool(None)
    assert engine._load.expected_read._over(), "the pool is let go of while it is read"
    engine.close()
    assert not any(rig.errors)
