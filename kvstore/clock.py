"""Time as something that is handed in, so that tests never sleep."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from. Both readings are in seconds."""

    def monotonic(self) -> float:
        """Never goes back; for intervals."""

    def wall(self) -> float:
        """Seconds since the epoch; for people and for what outlives the process."""


class SystemClock:
    """The clock of this machine."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
