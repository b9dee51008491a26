"""Copies layers out of pinned blocks, in order, on as many threads as help."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from kvstore.engine.layout import Piece


class LayerCopy:
    """The layers of one load. Pieces are handed out one after the other, so that all who copy work on one layer, or on
    the end of it and the beginning of the next.

    Args:
        pieces_of: The pieces of a layer: pairs of where to and where from.
        layers: How many there are.
    """

    def __init__(self, pieces_of: Callable[[int], Iterable[Piece]], layers: int) -> None:
        self._pieces_of = pieces_of
        self._layers = layers
        self._changed = threading.Condition()  # guards everything below
        self._queue: deque[tuple[int, Piece]] = deque()
        self._begun = 0  # layers whose pieces were made
        self._left = [0] * layers  # pieces of each that are not copied
        self._stopped = False

    def copy(self, until: int) -> bool:
        """Copies until a layer is complete, and waits for what others copy of it.

        Returns:
            Whether it is; not where a helper failed.

        Raises:
            Exception: what went wrong here. Nothing more is begun.
        """
        while (taken := self._take(until)) is not None:
            self._copy(*taken)
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._left[until])
            return not self._stopped

    def help(self) -> None:
        """For another thread: copies until nothing is left."""
        try:
            while (taken := self._take(self._layers - 1)) is not None:
                self._copy(*taken)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Nothing more is begun; helpers return after the piece that they copy. What they failed with is not kept here:
        its traceback would keep the pool's mapping.
        """
        with self._changed:
            self._stopped = True
            self._queue.clear()
            self._changed.notify_all()

    def _take(self, until: int) -> tuple[int, Piece] | None:
        """The next piece, unless a layer is complete, or others have the rest of it."""
        with self._changed:
            if self._stopped:
                return None
            while not self._queue and self._begun <= until:
                self._queue.extend((self._begun, piece) for piece in self._pieces_of(self._begun))
                self._left[self._begun] = len(self._queue)
                self._begun += 1
            # With a piece of a later layer in front and some of this one under way elsewhere: better copy than wait.
            if not self._queue or (self._begun > until and not self._left[until]):
                return None
            return self._queue.popleft()

    def _copy(self, layer: int, piece: Piece) -> None:
        np.copyto(*piece)
        with self._changed:
            self._left[layer] -= 1
            if not self._left[layer]:
                self._changed.notify_all()
