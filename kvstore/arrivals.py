"""Slots that bytes arrive in from another host: who may have them written, and when they may go to others.

A client without the mapping has the daemon receive its bytes, on a thread that writes into the slot. Until that thread
is through, the slot cannot go to anybody else, whatever its session does or suffers meanwhile: it is given back then.
Owned by the hierarchy's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.arena import Arena
from kvstore.directory import Keyspace, Share
from kvstore.errors import InvalidRequest, StaleGeneration
from kvstore.leases import Session


class Arrivals:
    """See the module.

    Args:
        give_back: Takes an empty slot back into the pool.

    Attributes:
        orphans: Slots that were given back and still have bytes arriving, by offset: whose they are counted as, and
            what for.
    """

    def __init__(self, arena: Arena, give_back: Callable[[Share, int], None]) -> None:
        self._arena = arena
        self._give_back = give_back
        #: How many threads write into each slot: the ranks of an engine write a part each.
        self._writers: Counter[int] = Counter()
        self.orphans: dict[int, tuple[Share, Keyspace]] = {}

    def __contains__(self, offset: int) -> bool:
        return offset in self._writers

    def give_back(self, group: Share, keyspace: Keyspace, offset: int) -> None:
        """Takes an empty slot back: now, or when nothing arrives in it any more."""
        if offset in self._writers:
            self.orphans[offset] = (group, keyspace)
        else:
            self._give_back(group, offset)

    def begin(self, session: Session, offsets: Sequence[int], epochs: Sequence[int], end: int) -> None:
        """A thread is about to write into slots, up to `end` bytes from where they begin. Call finish() afterwards.

        Raises:
            StaleGeneration: one of them is not held by the session's group (any more).
            InvalidRequest: that is more than a block has, or a slot is named twice.
        """
        held = {
            offset: reservation.keyspace
            for member in _members(session)
            for offset, reservation in member.reserved.items()
        }
        self._check(offsets, epochs, end, held)
        if len(set(offsets)) != len(offsets):
            raise InvalidRequest("a slot is named twice in one transfer")
        self._writers.update(offsets)

    def finish(self, offsets: Sequence[int]) -> None:
        """That thread is through."""
        for offset in offsets:
            self._writers[offset] -= 1
            if self._writers[offset]:
                continue
            del self._writers[offset]
            orphan = self.orphans.pop(offset, None)
            if orphan is not None:
                self._give_back(orphan[0], offset)

    def check_readable(self, session: Session, offsets: Sequence[int], epochs: Sequence[int], end: int) -> None:
        """Whether the session's group has the blocks in these slots pinned.

        Raises:
            StaleGeneration: one of them is not (any more).
            InvalidRequest: `end` is more bytes than a block has.
        """
        held = {
            block.offset: block.keyspace
            for member in _members(session)
            for lease in member.leases.values()
            for block in lease.blocks
        }
        self._check(offsets, epochs, end, held)

    def _check(self, offsets: Sequence[int], epochs: Sequence[int], end: int, held: dict[int, Keyspace]) -> None:
        keyspaces = [held.get(offset) for offset in offsets]
        if None in keyspaces or self.epochs_of(offsets) != list(epochs):
            raise StaleGeneration("a slot is not held by this session (any more)")
        smallest = min((keyspace.block_bytes for keyspace in keyspaces if keyspace is not None), default=end)
        if end > smallest:
            raise InvalidRequest(f"bytes up to {end} of a block that has {smallest}")

    def epochs_of(self, offsets: Sequence[int]) -> list[int]:
        """Epochs of slots, now; offsets that are none have the epoch -1."""
        size = self._arena.size_bytes
        known = [offset for offset in offsets if offset < size]
        epochs = dict(zip(known, self._arena.epochs_of(np.array(known, dtype=np.uint64)).tolist(), strict=True))
        return [epochs.get(offset, -1) for offset in offsets]


def _members(session: Session) -> list[Session]:
    """The sessions whose slots a session may touch: a worker fills what its scheduler reserved. Those that have ended
    keep what they held for the others.
    """
    return [*session.group.members.values(), *session.group.lingering]
