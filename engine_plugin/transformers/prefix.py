"""PrefixCache: save and restore the KV of prompts of one transformers model."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer

from engine_plugin.transformers.cache import LoadingLayer
from kvstore.engine import KVTensor, KVTransfer
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.insert import Ticket

#: Elements of each weight that its fingerprint looks at, at equal distances.
_SAMPLES: Final = 1024

Result = TypeVar("Result")


class PrefixCache:
    """The KV of one model's prompts, in the pool of a daemon, shared with every process that runs the same model.

    For models in host memory all of whose layers are DynamicLayers (full attention); one prompt at a time. A daemon
    that is away, or a load that fails half way, costs time: the prompt is computed.

    Two processes share KV where name, configuration and weights of their models agree. Of the weights, some are
    looked at, when this is made; whoever changes them afterwards (merges an adapter, say) makes a new PrefixCache.
    """

    def __init__(
        self,
        model: Any,
        *,
        name: str | None = None,
        block_tokens: int = 64,
        endpoint: str | None = None,
        **options: Any,
    ) -> None:
        """Connects. Runs the model on one token, to see what its cache looks like.

        Args:
            model: A causal language model of transformers, in evaluation mode.
            name: Of the model; None: what it was loaded from.
            block_tokens: Tokens in one block; the end of a prompt that does not fill one is computed each time.
            endpoint: Of the daemon, as for kvstore.connect.
            options: Others of kvstore.engine.KVTransfer.

        Raises:
            InvalidRequest: the model is not in host memory, or has layers of another kind.
        """
        if model.device.type != "cpu":
            raise InvalidRequest(
                f"the model is on {model.device}: PrefixCache serves models in host memory (for GPUs: vLLM)"
            )
        self._model = model
        with torch.inference_mode():
            probe = model(input_ids=torch.zeros((1, 1), dtype=torch.long), use_cache=True).past_key_values
        if other := {type(layer).__name__ for layer in probe.layers if type(layer) is not DynamicLayer}:
            raise InvalidRequest(f"the model's cache has layers of {sorted(other)}: only DynamicLayer can be restored")
        config = model.config.to_dict()
        # How it was loaded says nothing about what it computes.
        for key in ("_name_or_path", "transformers_version"):
            config.pop(key, None)
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
        extra = [*options.pop("extra", ()), ("config", digest), ("transformers", transformers.__version__)]
        self._kv = KVTransfer(
            [[_tensor_of(layer.keys), _tensor_of(layer.values)] for layer in probe.layers],
            model=name or model.config.name_or_path or type(model).__name__,
            block_tokens=block_tokens,
            endpoint=endpoint,
            **{"revision": _fingerprint(model), **options, "extra": extra},
        )

    def restore(self, input_ids: torch.Tensor, *, salt: str = "") -> DynamicCache:
        """A cache with as much of a prompt's beginning as is there, at least one token less than the prompt.

        Its layers are filled in the background; whoever touches one waits for it, and gets a KVStoreError where it will
        never come: then compute with a new cache, as `prefill` and `generate` do by themselves.

        Args:
            input_ids: [1, tokens].
            salt: Whatever tells requests with equal tokens apart.
        """
        tokens = _prompt(input_ids)
        load = self._kv.get(tokens[:-1], salt=salt, library="torch")
        cache = DynamicCache(config=self._model.config)
        if load.tokens:
            cache.layers[:] = [LoadingLayer(load, index) for index in range(len(load.layers))]
        return cache

    def save(self, input_ids: torch.Tensor, cache: DynamicCache, *, salt: str = "") -> Ticket:
        """Stores the KV of a prompt, as far as it fills blocks and is not there already. Returns at once.

        The cache may grow meanwhile (that makes new tensors); whoever writes into its tensors waits for the ticket.

        Args:
            input_ids: [1, tokens]: what the cache was computed from; more than it holds are ignored.
        """
        tokens = _prompt(input_ids)[: cache.get_seq_length()]
        return self._kv.put(tokens, [[layer.keys, layer.values] for layer in cache.layers], salt=salt)

    def prefill(self, input_ids: torch.Tensor, *, salt: str = "", **arguments: Any) -> Any:
        """One forward pass over a prompt: loads its beginning, computes the rest, saves what is new.

        Args:
            input_ids: [1, tokens].
            arguments: Others of the model's forward.

        Returns:
            The model's output: logits of the tokens that were computed (the last one always is), and
            `past_key_values` with the KV of all.
        """

        def forward(cache: DynamicCache) -> Any:
            rest = input_ids[:, cache.get_seq_length() :]
            return self._model(input_ids=rest, past_key_values=cache, use_cache=True, **arguments)

        output, cache = self._with_prefix(input_ids, salt, forward)
        self.save(input_ids, cache, salt=salt)
        return output

    def generate(self, input_ids: torch.Tensor, *, salt: str = "", **arguments: Any) -> Any:
        """As model.generate: loads the prompt's beginning, and saves prompt and answer, as far as they fill blocks."""

        def generate(cache: DynamicCache) -> Any:
            return self._model.generate(input_ids, past_key_values=cache, **arguments)

        output, cache = self._with_prefix(input_ids, salt, generate)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        if len(sequences) == 1:  # else they are several answers, and the cache is theirs
            self.save(sequences, cache, salt=salt)
        return output

    def _with_prefix(
        self, input_ids: torch.Tensor, salt: str, run: Callable[[DynamicCache], Result]
    ) -> tuple[Result, DynamicCache]:
        cache = self.restore(input_ids, salt=salt)
        with contextlib.suppress(KVStoreError):
            return run(cache), cache
        # A layer did not come. The first pass touches all of them, so nothing has been answered so far.
        cache = DynamicCache(config=self._model.config)
        return run(cache), cache

    def match(self, input_ids: torch.Tensor, *, salt: str = "") -> int:
        """How many tokens of a prompt are there."""
        return self._kv.match(_prompt(input_ids), salt=salt)

    def close(self) -> None:
        """Finishes what is under way, and leaves. The blocks stay."""
        self._kv.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _prompt(input_ids: torch.Tensor) -> Any:
    if input_ids.dim() != 2 or len(input_ids) != 1 or not input_ids.shape[1]:
        raise InvalidRequest(f"input_ids is {list(input_ids.shape)}: give one prompt, [1, tokens]")
    return input_ids[0].cpu().numpy()


def _tensor_of(tensor: torch.Tensor) -> KVTensor:
    batch, heads, _, size = tensor.shape
    return KVTensor(str(tensor.dtype).removeprefix("torch."), (batch, heads, None, size), tensor.element_size())


def _fingerprint(model: Any) -> str:
    """Digest of some elements of every weight and buffer. Any training or merging changes some of these."""
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // _SAMPLES)].contiguous().view(torch.uint8)
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:32]
