"""The books of a disk tier: which extents there are, what lies in them, who leaves first. Pure bookkeeping, no I/O.

Slab files are rows of equal extents, one size class a file. An extent is in exactly one place: ready (written before,
holds nothing), raw (never written: usable, but a first write is slower), in flight (a write goes on), under an entry,
waiting (its entry is gone from memory and not yet from the index on disk), or retired (the medium fails there). Owned
by one thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from kvstore.policy import LruPolicy, Ticker

#: Slabs of a tier aim at this many, so that one can change its class without costing much.
SLABS_TARGET: Final = 64
SLAB_BYTES_MAX: Final = 1 << 30
#: ... but not at more than this many, each holds a descriptor.
SLABS_MAX: Final = 256
#: What the index on disk takes for one block at its worst, with the two copies of the recency file (16 bytes).
#: Measured, with all names as long as names can be and a fifth of them replaced in each commit: LMDB leaves pages
#: partly empty and writes a commit's pages beside the old ones, 1109 bytes; with names of vLLM's length 500
#: (tests/disk/test_budget.py).
INDEX_BYTES_PER_BLOCK: Final = 1280
#: What these books take in memory for a block: 264 after a start, and up to 390 while blocks come and go, since a dict
#: that has just grown is two thirds empty.
MEMORY_BYTES_PER_BLOCK: Final = 390
#: ... of it the recency file, twice while it is written anew.
RECENCY_BYTES_PER_BLOCK: Final = 16
#: What a slab takes beside its extents: the file system's own blocks.
SLAB_OVERHEAD_BYTES: Final = 16 << 10
#: In `used`: nothing lies in the extent, and nothing that was written up to the sequence beside it may come back.
GONE: Final = 1 << 63
#: In `used`, beside GONE: the extent was never written.
RAW: Final = 1 << 62
SEQUENCE_MASK: Final = RAW - 1
#: Entries of the coldest end that are looked at to find the slab that is coldest.
_COLD_SAMPLE: Final = 128


class Entry:
    """One block at rest."""

    __slots__ = ("extent", "key", "size_bytes", "slab", "tick")

    def __init__(self, key: bytes, slab: Slab, extent: int, size_bytes: int) -> None:
        self.tick = 0
        self.key = key
        self.slab = slab
        self.extent = extent
        self.size_bytes = size_bytes


class Slab:
    """One file of equal extents.

    Attributes:
        number: Names the file.
        fd: Open descriptor.
        ready, raw: Free extents, the next one last.
        entries: What lies in each extent.
        used: By extent, the sequence of its last use, with GONE or RAW; what recency is restored from (disk_ledger).
        in_flight: Extents that a write goes on in.
        readers: Reads of it that go on.
        dead: It was given up; nothing goes in or out any more.
        named: Its name is durable, too.
    """

    __slots__ = (
        "count",
        "dead",
        "entries",
        "extent_bytes",
        "extents",
        "fd",
        "in_flight",
        "inode",
        "named",
        "number",
        "raw",
        "readers",
        "ready",
        "retired",
        "used",
    )

    def __init__(self, number: int, extent_bytes: int, extents: int, fd: int, inode: int) -> None:
        self.number = number
        self.extent_bytes = extent_bytes
        self.extents = extents
        self.fd = fd
        self.inode = inode
        self.entries: list[Entry | None] = [None] * extents
        self.used = array("Q", [GONE | RAW]) * extents
        self.ready: list[int] = []
        self.raw: list[int] = []
        self.in_flight = 0
        self.readers = 0
        self.retired = 0
        self.count = 0
        self.dead = False
        self.named = True

    def forget(self) -> None:
        """Empties its books."""
        self.entries = [None] * self.extents
        self.used = array("Q", [GONE | RAW]) * self.extents
        self.count = 0
        self.dead = False

    @property
    def size_bytes(self) -> int:
        return self.extents * self.extent_bytes

    @property
    def charge_bytes(self) -> int:
        return charge_of(self.extent_bytes, self.extents)


def charge_of(extent_bytes: int, extents: int) -> int:
    """What a slab takes from the budget, with its part of the index at its worst."""
    return extents * (extent_bytes + INDEX_BYTES_PER_BLOCK) + SLAB_OVERHEAD_BYTES


class SlabClass:
    """The slabs of one extent size."""

    __slots__ = ("extent_bytes", "policy", "slabs")

    def __init__(self, extent_bytes: int, ticker: Ticker) -> None:
        self.extent_bytes = extent_bytes
        self.slabs: dict[int, Slab] = {}
        self.policy: LruPolicy[Entry] = LruPolicy(ticker)


class Books:
    """See the module.

    Attributes:
        budget_bytes: What slabs may be charged in all.
        index_excess_bytes: How much longer the file of the index is than what extents are charged for it. It never gets
            shorter, also when slabs of many small extents become slabs of a few large ones.
        sequence: Grows with each write and use; never repeats in a directory.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.index_excess_bytes = 0
        self.index: dict[bytes, Entry] = {}
        self.classes: dict[int, SlabClass] = {}
        self.slabs: dict[int, Slab] = {}
        self.sequence = 1
        self.charged_bytes = 0
        self.payload_bytes = 0
        self.next_slab = 1
        self._ticker = Ticker()
        #: Extents that are being read, and how often; freed ones of them wait for the last reader.
        self._reading: dict[tuple[int, int], int] = {}
        self._freed_while_read: set[tuple[int, int]] = set()

    @property
    def memory_bytes(self) -> int:
        """About what all of this takes in memory now."""
        return len(self.index) * MEMORY_BYTES_PER_BLOCK

    @property
    def memory_bytes_max(self) -> int:
        """About what it takes once the budget is full of blocks as large as those that there is room for now; 0: nobody
        knows, since there is none yet.
        """
        extents = sum(slab.extents for slab in self.slabs.values())
        return self.budget_bytes * extents // self.charged_bytes * MEMORY_BYTES_PER_BLOCK if extents else 0

    # -- slabs -------------------------------------------------------------------------------------------------------

    def class_of(self, extent_bytes: int) -> SlabClass:
        """The class of an extent size, made where there is none."""
        found = self.classes.get(extent_bytes)
        if found is None:
            found = self.classes[extent_bytes] = SlabClass(extent_bytes, self._ticker)
        return found

    def room_for_slab(self, extent_bytes: int) -> int:
        """Extents that a new slab of this size should have; 0 where the budget has no room for one."""
        whole = self.budget_bytes
        target = max(min(whole // SLABS_TARGET, SLAB_BYTES_MAX), whole // SLABS_MAX)
        extents = max(1, target // extent_bytes)
        room = self.budget_bytes - self.charged_bytes - self.index_excess_bytes - SLAB_OVERHEAD_BYTES
        found = max(0, min(extents, room // (extent_bytes + INDEX_BYTES_PER_BLOCK)))
        # The last bit of the budget is not worth a descriptor and a file.
        return found if found >= -(-extents // 4) or not self.slabs else 0

    def charge(self, slab_bytes: int) -> None:
        """Takes bytes from the budget (gives them back where negative), before a file grows and after it is gone."""
        self.charged_bytes += slab_bytes

    def add_slab(self, slab: Slab) -> None:
        """A file that is there. Its charge was taken before."""
        self.slabs[slab.number] = slab
        self.class_of(slab.extent_bytes).slabs[slab.number] = slab
        self.next_slab = max(self.next_slab, slab.number + 1)

    def drop_slab(self, slab: Slab) -> list[Entry]:
        """Gives a slab up with all that lies in it. Its charge stays until the file is gone."""
        slab.dead = True
        lost = [entry for entry in slab.entries if entry is not None]
        for entry in lost:
            self.remove(entry)
        slab.ready.clear()
        slab.raw.clear()
        self.slabs.pop(slab.number, None)
        self.class_of(slab.extent_bytes).slabs.pop(slab.number, None)
        return lost

    # -- extents -----------------------------------------------------------------------------------------------------

    def take(self, kind: SlabClass, count: int) -> list[tuple[Slab, int]]:
        """Up to `count` free extents, neighbours where there are some. They are in flight afterwards."""
        taken: list[tuple[Slab, int]] = []
        for stock in ("ready", "raw"):
            for slab in reversed(kind.slabs.values()):
                free: list[int] = getattr(slab, stock)
                number = min(count - len(taken), len(free))
                if number:
                    taken.extend((slab, free.pop()) for _ in range(number))
                    slab.in_flight += number
                if len(taken) == count:
                    return taken
        return taken

    def give_back(self, slab: Slab, extent: int) -> None:
        """An extent in flight comes to nothing. No index names it."""
        slab.in_flight -= 1
        self.free(slab, [extent])

    def spoil(self, slab: Slab, extent: int) -> int:
        """An extent in flight may hold a block that nobody was told of. Until which sequence it is not to come back."""
        sequence = self.next_sequence()
        slab.used[extent] = GONE | sequence
        self.give_back(slab, extent)
        return sequence

    def free(self, slab: Slab, extents: Sequence[int]) -> None:
        """Extents that no index names any more may be used again, the last one first, once nobody reads them."""
        if slab.dead:
            return
        if slab.readers:
            read = [extent for extent in extents if (slab.number, extent) in self._reading]
            self._freed_while_read.update((slab.number, extent) for extent in read)
            waiting = set(read)
            extents = [extent for extent in extents if extent not in waiting]
        slab.ready.extend(extents)

    def take_raw(self, bytes_max: int) -> tuple[Slab, int, int] | None:
        """A run of raw extents to be pre-written: slab, first extent, how many. They are in flight afterwards."""
        for slab in self.slabs.values():
            if slab.raw:
                first = slab.raw.pop()
                count = 1
                while slab.raw and slab.raw[-1] == first + count and (count + 1) * slab.extent_bytes <= bytes_max:
                    slab.raw.pop()
                    count += 1
                slab.in_flight += count
                return slab, first, count
        return None

    def prewritten(self, slab: Slab, first: int, count: int, *, done: bool) -> None:
        """A run that take_raw gave was written, or could not be."""
        slab.in_flight -= count
        if not slab.dead:
            extents = range(first + count - 1, first - 1, -1)
            (slab.ready if done else slab.raw).extend(extents)
            if done:
                for extent in extents:
                    slab.used[extent] &= ~RAW
                slab.ready.sort(reverse=True)

    def retire(self, slab: Slab) -> None:
        """An extent is not used again before the next start: the medium fails there."""
        slab.retired += 1

    def reading(self, entry: Entry) -> None:
        """A read of an entry begins."""
        place = (entry.slab.number, entry.extent)
        self._reading[place] = self._reading.get(place, 0) + 1
        entry.slab.readers += 1

    def read_done(self, slab: Slab, extent: int) -> None:
        """A read is through."""
        slab.readers -= 1
        place = (slab.number, extent)
        left = self._reading[place] - 1
        if left:
            self._reading[place] = left
            return
        del self._reading[place]
        if place in self._freed_while_read:
            self._freed_while_read.discard(place)
            if not slab.dead:
                slab.ready.append(extent)

    def next_sequence(self) -> int:
        """For one write."""
        self.sequence += 1
        return self.sequence - 1

    # -- entries -----------------------------------------------------------------------------------------------------

    def settle(self, key: bytes, slab: Slab, extent: int, size_bytes: int) -> Entry:
        """An extent in flight holds a block now. touch() makes it known to the policy; until then it cannot leave."""
        entry = Entry(key, slab, extent, size_bytes)
        slab.in_flight -= 1
        slab.entries[extent] = entry
        slab.used[extent] = self.next_sequence()
        slab.count += 1
        self.index[key] = entry
        self.payload_bytes += size_bytes
        return entry

    def remove(self, entry: Entry) -> None:
        """An entry is gone from memory. Its extent is still named by the index on disk."""
        assert self.index.get(entry.key) is entry
        del self.index[entry.key]
        slab = entry.slab
        slab.entries[entry.extent] = None
        slab.used[entry.extent] |= GONE
        slab.count -= 1
        self.payload_bytes -= entry.size_bytes
        self.class_of(slab.extent_bytes).policy.forget(entry)

    def touch(self, entries: Sequence[Entry]) -> None:
        """Notes a use, in prefix order."""
        by_class: dict[int, list[Entry]] = {}
        stamp = self.sequence + len(entries)
        self.sequence = stamp + 1
        for entry in entries:
            slab = entry.slab
            slab.used[entry.extent] = stamp
            stamp -= 1
            by_class.setdefault(slab.extent_bytes, []).append(entry)
        for extent_bytes, chain in by_class.items():
            self.class_of(extent_bytes).policy.touch(chain)

    def evict(self, kind: SlabClass, count: int) -> list[Entry]:
        """Removes up to `count` entries of a class, coldest first."""
        leaving: list[Entry] = []
        while len(leaving) < count and (entry := kind.policy.pop()) is not None:
            self.remove(entry)
            leaving.append(entry)
        return leaving

    def slab_to_steal(self, kind: SlabClass) -> Slab | None:
        """The slab of another class that is colder than anything of this one; None where there is none."""
        own = kind.policy.oldest_age()
        best: tuple[float, Slab] | None = None
        for other in self.classes.values():
            if other is kind:
                continue
            idle = [slab for slab in other.slabs.values() if not slab.count and not slab.in_flight]
            if idle:
                return idle[0]
            oldest = other.policy.oldest_age()
            if oldest is None or (own is not None and oldest >= own) or (best is not None and oldest >= best[0]):
                continue
            slab = self._coldest_slab(other)
            if slab is not None:
                best = (oldest, slab)
        return best[1] if best else None

    @staticmethod
    def _coldest_slab(kind: SlabClass) -> Slab | None:
        """The slab with most of the coldest entries. One that is being written to stays."""
        votes: dict[int, int] = {}
        for entry in kind.policy.peek(_COLD_SAMPLE):
            if not entry.slab.in_flight:
                votes[entry.slab.number] = votes.get(entry.slab.number, 0) + 1
        return kind.slabs[max(votes, key=lambda number: votes[number])] if votes else None
