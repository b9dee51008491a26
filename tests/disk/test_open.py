"""Whose directory it is, of which format, and what is found in it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.clock import SystemClock
from kvstore.errors import ConfigError
from kvstore.testing.tier_suite import BLOCK_BYTES, DEADLINE_S, load, name_of, present, store
from kvstore.tier import ReadOutcome, TierState, WriteOutcome
from kvstore.tiers import disk_folder
from kvstore.tiers.disk import DiskTier
from tests.disk.media import CAPACITY_BYTES, SickIO, opened, slab_paths

KEYS = [name_of(number) for number in range(16)]
OK = ReadOutcome.OK


async def _refused(folder: Path) -> str:
    tier = DiskTier(folder, CAPACITY_BYTES, SystemClock())
    with pytest.raises(ConfigError) as refused:
        await tier.open()
    await tier.close()
    return str(refused.value)


async def test_a_second_process_is_refused_and_told_the_holder(tmp_path: Path) -> None:
    hold = "import sys; from kvstore.tiers.disk_folder import DiskFolder; from kvstore.tiers.files import FileIO\n"
    hold += "from pathlib import Path; DiskFolder(Path(sys.argv[1]), FileIO()).hold(); print('held', flush=True)\n"
    hold += "sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        text=True,
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        message = await _refused(tmp_path)
        assert f"pid {holder.pid}" in message and str(tmp_path) in message
        holder.kill()
    async with opened(tmp_path) as tier:  # the kernel gave the lock back
        assert tier.state is TierState.OK


async def test_the_same_process_may_not_open_it_twice(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await store(tier, KEYS)
        assert f"pid {os.getpid()}" in await _refused(tmp_path)
        assert await load(tier, KEYS) == [OK] * 16


async def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await store(tier, KEYS)
    (tmp_path / "format").write_text(json.dumps({disk_folder.FORMAT_KEY: disk_folder.FORMAT + 1}))
    message = await _refused(tmp_path)
    assert f"format {disk_folder.FORMAT + 1}" in message and f"format {disk_folder.FORMAT}" in message
    (tmp_path / "format").write_text("??")
    assert str(tmp_path / "format") in await _refused(tmp_path)
    (tmp_path / "format").unlink()
    async with opened(tmp_path) as tier:
        assert await load(tier, KEYS) == [OK] * 16


async def test_somebody_elses_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("important")
    assert "thesis.tex" in await _refused(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("below", ["", "disk"])
async def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert "is no folder" in await _refused(tmp_path / "file" / below)


async def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_folder, "filesystem_of", lambda path: "nfs4")
    assert "nfs4" in await _refused(tmp_path)


def test_the_file_system_is_the_one_that_the_path_is_on() -> None:
    assert disk_folder.filesystem_of(Path("/proc/self")) == "proc"
    assert disk_folder.filesystem_of(Path("/dev/shm/x")) == "tmpfs"


@pytest.mark.parametrize("capacity_bytes", [0, 1 << 20])
def test_a_budget_that_is_too_small_is_refused(tmp_path: Path, capacity_bytes: int) -> None:
    with pytest.raises(ConfigError, match=str(4 << 20)):
        DiskTier(tmp_path, capacity_bytes, SystemClock())


async def test_unfinished_files_go_and_stray_ones_count(tmp_path: Path) -> None:
    async with opened(tmp_path, prewrite=False) as tier:
        await store(tier, KEYS)
    unfinished = ["slab-000000ff-69632.kv.new", "recency.new", "format.new"]
    for name in unfinished:
        (tmp_path / name).write_bytes(b"x" * 100)
    (tmp_path / "index.new").mkdir()
    (tmp_path / "stray").write_bytes(os.urandom(4 << 20))
    os.sync()
    async with opened(tmp_path, prewrite=False) as tier:
        assert not [name for name in [*unfinished, "index.new"] if (tmp_path / name).exists()]
        assert (tmp_path / "stray").exists()
        assert tier.stats()["charged_bytes"] >= 4 << 20
        assert await load(tier, KEYS) == [OK] * 16


async def test_while_the_index_is_read_nothing_is_known_and_deletions_wait(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await store(tier, KEYS)
    io = SickIO()
    (tmp_path / "index" / "data.mdb").unlink()  # so that footers are read, through io
    io.held.add("preadv")
    tier = DiskTier(tmp_path, CAPACITY_BYTES, SystemClock(), io=io)
    opening = asyncio.ensure_future(tier.open())
    assert await asyncio.to_thread(io.reached.wait, DEADLINE_S)
    io.released.set()  # the probe at open; then hold again where the footers are read
    await opening
    await tier.wait_loaded()
    await tier.close()

    held = asyncio.Event()
    loop = asyncio.get_running_loop()

    class LoadingIO(SickIO):
        def preadv(self, fd: int, buffers: object, offset: int) -> int:
            if tier.folder.damaged_index.exists():
                loop.call_soon_threadsafe(held.set)
                assert self.released.wait(60)
            return super().preadv(fd, buffers, offset)  # type: ignore[arg-type]

    (tmp_path / "index" / "data.mdb").unlink()
    io = LoadingIO()
    tier = DiskTier(tmp_path, CAPACITY_BYTES, SystemClock(), io=io)
    await tier.open()
    async with asyncio.timeout(DEADLINE_S):
        await held.wait()
    assert tier.state is TierState.LOADING
    assert await tier.stat(KEYS) == [None] * 16
    assert await load(tier, KEYS) == [ReadOutcome.ABSENT] * 16
    assert await store(tier, KEYS) == [WriteOutcome.THROTTLED] * 16
    deleting = asyncio.ensure_future(tier.delete(KEYS[:4]))
    await asyncio.sleep(0)
    assert not deleting.done()
    io.released.set()
    assert await deleting == 4
    assert tier.state is TierState.OK
    assert await present(tier, KEYS) == [False] * 4 + [True] * 12
    await tier.close()
    async with opened(tmp_path) as tier:
        assert await load(tier, KEYS) == [ReadOutcome.ABSENT] * 4 + [OK] * 12


@pytest.mark.parametrize("how", ["no file", "no folder", "empty", "garbage"])
async def test_a_lost_index_is_built_from_footers(tmp_path: Path, how: str) -> None:
    async with opened(tmp_path) as tier:
        await store(tier, KEYS)
        await store(tier, [name_of(100)], 3 << 20)
    data = tmp_path / "index" / "data.mdb"
    if how == "empty":
        data.write_bytes(b"")
    elif how == "garbage":
        data.write_bytes(os.urandom(data.stat().st_size))
    else:
        data.unlink()
        if how == "no folder":
            data.parent.rmdir()
    async with opened(tmp_path) as tier:
        assert tier.stats()["index_rebuilt"]
        assert await load(tier, KEYS) == [OK] * 16
        assert await load(tier, [name_of(100)], 3 << 20) == [OK]
        assert not (tmp_path / "index.damaged").exists()
    async with opened(tmp_path) as tier:
        assert tier.stats()["index_rebuilt"] == ""
        assert await load(tier, KEYS) == [OK] * 16


async def test_a_rebuild_that_was_cut_short_begins_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await store(tier, KEYS)
    os.rename(tmp_path / "index", tmp_path / "index.damaged")
    (tmp_path / "index").mkdir()
    async with opened(tmp_path) as tier:
        assert tier.stats()["index_rebuilt"]
        assert await load(tier, KEYS) == [OK] * 16


async def test_the_newer_one_of_two_footers_with_one_name_counts(tmp_path: Path) -> None:
    async with opened(tmp_path, prewrite=False) as tier:
        await store(tier, KEYS)
        await tier.delete(KEYS[:1])
        await store(tier, [name_of(50)])  # takes the place
        await store(tier, KEYS[:1])
        places = {(entry.slab.number, entry.extent) for entry in tier.books.index.values()}
    (tmp_path / "index" / "data.mdb").unlink()
    async with opened(tmp_path, prewrite=False) as tier:
        assert {(entry.slab.number, entry.extent) for entry in tier.books.index.values()} == places
        assert await load(tier, [*KEYS, name_of(50)]) == [OK] * 17


async def test_it_starts_with_little_address_space(tmp_path: Path) -> None:
    """ulimit -v: a large map is refused; a smaller one does and grows when it is full."""
    program = """
import asyncio, resource, sys
from pathlib import Path
from kvstore.clock import SystemClock
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_index import DiskIndex, read_columns
from kvstore.testing.tier_suite import name_of, store

async def main():
    size = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (size + (3 << 30),) * 2)
    tier = DiskTier(Path(sys.argv[1]), 1 << 40, SystemClock(), prewrite=False)
    await tier.open()
    await tier.wait_loaded()
    print(tier.index.map_bytes)
    index = DiskIndex(Path(sys.argv[2]), 1)
    small = index.map_bytes
    for at in range(0, 400_000, 8000):
        index.commit((), [(name_of(number), bytes(24)) for number in range(at, at + 8000)])
    assert index.map_bytes > small
    assert sum(columns.names.size for columns in read_columns(index.path)) == 400_000
    index.close()
    await tier.close()

asyncio.run(main())
"""
    (tmp_path / "index only").mkdir()
    child = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "tier"), str(tmp_path / "index only")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=100,
    )
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) < 3 << 30


async def test_texts_of_namespaces_have_a_budget(tmp_path: Path) -> None:
    from kvstore.tier import TierNamespace

    async with opened(tmp_path) as tier:
        for number in range(100):
            tier.remember(TierNamespace(number.to_bytes(16, "big"), "x" * 10_000, (BLOCK_BYTES,)))
        kept = tier.namespaces()
        assert 1 <= len(kept) < 100 and kept[-1].digest == (99).to_bytes(16, "big")
    async with opened(tmp_path) as tier:
        assert {one.digest for one in tier.namespaces()} == {one.digest for one in kept}
        assert not slab_paths(tmp_path)
