"""What the pool rests on, and how it gets its memory."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from kvstore import backing
from kvstore.backing import HUGE_PAGE_BYTES, HugePages, SharedMemory, open_pool_memory, open_table_memory
from kvstore.errors import ConfigError
from kvstore.population import CHUNK_BYTES, Populator

MIB = 1 << 20
WAIT_S = 60


def test_4_kib_pages_are_what_is_said() -> None:
    memory = open_pool_memory(4 * MIB, "off")
    try:
        memory.populate(0, 4 * MIB)
        assert (memory.backing.kind, memory.backing.page_bytes, memory.huge_bytes()) == ("4k", 4096, 0)
        assert "--hugepages off" in memory.backing.note
    finally:
        memory.close()


@pytest.mark.parametrize("wanted", ["auto", "thp", "hugetlb"])
def test_huge_pages_are_had_and_verified_or_refused_with_what_to_do(wanted: HugePages) -> None:
    """Whatever this machine allows: what is said is what the kernel says, and who insists is not given less."""
    try:
        memory = open_pool_memory(4 * MIB, wanted)
    except ConfigError as error:
        assert wanted != "auto" and f"--hugepages {wanted}" in str(error)
        assert any(word in str(error) for word in ("nr_hugepages", "offers none", "shmem_enabled", "CAP_SYS_ADMIN"))
        return
    try:
        memory.populate(0, 4 * MIB)
        kind, huge = memory.backing.kind, memory.huge_bytes()
        if kind == "4k":
            assert wanted == "auto" and huge == 0 and memory.backing.note
        else:
            assert memory.backing.page_bytes == HUGE_PAGE_BYTES and 0 <= huge <= 4 * MIB
            assert wanted != "hugetlb" or kind == "hugetlb"
    finally:
        memory.close()


def test_hugetlb_that_is_not_reserved_is_a_clear_error() -> None:
    free = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    pages = (int(free.read_text()) if free.exists() else 0) + 512
    with pytest.raises(ConfigError, match=r"--hugepages hugetlb: hugetlb: .*(nr_hugepages|offers none)"):
        open_pool_memory(pages * HUGE_PAGE_BYTES, "hugetlb")


def test_notes_say_why_nothing_better_was_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size_bytes: int) -> SharedMemory:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(backing, "_open_hugetlb", refuse)
    monkeypatch.setattr(backing, "_open_tmpfs_huge", refuse)
    monkeypatch.setattr(backing, "_shmem_setting", lambda: "never")
    memory = open_pool_memory(2 * MIB, "auto")
    try:
        assert memory.backing.kind == "4k"
        for word in ("hugetlb", "shmem_enabled", "tmpfs"):
            assert word in memory.backing.note
    finally:
        memory.close()
    with pytest.raises(ConfigError, match="--hugepages thp"):
        open_pool_memory(2 * MIB, "thp")


def test_nobody_can_shrink_the_pool_under_its_readers() -> None:
    memory = open_pool_memory(4 * MIB, "off")
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(memory.fd, 1033, 0)  # F_ADD_SEALS: the seals themselves are sealed
    finally:
        memory.close()


def test_the_epoch_table_is_read_only_for_others() -> None:
    memory, fd = open_table_memory(100)
    try:
        with pytest.raises(OSError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(OSError):
            os.pwrite(memory.fd, b"x", 0)  # not even through the daemon's own descriptor, if that leaked
        view = memory.buffer
        view[0] = 7
        assert os.pread(fd, 1, 0) == b"\x07" and len(view) == 4096
        view.release()
    finally:
        os.close(fd)
        memory.close()


class Memory:
    """Memory that can be held up and can run out."""

    def __init__(self, chunks: int, *, ends_at: int | None = None) -> None:
        self.size_bytes = chunks * CHUNK_BYTES
        self.go = threading.Event()
        self.populated: set[int] = set()
        self._ends_at = ends_at

    def populate(self, offset: int, length: int) -> None:
        assert self.go.wait(WAIT_S)
        if self._ends_at is not None and offset >= self._ends_at * CHUNK_BYTES:
            raise MemoryError("no more")
        self.populated.add(offset)


class Reports:
    def __init__(self, expected_bytes: int) -> None:
        self.lengths: list[int] = []
        self.errors: list[MemoryError] = []
        self.over = threading.Event()
        self._expected = expected_bytes

    def add(self, length: int) -> None:
        self.lengths.append(length)
        if sum(self.lengths) == self._expected:
            self.over.set()

    def fail(self, error: MemoryError) -> None:
        self.errors.append(error)
        self.over.set()


@pytest.mark.parametrize("threads", [1, 4])
def test_all_of_it_is_populated_and_reported_in_order(threads: int) -> None:
    memory = Memory(9)
    reports = Reports(memory.size_bytes)
    populator = Populator(memory, threads, reports.add, reports.fail)  # type: ignore[arg-type]
    populator.start()
    assert not reports.lengths
    memory.go.set()
    assert reports.over.wait(WAIT_S)
    populator.stop()
    assert sum(reports.lengths) == memory.size_bytes and not reports.errors
    assert len(memory.populated) == 9


@pytest.mark.parametrize("threads", [1, 4])
def test_where_the_machine_has_no_more_the_rest_stays_good(threads: int) -> None:
    memory = Memory(9, ends_at=5)
    reports = Reports(memory.size_bytes)
    populator = Populator(memory, threads, reports.add, reports.fail)  # type: ignore[arg-type]
    populator.start()
    memory.go.set()
    assert reports.over.wait(WAIT_S)
    populator.stop()
    assert len(reports.errors) == 1
    reported = sum(reports.lengths)
    assert reported <= 5 * CHUNK_BYTES
    assert set(range(0, reported, CHUNK_BYTES)) <= memory.populated


def test_stop_ends_it_early() -> None:
    memory = Memory(10_000)
    reports = Reports(memory.size_bytes)
    populator = Populator(memory, 2, reports.add, reports.fail)  # type: ignore[arg-type]
    populator.start()
    stopper = threading.Thread(target=populator.stop)
    stopper.start()
    memory.go.set()
    stopper.join(WAIT_S)
    assert not stopper.is_alive() and not reports.errors and sum(reports.lengths) < memory.size_bytes


def test_real_memory_has_its_pages_afterwards() -> None:
    memory = open_pool_memory(4 * MIB, "off")
    try:
        view = memory.buffer
        view[5] = 9
        memory.populate(0, 4 * MIB)
        assert view[5] == 9, "populating changes no byte"
        assert os.fstat(memory.fd).st_blocks * 512 == 4 * MIB
        memory.discard(2 * MIB, 2 * MIB)
        assert os.fstat(memory.fd).st_blocks * 512 == 2 * MIB
        view.release()
    finally:
        memory.close()
