"""Load or recompute: how fast blocks come from each tier, how fast this engine computes, and which is faster.

Everything is measured on the engine's own loads and steps, as seconds per byte or token over the last few. What was
not measured counts as fast, so that the first requests load; a measurement that speaks against a tier is believed for
PROBE_S, then a request tries again. Whoever waits does so no longer than the blocks would take to compute, so that an
attempt costs at most as much again.

Threads: the scheduler's and the link's; each figure is written by one of them. Knows nothing of vLLM.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Final

#: What a figure keeps of its past with each measurement: the last ten or so count.
_KEEP: Final = 0.8
#: How long a tier that was too slow is left alone.
PROBE_S: Final = 30.0
#: Steps with fewer prefill tokens than this say more about a step's fixed cost than about prefill.
PREFILL_TOKENS_MIN: Final = 256
#: Of the tokens of a step that is measured, at least this share is prefill.
PREFILL_SHARE_MIN: Final = 0.9


class Rate:
    """Seconds per unit, as a quotient of sums that fade: large measurements count more than small ones."""

    def __init__(self) -> None:
        self._sums = (0.0, 0.0)  # units, seconds; replaced as a whole, since another thread reads it
        self.at = -math.inf

    def note(self, units: float, seconds: float, now: float) -> None:
        """One measurement."""
        before = self._sums
        self._sums = (before[0] * _KEEP + units, before[1] * _KEEP + max(0.0, seconds))
        self.at = now

    @property
    def s(self) -> float | None:
        """Seconds per unit; None where nothing was measured."""
        units, seconds = self._sums
        return seconds / units if units else None


class LoadPolicy:
    """See the module.

    Args:
        block_bytes: Size of a block.
        auto: False: everything that is there is loaded, and waited for.
    """

    def __init__(self, block_bytes: int, now: Callable[[], float], *, auto: bool = True) -> None:
        self._block_bytes = block_bytes
        self._now = now
        self._auto = auto
        self._token = Rate()
        self._copy = Rate()  # a byte from the pool into the engine's memory
        self._extra = Rate()  # what a load takes beyond its copy: the engine's steps before and after
        self._direct = Rate()  # a byte from the disk into the engine's memory, past the pool
        self._tiers: dict[str, Rate] = {}
        self.counts: Counter[tuple[str, str]] = Counter()  # scheduler thread

    # -- measured ------------------------------------------------------------------------------------------------------

    def note_step(self, tokens: int, prefill_tokens: int, seconds: float) -> None:
        """A step of the engine, with all its tokens and those of prefills among them. Others than prefills are left
        out.
        """
        if prefill_tokens >= max(PREFILL_TOKENS_MIN, PREFILL_SHARE_MIN * tokens):
            self._token.note(tokens, seconds, self._now())

    def note_load(self, size_bytes: int, copy_s: float, whole_s: float) -> None:
        """A load from the pool: its copies, and all the time until the engine could go on."""
        now = self._now()
        self._copy.note(size_bytes, copy_s, now)
        self._extra.note(1, whole_s - copy_s, now)

    def note_direct(self, size_bytes: int, copy_s: float) -> None:
        """A load with so many bytes from the disk past the pool, which are what takes the time."""
        self._direct.note(size_bytes, copy_s, self._now())

    def note_coming(self, tier: str, blocks: int, seconds: float) -> None:
        """So many blocks have come up from a tier below the pool, in so much time; 0: none has."""
        self._tiers.setdefault(tier, Rate()).note(max(1, blocks), seconds, self._now())

    # -- asked ---------------------------------------------------------------------------------------------------------

    def compute_s(self, tokens: float) -> float:
        """What so many tokens take to compute; infinite where that was not measured."""
        token_s = self._token.s
        return math.inf if token_s is None else tokens * token_s

    def loads(self, size_bytes: int, tokens: int) -> bool:
        """Whether the KV of so many tokens, which is in the pool, is faster to load than to compute."""
        copy_s, extra_s = self._copy.s, self._extra.s
        slow = (
            self._auto
            and copy_s is not None
            and extra_s is not None
            and self._fresh(self._copy)
            and extra_s + size_bytes * copy_s > self.compute_s(tokens)
        )
        self.counts["decisions", "compute" if slow else "load"] += 1
        return not slow

    def direct_pays(self, size_bytes: int, tokens: float) -> bool:
        """Whether the KV of so many tokens, which is on the disk, is read past the pool sooner than it is computed."""
        direct_s = self._direct.s
        known = self._auto and direct_s is not None and self._fresh(self._direct)
        slow = known and size_bytes * (direct_s or 0.0) > self.compute_s(tokens)
        if slow:
            self.counts["decisions", "compute_below"] += 1
        return not slow

    def direct_is_faster(self) -> bool:
        """Whether blocks on the disk are in the engine's memory sooner past the pool than through it. What was not
        measured lately is tried, past the pool first.
        """
        disk = self._tiers.get("disk")
        if self._direct.s is None or not self._fresh(self._direct):
            return True
        if disk is None or disk.s is None or not self._fresh(disk):
            return False
        return self._block_bytes * self._direct.s <= disk.s + self._block_bytes * (self._copy.s or 0.0)

    def wait_s(self, tier: str, blocks: int, tokens: float) -> float:
        """How long to wait at most for so many blocks from a tier below the pool; 0: what is computed without them is
        computed faster.

        Args:
            tokens: How many tokens that is.
        """
        if not self._auto:
            return math.inf
        compute_s = self.compute_s(tokens)
        rate = self._tiers.get(tier)
        if rate is None or rate.s is None or not self._fresh(rate):
            return compute_s
        return compute_s if blocks * (rate.s + self._block_bytes * (self._copy.s or 0.0)) <= compute_s else 0.0

    def _fresh(self, rate: Rate) -> bool:
        return self._now() - rate.at < PROBE_S


class Steps:
    """Times the engine's steps. Several may be under way at once: they end in the order in which they began, and one
    cannot run before the one before it has ended.
    """

    def __init__(self, note: Callable[[int, int, float], None], now: Callable[[], float]) -> None:
        self._note = note
        self._now = now
        self._under_way: list[tuple[float, int, int]] = []
        self._last_end = -math.inf

    def begin(self, tokens: int, prefill_tokens: int) -> None:
        """The scheduler has decided what a step computes."""
        self._under_way.append((self._now(), tokens, prefill_tokens))

    def end(self) -> None:
        """The output of the oldest step under way is there."""
        if not self._under_way:
            return
        now = self._now()
        began, tokens, prefill_tokens = self._under_way.pop(0)
        self._note(tokens, prefill_tokens, now - max(began, self._last_end))
        self._last_end = now
