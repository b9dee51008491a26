"""Shares the blocks of a batch among nodes and connections, and gathers what became of them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from kvstore.tiers.redis_calls import Answer
from kvstore.tiers.redis_health import Fault, RedisHealth
from kvstore.tiers.redis_server import NoNode, Servers
from kvstore.tiers.redis_turn import Call, Stopper, Turn
from kvstore.tiers.redis_value import Names

T = TypeVar("T")
#: A piece of a batch, on one connection. A server is one thread: several connections at once make a single batch
#: slower, not faster, since more answers wait in its caches. They are for several batches, and several nodes.
_PIECE_BYTES: Final = 32 << 20
_PIECE_BLOCKS: Final = 512
_ASK_BLOCKS: Final = 4096


class Batches:
    """See the module. On the event loop.

    Args:
        refresh_soon: Called when the topology may have changed.
    """

    def __init__(
        self,
        servers: Servers,
        names: Names,
        health: RedisHealth,
        counts: Counter[str],
        deadline_s: float,
        refresh_soon: Callable[[], None],
    ) -> None:
        self._servers = servers
        self._names = names
        self._health = health
        self._counts = counts
        self._deadline_s = deadline_s
        self._refresh_soon = refresh_soon

    def may_ask(self, node: str) -> bool:
        """Whether a node was not given up. Also called on other threads."""
        return not self._health.whole.open and not self._health.breaker(node).open

    def _by_node(self, names: Sequence[bytes], places: Sequence[int]) -> dict[str, list[int]]:
        """Places of blocks by the node that holds them; those that nobody is known to hold are left out."""
        nodes: dict[str, list[int]] = {}
        for place in places:
            try:
                node = self._servers.node_of(self._names.tag(names[place]))
            except NoNode:
                self._counts["no_node"] += 1
                self._refresh_soon()
                continue
            mine = nodes.get(node)
            if mine is None:
                mine = nodes[node] = []
            mine.append(place)
        return {node: mine for node, mine in nodes.items() if self.may_ask(node)}

    async def ask(
        self,
        outcomes: list[T],
        names: Sequence[bytes],
        places: Sequence[int],
        sizes: Sequence[int] | None,
        make_call: Callable[[], Call[Answer[T]]],
        work: Callable[[Turn, str, list[int]], Answer[T]],
        stopper: Stopper,
    ) -> list[Answer[T]]:
        """Shares a batch among nodes and threads and gathers the outcomes; once more for what has moved to another
        node meanwhile.
        """
        answers: list[Answer[T]] = []
        for _ in range(2):
            call = stopper.watch(make_call())
            pieces: list[tuple[str, list[int]]] = []
            for node, mine in self._by_node(names, places).items():
                for piece in _pieces(mine, sizes):
                    call.submit(functools.partial(_work_on, work, node, piece))
                    pieces.append((node, piece))
            moved: list[int] = []
            for (node, piece), (answer, stalled) in zip(pieces, await call.wait(), strict=True):
                if answer is None:
                    self._counts["given_up"] += len(piece)
                    if stalled:
                        self._failed(node, Fault("timeout", f"{node} did nothing for {self._deadline_s:g} s"))
                    continue
                answers.append(answer)
                for place, outcome in zip(piece, answer.outcomes, strict=True):
                    outcomes[place] = outcome
                if answer.fault is not None:
                    self._failed(node, answer.fault)
                elif answer.done:
                    self._health.breaker(node).answered()
                moved += [piece[at] for at in answer.elsewhere]
            if not moved or stopper.stopped:
                break
            self._counts["moved"] += len(moved)
            self._refresh_soon()
            places = sorted(set(moved))
        return answers

    def _failed(self, node: str, fault: Fault) -> None:
        self._health.failed(node, fault)
        self._refresh_soon()


def _work_on(work: Callable[[Turn, str, list[int]], T], node: str, piece: list[int], turn: Turn) -> T:
    return work(turn, node, piece)


def _pieces(places: list[int], sizes: Sequence[int] | None) -> Iterator[list[int]]:
    """Cuts what one node is asked for into pieces."""
    piece: list[int] = []
    total = 0
    most = _ASK_BLOCKS if sizes is None else _PIECE_BLOCKS
    for place in places:
        piece.append(place)
        total += 0 if sizes is None else sizes[place]
        if len(piece) == most or total >= _PIECE_BYTES:
            yield piece
            piece, total = [], 0
    if piece:
        yield piece
