"""The way of a batch of loads through a disk tier."""

from __future__ import annotations

import asyncio
import errno
import functools
from collections import Counter
from collections.abc import Sequence

from kvstore.tier import ReadOutcome
from kvstore.tiers.disk_batch import Results, as_bytes, run_batch
from kvstore.tiers.disk_commit import Committer
from kvstore.tiers.disk_health import Health
from kvstore.tiers.io_threads import IoThreads, Lane
from kvstore.tiers.slabs import Books, Entry
from kvstore.tiers.transfer import MISMATCH, MOVED, SHORT, Mover, Piece


class Reader:
    """Reads blocks, doubts them, forgets those that are wrong. On the tier's loop.

    Attributes:
        waiting: Blocks that are being read or wait for it.
    """

    def __init__(
        self,
        books: Books,
        committer: Committer,
        mover: Mover,
        threads: IoThreads,
        lanes: int,
        queue_blocks: int,
        health: Health,
        counts: Counter[str],
    ) -> None:
        self._books = books
        self._committer = committer
        self._mover = mover
        self._threads = threads
        self._lanes = lanes
        self._queue_blocks = queue_blocks
        self._health = health
        self._counts = counts
        self.waiting = 0

    async def read(self, blocks: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[ReadOutcome]:
        """As Tier.read, of a tier that serves."""
        deadline = asyncio.get_running_loop().time() + deadline_s
        outcomes = [ReadOutcome.ABSENT] * len(blocks)
        entries: dict[int, Entry] = {}
        for place, (key, buffer) in enumerate(blocks):
            entry = self._books.index.get(key)
            if entry is None or entry.size_bytes != buffer.nbytes:
                continue
            if self.waiting >= self._queue_blocks:
                self._counts["reads_refused"] += 1
                outcomes[place] = ReadOutcome.FAILED
                continue
            self.waiting += 1
            self._books.reading(entry)
            entries[place] = entry
        if not entries:
            return outcomes
        # In the order of the medium, so that neighbours are found.
        order = sorted(entries, key=lambda place: (entries[place].slab.number, entries[place].extent))
        pieces, files = [], []
        for place in order:
            entry = entries[place]
            slab = entry.slab
            pieces.append(Piece(entry.key, as_bytes(blocks[place][1]), slab.number, entry.extent, 0, place))
            files.append((slab.fd, slab.extent_bytes))
        ended = await run_batch(self._threads, Lane.READ, self._lanes, self._mover.read, pieces, files, deadline)
        # Meanwhile blocks may have been deleted or evicted; their extents wait for _let_go.
        for place, code in ended.moved:
            self._let_go(entries[place])
            outcomes[place] = self.judge(entries[place], code)
        for place in ended.withdrawn:
            self._let_go(entries[place])
            outcomes[place] = ReadOutcome.FAILED
        for job, places in ended.hung:
            self._health.lose_call(job.future)
            held = [entries[place] for place in places]
            job.future.add_done_callback(functools.partial(self._came_back, held))
            for place in places:
                outcomes[place] = ReadOutcome.BUFFER_LOST
        if ended.hung:
            self._health.give_up(errno.ETIMEDOUT, "reading")
        elif ended.cancelled:
            raise asyncio.CancelledError
        return outcomes

    def _came_back(self, entries: list[Entry], call: asyncio.Future[Results]) -> None:
        for entry in entries:
            self._let_go(entry)

    def _let_go(self, entry: Entry) -> None:
        self.waiting -= 1
        self._books.read_done(entry.slab, entry.extent)

    def judge(self, entry: Entry, code: int) -> ReadOutcome:
        """What a read with this result (of kvstore.tiers.transfer, or an errno) means; a block that is wrong goes."""
        if code == MOVED:
            self._health.read_fine()
            self._counts["reads"] += 1
            self._counts["read_bytes"] += entry.size_bytes
            return ReadOutcome.OK
        if code > 0:
            self._health.read_failed(code, "reading a block", slab=entry.slab.number, extent=entry.extent)
            self._counts["read_errors"] += 1
            if code != errno.EIO:
                return ReadOutcome.FAILED
        else:
            assert code in (SHORT, MISMATCH)
            why = "the file is too short" if code == SHORT else "not what was written"
            self._health.note(errno.EBADMSG, f"damaged block: {why}", slab=entry.slab.number, extent=entry.extent)
        self._counts["damaged"] += 1
        if self._books.index.get(entry.key) is entry:
            self._books.remove(entry)
            self._committer.removed(entry, reuse=code != errno.EIO)
            if code == errno.EIO:
                self._books.retire(entry.slab)
        return ReadOutcome.DAMAGED
