"""Redis tiers for tests, opened and closed, and waits that end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from kvstore.clock import Clock, SystemClock
from kvstore.tier import TierState
from kvstore.tiers.redis import RedisTier
from tests.redis.servers import PATIENCE_S

#: Longest wait for a server that does nothing, where a test is not about one: a loaded machine must not look like it.
CALM_S = 10.0
#: Where a test is about one.
SHORT_S = 0.3
_numbers = itertools.count()


def new_prefix() -> str:
    """Keys that no other test has."""
    return f"t{next(_numbers)}:"


@contextlib.asynccontextmanager
async def opened(url: str, clock: Clock | None = None, **options: Any) -> AsyncIterator[RedisTier]:
    """A tier from open() to close()."""
    options = {"key_prefix": new_prefix(), "deadline_s": CALM_S, "probe_interval_s": 0.05} | options
    tier = RedisTier(url, clock or SystemClock(), **options)
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


async def until(holds: Callable[[], Any], what: str = "") -> Any:
    """Waits until something holds.

    Raises:
        AssertionError: it does not within PATIENCE_S.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < deadline, f"still not: {what or holds}"
        await asyncio.sleep(0.01)
    return found


async def until_ok(tier: RedisTier) -> None:
    """Waits until a tier is well, by itself."""
    await until(lambda: tier.state is TierState.OK, "the tier is well")


async def promptly(call: Awaitable[Any], deadline_s: float = SHORT_S) -> Any:
    """The result of a call that must not wait for a server that does nothing.

    Raises:
        AssertionError: it took many times its deadline.
    """
    begun = time.monotonic()
    result = await asyncio.wait_for(call, PATIENCE_S)
    taken = time.monotonic() - begun
    assert taken < 20 * deadline_s, f"took {taken:.2f} s with a deadline of {deadline_s:.2f} s"
    return result
