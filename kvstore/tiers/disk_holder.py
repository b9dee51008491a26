"""Pins blocks of a disk tier where they lie, for readers that fetch the bytes themselves (a GPU's DMA, say)."""

from __future__ import annotations

import asyncio
import errno
import functools
from collections.abc import Sequence
from typing import Final

from kvstore.tier import Held
from kvstore.tiers.disk_batch import GRACE_S
from kvstore.tiers.disk_folder import DiskFolder
from kvstore.tiers.disk_health import Health
from kvstore.tiers.disk_reader import Reader
from kvstore.tiers.extent import ALIGN_BYTES, FOOTER_BYTES, Footer, parse_footer
from kvstore.tiers.files import aligned_memory
from kvstore.tiers.io_threads import IoThreads, Job, Lane
from kvstore.tiers.slabs import Books, Entry
from kvstore.tiers.transfer import MISMATCH, MOVED, SHORT

#: Footers that one thread reads in a row.
_CHUNK: Final = 32

#: A footer, or why there is none: as the results of kvstore.tiers.transfer.
Found = Footer | int


class Holder:
    """On the tier's loop.

    Attributes:
        held_blocks: How many are pinned now.
    """

    def __init__(self, books: Books, reader: Reader, folder: DiskFolder, threads: IoThreads, health: Health) -> None:
        self._books = books
        self._reader = reader
        self._folder = folder
        self._threads = threads
        self._health = health
        self.held_blocks = 0

    async def hold(self, keys: Sequence[bytes], deadline_s: float) -> list[Held | None]:
        """As Tier.hold, of a tier that serves. The footers are read: they have the checksums, and show that the index
        is right.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        entries = {place: entry for place, key in enumerate(keys) if (entry := self._books.index.get(key)) is not None}
        for entry in entries.values():
            self._take(entry)
        places = sorted(entries, key=lambda place: (entries[place].slab.number, entries[place].extent))
        jobs: list[tuple[Job[list[Found]], list[int]]] = []
        for at in range(0, len(places), _CHUNK):
            chunk = places[at : at + _CHUNK]
            # The call keeps its own list: it may go on when nobody waits any more.
            jobs.append((self._threads.submit(Lane.READ, self._call([entries[place] for place in chunk])), chunk))
        answers: list[Held | None] = [None] * len(keys)
        try:
            await self._until([job for job, _ in jobs], deadline)
            begun = [job for job, _ in jobs if not job.future.done() and not self._threads.withdraw(job)]
            await self._until(begun, loop.time() + GRACE_S)
            for job, chunk in jobs:
                if job.future.done() and not job.future.cancelled():
                    for place, found in zip(chunk, job.future.result(), strict=True):
                        answers[place] = self._judge(entries[place], found)
        except asyncio.CancelledError:
            answers = [None] * len(keys)
            raise
        finally:
            for job, chunk in jobs:
                idle = [entries[place] for place in chunk if answers[place] is None]
                if job.future.done() or self._threads.withdraw(job):
                    self._give_all(idle)
                else:
                    job.future.add_done_callback(functools.partial(self._came_back, idle))
        hung = [job for job, _ in jobs if not job.future.done()]
        for job in hung:
            self._health.lose_call(job.future)
        if hung:
            self._health.give_up(errno.ETIMEDOUT, "reading footers")
        return answers

    def let_go(self, held: Held) -> None:
        """As Tier.let_go."""
        self._give_all([held.hold])

    def _take(self, entry: Entry) -> None:
        self._books.reading(entry)
        self.held_blocks += 1

    def _give_all(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._books.read_done(entry.slab, entry.extent)
        self.held_blocks -= len(entries)

    def _came_back(self, entries: list[Entry], call: asyncio.Future[list[Found]]) -> None:
        self._give_all(entries)

    def _judge(self, entry: Entry, found: Found) -> Held | None:
        if self._books.index.get(entry.key) is not entry:
            return None  # deleted or evicted meanwhile
        right = isinstance(found, Footer) and (found.key, found.size_bytes) == (entry.key, entry.size_bytes)
        if isinstance(found, int) or not right:
            self._reader.judge(entry, found if isinstance(found, int) else MISMATCH)
            return None
        self._health.read_fine()
        slab = entry.slab
        path = self._folder.slab_path(slab.number, slab.extent_bytes)
        return Held(str(path.absolute()), entry.extent * slab.extent_bytes, entry.size_bytes, found.check, entry)

    def _call(self, entries: list[Entry]) -> FootersCall:
        places = [(entry.slab.fd, (entry.extent + 1) * entry.slab.extent_bytes) for entry in entries]
        expected = [(entry.slab.number, entry.extent) for entry in entries]
        return FootersCall(self._folder, places, expected)

    @staticmethod
    async def _until(jobs: list[Job[list[Found]]], deadline: float) -> None:
        waiting = {job.future for job in jobs}
        if waiting:
            await asyncio.wait(waiting, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))


class FootersCall:
    """Reads some footers, on a thread."""

    def __init__(self, folder: DiskFolder, places: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
        self._folder = folder
        self._places = places
        self._expected = expected

    def __call__(self) -> list[Found]:
        page = aligned_memory(ALIGN_BYTES)
        return [
            self._read(page, fd, end, expected)
            for (fd, end), expected in zip(self._places, self._expected, strict=True)
        ]

    def _read(self, page: memoryview, fd: int, end: int, expected: tuple[int, int]) -> Found:
        code = MOVED
        for _ in range(2):  # as blocks: what fails is tried once more
            try:
                if self._folder.io.preadv(fd, [page], end - ALIGN_BYTES) != ALIGN_BYTES:
                    code = SHORT
                    continue
            except OSError as error:
                code = error.errno or errno.EIO
                continue
            footer = parse_footer(page[ALIGN_BYTES - FOOTER_BYTES :])
            if footer is not None and (footer.slab, footer.extent) == expected:
                return footer
            code = MISMATCH
        return code
