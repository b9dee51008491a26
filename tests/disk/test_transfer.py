"""Loads before stores, and few system calls straight between buffers and extents."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.backing import open_pool_memory
from kvstore.testing import make_block
from kvstore.testing.tier_suite import BLOCK_BYTES, DEADLINE_S, name_of
from kvstore.tier import ReadOutcome, WriteOutcome
from kvstore.tiers.files import Buffer, FileIO
from kvstore.tiers.io_threads import IoThreads, Lane
from tests.disk.media import opened


async def test_no_store_begins_while_a_load_waits() -> None:
    threads = IoThreads("test", dict.fromkeys(Lane, 1))
    order: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)

    holding = threads.submit(Lane.READ, hold)
    assert await asyncio.to_thread(begun.wait, DEADLINE_S)
    jobs = [threads.submit(Lane.READ, lambda number=number: order.append(f"load {number}")) for number in range(5)]
    jobs += [threads.submit(Lane.WRITE, lambda number=number: order.append(f"store {number}")) for number in range(5)]
    go_on.set()
    await asyncio.wait([holding.future, *(job.future for job in jobs)])
    # The last load no longer waits when it has begun, so a store may overtake its end, and none its beginning.
    assert set(order[:4]) == {f"load {number}" for number in range(4)}
    assert [one for one in order if one.startswith("store")] == [f"store {number}" for number in range(5)]
    assert threads.depth == dict.fromkeys(Lane, 0)
    assert threads.close(DEADLINE_S)


async def test_what_has_not_begun_can_be_taken_back() -> None:
    threads = IoThreads("test", dict.fromkeys(Lane, 1))
    begun, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    def hold() -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)

    holding = threads.submit(Lane.READ, hold)
    assert await asyncio.to_thread(begun.wait, DEADLINE_S)
    waiting = threads.submit(Lane.READ, lambda: ran.append(1))
    store = threads.submit(Lane.WRITE, lambda: ran.append(2))
    assert not threads.withdraw(holding)
    assert threads.withdraw(waiting) and waiting.future.cancelled()
    await store.future  # the load that kept it waiting is gone
    assert ran == [2]
    go_on.set()
    await holding.future
    assert threads.close(DEADLINE_S)


async def test_an_error_on_a_thread_is_the_callers() -> None:
    threads = IoThreads("test", dict.fromkeys(Lane, 1))
    with pytest.raises(ZeroDivisionError):
        await threads.call(Lane.KEEP, lambda: 1 // 0)
    assert await threads.call(Lane.KEEP, lambda: 7) == 7
    assert threads.close(DEADLINE_S)


class CountingIO(FileIO):
    """Counts transfers of slabs."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.writes: list[int] = []

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self.reads.append(len(buffers))
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self.writes.append(len(buffers))
        return super().pwritev(fd, buffers, offset)


async def test_neighbours_share_a_call_and_slots_go_straight(tmp_path: Path) -> None:
    io = CountingIO()
    memory = open_pool_memory(16 << 20, "off")
    keys = [name_of(number) for number in range(64)]
    slots = [memory.buffer[at : at + BLOCK_BYTES] for at in range(0, 64 * BLOCK_BYTES, BLOCK_BYTES)]
    for key, slot in zip(keys, slots, strict=True):
        slot[:] = make_block(key, BLOCK_BYTES)
    async with opened(tmp_path, 1 << 30, io=io, prewrite=False) as tier:
        io.writes.clear()
        io.reads.clear()
        assert await tier.write(list(zip(keys, slots, strict=True)), DEADLINE_S) == [WriteOutcome.STORED] * 64
        assert len(io.writes) <= 8 and sum(io.writes) == 2 * 64
        memory.buffer[:] = bytes(len(memory.buffer))
        backwards = list(zip(keys, slots, strict=True))[::-1]
        assert await tier.read(backwards, DEADLINE_S) == [ReadOutcome.OK] * 64
        assert len(io.reads) <= 12
        assert tier.stats()["bounced"] == 0
    for key, slot in zip(keys, slots, strict=True):
        assert slot == make_block(key, BLOCK_BYTES)


@pytest.mark.parametrize("offset", [512, 100])
async def test_slots_that_do_not_lie_well_are_copied_only_where_they_must(tmp_path: Path, offset: int) -> None:
    memory = open_pool_memory(2 << 20, "off")
    key = name_of(1)
    slot = memory.buffer[offset : offset + BLOCK_BYTES]
    slot[:] = make_block(key, BLOCK_BYTES)
    async with opened(tmp_path) as tier:
        assert await tier.write([(key, slot)], DEADLINE_S) == [WriteOutcome.STORED]
        slot[:] = bytes(BLOCK_BYTES)
        assert await tier.read([(key, slot)], DEADLINE_S) == [ReadOutcome.OK]
        assert slot == make_block(key, BLOCK_BYTES)
        assert tier.stats()["bounced"] == (2 if offset % tier.stats()["memory_align"] else 0)
