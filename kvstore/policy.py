"""Which block leaves first. Pure bookkeeping: no clock, no I/O, no pins.

A policy knows nodes, not keys, and marks them through one attribute of theirs, so that a touch of 2,048 blocks is a
loop of attribute stores and one list operation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Generic, Protocol, TypeVar


class Node(Protocol):
    """What a policy keeps in order.

    Attributes:
        tick: The policy's mark; 0 while it does not know the node. Only the policy writes it.
    """

    tick: int


N = TypeVar("N", bound=Node)


class Ticker:
    """Counts touches over several policies, so that the ages of their nodes can be compared."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 1


class EvictionPolicy(Protocol[N]):
    """Order of eviction among the nodes of one kind. Owned by one thread.

    The caller touches nodes in prefix order and adds the ancestors of the first one, so that no node is ever more
    recent than the node before it: suffixes go first. The policy forgets a node it popped; who finds that a popped node
    cannot leave now (it is pinned) touches it again when it can.
    """

    def touch(self, chain: Sequence[N]) -> None:
        """Notes a use of nodes, in prefix order. Unknown ones are added."""

    def forget(self, node: N) -> None:
        """Takes a node out. Unknown ones are ignored."""

    def pop(self) -> N | None:
        """Takes out the node that should leave first; None where there is none."""

    def oldest_tick(self) -> int | None:
        """About when the node that pop() would give was last touched, by the common Ticker; None where there is
        none.
        """

    def peek(self, count: int) -> list[N]:
        """About the first `count` nodes that pop() would give."""

    def __len__(self) -> int:
        """How many nodes it knows."""


#: References in one chunk of the log. Ages are compared chunk by chunk.
_CHUNK: Final = 4096


class LruPolicy(Generic[N]):
    """Least recently used, in prefix order, exact.

    A log of references, newest last, cut into chunks. A touch writes the number of the open chunk into each node and
    appends the nodes, suffix first; a reference is current if its node still bears its chunk's number. When a chunk
    becomes the oldest one, its references that are no longer current and all but the last reference of a node are
    dropped, which leaves its nodes in exact order. So a touch costs an attribute store, where a linked list or an
    OrderedDict costs 5 to 10 times that (and 100 bytes a node more), and the sorting out is paid at eviction. A sweep
    that runs along with touches keeps the log under about three references a node.
    """

    def __init__(self, ticker: Ticker | None = None) -> None:
        self._ticker = ticker or Ticker()
        self._chunks: OrderedDict[int, list[N]] = OrderedDict()
        self._open_tick = 0
        self._open: list[N] = []
        #: The oldest chunk once it was sorted out, coldest last; its nodes bear _head_tick.
        self._head: list[N] = []
        self._head_tick = 0
        self._nodes = 0
        self._references = 0
        self._to_sweep: list[int] = []
        self._last_swept: int = 0

    def __len__(self) -> int:
        return self._nodes

    def touch(self, chain: Sequence[N]) -> None:
        now = self._ticker.now
        tick = self._open_tick
        if not tick or len(self._open) >= _CHUNK or now - tick >= _CHUNK:
            tick = self._open_tick = now
            self._open = self._chunks[tick] = []
        added = 0
        for node in chain:
            if not node.tick:
                added += 1
            node.tick = tick
        self._nodes += added
        self._open.extend(reversed(chain))
        self._references += len(chain)
        self._ticker.now = now + max(1, len(chain))
        if self._references > 2 * self._nodes + 2 * _CHUNK:
            self._sweep(2 * len(chain))

    def forget(self, node: N) -> None:
        if node.tick:
            node.tick = 0
            self._nodes -= 1

    def pop(self) -> N | None:
        while self._nodes:
            head, tick = self._head, self._head_tick
            while head:
                node = head.pop()
                self._references -= 1
                if node.tick == tick:
                    node.tick = 0
                    self._nodes -= 1
                    return node
            self._next_head()
        return None

    def oldest_tick(self) -> int | None:
        if not self._nodes:
            return None
        while True:
            while self._head and self._head[-1].tick != self._head_tick:
                self._head.pop()
                self._references -= 1
            if self._head:
                return self._head_tick
            self._next_head()

    def peek(self, count: int) -> list[N]:
        if self.oldest_tick() is None:
            return []
        return [node for node in self._head[: -count - 1 : -1] if node.tick == self._head_tick]

    def _next_head(self) -> None:
        """Sorts out the oldest chunk. Only called while there are nodes, so there is a chunk."""
        tick, chunk = self._chunks.popitem(last=False)
        if tick == self._open_tick:
            self._open_tick = 0
        self._references -= len(chunk)
        self._head = self._current(tick, chunk)
        self._head.reverse()
        self._head_tick = tick
        self._references += len(self._head)

    @staticmethod
    def _current(tick: int, chunk: list[N]) -> list[N]:
        """The current references of a chunk, one a node (the last), in order."""
        kept = [node for node in dict.fromkeys(reversed(chunk)) if node.tick == tick]
        kept.reverse()
        return kept

    def _sweep(self, budget: int) -> None:
        """Sorts out closed chunks in turn, about `budget` references of them, and joins small neighbours."""
        while budget > 0:
            if not self._to_sweep:
                self._to_sweep = list(reversed(self._chunks))
                self._last_swept = 0
            tick = self._to_sweep.pop()
            if tick == self._open_tick:  # always the last one, so the round is over
                self._to_sweep.clear()
                return
            chunk = self._chunks.get(tick)
            if chunk is None:
                continue
            budget -= len(chunk)
            kept = self._current(tick, chunk)
            self._references -= len(chunk) - len(kept)
            before = self._chunks.get(self._last_swept)
            if before is not None and len(before) + len(kept) <= _CHUNK:
                for node in kept:
                    node.tick = self._last_swept
                before.extend(kept)
                del self._chunks[tick]
            else:
                self._chunks[tick] = kept
                self._last_swept = tick
