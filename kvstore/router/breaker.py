"""Takes an instance out that says it is well and fails every request: each would cost its client an attempt.

After FAILED_MAX failures in a row it gets nothing for a while; then one request tries it, and all others go on
elsewhere until that one has an answer. A failure doubles the pause, an answer ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

FAILED_MAX: Final = 5
PAUSE_MIN_S: Final = 1.0
PAUSE_MAX_S: Final = 60.0


class Breaker:
    """One instance's. Event loop only.

    Attributes:
        pauses: How often it was taken out.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._failed = 0
        self._pause_s = 0.0  # the current one; 0: there is none
        self._until = 0.0
        self._on_trial = False
        self.pauses = 0

    @property
    def paused(self) -> bool:
        """Whether it gets no requests but for a trial."""
        return self._pause_s > 0

    @property
    def ready(self) -> bool:
        """Whether it may be given a request now, as a trial perhaps."""
        return not self.paused or (self._now() >= self._until and not self._on_trial)

    def begin(self) -> bool:
        """A request goes there. Returns whether it is a trial, which `end` has to end."""
        trial = self.paused and self.ready
        self._on_trial |= trial
        return trial

    def end(self) -> None:
        """A trial is over, with or without a result."""
        self._on_trial = False

    def well(self) -> None:
        """It has answered."""
        self._failed = 0
        self._pause_s = 0.0

    def failed(self) -> bool:
        """It has failed a request. Returns whether a pause begins."""
        self._failed += 1
        if self._failed < FAILED_MAX or (self.paused and self._now() < self._until):
            return False  # in a pause it is the last resort, or a request from before it
        self._pause_s = min(PAUSE_MAX_S, 2 * self._pause_s) if self.paused else PAUSE_MIN_S
        self._until = self._now() + self._pause_s
        self.pauses += 1
        return True
