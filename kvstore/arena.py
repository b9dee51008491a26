"""The pool: one shared mapping, cut into segments of equal slots, with an epoch per slot.

Geometry
    The mapping is a row of *granules* of 2 MiB (a huge page, so that a granule can be given back whole). A *segment* is
    a run of granules that holds slots of one size; how many granules is chosen per size so that little is left over at
    its end. A segment whose last slot comes back dissolves into free granules, which any size may take.
Waste
    A slot is the block rounded up to 4 KiB, or to 512 bytes where 4 KiB would waste more than 2 % (O_DIRECT needs 512).
    With at most 2 % left over at a segment's end, waste stays under 5 % for every block of at least 64 KiB.
Budget
    The byte budget covers the mapping, the epoch table, this process's page tables and BOOKKEEPING_BYTES for each slot
    that exists. Where blocks are so small that bookkeeping outgrows what was set aside for it, free granules are
    retired; they come back when no process is left that had the mapping then.
Epochs
    A table of its own, which only the daemon can write. A slot's epoch changes when the slot is handed to a writer, and
    all epochs of a segment's range when it is opened; a reader that finds another value after its copy than the one it
    was given throws the copy away.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.backing import (
    HUGE_PAGE_BYTES,
    SMALL_PAGE_BYTES,
    HugePages,
    address_of,
    open_pool_memory,
    open_table_memory,
    populate_pages,
)
from kvstore.errors import ConfigError

Offsets = npt.NDArray[np.uint64]
Epochs = npt.NDArray[np.uint32]

GRANULE_BYTES: Final = HUGE_PAGE_BYTES
#: Smallest slot, and the step of the epoch table: one epoch for each 4 KiB, so every slot has one of its own.
SLOT_BYTES_MIN: Final = 4096
_EPOCH_SHIFT: Final = SLOT_BYTES_MIN.bit_length() - 1
#: As numpy wants it: made anew for each use it takes a tenth of the look.
_EPOCH_SHIFT_OF_OFFSETS: Final = np.uint64(_EPOCH_SHIFT)
#: What a segment aims at: large enough that moving one between sizes is worth it, small enough to have many.
SEGMENT_BYTES_TARGET: Final = 64 << 20
_SEGMENTS_MIN: Final = 16
_WASTE_MAX: Final = 0.02
#: What the daemon's heap needs for one block: directory entry, key, policy. Measured by bench/directory.py, which fails
#: above it.
BOOKKEEPING_BYTES: Final = 400
#: Set aside for bookkeeping from the start: enough for blocks of 80 KiB and more.
_BOOKKEEPING_SHARE: Final = 0.005
POOL_BYTES_MIN: Final = 16 << 20

#: Retired granules that come back in one step: giving them memory takes some 10 ms.
_TAKEN_BACK_MAX: Final = 32

_UNPOPULATED, _FREE, _USED, _RETIRED = 0, 1, 2, 3


def slot_bytes_for(block_bytes: int) -> int:
    """Bytes of the slot that holds a block of this size."""
    for alignment in (4096, 512):
        slot = -(-block_bytes // alignment) * alignment
        if alignment == 512 or slot - block_bytes <= slot * _WASTE_MAX:
            return max(slot, SLOT_BYTES_MIN)
    raise AssertionError("unreachable")


class Segment:
    """A run of granules that holds slots of one size. Belongs to the arena's owner; no thread safety.

    Attributes:
        base: Offset of the first slot.
        slot_bytes: Size of each slot.
        slots: How many there are.
        free: Offsets of those that hold nothing.
        reserved: How many are held by writers.
        blocks: What rests in each slot, by index; the arena does not look into it.
    """

    __slots__ = ("base", "blocks", "free", "granules", "reserved", "slot_bytes", "slots")

    def __init__(self, base: int, granules: int, slot_bytes: int) -> None:
        self.base = base
        self.granules = granules
        self.slot_bytes = slot_bytes
        self.slots = granules * GRANULE_BYTES // slot_bytes
        self.free = [base + index * slot_bytes for index in range(self.slots - 1, -1, -1)]
        self.reserved = 0
        self.blocks: list[object | None] = [None] * self.slots

    def index_of(self, offset: int) -> int:
        """Index of the slot that starts at an offset."""
        return (offset - self.base) // self.slot_bytes


class SizeClass:
    """The segments of one slot size."""

    __slots__ = ("roomy", "segments", "slot_bytes")

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.segments: dict[int, Segment] = {}
        #: Those with a free slot, by base; the last one is filled first.
        self.roomy: dict[int, Segment] = {}


class Arena:
    """The daemon's side of the pool. Owned by one thread, but for populate_next.

    Attributes:
        budget_bytes: What the pool and everything it needs may take.
        size_bytes: Length of the mapping.
        populated_bytes: How far the mapping has its memory; slots come from that part only.
    """

    def __init__(self, budget_bytes: int, huge_pages: HugePages = "auto") -> None:
        """Maps the pool; nothing is populated.

        Raises:
            ConfigError: the budget is too small, or huge pages were insisted on and cannot be had.
        """
        if budget_bytes < POOL_BYTES_MIN:
            raise ConfigError(f"cpu_bytes is {budget_bytes}: the pool needs at least {POOL_BYTES_MIN} bytes (16 MiB)")
        self.budget_bytes = budget_bytes
        per_granule = GRANULE_BYTES + self._overhead_of(GRANULE_BYTES) + int(GRANULE_BYTES * _BOOKKEEPING_SHARE)
        self._granules = budget_bytes // per_granule
        self.size_bytes = self._granules * GRANULE_BYTES
        self.memory = open_pool_memory(self.size_bytes, huge_pages)
        self._table, self.epochs_fd = open_table_memory(self.size_bytes >> _EPOCH_SHIFT << 2)
        self._epochs = np.frombuffer(self._table.buffer, dtype="<u4")
        self._state = bytearray(self._granules)
        self._slots = 0
        self._segment_bytes = min(SEGMENT_BYTES_TARGET, max(GRANULE_BYTES, self.size_bytes // _SEGMENTS_MIN))
        self._segment_at: list[Segment | None] = [None] * self._granules
        self.classes: dict[int, SizeClass] = {}
        self.populated_bytes = 0
        #: What of it is on huge pages, as the kernel told once it was populated.
        self.huge_bytes = 0
        self._holders: set[bytes] = set()
        #: Granules whose memory went back to the machine (see _make_room_for_bookkeeping), and who could see them.
        self._retired: dict[int, frozenset[bytes]] = {}

    @staticmethod
    def _overhead_of(size_bytes: int) -> int:
        """Epoch table and 8 bytes of page table for each small page."""
        return (size_bytes >> _EPOCH_SHIFT << 2) + size_bytes // SMALL_PAGE_BYTES * 8

    @property
    def overhead_bytes(self) -> int:
        """What of the budget goes to anything but slots: tables, and the bookkeeping of the slots that exist."""
        return self._overhead_of(self.size_bytes) + self._slots * BOOKKEEPING_BYTES

    @property
    def committed_bytes(self) -> int:
        """The most that the pool takes now. Never above budget_bytes."""
        return self.size_bytes - self.retired_granules * GRANULE_BYTES + self.overhead_bytes

    @property
    def retired_granules(self) -> int:
        """Granules whose memory went back to the machine."""
        return len(self._retired)

    @property
    def free_granules(self) -> int:
        """Populated granules that belong to no segment."""
        return self._state.count(_FREE)

    # -- other processes -------------------------------------------------------------------------------------------

    def opened_by(self, holder: bytes) -> None:
        """A process has the mapping. It may have pinned memory of it, as who has a GPU does: that copies from and to
        the very pages that there were, also when they have gone back to the machine and others came there.
        """
        self._holders.add(holder)

    def closed_by(self, holder: bytes) -> None:
        """It has the mapping no longer."""
        self._holders.discard(holder)
        self._take_back_retired()

    # -- population ------------------------------------------------------------------------------------------------

    def add_populated(self, length: int) -> None:
        """Tells that the next `length` bytes have their memory; slots may come from them."""
        start = self.populated_bytes // GRANULE_BYTES
        self.populated_bytes = min(self.size_bytes, self.populated_bytes + length)
        for index in range(start, self.populated_bytes // GRANULE_BYTES):
            if self._state[index] == _UNPOPULATED:
                self._state[index] = _FREE

    @property
    def populated(self) -> bool:
        """Whether every byte has its memory."""
        return self.populated_bytes == self.size_bytes

    # -- slots -----------------------------------------------------------------------------------------------------

    def fits(self, slot_bytes: int) -> bool:
        """Whether a slot of this size can ever exist here."""
        return slot_bytes <= self.size_bytes

    def allocate(self, slot_bytes: int, count: int) -> list[int]:
        """Takes up to `count` free slots of a size, from its segments and then from free granules; bumps their epochs.

        They count as reserved until fill() or free().
        """
        size_class = self.classes.get(slot_bytes)
        if size_class is None:
            size_class = self.classes[slot_bytes] = SizeClass(slot_bytes)
        taken: list[int] = []
        while len(taken) < count:
            if not size_class.roomy:
                if self._open_segment(size_class, count - len(taken)) is None:
                    break
                continue
            base, segment = next(reversed(size_class.roomy.items()))
            several = segment.free[-(count - len(taken)) :]
            del segment.free[-len(several) :]
            segment.reserved += len(several)
            taken.extend(reversed(several))
            if not segment.free:
                del size_class.roomy[base]
        if not size_class.segments:
            del self.classes[slot_bytes]
        if taken:
            self._epochs[np.array(taken, dtype=np.uint64) >> _EPOCH_SHIFT_OF_OFFSETS] += np.uint32(1)
        return taken

    def fill(self, offset: int, block: object) -> Segment:
        """Turns a reserved slot into the resting place of a block."""
        segment = self.segment_of(offset)
        segment.reserved -= 1
        segment.blocks[segment.index_of(offset)] = block
        return segment

    def free(self, offset: int, segment: Segment, *, reserved: bool) -> None:
        """Takes a slot back, from a writer (`reserved`) or from a block that leaves."""
        if reserved:
            segment.reserved -= 1
        else:
            segment.blocks[segment.index_of(offset)] = None
        size_class = self.classes[segment.slot_bytes]
        segment.free.append(offset)
        if len(segment.free) == segment.slots:
            self._dissolve(size_class, segment)
        else:
            size_class.roomy[segment.base] = segment

    def segment_of(self, offset: int) -> Segment:
        """The segment that a slot is in."""
        segment = self._segment_at[offset // GRANULE_BYTES]
        assert segment is not None
        return segment

    def epochs_of(self, offsets: Offsets) -> Epochs:
        """Epochs of slots, now."""
        # Signed, as numpy's own indices are: others are converted.
        found: Epochs = self._epochs[(offsets >> _EPOCH_SHIFT_OF_OFFSETS).view(np.int64)]
        return found

    # -- segments --------------------------------------------------------------------------------------------------

    def granules_for(self, slot_bytes: int, slots_wanted: int = 1 << 30) -> int:
        """Granules of a new segment for this size: near the target, with little left over at the end."""
        least = -(-slot_bytes // GRANULE_BYTES)
        wanted = -(-min(self._segment_bytes, slot_bytes * slots_wanted) // GRANULE_BYTES)
        start = max(least, wanted)
        best, best_waste = start, 1.0
        for granules in range(start, max(start * 8, start + 64)):
            if granules > self._granules:
                break
            waste = (granules * GRANULE_BYTES % slot_bytes) / (granules * GRANULE_BYTES)
            if waste < best_waste:
                best, best_waste = granules, waste
            if waste <= _WASTE_MAX:
                break
        return best

    def windows(
        self, granules: int, seeds: Iterable[Segment], movable: Callable[[Segment], bool]
    ) -> Iterator[list[Segment]]:
        """Runs of at least `granules` granules around each seed, made of free granules and movable segments.

        Yields the segments of each run; dissolving them all makes room for a segment of that many granules.
        """
        for seed in seeds:
            if self._segment_at[seed.base // GRANULE_BYTES] is not seed or not movable(seed):
                continue
            low = seed.base // GRANULE_BYTES
            high = low + seed.granules
            inside = [seed]
            for index in (high, low - 1):  # the two directions, upwards first
                while high - low < granules and 0 <= index < self._granules:
                    segment = self._segment_at[index]
                    if segment is None:
                        if self._state[index] != _FREE:
                            break
                        width = 1
                    elif movable(segment):
                        width = segment.granules
                        inside.append(segment)
                    else:
                        break
                    if index >= high:
                        high += width
                        index = high
                    else:
                        low -= width
                        index = low - 1
            if high - low >= granules:
                yield inside

    def _open_segment(self, size_class: SizeClass, slots_wanted: int) -> Segment | None:
        """Makes a segment out of free granules, the size it should have or else what there is room for."""
        slot_bytes = size_class.slot_bytes
        least = -(-slot_bytes // GRANULE_BYTES)
        granules = self.granules_for(slot_bytes)
        start = self._state.find(bytes([_FREE]) * granules)
        while start < 0 and granules > least:
            granules = max(least, granules // 2)
            start = self._state.find(bytes([_FREE]) * granules)
        if start < 0:
            before = self.retired_granules
            self._take_back_retired()
            return self._open_segment(size_class, slots_wanted) if self.retired_granules < before else None
        segment = Segment(start * GRANULE_BYTES, granules, slot_bytes)
        if not self._make_room_for_bookkeeping(segment):
            return None
        self._segment_at[start : start + granules] = [segment] * granules
        self._state[start : start + granules] = bytes([_USED]) * granules
        self._slots += segment.slots
        self._outdate(segment.base, granules * GRANULE_BYTES)
        size_class.segments[segment.base] = segment
        size_class.roomy[segment.base] = segment
        return segment

    def _make_room_for_bookkeeping(self, segment: Segment) -> bool:
        """Retires free granules until the bookkeeping of a new segment fits the budget."""
        needed = segment.slots * BOOKKEEPING_BYTES
        first, last = segment.base // GRANULE_BYTES, segment.base // GRANULE_BYTES + segment.granules
        while self.committed_bytes + needed > self.budget_bytes:
            index = self._state.rfind(bytes([_FREE]))
            if index < 0 or first <= index < last:
                return False
            self._outdate(index * GRANULE_BYTES, GRANULE_BYTES)
            self.memory.discard(index * GRANULE_BYTES, GRANULE_BYTES)
            self._state[index] = _RETIRED
            self._retired[index] = frozenset(self._holders)
        return True

    def _outdate(self, offset: int, length: int) -> None:
        """Changes every epoch of a range. Slots of another size may have begun anywhere in it, and whoever still reads
        one has to notice, whichever slots are handed out from now on.
        """
        first = offset >> _EPOCH_SHIFT
        self._epochs[first : first + (length >> _EPOCH_SHIFT)] += np.uint32(1)

    def _dissolve(self, size_class: SizeClass, segment: Segment) -> None:
        del size_class.segments[segment.base]
        size_class.roomy.pop(segment.base, None)
        if not size_class.segments:
            del self.classes[segment.slot_bytes]
        start = segment.base // GRANULE_BYTES
        self._segment_at[start : start + segment.granules] = [None] * segment.granules
        self._state[start : start + segment.granules] = bytes([_FREE]) * segment.granules
        self._slots -= segment.slots
        self._take_back_retired()

    def _take_back_retired(self) -> None:
        """Some retired granules come back as soon as the budget has room for them: large blocks need them again. Not
        while somebody may have pinned the memory that they had before.
        """
        if self.committed_bytes + GRANULE_BYTES > self.budget_bytes:
            return  # of a full pool this is asked again and again
        free = (index for index, had in sorted(self._retired.items()) if had.isdisjoint(self._holders))
        for index in itertools.islice(free, _TAKEN_BACK_MAX):
            if self.committed_bytes + GRANULE_BYTES > self.budget_bytes:
                return
            try:
                self.memory.populate(index * GRANULE_BYTES, GRANULE_BYTES)
            except MemoryError:  # somebody else has it now
                return
            self._state[index] = _FREE
            del self._retired[index]

    def close(self) -> None:
        """Gives everything back. Other processes that mapped the pool keep what they mapped."""
        del self._epochs
        os.close(self.epochs_fd)
        self._table.close()
        self.memory.close()


class ArenaView:
    """A client's side of the pool: the mapping and the epochs. Safe from any thread.

    The mapping stays as long as this object or any view of it is referenced, also when the daemon has gone: a copy that
    is under way ends with the bytes it began with.

    Attributes:
        generation: The life of the pool that this is a view of.
        size_bytes: Length of the mapping.
        address: Where the mapping starts in this process.
        populated_bytes: How far the mapping has its memory, as the daemon last told.
    """

    def __init__(self, pool_fd: int, epochs_fd: int, size_bytes: int, generation: bytes) -> None:
        """Maps both files; the descriptors may be closed afterwards."""
        self.generation = generation
        self.size_bytes = size_bytes
        self.populated_bytes = 0
        self._map = mmap.mmap(pool_fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._map.madvise(mmap.MADV_DONTDUMP)
        self.address = address_of(self._map)
        self.buffer = memoryview(self._map)
        self._epochs_map = mmap.mmap(epochs_fd, size_bytes >> _EPOCH_SHIFT << 2, mmap.MAP_SHARED, mmap.PROT_READ)
        self._epochs = np.frombuffer(self._epochs_map, dtype="<u4")

    def on_unmapped(self, call: Callable[[], object]) -> None:
        """Calls something once the mapping is gone: when neither this object nor any view of the pool is left."""
        weakref.finalize(self._map, call).atexit = False

    def as_numpy(self) -> npt.NDArray[np.uint8]:
        """The mapping as bytes, writable, without a copy."""
        return np.frombuffer(self._map, dtype=np.uint8)

    def epochs_of(self, offsets: Offsets) -> Epochs:
        """Epochs of slots, now. Compare after a copy with those of the lease."""
        # Signed, as numpy's own indices are: others are converted.
        found: Epochs = self._epochs[(offsets >> _EPOCH_SHIFT_OF_OFFSETS).view(np.int64)]
        return found

    def prefault(self, offset: int, length: int) -> None:
        """Makes page-table entries for a populated range, so that copies do not stop for faults. Releases the GIL."""
        populate_pages(self.address + offset, length)
