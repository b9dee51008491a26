"""Queries whose blocks are on their way: up from a tier below the pool, or from the engine that computed them. Knows
nothing of vLLM, and makes no calls.

The daemon answers such a query with what is ready and the number of keys on their way, and moves on when it is asked
again. So the link asks again, each time for what it does not hold yet, until nothing more is on its way, nothing has
come up for a while, or the query's time is over; then the verdict is what it holds. A prefix that is larger than what
the daemon brings up at a time comes in pieces, and the earlier pieces stay pinned.

The same goes for blocks that another engine has promised and not published yet (`Expected`), which the daemon knows
nothing of.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from kvstore.direct import DiskExtent

#: Pauses before asking again: this at first, then an eighth of what has been waited so far, so that few calls are made
#: and little time is lost by them.
PAUSE_MIN_S: Final = 0.002
PAUSE_MAX_S: Final = 0.02
_PAUSE_PART: Final = 8
#: A prefix of which nothing has come up for this long is no longer waited for: the medium hangs.
STALL_S: Final = 1.0
#: Who waits begins to doubt when this part of what computing takes has gone by, and nothing that was expected by then
#: has come; from then on it goes by how fast blocks come.
DOUBT_PART: Final = 0.05
DOUBT_MIN_S: Final = 0.005
_LATE: Final = 1.2


class Grant(Protocol):
    """What `Client.acquire` answers per query."""

    generation: bytes
    offsets: np.ndarray
    epochs: np.ndarray
    pending: int
    pending_from: str
    extents: tuple[DiskExtent, ...]
    below_s: float
    token_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """What another engine has promised of a query's blocks.

    Attributes:
        keys: Leading keys that are there or on their way.
        settled: Those of them that were there when it said so. One of them that is missing will not come.
        until: Monotonic time up to which the others are waited for.
    """

    keys: int = 0
    settled: int = 0
    until: float = 0.0

    def still(self, ready: int, now: float) -> bool:
        """Whether more than a leading run of this length may yet come."""
        return self.settled <= ready < self.keys and now < self.until


NOTHING_EXPECTED: Final = Expected()


@dataclasses.dataclass(slots=True, eq=False)
class Query:
    """One request's question.

    Attributes:
        hashes: Block hashes in prefix order.
        deadline: Monotonic time after which nobody wants the answer. The link moves it on with every sign of life from
            the daemon while blocks are on their way.
        pin: Acquire what is there; False: only count it (an engine that stores but does not load).
        silence_s: How long the daemon may be silent while blocks are on their way.
        drop: Claim what is there, so that no other engine gets it.
        wait: Wait for blocks that are on their way up from disk.
        direct: Blocks on the disk may be read past the pool.
        coming: Blocks are on their way; written by the link.
        expected: What another engine has promised of it.
        runs: Lengths of the runs that the hashes consist of; empty: they are one.
        tokens: Tokens that need not be computed where all of them are there.
        whole: That is so only where all are there, since they are the end of a prefix; False: each is worth its part.
        alone: Nothing else is to be done before its answer is in, which comes before slots are reserved for what is
            missing: who stores that waits for them. Not where blocks are on their way; written by the link then.
        wanted: False: nobody waits for the answer any more; written by who asked.
    """

    hashes: Sequence[bytes]
    deadline: float
    pin: bool = True
    kv_group: int = 0
    silence_s: float = 0.5
    drop: bool = False
    wait: bool = True
    direct: bool = True
    coming: bool = False
    wanted: bool = True
    expected: Expected = NOTHING_EXPECTED
    runs: tuple[int, ...] = ()
    tokens: int = 0
    whole: bool = False
    alone: bool = False

    def at_stake(self, pending: int) -> float:
        """Tokens that are computed if so many of its keys do not come."""
        return self.tokens if self.whole else self.tokens * pending / max(1, len(self.hashes))


@dataclasses.dataclass(slots=True)
class Pins:
    """What is pinned for a query: by one lease, or by several where the blocks came up in pieces.

    Attributes:
        claimed: By a claim: no other engine has it, and the blocks may be removed when it is given back.
        places: Which of the query's keys they belong to, ascending; None: to the leading ones.
        extents: Where the blocks lie on the disk that follow those of `offsets`. Only where `places` is None.
        below_s: About how long those would take to come up instead; 0: not known.
    """

    generation: bytes
    offsets: np.ndarray
    epochs: np.ndarray
    leases: tuple[Grant, ...]
    claimed: bool = False
    places: np.ndarray | None = None
    extents: tuple[DiskExtent, ...] = ()
    below_s: float = 0.0

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.offsets) + len(self.extents)

    @property
    def leading(self) -> int:
        """Length of the leading run of the query's keys that is pinned."""
        count = len(self)
        return count if self.places is None else int((self.places == np.arange(count)).sum())

    @classmethod
    def of(cls, lease: Grant, claimed: bool = False) -> Pins | None:
        """None where the lease holds nothing."""
        if not len(lease.offsets) and not lease.extents:
            return None
        leases, places = getattr(lease, "leases", (lease,)), getattr(lease, "places", None)
        return cls(lease.generation, lease.offsets, lease.epochs, leases, claimed, places, lease.extents, lease.below_s)


@dataclasses.dataclass(slots=True)
class Reply:
    """The answer to a query.

    Attributes:
        pins: What is pinned; None where nothing is.
        available: Length of the leading run that is there, or how many keys are where there are several runs.
        late: How many further keys were on their way up from disk and are not waited for (any more).
        why_late: late: the time was over; slow: they are faster to compute; not_allowed: by the request.
        taken: How many further keys are claimed by another engine.
        generation: Of the pool that the answer is about.
        problem: Why there is no answer; empty if there is one.
    """

    query: Query
    pins: Pins | None = None
    available: int = 0
    generation: bytes = b""
    problem: str = ""
    late: int = 0
    why_late: str = "late"
    taken: int = 0

    @classmethod
    def of(cls, query: Query, pins: Pins | None, problem: str, late: int = 0, why_late: str = "late") -> Reply:
        """Answer to a query that pins."""
        if pins is None:
            return cls(query, problem=problem, late=late, why_late=why_late)
        return cls(query, pins, len(pins), pins.generation, problem, late, why_late)


class Coming:
    """One such query. Used by the link's thread.

    Attributes:
        pins: What has come up so far.
        pending: Keys on their way when last asked.
        tier: Name of the tier that they come from, as far as is known.
        due: Monotonic time to ask again.
        problem: Why nothing is held any more; empty if what has come up is good.

    Args:
        longest_s: How long to wait at most.
        compute_s: How long what is pending takes to compute; infinite: not known, or not to be compared.
        first_s: When the first of them are expected.
    """

    def __init__(
        self,
        query: Query,
        lease: Grant,
        now: float,
        longest_s: float,
        compute_s: float = math.inf,
        first_s: float = 0.0,
    ) -> None:
        self.query = query
        self.pins = Pins.of(lease)
        self.pending = lease.pending
        self.tier = lease.pending_from
        self.due = now + PAUSE_MIN_S
        self.problem = ""
        self._failed = False
        self._ready_at_first = self.ready
        self._began = self._grew = now
        self._until = now + longest_s
        self._compute_s = compute_s
        self._doubt_s = max(DOUBT_MIN_S, DOUBT_PART * compute_s)
        self._first_s = max(self._doubt_s, _LATE * first_s)
        self._stake_at_first = query.at_stake(lease.pending)

    @property
    def ready(self) -> int:
        """How many blocks are pinned."""
        return len(self.pins.offsets) if self.pins is not None else 0

    def gained(self) -> int:
        """Blocks that have come up since the query was asked."""
        return self.ready - self._ready_at_first

    def waited_s(self, now: float) -> float:
        """Time since the query was asked."""
        return now - self._began

    def rest(self) -> Sequence[bytes]:
        """What to ask for: what is not held, and the key before it, which the daemon takes for its parent. Everything,
        where there are several runs.
        """
        if self.query.runs:
            return self.query.hashes
        return self.query.hashes[max(0, self.ready - 1) :]

    def take(self, lease: Grant, now: float) -> list[Grant]:
        """Takes the answer for `rest`. Returns the leases that are not needed."""
        self.pending = lease.pending
        self.due = now + min(PAUSE_MAX_S, max(PAUSE_MIN_S, (now - self._began) / _PAUSE_PART))
        pins = self.pins
        if self.query.runs:
            before = self.ready
            self.pins = Pins.of(lease)
            if self.ready > before:
                self._grew = now
            return list(pins.leases) if pins is not None else []
        if pins is None:
            self.pins = Pins.of(lease)
            if self.pins is not None:
                self._grew = now
            return []
        if lease.generation != pins.generation:
            self.fail("stale")
            return [lease]
        if len(lease.offsets) <= 1:
            return [lease] if len(lease.offsets) else []
        self._grew = now
        self.pins = Pins(
            pins.generation,
            np.concatenate((pins.offsets, lease.offsets[1:])),
            np.concatenate((pins.epochs, lease.epochs[1:])),
            (*pins.leases, lease),
        )
        return []

    def fail(self, problem: str) -> None:
        """The daemon has not answered. What is held stays good, unless it went with the pool or the session."""
        self._failed = True
        if self.pins is None or problem in ("unavailable", "stale"):
            self.pins, self.problem = None, problem

    def over(self, now: float) -> bool:
        """Whether there is nothing more to wait for."""
        if self._failed:
            return True
        if self.query.expected.still(self.pins.leading if self.pins is not None else 0, now):
            return False
        return not self.pending or now >= min(self._until, self._grew + STALL_S) or self._too_slow(now)

    def _too_slow(self, now: float) -> bool:
        """Whether what is pending, coming as fast as it came so far, is faster to compute."""
        waited_s, gained = self.waited_s(now), self.gained()
        if self._compute_s == math.inf or waited_s < (self._doubt_s if gained else self._first_s):
            return False
        rest = self.query.at_stake(self.pending) / self._stake_at_first if self._stake_at_first else 1.0
        return waited_s * self.pending > gained * self._compute_s * rest
