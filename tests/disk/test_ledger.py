"""The index is lost, and what was deleted, flushed or evicted stays away all the same."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.testing.data import make_block
from kvstore.testing.tier_suite import OURS, THEIRS, load, name_of, present, store
from kvstore.tier import ReadOutcome, TierState, WriteOutcome
from kvstore.tiers.disk_ledger import REMOVED_BYTES
from kvstore.tiers.files import FileIO
from kvstore.tiers.verify import verify
from tests.disk.media import opened

KEYS = [name_of(number) for number in range(48)]
OTHERS = [name_of(number, THEIRS) for number in range(20)]
OK = ReadOutcome.OK


def kill(folder: Path) -> None:
    """What SIGKILL would leave now, in a directory beside this one."""
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    (copy / "lock").unlink()


@pytest.mark.parametrize("mended_by", ["start", "verify"])
@pytest.mark.parametrize("ended", ["closed", "killed"])
async def test_what_was_removed_does_not_come_back_from_the_footers(tmp_path: Path, ended: str, mended_by: str) -> None:
    folder = tmp_path / "tier"
    async with opened(folder, prewrite=False) as tier:
        await store(tier, KEYS)
        await store(tier, OTHERS)
        assert await tier.delete(KEYS[:10]) == 10
        assert await tier.delete_namespace(THEIRS) == 20
        await store(tier, [KEYS[3], OTHERS[5]])  # elsewhere, or where they were: they are there again
        assert await tier.sync()
        kill(folder)
    if ended == "killed":
        folder = tmp_path / "copy"
    shutil.rmtree(folder / "index")
    if mended_by == "verify":
        assert verify(folder, repair=True).ok
    async with opened(folder, prewrite=False) as tier:
        assert bool(tier.rebuilt) == (mended_by == "start")
        there = {key for key, _ in tier.scan()}
        assert there == {*KEYS[10:], KEYS[3], OTHERS[5]}
        assert await load(tier, sorted(there)) == [OK] * 40


async def test_stale_copies_of_a_block_do_not_come_back(tmp_path: Path) -> None:
    """The name is gone; so is every place that it ever was at."""
    async with opened(tmp_path, prewrite=False) as tier:
        await store(tier, KEYS)
        for _ in range(3):
            await tier.delete(KEYS[:4])
            await store(tier, [name_of(100)])  # the next copies lie elsewhere
            await store(tier, KEYS[:4])
        await tier.delete(KEYS[:4])
        await tier.delete([name_of(100)])
    shutil.rmtree(tmp_path / "index")
    async with opened(tmp_path) as tier:
        assert {key for key, _ in tier.scan()} == set(KEYS[4:])


async def test_a_whole_flush_is_more_than_the_log_takes(tmp_path: Path) -> None:
    keys = [name_of(number) for number in range(8000)]
    assert len(keys) * 24 > REMOVED_BYTES
    async with opened(tmp_path, 100 << 20, prewrite=False) as tier:
        assert set(await store(tier, keys, 1000)) == {WriteOutcome.STORED}
        await store(tier, OTHERS)
        assert await tier.delete_namespace(OURS) == 8000
        assert tier.stats()["unmarked"] == 0
        # Neighbours are given out one after the other again.
        await store(tier, KEYS[:2], 1000)
        places = [(tier.books.index[key].slab.number, tier.books.index[key].extent) for key in KEYS[:2]]
        assert places[0][0] == places[1][0] and places[0][1] + 1 == places[1][1]
    shutil.rmtree(tmp_path / "index")
    async with opened(tmp_path, 100 << 20) as tier:
        assert {key for key, _ in tier.scan()} == {*OTHERS, *KEYS[:2]}


async def test_many_removals_one_after_the_other(tmp_path: Path) -> None:
    """The log is full again and again."""
    async with opened(tmp_path, prewrite=False) as tier:
        assert tier.committer is not None
        room = tier.committer._ledger.room
        await store(tier, OTHERS)
        for start in range(0, 3 * room, room // 2):
            keys = [name_of(number) for number in range(start, start + 300)]
            await store(tier, keys, 1000)
            await tier.delete(keys)
    shutil.rmtree(tmp_path / "index")
    async with opened(tmp_path) as tier:
        assert {key for key, _ in tier.scan()} == set(OTHERS)


async def test_what_a_killed_process_had_not_committed_is_gone_with_the_next_start(tmp_path: Path) -> None:
    """Who is told that a block is not there may rely on it, also if the index is lost afterwards."""
    folder = tmp_path / "tier"
    async with opened(folder, prewrite=False, commit_interval_s=3600) as tier:
        await store(tier, KEYS[:8])
        await tier.sync()
        await store(tier, KEYS)  # with the medium, and in no index
        kill(folder)
    folder = tmp_path / "copy"
    async with opened(folder, prewrite=False) as tier:
        assert sum(await present(tier, KEYS)) == 8
        assert await tier.delete(KEYS[8:]) == 0
        await store(tier, [name_of(200)])
        before = {key for key, _ in tier.scan()}
    shutil.rmtree(folder / "index")
    async with opened(folder) as tier:
        assert {key for key, _ in tier.scan()} == before


@pytest.mark.parametrize("damage", ["removed is gone", "removed is cut off", "recency is gone", "one bit"])
async def test_without_the_ledger_they_may_come_back_with_the_right_bytes(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "tier"
    async with opened(folder, prewrite=False) as tier:
        await store(tier, KEYS)
        await tier.delete(KEYS[:10])
        kill(folder)
    folder = tmp_path / "copy"
    if damage == "removed is gone":
        (folder / "removed").unlink()
    elif damage == "removed is cut off":
        os.truncate(folder / "removed", 100)
    elif damage == "recency is gone":
        (folder / "recency").unlink()
    else:
        data = bytearray((folder / "removed").read_bytes())
        data[random.Random(1).randrange(40, 200)] ^= 4
        (folder / "removed").write_bytes(data)
    shutil.rmtree(folder / "index")
    async with opened(folder) as tier:
        assert await load(tier, KEYS) == [OK] * 48
        await tier.delete(KEYS[:20])
    shutil.rmtree(folder / "index")
    async with opened(folder) as tier:
        assert sum(await present(tier, KEYS)) == 28, "from now on it is told again"


class FullFor(FileIO):
    """No room for files by some names."""

    def __init__(self, taken: Callable[[Path], bool]) -> None:
        self.taken = taken
        self.full = False

    def open(self, path: Path, flags: int) -> int:
        if self.full and self.taken(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().open(path, flags)


async def test_a_full_disk_keeps_no_block_from_leaving(tmp_path: Path) -> None:
    io = FullFor(lambda path: path.name == "recency.new")
    async with opened(tmp_path, 100 << 20, prewrite=False, io=io) as tier:
        keys = [name_of(number) for number in range(8000)]
        await store(tier, keys, 1000)
        io.full = True
        assert await tier.delete_namespace(None) == 8000
        assert tier.state is TierState.OK and 0 < tier.stats()["unmarked"] <= 8000
        io.full = False
        await tier.keep_recency()
        assert tier.stats()["unmarked"] == 0
    shutil.rmtree(tmp_path / "index")
    async with opened(tmp_path, 100 << 20) as tier:
        assert list(tier.scan()) == []


async def test_the_log_is_made_anew_where_somebody_removed_it(tmp_path: Path) -> None:
    async with opened(tmp_path, prewrite=False, probe_interval_s=0.01) as tier:
        await store(tier, KEYS)
        (tmp_path / "removed").unlink()
        await tier.delete(KEYS[:5])
        while tier.state is not TierState.OK or not await tier.sync():
            await asyncio.sleep(0.01)
        assert (tmp_path / "removed").stat().st_size == REMOVED_BYTES
    shutil.rmtree(tmp_path / "index")
    async with opened(tmp_path) as tier:
        assert {key for key, _ in tier.scan()} == set(KEYS[5:])
        buffers = [memoryview(bytearray(65_536)) for _ in KEYS[5:]]
        await tier.read(list(zip(KEYS[5:], buffers, strict=True)), 60)
        assert all(buffer == make_block(key, 65_536) for key, buffer in zip(KEYS[5:], buffers, strict=True))
