"""What the medium does on bad days: errors, hangs, files that change underneath."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.testing import FakeClock, make_block
from kvstore.testing.tier_suite import BLOCK_BYTES, DEADLINE_S, filled, load, name_of, present, store
from kvstore.tier import ReadOutcome, TierState, WriteOutcome
from kvstore.tiers import disk_load
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_folder import DiskFolder, holder_of
from kvstore.tiers.disk_index import Columns
from kvstore.tiers.disk_room import REMOVE_AGAIN_S
from kvstore.tiers.files import FileIO
from tests.disk.media import CAPACITY_BYTES, PlainIO, SickIO, StrictIO, heal, opened, slab_paths

KEYS = [name_of(number) for number in range(16)]
OK, ABSENT, DAMAGED = ReadOutcome.OK, ReadOutcome.ABSENT, ReadOutcome.DAMAGED


# -- what the file system can do ---------------------------------------------------------------------------------------


async def test_direct_io_leaves_the_page_cache_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await store(tier, KEYS)
        assert await tier.sync()
        stats = tier.stats()
        if not stats["direct_io"]:
            pytest.skip(f"{tmp_path}: {stats['direct_io_note']}")
        assert await load(tier, KEYS) == [OK] * 16
        assert sum(_cached_pages(path) for path in slab_paths(tmp_path)) == 0


def _cached_pages(path: Path) -> int:
    """Pages of a file that are in the page cache, by mincore."""
    import ctypes
    import mmap

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        address = ctypes.addressof(start := ctypes.c_char.from_buffer(mapped))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), found) == 0
        del start
        return sum(page & 1 for page in found)


@pytest.mark.parametrize("at_open", [True, False], ids=["refused at open", "refused at the first write"])
async def test_without_direct_io_it_is_buffered_and_says_so(tmp_path: Path, at_open: bool) -> None:
    async with opened(tmp_path, io=PlainIO(refuse_at_open=at_open)) as tier:
        assert await store(tier, KEYS) == [WriteOutcome.STORED] * 16
        assert await load(tier, KEYS) == [OK] * 16
        stats = tier.stats()
        assert not stats["direct_io"] and "O_DIRECT" in stats["direct_io_note"]
        assert not stats["fallocate"] and "fallocate" in stats["fallocate_note"]


@pytest.mark.parametrize("size_bytes", [1, 511, 4095, 4096, 4097, 65536, 100_001])
async def test_a_device_of_4096_bytes_refuses_nothing(tmp_path: Path, size_bytes: int) -> None:
    io = StrictIO()
    async with opened(tmp_path, io=io) as tier:
        refused_at_open = io.refused
        assert tier.stats()["memory_align"] in (1, 4096)
        assert await store(tier, KEYS, size_bytes) == [WriteOutcome.STORED] * 16
        assert await load(tier, KEYS, size_bytes) == [OK] * 16
        assert await tier.room.prewrite_some() in (True, False)
        assert io.refused == refused_at_open


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
async def test_a_write_error_degrades_and_a_probe_brings_it_back(tmp_path: Path, code: int) -> None:
    io, clock = SickIO(), FakeClock()
    async with opened(tmp_path, clock=clock, io=io, prewrite=False) as tier:
        await store(tier, KEYS[:8])
        io.errors["pwritev"] = code
        assert await store(tier, KEYS[8:]) == [WriteOutcome.FAILED] * 8
        assert tier.state is TierState.DEGRADED
        fault = tier.stats()["fault"]
        assert (fault["errno"], fault["name"]) == (code, errno.errorcode[code])
        assert await load(tier, KEYS[:8]) == [OK] * 8, "it reads all the same"
        calls = io.calls["pwritev"]
        assert await store(tier, KEYS[8:]) == [WriteOutcome.FAILED] * 8
        assert io.calls["pwritev"] == calls, "it does not try again before its time"
        await heal(tier, clock)
        assert tier.state is TierState.DEGRADED, "it is not well yet"
        io.recover()
        await heal(tier, clock)
        assert tier.state is TierState.OK
        assert await store(tier, KEYS) == [WriteOutcome.EXISTS] * 8 + [WriteOutcome.STORED] * 8
        assert await load(tier, KEYS) == [OK] * 16


async def test_a_bad_place_costs_one_block_and_two_attempts(tmp_path: Path) -> None:
    io = SickIO()
    async with opened(tmp_path, io=io, prewrite=False) as tier:
        await store(tier, KEYS)
        bad = tier.books.index[KEYS[5]]
        place = bad.extent * bad.slab.extent_bytes
        attempts = 0

        class BadPlace(SickIO):
            def preadv(self, fd: int, buffers: object, offset: int) -> int:
                nonlocal attempts
                length = sum(map(len, buffers))  # type: ignore[call-overload]
                if fd == bad.slab.fd and offset <= place < offset + length:
                    attempts += 1
                    raise OSError(errno.EIO, "bad sector")
                return super().preadv(fd, buffers, offset)  # type: ignore[arg-type]

        tier.mover._io = BadPlace()
        assert await load(tier, KEYS) == [OK] * 5 + [DAMAGED] + [OK] * 10
        assert attempts == 2
        assert tier.state is TierState.OK
        assert await present(tier, [KEYS[5]]) == [False]
        assert await load(tier, KEYS) == [OK] * 5 + [ABSENT] + [OK] * 10
        assert await store(tier, [KEYS[5]]) == [WriteOutcome.STORED]
        assert await load(tier, KEYS) == [OK] * 16, "the bad place is not used again"
    async with opened(tmp_path) as tier:
        assert await load(tier, KEYS) == [OK] * 16


async def test_a_dead_device_fails_the_tier_before_it_costs_the_index(tmp_path: Path) -> None:
    io, clock = SickIO(), FakeClock()
    async with opened(tmp_path, clock=clock, io=io, prewrite=False) as tier:
        await store(tier, KEYS)
        io.errors["preadv"] = errno.EIO
        for key in KEYS:
            assert await load(tier, [key]) in ([DAMAGED], [ABSENT])
        assert tier.state is TierState.FAILED
        assert await tier.stat(KEYS) == [None] * 16
        assert list(tier.scan()) == []
        io.recover()
        await heal(tier, clock)
        assert tier.state is TierState.OK
        assert (await load(tier, KEYS)).count(OK) == 13, "three reads are what it took to find out"


async def test_an_error_of_fdatasync_forgets_what_nobody_can_vouch_for(tmp_path: Path) -> None:
    io, clock = SickIO(), FakeClock()
    async with opened(tmp_path, clock=clock, io=io, prewrite=False, commit_interval_s=3600) as tier:
        await store(tier, KEYS[:8])
        assert await tier.sync()
        await store(tier, KEYS[8:])
        io.errors["fdatasync"] = errno.EIO
        assert not await tier.sync()
        assert tier.state is TierState.DEGRADED
        assert await load(tier, KEYS) == [OK] * 8 + [ABSENT] * 8
        io.recover()
        await heal(tier, clock)
        assert await store(tier, KEYS[8:]) == [WriteOutcome.STORED] * 8
        assert await tier.sync()
    async with opened(tmp_path) as tier:
        assert await load(tier, KEYS) == [OK] * 16


# -- hangs -------------------------------------------------------------------------------------------------------------


async def test_a_hung_read_loses_its_buffer_and_the_tier_until_it_is_back(tmp_path: Path) -> None:
    io, clock = SickIO(), FakeClock()
    async with opened(tmp_path, clock=clock, io=io, prewrite=False, read_threads=1) as tier:
        await store(tier, KEYS)
        io.held.add("preadv")
        buffers = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(2)]
        first = asyncio.ensure_future(tier.read([(KEYS[0], buffers[0])], 0.05))
        assert await asyncio.to_thread(io.reached.wait, DEADLINE_S)
        second = asyncio.ensure_future(tier.read([(KEYS[1], buffers[1])], 0.05))
        assert await second == [ReadOutcome.FAILED], "what waited behind it was never touched"
        assert await first == [ReadOutcome.BUFFER_LOST]
        assert tier.state is TierState.FAILED
        assert tier.stats()["lost_calls"] == 1
        assert await tier.stat(KEYS) == [None] * 16
        await heal(tier, clock)
        assert tier.state is TierState.FAILED, "the call has not come back yet"
        io.recover()
        await _until(lambda: tier.stats()["lost_calls"] == 0)
        await heal(tier, clock)
        assert tier.state is TierState.OK
        assert await load(tier, KEYS) == [OK] * 16
        assert tier.stats()["reading_blocks"] == 0


async def test_a_hung_write_is_never_promised(tmp_path: Path) -> None:
    io, clock = SickIO(), FakeClock()
    async with opened(tmp_path, clock=clock, io=io, prewrite=False) as tier:
        await store(tier, KEYS[:4])
        io.held.add("pwritev")
        assert await tier.write(filled(KEYS[4:5]), 0.05) == [WriteOutcome.BUFFER_LOST]
        assert tier.state is TierState.FAILED
        io.recover()
        await _until(lambda: tier.stats()["lost_calls"] == 0)
        await heal(tier, clock)
        assert await present(tier, KEYS[:5]) == [True] * 4 + [False]
        assert await store(tier, KEYS[:5]) == [WriteOutcome.EXISTS] * 4 + [WriteOutcome.STORED]
        assert await load(tier, KEYS[:5]) == [OK] * 5


async def test_a_commit_that_hangs_fails_the_tier(tmp_path: Path) -> None:
    io, clock = SickIO(), FakeClock()
    async with opened(tmp_path, clock=clock, io=io, prewrite=False, hang_s=30) as tier:
        io.held.add("fdatasync")
        assert await store(tier, KEYS) == [WriteOutcome.STORED] * 16
        assert await asyncio.to_thread(io.reached.wait, DEADLINE_S)
        clock.advance(31)
        await tier.tend()
        assert tier.state is TierState.FAILED
        io.recover()
        assert await tier.sync()
        await heal(tier, clock)
        assert tier.state is TierState.OK
        assert await load(tier, KEYS) == [OK] * 16


async def test_close_does_not_wait_for_a_hung_medium(tmp_path: Path) -> None:
    io = SickIO()
    async with opened(tmp_path, io=io, prewrite=False) as tier:
        await store(tier, KEYS)
        assert await tier.sync()
        io.held.add("preadv")
        read = await tier.read([(KEYS[0], memoryview(bytearray(BLOCK_BYTES)))], 0.05)
        assert read == [ReadOutcome.BUFFER_LOST]
    io.recover()


_HANGING = """
import asyncio, os, sys, threading
from pathlib import Path
from kvstore.clock import SystemClock
from kvstore.tiers import disk
from kvstore.tiers.files import FileIO

disk._OPEN_S = disk._CLOSE_S = 0.05
reached = threading.Event()

def hang_on(thread):
    if threading.current_thread().name.startswith(thread):
        reached.set()
        threading.Event().wait()

def pread(fd, size, offset, plain=os.pread):
    hang_on("kvstore-index")
    return plain(fd, size, offset)

class HangingIO(FileIO):
    def preadv(self, fd, buffers, offset):
        hang_on("kvstore-scan")
        return super().preadv(fd, buffers, offset)

async def main():
    os.pread = pread
    tier = disk.DiskTier(Path(sys.argv[1]), int(sys.argv[2]), SystemClock(), io=HangingIO())
    await tier.open()
    assert await asyncio.to_thread(reached.wait, 60)
    await tier.close()

asyncio.run(main())
print("closed", flush=True)
"""


@pytest.mark.parametrize("what", ["index", "footers"])
async def test_a_medium_that_hangs_at_a_start_does_not_keep_the_process(tmp_path: Path, what: str) -> None:
    async with opened(tmp_path) as tier:
        await store(tier, KEYS)
    if what == "footers":
        (tmp_path / "index" / "data.mdb").unlink()
    ended = subprocess.run(
        [sys.executable, "-c", _HANGING, str(tmp_path), str(CAPACITY_BYTES)],
        cwd=Path(__file__).parents[2],
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0 and ended.stdout.endswith("closed\n"), ended


async def _until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


# -- files that change underneath --------------------------------------------------------------------------------------


async def test_a_deleted_slab_is_missed_and_its_neighbours_stay(tmp_path: Path) -> None:
    clock = FakeClock()
    async with opened(tmp_path, clock=clock, prewrite=False) as tier:
        await store(tier, KEYS)
        gone = slab_paths(tmp_path)[0]
        lost = [key for key in KEYS if f"slab-{tier.books.index[key].slab.number:08x}" in gone.name]
        assert 0 < len(lost) < 16
        gone.unlink()
        await heal(tier, clock)
        assert await load(tier, KEYS) == [ABSENT if key in lost else OK for key in KEYS]
        assert tier.stats()["blocks"] == 16 - len(lost)
        assert await store(tier, lost) == [WriteOutcome.STORED] * len(lost)
    async with opened(tmp_path) as tier:
        assert await load(tier, KEYS) == [OK] * 16


@pytest.mark.parametrize("what", ["the directory", "all that is in it"])
async def test_a_directory_that_was_emptied_is_used_again(tmp_path: Path, what: str) -> None:
    folder, clock = tmp_path / "disk", FakeClock()
    async with opened(folder, clock=clock, prewrite=False) as tier:
        await store(tier, KEYS)
        assert await tier.sync()
        if what == "the directory":
            shutil.rmtree(folder)
        else:
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        await heal(tier, clock)  # finds out
        await heal(tier, clock)
        assert tier.state is TierState.OK
        assert await load(tier, KEYS) == [ABSENT] * 16
        assert await store(tier, KEYS) == [WriteOutcome.STORED] * 16
        assert await tier.sync()
        assert holder_of(folder) == os.getpid()
        with pytest.raises(ConfigError, match="held by another process"):
            DiskFolder(folder, FileIO()).hold()
    async with opened(folder) as tier:
        assert await load(tier, KEYS) == [OK] * 16


async def test_a_directory_in_whose_place_is_another_one_is_left_alone(tmp_path: Path) -> None:
    folder, clock = tmp_path / "disk", FakeClock()
    async with opened(folder, clock=clock, prewrite=False) as tier:
        await store(tier, KEYS)
        assert await tier.sync()
        folder.rename(tmp_path / "moved")
        async with opened(folder, prewrite=False) as other:
            await store(other, KEYS[:4])
            assert await other.sync()
        there, recency = sorted(path.name for path in folder.iterdir()), (folder / "recency").read_bytes()
        await heal(tier, clock)
        await heal(tier, clock)
        assert tier.state is TierState.DEGRADED
    assert sorted(path.name for path in folder.iterdir()) == there
    assert (folder / "recency").read_bytes() == recency
    async with opened(folder) as other:
        assert await load(other, KEYS) == [OK] * 4 + [ABSENT] * 12


async def test_a_slab_that_cannot_be_removed_keeps_its_room_and_takes_no_other_along(tmp_path: Path) -> None:
    io, clock = SickIO(), FakeClock()
    async with opened(tmp_path, clock=clock, io=io, prewrite=False) as tier:
        sizes = (3, 5)
        for size in sizes:  # until there is no room for another slab
            names = [name_of(1000 * size + number) for number in range(400 // size)]
            await tier.write([(name, memoryview(make_block(name, size * BLOCK_BYTES))) for name in names], DEADLINE_S)
        assert tier.room is not None
        slabs, charged, stolen = slab_paths(tmp_path), tier.books.charged_bytes, tier.room.stolen
        io.errors["unlink"] = errno.EPERM
        assert await store(tier, KEYS) == [WriteOutcome.NO_ROOM] * 16
        assert await store(tier, KEYS) == [WriteOutcome.NO_ROOM] * 16
        assert tier.room.stolen == stolen + 1
        assert slab_paths(tmp_path) == slabs and tier.books.charged_bytes == charged
        assert tier.stats()["fault"]["name"] == "EPERM"
        io.recover()
        clock.advance(REMOVE_AGAIN_S)
        await tier.tend()
        assert await store(tier, KEYS) == [WriteOutcome.STORED] * 16
        assert await load(tier, KEYS) == [OK] * 16
        taken = sum(path.stat().st_blocks * 512 for path in slab_paths(tmp_path))
        assert taken <= tier.books.charged_bytes <= CAPACITY_BYTES


async def test_a_slab_deleted_between_runs_is_missed(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await store(tier, KEYS)
    slab_paths(tmp_path)[0].unlink()
    async with opened(tmp_path) as tier:
        there = await present(tier, KEYS)
        assert 0 < sum(there) < 16
        assert await load(tier, KEYS) == [OK if have else ABSENT for have in there]
        assert tier.stats()["index_dropped"] == 16 - sum(there)


@pytest.mark.parametrize("running", [True, False], ids=["while running", "between runs"])
async def test_a_truncated_slab_costs_what_was_cut_off(tmp_path: Path, running: bool) -> None:
    clock = FakeClock()

    async def check(tier: object) -> None:
        assert sum(map(bool, await present(tier, KEYS))) == 16 - len(cut)
        assert await load(tier, KEYS) == [ABSENT if key in cut else OK for key in KEYS]
        assert await store(tier, cut) == [WriteOutcome.STORED] * len(cut)
        assert await load(tier, KEYS) == [OK] * 16

    async with opened(tmp_path, clock=clock, prewrite=False) as tier:
        await store(tier, KEYS)
        entry = tier.books.index[KEYS[0]]
        path = tier.folder.slab_path(entry.slab.number, entry.slab.extent_bytes)
        cut = [key for key in KEYS if (one := tier.books.index[key]).slab is entry.slab and one.extent >= 2]
        assert cut
        if running:
            os.truncate(path, 2 * entry.slab.extent_bytes + 5000)
            await heal(tier, clock)
            await check(tier)
    if not running:
        os.truncate(path, 2 * entry.slab.extent_bytes + 5000)
        async with opened(tmp_path) as tier:
            await check(tier)


async def test_a_read_past_the_end_of_a_slab_is_damage_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path, clock=FakeClock(), prewrite=False) as tier:
        await store(tier, KEYS)
        entry = tier.books.index[KEYS[3]]
        os.truncate(tier.folder.slab_path(entry.slab.number, entry.slab.extent_bytes), 0)
        (outcome,) = await load(tier, [KEYS[3]])
        assert outcome is DAMAGED
        assert await load(tier, [KEYS[3]]) == [ABSENT]


@pytest.mark.parametrize("how", ["removed", "cut off", "replaced", "written to"])
async def test_an_index_that_vanishes_while_running_is_written_anew(tmp_path: Path, how: str) -> None:
    clock = FakeClock()
    async with opened(tmp_path, clock=clock, prewrite=False) as tier:
        await store(tier, KEYS)
        assert await tier.sync()
        data = tmp_path / "index" / "data.mdb"
        if how == "cut off":
            os.truncate(data, 4096)
        elif how == "written to":
            spoil(data)
        else:
            data.unlink()
            if how == "replaced":
                data.write_bytes(b"something else")
        await heal(tier, clock)  # finds out
        await heal(tier, clock)  # and mends it
        assert tier.state is TierState.OK
        assert await load(tier, KEYS) == [OK] * 16
        assert await tier.delete(KEYS[:1]) == 1
    async with opened(tmp_path) as tier:
        assert tier.stats()["index_rebuilt"] == ""
        assert await load(tier, KEYS) == [ABSENT] + [OK] * 15


def spoil(file: Path) -> None:
    """Other bytes in all of its pages, of the same length."""
    with file.open("r+b") as opened_file:
        opened_file.write(os.urandom(file.stat().st_size))


@pytest.mark.parametrize("how", ["cut off", "written to"])
async def test_a_changed_index_does_not_end_the_process_at_the_next_commit(tmp_path: Path, how: str) -> None:
    clock = FakeClock()
    async with opened(tmp_path, clock=clock, prewrite=False) as tier:
        await store(tier, KEYS)
        assert await tier.sync()
        if how == "cut off":
            os.truncate(tmp_path / "index" / "data.mdb", 8192)
        else:
            spoil(tmp_path / "index" / "data.mdb")
        assert await tier.delete(KEYS[:4]) == 4
        assert tier.state is TierState.DEGRADED
        await heal(tier, clock)
        assert tier.state is TierState.OK
        assert await tier.sync()
    async with opened(tmp_path) as tier:
        assert await load(tier, KEYS) == [ABSENT] * 4 + [OK] * 12


async def test_an_index_that_can_never_be_read_is_built_from_footers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    async with opened(tmp_path) as tier:
        await store(tier, KEYS)

    def unreadable(path: Path) -> list[Columns]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk_load, "read_columns", unreadable)
    tier = DiskTier(tmp_path, CAPACITY_BYTES, clock)
    await tier.open()
    for _ in range(3):  # a device may have moods
        await _until(lambda: tier.state is TierState.FAILED)
        assert (tmp_path / "index" / "data.mdb").exists()
        await heal(tier, clock)
    assert tier.state is TierState.OK and "cannot be read" in tier.rebuilt
    assert await load(tier, KEYS) == [OK] * 16
    await tier.close()


async def test_a_medium_that_cannot_be_opened_is_tried_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await store(tier, KEYS)
    io, clock = SickIO(), FakeClock()
    io.errors["pwritev"] = errno.EROFS
    async with opened(tmp_path, clock=clock, io=io) as tier:
        await _until(lambda: tier.state is TierState.FAILED)
        assert await load(tier, KEYS) == [ABSENT] * 16
        assert await store(tier, KEYS) == [WriteOutcome.FAILED] * 16
        assert tier.stats()["fault"]["name"] == "EROFS"
        io.recover()
        await heal(tier, clock)
        await tier.wait_loaded()
        assert tier.state is TierState.OK
        assert await load(tier, KEYS) == [OK] * 16


@pytest.mark.parametrize("what", ["some", "namespace", "all"])
async def test_what_was_removed_while_it_could_not_be_opened_does_not_come_back(tmp_path: Path, what: str) -> None:
    async with opened(tmp_path) as tier:
        await store(tier, KEYS)
    io, clock = SickIO(), FakeClock()
    io.errors["pwritev"] = errno.EROFS
    async with opened(tmp_path, clock=clock, io=io) as tier:
        await _until(lambda: tier.state is TierState.FAILED)
        if what == "some":
            await tier.delete(KEYS[:4])
        else:
            await tier.delete_namespace(KEYS[0][:16] if what == "namespace" else None)
        io.recover()
        await heal(tier, clock)
        await tier.wait_loaded()
        expected = [ABSENT] * 4 + [OK] * 12 if what == "some" else [ABSENT] * 16
        assert await load(tier, KEYS) == expected
        assert await tier.sync()
    async with opened(tmp_path) as tier:
        assert await load(tier, KEYS) == expected


async def test_a_damaged_block_is_a_miss_until_it_is_written_again(tmp_path: Path) -> None:
    async with opened(tmp_path, prewrite=False) as tier:
        await store(tier, KEYS)
        assert await tier.sync()
        entry = tier.books.index[KEYS[7]]
        with tier.folder.slab_path(entry.slab.number, entry.slab.extent_bytes).open("r+b") as file:
            file.seek(entry.extent * entry.slab.extent_bytes + 12_345)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
            os.fsync(file.fileno())
        assert await load(tier, KEYS) == [OK] * 7 + [DAMAGED] + [OK] * 8
        assert tier.stats()["damaged"] == 1 and tier.stats()["rereads"] == 1
        assert await load(tier, KEYS) == [OK] * 7 + [ABSENT] + [OK] * 8
        assert await store(tier, [KEYS[7]]) == [WriteOutcome.STORED]
        assert await load(tier, KEYS) == [OK] * 16


async def test_another_blocks_bytes_in_the_right_place_are_not_handed_out(tmp_path: Path) -> None:
    """A write that went elsewhere: whole, right by its own footer, and not what was asked for."""
    async with opened(tmp_path, prewrite=False) as tier:
        await store(tier, KEYS)
        assert await tier.sync()
        mine, other = tier.books.index[KEYS[0]], tier.books.index[KEYS[1]]
        stride = mine.slab.extent_bytes
        with tier.folder.slab_path(other.slab.number, stride).open("rb") as file:
            file.seek(other.extent * stride)
            foreign = file.read(stride)
        with tier.folder.slab_path(mine.slab.number, stride).open("r+b") as file:
            file.seek(mine.extent * stride)
            file.write(foreign)
            os.fsync(file.fileno())
        assert make_block(KEYS[1], BLOCK_BYTES) in foreign
        assert await load(tier, KEYS[:2]) == [DAMAGED, OK]
