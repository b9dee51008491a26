"""A file system that others fill up, for real; one that stands still; one on a device that is not there any more."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing import FakeClock
from kvstore.testing.tier_suite import BLOCK_BYTES, DEADLINE_S, load, name_of, present, store
from kvstore.tier import ReadOutcome, TierState, WriteOutcome
from kvstore.tiers.disk_index import RECORD, DiskIndex
from kvstore.tiers.index_check import IndexDamaged
from kvstore.tiers.page_cache import bring_in
from tests.disk.media import PlainIO, heal, opened

SIZE_BYTES = 64 << 20
OK = ReadOutcome.OK


@contextlib.contextmanager
def mounted(kind: str, folder: Path) -> Iterator[Path]:
    """A small file system of its own. Skips where this user may not mount."""
    point = folder / "mount"
    point.mkdir()
    image = folder / "image"
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "kvstore-test", str(point)]
    else:
        with image.open("wb") as file:
            file.truncate(SIZE_BYTES)
        made = subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"mkfs.ext4: {made.stderr.strip()}")
        command = ["mount", "-o", "loop", str(image), str(point)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if done.returncode:
        pytest.skip(f"this user may not mount: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


@contextlib.contextmanager
def filled_up(point: Path) -> Iterator[None]:
    """Another process takes all that is left, until the end."""
    program = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
chunk = bytes(1 << 20)
while len(chunk) >= 4096:
    try:
        os.write(fd, chunk)
    except OSError:
        chunk = chunk[: len(chunk) // 2]
print("full", flush=True)
sys.stdin.read()
"""
    hog = point / "hog"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(hog)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "full\n"
        try:
            yield
        finally:
            process.kill()
            hog.unlink()


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.parametrize("reserves", [True, False], ids=["fallocate", "no fallocate"])
async def test_a_full_disk_loses_nothing_and_the_tier_comes_back(tmp_path: Path, kind: str, reserves: bool) -> None:
    clock = FakeClock()
    with mounted(kind, tmp_path) as point:
        io = None if reserves else PlainIO()
        async with opened(point / "tier", 48 << 20, clock, io=io, prewrite=False) as tier:
            keys = [name_of(number) for number in range(600)]
            stored: list[bytes] = []

            async def fill(upto: int) -> set[WriteOutcome]:
                seen = set()
                for start in range(len(stored), upto, 8):
                    batch = keys[start : start + 8]
                    outcomes = await store(tier, batch)
                    seen |= set(outcomes)
                    stored.extend(key for key, one in zip(batch, outcomes, strict=True) if one is WriteOutcome.STORED)
                return seen

            assert await fill(64) == {WriteOutcome.STORED}
            assert await tier.sync()
            with filled_up(point):
                seen = await fill(200)
                assert tier.stats()["growth_blocked"] == "ENOSPC" or tier.state is TierState.DEGRADED
                there = [key for key, have in zip(stored, await present(tier, stored), strict=True) if have]
                assert len(there) >= 56, "what was there before is there"
                assert await load(tier, there) == [OK] * len(there)
                assert seen <= {WriteOutcome.STORED, WriteOutcome.NO_ROOM, WriteOutcome.FAILED}
                await tier.sync()  # so that no commit is under way when the clock jumps
            await heal(tier, clock)
            assert tier.state is TierState.OK
            assert await store(tier, keys[400:480]) == [WriteOutcome.STORED] * 80
            there = [key for key in keys if (await present(tier, [key]))[0]]
            assert len(there) > 80
            assert await load(tier, there) == [OK] * len(there)
        async with opened(point / "tier", 48 << 20) as tier:
            assert await present(tier, there) == [True] * len(there)
            assert await load(tier, there) == [OK] * len(there)


async def test_a_disk_that_is_full_from_the_start(tmp_path: Path) -> None:
    clock = FakeClock()
    with mounted("tmpfs", tmp_path) as point:
        async with opened(point / "tier", 32 << 20, clock, prewrite=False) as tier:
            with filled_up(point):
                assert await store(tier, [name_of(1)]) != [WriteOutcome.STORED]
                assert tier.state is TierState.DEGRADED
                assert tier.stats()["fault"]["name"] == "ENOSPC"
                await heal(tier, clock)
                assert tier.state is TierState.DEGRADED
            await heal(tier, clock)
            assert tier.state is TierState.OK
            assert await store(tier, [name_of(1)]) == [WriteOutcome.STORED]


async def test_a_full_disk_is_read_after_a_restart(tmp_path: Path) -> None:
    keys = [name_of(number) for number in range(64)]
    with mounted("tmpfs", tmp_path) as point:
        async with opened(point / "tier", 16 << 20) as tier:
            await store(tier, keys)
        with filled_up(point):
            async with opened(point / "tier", 16 << 20) as tier:
                assert await load(tier, keys) == [OK] * 64
                # The room of slabs and index was reserved, so that blocks go on replacing each other.
                for start in range(100, 400, 16):
                    assert await store(tier, [name_of(start + n) for n in range(16)]) == [WriteOutcome.STORED] * 16
                assert await tier.sync()


async def test_a_frozen_file_system_costs_the_tier_and_nobody_else(tmp_path: Path) -> None:
    """fsfreeze: the kernel lets every write wait, as a hung device does."""
    clock = FakeClock()
    keys = [name_of(number) for number in range(8)]
    with mounted("ext4", tmp_path) as point:
        async with opened(point / "tier", 32 << 20, clock, prewrite=False) as tier:
            await store(tier, keys)
            assert await tier.sync()
            if os.system(f"fsfreeze -f {point}"):
                pytest.skip("fsfreeze is not there, or not allowed")
            try:
                begun = asyncio.get_running_loop().time()
                outcomes = await asyncio.wait_for(
                    tier.write([(name_of(99), memoryview(bytes(BLOCK_BYTES)))], 0.2), DEADLINE_S
                )
                assert outcomes == [WriteOutcome.BUFFER_LOST]
                assert asyncio.get_running_loop().time() - begun < DEADLINE_S
                assert tier.state is TierState.FAILED
                assert await load(tier, keys) == [ReadOutcome.ABSENT] * 8
            finally:
                assert os.system(f"fsfreeze -u {point}") == 0
            async with asyncio.timeout(DEADLINE_S):
                while tier.stats()["lost_calls"]:
                    await asyncio.sleep(0.001)
            await heal(tier, clock)
            assert tier.state is TierState.OK
            assert await load(tier, keys) == [OK] * 8
            assert await present(tier, [name_of(99)]) == [False]


def test_a_page_of_the_index_that_cannot_be_read_is_an_error_and_no_end(tmp_path: Path) -> None:
    """LMDB would read it through its map, and the kernel would end the process."""
    records = [(name_of(number), RECORD.pack(1, number, BLOCK_BYTES, number + 1)) for number in range(2000)]
    with mounted("ext4", tmp_path) as point:
        (point / "index").mkdir()
        index = DiskIndex(point / "index", 1 << 24)
        index.commit((), records)
        index.close()
        index = DiskIndex(point / "index", 1 << 24)
        with index.path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.truncate(tmp_path / "image", 0)  # what the device had is lost; reading it is EIO
        with pytest.raises(OSError) as caught:
            index.commit([records[1000][0]], ())
        assert caught.value.errno == errno.EIO
        with pytest.raises(IndexDamaged, match=r"cannot be read|ends at page"):
            index.reopen()


def test_what_the_kernel_dropped_is_brought_in(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(5 << 20))
    with file.open("rb") as opened_file:
        os.fsync(opened_file.fileno())
        os.posix_fadvise(opened_file.fileno(), 1 << 20, 3 << 20, os.POSIX_FADV_DONTNEED)
    if not bring_in(file, 5 << 20):
        pytest.skip("this file system keeps all of its files in memory")
    assert bring_in(file, 5 << 20) == 0
    with pytest.raises(OSError):
        bring_in(file, 6 << 20)
