"""A start that fails half way: nothing of others is closed, nothing is kept, the next one gets through."""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path

import pytest

from kvstore.clock import SystemClock
from kvstore.tier import ReadOutcome, WriteOutcome
from kvstore.tiers import disk_load
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_index import DiskIndex
from kvstore.tiers.slabs import Entry
from tests.disk.media import SickIO, opened, slab_paths
from tests.disk.test_open import KEYS, load, store

_LARGE = 48 << 20


class _Unlinking(SickIO):
    """Somebody else opens a file while a slab is being removed, which then fails."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[int] = []

    def unlink(self, path: Path) -> None:
        self.others.append(os.open("/dev/null", os.O_RDONLY))
        super().unlink(path)


async def _with_slabs(folder: Path) -> None:
    async with opened(folder, _LARGE) as tier:
        assert await store(tier, KEYS) == [WriteOutcome.STORED] * 16
    assert slab_paths(folder)


async def test_a_start_that_fails_closes_nothing_of_others(tmp_path: Path) -> None:
    await _with_slabs(tmp_path)
    io = _Unlinking()
    io.errors["unlink"] = errno.EIO
    tier = DiskTier(tmp_path, _LARGE, SystemClock(), io=io)
    tier.folder.hold()
    try:
        with pytest.raises(OSError, match="Input/output"):
            disk_load.load(tier.folder, disk_load.FIXED_BYTES + 4096)
        assert io.others
        for fd in io.others:
            os.close(fd)  # EBADF, had the start closed it
    finally:
        tier.folder.release()


async def test_a_start_that_fails_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await _with_slabs(tmp_path)
    monkeypatch.setattr(disk_load, "_MANY", 1)

    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    tier = DiskTier(tmp_path, _LARGE, SystemClock())
    tier.folder.hold()
    try:
        monkeypatch.setattr(disk_load, "_index_of", full)
        for _ in range(3):
            with pytest.raises(OSError, match="full"):
                disk_load.load(tier.folder, _LARGE)
        gc.collect()
        gc.unfreeze()
        assert not [each for each in gc.get_objects() if isinstance(each, Entry)]
        assert gc.isenabled()
    finally:
        tier.folder.release()


async def test_an_index_that_is_too_long_serves_where_there_is_no_room_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _with_slabs(tmp_path)

    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(disk_load, "index_bytes_for", lambda extents: 0)
    monkeypatch.setattr(disk_load, "write_index", full)
    async with opened(tmp_path, _LARGE) as tier:
        assert await load(tier, KEYS) == [ReadOutcome.OK] * 16


def test_a_look_at_the_index_waits_for_what_is_done_to_it(tmp_path: Path) -> None:
    index = DiskIndex(tmp_path, 1 << 24)
    begun, go_on = threading.Event(), threading.Event()

    def reserving() -> None:
        os.truncate(index.path, os.path.getsize(index.path) + 4096)
        begun.set()
        assert go_on.wait(30)

    reserver = threading.Thread(target=index.reserve, args=(reserving,))
    reserver.start()
    assert begun.wait(30)
    looker = threading.Thread(target=go_on.set)
    looker.start()
    index.check_file()  # it was no stranger who wrote
    reserver.join(30)
    looker.join(30)
    index.close()
