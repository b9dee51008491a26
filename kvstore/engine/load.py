"""Load: the handle of a load under way."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError


class Load:
    """A load under way. Its layers come in order, each usable as soon as wait_layer says so.

    The blocks are pinned until the last layer was copied, and after each layer it is checked that none of its bytes
    changed meanwhile, before the layer is called ready. So what wait_layer let through was right, also where a later
    layer fails; but a prompt needs all of them: an engine that gets an error computes the whole prompt.

    Attributes:
        tokens: How many tokens from the beginning come; 0: none, and there is nothing to wait for.
        layers: The tensors that are filled, by layer, `tokens` long.
    """

    def __init__(self, tokens: int, layers: Sequence[Sequence[Any]]) -> None:
        self.tokens = tokens
        self.layers = layers
        self._count = len(layers)
        self._changed = threading.Condition()  # guards the three below
        self._ready = 0 if tokens else self._count
        self._error: KVStoreError | None = None
        self._cancelled = False

    @property
    def done(self) -> bool:
        """Whether nothing is written to the tensors any more."""
        return self._ready == self._count or self._error is not None

    def wait_layer(self, index: int, timeout_s: float | None = None) -> None:
        """Waits until a layer is complete; those before it are too.

        Raises:
            Damage, RetryLater: it will never be. Compute the whole prompt.
            DeadlineExceeded: it is not so far, and the load goes on; or the load was cancelled.
            InvalidRequest: there is no such layer.
        """
        if not 0 <= index < self._count:
            raise InvalidRequest(f"layer {index} of {self._count}")
        with self._changed:
            self._changed.wait_for(lambda: self._ready > index or self._error is not None, timeout_s)
            if self._ready > index:
                return
            if self._error is not None:
                raise self._error
        raise DeadlineExceeded(f"layer {index} is not loaded after {timeout_s} s; the load goes on")

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for all layers. Raises what wait_layer raises."""
        self.wait_layer(self._count - 1, timeout_s)

    def cancel(self) -> None:
        """Ends the load after the layer that is being copied, and waits for that: then the tensors are the caller's."""
        with self._changed:
            self._cancelled = True
            self._changed.wait_for(lambda: self.done)

    # -- for the thread that copies --------------------------------------------------------------------------------

    def check_wanted(self) -> None:
        """Raises DeadlineExceeded where it was cancelled."""
        with self._changed:
            if self._cancelled:
                raise DeadlineExceeded("the load was cancelled")

    def advance(self) -> None:
        """One more layer is good."""
        with self._changed:
            self._ready += 1
            self._changed.notify_all()

    def fail(self, error: KVStoreError) -> None:
        """No further layer comes."""
        with self._changed:
            if self._ready < self._count:
                self._error = error
                self._changed.notify_all()
