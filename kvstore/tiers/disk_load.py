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
import operator
import os
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.tier import TierNamespace
from kvstore.tiers.disk_folder import DiskFolder
from kvstore.tiers.disk_index import DATA_FILE, RECORD, Columns, DiskIndex, Record, write_index
from kvstore.tiers.extent import ALIGN_BYTES, FOOTER_BYTES, Footer, extent_bytes_for, parse_footer
from kvstore.tiers.files import aligned_memory
from kvstore.tiers.index_check import IndexDamaged
from kvstore.tiers.slabs import INDEX_BYTES_PER_BLOCK, Books, Entry, Slab

#: Set aside for all that is neither slab nor record: LMDB's first pages, texts of namespaces, the small files.
FIXED_BYTES: Final = 1 << 20
#: A sequence beyond this is none: it would leave no room to count on.
_SEQUENCE_MAX: Final = 1 << 62
_RECORD_TYPE: Final = np.dtype([("slab", "<u4"), ("extent", "<u4"), ("size_bytes", "<u8"), ("sequence", "<u8")])
#: Footers are read by this many threads, each waits for the medium most of the time.
_SCAN_THREADS: Final = 8
_SCAN_CHUNK: Final = 256
#: Entries that a policy is told of at a time.
_TOUCH: Final = 4096


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
        if index is None:
            _fill(books, scan_footers(folder, slabs), stale, unique=False)
        else:
            _fill(books, index.load(), stale, unique=True)
        # So far, `used` is set where something lies.
        live = {slab.number: np.flatnonzero(np.frombuffer(slab.used, dtype=np.uint64)) for slab in slabs}
        _recall_use(folder, books)
        gone, shortened = _shrink(books)
        if shortened:
            live = {
                slab.number: np.array([entry.extent for entry in slab.entries if entry is not None], dtype=np.int64)
                for slab in books.slabs.values()
            }
        _restore_order(books, live)
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
        _list_free(slab, live[slab.number])
    with contextlib.suppress(OSError):  # a disk that is full keeps nobody from reading
        folder.reserve_index(FIXED_BYTES // 2 + _blocks_max(books) * INDEX_BYTES_PER_BLOCK)
    return Loaded(books, index, namespaces, rebuilt, len(stale))


def _fill(books: Books, chunks: Iterable[Columns], stale: list[bytes], *, unique: bool) -> None:
    """Enters records. One that cannot be true is left out, and of two for one extent or one name the newer one wins.

    Most records are plain: their extent is there, fits, and nobody else claims it. Those go in by the column, which is
    what makes a million of them take about a second.

    Args:
        unique: Names do not repeat.

    Raises:
        IndexDamaged: they do, although they should not.
    """
    sizes: dict[int, int] = {}  # one object for each size, not one for each block
    for keys, values in chunks:
        if set(map(len, values)) != {RECORD.size}:
            right = [len(value) == RECORD.size for value in values]
            stale += itertools.compress(keys, map(operator.not_, right))
            keys, values = list(itertools.compress(keys, right)), list(itertools.compress(values, right))
        table = np.frombuffer(b"".join(values), dtype=_RECORD_TYPE)
        books.next_slab = max(books.next_slab, int(table["slab"].max(initial=0)) + 1)
        for number in np.unique(table["slab"]).tolist():
            rows = np.flatnonzero(table["slab"] == number)
            slab = books.slabs.get(number)
            if slab is None:
                stale += [keys[row] for row in rows]
                continue
            extents = table["extent"][rows]
            blocks = table["size_bytes"][rows].astype(np.uint64)
            written = table["sequence"][rows]
            fits = (extents < slab.extents) & (blocks < 1 << 48) & (written > 0) & (written < _SEQUENCE_MAX)
            needed = -(-(blocks.astype(np.int64) + FOOTER_BYTES) // ALIGN_BYTES) * ALIGN_BYTES
            fits &= needed == slab.extent_bytes
            stale += [keys[row] for row in rows[~fits]]
            rows = rows[fits]
            extents, written = table["extent"][rows], table["sequence"][rows]
            lengths = [sizes.setdefault(size, size) for size in table["size_bytes"][rows].tolist()]
            names = keys if rows.size == len(keys) else [keys[row] for row in rows.tolist()]
            used = np.frombuffer(slab.used, dtype=np.uint64)
            if unique and not used[extents].any() and np.unique(extents).size == extents.size:
                _enter_all(books, slab, names, extents, lengths)
                used[extents] = written
            else:
                for name, extent, length, sequence in zip(
                    names, extents.tolist(), lengths, written.tolist(), strict=True
                ):
                    _enter(books, Entry(name, slab, extent, length), sequence, stale)
            books.sequence = max(books.sequence, int(written.max(initial=0)) + 1)


def _enter_all(
    books: Books, slab: Slab, names: list[bytes], extents: npt.NDArray[np.uint32], lengths: list[int]
) -> None:
    entries = list(map(Entry, names, itertools.repeat(slab), extents.tolist(), lengths))
    before = len(books.index)
    books.index.update(zip(names, entries, strict=True))
    if len(books.index) != before + len(entries):
        raise IndexDamaged("a name is there twice")
    places = slab.entries
    for entry in entries:
        places[entry.extent] = entry
    slab.count += len(entries)
    books.payload_bytes += sum(lengths)


def _enter(books: Books, entry: Entry, sequence: int, stale: list[bytes]) -> None:
    """One record that may have rivals."""
    slab, extent, key = entry.slab, entry.extent, entry.key
    rivals: tuple[Entry | None, Entry | None] = (slab.entries[extent], books.index.get(key))
    for other in rivals:
        if other is not None and other.slab.entries[other.extent] is other:
            if other.slab.used[other.extent] >= sequence:
                if key not in books.index:
                    stale.append(key)
                return
            del books.index[other.key]
            other.slab.entries[other.extent] = None
            other.slab.count -= 1
            books.payload_bytes -= other.size_bytes
            if other.key != key:
                stale.append(other.key)
    slab.entries[extent] = books.index[key] = entry
    slab.used[extent] = sequence
    slab.count += 1
    books.payload_bytes += entry.size_bytes


def _recall_use(folder: DiskFolder, books: Books) -> None:
    """Puts what the recency file says over the sequences of the writes, where it is newer."""
    for number, recent in folder.read_recency().items():
        slab = books.slabs.get(number)
        if slab is not None:
            known = min(len(recent), slab.extents)
            uses = np.frombuffer(recent, dtype=np.uint64)[:known]
            uses = np.where(uses < _SEQUENCE_MAX, uses, 0)
            used = np.frombuffer(slab.used, dtype=np.uint64)[:known]
            np.maximum(used, uses, out=used)
            books.sequence = max(books.sequence, int(uses.max(initial=0)) + 1)


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


def _restore_order(books: Books, live: dict[int, npt.NDArray[np.int64]]) -> None:
    """Tells the policies of what was loaded, coldest first, as `used` says.

    Args:
        live: By slab, the extents that hold something. Handed in, since looking for them takes a visit to every entry.
    """
    slabs = [slab for slab in books.slabs.values() if live[slab.number].size]
    if not slabs:
        return
    extents = [live[slab.number] for slab in slabs]
    uses = [np.frombuffer(slab.used, dtype=np.uint64)[at] for slab, at in zip(slabs, extents, strict=True)]
    held = [np.array(slab.entries, dtype=object)[at] for slab, at in zip(slabs, extents, strict=True)]
    order = np.argsort(np.concatenate(uses), kind="stable")
    entries = np.concatenate(held)[order]
    strides = np.repeat([slab.extent_bytes for slab in slabs], [at.size for at in extents])[order]
    # Policies of one ticker can be compared only if they are fed in turn: a row of one class after the other.
    cuts = np.flatnonzero(np.diff(strides)) + 1
    for row in np.split(entries, cuts):
        for at in range(0, row.size, _TOUCH):
            chain = row[at : at + _TOUCH].tolist()
            chain.reverse()
            books.class_of(chain[0].slab.extent_bytes).policy.touch(chain)


def _warmth(slab: Slab) -> int:
    """The middle one of the last uses of what lies in a slab."""
    uses = sorted(slab.used[entry.extent] for entry in slab.entries if entry is not None)
    return uses[len(uses) // 2] if uses else 0


def _list_free(slab: Slab, live: npt.NDArray[np.int64]) -> None:
    free = np.ones(slab.extents, dtype=bool)
    free[live] = False
    written = np.frombuffer(slab.used, dtype=np.uint64) > 0
    slab.ready = np.flatnonzero(free & written)[::-1].tolist()
    slab.raw = np.flatnonzero(free & ~written)[::-1].tolist()


def _blocks_max(books: Books) -> int:
    return sum(slab.extents for slab in books.slabs.values())


def record_of(entry: Entry) -> Record:
    """What the index keeps of an entry."""
    slab = entry.slab
    return entry.key, RECORD.pack(slab.number, entry.extent, entry.size_bytes, slab.used[entry.extent])


def _records(books: Books) -> list[Record]:
    return [record_of(entry) for entry in books.index.values()]


def scan_footers(folder: DiskFolder, slabs: list[Slab]) -> Iterator[Columns]:
    """Records as the footers of all extents tell them."""
    chunks = [(slab, at) for slab in slabs for at in range(0, slab.extents, _SCAN_CHUNK)]

    def scan(chunk: tuple[Slab, int]) -> Columns:
        slab, start = chunk
        keys, values = [], []
        for extent in range(start, min(start + _SCAN_CHUNK, slab.extents)):
            footer = read_footer(folder, slab, extent)
            if footer is not None and extent_bytes_for(footer.size_bytes) == slab.extent_bytes:
                keys.append(footer.key)
                values.append(RECORD.pack(slab.number, extent, footer.size_bytes, footer.sequence))
        return keys, values

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
