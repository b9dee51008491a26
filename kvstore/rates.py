"""Rates that are measured as things happen."""

from __future__ import annotations

import math
from typing import Final

#: What a figure keeps of its past with each measurement: the last ten or so count.
_KEEP: Final = 0.8


class Rate:
    """Seconds per unit, as a quotient of sums that fade: large measurements count more than small ones.

    Threads: one notes, any may read.
    """

    def __init__(self) -> None:
        self._sums = (0.0, 0.0)  # units, seconds; replaced as a whole, since another thread reads it
        self.at = -math.inf

    def note(self, units: float, seconds: float, now: float) -> None:
        """One measurement."""
        before = self._sums
        self._sums = (before[0] * _KEEP + units, before[1] * _KEEP + max(0.0, seconds))
        self.at = now

    @property
    def s(self) -> float | None:
        """Seconds per unit; None where nothing was measured."""
        units, seconds = self._sums
        return seconds / units if units else None
