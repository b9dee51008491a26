"""Reads what an earlier process left in the directory of a disk tier. Blocking: for a thread.

The books are built here from nothing and handed to the loop as a whole, so nobody sees them half read. With an index
that is gone or not whole they come from the footers of the extents instead; a footer that is whole is trusted as a
record is: until the first read, which checks everything.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from kvstore.tier import TierNamespace
from kvstore.tiers.disk_folder import DiskFolder
from kvstore.tiers.disk_index import DATA_FILE, RECORD, DiskIndex, Record, write_index
from kvstore.tiers.extent import ALIGN_BYTES, FOOTER_BYTES, Footer, extent_bytes_for, parse_footer
from kvstore.tiers.files import aligned_memory
from kvstore.tiers.index_check import IndexDamaged
from kvstore.tiers.slabs import INDEX_BYTES_PER_BLOCK, Books, Entry, Slab, restore_order

#: Set aside for all that is neither slab nor record: LMDB's first pages, texts of namespaces, the small files.
FIXED_BYTES: Final = 1 << 20
#: Footers are read by this many threads, each waits for the medium most of the time.
_SCAN_THREADS: Final = 8
_SCAN_CHUNK: Final = 256


@dataclasses.dataclass(slots=True)
class Loaded:
    """What was found.

    Attributes:
        books, index: Ready to be used.
        namespaces: What was remembered.
        rebuilt: Why the index was built from footers; empty where it was whole.
        dropped: Records that pointed nowhere, or did not fit the budget.
    """

    books: Books
    index: DiskIndex
    namespaces: list[TierNamespace]
    rebuilt: str
    dropped: int


def map_bytes_for(capacity_bytes: int) -> int:
    """What LMDB may map: more than the budget ever lets the index grow to, for the smallest extents there are."""
    return FIXED_BYTES + capacity_bytes // ALIGN_BYTES * INDEX_BYTES_PER_BLOCK


def load(folder: DiskFolder, capacity_bytes: int) -> Loaded:
    """Builds the books from a directory that is held.

    Raises:
        OSError: the medium does not work now.
    """
    index: DiskIndex | None = None
    slabs: list[Slab] = []
    try:
        slabs += (folder.open_slab(file) for file in folder.slab_files())
        index, rebuilt = _open_index(folder, capacity_bytes, bool(slabs))
        try:
            return _build(folder, capacity_bytes, slabs, index, rebuilt)
        except IndexDamaged as damage:
            assert index is not None
            index.close()
            folder.set_index_aside()
            for slab in slabs:
                slab.forget()
            return _build(folder, capacity_bytes, slabs, None, str(damage))
    except BaseException:
        if index is not None:
            index.close()
        for slab in slabs:
            with contextlib.suppress(OSError):  # one that was to be removed is closed
                os.close(slab.fd)
        raise


def _open_index(folder: DiskFolder, capacity_bytes: int, slabs: bool) -> tuple[DiskIndex | None, str]:
    """The index, or why it has to be built anew. Until the new one is whole, index.damaged says that it is not."""
    if folder.damaged_index.exists():
        return None, "an earlier start did not finish building it anew"
    try:
        if slabs and not (folder.index_folder / DATA_FILE).exists():
            raise IndexDamaged("it is gone")
        folder.index_folder.mkdir(mode=0o700, exist_ok=True)
        return DiskIndex(folder.index_folder, map_bytes_for(capacity_bytes)), ""
    except IndexDamaged as damage:
        folder.set_index_aside()
        return None, str(damage)


def _build(folder: DiskFolder, capacity_bytes: int, slabs: list[Slab], index: DiskIndex | None, rebuilt: str) -> Loaded:
    books = Books(capacity_bytes - FIXED_BYTES - folder.stray_bytes)
    for slab in slabs:
        books.charge(slab.charge_bytes)
        books.add_slab(slab)
    stale: list[bytes] = []
    namespaces = [] if index is None else index.namespaces()
    collecting = gc.isenabled()
    # A million objects that all stay: each full collection would look at all of them again.
    gc.disable()
    try:
        _fill(books, scan_footers(folder, slabs) if index is None else index.load(), stale)
        _recall_use(folder, books)
        gone, shortened = _shrink(books)
        restore_order(books, books.index.values())
    finally:
        if collecting:
            gc.enable()
    stale += [entry.key for entry in gone]
    if index is None or index.known_bytes > FIXED_BYTES + _blocks_max(books) * INDEX_BYTES_PER_BLOCK:
        if index is not None:
            index.close()
        write_index(folder.index_folder, _records(books), namespaces, map_bytes_for(capacity_bytes))
        index = DiskIndex(folder.index_folder, map_bytes_for(capacity_bytes))
        folder.forget_damaged_index()
    elif stale:
        index.commit(stale, ())
    # Only now, with no index that names them, may extents go.
    for slab, extents in shortened:
        if extents:
            folder.shorten_slab(slab, extents)
            books.charge(slab.charge_bytes)
        else:
            folder.remove_slab(slab)
    for slab in books.slabs.values():
        _list_free(slab)
    with contextlib.suppress(OSError):  # a disk that is full keeps nobody from reading
        folder.reserve_index(FIXED_BYTES // 2 + _blocks_max(books) * INDEX_BYTES_PER_BLOCK)
    return Loaded(books, index, namespaces, rebuilt, len(stale))


def _fill(books: Books, chunks: Iterable[list[Record]], stale: list[bytes]) -> None:
    """Enters records. One that cannot be true is left out, and of two for one extent or one name the newer one wins."""
    index, slabs = books.index, books.slabs
    sizes: dict[int, tuple[int, int]] = {}  # size -> (the one object for it, its extent)
    sequence = books.sequence
    unpack = RECORD.unpack
    payload = 0
    next_slab = books.next_slab
    for key, value in itertools.chain.from_iterable(chunks):
        if len(value) != RECORD.size:
            stale.append(key)
            continue
        number, extent, size_bytes, written = unpack(value)
        slab = slabs.get(number)
        if size_bytes not in sizes:
            sizes[size_bytes] = (size_bytes, extent_bytes_for(size_bytes))
        size_bytes, extent_bytes = sizes[size_bytes]
        next_slab = max(next_slab, number + 1)
        if slab is None or extent >= slab.extents or extent_bytes != slab.extent_bytes or written > 1 << 62:
            stale.append(key)
            continue
        rivals: tuple[Entry | None, Entry | None] = (slab.entries[extent], index.get(key))
        for other in rivals:
            if (
                other is not None
                and other.slab.entries[other.extent] is other
                and other.slab.used[other.extent] < written
            ):
                del index[other.key]
                other.slab.entries[other.extent] = None
                other.slab.count -= 1
                payload -= other.size_bytes
                if other.key != key:
                    stale.append(other.key)
        if slab.entries[extent] is not None or key in index:
            if key not in index:
                stale.append(key)
            continue
        entry = Entry(key, slab, extent, size_bytes)
        slab.entries[extent] = index[key] = entry
        slab.used[extent] = written
        slab.count += 1
        payload += size_bytes
        if written > sequence:
            sequence = written
    books.sequence = sequence + 1
    books.payload_bytes = payload
    books.next_slab = next_slab


def _recall_use(folder: DiskFolder, books: Books) -> None:
    """Puts what the recency file says over the sequences of the writes, where it is newer."""
    for number, recent in folder.read_recency().items():
        slab = books.slabs.get(number)
        if slab is not None:
            known = min(len(recent), slab.extents)
            slab.used[:known] = array("Q", map(max, slab.used[:known], recent[:known]))
            books.sequence = max(books.sequence, max(recent, default=0) + 1)


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
    for slab in sorted(books.slabs.values(), key=_warmth):
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
    for extent in range(slab.extents - 1, -1, -1):
        if slab.entries[extent] is None:
            (slab.ready if slab.used[extent] else slab.raw).append(extent)


def _blocks_max(books: Books) -> int:
    return sum(slab.extents for slab in books.slabs.values())


def record_of(entry: Entry) -> Record:
    """What the index keeps of an entry."""
    slab = entry.slab
    return entry.key, RECORD.pack(slab.number, entry.extent, entry.size_bytes, slab.used[entry.extent])


def _records(books: Books) -> list[Record]:
    return [record_of(entry) for entry in books.index.values()]


def scan_footers(
    folder: DiskFolder, slabs: list[Slab], progress: Callable[[int], None] | None = None
) -> Iterator[list[Record]]:
    """Records as the footers of all extents tell them."""
    chunks = [(slab, at) for slab in slabs for at in range(0, slab.extents, _SCAN_CHUNK)]

    def scan(chunk: tuple[Slab, int]) -> list[Record]:
        slab, start = chunk
        found = []
        for extent in range(start, min(start + _SCAN_CHUNK, slab.extents)):
            footer = read_footer(folder, slab, extent)
            if footer is not None and extent_bytes_for(footer.size_bytes) == slab.extent_bytes:
                found.append((footer.key, RECORD.pack(slab.number, extent, footer.size_bytes, footer.sequence)))
        if progress is not None:
            progress(min(_SCAN_CHUNK, slab.extents - start))
        return found

    with concurrent.futures.ThreadPoolExecutor(_SCAN_THREADS, thread_name_prefix="kvstore-scan") as pool:
        yield from pool.map(scan, chunks)


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
