"""Load or recompute: how fast blocks come from each tier, how fast this engine computes, and which is faster.

Measured on the engine's own loads and steps, as seconds per byte or token over the last few. What lies in the pool
counts as fast where that was not measured, and a measurement that speaks against it is believed for PROBE_S.

For what lies below the pool a request would have to wait, and nobody shall wait in order to find out: what is not known
counts as slow. How fast a tier is the daemon says with every answer; it measures tiers before anybody asks, and then
whatever it brings up, also the blocks that are computed meanwhile because they are slow. How fast this engine
computes is known after its first prompt, and before that from the daemon, if another engine of its kind has told it.
Who waits gives up as soon as what has come up so far says that computing the rest is faster (see coming.Coming).

Threads: the scheduler's and the link's; each figure is written by one of them. Knows nothing of vLLM.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Final

from kvstore.rates import Rate

#: How long a measurement that speaks against a tier is believed.
PROBE_S: Final = 30.0
#: What is below the pool is waited for where it is thought to be so many times faster than computing.
MARGIN: Final = 1.1
#: The daemon brings blocks up in batches of about so many bytes: before the first one is there nothing is known.
BATCH_BYTES: Final = 32 << 20
#: Steps with fewer prefill tokens than this say more about a step's fixed cost than about prefill.
PREFILL_TOKENS_MIN: Final = 256
#: Of the tokens of a step that is measured, at least this share is prefill.
PREFILL_SHARE_MIN: Final = 0.9


class LoadPolicy:
    """See the module.

    Args:
        block_bytes: Size of a block.
        auto: False: everything that is there is loaded, and waited for.
        computes: False: an engine for prompts that others have computed. Until it knows better it waits.
    """

    def __init__(self, block_bytes: int, now: Callable[[], float], *, auto: bool = True, computes: bool = True) -> None:
        self._block_bytes = block_bytes
        self._now = now
        self._auto = auto
        self._computes = computes
        self._token = Rate()
        self._told_token_s = 0.0
        self._copy = Rate()  # a byte from the pool into the engine's memory
        self._extra = Rate()  # what a load takes beyond its copy: the engine's steps before and after
        self._direct = Rate()  # a byte from the disk into the engine's memory, past the pool
        self._direct_not_before = 0.0
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

    def note_told(self, token_s: float) -> None:
        """What another engine of this kind has said of itself; 0: nothing."""
        self._told_token_s = token_s

    # -- asked ---------------------------------------------------------------------------------------------------------

    @property
    def token_s(self) -> float:
        """How long this engine takes to compute a token of a prompt; 0: it was not measured."""
        return self._token.s or 0.0

    def compute_s(self, tokens: float) -> float:
        """What so many tokens take to compute; infinite where that is not known."""
        token_s = self._token.s or self._told_token_s
        return tokens * token_s if token_s else math.inf

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

    def direct_pays(self, size_bytes: int, tokens: float, below_s: float) -> bool:
        """Whether the KV of so many tokens, which is on the disk, is read past the pool sooner than it is computed.

        Args:
            below_s: How long the daemon would take to bring it up; 0: not known. That stands for what was not measured,
                or not lately: it is the same disk.
        """
        if not self._auto:
            return True
        compute_s, direct_s = self.compute_s(tokens), self._direct.s
        if compute_s == math.inf:
            pays = not self._computes
        else:
            pays = direct_s is not None and size_bytes * direct_s <= compute_s
            if not pays and (direct_s is None or not self._fresh(self._direct)):
                pays = 0 < below_s <= compute_s
        if not pays:
            self.counts["decisions", "compute_below"] += 1
            self._direct_not_before = self._now() + PROBE_S if not below_s else 0.0
        return pays

    def direct_is_faster(self) -> bool:
        """Whether blocks on the disk are in the engine's memory sooner past the pool than through it. What was not
        measured lately is tried, past the pool first; but not where the daemon does not know its disk either, and has
        to bring something up to learn it.
        """
        if self._auto and self._now() < self._direct_not_before:
            return False
        disk = self._tiers.get("disk")
        if self._direct.s is None or not self._fresh(self._direct):
            return True
        if disk is None or disk.s is None or not self._fresh(disk):
            return False
        return self._block_bytes * self._direct.s <= disk.s + self._block_bytes * (self._copy.s or 0.0)

    def wait_s(self, tier: str, blocks: int, tokens: float, below_s: float) -> float:
        """How long to wait at most for so many blocks from a tier below the pool; 0: what is computed without them is
        computed faster, or might be.

        Args:
            tokens: How many tokens that is.
            below_s: How long the daemon thinks that they take; 0: it does not know.
        """
        if not self._auto:
            return math.inf
        compute_s = self.compute_s(tokens)
        if compute_s == math.inf:
            return 0.0 if self._computes else math.inf
        rate = self._tiers.get(tier)
        if rate is not None and rate.s is not None and self._fresh(rate):
            below_s = max(below_s, blocks * rate.s)
        load_s = below_s + blocks * self._block_bytes * (self._copy.s or 0.0) + (self._extra.s or 0.0)
        return compute_s if below_s > 0 and load_s * MARGIN <= compute_s else 0.0

    def first_s(self, blocks: int, below_s: float) -> float:
        """About how long until the first of so many blocks are up, where all of them take `below_s`."""
        return below_s * min(1.0, BATCH_BYTES / max(1, blocks * self._block_bytes))

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
