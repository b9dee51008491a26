"""Coroutines that are mostly over before they have to wait for anything: begun without a task.

A task costs a turn of the event loop before its first step and one after its last, more than what most calls do. So
begin() runs a coroutine itself, and only what has to wait becomes a task. Much of asyncio works in tasks alone
(timeouts, say), so a coroutine that is begun this way awaits in_task() before it waits for anything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


async def in_task() -> None:
    """What follows runs in a task. Nothing happens, and nobody else has a turn, where that is so already."""
    if asyncio.current_task() is None:
        await asyncio.sleep(0)


def begin(work: Coroutine[object, None, None]) -> asyncio.Task[None] | None:
    """Runs a coroutine up to its end (then there is no task) or to its first in_task(). Outside of tasks, on the loop's
    thread.
    """
    try:
        work.send(None)
    except StopIteration:
        return None
    return asyncio.get_running_loop().create_task(work)
