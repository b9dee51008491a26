"""Slots that bytes arrive in from another host: who may have them written, and when they may go to others.

A client without the mapping has the daemon receive its bytes, on a thread that writes into the slot. Until that thread
is through, the slot cannot go to anybody else, whatever its session does or suffers meanwhile: it is given back then.
What has come so far is kept for each slot, so that none is published that was not filled.
Owned by the hierarchy's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from kvstore.arena import Arena
from kvstore.directory import Keyspace, Share
from kvstore.errors import InvalidRequest, StaleGeneration
from kvstore.leases import Session

#: Pieces of a slot that do not touch each other. The ranks of an engine send a few for each layer, in order; what goes
#: beyond that is not noted, so that such a slot is never full.
_SPANS_MAX: Final = 4096

#: Bytes of a slot: disjoint runs, in order.
_Spans = list[tuple[int, int]]


class _Received:
    """What has come into one reserved slot.

    Attributes:
        writers: How many threads write into it: the ranks of an engine write a part each.
        spans: What was received as a whole.
        holes: What somebody began to write and nobody has written to its end since.
        tainted: A write has failed while others were under way: where they overlap, nobody knows what is there.
    """

    __slots__ = ("holes", "spans", "tainted", "writers")

    def __init__(self) -> None:
        self.writers = 0
        self.spans: _Spans = []
        self.holes: _Spans = []
        self.tainted = False

    def begin(self, first: int, end: int) -> None:
        self.writers += 1
        self.spans = _without(self.spans, first, end)
        self.holes = _with(self.holes, first, end)

    def finish(self, first: int, end: int, *, whole: bool) -> None:
        self.writers -= 1
        if whole and not self.tainted:
            self.spans = _with(self.spans, first, end)
            self.holes = _without(self.holes, first, end)
        else:
            self.spans = _without(self.spans, first, end)
            self.holes = _with(self.holes, first, end)
            self.tainted = bool(self.writers)


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
        #: By offset: reserved slots that bytes were sent for, and orphans.
        self._received: dict[int, _Received] = {}
        self.orphans: dict[int, tuple[Share, Keyspace]] = {}

    def __contains__(self, offset: int) -> bool:
        """Whether bytes arrive there now."""
        received = self._received.get(offset)
        return received is not None and received.writers > 0

    @property
    def known(self) -> set[int]:
        """Slots that something has come for."""
        return set(self._received)

    def give_back(self, group: Share, keyspace: Keyspace, offset: int) -> None:
        """Takes an empty slot back: now, or when nothing arrives in it any more."""
        if offset in self:
            self.orphans[offset] = (group, keyspace)
        else:
            self.forget(offset)
            self._give_back(group, offset)

    def forget(self, offset: int) -> None:
        """A slot is no longer reserved, and nothing arrives there."""
        self._received.pop(offset, None)

    def unfilled(self, session: Session, offsets: Sequence[int], block_bytes: int) -> list[int]:
        """Those of some reserved slots whose bytes have not come over the data port; where some arrive right now, that
        is not looked at.

        A slot must have come from its first to its last byte. Where the session has a group, its members send parts,
        and leave out what their layout leaves unused: something must have come then, and all of what was begun.
        """
        has_parts = len(session.group.members) > 1 or bool(session.group.lingering)
        missing = []
        for offset in offsets:
            received = self._received.get(offset) or _Received()
            if received.writers:
                continue
            filled = received.spans and not received.holes if has_parts else received.spans == [(0, block_bytes)]
            if not filled:
                missing.append(offset)
        return missing

    def begin(self, session: Session, offsets: Sequence[int], epochs: Sequence[int], first: int, end: int) -> None:
        """A thread is about to write the bytes from `first` to before `end` of some slots. Call finish() afterwards.

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
        for offset in offsets:
            self._received.setdefault(offset, _Received()).begin(first, end)

    def finish(self, offsets: Sequence[int], first: int, end: int, *, received: int) -> None:
        """That thread is through; it has received all bytes of the first `received` of these slots."""
        for index, offset in enumerate(offsets):
            slot = self._received[offset]
            slot.finish(first, end, whole=index < received)
            if not slot.writers and (orphan := self.orphans.pop(offset, None)) is not None:
                self.forget(offset)
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
        places = np.array(offsets, dtype=np.uint64)
        known = places < self._arena.size_bytes
        epochs = np.full(len(places), -1, dtype=np.int64)
        epochs[known] = self._arena.epochs_of(places[known])
        found: list[int] = epochs.tolist()
        return found


def _with(spans: _Spans, first: int, end: int) -> _Spans:
    """Runs with one more, which may touch or overlap them."""
    before = [span for span in spans if span[1] < first]
    after = [span for span in spans if span[0] > end]
    touched = spans[len(before) : len(spans) - len(after)]
    if first == end or (not touched and len(spans) >= _SPANS_MAX):
        return spans
    return [*before, (min([first, *(span[0] for span in touched)]), max([end, *(span[1] for span in touched)])), *after]


def _without(spans: _Spans, first: int, end: int) -> _Spans:
    """Runs without these bytes."""
    left: _Spans = []
    for start, stop in spans:
        left += [(a, b) for a, b in ((start, min(stop, first)), (max(start, end), stop)) if a < b]
    return left


def _members(session: Session) -> list[Session]:
    """The sessions whose slots a session may touch: a worker fills what its scheduler reserved. Those that have ended
    keep what they held for the others.
    """
    return [*session.group.members.values(), *session.group.lingering]
