"""RemoteArena: what a client on another host has in place of the mapping.

The same face as ArenaView, over memory of the client's own (Staging). Offsets that such a client hands out are places
in there; this object knows which slots of the daemon's pool they stand for, and moves the bytes between the two over
the data port: when a lease is taken, and right before a commit.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore import congestion
from kvstore.arena import Epochs, Offsets
from kvstore.data_link import DataLink, Pass, Slots, Valid
from kvstore.data_wire import Query
from kvstore.errors import StaleGeneration
from kvstore.staging import Staging

#: Memory of a client on another host, unless it asks for more: a few dozen blocks of the largest models.
STAGING_BYTES: Final = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteOptions:
    """How a client reaches bytes on another host.

    Attributes:
        staging_bytes: Its own memory for them.
        connections: Most that the bytes of one call travel over; None: as many as the cores here can use.
        congestion_choice: What they send with, see congestion.
    """

    staging_bytes: int = STAGING_BYTES
    connections: int | None = None
    congestion_choice: str = congestion.AUTO


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """A slot of the pool that a place here stands for."""

    offset: int
    epoch: int
    block_bytes: int


class RemoteArena:
    """See the module. Belongs to one session; safe from any thread.

    Args:
        settle: Waits, up to a time by time.monotonic, until what the session has asked over gRPC has taken effect.

    Attributes:
        generation: The life of the daemon's pool.
        size_bytes, address: Of the memory here.
    """

    def __init__(self, staging: Staging, link: DataLink, who: Pass, settle: Callable[[float], None]) -> None:
        self.generation = who.generation
        self.size_bytes = staging.size_bytes
        self.address = staging.address
        self.populated_bytes = staging.size_bytes
        self.staging = staging
        self._link = link
        self._who = who
        self._settle = settle
        self._lock = threading.Lock()
        self._reserved: dict[int, _Place] = {}  # by place, under the lock

    def as_numpy(self) -> npt.NDArray[np.uint8]:
        """The memory here as bytes, writable, without a copy."""
        return self.staging.as_numpy()

    def epochs_of(self, offsets: Offsets) -> Epochs:
        """Epochs of places here, now. Nobody but this client changes them."""
        return self.staging.epochs_of(offsets)

    # -- bytes that are the caller's own -----------------------------------------------------------------------------

    def send(self, offsets: Offsets, epochs: Epochs, blocks: Sequence[Any], first: int = 0) -> None:
        """Sends blocks from where they are into slots of the pool.

        Args:
            blocks: One C-contiguous buffer for each slot, all of one size; not changed before this returns.
            first: Where in its slot each begins.

        Raises:
            StaleGeneration, DaemonUnavailable, DeadlineExceeded: not all of them are there, as far as is known.
        """
        views = [memoryview(block).cast("B") for block in blocks]
        self._link.write(self._who, Slots(offsets.tolist(), epochs.tolist(), first), views)

    def receive(self, offsets: Offsets, epochs: Epochs, rooms: Sequence[memoryview], first: int = 0) -> int:
        """Fetches blocks from slots of the pool into writable buffers of one size.

        Returns:
            How many, from the first on, are what was asked for.

        Raises:
            StaleGeneration, DaemonUnavailable, DeadlineExceeded: none can be trusted.
        """
        return _leading(self._link.read(self._who, Slots(offsets.tolist(), epochs.tolist(), first), rooms))

    # -- leases ------------------------------------------------------------------------------------------------------

    def fetch(
        self, offsets: Offsets, epochs: Epochs, block_bytes: int, wait_s: float | None = None
    ) -> tuple[Offsets, Epochs]:
        """Brings leased blocks here.

        Args:
            wait_s: How long to wait for room here; None: what has no room now is left out.

        Returns:
            Places of the leading run that is here now; give them back with discard().

        Raises:
            LimitExceeded: with wait_s: there is never room for so many.
            As receive(); nothing is taken then.
        """
        count = len(offsets) if wait_s is not None else min(len(offsets), self.staging.capacity(block_bytes))
        places, marks = self.staging.take(count, block_bytes, wait_s or 0.0)
        got = len(places)
        if not got:
            return places, marks
        try:
            rooms = self.staging.views(places.tolist(), block_bytes)
            right = self.receive(offsets[:got], epochs[:got], rooms)
        except BaseException:
            self.discard(places, marks)
            raise
        self.discard(places[right:], marks[right:])
        return places[:right], marks[:right]

    def select(self, query: Query, timeout_s: float) -> tuple[Offsets, Epochs] | None:
        """Brings the leading run of some keys here that is in the daemon's pool now: one request, without a lease.

        Args:
            timeout_s: Longest time that what was asked before may take. The bytes take as long as they move.

        Returns:
            Places, as fetch(). None: it takes a lease, since there is no room here now for so many blocks, or since the
            query asks for the whole run and that is not there.

        Raises:
            As receive(); InvalidRequest: the daemon does not know these blocks, or by another length.
        """
        count = len(query.keys)
        if not query.fits or count > self.staging.capacity(query.length):
            return None
        places, marks = self.staging.take(count, query.length)
        right = 0
        try:
            if len(places) < count:
                return None
            rooms = self.staging.views(places.tolist(), query.length)
            self._settle(time.monotonic() + timeout_s)
            right = _leading(self._link.select(self._who, query, rooms))
            if query.whole and right < count:
                right = 0
                return None
            return places[:right], marks[:right]
        finally:
            self.discard(places[right:], marks[right:])

    def discard(self, places: Offsets, marks: Epochs) -> None:
        """Frees places here."""
        self.staging.give_back(places.tolist(), marks.tolist())

    # -- reservations ------------------------------------------------------------------------------------------------

    def stage(self, offsets: Offsets, epochs: Epochs, block_bytes: int) -> tuple[Offsets, Epochs]:
        """Takes places for slots that are reserved; fewer where there is no room here."""
        places, marks = self.staging.take(min(len(offsets), self.staging.capacity(block_bytes)), block_bytes)
        with self._lock:
            for place, offset, epoch in zip(places.tolist(), offsets.tolist(), epochs.tolist(), strict=False):
                self._reserved[place] = _Place(offset, epoch, block_bytes)
        return places, marks

    def send_staged(self, places: Sequence[int]) -> tuple[Offsets, Epochs]:
        """Sends what was written into places. Returns the slots it is in.

        Raises:
            StaleGeneration: a place does not stand for a slot (any more).
            As send().
        """
        slots = self._slots_of(places)
        views = [self.staging.views([place], slot.block_bytes)[0] for place, slot in zip(places, slots, strict=True)]
        offsets = np.array([slot.offset for slot in slots], dtype=np.uint64)
        epochs = np.array([slot.epoch for slot in slots], dtype=np.uint32)
        self.send(offsets, epochs, views)
        return offsets, epochs

    def unstage(self, places: Sequence[int]) -> tuple[Offsets, Epochs]:
        """Frees places. Returns the slots that they stood for; places that stand for none are skipped."""
        with self._lock:
            slots = [(place, self._reserved.pop(place)) for place in places if place in self._reserved]
        freed = np.array([place for place, _ in slots], dtype=np.uint64)
        self.discard(freed, self.staging.epochs_of(freed))
        return (
            np.array([slot.offset for _, slot in slots], dtype=np.uint64),
            np.array([slot.epoch for _, slot in slots], dtype=np.uint32),
        )

    def _slots_of(self, places: Sequence[int]) -> list[_Place]:
        with self._lock:
            found = [self._reserved.get(place) for place in places]
        if None in found:
            raise StaleGeneration("a slot was given back before it was committed")
        return [slot for slot in found if slot is not None]

    def close(self) -> None:
        """The session has ended: transfers under way end with an error, and what was reserved here is free."""
        self._link.close()
        with self._lock:
            places = list(self._reserved)
        self.unstage(places)


def _leading(valid: Valid) -> int:
    """How many blocks, from the first on, are what was asked for."""
    wrong = np.flatnonzero(~valid)
    return int(wrong[0]) if len(wrong) else len(valid)
