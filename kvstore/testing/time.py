"""Time that stands still until a test moves it."""

from __future__ import annotations

import asyncio
from typing import Final

#: Rounds of the loop that settle() makes. A chain of callbacks in the hierarchy is at most four long (a key comes, its
#: future is done, the task wakes, its timeout is taken back).
_ROUNDS: Final = 12


class FakeClock:
    """A Clock that a test moves."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now = start_s

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return 1.7e9 + self._now

    def advance(self, seconds: float) -> None:
        """Lets time pass."""
        assert seconds >= 0
        self._now += seconds


class SteppedLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own, which runs only when it is told to.

    So a test decides what happens between two steps of a coroutine, and waits of any length take no time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def settle(self) -> None:
        """Runs whatever can run without time passing."""
        for _ in range(_ROUNDS):
            self.call_soon(self.stop)
            self.run_forever()

    def advance(self, seconds: float) -> None:
        """Lets time pass, then runs whatever that makes due."""
        assert seconds >= 0
        self._now += seconds
        self.settle()
