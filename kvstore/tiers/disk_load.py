"""Reads what an earlier process left in the directory of a disk tier. Blocking: for a thread.

The books are built here from nothing and handed to the loop as a whole, so nobody sees them half read. With an index
that is gone or not whole they come from the footers of the extents instead; a footer that is whole is trusted as a
record is: until the first read, which checks everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import gc
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from kvstore.tier import TierNamespace
from kvstore.tiers.disk_fill import fill, tell_policies
from kvstore.tiers.disk_folder import DiskFolder
from kvstore.tiers.disk_index import (
    DATA_FILE,
    RECORD,
    RECORD_TYPE,
    Columns,
    DiskIndex,
    Record,
    read_columns,
    write_index,
)
from kvstore.tiers.disk_ledger import Ledger, Snapshot
from kvstore.tiers.extent import ALIGN_BYTES, FOOTER_BYTES, Footer, extent_bytes_for, parse_footer
from kvstore.tiers.files import aligned_memory
from kvstore.tiers.index_check import IndexDamaged
from kvstore.tiers.side_threads import SideThreads
from kvstore.tiers.slabs import GONE, INDEX_BYTES_PER_BLOCK, RAW, RECENCY_BYTES_PER_BLOCK, Books, Entry, Slab

#: Set aside for all that is neither slab nor record: LMDB's first pages, texts of namespaces, the small files.
FIXED_BYTES: Final = 1 << 20
#: Footers are read by this many threads, each waits for the medium most of the time.
_SCAN_THREADS: Final = 8
_SCAN_CHUNK: Final = 256
#: Blocks whose objects are worth being left out of collections for good.
_MANY: Final = 100_000


@dataclasses.dataclass(slots=True)
class Loaded:
    """What was found.

    Attributes:
        books, index, ledger: Ready to be used.
        namespaces: What was remembered.
        rebuilt: Why the index was built from footers; empty where it was whole.
        dropped: Records that pointed nowhere, or did not fit the budget.
    """

    books: Books
    index: DiskIndex
    ledger: Ledger
    namespaces: list[TierNamespace]
    rebuilt: str
    dropped: int


def map_bytes_for(capacity_bytes: int) -> int:
    """What LMDB may map: more than the budget ever lets the index grow to, for the smallest extents there are."""
    return FIXED_BYTES + capacity_bytes // ALIGN_BYTES * INDEX_BYTES_PER_BLOCK


def index_bytes_for(extents: int) -> int:
    """What the file of the index may take where there are so many extents."""
    return FIXED_BYTES // 2 + extents * (INDEX_BYTES_PER_BLOCK - RECENCY_BYTES_PER_BLOCK)


def load(folder: DiskFolder, capacity_bytes: int, *, give_up_index: bool = False) -> Loaded:
    """Builds the books from a directory that is held.

    Args:
        give_up_index: An index that the medium cannot read (EIO) is one that is lost.

    Raises:
        OSError: the medium does not work now.
    """
    slabs: list[Slab] = []
    try:
        slabs += (folder.open_slab(file) for file in folder.slab_files())
        why = _index_fault(folder, bool(slabs))
        if not why:
            try:
                return _build(folder, capacity_bytes, slabs, "", give_up_index)
            except IndexDamaged as damage:
                why = str(damage)
                folder.set_index_aside()
                for slab in slabs:
                    slab.forget()
        return _build(folder, capacity_bytes, slabs, why, give_up_index)
    except BaseException:
        for slab in slabs:
            slab.forget()  # it and its entries hold each other, and few collections look at what is old
            if slab.fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(slab.fd)
        raise


def _index_fault(folder: DiskFolder, slabs: bool) -> str:
    """Why there is no index to read, although there should be one. Until the new one is whole, index.damaged says that
    it is not.
    """
    if folder.damaged_index.exists():
        return "an earlier start did not finish building it anew"
    if slabs and not (folder.index_folder / DATA_FILE).exists():
        folder.set_index_aside()
        return "it is gone"
    return ""


def _build(folder: DiskFolder, capacity_bytes: int, slabs: list[Slab], rebuilt: str, give_up_index: bool) -> Loaded:
    """From the index, or, where `rebuilt` says why not, from the footers.

    Raises:
        IndexDamaged: the index is not whole.
    """
    books = Books(capacity_bytes - FIXED_BYTES - folder.stray_bytes)
    for slab in slabs:
        books.charge(slab.charge_bytes)
        books.add_slab(slab)
    stale: list[bytes] = []
    ledger = Ledger(folder)
    file = folder.index_folder / DATA_FILE
    with _no_collections():
        known = ledger.read()
        if rebuilt:
            entries = fill(books, scan_footers(folder, slabs), known, stale, from_footers=True)
        else:
            try:
                records = read_columns(file) if file.exists() else ()
                entries = fill(books, records, known, stale, from_footers=False)
            except OSError as error:
                if error.errno == errno.EIO and give_up_index:
                    raise IndexDamaged(f"it cannot be read: {error}") from error
                raise
        gone, shortened = _shrink(books)
        if shortened:
            entries = [entry for entry in entries if books.index.get(entry.key) is entry]
        tell_policies(books, entries)
    stale += [entry.key for entry in gone]
    index = _index_of(folder, capacity_bytes, books, stale, rebuilt)
    try:
        # Only now, with no index that names them, may extents go.
        for slab, extents in shortened:
            if extents:
                folder.shorten_slab(slab, extents)
                books.charge(slab.charge_bytes)
            else:
                folder.remove_slab(slab)
        for slab in books.slabs.values():
            _list_free(slab)
        # A disk that is full keeps nobody from reading. And damage is found again by the keeper: with slabs gone,
        # nothing may be built anew from here.
        with contextlib.suppress(OSError, IndexDamaged):
            room = index_bytes_for(_blocks_max(books))
            index.reserve(lambda: folder.reserve_index(room))
        with contextlib.suppress(OSError):
            ledger.write(snapshot_of(books))
        _give_back_memory()
        if len(entries) >= _MANY:
            gc.freeze()  # or the first collection looks at all of them, which takes a tenth of a second
        return Loaded(books, index, ledger, index.namespaces(), rebuilt, len(stale))
    except BaseException:
        index.close()
        raise


class _Pauses:
    """How many loads are under way, each of which wants no collections."""

    lock = threading.Lock()
    count = 0
    collecting = True


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """A million objects that all stay: each full collection would look at all of them again. Several devices may load
    at once.
    """
    with _Pauses.lock:
        if not _Pauses.count:
            _Pauses.collecting = gc.isenabled()
        _Pauses.count += 1
        gc.disable()
    try:
        yield
    finally:
        with _Pauses.lock:
            _Pauses.count -= 1
            if not _Pauses.count and _Pauses.collecting:
                gc.enable()


def _give_back_memory() -> None:
    """What the columns took, 100 bytes for each block: the C library keeps it otherwise, for threads that are gone."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _index_of(folder: DiskFolder, capacity_bytes: int, books: Books, stale: Sequence[bytes], rebuilt: str) -> DiskIndex:
    """The index that the books were filled from, without what is stale; or one that is built from them."""
    map_bytes = map_bytes_for(capacity_bytes)
    namespaces: list[TierNamespace] = []
    if not rebuilt:
        folder.index_folder.mkdir(mode=0o700, exist_ok=True)
        index = DiskIndex(folder.index_folder, map_bytes, checked=True)
        try:
            if index.known_bytes <= index_bytes_for(_blocks_max(books)):
                return _without(index, stale)
            namespaces = index.namespaces()
        except BaseException:
            index.close()
            raise
        index.close()
    try:
        write_index(folder.index_folder, [record_of(entry) for entry in books.index.values()], namespaces, map_bytes)
    except OSError:
        if rebuilt or not (folder.index_folder / DATA_FILE).exists():
            raise
        # A disk that others have filled keeps nobody from reading: the old one is too long and otherwise as good.
        return _without(DiskIndex(folder.index_folder, map_bytes, checked=True), stale)
    index = DiskIndex(folder.index_folder, map_bytes, checked=True)
    folder.forget_damaged_index()
    return index


def _without(index: DiskIndex, stale: Sequence[bytes]) -> DiskIndex:
    try:
        if stale:
            index.commit(stale, ())
    except BaseException:
        index.close()
        raise
    return index


def _shrink(books: Books) -> tuple[list[Entry], list[tuple[Slab, int]]]:
    """Makes the books fit the budget: whole slabs go, coldest first; the last one is only shortened.

    Returns:
        What has to leave the index, and the slabs with the number of extents that they keep. They are out of the books
        unless they keep some, and then without their charge.
    """
    gone: list[Entry] = []
    cut: list[tuple[Slab, int]] = []
    for slab in [slab for slab in books.slabs.values() if not slab.extents]:
        books.drop_slab(slab)
        books.charge(-slab.charge_bytes)
        cut.append((slab, 0))
    fits = books.charged_bytes <= books.budget_bytes
    for slab in [] if fits else sorted(books.slabs.values(), key=_warmth):
        excess = books.charged_bytes - books.budget_bytes
        if excess <= 0:
            break
        books.charge(-slab.charge_bytes)
        keep = slab.extents - -(-excess // (slab.extent_bytes + INDEX_BYTES_PER_BLOCK))
        if keep > 0:
            leaving = [entry for entry in slab.entries[keep:] if entry is not None]
            for entry in leaving:
                books.remove(entry)
            gone += leaving
            cut.append((slab, keep))
        else:
            gone += books.drop_slab(slab)
            cut.append((slab, 0))
    return gone, cut


def _warmth(slab: Slab) -> int:
    """The middle one of the last uses of what lies in a slab."""
    uses = sorted(slab.used[entry.extent] for entry in slab.entries if entry is not None)
    return uses[len(uses) // 2] if uses else 0


def _list_free(slab: Slab) -> None:
    used = np.frombuffer(slab.used, dtype=np.uint64)
    free = used & GONE != 0
    assert int(np.count_nonzero(free)) == slab.extents - slab.count
    written = used & RAW == 0
    slab.ready = np.flatnonzero(free & written)[::-1].tolist()
    slab.raw = np.flatnonzero(free & ~written)[::-1].tolist()


def _blocks_max(books: Books) -> int:
    return sum(slab.extents for slab in books.slabs.values())


def snapshot_of(books: Books) -> Snapshot:
    """What the ledger keeps of books."""
    return Snapshot({slab.number: slab.used.tobytes() for slab in books.slabs.values()}, books.sequence)


def record_of(entry: Entry) -> Record:
    """What the index keeps of an entry."""
    slab = entry.slab
    return entry.key, RECORD.pack(slab.number, entry.extent, entry.size_bytes, slab.used[entry.extent])


def scan_footers(folder: DiskFolder, slabs: list[Slab]) -> Iterator[Columns]:
    """Records as the footers of all extents tell them."""
    chunks = [(slab, at) for slab in slabs for at in range(0, slab.extents, _SCAN_CHUNK)]

    def scan(chunk: tuple[Slab, int]) -> list[Columns]:
        slab, start = chunk
        by_length: dict[int, tuple[list[bytes], list[bytes]]] = {}
        for extent in range(start, min(start + _SCAN_CHUNK, slab.extents)):
            footer = read_footer(folder, slab, extent)
            if footer is not None and extent_bytes_for(footer.size_bytes) == slab.extent_bytes:
                names, values = by_length.setdefault(len(footer.key), ([], []))
                names.append(footer.key)
                values.append(RECORD.pack(slab.number, extent, footer.size_bytes, footer.sequence))
        return [
            Columns(
                np.frombuffer(b"".join(names), dtype=np.dtype((np.void, length))),
                np.frombuffer(b"".join(values), dtype=RECORD_TYPE),
                [],
            )
            for length, (names, values) in by_length.items()
        ]

    with SideThreads(_SCAN_THREADS, "kvstore-scan") as threads:
        yield from itertools.chain.from_iterable(threads.map(scan, chunks, 2 * _SCAN_THREADS))


def read_footer(folder: DiskFolder, slab: Slab, extent: int) -> Footer | None:
    """The footer of an extent; None where there is none that is whole and belongs there."""
    page = aligned_memory(ALIGN_BYTES)
    with contextlib.suppress(OSError):
        end = (extent + 1) * slab.extent_bytes
        if folder.io.preadv(slab.fd, [page], end - ALIGN_BYTES) == ALIGN_BYTES:
            footer = parse_footer(page[ALIGN_BYTES - FOOTER_BYTES :])
            if footer is not None and (footer.slab, footer.extent) == (slab.number, extent):
                return footer
    return None
