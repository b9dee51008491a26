"""Blocks from files into KV memory past the pool: right bytes or an error, and nothing written after the end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from engine_plugin.copy.contract import Fragments
from engine_plugin.copy.reads import HANGS_S, DirectRead
from kvstore.direct import DiskExtent
from kvstore.errors import Damage
from tests.plugin.host_reads import host_reads

PAGE = 512
PAGES = 8
BLOCK = PAGE * PAGES
LIMIT_S = 60


class Rig:
    """Files with blocks at random places, and KV memory whose pages belong to them in random order."""

    def __init__(self, folder: Path, blocks: int) -> None:
        chance = np.random.default_rng(blocks)
        self.content = chance.integers(0, 256, (blocks, BLOCK), dtype=np.uint8)
        places = chance.permutation(blocks)
        self.extents = []
        for number, content in enumerate(self.content):
            path = folder / f"slab {number % 2}"
            offset = 4096 * int(places[number])
            with path.open("r+b" if path.exists() else "wb") as file:
                file.seek(offset)
                file.write(content)
            self.extents.append(DiskExtent(str(path), offset, BLOCK, xxhash.xxh3_64_intdigest(content)))
        self.kv = np.zeros((blocks * PAGES, PAGE), np.uint8)
        self.page_of = chance.permutation(blocks * PAGES)
        order = chance.permutation(blocks * PAGES).astype(np.uint64)  # as a job of several layers is
        self.fragments = Fragments(
            np.uint64(self.kv.ctypes.data) + self.page_of.astype(np.uint64)[order] * np.uint64(PAGE),
            order * np.uint64(PAGE),
            np.full(len(order), PAGE, np.uint64),
        )
        self.time = 0.0
        self.reads, self.files = host_reads(BLOCK, now=lambda: self.time)
        self.errors: list[BaseException | None] = []
        self.ended = threading.Event()

    def begin(self) -> DirectRead:
        return self.reads.begin(self.extents, self.fragments, self.then)

    def then(self, seconds: float, error: BaseException | None) -> None:
        assert seconds >= 0 and not self.files.reading
        self.errors.append(error)
        self.ended.set()

    def load(self) -> BaseException | None:
        job = self.begin()
        self.reads.wait([job])
        assert job.over and len(self.errors) == 1 and not self.reads.poll()
        return self.errors.pop()

    def right(self) -> bool:
        return np.array_equal(self.kv[self.page_of].reshape(self.content.shape), self.content)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, 7)
    yield rig
    rig.files.go.set()
    rig.reads.close()
    assert rig.files.closed


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 8, 33])
def test_every_page_gets_its_bytes(tmp_path: Path, blocks: int) -> None:
    rig = Rig(tmp_path, blocks)
    assert rig.load() is None and rig.right()
    assert rig.reads.read_bytes == blocks * BLOCK and rig.reads.how == "gds_compat"
    rig.kv[:] = 0
    assert rig.load() is None and rig.right()
    rig.reads.close()


def test_nothing_of_a_block_that_is_damaged_is_written(rig: Rig) -> None:
    chance = random.Random(3)
    for bad, extent in enumerate(rig.extents):
        rig.kv[:] = 0
        place = extent.offset + chance.randrange(BLOCK)
        with open(extent.path, "r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))
        assert isinstance(rig.load(), Damage)
        written = rig.kv[rig.page_of].reshape(rig.content.shape)
        assert not written[bad].any()
        for number, block in enumerate(written):
            assert not block.any() or np.array_equal(block, rig.content[number])
        with open(extent.path, "r+b") as file:
            file.seek(place)
            file.write(bytes([byte]))
    assert rig.load() is None and rig.right()


def test_a_file_that_was_cut_off_is_damage(rig: Rig) -> None:
    last = max(rig.extents, key=lambda extent: extent.offset)
    with open(last.path, "r+b") as file:
        file.truncate(last.offset + BLOCK - 1)
    assert isinstance(rig.load(), Damage)
    with open(last.path, "r+b") as file:
        file.truncate(0)
    assert isinstance(rig.load(), Damage)


def test_a_file_that_is_gone_or_cannot_be_read_is_an_error(rig: Rig) -> None:
    rig.files.broken = RuntimeError("pread: EIO")
    assert rig.load() is rig.files.broken
    rig.files.broken = None
    Path(rig.extents[0].path).unlink()
    assert isinstance(rig.load(), OSError)


def test_a_block_of_another_size_is_not_even_read(rig: Rig) -> None:
    rig.extents[3] = DiskExtent(rig.extents[3].path, 0, BLOCK - 4096, 0)
    rig.files.broken = AssertionError("read")
    assert isinstance(rig.load(), Damage)


def test_the_end_is_told_when_the_last_read_is_over(rig: Rig) -> None:
    rig.files.go.clear()
    rig.files.broken = RuntimeError("the device hangs")
    job = rig.begin()
    assert rig.files.entered.wait(LIMIT_S) and not rig.ended.is_set() and not job.over
    rig.files.go.set()
    assert rig.ended.wait(LIMIT_S) and rig.errors == [rig.files.broken]  # then() has looked for reads under way


def test_jobs_end_in_their_order_and_before_close(rig: Rig) -> None:
    rig.files.go.clear()
    order: list[int] = []
    jobs = [
        rig.reads.begin(rig.extents, rig.fragments, lambda _seconds, _error, number=number: order.append(number))
        for number in range(3)
    ]
    rig.files.go.set()
    rig.reads.close()
    assert order == [0, 1, 2] and all(job.over for job in jobs) and rig.right()
    with pytest.raises(RuntimeError):
        rig.begin()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("blocks", [1, 7])
def test_a_medium_that_hangs_ends_all_jobs_and_what_it_reads_later_goes_nowhere(tmp_path: Path, blocks: int) -> None:
    rig = Rig(tmp_path, blocks)
    rig.files.go.clear()
    ends: list[tuple[int, BaseException | None]] = []

    def begin(number: int) -> DirectRead:
        return rig.reads.begin(rig.extents, rig.fragments, lambda _seconds, error: ends.append((number, error)))

    jobs = [begin(number) for number in range(3)]
    assert rig.files.waited.wait(LIMIT_S)
    rig.time += HANGS_S - 1
    assert not rig.reads.poll() and not ends and not rig.reads.hangs
    rig.time += 1
    rig.reads.wait(jobs)  # as an engine does that takes memory back
    assert [number for number, _ in ends] == [0, 1, 2] and all(isinstance(error, TimeoutError) for _, error in ends)
    assert all(job.over for job in jobs) and rig.reads.poll() and rig.reads.hangs
    with pytest.raises(RuntimeError):
        begin(3)
    rig.reads.close()  # does not wait, and leaves the buffer that is read into
    assert not rig.files.closed
    rig.files.go.set()
    until(lambda: not rig.reads.hangs)
    rig.reads.close()
    assert rig.files.closed and not rig.kv.any() and len(ends) == 3


def test_a_medium_that_hangs_is_not_waited_for_at_the_end(rig: Rig) -> None:
    rig.files.go.clear()
    job = rig.reads.begin(rig.extents, rig.fragments, lambda _seconds, error: rig.errors.append(error))
    closing = threading.Thread(target=rig.reads.close)
    closing.start()
    assert rig.files.waited.wait(LIMIT_S)
    rig.time += HANGS_S
    closing.join(LIMIT_S)
    assert not closing.is_alive() and job.over and isinstance(rig.errors.pop(), TimeoutError)
    rig.files.go.set()
    until(lambda: not rig.reads.hangs)


def test_one_read_after_the_other_may_take_as_long_as_it_likes(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 7)
    stage = rig.reads._stage
    settle = stage.settle

    def later(half: int) -> None:
        rig.time += HANGS_S - 1
        assert not rig.reads.poll()
        settle(half)

    stage.settle = later  # type: ignore[method-assign]
    assert rig.load() is None and rig.right()
    rig.reads.close()
