"""KV events: which blocks this engine has told the world it can load, and which it has learned are gone.

The daemon owns the blocks and evicts them without a word to its engines, so this is what one engine knows: a block is
announced when it was published here or found by a lookup, and withdrawn when a lookup misses it, a load of it fails, or
its pool is gone. What is announced is also asked about, some of it at a time and again and again: the daemon need not
remember who was told what, and an answer covers all of its tiers. Whoever routes by these events may be wrong by as
much as such a round takes.

Knows nothing of vLLM. Scheduler thread only.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Final

from engine_plugin.vllm.runs import hash_of

#: Blocks that are announced at a time; the one that was announced longest ago is withdrawn first. vLLM keeps the tokens
#: of each of them.
ANNOUNCED_MAX: Final = 262_144
#: Blocks asked about at a time, and how long after the time before. A round over ANNOUNCED_MAX takes a minute.
ASKED_MAX: Final = 4096
ASK_EVERY_S: Final = 1.0
#: Without an answer for this long there will be none.
ANSWER_S: Final = 30.0


class Announced:
    """See the module.

    Args:
        on: False: nothing is noted.
    """

    def __init__(self, on: bool = True, most: int = ANNOUNCED_MAX) -> None:
        self._on = on
        self._most = most
        self._keys: OrderedDict[bytes, bytes] = OrderedDict()  # with what is apart from the key
        self._asked: set[bytes] = set()  # and not announced again since
        self._events: list[tuple[bool, bytes]] = []  # removed, key

    def there(self, keys: Iterable[bytes], apart: bytes = b"") -> None:
        """Blocks that can be loaded.

        Args:
            apart: What makes other KV of the same tokens and is not in the keys.
        """
        if not self._on:
            return
        for key in keys:
            self._asked.discard(key)
            if key in self._keys:
                self._keys.move_to_end(key)
                continue
            self._keys[key] = apart
            self._events.append((False, key))
        while len(self._keys) > self._most:
            self._events.append((True, self._keys.popitem(last=False)[0]))

    def gone(self, keys: Iterable[bytes]) -> None:
        """Blocks that cannot be loaded (any more)."""
        if self._on and self._keys:
            for key in keys:
                if key in self._keys:
                    del self._keys[key]
                    self._events.append((True, key))

    def never(self, keys: Iterable[bytes]) -> None:
        """Blocks whose store has failed. vLLM has kept their tokens for an event that does not come, and lets go of
        them when it is told that they are removed.
        """
        if self._on:
            keys = [key for key in keys if key not in self._keys]
            self._events += [(True, key) for key in keys]

    def all_gone(self) -> None:
        """None of them can be loaded any more."""
        self.gone(list(self._keys))

    def to_ask(self, most: int) -> tuple[list[bytes], list[bytes]]:
        """The blocks that were not asked about for the longest time: keys, and the daemon's. One question at a time."""
        keys = list(itertools.islice(self._keys, most))
        for key in keys:
            self._keys.move_to_end(key)
        self._asked = set(keys)
        return keys, [hash_of(key, self._keys[key]) for key in keys]

    def answered(self, keys: Iterable[bytes], present: Iterable[bool]) -> None:
        """The answer: what is not there is withdrawn, unless it was announced again meanwhile."""
        self.gone(key for key, is_there in zip(keys, present, strict=True) if not is_there and key in self._asked)
        self._asked.clear()

    def take(self) -> list[tuple[bool, list[bytes]]]:
        """What has happened since the last call, in order: removed or not, and the keys."""
        events, self._events = self._events, []
        found: list[tuple[bool, list[bytes]]] = []
        for removed, key in events:
            if not found or found[-1][0] is not removed:
                found.append((removed, []))
            found[-1][1].append(key)
        return found


class Rounds:
    """Asks the daemon about what is announced. Scheduler thread only, but for the answers.

    Args:
        ask: Sends a question behind; the second argument is called with the answer, on any thread, or with None.
    """

    def __init__(
        self,
        announced: Announced,
        ask: Callable[[list[bytes], Callable[[list[bool] | None], None]], None],
        now: Callable[[], float],
    ) -> None:
        self._announced = announced
        self._ask = ask
        self._now = now
        self._due = 0.0
        self._under_way = False
        self._answers: deque[tuple[list[bytes], list[bool] | None]] = deque()

    def turn(self) -> None:
        """Takes the answer that is in, and asks again when it is time."""
        while self._answers:
            keys, present = self._answers.popleft()
            self._under_way = False
            if present is not None:
                self._announced.answered(keys, present)
        now = self._now()
        if now < self._due + (ANSWER_S if self._under_way else 0.0):
            return
        self._due = now + ASK_EVERY_S
        keys, hashes = self._announced.to_ask(ASKED_MAX)
        if keys:
            self._under_way = True
            self._ask(hashes, lambda present, keys=keys: self._answers.append((keys, present)))  # type: ignore[misc]
