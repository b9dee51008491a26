"""Empty slots of the pool, held for the stores of the next steps. Knows nothing of vLLM, and makes no calls.

A store must not wait for slots to be reserved. So a lookup announces what its misses will need, the link's thread
reserves that much before the lookup is answered, and the store that follows finds it here. Where nothing else is to be
done before the answer is in, it comes first, and the store waits a moment for what is on its way: by then most of it is
there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

#: The stock of an engine that has had no request for this long goes back to the pool.
STOCK_IDLE_S: Final = 5.0
#: So does that of one that has requests and has not announced or stored anything for this long. Longer than a step.
STOCK_UNUSED_S: Final = 60.0
#: Slots kept while the engine has requests, for blocks that no lookup announces (such as generated tokens).
STOCK_BASE: Final = 4
#: How long at most a store waits for slots that are on their way, once for each reservation.
ON_THEIR_WAY_S: Final = 0.02
#: A pool that is full or silent is asked again after this long, not in a loop.
RETRY_S: Final = 0.5
#: One that is being populated has more slots a moment later.
POPULATING_S: Final = 0.05


@dataclasses.dataclass(slots=True)
class Slots:
    """Empty slots of one generation."""

    generation: bytes
    offsets: np.ndarray
    epochs: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets)

    def part(self, begin: int, end: int) -> Slots:
        """Some of them."""
        return Slots(self.generation, self.offsets[begin:end], self.epochs[begin:end])


class SlotStock:
    """See the module. Used by the scheduler thread (`take`, `set_busy`) and the link's thread (everything else).

    Args:
        most: Most slots held; 0: none ever, for an engine that does not store.
    """

    def __init__(self, most: int, now: Callable[[], float]) -> None:
        self._most = most
        self._now = now
        self._lock = threading.Lock()
        self._came = threading.Condition(self._lock)
        self._on_their_way = False
        self._slots: deque[tuple[int, int]] = deque()  # (offset, epoch), all of _generation
        self._generation = b""
        self._announced = 0  # not taken so far
        self._busy = False
        self._used_at = now() - STOCK_IDLE_S
        self._retry_at = 0.0

    def take(self, count: int) -> Slots:
        """Up to `count` slots. Waits for those that are on their way, for ON_THEIR_WAY_S at most."""
        with self._lock:
            if self._on_their_way and len(self._slots) < count:
                self._came.wait_for(lambda: not self._on_their_way, ON_THEIR_WAY_S)
                self._on_their_way = False  # late ones are not waited for again
            self._used_at = self._now()
            self._announced = max(0, self._announced - count)
            return self._pop(min(count, len(self._slots)))

    def set_busy(self, busy: bool) -> None:
        """Whether the engine has requests, which may store when their step ends."""
        with self._lock:
            self._busy = busy
            self._used_at = self._now()

    def announce(self, count: int) -> None:
        """So many slots will be needed soon, or will not be needed after all (less than 0)."""
        with self._lock:
            self._used_at = self._now()
            self._announced = max(0, self._announced + count)

    @contextlib.contextmanager
    def on_their_way(self) -> Iterator[None]:
        """While this lasts `take` waits for slots that it lacks."""
        with self._lock:
            self._on_their_way = True
        try:
            yield
        finally:
            with self._lock:
                self._on_their_way = False
                self._came.notify_all()

    def settle(self, generation: bytes) -> None:
        """Forgets slots of another pool: it is gone."""
        with self._lock:
            self._settle(generation)

    def lacks(self) -> int:
        """How many slots to reserve now."""
        with self._lock:
            return max(0, self._short()) if self._now() >= self._retry_at else 0

    def pause_s(self) -> float | None:
        """How long until there may be something to reserve; None: nothing is needed."""
        with self._lock:
            return max(0.0, self._retry_at - self._now()) if self._short() > 0 else None

    def fill(self, asked: int, slots: Slots | None, populating: bool = False) -> None:
        """What a reservation of `asked` slots gave; None: no answer."""
        got = len(slots) if slots is not None else 0
        with self._lock:
            if slots is not None:
                self._settle(slots.generation)
                self._slots.extend(zip(slots.offsets.tolist(), slots.epochs.tolist(), strict=True))
            self._retry_at = self._now() + (POPULATING_S if populating else RETRY_S) if got < asked else 0.0

    def surplus(self, all_of_it: bool = False) -> Slots:
        """Takes out what should go back to the pool: the whole stock of an idle engine, or all of it anyway."""
        with self._lock:
            return self._pop(len(self._slots) if all_of_it or self._idle() else 0)

    # -- with the lock -------------------------------------------------------------------------------------------------

    def _pop(self, count: int) -> Slots:
        taken = [self._slots.popleft() for _ in range(count)]
        return Slots(
            self._generation,
            np.fromiter((offset for offset, _ in taken), np.uint64, count),
            np.fromiter((epoch for _, epoch in taken), np.uint32, count),
        )

    def _settle(self, generation: bytes) -> None:
        if generation != self._generation:
            self._slots.clear()
            self._generation = generation

    def _idle(self) -> bool:
        return self._now() - self._used_at > (STOCK_UNUSED_S if self._busy else STOCK_IDLE_S)

    def _short(self) -> int:
        if self._idle():
            self._announced = 0
            return 0
        return min(self._most, self._announced + STOCK_BASE) - len(self._slots)
