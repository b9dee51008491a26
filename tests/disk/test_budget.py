"""The budget holds for everything in the directory, at every moment, and between runs with different ones."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from kvstore.blocks import KEY_BYTES_MAX
from kvstore.testing import FakeClock
from kvstore.testing.tier_suite import BLOCK_BYTES, DEADLINE_S, filled, load, name_of, present, store
from kvstore.tier import ReadOutcome, TierState, WriteOutcome, tier_key
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_index import RECORD, DiskIndex, read_columns
from kvstore.tiers.disk_load import FIXED_BYTES, index_bytes_for
from kvstore.tiers.extent import TIER_KEY_BYTES_MAX, extent_bytes_for
from kvstore.tiers.slabs import INDEX_BYTES_PER_BLOCK, Slab
from tests.disk.media import CAPACITY_BYTES, heal, opened


def bytes_of(folder: Path) -> int:
    """What a directory takes on the medium, as du counts it."""
    total = folder.stat().st_blocks * 512
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:  # it was removed just now
            pass
    return total


async def test_it_never_takes_more_than_its_budget(tmp_path: Path) -> None:
    rng = random.Random(7)
    async with opened(tmp_path, recency_interval_s=0) as tier:
        for step in range(60):
            size = rng.choice([1000, 20_000, BLOCK_BYTES, 300_000, 1 << 20])
            await store(tier, [name_of(1000 * step + number) for number in range(rng.randint(1, 40))], size)
            if step % 5 == 0:
                await tier.tend()
            assert bytes_of(tmp_path) <= CAPACITY_BYTES
        assert tier.stats()["evictions"] > 0 and tier.stats()["slab_moves"] > 0
    assert bytes_of(tmp_path) <= CAPACITY_BYTES


async def test_what_is_left_over_is_little(tmp_path: Path) -> None:
    """Blocks of 64 KiB: all but a few percent of the budget holds blocks."""
    async with opened(tmp_path) as tier:
        for start in range(0, 2 * CAPACITY_BYTES // BLOCK_BYTES, 32):
            await store(tier, [name_of(start + number) for number in range(32)])
        stats = tier.stats()
        assert stats["used_bytes"] / (CAPACITY_BYTES - FIXED_BYTES) > 0.88
        assert stats["waste_bytes"] <= 0.07 * stats["used_bytes"]


@pytest.mark.parametrize("size_bytes", [64 << 10, 100_000, 131_072, 1 << 20, (8 << 20) + 1])
def test_an_extent_wastes_little(size_bytes: int) -> None:
    assert extent_bytes_for(size_bytes) <= 1.07 * size_bytes


def test_the_index_stays_within_its_share(tmp_path: Path) -> None:
    """Longest names in random order, rewritten and removed over and over: the worst for a tree of pages."""
    rng = random.Random(1)
    index = DiskIndex(tmp_path / "index", 1 << 30)
    count = 20_000

    def key(number: int) -> bytes:
        return random.Random(number).randbytes(TIER_KEY_BYTES_MAX)

    live = list(range(count))
    for at in range(0, count, 4000):
        index.commit((), [(key(number), RECORD.pack(1, number, 1, 1)) for number in live[at : at + 4000]])
    fresh = count
    for _ in range(12):
        rng.shuffle(live)
        leaving, live = live[:4000], live[4000:]
        coming = list(range(fresh, fresh + 4000))
        fresh += 4000
        index.commit([key(number) for number in leaving], [(key(n), RECORD.pack(1, n, 1, 1)) for n in coming])
        live += coming
        assert index.known_bytes <= FIXED_BYTES + count * INDEX_BYTES_PER_BLOCK
    assert sum(columns.names.size for columns in read_columns(index.path)) == count
    index.close()


async def test_many_small_blocks(tmp_path: Path) -> None:
    """Keys of the longest kind over blocks of one page: the index is the larger part of the pressure."""
    async with opened(tmp_path, 16 << 20) as tier:
        for start in range(0, 4000, 200):
            keys = [tier_key(b"d" * 16, 0, os.urandom(KEY_BYTES_MAX)) for _ in range(200)]
            assert await store(tier, keys, 2000) == [WriteOutcome.STORED] * 200, start
        assert await load(tier, keys, 2000) == [ReadOutcome.OK] * 200
        assert tier.stats()["evictions"] > 0
    assert bytes_of(tmp_path) <= 16 << 20


async def reserve_all(tier: DiskTier, extent_bytes: int) -> int:
    """Has a tier make all slabs that its budget has room for, and writes nothing; how many extents that is."""
    assert tier.room is not None
    found: list[tuple[Slab, int]] = []
    await tier.room.find(extent_bytes, tier.capacity_bytes // extent_bytes, found)
    for slab, extent in found:
        tier.books.give_back(slab, extent)
    return len(found)


async def test_what_the_file_system_promises_the_index_is_within_the_budget(tmp_path: Path) -> None:
    """The smallest extents there are, and so many that every byte for each of them shows."""
    clock, capacity = FakeClock(), 400 << 20
    async with opened(tmp_path, capacity, clock=clock, prewrite=False) as tier:
        count = await reserve_all(tier, 4096)
        assert count > 60_000
        await tier.keep_recency()
        assert bytes_of(tmp_path) <= capacity
        data = tmp_path / "index" / "data.mdb"
        data.write_bytes(b"")  # it is written anew, and its room promised anew
        await heal(tier, clock)
        await heal(tier, clock)
        assert tier.state is TierState.OK
        assert bytes_of(tmp_path) <= capacity
        assert not tier.folder.medium.allocate or data.stat().st_blocks * 512 >= index_bytes_for(count)
    async with opened(tmp_path, 100 << 20, prewrite=False) as tier:
        assert bytes_of(tmp_path) <= 100 << 20, "what was promised for more extents was not given back"


async def test_many_small_extents_that_become_few_large_ones_stay_within_the_budget(tmp_path: Path) -> None:
    capacity = 64 << 20
    async with opened(tmp_path, capacity, prewrite=False) as tier:
        await reserve_all(tier, 4096)
        keys = [tier_key(b"d" * 16, 0, os.urandom(KEY_BYTES_MAX)) for _ in range(6000)]
        for at in range(0, 6000, 1000):
            await store(tier, keys[at : at + 1000], 2000)
        for number in range(80):
            assert await store(tier, [name_of(number)], 1 << 20) == [WriteOutcome.STORED]
            assert bytes_of(tmp_path) <= capacity
            assert tier.stats()["charged_bytes"] <= capacity
        assert tier.stats()["used_bytes"] > capacity * 0.8


async def test_shrinking_keeps_the_hottest_and_growing_keeps_all(tmp_path: Path) -> None:
    chains = [[name_of(100 * chain + number) for number in range(16)] for chain in range(16)]
    async with opened(tmp_path) as tier:
        for chain in chains:
            await store(tier, chain)
    half = 10 << 20
    async with opened(tmp_path, half) as tier:
        there = [all(await present(tier, chain)) for chain in chains]
        assert bytes_of(tmp_path) <= half
        assert there[-1] and not there[0] and there == sorted(there)
        assert sum(there) >= 6, "far less was kept than fits"
        kept = [key for chain, have in zip(chains, there, strict=True) if have for key in chain]
        assert await load(tier, kept) == [ReadOutcome.OK] * len(kept)
        assert await store(tier, chains[0]) == [WriteOutcome.STORED] * 16
        assert bytes_of(tmp_path) <= half
    async with opened(tmp_path, 2 * CAPACITY_BYTES) as tier:
        assert await load(tier, chains[0]) == [ReadOutcome.OK] * 16
        for chain in range(100, 130):
            await store(tier, [name_of(100 * chain + number) for number in range(16)])
        assert tier.stats()["used_bytes"] > half


async def test_shrinking_below_a_single_slab_shortens_it(tmp_path: Path) -> None:
    keys = [name_of(number) for number in range(60)]
    async with opened(tmp_path, 1 << 30) as tier:  # slabs of 16 MiB
        await store(tier, keys)
        assert tier.stats()["slabs"] == 1
    async with opened(tmp_path, 4 << 20) as tier:
        there = await present(tier, keys)
        assert 20 <= sum(there) < 60
        assert await load(tier, keys) == [ReadOutcome.OK if have else ReadOutcome.ABSENT for have in there]
    assert bytes_of(tmp_path) <= 4 << 20


async def test_writers_at_the_limit_never_pass_it(tmp_path: Path) -> None:
    async with opened(tmp_path, 8 << 20) as tier:

        async def write(lane: int) -> list[WriteOutcome]:
            answers: list[WriteOutcome] = []
            for step in range(10):
                answers += await store(tier, [name_of(10_000 * lane + 10 * step + number) for number in range(8)])
                assert bytes_of(tmp_path) <= 8 << 20
            return answers

        answers = [outcome for one in await asyncio.gather(*(write(lane) for lane in range(16))) for outcome in one]
        assert set(answers) <= {WriteOutcome.STORED, WriteOutcome.NO_ROOM}
        assert answers.count(WriteOutcome.STORED) > len(answers) / 2


async def test_a_full_queue_throttles_stores_and_not_loads(tmp_path: Path) -> None:
    async with opened(tmp_path, write_queue_bytes=4 * BLOCK_BYTES, write_threads=1) as tier:
        warm = [name_of(number) for number in range(4)]
        await store(tier, warm)
        flood = [
            asyncio.ensure_future(store(tier, [name_of(100 * lane + n) for n in range(4)])) for lane in range(1, 9)
        ]
        await asyncio.sleep(0)
        assert await load(tier, warm) == [ReadOutcome.OK] * 4
        answers = [outcome for task in flood for outcome in await task]
        assert answers.count(WriteOutcome.THROTTLED) == 28 == tier.stats()["throttled"]
        assert answers.count(WriteOutcome.STORED) == 4
        blocks = filled([name_of(5000)], 8 * BLOCK_BYTES)
        assert await tier.write(blocks, DEADLINE_S) == [WriteOutcome.STORED], "one block always gets through"


async def test_reading_goes_on_while_its_block_is_evicted(tmp_path: Path) -> None:
    async with opened(tmp_path, 6 << 20) as tier:
        keys = [name_of(number) for number in range(40)]
        await store(tier, keys)
        readers = [asyncio.ensure_future(load(tier, keys)) for _ in range(8)]
        for start in range(100, 400, 40):
            await store(tier, [name_of(start + number) for number in range(40)])
        for reader in readers:
            assert set(await reader) <= {ReadOutcome.OK, ReadOutcome.ABSENT}
        assert tier.stats()["damaged"] == 0
