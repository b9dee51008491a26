"""The pause that vLLM's engine loop makes after a step without tokens.

It sleeps 1 ms there for other threads' sake, whose work the engine may be waiting for. A step that has heard of a
load's end computes nothing either, and what follows is the request's first token: that pause only makes it later, and
nothing in vLLM lets one leave it out. So the loop's module gets a clock of ours in place of Python's, which leaves out
one pause when it is told to and is Python's otherwise.
"""

from __future__ import annotations

import threading
import time
from types import ModuleType
from typing import Any, Final

#: Module of the loop. Who makes steps without it has not loaded it.
LOOP: Final = "vllm.v1.engine.core"
#: The loop's pause; whatever sleeps for longer does so for another reason.
_PAUSE_MAX_S: Final = 0.001


class LoopClock:
    """Module `time` for one other module.

    Attributes:
        skips: Thread whose next short sleep is left out; it gives way to others all the same.
    """

    def __init__(self) -> None:
        self.skips: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        if self.skips == threading.get_ident() and seconds <= _PAUSE_MAX_S:
            self.skips = None
            seconds = 0
        time.sleep(seconds)


def skip_next(loop: ModuleType) -> bool:
    """Has the calling thread's next short sleep in a module be left out.

    Returns:
        False where that is not possible: somebody else has put something in the place of the module's clock.
    """
    clock = vars(loop).get("time")
    if clock is time:
        clock = LoopClock()
        loop.time = clock  # type: ignore[attr-defined]
    if not isinstance(clock, LoopClock):
        return False
    clock.skips = threading.get_ident()
    return True
