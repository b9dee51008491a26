"""Memory of a client on another host for the blocks that it reads or is about to send: bounded, and with a face like
the mapping's.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.arena import Epochs, Offsets
from kvstore.backing import address_of
from kvstore.errors import LimitExceeded

_PAGE_BYTES: Final = 4096


class Staging:
    """Places for blocks, each a whole number of pages. Safe from any thread.

    Attributes:
        size_bytes: All there is.
        address: Where it starts in this process.
        populated_bytes: All of it: its pages come when they are touched.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = _pages(size_bytes)
        # Private: a child after a fork must not see what its parent receives from then on.
        self._map = mmap.mmap(-1, self.size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.address = address_of(self._map)
        self.populated_bytes = self.size_bytes
        #: One for each page, for a face like the pool's: it changes when a place is handed out.
        self._epochs = np.zeros(self.size_bytes // _PAGE_BYTES, dtype=np.uint32)
        self._changed = threading.Condition()  # guards the two below
        self._free: list[tuple[int, int]] = [(0, self.size_bytes)]  # start and end, in order
        self._taken: dict[int, int] = {}

    def capacity(self, block_bytes: int) -> int:
        """How many blocks of a size there is room for when nothing is taken."""
        return self.size_bytes // _pages(block_bytes)

    def take(self, count: int, block_bytes: int, wait_s: float = 0.0) -> tuple[Offsets, Epochs]:
        """Takes places for up to `count` blocks.

        Args:
            wait_s: How long to wait until there is room for all of them.

        Returns:
            Their offsets and epochs; fewer than asked where there was no room in time.

        Raises:
            LimitExceeded: so many could never be had.
        """
        size = _pages(block_bytes)
        if count * size > self.size_bytes:
            raise LimitExceeded(
                f"{count} blocks of {block_bytes} bytes at once, and this client has {self.size_bytes} bytes of its "
                "own for blocks of another host (staging_bytes): ask for fewer, or give it more"
            )
        deadline = time.monotonic() + wait_s
        taken: list[int] = []
        with self._changed:
            while True:
                taken += self._fit(count - len(taken), size)
                if len(taken) == count:
                    break
                if (left := deadline - time.monotonic()) <= 0 or not self._changed.wait(left):
                    break
            offsets = np.array(taken, dtype=np.uint64)
            self._epochs[np.array(taken, dtype=np.int64) // _PAGE_BYTES] += np.uint32(1)
            return offsets, self.epochs_of(offsets)

    def _fit(self, count: int, size: int) -> list[int]:
        """Takes up to so many places, the first ones that are free."""
        taken: list[int] = []
        left: list[tuple[int, int]] = []
        for start, end in self._free:
            fits = min(count - len(taken), (end - start) // size)
            taken += range(start, start + fits * size, size)
            if start + fits * size < end:
                left.append((start + fits * size, end))
        self._free = left
        self._taken.update(dict.fromkeys(taken, size))
        return taken

    def give_back(self, offsets: Sequence[int], epochs: Sequence[int]) -> None:
        """Frees places, named as they were handed out; those that are free or somebody else's by now are skipped."""
        with self._changed:
            now = self.epochs_of(np.array(offsets, dtype=np.uint64)).tolist()
            for offset, epoch, current in zip(offsets, epochs, now, strict=True):
                if offset in self._taken and current == epoch:
                    self._free.append((offset, offset + self._taken.pop(offset)))
            self._free.sort()
            merged: list[tuple[int, int]] = []
            for start, end in self._free:
                if merged and merged[-1][1] == start:
                    merged[-1] = (merged[-1][0], end)
                else:
                    merged.append((start, end))
            self._free = merged
            self._changed.notify_all()

    @property
    def used_bytes(self) -> int:
        """Bytes of places that are taken."""
        with self._changed:
            return sum(self._taken.values())

    def as_numpy(self) -> npt.NDArray[np.uint8]:
        """All of it as bytes, writable, without a copy."""
        return np.frombuffer(self._map, dtype=np.uint8)

    def views(self, offsets: Sequence[int], block_bytes: int) -> list[memoryview]:
        """Writable views of places."""
        whole = memoryview(self._map)
        return [whole[offset : offset + block_bytes] for offset in offsets]

    def epochs_of(self, offsets: Offsets) -> Epochs:
        """Epochs of places, now."""
        found: Epochs = self._epochs[np.asarray(offsets, dtype=np.int64) // _PAGE_BYTES]
        return found


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
