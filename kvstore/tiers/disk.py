"""The disk tier: blocks in preallocated slab files, moved with O_DIRECT between them and the caller's buffers.

What its answers mean
    STORED
        The bytes were handed to the medium and a read finds them. They are durable with the next group commit, which
        begins within `commit_interval_s`: fdatasync of the slabs, then the index. sync() waits for it, close() does it.
    delete, delete_namespace
        Return once the index on disk has forgotten the blocks (or could not be made to; then the tier is degraded).
    Reads
        Every block that is handed out was checked: length, name and place by the footer of its extent, bytes by their
        xxh3. What fails is read once more, by itself; then it is forgotten.
What a crash leaves
    The index on disk never names an extent whose bytes were not synced before, and an extent is written again only
    after the index on disk has ceased to name it. Should a medium break that promise (a lost or misdirected write), the
    footer does not fit and the block is a miss.
Faults
    See disk_health: no bytes in (degraded), nothing at all (failed), looked after by a probe until it is well again. A
    medium that does not even let itself be opened is tried again in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvstore.blocks import DIGEST_BYTES
from kvstore.clock import Clock
from kvstore.errors import ConfigError
from kvstore.log import get_logger
from kvstore.tier import Held, ReadOutcome, Tier, TierNamespace, TierState, WriteOutcome
from kvstore.tiers.disk_commit import Committer
from kvstore.tiers.disk_folder import PROBE_FILE, DiskFolder
from kvstore.tiers.disk_health import Health
from kvstore.tiers.disk_holder import Holder
from kvstore.tiers.disk_index import DiskIndex
from kvstore.tiers.disk_keeper import Keeper
from kvstore.tiers.disk_load import FIXED_BYTES, Loaded, load
from kvstore.tiers.disk_reader import Reader
from kvstore.tiers.disk_room import Room
from kvstore.tiers.disk_stats import tier_stats
from kvstore.tiers.disk_writer import Writer
from kvstore.tiers.files import FileIO
from kvstore.tiers.io_threads import IoThreads, Lane
from kvstore.tiers.slabs import Books, Entry
from kvstore.tiers.transfer import Mover

#: Least budget: what is fixed, and a few blocks.
CAPACITY_BYTES_MIN: Final = 4 << 20
#: How long open() waits for a medium that does not answer before it goes on without, and close() for one that hangs.
_OPEN_S: Final = 5.0
_CLOSE_S: Final = 5.0
#: Blocks that a loop over the whole index handles before others may run.
_STEP: Final = 4096
#: How often an index that cannot be read is tried again before it is built anew from the footers: what cannot be read
#: of those, either, is lost then.
_TRIES_MAX: Final = 3
#: Removals that are remembered by name while the medium does not answer; beyond that everything on it is removed.
_OWED_MAX: Final = 262_144


class DiskTier(Tier):
    """See the module. All methods on one event loop."""

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        clock: Clock,
        *,
        name: str = "disk",
        read_threads: int = 8,
        write_threads: int = 8,
        read_queue_blocks: int = 65536,
        write_queue_bytes: int = 256 << 20,
        commit_interval_s: float = 0.05,
        recency_interval_s: float = 60.0,
        probe_interval_s: float = 1.0,
        hang_s: float = 30.0,
        prewrite: bool = True,
        io: FileIO | None = None,
    ) -> None:
        """Nothing is touched before open().

        Args:
            directory: Made where there is none; for this tier alone.
            capacity_bytes: Hard budget for everything in the directory.
            read_threads, write_threads: How many transfers go on at a time. A thread hashes, too, so it takes more of
                them than the depth at which the device is at its limit (4; bench/disk.py).
            read_queue_blocks: Loads beyond this many that wait fail at once.
            write_queue_bytes: Stores beyond this many that wait are THROTTLED.
            commit_interval_s: Longest time before a group commit begins.
            recency_interval_s: How often the order of use is kept; a crash loses that much of it.
            probe_interval_s: First wait before a tier that is not well is looked at; doubles up to 30 s.
            hang_s: A commit that takes longer means that the medium hangs.
            prewrite: Whether new slabs are written ahead of their first use.
            io: System calls; tests put faults here.

        Raises:
            ConfigError: the budget is too small.
        """
        if capacity_bytes < CAPACITY_BYTES_MIN:
            raise ConfigError(
                f"the budget of {directory} is {capacity_bytes} bytes: a disk tier needs at least {CAPACITY_BYTES_MIN}"
            )
        self.name = name
        self.directory = directory
        self.capacity_bytes = capacity_bytes
        self.clock = clock
        self._io = io or FileIO()
        self._lanes = {Lane.READ: read_threads, Lane.WRITE: write_threads, Lane.COMMIT: 1, Lane.KEEP: 1}
        self._read_queue_blocks = read_queue_blocks
        self._write_queue_bytes = write_queue_bytes
        self._commit_interval_s = commit_interval_s
        self.recency_interval_s = recency_interval_s
        self.hang_s = hang_s
        self.prewrite = prewrite
        self.folder = DiskFolder(directory, self._io)
        self.health = Health(name, clock, probe_interval_s)
        self._log = get_logger(__name__)
        self.counts: Counter[str] = Counter()
        self._namespaces: dict[bytes, TierNamespace] = {}
        self._loaded = asyncio.Event()
        #: The medium answered at all: the directory is held, or is known not to be.
        self._answered = asyncio.Event()
        self._closed = False
        #: What was removed while there was no index to remove it from.
        self._owed_keys: set[bytes] = set()
        self._owed_digests: set[bytes | None] = set()
        self._held = False
        self._tries = 0
        self._bringing_up: asyncio.Task[None] | None = None
        self._threads: IoThreads | None = None
        self._keeper: Keeper | None = None
        # Set together once the directory was read.
        self.books = Books(0)
        self.committer: Committer | None = None
        self.room: Room | None = None
        self.reader: Reader | None = None
        self.holder: Holder | None = None
        self.writer: Writer | None = None
        self.index: DiskIndex | None = None
        self.mover = Mover(self._io, 1)
        self.rebuilt = ""
        self.load_s = 0.0

    # -- life --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> TierState:
        if self.health.state is TierState.OK and self.room is None:
            return TierState.LOADING
        return self.health.state

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._threads = IoThreads(f"kvstore-{self.name}", self._lanes)
        bringing_up = self._start_bringing_up()
        answered = loop.create_task(self._answered.wait())
        await asyncio.wait({answered}, timeout=_OPEN_S)
        if not answered.done():
            answered.cancel()
            self.health.give_up(errno.ETIMEDOUT, f"opening {self.directory}")
        elif bringing_up.done() and (failure := bringing_up.exception()) is not None:
            self._closed = True
            await asyncio.to_thread(self._threads.close, _CLOSE_S)
            raise failure
        self._keeper = Keeper(self)

    def _start_bringing_up(self) -> asyncio.Task[None]:
        if self._bringing_up is None or self._bringing_up.done():
            self._bringing_up = asyncio.get_running_loop().create_task(self._bring_up(), name=f"{self.name} load")
            self._bringing_up.add_done_callback(self._brought_up)
        return self._bringing_up

    def _brought_up(self, task: asyncio.Task[None]) -> None:
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            self.health.give_up(errno.EINVAL, f"opening {self.directory}: {failure}")
            if not isinstance(failure, ConfigError):
                self._log.error("cannot read the directory", tier=self.name, exc_info=failure)
        self._answered.set()

    async def _bring_up(self) -> None:
        """Takes the directory, reads it, goes into service.

        Raises:
            ConfigError: it can never be ours.
        """
        begun = self.clock.monotonic()
        try:
            if not self._held:
                await self.threads.call(Lane.KEEP, self.folder.hold)
                self._held = True
                self._answered.set()
            give_up_index = self._tries >= _TRIES_MAX
            loaded = await self.threads.call(
                Lane.KEEP, lambda: load(self.folder, self.capacity_bytes, give_up_index=give_up_index)
            )
        except OSError as error:
            # An index is given up for its own sake alone, not for want of descriptors or room.
            self._tries = self._tries + 1 if error.errno == errno.EIO else 0
            # Nobody knows what is there: nothing is served until a later try gets through.
            self.health.give_up(error.errno or errno.EIO, f"opening {self.directory}: {error}")
            return
        self._adopt(loaded)
        self.load_s = self.clock.monotonic() - begun

    def _adopt(self, loaded: Loaded) -> None:
        self.books = loaded.books
        self.index = loaded.index
        self.mover = Mover(self._io, self.folder.medium.memory_align)
        self.rebuilt = loaded.rebuilt
        self.counts["index_dropped"] += loaded.dropped
        self.committer = Committer(
            loaded.books,
            loaded.index,
            loaded.ledger,
            self.folder,
            self.threads,
            self.clock,
            self._commit_interval_s,
            self.health,
        )
        self.room = Room(
            loaded.books, self.folder, self.threads, self.committer, self.health, self.clock, self._count_eviction
        )
        self.reader = Reader(
            self.books,
            self.committer,
            self.mover,
            self.threads,
            self._lanes[Lane.READ],
            self._read_queue_blocks,
            self.health,
            self.counts,
        )
        self.holder = Holder(self.books, self.reader, self.folder, self.threads, self.health)
        self.writer = Writer(
            self.books,
            self.room,
            self.committer,
            self.mover,
            self.threads,
            self._lanes[Lane.WRITE],
            self._write_queue_bytes,
            self.health,
            self.counts,
            lambda: self._serves,
        )
        for namespace in self._namespaces.values():  # remembered while the index was read
            self.committer.remember(namespace.digest, namespace)
        self._namespaces = {namespace.digest: namespace for namespace in loaded.namespaces} | self._namespaces
        self._pay_owed()
        self.health.recovered()
        self._loaded.set()
        if loaded.rebuilt:
            self._log.warning(
                "index built anew",
                tier=self.name,
                why=loaded.rebuilt,
                blocks=len(loaded.books.index),
                directory=str(self.directory),
            )
        if not self.folder.medium.direct:
            self._log.warning("buffered disk I/O", tier=self.name, why=self.folder.medium.direct_note)

    async def close(self) -> None:
        if self._threads is None or self._closed:
            return
        self._closed = True
        if self._keeper is not None:
            await self._keeper.stop()
        if self._bringing_up is not None and not self._bringing_up.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._bringing_up), _CLOSE_S)
        if self.committer is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settle(), _CLOSE_S)
            self.committer.stop()
        hangs = not await asyncio.to_thread(self._threads.close, _CLOSE_S if self.state is TierState.OK else 0.5)
        if hangs:
            # A thread may still use the descriptors and the index: they go with the process.
            self._log.warning("closed while a call hangs", tier=self.name)
            return
        if self.index is not None:
            self.index.close()
        await asyncio.to_thread(self.folder.close_files, list(self.books.slabs.values()))
        self.folder.release()

    async def _settle(self) -> None:
        """Waits for what is under way, then makes all of it durable."""
        assert self.committer is not None
        while self.writer is not None and self.writer.writing:
            await asyncio.wait(list(self.writer.writing.values()))
        await self.committer.flush()
        if self.health.state is not TierState.FAILED:
            await self.keep_recency()

    async def keep_recency(self) -> None:
        """Writes the order of use down."""
        assert self.committer is not None
        try:
            await self.committer.keep_ledger()
        except OSError as error:
            self.health.note(error.errno or errno.EIO, "keeping the order of use")

    async def retry_open(self) -> None:
        """Another try to bring up a medium that would not be opened."""
        await asyncio.wait({self._start_bringing_up()})

    @property
    def threads(self) -> IoThreads:
        """Only between open() and close()."""
        assert self._threads is not None, "the tier is not open"
        return self._threads

    @property
    def io_threads(self) -> IoThreads | None:
        """None before open()."""
        return self._threads

    @property
    def probe_file(self) -> Path:
        return self.directory / PROBE_FILE

    async def tend(self) -> None:
        """What is done now and then, at once: probes, checks of the files, pre-writing. Runs by itself, too."""
        assert self._keeper is not None
        await self._keeper.tend()

    async def sync(self) -> bool:
        """Waits until all that was STORED or deleted before the call is durable. False: the medium does not take it."""
        return self.committer is not None and await self.committer.flush()

    async def wait_loaded(self) -> None:
        """Waits until what an earlier process left was read."""
        await self._loaded.wait()

    # -- namespaces --------------------------------------------------------------------------------------------------

    def remember(self, namespace: TierNamespace) -> None:
        if self._namespaces.get(namespace.digest) == namespace:
            return
        self._namespaces[namespace.digest] = namespace
        self._forget_texts()
        if self.committer is not None and namespace.digest in self._namespaces:
            self.committer.remember(namespace.digest, namespace)

    def _forget_texts(self) -> None:
        """Texts have a budget of their own. The oldest go first; their blocks stay."""
        total = sum(len(namespace.identity) for namespace in self._namespaces.values())
        while total > FIXED_BYTES // 8:
            digest, oldest = next(iter(self._namespaces.items()))
            del self._namespaces[digest]
            total -= len(oldest.identity)
            if self.committer is not None:
                self.committer.remember(digest, None)

    def namespaces(self) -> list[TierNamespace]:
        return list(self._namespaces.values())

    # -- blocks ------------------------------------------------------------------------------------------------------

    @property
    def _serves(self) -> bool:
        return self.room is not None and not self._closed and self.health.state is not TierState.FAILED

    async def stat(self, keys: Sequence[bytes]) -> list[int | None]:
        if not self._serves:
            return [None] * len(keys)
        index = self.books.index
        return [None if (entry := index.get(key)) is None else entry.size_bytes for key in keys]

    async def read(self, blocks: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[ReadOutcome]:
        if self.reader is None or not self._serves:
            return [ReadOutcome.ABSENT] * len(blocks)
        return await self.reader.read(blocks, deadline_s)

    async def write(self, blocks: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[WriteOutcome]:
        if self.state is TierState.LOADING and not self._closed:
            self.counts["throttled"] += len(blocks)
            return [WriteOutcome.THROTTLED] * len(blocks)
        if self.writer is None or self.state is not TierState.OK or self._closed:
            return [WriteOutcome.FAILED] * len(blocks)
        return await self.writer.write(blocks, deadline_s)

    async def delete(self, keys: Sequence[bytes]) -> int:
        if self.room is None and not self._closed and self.health.state is TierState.OK:
            await self._loaded.wait()  # what is not read yet must not come back either
        if self.committer is None:
            self._owe(keys)
            return 0
        found = 0
        for key in keys:
            entry = self.books.index.get(key)
            if entry is not None:
                self.books.remove(entry)
                self.committer.removed(entry)
                found += 1
        if found or self.committer.spoils:
            await self.committer.flush()
        return found

    async def delete_namespace(self, digest: bytes | None) -> int:
        if self.room is None and not self._closed and self.health.state is TierState.OK:
            await self._loaded.wait()
        if self.committer is None:
            self._owed_digests.add(digest)
            return 0
        assert digest is None or len(digest) == DIGEST_BYTES
        found = 0
        for slab in list(self.books.slabs.values()):
            for at in range(0, slab.extents, _STEP):
                for entry in slab.entries[at : at + _STEP]:
                    if entry is not None and (digest is None or entry.key.startswith(digest)):
                        self.books.remove(entry)
                        self.committer.removed(entry)
                        found += 1
                await asyncio.sleep(0)
        for known in [digest] if digest is not None else list(self._namespaces):
            if self._namespaces.pop(known, None) is not None:
                self.committer.remember(known, None)
        await self.committer.flush()
        return found

    def _owe(self, keys: Sequence[bytes]) -> None:
        """The medium does not answer: what is removed now is removed once its index is read, before anybody gets it."""
        self._owed_keys.update(keys)
        if len(self._owed_keys) > _OWED_MAX:
            self._owed_keys.clear()
            self._owed_digests.add(None)

    def _pay_owed(self) -> None:
        """Removes what was to be removed while the medium did not answer."""
        assert self.committer is not None
        digests = tuple(digest for digest in self._owed_digests if digest is not None)
        for key in list(self.books.index) if self._owed_digests else self._owed_keys:
            entry = self.books.index.get(key)
            owed = None in self._owed_digests or key in self._owed_keys or key.startswith(digests)
            if entry is not None and owed:
                self.books.remove(entry)
                self.committer.removed(entry)
        self._owed_keys.clear()
        self._owed_digests.clear()

    async def hold(self, keys: Sequence[bytes], deadline_s: float) -> list[Held | None]:
        if self.holder is None or not self._serves:
            return [None] * len(keys)
        return await self.holder.hold(keys, deadline_s)

    def let_go(self, held: Held) -> None:
        if self.holder is not None:
            self.holder.let_go(held)

    def touch(self, keys: Sequence[bytes]) -> None:
        index = self.books.index
        self.books.touch([entry for key in keys if (entry := index.get(key)) is not None and entry.tick])

    def scan(self, digest: bytes | None = None) -> Iterator[tuple[bytes, int]]:
        for slab in list(self.books.slabs.values()) if self._serves else []:
            for entry in list(slab.entries):  # one slab at a time: all of them would hold others up
                if entry is not None and (digest is None or entry.key.startswith(digest)):
                    yield entry.key, entry.size_bytes

    def _count_eviction(self, entry: Entry) -> None:
        self.counts["evicted"] += 1
        self.counts["evicted_bytes"] += entry.size_bytes

    def stats(self) -> Mapping[str, Any]:
        return tier_stats(self)
