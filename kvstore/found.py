"""Found: the blocks of a lease as read-only views into the shared mapping."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import overload

import numpy as np

from kvstore.arena import ArenaView, Epochs, Offsets
from kvstore.remote import RemoteArena


class Found(Sequence[memoryview]):
    """Blocks of a lease, as a sequence of read-only memoryviews, made when they are asked for and never copied.

    Attributes:
        arena: Where they lie. The bytes are there until the with-block ends.
        lease_id: 0 where nothing is held at the daemon: nothing was found, or the blocks are copies in this process.
        offsets: Where the blocks lie in the mapping.
        epochs: Their epochs when they were granted.
    """

    def __init__(
        self, arena: ArenaView | RemoteArena, lease_id: int, offsets: Offsets, epochs: Epochs, block_bytes: int
    ) -> None:
        self.arena = arena
        self.lease_id = lease_id
        self.offsets = offsets
        self.epochs = epochs
        self._pool = arena.as_numpy()
        self._block_bytes = block_bytes
        self._views: dict[int, memoryview] = {}
        # Guards the three below; views may be dropped by any thread, also by the garbage collector in the middle of
        # what the thread does under this lock.
        self._lock = threading.RLock()
        #: By id: a reference hashes as what it refers to, and arrays do not hash.
        self._in_use: dict[int, weakref.ref[object]] = {}
        self._when_unused: Callable[[], None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...

    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...

    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if self._closed:
            raise ValueError("the with-block of this select has ended, and its blocks may be gone")
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        view = self._views.get(index)
        if view is None:
            offset = int(self.offsets[index])
            # An array of its own for each block: every view, slice and array that is made of it keeps it alive, so its
            # end is the end of all of them. (A memoryview alone cannot tell: its slices outlive its release().)
            block = self._pool[offset : offset + self._block_bytes]
            block.flags.writeable = False
            reference: weakref.ref[object] = weakref.ref(block, self._dropped)
            self._in_use[id(reference)] = reference
            view = self._views[index] = memoryview(block)  # type: ignore[arg-type]
        return view

    def __iter__(self) -> Iterator[memoryview]:
        return (self[index] for index in range(len(self)))

    def intact(self) -> bool:
        """Whether all bytes are still those that were granted. They are as long as the lease lives; a copy that was
        made before this says yes is good.
        """
        return np.array_equal(self.arena.epochs_of(self.offsets), self.epochs)

    def close(self, when_unused: Callable[[], None]) -> bool:
        """Ends the use of the views. Returns whether nothing made of them is in use any more.

        Where something is, `when_unused` is called with its end, from whichever thread ends it.
        """
        self._closed = True
        for view in self._views.values():
            with contextlib.suppress(BufferError):  # an array was made of it and is in use
                view.release()
        self._views.clear()
        del self._pool, self.arena
        with self._lock:
            if not self._in_use:
                return True
            self._when_unused = when_unused
            return False

    def _dropped(self, reference: weakref.ref[object]) -> None:
        with self._lock:
            self._in_use.pop(id(reference), None)
            call = self._when_unused if not self._in_use else None
            if call is not None:
                self._when_unused = None
        if call is not None:
            call()
