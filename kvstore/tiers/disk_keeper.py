"""What a disk tier does by itself, now and then: looks whether it is well, whether its files are still there, writes
down the order of use, writes ahead.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from typing import TYPE_CHECKING, Final

from kvstore.tier import TierState
from kvstore.tiers.disk_index import DiskIndex, write_index
from kvstore.tiers.disk_load import index_bytes_for, map_bytes_for, record_of
from kvstore.tiers.files import probe_again
from kvstore.tiers.index_check import IndexDamaged
from kvstore.tiers.io_threads import Lane
from kvstore.tiers.slabs import Slab

if TYPE_CHECKING:
    from kvstore.tiers.disk import DiskTier

_TICK_S: Final = 0.25
#: While loads or stores go on, writing ahead waits this long before it looks again.
_YIELD_S: Final = 0.02
_FILES_S: Final = 5.0
#: A file system that was full is used again when it has this much, or an extent's share of the budget if that is less.
_ROOM_BYTES: Final = 8 << 20


class Keeper:
    """Runs on the tier's loop from its making to stop()."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        loop = asyncio.get_running_loop()
        clock = tier.clock
        self._files_at = clock.monotonic() + _FILES_S
        self._recency_at = clock.monotonic() + tier.recency_interval_s
        self._tending: asyncio.Task[None] | None = None
        self._tending_since = 0.0
        self._tasks = [loop.create_task(self._tick()), loop.create_task(self._write_ahead())]

    async def stop(self) -> None:
        """Ends what runs by itself; a call that hangs on a thread stays behind."""
        for task in (*self._tasks, *([self._tending] if self._tending else [])):
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._start_tending()
            self._look_for_hangs()

    def _start_tending(self) -> asyncio.Task[None]:
        if self._tending is None or self._tending.done():
            self._tending_since = self._tier.clock.monotonic()
            self._tending = asyncio.get_running_loop().create_task(self._tend())
        return self._tending

    async def tend(self) -> None:
        """One round, at once."""
        self._look_for_hangs()
        await asyncio.shield(self._start_tending())

    def _look_for_hangs(self) -> None:
        tier = self._tier
        latest = tier.clock.monotonic() - tier.hang_s
        if self._tending is not None and not self._tending.done() and self._tending_since < latest:
            self._tending_since = tier.clock.monotonic()
            tier.health.give_up(errno.ETIMEDOUT, "housekeeping")
        since = tier.committer.running_since if tier.committer is not None else None
        if since is not None and since < latest and tier.health.state is not TierState.FAILED:
            tier.health.give_up(errno.ETIMEDOUT, "commit")

    async def _tend(self) -> None:
        try:
            await self._round()
        except OSError as error:
            self._tier.health.note(error.errno or errno.EIO, f"housekeeping: {error}")

    async def _round(self) -> None:
        tier = self._tier
        if tier.room is None:
            if tier.health.probe_due():
                await tier.retry_open()
            return
        if tier.health.probe_due():
            await self._probe()
        if tier.health.state is TierState.FAILED:
            return
        now = tier.clock.monotonic()
        if now >= self._files_at:
            self._files_at = now + _FILES_S
            await self._check_files()
        if now >= self._recency_at:
            self._recency_at = now + tier.recency_interval_s
            await tier.keep_recency()
        await tier.room.remove_leaving()

    async def _probe(self) -> None:
        """Whether all is well again: what hung came back, a page goes out and in, there is room, the index works."""
        tier = self._tier
        assert tier.room is not None and tier.committer is not None
        if tier.health.lost_calls or tier.committer.running_since is not None:
            return

        def probe() -> int:
            tier.folder.restore()
            probe_again(tier.folder.io, tier.probe_file, tier.folder.medium.direct)
            room = os.statvfs(tier.directory)
            return room.f_bavail * room.f_frsize

        try:
            free_bytes = await tier.threads.call(Lane.KEEP, probe)
            if tier.health.full and free_bytes < min(_ROOM_BYTES, tier.capacity_bytes // 16):
                return
            if tier.committer.suspect:
                await self._renew_index()
        except OSError as error:
            tier.health.note(error.errno or errno.EIO, f"probe: {error}")
            return
        tier.room.try_growing()
        tier.health.recovered()

    async def _renew_index(self) -> None:
        """Opens the index anew; where its file is not whole, writes it anew: the books in memory are what is true."""
        tier = self._tier
        assert tier.committer is not None
        old = tier.index
        assert old is not None
        entries = list(tier.books.index.values())
        slabs = list(tier.books.slabs.values())
        namespaces = tier.namespaces()

        def renew() -> DiskIndex:
            index = old
            try:
                index.reopen()
                return index
            except IndexDamaged:
                index.close()
                tier.folder.forget_index()  # the budget has room for one
            for slab in slabs:
                tier.folder.io.fdatasync(slab.fd)
            records = [record_of(entry) for entry in entries]
            map_bytes = map_bytes_for(tier.capacity_bytes)
            write_index(tier.folder.index_folder, records, namespaces, map_bytes)
            index = DiskIndex(tier.folder.index_folder, map_bytes)
            with contextlib.suppress(OSError, IndexDamaged):  # a disk that is full keeps nobody from going on
                index.reserve(lambda: tier.folder.reserve_index(index_bytes_for(sum(slab.extents for slab in slabs))))
            return index

        tier.index = await tier.threads.call(Lane.COMMIT, renew)
        # Blocks that left while it was written are among what the committer has pending.
        tier.committer.replace_index(tier.index)

    async def _check_files(self) -> None:
        """Whether somebody removed, replaced or cut off a file."""
        tier = self._tier
        assert tier.room is not None and tier.committer is not None
        slabs = list(tier.books.slabs.values())

        def look() -> list[tuple[Slab, str]]:
            alive = [slab for slab in slabs if not slab.dead]
            return [(slab, fault) for slab in alive if (fault := tier.folder.slab_fault(slab)) is not None]

        for slab, fault in await tier.threads.call(Lane.KEEP, look):
            if slab.dead:
                continue
            tier.health.note(errno.ENOENT if fault == "deleted" else errno.ESTALE, f"slab {slab.number} was {fault}")
            if fault == "truncated":
                await self._mend(slab)
            else:
                await tier.room.give_up(slab)
        assert tier.index is not None
        try:
            await tier.threads.call(Lane.COMMIT, tier.index.check_file)
        except IndexDamaged as damage:
            tier.committer.suspect = True
            tier.health.write_failed(errno.ESTALE, f"index: {damage}")

    async def _mend(self, slab: Slab) -> None:
        """Forgets what was cut off, keeps the rest."""
        tier = self._tier
        assert tier.committer is not None
        try:
            left = await tier.threads.call(Lane.KEEP, lambda: tier.folder.lengthen_slab(slab))
        except OSError as error:
            tier.health.write_failed(error.errno or errno.EIO, f"giving slab {slab.number} its length back")
            return
        for entry in slab.entries[left // slab.extent_bytes :]:
            if entry is not None:
                tier.books.remove(entry)
                tier.committer.removed(entry)

    async def _write_ahead(self) -> None:
        tier = self._tier
        while True:
            wait_s = _TICK_S
            if tier.prewrite and tier.room is not None and tier.state is TierState.OK:
                depth = tier.threads.depth
                if depth[Lane.READ] or depth[Lane.WRITE]:
                    wait_s = _YIELD_S
                elif await tier.room.prewrite_some():
                    wait_s = 0.0
            await asyncio.sleep(wait_s)
