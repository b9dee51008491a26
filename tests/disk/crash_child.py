"""A process that works on a disk tier until it is killed, by others or by itself at a named point. Not a test.

Each line on its standard output says one thing that the tier answered, in the order of the answers:

    W key size    a write begins: the block may be there from now on
    S key         the block was stored, and a sync() that began afterwards ended
    d key         a deletion begins, or the block was evicted: it may be gone
    D key         its deletion ended: it must be gone
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from kvstore.clock import SystemClock
from kvstore.testing.data import make_block
from kvstore.tier import ReadOutcome, WriteOutcome, tier_key
from kvstore.tiers import disk_commit, disk_keeper
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_ledger import Ledger
from kvstore.tiers.files import Buffer, FileIO
from kvstore.tiers.slabs import Entry
from tests.disk.media import kill_self

CAPACITY_BYTES = 6 << 20
#: Few names, so that they are stored, deleted, evicted and stored again.
NAMES = 400
SIZES = (4096, 30_000, 65_536)
POINTS = (
    "torn payload",
    "before sync",
    "after sync",
    "after commit",
    "pre-writing",
    "evicting",
    "removing a slab",
    "growing",
    "keeping recency",
    "marking",
    "loading",
)


def key_of(number: int) -> bytes:
    return tier_key(b"crash test names", 0, number.to_bytes(32, "big"))


def size_of(number: int) -> int:
    """Always the same for the same name, as in a namespace. Sizes come in waves, so that slabs change their class."""
    return SIZES[number * len(SIZES) // NAMES]


def say(what: str) -> None:
    os.write(1, what.encode() + b"\n")


class Point:
    """Ends this process the n-th time that its name is passed."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.left = count

    def passed(self, name: str) -> bool:
        if name == self.name:
            self.left -= 1
        return self.name == name and self.left <= 0

    def __call__(self, name: str) -> None:
        if self.passed(name):
            kill_self()


class LethalIO(FileIO):
    """Passes the points that lie between system calls."""

    def __init__(self, point: Point) -> None:
        self._point = point
        self.loading = True
        self.syncing = "before sync"

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        thread = threading.current_thread().name
        if "-keep-" in thread:
            self._point("pre-writing")
        elif "-write-" in thread and self._point.passed("torn payload"):
            half = b"".join(buffers)[: sum(map(len, buffers)) // 2 // 4096 * 4096]
            with open(f"/proc/self/fd/{fd}", "r+b") as file:
                file.seek(offset)
                file.write(half)
                file.flush()
            kill_self()
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self.loading:
            self._point("loading")
        return super().preadv(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        if not self.loading:
            self._point(self.syncing)
        super().fdatasync(fd)
        if not self.loading and self.syncing == "before sync":
            self._point("after sync")

    def allocate(self, fd: int, length: int, *, keep_size: bool = False) -> None:
        super().allocate(fd, length, keep_size=keep_size)
        self._point("growing")

    def unlink(self, path: Path) -> None:
        self._point("removing a slab")
        super().unlink(path)


class LethalTier(DiskTier):
    """Tells of evictions, and passes the points that lie within the tier."""

    point: Point

    def _count_eviction(self, entry: Entry) -> None:
        say(f"d {entry.key.hex()}")
        self.point("evicting")
        super()._count_eviction(entry)


async def work(folder: Path, point: Point, rng: random.Random) -> None:
    io = LethalIO(point)
    tier = LethalTier(folder, CAPACITY_BYTES, SystemClock(), io=io, commit_interval_s=0.005, recency_interval_s=0.05)
    tier.point = point
    await tier.open()
    await tier.wait_loaded()
    io.loading = False
    say("ready")
    tasks = [asyncio.ensure_future(client(tier, random.Random(rng.random()), f"{lane}")) for lane in range(3)]
    await asyncio.gather(*tasks)


async def client(tier: DiskTier, rng: random.Random, lane: str) -> None:
    """Each client has names of its own, so that what it says of them is in the order of what happened."""
    own = [number for number in range(NAMES) if number % 3 == int(lane)]
    while True:
        start = rng.randrange(len(own))
        numbers = own[start : start + rng.randint(1, 24)]
        keys = [key_of(number) for number in numbers]
        choice = rng.random()
        if choice < 0.6:
            for number, key in zip(numbers, keys, strict=True):
                say(f"W {key.hex()} {size_of(number)}")
            blocks = [
                (key, memoryview(make_block(key, size_of(number)))) for number, key in zip(numbers, keys, strict=True)
            ]
            outcomes = await tier.write(blocks, 30)
            assert WriteOutcome.FAILED not in outcomes, outcomes
            there = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is WriteOutcome.STORED]
            if rng.random() < 0.5:
                entries = {key: tier.books.index.get(key) for key in there}
                assert await tier.sync()
                for key, entry in entries.items():
                    if entry is not None and tier.books.index.get(key) is entry:
                        say(f"S {key.hex()}")
        elif choice < 0.85:
            buffers = [memoryview(bytearray(size_of(number))) for number in numbers]
            outcomes_read = await tier.read(list(zip(keys, buffers, strict=True)), 30)
            for number, key, buffer, outcome in zip(numbers, keys, buffers, outcomes_read, strict=True):
                assert outcome in (ReadOutcome.OK, ReadOutcome.ABSENT), outcome
                assert outcome is ReadOutcome.ABSENT or buffer == make_block(key, size_of(number))
            tier.touch(keys)
        else:
            for key in keys:
                say(f"d {key.hex()}")
            await tier.delete(keys)
            for key in keys:
                say(f"D {key.hex()}")


def pass_in(name: str, point: str) -> None:
    """Has the syncs of a call of the ledger pass a point of their own."""
    call = getattr(Ledger, name)

    def named(self: Ledger, *args: object) -> None:
        io = self._folder.io
        assert isinstance(io, LethalIO)
        io.syncing = point
        call(self, *args)
        io.syncing = "before sync"

    setattr(Ledger, name, named)


def main() -> None:
    folder, name, count, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    point = Point(name, count)
    commit = disk_commit.DiskIndex.commit

    def commit_and_pass(self: disk_commit.DiskIndex, *args: object, **options: object) -> None:
        commit(self, *args, **options)  # type: ignore[arg-type]
        point("after commit")

    disk_commit.DiskIndex.commit = commit_and_pass  # type: ignore[method-assign, assignment]
    for name_of_call, name_of_point in (("write", "keeping recency"), ("append", "marking")):
        pass_in(name_of_call, name_of_point)
    disk_keeper._TICK_S = 0.01  # type: ignore[misc]
    asyncio.run(work(folder, point, random.Random(seed)))


if __name__ == "__main__":
    main()
