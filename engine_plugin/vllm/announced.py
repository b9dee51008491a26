"""KV events: which blocks this engine has told the world it can load, and which it has learned are gone.

The daemon owns the blocks and evicts them without a word to its engines, so this is what one engine knows: a block is
announced when it was published here or found by a lookup, and withdrawn when a lookup misses it, a load of it fails, or
its pool is gone. Whoever routes by these events may be wrong by as much, as with any cache.

Knows nothing of vLLM. Scheduler thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

#: Blocks that are announced at a time; the one that was announced longest ago is withdrawn first. vLLM keeps the tokens
#: of each of them.
ANNOUNCED_MAX: Final = 262_144


class Announced:
    """See the module.

    Args:
        on: False: nothing is noted.
    """

    def __init__(self, on: bool = True, most: int = ANNOUNCED_MAX) -> None:
        self._on = on
        self._most = most
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._events: list[tuple[bool, bytes]] = []  # removed, key

    def there(self, keys: Iterable[bytes]) -> None:
        """Blocks that can be loaded."""
        if not self._on:
            return
        for key in keys:
            if key in self._keys:
                self._keys.move_to_end(key)
                continue
            self._keys[key] = None
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

    def take(self) -> list[tuple[bool, list[bytes]]]:
        """What has happened since the last call, in order: removed or not, and the keys."""
        events, self._events = self._events, []
        found: list[tuple[bool, list[bytes]]] = []
        for removed, key in events:
            if not found or found[-1][0] is not removed:
                found.append((removed, []))
            found[-1][1].append(key)
        return found
