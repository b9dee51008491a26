"""Where the blocks of a load lie, in the order of its keys: in the pool, or on the daemon's disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np

from kvstore.direct import DiskExtent


@dataclasses.dataclass(slots=True)
class LoadPlan:
    """Attributes:
    generation: Life of the pool.
    offsets, epochs: Of each key's slot; 0 for what is not in the pool.
    extents: For each key its place on the disk, or None: it is in the pool. Empty: all are.
    """

    generation: bytes
    offsets: np.ndarray
    epochs: np.ndarray
    extents: tuple[DiskExtent | None, ...] = ()

    def direct(self, keys: Collection[bytes]) -> list[bytes]:
        """Those of its keys that are on the disk."""
        return (
            [key for key, extent in zip(keys, self.extents, strict=True) if extent is not None] if self.extents else []
        )

    @classmethod
    def of(
        cls,
        generation: bytes,
        offsets: np.ndarray,
        epochs: np.ndarray,
        extents: tuple[DiskExtent, ...],
        numbers: np.ndarray,
    ) -> LoadPlan:
        """The plan for some of what is pinned.

        Args:
            numbers: Of each key, its place among the offsets, or behind them among the extents.
        """
        beyond = numbers >= len(offsets)
        if not beyond.any():
            return cls(generation, offsets[numbers], epochs[numbers])
        places, marks = np.zeros(len(numbers), np.uint64), np.zeros(len(numbers), np.uint32)
        places[~beyond], marks[~beyond] = offsets[numbers[~beyond]], epochs[numbers[~beyond]]
        behind = (numbers - len(offsets)).tolist()
        return cls(generation, places, marks, tuple(extents[n] if n >= 0 else None for n in behind))
