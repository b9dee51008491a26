"""How fast blocks come up from each tier, so that who asks for them can compute them instead.

Whatever comes up is measured. Batches overlap, so what counts is the time that passes while any is under way.
What nobody has loaded from yet is measured with blocks that are there: some of those that an earlier life has left, or
the first ones that are copied down are read back, into memory of its own, so that no request is the first to find out.

Another daemon's pool cannot be measured so: it has no blocks to name before somebody asks. The first ones that come up
from there, for whomever, tell.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kvstore.clock import Clock
from kvstore.rates import Rate
from kvstore.tier import ReadOutcome, Tier

#: Read to measure a tier, in two steps: the second one is what a prefix is like (two batches of a disk's threads, 20 ms
#: of a drive with 1.7 GB/s), and is left out where the first one has shown that the tier is slow.
TRIAL_BYTES: Final = (4 << 20, 32 << 20)
TRIAL_BLOCKS: Final = 512
TRIAL_DEADLINE_S: Final = 10.0
_SLOW_S: Final = 0.1
#: While batches are always under way, the figure follows after so many bytes.
STRETCH_BYTES: Final = 64 << 20


class _Speed:
    """Of one tier, in bytes."""

    def __init__(self) -> None:
        self.rate = Rate()
        self.under_way = 0
        #: Since when any were, or the figure last followed; and what was read since then.
        self.since = 0.0
        self.read: float | None = None

    def begin(self, size_bytes: int, now: float) -> None:
        if not self.under_way:
            self.since, self.read = now, None
        self.under_way += size_bytes

    def end(self, size_bytes: int, read: int | None, now: float) -> None:
        self.under_way -= size_bytes
        if read is not None:
            # A medium that gives nothing is as slow as one that gives a thousandth.
            self.read = (self.read or 0.0) + max(read, size_bytes / 1000)
        if self.read is not None and (not self.under_way or self.read >= STRETCH_BYTES):
            self.rate.note(self.read, now - self.since, now)
            self.since, self.read = now, None


class Gauge:
    """See the module. On the hierarchy's thread."""

    def __init__(self, tiers: Sequence[Tier], clock: Clock) -> None:
        self._clock = clock
        self._speeds = {tier.name: _Speed() for tier in tiers}
        self._trying: Counter[str] = Counter()
        #: Memory that a hanging medium may still write into.
        self._lost: list[memoryview] = []

    @contextlib.contextmanager
    def reading(self, tier: Tier, size_bytes: int) -> Iterator[list[int]]:
        """Around a read of so many bytes; what was read of them is to be put in the list. Nothing in it: nothing can be
        said (there was nothing to read); 0: the medium did not give any.
        """
        speed, read = self._speeds[tier.name], list[int]()
        speed.begin(size_bytes, self._clock.monotonic())
        try:
            yield read
        finally:
            speed.end(size_bytes, sum(read) if read else None, self._clock.monotonic())

    def s_per_byte(self, name: str) -> float | None:
        """Of a tier; None where it was not measured."""
        return self._speeds[name].rate.s

    def slowest(self) -> str:
        """The slowest tier: one that is not known, where there is one."""
        return max(self._speeds, key=lambda name: math.inf if (s := self.s_per_byte(name)) is None else s)

    async def try_out(self, tier: Tier, blocks: Iterable[tuple[bytes, int]]) -> None:
        """Measures a tier that was not measured yet.

        Args:
            blocks: Names and sizes of some that are there.
        """
        if self.s_per_byte(tier.name) is not None or self._trying[tier.name]:
            return
        self._trying[tier.name] += 1
        try:
            some = itertools.islice(blocks, TRIAL_BLOCKS)
            for most in TRIAL_BYTES:
                began = self._clock.monotonic()
                await self._try(tier, _leading(some, most))
                if self._clock.monotonic() - began > _SLOW_S:
                    break
        finally:
            self._trying[tier.name] -= 1

    async def _try(self, tier: Tier, blocks: Sequence[tuple[bytes, int]]) -> None:
        sizes = [size for _, size in blocks]
        if not sizes:
            return
        view = memoryview(mmap.mmap(-1, sum(sizes)))
        for page in range(0, len(view), mmap.PAGESIZE):
            view[page] = 1  # pages are made before, since those of the pool are there too
        buffers = [view[end - size : end] for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
        with self.reading(tier, len(view)) as read:
            wanted = [(name, buffer) for (name, _), buffer in zip(blocks, buffers, strict=True)]
            outcomes = await tier.read(wanted, TRIAL_DEADLINE_S)
            read += read_bytes(outcomes, sizes)
        lost = [outcome is ReadOutcome.BUFFER_LOST for outcome in outcomes]
        self._lost += itertools.compress(buffers, lost)


def _leading(blocks: Iterator[tuple[bytes, int]], most: int) -> list[tuple[bytes, int]]:
    """The next ones, until they have so many bytes."""
    taken: list[tuple[bytes, int]] = []
    size_bytes = 0
    while size_bytes < most and (block := next(blocks, None)) is not None:
        taken.append(block)
        size_bytes += block[1]
    return taken


def read_bytes(outcomes: Sequence[ReadOutcome], sizes: Sequence[int]) -> list[int]:
    """What Gauge.reading is told of a batch."""
    said = [
        size * (outcome is ReadOutcome.OK)
        for outcome, size in zip(outcomes, sizes, strict=True)
        if outcome not in (ReadOutcome.ABSENT, ReadOutcome.DAMAGED)
    ]
    return [sum(said)] if said else []
