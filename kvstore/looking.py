"""An event loop that looks for what comes next before it sleeps.

To wake a thread up takes 30 to 100 us where its CPU, in a virtual machine, has gone idle: about as much as all else
that a call takes. Who waits for something that comes soon is better off looking for it over and over, where there are
CPUs that nobody else wants.
"""

from __future__ import annotations

import selectors
from typing import Final

from kvstore.clock import Clock
from kvstore.machine import cpus

_CPUS_MIN: Final = 8
#: Between two looks, of a microsecond or two each: then somebody else had the CPU, or the GIL.
_INTERRUPTED_S: Final = 0.001
#: How long nobody looks then.
_PAUSE_S: Final = 0.05
#: Whether this machine has a CPU to spare for whoever waits.
MAY_LOOK: Final = cpus() >= _CPUS_MIN

_Ready = list[tuple[selectors.SelectorKey, int]]


class LookingSelector(selectors.EpollSelector):
    """For asyncio.SelectorEventLoop. Looks for up to `look_s` after each call of expect(), and sleeps otherwise.

    Looking takes the GIL for about half of the time, in turns of a microsecond. A look that is interrupted ends, and no
    other one begins for a while: others want the CPU, or other threads the GIL.

    Args:
        look_s: Seconds; 0: always sleeps.
    """

    def __init__(self, look_s: float, clock: Clock) -> None:
        super().__init__()
        self._look_s = look_s
        self._clock = clock
        self._until = 0.0
        self._not_before = 0.0

    def expect(self) -> None:
        """Something has come whose like often comes again soon. On the loop's thread."""
        if self._look_s and (now := self._clock.monotonic()) >= self._not_before:
            self._until = now + self._look_s

    def select(self, timeout: float | None = None) -> _Ready:
        """Of BaseSelector. After a look without a find it returns without one, and the loop looks at its timers."""
        if not self._until or (timeout is not None and timeout <= 0):
            return super().select(timeout)
        now = self._clock.monotonic()
        until = self._until if timeout is None else min(self._until, now + timeout)
        while now < until:
            if ready := super().select(0):
                return ready
            before, now = now, self._clock.monotonic()
            if now - before > _INTERRUPTED_S:
                self._not_before = now + _PAUSE_S
                self._until = 0.0
                break
        if now >= self._until:
            self._until = 0.0
        return super().select(0)
