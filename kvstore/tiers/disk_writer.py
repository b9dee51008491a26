"""The way of a batch of stores through a disk tier."""

from __future__ import annotations

import asyncio
import errno
import functools
from collections import Counter
from collections.abc import Callable, Sequence

from kvstore.tier import WriteOutcome
from kvstore.tiers.disk_batch import Results, as_bytes, run_batch
from kvstore.tiers.disk_commit import Committer
from kvstore.tiers.disk_health import Health
from kvstore.tiers.disk_room import Extents, Room
from kvstore.tiers.extent import extent_bytes_for
from kvstore.tiers.io_threads import IoThreads, Lane
from kvstore.tiers.slabs import Books, Entry, Slab
from kvstore.tiers.transfer import MOVED, Mover, Piece

Block = tuple[bytes, memoryview]


class Writer:
    """Finds room, writes, enters into the books. On the tier's loop.

    Attributes:
        writing: Names of blocks that are being stored, with what becomes of them.
    """

    def __init__(
        self,
        books: Books,
        room: Room,
        committer: Committer,
        mover: Mover,
        threads: IoThreads,
        lanes: int,
        queue_bytes: int,
        health: Health,
        counts: Counter[str],
        serves: Callable[[], bool],
    ) -> None:
        self._books = books
        self._room = room
        self._committer = committer
        self._mover = mover
        self._threads = threads
        self._lanes = lanes
        self._queue_bytes = queue_bytes
        self._health = health
        self._counts = counts
        self._serves = serves
        self._queued_bytes = 0
        self.writing: dict[bytes, asyncio.Future[WriteOutcome]] = {}

    async def write(self, blocks: Sequence[Block], deadline_s: float) -> list[WriteOutcome]:
        """As Tier.write, of a tier that serves."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        outcomes = [WriteOutcome.FAILED] * len(blocks)
        own: dict[int, Block] = {}
        elsewhere: list[tuple[int, asyncio.Future[WriteOutcome]]] = []
        for place, (key, buffer) in enumerate(blocks):
            if key in self._books.index:
                outcomes[place] = WriteOutcome.EXISTS
            elif (same := self.writing.get(key)) is not None:
                elsewhere.append((place, same))
            elif not self._room.fits(extent_bytes_for(buffer.nbytes)):
                outcomes[place] = WriteOutcome.NO_ROOM
            elif self._queued_bytes >= self._queue_bytes:
                outcomes[place] = WriteOutcome.THROTTLED
            else:
                self._queued_bytes += buffer.nbytes
                self.writing[key] = loop.create_future()
                own[place] = (key, as_bytes(buffer))
        try:
            cancelled = await self._write_own(own, outcomes, deadline)
        finally:
            for place, (key, buffer) in own.items():
                self._queued_bytes -= len(buffer)
                self.writing.pop(key).set_result(outcomes[place])
        for place, future in elsewhere:
            if not cancelled and not future.done():
                await asyncio.wait([future], timeout=max(0.0, deadline - loop.time()))
            outcomes[place] = _seen_from_elsewhere(future.result() if future.done() else WriteOutcome.FAILED)
        for outcome in (WriteOutcome.THROTTLED, WriteOutcome.NO_ROOM, WriteOutcome.EXISTS):
            self._counts[outcome.value] += outcomes.count(outcome)
        if cancelled and WriteOutcome.BUFFER_LOST not in outcomes:
            raise asyncio.CancelledError
        return outcomes

    async def _write_own(self, own: dict[int, Block], outcomes: list[WriteOutcome], deadline: float) -> bool:
        """Stores blocks that nobody else stores now. Whether the task was cancelled; all is settled all the same."""
        extents: dict[int, tuple[Slab, int]] = {}
        cancelled = False
        try:
            async with asyncio.timeout_at(deadline):
                await self._allocate(own, outcomes, extents)
            given_up = not self._serves()  # it failed, or was closed, while room was made
        except TimeoutError:
            given_up = True
        except asyncio.CancelledError:
            given_up = cancelled = True
        if given_up:
            for slab, extent in extents.values():
                self._books.give_back(slab, extent)
            return cancelled
        if not extents:
            return False
        pieces, files = [], []
        for place, (slab, extent) in extents.items():
            key, buffer = own[place]
            pieces.append(Piece(key, buffer, slab.number, extent, self._books.next_sequence(), place))
            files.append((slab.fd, slab.extent_bytes))
        ended = await run_batch(self._threads, Lane.WRITE, self._lanes, self._mover.write, pieces, files, deadline)
        stored: dict[int, Entry] = {}
        for place, code in ended.moved:
            entry = self._enter(own[place], *extents[place], code)
            if entry is not None:
                outcomes[place] = WriteOutcome.STORED
                stored[place] = entry
        # Before this no eviction knows them.
        self._books.touch([stored[place] for place in sorted(stored)])
        for place in ended.withdrawn:
            self._books.give_back(*extents[place])
            outcomes[place] = WriteOutcome.THROTTLED
        for job, places in ended.hung:
            self._health.lose_call(job.future)
            held = [extents[place] for place in places]
            job.future.add_done_callback(functools.partial(self._came_back, held))
            for place in places:
                outcomes[place] = WriteOutcome.BUFFER_LOST
        if ended.hung:
            self._health.give_up(errno.ETIMEDOUT, "writing")
        return ended.cancelled

    def _came_back(self, extents: Extents, call: asyncio.Future[Results]) -> None:
        for slab, extent in extents:
            self._committer.spoiled(slab, extent)

    async def _allocate(
        self, own: dict[int, Block], outcomes: list[WriteOutcome], extents: dict[int, tuple[Slab, int]]
    ) -> None:
        """Finds an extent for each block, as far as there is room. `extents` is filled also where this is given up."""
        by_size: dict[int, list[int]] = {}
        for place, (_, buffer) in own.items():
            by_size.setdefault(extent_bytes_for(len(buffer)), []).append(place)
        for extent_bytes, places in by_size.items():
            found: Extents = []
            try:
                await self._room.find(extent_bytes, len(places), found)
            finally:
                extents.update(zip(places, found, strict=False))
            # A medium that failed meanwhile gave no answer about room.
            if self._serves() and not self._committer.suspect:
                for place in places[len(found) :]:
                    outcomes[place] = WriteOutcome.NO_ROOM

    def _enter(self, block: Block, slab: Slab, extent: int, code: int) -> Entry | None:
        key, buffer = block
        if code == MOVED and not slab.dead:
            entry = self._books.settle(key, slab, extent, len(buffer))
            self._committer.stored(entry)
            self._counts["writes"] += 1
            self._counts["write_bytes"] += len(buffer)
            return entry
        self._committer.spoiled(slab, extent)
        if code != MOVED:
            self._counts["write_errors"] += 1
            self._health.write_failed(code, "writing a block", size_bytes=len(buffer), slab=slab.number, extent=extent)
        return None


def _seen_from_elsewhere(outcome: WriteOutcome) -> WriteOutcome:
    """What a store of a block is told that another call was storing already. Its own buffer was never touched."""
    if outcome is WriteOutcome.STORED:
        return WriteOutcome.EXISTS
    return WriteOutcome.FAILED if outcome is WriteOutcome.BUFFER_LOST else outcome
