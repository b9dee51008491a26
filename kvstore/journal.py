"""What changed in a group of blocks that is watched: enough for a watcher to keep its own list of it up to date.

Bounded. Who asks for changes that are not remembered any more is told everything instead.
"""

from __future__ import annotations

import enum
import secrets
from collections import deque
from typing import Final

#: Changes that are remembered: a busy group has some thousand of them in a second, and who watches it asks more often.
_EVENTS_MAX: Final = 8192
#: Keys that are listed though they rest below the pool: as many as one answer may hold beside those in the pool.
_RESTING_MAX: Final = 32_768


class Change(enum.IntEnum):
    """What happened to a key. Those who wait for a kind of change are woken by it."""

    CAME = 1  # stored, or given back by a drop_select
    GONE = 2
    OTHER = 3  # claimed; left the pool and rests below; came up again


class Journal:
    """See the module. On the hierarchy's thread.

    Attributes:
        keys: Those that answer, in the order in which they came; also those that left the pool and rest below it.
        position: Grows with each change; where it starts is random, so that a number of another life of the daemon is
            told apart.
        complete: Whether the tiers were asked what rests there.
    """

    def __init__(self, keys: list[bytes]) -> None:
        self.keys: dict[bytes, None] = dict.fromkeys(keys)
        self.position = secrets.randbits(62) + 1
        self.complete = False
        self._resting: dict[bytes, None] = {}
        self._start = self.position
        self._events: deque[tuple[int, bytes, Change]] = deque(maxlen=_EVENTS_MAX)

    # -- what happens ----------------------------------------------------------------------------------------------

    def came(self, key: bytes) -> None:
        """A key answers from now on; or one that rested below is in the pool again."""
        rested = key in self._resting
        self._resting.pop(key, None)
        self.keys.setdefault(key)
        self._note(key, Change.OTHER if rested else Change.CAME)

    def left(self, key: bytes, *, rests: bool) -> None:
        """A key has left the pool; `rests`: a tier below still has it."""
        if rests:
            self.rests(key)
        else:
            self.gone(key)

    def rests(self, key: bytes) -> None:
        """A key is below the pool."""
        known = key in self.keys
        self.keys.setdefault(key)
        self._resting[key] = None
        self._note(key, Change.OTHER if known else Change.CAME)
        while len(self._resting) > _RESTING_MAX:
            self.gone(next(iter(self._resting)))

    def gone(self, key: bytes) -> None:
        """A key does not answer any more."""
        self._resting.pop(key, None)
        if key in self.keys:
            del self.keys[key]
            self._note(key, Change.GONE)

    def claimed(self, key: bytes) -> None:
        """Somebody may take the key away."""
        self._note(key, Change.OTHER)

    def given_back(self, key: bytes) -> None:
        """And did not."""
        if key in self.keys:
            self._note(key, Change.CAME)

    def forget_resting(self) -> None:
        """The tiers below were emptied."""
        for key in list(self._resting):
            self.gone(key)

    def _note(self, key: bytes, change: Change) -> None:
        self.position += 1
        self._events.append((self.position, key, change))

    # -- who asks --------------------------------------------------------------------------------------------------

    def covers(self, seen: int) -> bool:
        """Whether all changes after that position are remembered."""
        first = self._events[0][0] - 1 if self._events else self.position
        return (self._start if len(self._events) < _EVENTS_MAX else first) <= seen <= self.position

    def has_news(self, seen: int, wanted: Change | None, kinds: bytes) -> bool:
        """Whether there was such a change since that position; None: any. `kinds`: first bytes of the keys that count;
        empty: all do.
        """
        if not self.covers(seen):
            return True
        if wanted is None and not kinds:
            return seen != self.position
        for position, key, change in reversed(self._events):
            if position <= seen:
                return False
            if (wanted is None or change is wanted) and (not kinds or key[0] in kinds):
                return True
        return False

    def since(self, seen: int) -> tuple[bool, list[bytes]]:
        """Keys that something happened to since that position, in order of the first of it: what came is in the order
        in which it came.

        Returns:
            Whether these are all keys there are, since not all changes are remembered; and the keys.
        """
        if not self.covers(seen):
            return True, list(self.keys)
        changed: dict[bytes, None] = {}
        for position, key, _ in reversed(self._events):
            if position <= seen:
                break
            changed.pop(key, None)
            changed[key] = None
        return False, list(reversed(changed))
