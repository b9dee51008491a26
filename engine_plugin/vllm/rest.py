"""An engine all of whose requests wait for their blocks makes no steps meanwhile.

vLLM steps for as long as it has a request, and its workers spin for a second after each step's message: an engine that
waits for another one's prefill would keep a core for each of its processes busy, and on a machine that both share the
prefill gets slower by what waits for it. So a step that has nothing to compute lasts until an answer is in, somebody
sends the engine something, or an answer is overdue.

What has been sent lies in the queue of vLLM's engine loop, which no connector is shown: it is read from that loop's
frame. Where it is not there (an engine without a process of its own, or with several in lockstep), steps are made all
the time, with a short pause in each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from engine_plugin.vllm.callers import locals_of_caller

#: Pause of a step that has nothing to compute while a request waits for an answer, which ends it. Without this the
#: engine would ask itself the same over and over. What is sent to the engine meanwhile waits as long.
GIVE_WAY_S: Final = 0.005
#: The longest rest: statistics and reports of workers come with steps only.
REST_MAX_S: Final = 10.0


class Rest:
    """See the module. Scheduler thread only.

    Args:
        wait_answer: Waits for an answer, for so many seconds at most; returns whether one is in.
        loops: Functions of vLLM that are its engine loop; their `self` has the `input_queue`.
    """

    def __init__(
        self, wait_answer: Callable[[float], bool], *loops: Any, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._wait_answer = wait_answer
        self._loops = loops
        self._now = now
        self._queue: Any = None
        self._looked = False

    def pause(self) -> None:
        """A short one."""
        self._wait_answer(GIVE_WAY_S)

    def rest(self, due: Callable[[], float]) -> None:
        """Until there is something to do.

        Args:
            due: When the first answer is overdue. It is later the next time, where there was a sign of life.
        """
        if not self._looked:
            self._looked = True
            loop = locals_of_caller(*self._loops)
            self._queue = getattr(loop["self"], "input_queue", None) if loop is not None else None
        until = self._now() + REST_MAX_S
        while not self._wait_answer(GIVE_WAY_S):
            if self._queue is None or not self._queue.empty() or self._now() >= min(until, due()):
                return
