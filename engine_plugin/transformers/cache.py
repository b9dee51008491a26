"""A cache layer whose keys and values are still on their way."""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicLayer

from kvstore.engine import Load


class LoadingLayer(DynamicLayer):
    """A DynamicLayer that is filled by a Load. Its length is known from the beginning; whoever touches its tensors
    waits for this layer, and for no later one. So a forward pass computes the first layers while the last ones are
    copied.

    Where the load fails, whoever touches the tensors gets the error of Load.wait_layer, also later.
    """

    def __init__(self, load: Load, index: int) -> None:
        self._load: Load | None = load
        self._index = index
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        super().__init__()
        self.keys, self.values = load.layers[index]
        self.dtype, self.device = self._keys.dtype, self._keys.device
        self.is_initialized = True

    def _wait(self) -> None:
        if self._load is not None:
            self._load.wait_layer(self._index)
            self._load = None

    @property
    def keys(self) -> torch.Tensor | None:
        """Keys of all tokens, [batch, heads, tokens, head size]. Waits for them."""
        self._wait()
        return self._keys

    @keys.setter
    def keys(self, tensor: torch.Tensor | None) -> None:
        self._keys = tensor

    @property
    def values(self) -> torch.Tensor | None:
        """Values of all tokens. Waits for them."""
        self._wait()
        return self._values

    @values.setter
    def values(self, tensor: torch.Tensor | None) -> None:
        self._values = tensor

    def get_seq_length(self) -> int:
        """Tokens of this layer, those that are on their way included. Does not wait."""
        return 0 if self._keys is None or not self._keys.numel() else self._keys.shape[-2]
