"""Blocks that are to be copied down once there is time for them. On the hierarchy's thread.

Two things postpone a copy: what is on its way is as much as may be, or a tier takes nothing now, since it still reads
its index or has too much to do. The first ends with the next copy that is made; the second is found out by offering
the tier a few again, now and then, until it takes one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvstore.directory import Block, BlockState
from kvstore.tier import Tier

#: How soon a tier that took nothing is offered some again, and how many: what is refused costs a few microseconds each.
AGAIN_S: Final = 0.25
_AGAIN_BLOCKS: Final = 512


class Postponed:
    """See the module.

    Args:
        tiers: Those that copies are made in.
        try_again: Called when there is something to take() again.
    """

    def __init__(self, tiers: Sequence[Tier], try_again: Callable[[], None]) -> None:
        self._tiers = tuple(tiers)
        self._try_again = try_again
        #: Oldest first, and where they are to go.
        self._ready: dict[Block, tuple[Tier, ...]] = {}
        #: What a tier did not take, oldest first.
        self._refused: dict[Tier, dict[Block, None]] = {tier: {} for tier in tiers}
        self._timers: dict[Tier, asyncio.TimerHandle] = {}

    def add(self, block: Block, tiers: tuple[Tier, ...]) -> None:
        """There was no room for a copy."""
        self._ready[block] = tiers

    def refused(self, tier: Tier, blocks: Iterable[Block]) -> None:
        """A tier did not take copies, and may take them later."""
        self._refused[tier].update(dict.fromkeys(blocks))
        if self._refused[tier] and tier not in self._timers:
            self._timers[tier] = asyncio.get_running_loop().call_later(AGAIN_S, self._tick, tier)

    def took(self, tier: Tier) -> None:
        """A tier took copies: so it does what it did not take before."""
        self._offer(tier, len(self._refused[tier]))

    def forget(self, block: Block) -> bool:
        """A block is being copied, or leaves. Returns whether it was waited for."""
        waited = self._ready.pop(block, None) is not None
        for refused in self._refused.values():
            if block in refused:
                del refused[block]
                waited = True
        return waited

    def take(self) -> tuple[Block, tuple[Tier, ...]] | None:
        """The oldest one that can be copied now, and where to; None: there is none."""
        while self._ready:
            block = next(iter(self._ready))
            tiers = self._ready.pop(block)
            # Where it goes to some tiers only, it has a copy in another one.
            if block.state is BlockState.READY and (tiers != self._tiers or not block.below):
                return block, tiers
        return None

    def _offer(self, tier: Tier, most: int) -> None:
        refused = self._refused[tier]
        for block in list(itertools.islice(refused, most)):
            del refused[block]
            before = self._ready.get(block, ())
            self._ready[block] = tuple(each for each in self._tiers if each is tier or each in before)

    def _tick(self, tier: Tier) -> None:
        del self._timers[tier]
        self._offer(tier, _AGAIN_BLOCKS)
        self.refused(tier, ())  # what is left waits on
        self._try_again()
