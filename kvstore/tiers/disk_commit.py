"""Makes the books of a disk tier durable, in groups: data first, then the index that names it.

Order within a round
    fdatasync of every slab that new entries lie in; what was removed goes to the ledger, so that it stays away even if
    the index is lost; then one LMDB transaction with what was removed and what was added, synced by its commit. Only
    then may extents of removed entries be written again. So the index on disk never names bytes that are not there, nor
    an extent that holds something else.
Threads
    Books and queues belong to the loop; a round's I/O runs on the one commit thread. While it runs, new changes gather
    for the next round.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
from array import array
from typing import Final, Protocol

from kvstore.clock import Clock
from kvstore.tier import TierNamespace
from kvstore.tiers.disk_folder import DiskFolder
from kvstore.tiers.disk_index import DiskIndex, Record
from kvstore.tiers.disk_ledger import MARK_WORDS, Ledger, Snapshot
from kvstore.tiers.disk_load import record_of, snapshot_of
from kvstore.tiers.index_check import IndexDamaged
from kvstore.tiers.io_threads import IoThreads, Lane
from kvstore.tiers.slabs import SEQUENCE_MASK, Books, Entry, Slab

#: Entries of one round. A transaction of more keeps the next one waiting too long.
ROUND_MAX: Final = 8192
#: Extents of a slab that are given back before others may run.
_FREED_STEP: Final = 4096


class Faults(Protocol):
    """Who is told when a round fails."""

    def write_failed(self, code: int, what: str) -> None:
        """An errno, and what was tried."""


@dataclasses.dataclass(slots=True)
class _Round:
    """What one round takes."""

    puts: list[Entry]
    deletes: list[bytes]
    freed: dict[Slab, list[int]]
    marks: array[int]
    snapshot: Snapshot | None
    namespaces: dict[bytes, TierNamespace | None]
    upto: int


class Committer:
    """See the module. Owned by the loop.

    Attributes:
        rounds: How many were committed.
        spoils: There are extents, not in the ledger yet, whose blocks nobody was told of.
        unmarked: Removals that only the index knows of, since the disk has no room for the ledger.
        suspect: A commit failed: the index has to be opened anew before the next one.
        running_since: Clock reading of the start of the round that runs; None while none does.
    """

    def __init__(
        self,
        books: Books,
        index: DiskIndex,
        ledger: Ledger,
        folder: DiskFolder,
        threads: IoThreads,
        clock: Clock,
        interval_s: float,
        faults: Faults,
    ) -> None:
        self._books = books
        self._index = index
        self._ledger = ledger
        self._folder = folder
        self._threads = threads
        self._clock = clock
        self._interval_s = interval_s
        self._faults = faults
        self._puts: dict[bytes, Entry] = {}
        self._deletes: dict[bytes, None] = {}
        self._freed: dict[Slab, list[int]] = {}
        self._marks: array[int] = array("Q")
        self._namespaces: dict[bytes, TierNamespace | None] = {}
        self._noted = 0
        self._committed = 0
        self._timer: asyncio.TimerHandle | None = None
        self._round: asyncio.Task[bool] | None = None
        self.rounds = 0
        self.unmarked = 0
        self.spoils = False
        self.suspect = False
        self.running_since: float | None = None
        self.closed = False

    @property
    def pending(self) -> int:
        """Changes that are not durable yet."""
        return self._noted - self._committed

    def stored(self, entry: Entry) -> None:
        """An entry was settled; its bytes were handed to the medium."""
        self._puts[entry.key] = entry
        self._note()

    def removed(self, entry: Entry, *, reuse: bool = True) -> None:
        """An entry was removed from the books. Its extent is free once no index names it, unless reuse is False."""
        self._puts.pop(entry.key, None)
        self._deletes[entry.key] = None
        slab, extent = entry.slab, entry.extent
        if reuse:
            self._freed.setdefault(slab, []).append(extent)
        if not slab.dead:  # else its file goes, and all that is in it
            self._marks.extend((slab.number, extent, slab.used[extent] & SEQUENCE_MASK))
        self._note()

    def spoiled(self, slab: Slab, extent: int) -> None:
        """A write to an extent in flight came to nothing, or nobody knows to what. No reason for a round by itself."""
        self._marks.extend((slab.number, extent, self._books.spoil(slab, extent)))
        self._noted += 1
        self.spoils = True

    def remember(self, digest: bytes, namespace: TierNamespace | None) -> None:
        """A namespace to keep, or to forget."""
        self._namespaces[digest] = namespace
        self._note()

    def _note(self) -> None:
        self._noted += 1
        self._arm()

    def _arm(self) -> None:
        if self._timer is None and not self.closed:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._due)

    def _due(self) -> None:
        self._timer = None
        if self.pending and not self.closed and not self.suspect:
            self._start()

    def _start(self) -> asyncio.Task[bool]:
        if self._round is None:
            self._round = asyncio.get_running_loop().create_task(self._run())
        return self._round

    async def flush(self) -> bool:
        """Makes durable all that was noted before the call. False: a round failed; what it had is tried again later."""
        if self.suspect:
            return False
        target = self._noted
        while self._committed < target:
            # The loop may have noted more meanwhile; only the target counts.
            if not await asyncio.shield(self._start()):
                return False
        return True

    async def _run(self) -> bool:
        self.running_since = self._clock.monotonic()
        try:
            return await self._commit(self._taken())
        finally:
            self.running_since = None
            self._round = None
            # After a failure the tier says when to try again: it looks whether the medium works first.
            if self.pending and not self.suspect:
                self._arm()

    def _taken(self) -> _Round:
        """What is pending. Puts beyond the limit stay; deletes go first, all of them, as space waits for them."""
        keys = list(self._puts)[:ROUND_MAX]
        whole = len(keys) == len(self._puts)
        taken = _Round(
            [self._puts.pop(key) for key in keys],
            list(self._deletes),
            self._freed,
            self._marks,
            snapshot_of(self._books) if len(self._marks) // MARK_WORDS > self._ledger.room else None,
            self._namespaces,
            self._noted if whole else self._committed,
        )
        self._deletes, self._freed, self._marks, self._namespaces = {}, {}, array("Q"), {}
        self.spoils = False
        return taken

    async def _commit(self, taken: _Round) -> bool:
        failed = await self._synced({entry.slab.number: entry.slab for entry in taken.puts})
        puts = []
        for entry in taken.puts:
            if self._books.index.get(entry.key) is not entry:
                continue  # it left meanwhile
            if entry.slab.number in failed:
                # The kernel may have thrown the bytes away when it reported the error: nobody can vouch for them.
                self._books.remove(entry)
                self.removed(entry)
            else:
                puts.append(entry)
        try:
            await self._threads.call(Lane.COMMIT, lambda: self._write(taken, [record_of(entry) for entry in puts]))
        except Exception as error:  # memory may be short, and a file that is cut off shows in many ways
            self._untake(taken, puts)
            self.suspect = True
            code = error.errno if isinstance(error, OSError) else None
            self._faults.write_failed(code or errno.EIO, f"commit of the index: {error}")
            return False
        self._committed = max(self._committed, taken.upto)
        self.rounds += 1
        for slab, extents in sorted(taken.freed.items(), key=lambda item: item[0].number, reverse=True):
            # The next one is the last one, so that neighbours are given out one after the other, upwards.
            extents.sort(reverse=True)
            self._books.free(slab, extents)
            if len(extents) > _FREED_STEP:
                await asyncio.sleep(0)  # a whole namespace went: others may run
        return not failed

    def _write(self, taken: _Round, records: list[Record]) -> None:
        if taken.snapshot is not None:
            try:
                self._ledger.write(taken.snapshot)
                self.unmarked = 0
            except OSError as error:
                # Blocks have to make room for each other on a disk that others filled, too.
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self.unmarked += len(taken.marks) // MARK_WORDS
        elif taken.marks:
            self._ledger.append(taken.marks)
        namespaces = [digest if kept is None else kept for digest, kept in taken.namespaces.items()]
        self._index.commit(taken.deletes, records, namespaces)

    async def _synced(self, slabs: dict[int, Slab]) -> set[int]:
        """Numbers of the slabs whose bytes did not get to the medium."""
        failed: set[int] = set()

        def sync() -> list[tuple[int, OSError]]:
            errors = []
            for number, slab in slabs.items():
                if not slab.dead:
                    try:
                        if not slab.named:
                            self._folder.sync_names()
                            slab.named = True
                        self._folder.io.fdatasync(slab.fd)
                    except OSError as error:
                        errors.append((number, error))
            return errors

        if slabs:
            for number, error in await self._threads.call(Lane.COMMIT, sync):
                failed.add(number)
                self._faults.write_failed(error.errno or errno.EIO, f"fdatasync of slab {number}")
        return failed

    def _untake(self, taken: _Round, puts: list[Entry]) -> None:
        """A round that failed goes back in front of what came since."""
        self._deletes = dict.fromkeys(taken.deletes) | self._deletes
        for slab, extents in taken.freed.items():
            self._freed.setdefault(slab, []).extend(extents)
        self._marks = taken.marks + self._marks
        self._namespaces = taken.namespaces | self._namespaces
        for entry in puts:
            if self._books.index.get(entry.key) is entry:
                self._puts.setdefault(entry.key, entry)

    async def keep_ledger(self) -> None:
        """Writes down the order of use, and what is gone, as they are now.

        Raises:
            OSError: what was written before is still there.
        """
        snapshot = snapshot_of(self._books)
        # On the thread of the rounds: what they append afterwards is newer, and what they appended before is in here.
        await self._threads.call(Lane.COMMIT, lambda: self._ledger.write(snapshot))
        self.unmarked = 0

    @property
    def index_bytes(self) -> int:
        """Length of the file of the index."""
        return self._index.known_bytes

    def reserve_index(self, size_bytes: int) -> None:
        """Has the file system promise room for the index. Any thread, but for the loop's.

        Raises:
            OSError: ENOSPC above all.
        """
        try:
            self._index.reserve(lambda: self._folder.reserve_index(size_bytes))
        except IndexDamaged as damage:  # found out here; a commit will say so, too
            raise OSError(errno.ESTALE, f"index: {damage}") from None

    def replace_index(self, index: DiskIndex) -> None:
        """Goes on with an index that was opened anew; what is pending is tried again."""
        self._index = index
        self.suspect = False
        if self.pending:
            self._arm()

    def stop(self) -> None:
        """No further rounds by themselves."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
