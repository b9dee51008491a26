"""Records become books: by the column in the product, one after the other here."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import lmdb
import numpy as np
import pytest

from kvstore.tiers.disk_fill import fill, tell_policies
from kvstore.tiers.disk_index import RECORD, RECORD_TYPE, Columns, DiskIndex, read_columns
from kvstore.tiers.disk_ledger import Known
from kvstore.tiers.index_check import IndexDamaged
from kvstore.tiers.slabs import GONE, RAW, SEQUENCE_MASK, Books, Slab

Rows = list[tuple[bytes, tuple[int, int, int, int]]]
#: Size of a block, by slab.
SIZES = {1: 4096, 2: 4096, 5: 3840, 6: 100}
EXTENTS = 40


def books_of() -> Books:
    books = Books(1 << 30)
    for number, size in SIZES.items():
        books.add_slab(Slab(number, 8192 if size == 4096 else 4096, EXTENTS, -1, 0))
    return books


def columns_of(rows: Rows) -> list[Columns]:
    """In chunks, one length of name in each."""
    chunks = []
    for at in range(0, len(rows), 50):
        for length in {len(name) for name, _ in rows[at : at + 50]}:
            own = [row for row in rows[at : at + 50] if len(row[0]) == length]
            names = np.frombuffer(b"".join(name for name, _ in own), dtype=np.dtype((np.void, length)))
            chunks.append(Columns(names, np.array([row for _, row in own], dtype=RECORD_TYPE), []))
    return chunks


def some_rows(rng: random.Random, *, unique: bool) -> Rows:
    rows: Rows = []
    for number in range(300):
        slab = rng.choice([1, 2, 5, 6, 6, 3, 9])
        size = rng.choice([SIZES.get(slab, 1), SIZES.get(slab, 1), SIZES.get(slab, 1), 9000, 1 << 50])
        # Zeros at the end are part of a name.
        name = (number if unique else rng.randrange(120)).to_bytes(4, "big") + bytes(rng.choice([20, 30]))
        rows.append((name, (slab, rng.randrange(EXTENTS + 3), size, rng.choice([0, number + 1, number + 1, 1 << 63]))))
    rng.shuffle(rows)
    return rows


def expected(rows: Rows) -> dict[bytes, tuple[int, int, int]]:
    """The newest of an extent, and then of a name."""
    by_extent: dict[tuple[int, int], tuple[int, bytes, int]] = {}
    for name, (slab, extent, size, sequence) in rows:
        if slab in SIZES and extent < EXTENTS and size == SIZES[slab] and 0 < sequence < 1 << 62:
            by_extent[slab, extent] = max(by_extent.get((slab, extent), (0, b"", 0)), (sequence, name, size))
    newest: dict[bytes, tuple[int, tuple[int, int, int]]] = {}
    for (slab, extent), (sequence, name, size) in by_extent.items():
        newest[name] = max(newest.get(name, (0, (0, 0, 0))), (sequence, (slab, extent, size)))
    return {name: place for name, (_, place) in newest.items()}


@pytest.mark.parametrize("unique", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_the_newest_wins_and_the_rest_is_told(seed: int, unique: bool) -> None:
    rng = random.Random(seed)
    rows = some_rows(rng, unique=unique)
    books = books_of()
    recent = {number: array("Q", [rng.choice([0, rng.randrange(500)]) for _ in range(30)]) for number in (1, 6, 8)}
    stale: list[bytes] = []
    entries = fill(books, columns_of(rows), Known(recent, 0), stale, from_footers=not unique)
    want = expected(rows)
    assert {e.key: (e.slab.number, e.extent, e.size_bytes) for e in books.index.values()} == want
    assert all(books.index[entry.key] is entry and entry.slab.entries[entry.extent] is entry for entry in entries)
    assert sum(entry is not None for slab in books.slabs.values() for entry in slab.entries) == len(want)
    assert sum(slab.count for slab in books.slabs.values()) == len(want)
    assert books.payload_bytes == sum(size for _, _, size in want.values())
    if unique:
        assert sorted(stale) == sorted(name for name, _ in rows if name not in want)
    uses = [entry.slab.used[entry.extent] for entry in entries]
    assert uses == sorted(uses) and books.sequence > max(uses)
    tell_policies(books, entries)
    for kind in books.classes.values():
        own = [entry for entry in entries if entry.slab.extent_bytes == kind.extent_bytes]
        assert [kind.policy.pop() for _ in own] == own


@pytest.mark.parametrize("from_footers", [True, False])
def test_what_is_gone_stays_gone_for_footers_only(from_footers: bool) -> None:
    rows: Rows = [(bytes([extent]) * 20, (1, extent, 4096, 10 + extent)) for extent in range(10)]
    column = array("Q", [GONE | 9, GONE | 11, 12, GONE | 12, GONE | RAW, 0, 99, GONE | 17])
    books = books_of()
    fill(books, columns_of(rows), Known({1: column}, 1000), [], from_footers=from_footers)
    there = {name[0] for name in books.index}
    assert there == ({0, 2, 3, 4, 5, 6, 8, 9} if from_footers else set(range(10)))
    assert books.sequence == 1000
    slab = books.slabs[1]
    for extent in set(range(EXTENTS)) - there:
        assert slab.used[extent] & GONE and slab.used[extent] & SEQUENCE_MASK == 999
        assert bool(slab.used[extent] & RAW) == (extent >= 8)
    assert slab.used[6] == 99 and slab.used[9] == 19


def test_a_name_that_is_there_twice_is_damage() -> None:
    rows: Rows = [(b"n" * 20, (1, 0, 4096, 2)), (b"n" * 20, (1, 1, 4096, 3))]
    with pytest.raises(IndexDamaged, match="twice"):
        fill(books_of(), columns_of(rows), Known({}, 0), [], from_footers=False)


def test_without_slabs_all_is_stale() -> None:
    stale: list[bytes] = []
    assert (
        fill(Books(1 << 20), columns_of([(b"n" * 20, (1, 0, 4096, 2))]), Known({}, 0), stale, from_footers=False) == []
    )
    assert stale == [b"n" * 20]


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    rng = random.Random(1)
    records = {
        bytes([number % 256]) * 16 + rng.randbytes(rng.choice([3, 34, 34, 130])) + bytes(2): RECORD.pack(
            number, number + 1, number + 2, number + 3
        )
        for number in range(30_000)
    }
    index = DiskIndex(tmp_path / "index", 1 << 26)
    index.commit((), records.items())
    odd = {b"odd" + bytes([number]) * 20: bytes(number) for number in range(9)}
    index.commit((), odd.items())
    index.close()
    found: dict[bytes, bytes] = {}
    names: list[bytes] = []
    for columns in read_columns(index.path):
        rows = columns.table.tobytes()
        found.update(zip(columns.names.tolist(), (rows[at : at + 24] for at in range(0, len(rows), 24)), strict=True))
        names += columns.odd
    assert found == records and sorted(names) == sorted(odd)
    # And as LMDB itself has them.
    with lmdb.open(str(index.path.parent), lock=False, readonly=True) as env, env.begin() as transaction:
        assert {key[1:]: value for key, value in transaction.cursor() if key[:1] == b"b"} == records | odd
