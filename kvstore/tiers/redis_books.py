"""What this daemon knows of the blocks in Redis: names, sizes, order of use. Other daemons change things behind its
back, and the server may evict: a hint, but for the budget, which counts what is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvstore.clock import Clock
from kvstore.policy import LruPolicy


class Entry:
    """A block."""

    __slots__ = ("key", "seen", "size_bytes", "tick")

    def __init__(self, key: bytes, size_bytes: int, seen: int) -> None:
        self.tick = 0
        self.key = key
        self.size_bytes = size_bytes
        self.seen = seen  # number of the sweep in which it was seen last


class Books:
    """See the module. On the event loop.

    Args:
        capacity_bytes: Budget; None: the server's policy decides what leaves.

    Attributes:
        held_bytes: Room that writes under way have taken.
        order: Uses that were not written down in Redis yet: when, or None for what is gone. Only with a budget.
        sweep: Number of the sweep that is under way, or was the last one.
    """

    def __init__(self, capacity_bytes: int | None, clock: Clock) -> None:
        self.capacity_bytes = capacity_bytes
        self._clock = clock
        self._entries: dict[bytes, Entry] = {}
        self._policy: LruPolicy[Entry] = LruPolicy()
        self._last_use = 0
        self.used_bytes = 0
        self.held_bytes = 0
        self.order: dict[bytes, int | None] = {}
        self.sweep = 0
        #: Uses from before the first sweep ended: warmer than all that it finds. None afterwards.
        self._early: list[Sequence[bytes]] | None = []
        #: What the first sweep has found and nobody has used yet.
        self._unused: dict[bytes, None] = {}

    @property
    def complete(self) -> bool:
        """Whether a sweep has come through, so that the budget counts everything."""
        return self._early is None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def items(self, digest: bytes | None) -> Iterator[tuple[bytes, int]]:
        """Names and sizes; a snapshot."""
        return iter(
            [
                (entry.key, entry.size_bytes)
                for entry in self._entries.values()
                if digest is None or entry.key.startswith(digest)
            ]
        )

    def names(self, digest: bytes | None) -> list[bytes]:
        return [key for key in self._entries if digest is None or key.startswith(digest)]

    def touch(self, keys: Sequence[bytes]) -> None:
        """Notes a use, in prefix order. Unknown ones are ignored."""
        entries = [entry for key in keys if (entry := self._entries.get(key)) is not None]
        if not entries:
            return
        self._policy.touch(entries)
        if self._early is not None:
            self._early.append([entry.key for entry in entries])
            for entry in entries:
                self._unused.pop(entry.key, None)
        if self.capacity_bytes is not None:
            # Comparable between daemons as far as their clocks agree, and never the same twice.
            self._last_use = max(self._last_use, int(self._clock.wall() * 1e6)) + len(entries)
            for place, entry in enumerate(entries):
                self.order[entry.key] = self._last_use - place

    def add(self, blocks: Iterable[tuple[bytes, int]]) -> None:
        """Takes in blocks that are there, in prefix order. A use."""
        keys = []
        for key, size_bytes in blocks:
            self._put(key, size_bytes)
            keys.append(key)
        self.touch(keys)

    def _put(self, key: bytes, size_bytes: int) -> Entry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(key, size_bytes, self.sweep)
        else:
            self.used_bytes -= entry.size_bytes
            entry.size_bytes = size_bytes
            entry.seen = self.sweep
        self.used_bytes += size_bytes
        return entry

    def forget(self, keys: Iterable[bytes]) -> int:
        """Takes blocks out. Returns how many were known."""
        found = 0
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is not None:
                found += 1
                self._unused.pop(key, None)
                self._policy.forget(entry)
                self.used_bytes -= entry.size_bytes
                if self.capacity_bytes is not None:
                    self.order[key] = None
        return found

    def hold(self, size_bytes: int) -> tuple[bool, list[bytes]]:
        """Takes room for a write. Returns whether there is enough, and what has to leave in any case."""
        if self.capacity_bytes is None:
            return True, []
        victims: list[bytes] = []
        if size_bytes > self.capacity_bytes - self.held_bytes:
            return False, victims
        while self.used_bytes + self.held_bytes + size_bytes > self.capacity_bytes:
            entry = self._policy.pop()
            if entry is None:
                return False, victims
            victims.append(entry.key)
            self.forget([entry.key])
        self.held_bytes += size_bytes
        return True, victims

    def let_go(self, size_bytes: int) -> None:
        """A write has ended, and what it stored is added by itself."""
        if self.capacity_bytes is not None:
            self.held_bytes -= size_bytes

    # -- sweeps --------------------------------------------------------------------------------------------------------

    def begin_sweep(self) -> None:
        self.sweep += 1

    def found(self, blocks: Iterable[tuple[bytes, int]]) -> None:
        """Blocks that a sweep came across."""
        for key, size_bytes in blocks:
            known = key in self._entries
            entry = self._put(key, size_bytes)
            if known:
                continue
            if self._early is not None:
                self._unused[key] = None
            else:
                # Another daemon stored it since the last sweep.
                self._policy.touch([entry])

    def give_up_sweep(self) -> None:
        """A sweep that did not come through says nothing of what it has not seen."""
        for key in self._unused:
            self.used_bytes -= self._entries.pop(key).size_bytes
        self._unused.clear()

    def end_sweep(self, uses: Mapping[bytes, float]) -> int:
        """Drops what a complete sweep has not seen. Returns how many that were.

        Args:
            uses: Of the first sweep: when blocks were used last, as far as it was written down.
        """
        if self._early is not None:
            unused = sorted(self._unused, key=lambda key: uses.get(key, 0.0), reverse=True)
            self._policy.touch([self._entries[key] for key in unused])
            self._last_use = max(self._last_use, int(max(uses.values(), default=0.0)))
            early, self._early = self._early, None
            self._unused.clear()
            for keys in early:
                self.touch(keys)
        return self.forget([key for key, entry in self._entries.items() if entry.seen < self.sweep])
