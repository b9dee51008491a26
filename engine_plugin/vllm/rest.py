"""An engine all of whose requests wait for their blocks makes no steps meanwhile.

vLLM steps for as long as it has a request, and its workers spin for a second after each step's message: an engine that
waits for another one's prefill would keep a core for each of its processes busy, and on a machine that both share the
prefill gets slower by what waits for it. So a step that has nothing to compute lasts until an answer is in, somebody
sends the engine something, or an answer is overdue.

What has been sent lies in the queue of vLLM's engine loop (see callers). Where there is none (an engine without a
process of its own, or with several in lockstep), steps are made all the time, with a short pause in each.

An engine that waits for loads only does the same for a shorter time, where its only worker is in its process: the end
of a load is then known when it comes, and not when the next step looks, of which the one after that is told.

Knows nothing of vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

#: Pause of a step that has nothing to compute while a request waits for an answer, which ends it. Without this the
#: engine would ask itself the same over and over. What is sent to the engine meanwhile waits as long.
GIVE_WAY_S: Final = 0.005
#: The same where a request waits for a load, of whose end no event tells.
LOOK_S: Final = 0.00005
#: How long at most it is waited for the end of a load within one step: reports of workers come with steps.
LOADING_MAX_S: Final = 0.02
#: The longest rest: statistics and reports of workers come with steps only.
REST_MAX_S: Final = 10.0


class Rest:
    """See the module. Scheduler thread only.

    Args:
        wait_answer: Waits for an answer, for so many seconds at most; returns whether one is in.
        find_queue: Gives what is sent to the engine, as something that may be `empty`; None: it is not to be had.
            Called once, the first time that something is waited for.
    """

    def __init__(
        self,
        wait_answer: Callable[[float], bool],
        find_queue: Callable[[], Any | None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wait_answer = wait_answer
        self._find_queue = find_queue
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
        self._look()
        until = self._now() + REST_MAX_S
        while not self._wait_answer(GIVE_WAY_S):
            if self._queue is None or not self._queue.empty() or self._now() >= min(until, due()):
                return

    def until(self, ended: Callable[[], bool]) -> None:
        """Until a load has ended or there is something else to do."""
        self._look()
        until = self._now() + LOADING_MAX_S
        while self._queue is not None and self._queue.empty() and not ended() and self._now() < until:
            if self._wait_answer(LOOK_S):
                return

    def _look(self) -> None:
        if not self._looked:
            self._looked = True
            self._queue = self._find_queue()
