"""Jobs of a worker whose daemon is on another host: through staging memory, in pieces, over the data port.

A load is received into staging memory and copied from there into KV memory; a store goes the other way. What a rank's
part of the slots is, and no byte beside it, is written there: other ranks write theirs. The copy engine is told of the
staging memory as if it were the pool.

Threads: all methods are for the worker's thread. One thread receives and one sends; they only touch staging memory.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections import deque
from collections.abc import Collection
from typing import Any, Final

import numpy as np

from engine_plugin.copy.contract import CopyEngine, Fragments, Then
from kvstore.errors import ConfigError, StaleGeneration
from kvstore.remote import RemoteArena
from kvstore.threads import started_pool

#: Bytes of a piece: long against a round trip, and still several of them in the staging memory.
_PIECE_BYTES: Final = 32 << 20
#: How long wait() sleeps between two looks.
_LOOK_S: Final = 0.002


@dataclasses.dataclass(slots=True, eq=False)
class FarCopy:
    """A job under way.

    Attributes:
        left: Pieces that are not over.
        error: Why the bytes on the written side must not be used.
    """

    then: Then
    left: int
    began: float
    error: BaseException | None = None

    @property
    def over(self) -> bool:
        return not self.left


@dataclasses.dataclass(slots=True, eq=False)
class _Piece:
    """Some slots of a job.

    Attributes:
        offsets, epochs: The slots.
        first, length: Which bytes of each slot have a place in the staging memory.
        kv, slot, place, size: Of each fragment: its address in KV memory, its slot's index among these slots, its
            first byte in there, and its bytes.
        places, marks: Where the slots are in the staging memory.
        travels: The transfer, once it has begun.
        copied: Whether the copy engine is through.
    """

    job: FarCopy
    arena: RemoteArena
    is_load: bool
    offsets: np.ndarray
    epochs: np.ndarray
    first: int
    length: int
    kv: np.ndarray
    slot: np.ndarray
    place: np.ndarray
    size: np.ndarray
    places: Any = None
    marks: Any = None
    travels: concurrent.futures.Future[bool] | None = None
    copying: bool = False
    copied: bool = False
    error: BaseException | None = None

    @property
    def staged_bytes(self) -> int:
        return len(self.offsets) * self.length

    def fragments(self) -> Fragments:
        """What the copy engine has to do, once the slots have their places."""
        staging = self.arena.staging
        at = np.uint64(staging.address) + self.places[self.slot] + self.place - np.uint64(self.first)
        return Fragments(*(np.ascontiguousarray(array, np.uint64) for array in (self.kv, at, self.size)))

    def note_copied(self, _seconds: float, error: BaseException | None) -> None:
        """The copy engine is through; on any thread."""
        self.error = error
        self.copied = True

    def receive(self) -> bool:
        """Fetches the bytes. Whether all of them are what was asked for."""
        rooms = self.arena.staging.views(self.places.tolist(), self.length)
        return self.arena.receive(self.offsets, self.epochs, rooms, self.first) == len(self.offsets)

    def send(self) -> bool:
        """Sends the bytes of this rank, run by run: what lies between them is another rank's."""
        for begin, length, slots in runs_of(self.slot, self.place, self.size):
            at = (self.places[slots] + np.uint64(begin - self.first)).tolist()
            self.arena.send(self.offsets[slots], self.epochs[slots], self.arena.staging.views(at, length), begin)
        return True


def runs_of(slot: np.ndarray, place: np.ndarray, size: np.ndarray) -> list[tuple[int, int, np.ndarray]]:
    """Bytes side by side: where they begin in a slot, how many they are, and in which slots they are so."""
    order = np.lexsort((place, slot))
    slot, place, size = slot[order], place[order].astype(np.int64), size[order].astype(np.int64)
    new = np.ones(len(slot), np.bool_)
    new[1:] = (slot[1:] != slot[:-1]) | (place[1:] != place[:-1] + size[:-1])
    starts = np.flatnonzero(new)
    lengths = np.add.reduceat(size, starts)
    found: dict[tuple[int, int], list[int]] = {}
    for begin, length, each in zip(place[starts].tolist(), lengths.tolist(), slot[starts].tolist(), strict=True):
        found.setdefault((begin, length), []).append(each)
    return [(begin, length, np.array(slots, np.int64)) for (begin, length), slots in found.items()]


class FarCopies:
    """See the module.

    Args:
        engine: Copies between KV memory and the staging memory; the caller's.
    """

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self._threads = {
            is_load: started_pool(1, name) for is_load, name in ((True, "kvstore-receive"), (False, "kvstore-send"))
        }
        self._waiting: dict[bool, deque[_Piece]] = {True: deque(), False: deque()}
        self._active: list[_Piece] = []

    def begin(
        self,
        arena: RemoteArena,
        slots: tuple[np.ndarray, np.ndarray],
        fragments: tuple[np.ndarray, np.ndarray, np.ndarray],
        then: Then,
        *,
        is_load: bool,
    ) -> FarCopy:
        """Begins a job.

        Args:
            slots: Offsets in the pool, and epochs.
            fragments: Address in KV memory, offset in the pool, and size of each; not empty.
            then: As in CopyEngine; `StaleGeneration`: the slots were not the pinned ones all along.

        Raises:
            ConfigError: the staging memory is too small for a single slot.
        """
        offsets, epochs = slots
        kv, pool, size = fragments
        order = np.argsort(offsets)
        slot = order[np.searchsorted(offsets[order], pool, side="right") - 1]
        place = pool - offsets[slot]
        first, end = int(place.min()), int((place + size).max())
        capacity = arena.staging.capacity(end - first)
        if not capacity:
            raise ConfigError(
                f"kvstore.staging_bytes is {arena.size_bytes}, and a block of this engine has {end - first} bytes: "
                "give it room for several"
            )
        step = max(1, min(capacity // 4, _PIECE_BYTES // (end - first)))
        used = np.unique(slot)
        groups = [used[start : start + step] for start in range(0, len(used), step)]
        job = FarCopy(then, len(groups), time.monotonic())
        for group in groups:
            inside = np.isin(slot, group)
            self._waiting[is_load].append(
                _Piece(
                    job,
                    arena,
                    is_load,
                    offsets[group],
                    epochs[group],
                    first,
                    end - first,
                    kv[inside],
                    np.searchsorted(group, slot[inside]),
                    place[inside],
                    size[inside],
                )
            )
        self.poll()
        return job

    def poll(self) -> None:
        """Takes every piece as far as it goes now. Never waits."""
        for piece in list(self._active):
            self._advance(piece)
        for waiting in self._waiting.values():  # loads first
            while waiting and self._start(waiting[0]):
                waiting.popleft()

    def wait(self, copies: Collection[FarCopy]) -> None:
        """Returns once these jobs are over. A daemon that does not answer ends them by its deadlines."""
        while not all(copy.over for copy in copies):
            self._engine.poll()
            self.poll()
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Begins nothing any more. Transfers under way end with the client."""
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, piece: _Piece) -> bool:
        """Whether there was room for it."""
        if piece.job.error is not None:
            self._end(piece, None)
            return True
        staging = piece.arena.staging
        stored = sum(each.staged_bytes for each in self._active if not each.is_load)
        if not piece.is_load and stored and stored + piece.staged_bytes > staging.size_bytes // 2:
            return False  # stores leave room for loads
        places, marks = staging.take(len(piece.offsets), piece.length)
        if len(places) < len(piece.offsets):
            piece.arena.discard(places, marks)
            return False
        piece.places, piece.marks = places, marks
        self._active.append(piece)
        if piece.is_load:
            piece.travels = self._threads[True].submit(piece.receive)
        else:
            self._copy(piece)
        return True

    def _copy(self, piece: _Piece) -> None:
        piece.copying = True
        self._engine.use_pool(piece.arena.staging)
        begin = self._engine.load if piece.is_load else self._engine.store
        try:
            begin(piece.fragments(), piece.note_copied)
        except Exception as error:  # nothing was begun
            self._end(piece, error)

    def _advance(self, piece: _Piece) -> None:
        if piece.copied and piece.error is not None:
            self._end(piece, piece.error)
        elif piece.copied and piece.is_load:
            self._end(piece, None)
        elif piece.copied and piece.travels is None:
            piece.travels = self._threads[False].submit(piece.send)
        elif piece.travels is not None and piece.travels.done() and not (piece.is_load and piece.copying):
            error = piece.travels.exception()
            if error is not None:
                self._end(piece, error)
            elif not piece.travels.result():
                self._end(piece, StaleGeneration("a slot changed hands while it was read"))
            elif piece.is_load:
                self._copy(piece)
            else:
                self._end(piece, None)

    def _end(self, piece: _Piece, error: BaseException | None) -> None:
        if piece in self._active:
            self._active.remove(piece)
            piece.arena.discard(piece.places, piece.marks)
        job = piece.job
        job.error = job.error or error
        job.left -= 1
        if job.over:
            job.then(time.monotonic() - job.began, job.error)
