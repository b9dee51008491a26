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

    def advance(self, touches: int) -> int:
        """An age for so many touches, higher than every one before."""
        self.now += max(1, touches)
        return self.now


class EvictionPolicy(Protocol[N]):
    """Order of eviction among the nodes of one kind. Owned by one thread.

    The caller touches nodes in prefix order and adds the ancestors of the first one, so that no node is ever more
    recent than the node before it: suffixes go first. The policy forgets a node it popped; who finds that a popped node
    cannot leave now (it is pinned) touches it again when it can.
    """

    def touch(self, chain: Sequence[N], age: int | None = None) -> None:
        """Notes a use of nodes, in prefix order. Unknown ones are added.

        Args:
            age: Where a chain is split over several policies: the age of this part, from the common Ticker. None: now.
        """

    def forget(self, node: N) -> None:
        """Takes a node out. Unknown ones are ignored."""

    def pop(self) -> N | None:
        """Takes out the node that should leave first; None where there is none."""

    def oldest_age(self) -> int | None:
        """Age by the common Ticker of the node that pop() would give; None where there is none."""

    def peek(self, count: int) -> list[N]:
        """About the first `count` nodes that pop() would give."""

    def __len__(self) -> int:
        """How many nodes it knows."""


#: References in one chunk of the log.
_CHUNK: Final = 4096


class _Chunk(Generic[N]):
    """A piece of the log: nodes, and when each was touched (the numbers are shared by all nodes of one touch)."""

    __slots__ = ("ages", "nodes")

    def __init__(self) -> None:
        self.nodes: list[N] = []
        self.ages: list[int] = []

    def sort_out(self, tick: int) -> int:
        """Drops what is not current any more, and all but the last reference of a node. Returns how many are left."""
        last = dict(zip(self.nodes, self.ages, strict=True))  # the last age of each, at the place of the first
        kept = [node for node in dict.fromkeys(reversed(self.nodes)) if node.tick == tick]
        kept.reverse()
        self.nodes = kept
        self.ages = [last[node] for node in kept]
        return len(kept)


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
        self._chunks: OrderedDict[int, _Chunk[N]] = OrderedDict()
        self._open_tick = 0
        self._open: _Chunk[N] = _Chunk()
        #: The oldest chunk once it was sorted out, coldest last; its nodes bear _head_tick.
        self._head: _Chunk[N] = _Chunk()
        self._head_tick = 0
        self._nodes = 0
        self._references = 0
        self._to_sweep: list[int] = []
        self._last_swept: int = 0

    def __len__(self) -> int:
        return self._nodes

    def touch(self, chain: Sequence[N], age: int | None = None) -> None:
        now = self._ticker.advance(len(chain)) if age is None else age
        tick = self._open_tick
        if not tick or len(self._open.nodes) >= _CHUNK:
            # Ages of parts of one touch may go backwards, and a chunk's number has to be new.
            tick = self._open_tick = max(now, self._ticker.advance(1))
            self._open = self._chunks[tick] = _Chunk()
        added = 0
        for node in chain:
            if not node.tick:
                added += 1
            node.tick = tick
        self._nodes += added
        self._open.nodes.extend(reversed(chain))
        self._open.ages.extend([now] * len(chain))
        self._references += len(chain)
        if self._references > 2 * self._nodes + 2 * _CHUNK:
            self._sweep(2 * len(chain))

    def forget(self, node: N) -> None:
        if node.tick:
            node.tick = 0
            self._nodes -= 1

    def pop(self) -> N | None:
        if self.oldest_age() is None:
            return None
        self._references -= 1
        self._head.ages.pop()
        node = self._head.nodes.pop()
        node.tick = 0
        self._nodes -= 1
        return node

    def oldest_age(self) -> int | None:
        if not self._nodes:
            return None
        while True:
            nodes, ages = self._head.nodes, self._head.ages
            while nodes and nodes[-1].tick != self._head_tick:
                nodes.pop()
                ages.pop()
                self._references -= 1
            if nodes:
                return ages[-1]
            self._next_head()

    def peek(self, count: int) -> list[N]:
        if self.oldest_age() is None:
            return []
        return [node for node in self._head.nodes[: -count - 1 : -1] if node.tick == self._head_tick]

    def _next_head(self) -> None:
        """Sorts out the oldest chunk. Only called while there are nodes, so there is a chunk."""
        tick, chunk = self._chunks.popitem(last=False)
        if tick == self._open_tick:
            self._open_tick = 0
        before_sorting = len(chunk.nodes)
        self._references += chunk.sort_out(tick) - before_sorting
        chunk.nodes.reverse()
        chunk.ages.reverse()
        self._head, self._head_tick = chunk, tick

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
            before_sorting = len(chunk.nodes)
            budget -= before_sorting
            self._references += chunk.sort_out(tick) - before_sorting
            before = self._chunks.get(self._last_swept)
            if before is not None and len(before.nodes) + len(chunk.nodes) <= _CHUNK:
                for node in chunk.nodes:
                    node.tick = self._last_swept
                before.nodes.extend(chunk.nodes)
                before.ages.extend(chunk.ages)
                del self._chunks[tick]
            else:
                self._last_swept = tick
