"""Finds room for blocks on a disk tier: free extents, new slabs, slabs of other classes, and last the coldest blocks.

One coroutine at a time decides on room (a lock), since each step waits for the medium and changes what the next one
would decide.
"""

from __future__ import annotations

import asyncio
import errno
import functools
from collections.abc import Callable
from typing import Final

from kvstore.clock import Clock
from kvstore.tiers.disk_commit import Committer
from kvstore.tiers.disk_folder import DiskFolder
from kvstore.tiers.disk_health import Health
from kvstore.tiers.disk_load import index_bytes_for
from kvstore.tiers.extent import ALIGN_BYTES
from kvstore.tiers.files import aligned_memory
from kvstore.tiers.io_threads import IoThreads, Lane
from kvstore.tiers.slabs import Books, Entry, Slab, SlabClass, charge_of

Extents = list[tuple[Slab, int]]

#: Steps in a row that made room which others took, before a call does without.
_STEPS_IN_VAIN_MAX: Final = 64
#: Of a class, what is evicted at once where one block has to leave: the wait for the index is the same.
_EVICT_SHARE: Final = 64
_EVICT_MAX: Final = 256
#: How long a slab that could not be removed stays before the next try.
REMOVE_AGAIN_S: Final = 5.0
#: How long a file system that had no room for a slab is not asked again.
GROW_AGAIN_S: Final = 5.0
#: Bytes pre-written at a time. Short enough that a load which comes meanwhile does not feel it.
_PREWRITE_BYTES: Final = 4 << 20


class Room:
    """See the module.

    Attributes:
        stolen: Slabs that went from one class to another.
        prewritten_bytes: How much was written ahead.
        grow_fault: Why no slab could be added the last time; 0 where one could.
    """

    def __init__(
        self,
        books: Books,
        folder: DiskFolder,
        threads: IoThreads,
        committer: Committer,
        health: Health,
        clock: Clock,
        forgotten: Callable[[Entry], None],
    ) -> None:
        self._books = books
        self._folder = folder
        self._threads = threads
        self._committer = committer
        self._health = health
        self._clock = clock
        self._forgotten = forgotten
        self._lock = asyncio.Lock()
        self._removing = asyncio.Lock()
        self._steps: set[asyncio.Task[bool]] = set()
        self._grow_again_at = 0.0
        self._remove_again_at = 0.0
        #: Slabs that are given up and wait for their last reader, or for a file system that does not let them go.
        self._leaving: list[Slab] = []
        self._zeros = aligned_memory(_PREWRITE_BYTES)
        self.stolen = 0
        self.prewritten_bytes = 0
        self.grow_fault = 0

    def fits(self, extent_bytes: int) -> bool:
        """Whether a block of this extent could ever be stored."""
        return charge_of(extent_bytes, 1) <= self._books.budget_bytes

    async def find(self, extent_bytes: int, count: int, found: Extents) -> None:
        """Appends up to `count` extents to `found`; they are in flight. Fewer where no more room can be made.

        If the caller gives up waiting, what is in `found` is the caller's to give back.
        """
        kind = self._books.class_of(extent_bytes)
        in_vain = 0
        while in_vain < _STEPS_IN_VAIN_MAX:
            taken = self._books.take(kind, count - len(found))
            found += taken
            if len(found) == count:
                return
            in_vain = 0 if taken else in_vain + 1
            # A step goes on when its caller is cancelled: half of one would leave room that nobody accounts for.
            step = asyncio.get_running_loop().create_task(self._step(kind, count - len(found)))
            self._steps.add(step)
            step.add_done_callback(self._steps.discard)
            if not await asyncio.shield(step):
                return

    async def _step(self, kind: SlabClass, missing: int) -> bool:
        async with self._lock:
            # Who waited for the lock may find what it needs.
            return any(slab.ready or slab.raw for slab in kind.slabs.values()) or await self._make(kind, missing)

    async def _make(self, kind: SlabClass, missing: int) -> bool:
        """One step towards more free extents. False: there is none left to take."""
        await self.remove_leaving()
        taken = self._committer.index_bytes - index_bytes_for(self._extents)
        self._books.index_excess_bytes = max(0, taken)
        extents = self._books.room_for_slab(kind.extent_bytes)
        if extents and self._clock.monotonic() >= self._grow_again_at and await self._grow(kind, extents):
            return True
        # Not while one is leaving: its room comes first, and where files cannot be removed no other one would make any.
        cold = self._books.slab_to_steal(kind) if not self._leaving else None
        if cold is not None:
            self.stolen += 1
            await self.give_up(cold)
            await self.remove_leaving()
            return cold not in self._leaving  # else: somebody reads it, and another one would not be faster
        share = sum(slab.extents for slab in kind.slabs.values()) // _EVICT_SHARE
        leaving = self._books.evict(kind, max(missing, min(share, _EVICT_MAX)))
        for entry in leaving:
            self._forgotten(entry)
            self._committer.removed(entry)
        # Also where nothing was evicted: extents may be waiting for the index only.
        waiting = bool(leaving) or self._committer.pending > 0
        return waiting and await self._committer.flush()

    @property
    def _extents(self) -> int:
        return sum(slab.extents for slab in self._books.slabs.values())

    async def _grow(self, kind: SlabClass, extents: int) -> bool:
        books = self._books
        number = books.next_slab
        books.next_slab += 1
        charge = charge_of(kind.extent_bytes, extents)
        # Reserve before accepting: a slab that is being made counts already.
        books.charge(charge)
        index_bytes = index_bytes_for(extents + self._extents)

        def create() -> Slab:
            # First, since it gives room back where there are fewer extents than before.
            self._committer.reserve_index(index_bytes)
            return self._folder.create_slab(number, kind.extent_bytes, extents)

        making = self._threads.submit(Lane.KEEP, create).future
        making.add_done_callback(lambda done: self._made(done, charge))
        try:
            await asyncio.shield(making)
        except OSError as error:
            code = error.errno or errno.EIO
            self.grow_fault = code
            self._grow_again_at = self._clock.monotonic() + GROW_AGAIN_S
            self._health.note(code, "adding a slab", extent_bytes=kind.extent_bytes, extents=extents)
            if not kind.slabs and not any(other.slabs for other in books.classes.values()):
                self._health.write_failed(code, "adding the first slab")
            return False
        self.grow_fault = 0
        return True

    def _made(self, done: asyncio.Future[Slab], charge: int) -> None:
        """Runs also when nobody waits for the slab any more."""
        if done.cancelled() or done.exception() is not None:
            self._books.charge(-charge)
        else:
            self._books.add_slab(done.result())

    async def give_up(self, slab: Slab) -> None:
        """Forgets all that lies in a slab, then has it removed."""
        lost = self._books.drop_slab(slab)
        for entry in lost:
            self._forgotten(entry)
            self._committer.removed(entry, reuse=False)
        self._leaving.append(slab)
        # Also where nothing was lost: a round that runs may be about to sync the file.
        await self._committer.flush()

    async def remove_leaving(self) -> None:
        """Removes the slabs that were given up and that nobody reads any more. One whose file stays keeps its charge,
        and is tried again.

        An index that still names such a slab (its commit failed) names a file that is not there; the next start drops
        such records.
        """
        async with self._removing:
            if self._clock.monotonic() < self._remove_again_at:
                return
            for slab in [slab for slab in self._leaving if not slab.readers and not slab.in_flight]:
                try:
                    await self._threads.call(Lane.KEEP, functools.partial(self._folder.remove_slab, slab))
                except OSError as error:
                    self._health.note(error.errno or errno.EIO, "removing a slab")
                    self._remove_again_at = self._clock.monotonic() + REMOVE_AGAIN_S
                    return
                self._leaving.remove(slab)
                self._books.charge(-slab.charge_bytes)

    def try_growing(self) -> None:
        """The file system may have room again."""
        self._grow_again_at = 0.0

    # -- writing ahead -------------------------------------------------------------------------------------------------

    @property
    def raw_bytes(self) -> int:
        """What is still to be pre-written."""
        return sum(len(slab.raw) * slab.extent_bytes for slab in self._books.slabs.values())

    async def prewrite_some(self) -> bool:
        """Writes zeros over a few extents that were never written, so that stores find them fast. Whether there were
        any.
        """
        taken = self._books.take_raw(_PREWRITE_BYTES)
        if taken is None:
            return False
        slab, first, count = taken

        def write() -> None:
            at, end = first * slab.extent_bytes, (first + count) * slab.extent_bytes
            while at < end and not slab.dead:
                length = min(len(self._zeros), end - at) // ALIGN_BYTES * ALIGN_BYTES
                moved = self._folder.io.pwritev(slab.fd, [self._zeros[:length]], at)
                if moved <= 0:
                    raise OSError(errno.ENOSPC, "nothing was written")
                at += moved

        done = self._threads.submit(Lane.KEEP, write).future
        done.add_done_callback(
            lambda future: self._books.prewritten(
                slab, first, count, done=not future.cancelled() and future.exception() is None
            )
        )
        try:
            await asyncio.shield(done)
        except OSError as error:
            self._health.write_failed(error.errno or errno.EIO, "pre-writing a slab")
            return False
        self.prewritten_bytes += count * slab.extent_bytes
        return True
