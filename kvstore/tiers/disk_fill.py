"""Makes the books of a disk tier out of records, a million of them in about a second. Blocking: for a thread.

Whatever can be done by the column is: which records are true, which of two is the newer one, who was used last. Objects
are made at the end, coldest first, so that what eviction looks at in turn also lies in turn in memory.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.tiers.disk_index import RECORD_TYPE, Columns
from kvstore.tiers.disk_ledger import Known
from kvstore.tiers.extent import ALIGN_BYTES, FOOTER_BYTES
from kvstore.tiers.index_check import IndexDamaged
from kvstore.tiers.slabs import GONE, RAW, SEQUENCE_MASK, Books, Entry

Rows = npt.NDArray[np.int64]
Uses = npt.NDArray[np.uint64]

_SIZE_MAX: Final = 1 << 48
#: Entries that a policy is told of at a time.
_TOUCH: Final = 4096


class _Records:
    """Records in one table, with their names, which may be of several lengths."""

    def __init__(self, chunks: Iterable[Columns], stale: list[bytes]) -> None:
        by_length: dict[int, list[Columns]] = {}
        for columns in chunks:
            stale += columns.odd
            by_length.setdefault(columns.names.itemsize, []).append(columns)
        self._names = [np.concatenate([columns.names for columns in group]) for group in by_length.values()]
        tables = [columns.table for group in by_length.values() for columns in group]
        self.table: npt.NDArray[np.void] = np.concatenate(tables) if tables else np.zeros(0, dtype=RECORD_TYPE)

    def names(self, rows: Rows) -> list[bytes]:
        if len(self._names) == 1:
            names = self._names[0]
            # As rows of bytes: numpy takes them apart in half the time.
            table = names.view(np.uint8).reshape(names.size, names.itemsize).take(rows, axis=0)
            whole: list[bytes] = table.view(names.dtype).reshape(rows.size).tolist()
            return whole
        found = np.empty(rows.size, dtype=object)
        first = 0
        for names in self._names:
            own = (rows >= first) & (rows < first + names.size)
            found[own] = np.fromiter(names[rows[own] - first].tolist(), dtype=object, count=int(own.sum()))
            first += names.size
        mixed: list[bytes] = found.tolist()
        return mixed


class _Places:
    """All extents of all slabs in one row, slab after slab."""

    def __init__(self, books: Books) -> None:
        self.slabs = sorted(books.slabs.values(), key=lambda slab: slab.number)
        self.numbers = np.array([slab.number for slab in self.slabs], dtype=np.int64)
        self.extents = np.array([slab.extents for slab in self.slabs], dtype=np.int64)
        self.strides = np.array([slab.extent_bytes for slab in self.slabs], dtype=np.int64)
        self.starts = np.cumsum(self.extents) - self.extents
        self.count = int(self.extents.sum())

    def column(self, by_slab: Mapping[int, array[int]]) -> Uses:
        """One number for each extent; 0 where there is none."""
        column = np.zeros(self.count, dtype=np.uint64)
        for slab, start in zip(self.slabs, self.starts.tolist(), strict=True):
            if (own := by_slab.get(slab.number)) is not None:
                known = min(len(own), slab.extents)
                column[start : start + known] = np.frombuffer(own, dtype=np.uint64)[:known]
        return column


def fill(
    books: Books, chunks: Iterable[Columns], known: Known, stale: list[bytes], *, from_footers: bool
) -> list[Entry]:
    """Enters records. One that cannot be true is left out, and of two for one extent or one name the newer one wins.

    Whatever lies in an extent without a record is gone from then on, also for a start that has to go by the footers.

    Args:
        books: With slabs, and nothing in them.
        known: Of extents, from an earlier process.
        stale: Gets the names of what was left out.
        from_footers: Records are what the footers say: names may repeat, and what is known to be gone is left out. An
            index is right in both.

    Returns:
        What was entered, coldest first. No policy knows of it.

    Raises:
        IndexDamaged: names of an index repeat.
    """
    records = _Records(chunks, stale)
    table = records.table
    if not books.slabs:
        stale += records.names(np.arange(table.size))
        return []
    places = _Places(books)
    slab_rows = np.minimum(np.searchsorted(places.numbers, table["slab"]), len(places.slabs) - 1)
    sizes, sequences, extents = table["size_bytes"], table["sequence"], table["extent"].astype(np.int64)
    fits = (places.numbers[slab_rows] == table["slab"]) & (extents < places.extents[slab_rows])
    fits &= (sizes < _SIZE_MAX) & (sequences > 0) & (sequences < (known.ceiling or SEQUENCE_MASK))
    needed = -(-(sizes.astype(np.int64) + FOOTER_BYTES) // ALIGN_BYTES) * ALIGN_BYTES
    fits &= needed == places.strides[slab_rows]
    rows = np.flatnonzero(fits)
    at = places.starts[slab_rows] + extents
    uses = places.column(known.used)
    raw = (uses == 0) | (uses & RAW != 0)
    gone = uses & GONE != 0
    uses &= SEQUENCE_MASK
    if from_footers:
        rows = rows[~gone[at[rows]] | (sequences[rows] > uses[at[rows]])]
    if from_footers or int(np.bincount(at[rows], minlength=1).max()) > 1:
        rows = rows[np.argsort(sequences[rows], kind="stable")]
        owners = np.full(places.count, -1, dtype=np.int64)
        owners[at[rows]] = rows  # the last one stays
        rows = rows[owners[at[rows]] == rows]
    if from_footers:
        rows = np.fromiter(dict(zip(records.names(rows), rows.tolist(), strict=True)).values(), dtype=np.int64)
    else:
        left_out = np.ones(table.size, dtype=bool)
        left_out[rows] = False
        stale += records.names(np.flatnonzero(left_out))
    uses[at[rows]] = np.maximum(sequences[rows], uses[at[rows]])
    books.sequence = max(books.sequence, int(uses.max(initial=0)) + 1, known.ceiling)
    used = np.where(raw, np.uint64(GONE | RAW), np.uint64(GONE)) | np.uint64(books.sequence - 1)
    used[at[rows]] = uses[at[rows]]
    rows = rows[np.argsort(used[at[rows]])]  # no two are equal, and a stable sort takes three times as long
    names = records.names(rows)
    entries = _entries(names, places, slab_rows[rows], extents[rows], sizes[rows])
    books.index = dict(zip(names, entries, strict=True))
    if len(books.index) != len(entries):
        raise IndexDamaged("a name is there twice")
    books.payload_bytes = int(sizes[rows].sum())
    held = np.empty(places.count, dtype=object)
    held[at[rows]] = np.fromiter(entries, dtype=object, count=len(entries))
    for slab, start, count in zip(
        places.slabs, places.starts.tolist(), np.bincount(slab_rows[rows], minlength=len(places.slabs)), strict=True
    ):
        slab.entries = held[start : start + slab.extents].tolist()
        slab.used = array("Q", used[start : start + slab.extents].tobytes())
        slab.count = int(count)
    return entries


def _entries(
    names: list[bytes], places: _Places, slab_rows: Rows, extents: Rows, sizes: npt.NDArray[np.uint64]
) -> list[Entry]:
    """Equal numbers are one object: that is 64 bytes less for each block."""
    ordered = np.sort(sizes)  # not np.unique, which brings in a tenth of a second of numpy.ma
    known_sizes = ordered[np.append(True, ordered[1:] != ordered[:-1])] if ordered.size else ordered
    columns = (
        (np.fromiter(places.slabs, dtype=object), slab_rows),
        (np.fromiter(range(int(places.extents.max())), dtype=object), extents),
        (np.fromiter(known_sizes.tolist(), dtype=object), np.searchsorted(known_sizes, sizes)),
    )
    return list(map(Entry, names, *(values[rows].tolist() for values, rows in columns)))


def tell_policies(books: Books, entries: list[Entry]) -> None:
    """Tells the policies of what was entered, coldest first."""
    # Policies of one ticker can be compared only if they are fed in turn: a row of one class after the other.
    filled = {slab.extent_bytes for slab in books.slabs.values() if slab.count}
    rows: Iterable[tuple[int, Iterable[Entry]]] = (
        itertools.groupby(entries, key=lambda entry: entry.slab.extent_bytes)
        if len(filled) > 1
        else [(extent_bytes, entries) for extent_bytes in filled]
    )
    for extent_bytes, row in rows:
        policy = books.class_of(extent_bytes).policy
        left = iter(row)
        while chain := list(itertools.islice(left, _TOUCH)):
            chain.reverse()
            policy.touch(chain)
