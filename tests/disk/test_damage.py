"""Torn writes and rotten bits, in slabs and in the index, wherever they fall."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.testing import make_block
from kvstore.testing.tier_suite import BLOCK_BYTES, DEADLINE_S, load, name_of, present, store
from kvstore.tier import ReadOutcome, TierNamespace, WriteOutcome
from kvstore.tiers.disk_index import RECORD, DiskIndex
from kvstore.tiers.extent import pack_footer, parse_footer
from kvstore.tiers.index_check import IndexDamaged, check_index_file
from kvstore.tiers.slabs import SEQUENCE_MASK
from kvstore.tiers.verify import verify
from tests.disk.media import opened, slab_paths

KEYS = [name_of(number) for number in range(48)]
OK = ReadOutcome.OK


def flip(path: Path, rng: random.Random, count: int = 1, start: int = 0, end: int | None = None) -> list[int]:
    """Changes one bit of some bytes of a file. Where."""
    end = path.stat().st_size if end is None else end
    places = [rng.randrange(start, end) for _ in range(count)]
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ (1 << rng.randrange(8))]))
        os.fsync(file.fileno())
    return places


# -- slabs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_rotten_bits_in_slabs_cost_only_their_blocks(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([5000, BLOCK_BYTES, 100_001])
    async with opened(tmp_path) as tier:
        await store(tier, KEYS, size)
        places = {(one.slab.number, one.extent): key for key, one in tier.books.index.items()}
        stride = next(iter(tier.books.index.values())).slab.extent_bytes
    hit = set()
    for path in slab_paths(tmp_path):
        for place in flip(path, rng, 3):
            hit.add(places.get((int(path.name[5:13], 16), place // stride)))
    async with opened(tmp_path) as tier:
        outcomes = await load(tier, KEYS, size)
        for key, outcome in zip(KEYS, outcomes, strict=True):
            # A bit in the padding between payload and footer hurts nobody.
            assert outcome is OK or (outcome is ReadOutcome.DAMAGED and key in hit)
        assert ReadOutcome.DAMAGED in outcomes
        again = await load(tier, KEYS, size)
        assert again == [OK if outcome is OK else ReadOutcome.ABSENT for outcome in outcomes]
        assert tier.stats()["damaged"] == outcomes.count(ReadOutcome.DAMAGED)


@pytest.mark.parametrize("torn_bytes", [0, 512, 4096, 40_000, 65_536, 69_632 - 512])
async def test_a_torn_write_is_found_out(tmp_path: Path, torn_bytes: int) -> None:
    """Only so many bytes of the second write to an extent got there; the rest is what was there before."""
    async with opened(tmp_path, prewrite=False) as tier:
        await store(tier, KEYS)
        entry = tier.books.index[KEYS[9]]
        path, start = tier.folder.slab_path(entry.slab.number, 69_632), entry.extent * 69_632
        before = path.read_bytes()[start : start + 69_632]
        # Removed from memory only, so that the index keeps naming the extent: as after a crash with a lying medium.
        tier.books.remove(entry)
        tier.books.free(entry.slab, [entry.extent])
        await store(tier, [KEYS[9]])
        new = tier.books.index[KEYS[9]]
        assert (new.slab, new.extent) == (entry.slab, entry.extent)
    with path.open("r+b") as file:
        file.seek(start + torn_bytes)
        file.write(bytes(b ^ 0xFF for b in before[torn_bytes:]))
    async with opened(tmp_path) as tier:
        assert (await load(tier, KEYS)).count(OK) == 47
        assert tier.stats()["damaged"] == 1


def test_a_footer_is_whole_or_none() -> None:
    footer = pack_footer(KEYS[0], 1234, 5, 6, 7, 8)
    parsed = parse_footer(footer)
    assert parsed is not None and (parsed.key, parsed.size_bytes, parsed.slab) == (KEYS[0], 1234, 7)
    for place in range(len(footer) * 8):
        rotten = bytearray(footer)
        rotten[place // 8] ^= 1 << place % 8
        assert parse_footer(rotten) is None
    assert parse_footer(bytes(len(footer))) is None


# -- the index ---------------------------------------------------------------------------------------------------------


def _index(folder: Path) -> Path:
    """One with all that can be in it: branch pages, overflow pages, free pages."""
    index = DiskIndex(folder, 1 << 26)
    for at in range(0, 6000, 500):
        records = [(name_of(number * 7919 % 100_003), RECORD.pack(1, number, 1, 2)) for number in range(at, at + 500)]
        index.commit((), records, [TierNamespace(at.to_bytes(16, "big"), "x" * 9000, (1,))])
    for at in range(0, 3000, 500):
        index.commit([name_of(number * 7919 % 100_003) for number in range(at, at + 500)], ())
    index.close()
    return index.path


def test_a_whole_index_passes(tmp_path: Path) -> None:
    check_index_file(_index(tmp_path / "index"))
    empty = DiskIndex(tmp_path / "empty", 1 << 24)
    empty.close()
    check_index_file(empty.path)


@pytest.mark.parametrize("kind", ["cut off", "one bit", "many bits", "a page of zeros", "pages swapped", "an old page"])
def test_no_damage_to_the_index_ends_a_process(tmp_path: Path, kind: str) -> None:
    """A child opens, reads and writes damaged copies; whatever it finds, it is alive at the end."""
    path = _index(tmp_path / "index")
    old = path.read_bytes()
    index = DiskIndex(path.parent, 1 << 26)
    index.commit((), [(name_of(number), bytes(24)) for number in range(500)])
    index.close()
    whole = path.read_bytes()
    rng = random.Random(kind)
    copies = []
    for number in range(60):
        data = bytearray(whole)
        pages = len(data) // 4096
        if kind == "cut off":
            del data[rng.randrange(len(data)) :]
        elif kind == "one bit":
            data[rng.randrange(pages) * 4096 + rng.randrange(64)] ^= 1 << rng.randrange(8)
        elif kind == "many bits":
            for _ in range(200):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == "a page of zeros":
            page = rng.randrange(pages) * 4096
            data[page : page + 4096] = bytes(4096)
        elif kind == "pages swapped":
            one, other = (rng.randrange(2, pages) * 4096 for _ in range(2))
            data[one : one + 4096], data[other : other + 4096] = data[other : other + 4096], data[one : one + 4096]
        else:
            page = rng.randrange(2, min(pages, len(old) // 4096)) * 4096
            data[page : page + 4096] = old[page : page + 4096]
        folder = tmp_path / "copies" / f"{number:03}"
        folder.mkdir(parents=True)
        (folder / "data.mdb").write_bytes(data)
        copies.append(folder)
    program = """
import sys
from pathlib import Path
from kvstore.testing.tier_suite import name_of
from kvstore.tiers.disk_index import DATA_FILE, DiskIndex, read_columns
from kvstore.tiers.index_check import IndexDamaged
for folder in sorted(Path(sys.argv[1]).iterdir()):
    print(folder.name, end=" ", flush=True)
    try:
        found = [key for columns in read_columns(folder / DATA_FILE) for key in columns.names.tolist() + columns.odd]
        index = DiskIndex(folder, 1 << 26, checked=True)
        index.namespaces()
        for at in range(0, len(found), 700):
            index.commit(found[at : at + 350], [(name_of(10**6 + at + n), bytes(24)) for n in range(300)])
        index.close()
        print("opened", flush=True)
    except IndexDamaged as damage:
        print("refused:", damage, flush=True)
"""
    child = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "copies")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=100,
    )
    lines = child.stdout.splitlines()
    assert child.returncode == 0 and len(lines) == 60, f"{lines[-1:]} {child.stderr}"
    # Many pages are free, and many old ones are as they were.
    assert sum("refused" in line for line in lines) >= (3 if kind in ("one bit", "an old page") else 20)


@pytest.mark.parametrize("seed", range(6))
async def test_a_damaged_index_serves_right_bytes_or_misses(tmp_path: Path, seed: int) -> None:
    async with opened(tmp_path) as tier:
        await store(tier, KEYS)
    rng = random.Random(seed)
    data = tmp_path / "index" / "data.mdb"
    if seed % 2:
        os.truncate(data, rng.randrange(data.stat().st_size))
    else:
        flip(data, rng, 40)
    async with opened(tmp_path) as tier:
        outcomes = await load(tier, KEYS)
        if tier.stats()["index_rebuilt"]:
            assert outcomes == [OK] * 48
        assert await load(tier, KEYS) == [OK if outcome is OK else ReadOutcome.ABSENT for outcome in outcomes]
        stored = await store(tier, KEYS)
        assert set(stored) <= {WriteOutcome.STORED, WriteOutcome.EXISTS}
        assert await load(tier, KEYS) == [OK] * 48


async def test_records_that_lie_are_found_out(tmp_path: Path) -> None:
    """Whole pages, wrong contents: places that are not there, taken twice, of another size."""
    async with opened(tmp_path) as tier:
        await store(tier, KEYS)
        entries = dict(tier.books.index)
        newer = tier.books.sequence + 1000
    index = DiskIndex(tmp_path / "index", 1 << 26)
    slab = entries[KEYS[0]].slab.number

    def lie(number: int, *record: int) -> tuple[bytes, bytes]:
        return KEYS[number], RECORD.pack(*record)

    index.commit(
        (),
        [
            lie(0, 999, 0, BLOCK_BYTES, 1),  # no such slab
            lie(1, slab, 10**6, BLOCK_BYTES, 1),  # no such extent
            lie(2, entries[KEYS[3]].slab.number, entries[KEYS[3]].extent, BLOCK_BYTES, 1),  # another block's, older
            lie(4, entries[KEYS[4]].slab.number, entries[KEYS[4]].extent, 5000, newer),  # size of another class
            lie(5, entries[KEYS[5]].slab.number, entries[KEYS[5]].extent, BLOCK_BYTES - 7, newer),  # another size
            (KEYS[6], b"short"),
            lie(7, entries[KEYS[8]].slab.number, entries[KEYS[8]].extent, BLOCK_BYTES, newer),  # another's, newer
        ],
    )
    index.close()
    async with opened(tmp_path) as tier:
        outcomes = await load(tier, KEYS)
        assert [number for number, outcome in enumerate(outcomes) if outcome is not OK] == [0, 1, 2, 4, 5, 6, 7, 8]
        # What is forgotten can come again, and everybody has a place of his own.
        await tier.delete([KEYS[5]])
        await store(tier, KEYS)
        assert await load(tier, KEYS) == [OK] * 48
        places = [(one.slab.number, one.extent) for one in tier.books.index.values()]
        assert len(set(places)) == len(places)
        assert tier.books.sequence > newer


async def test_wild_numbers_in_the_index_do_not_spread(tmp_path: Path) -> None:
    """Records have no checksum of their own, and what they say is where new slabs and sequences go on from."""
    async with opened(tmp_path) as tier:
        await store(tier, KEYS)
        entries = dict(tier.books.index)
        sequence = tier.books.sequence
    index = DiskIndex(tmp_path / "index", 1 << 26)
    place = entries[KEYS[1]].slab.number, entries[KEYS[1]].extent
    index.commit(
        (),
        [
            (KEYS[0], RECORD.pack((1 << 32) - 1, 0, BLOCK_BYTES, 1)),
            (KEYS[1], RECORD.pack(*place, BLOCK_BYTES, SEQUENCE_MASK - 1)),
        ],
    )
    index.close()
    other = name_of(1000)
    for _ in range(2):
        async with opened(tmp_path) as tier:
            await store(tier, KEYS)
            await tier.write([(other, memoryview(make_block(other, 3 * BLOCK_BYTES)))], DEADLINE_S)  # a slab of its own
            assert await tier.sync()
            assert tier.books.next_slab < 100 and tier.books.sequence < sequence + (1 << 40)
            assert await load(tier, KEYS) == [OK] * 48
            assert await tier.stat([other]) == [3 * BLOCK_BYTES]


async def test_a_damaged_recency_file_costs_only_the_order(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await store(tier, KEYS)
    flip(tmp_path / "recency", random.Random(1), 5)
    async with opened(tmp_path) as tier:
        assert await load(tier, KEYS) == [OK] * 48
    (tmp_path / "recency").unlink()
    async with opened(tmp_path) as tier:
        assert await load(tier, KEYS) == [OK] * 48


# -- verify ------------------------------------------------------------------------------------------------------------


async def test_verify_finds_nothing_wrong_where_nothing_is(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await store(tier, KEYS)
        await store(tier, [name_of(100)], 9 << 20)
        await tier.delete(KEYS[:2])
    progress: list[tuple[int, int]] = []
    report = await asyncio.to_thread(verify, tmp_path, False, lambda done, total: progress.append((done, total)))
    assert report.ok and not report.repaired
    assert (report.blocks_ok, report.bytes_ok) == (47, 46 * BLOCK_BYTES + (9 << 20))
    assert report.unnamed == 2 and report.damaged == [] and report.index_fault == ""
    assert progress[-1][0] == progress[-1][1] > 0


async def test_verify_names_damaged_blocks_and_repair_forgets_them(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await store(tier, KEYS)
        entries = dict(tier.books.index)
    for number in (3, 20):
        entry = entries[KEYS[number]]
        flip(
            slab_of(tmp_path, entry.slab.number), random.Random(1), 1, entry.extent * 69_632, entry.extent * 69_632 + 99
        )
    gone = [key for key, entry in entries.items() if entry.slab.number == entries[KEYS[40]].slab.number]
    slab_of(tmp_path, entries[KEYS[40]].slab.number).unlink()
    bad = {KEYS[3], KEYS[20], *gone}
    report = verify(tmp_path)
    assert {block.key for block in report.damaged} == bad and not report.ok
    assert len({block.why for block in report.damaged}) == 2
    assert verify(tmp_path).damaged == report.damaged, "without repair nothing is changed"
    repaired = verify(tmp_path, repair=True)
    assert repaired.repaired and repaired.ok
    assert verify(tmp_path).ok
    async with opened(tmp_path) as tier:
        assert await present(tier, KEYS) == [key not in bad for key in KEYS]
        assert await load(tier, KEYS) == [ReadOutcome.ABSENT if key in bad else OK for key in KEYS]


@pytest.mark.parametrize("how", ["gone", "cut off"])
async def test_repair_builds_a_lost_index_from_blocks_that_are_whole(tmp_path: Path, how: str) -> None:
    async with opened(tmp_path) as tier:
        await store(tier, KEYS)
        entry = tier.books.index[KEYS[11]]
    flip(slab_of(tmp_path, entry.slab.number), random.Random(1), 1, entry.extent * 69_632, entry.extent * 69_632 + 99)
    if how == "gone":
        shutil.rmtree(tmp_path / "index")
    else:
        os.truncate(tmp_path / "index" / "data.mdb", 5000)
    report = verify(tmp_path)
    assert report.index_fault and not report.ok
    report = verify(tmp_path, repair=True)
    assert report.rebuilt_blocks == 47 and report.ok
    async with opened(tmp_path) as tier:
        assert tier.stats()["index_rebuilt"] == ""
        assert await load(tier, KEYS) == [OK] * 11 + [ReadOutcome.ABSENT] + [OK] * 36


async def test_verify_refuses_what_is_in_use_or_not_ours(tmp_path: Path) -> None:
    async with opened(tmp_path / "tier"):
        with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
            verify(tmp_path / "tier")
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="not a directory of the disk tier"):
        verify(tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def slab_of(folder: Path, number: int) -> Path:
    (path,) = folder.glob(f"slab-{number:08x}-*.kv")
    return path


def test_the_checker_says_what_is_wrong(tmp_path: Path) -> None:
    path = _index(tmp_path / "index")
    os.truncate(path, path.stat().st_size - 4096 * 10)
    with pytest.raises(IndexDamaged, match="page"):
        check_index_file(path)
