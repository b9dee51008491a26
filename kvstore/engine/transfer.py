"""KVTransfer: the KV of prompts in and out of the pool, for engines that have no plugin.

The prompt is cut into blocks of tokens and hashed in a chain, each hash covering all tokens up to the end of its block;
so two prompts share the blocks of their common beginning. What does not fill a block is not stored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self

import numpy as np
import xxhash

from kvstore.blocks import Namespace
from kvstore.client import connect
from kvstore.engine.copying import LayerCopy
from kvstore.engine.layout import KVTensor, Layers, Layout, Piece, Words
from kvstore.engine.load import Load
from kvstore.errors import ClientClosed, Damage, InvalidRequest, KVStoreError, RetryLater, StaleGeneration
from kvstore.found import Found
from kvstore.insert import InsertResult, Ticket
from kvstore.tensors import Library
from kvstore.threads import started_pool

#: sha256 cannot be fooled. xxh3 is some ten times faster, and somebody who chooses prompts to that end can make two of
#: them meet: it is for engines whose prompts nobody else chooses.
HASHES: Final[dict[str, Callable[[bytes], bytes]]] = {
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "xxh3": xxhash.xxh3_128_digest,
}
#: Bytes in one round of a store: reserve, copy, commit.
_ROUND_BYTES: Final = 128 << 20
#: From here on two threads copy a load. Heads lie apart in an engine's tensors, and with pieces of some KiB one thread
#: reaches half of what memory gives it for long ones.
_SHARED_BYTES: Final = 4 << 20
#: How long a store waits for a pool that is being populated.
_POPULATING_S: Final = 5.0
#: Between two looks for a daemon while the constructor waits for one.
_LOOK_S: Final = 0.01


@dataclasses.dataclass(slots=True)
class _Run:
    """Blocks of a load that are pinned together: the first of them is block `first` of the prompt."""

    found: Found
    first: int


class KVTransfer:
    """The KV of one model in the daemon's pool. Safe from any thread; it does not survive a fork.

    A daemon that is away costs hits, never an error: match and get find nothing, put stores nothing.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[KVTensor]],
        *,
        model: str,
        block_tokens: int = 64,
        endpoint: str | None = None,
        hash_name: Literal["sha256", "xxh3"] = "sha256",
        revision: str = "",
        lora: str = "",
        tenant: str = "",
        extra: Sequence[tuple[str, str]] = (),
        promotion_s: float = 10.0,
        attach_s: float = 5.0,
        **options: Any,
    ) -> None:
        """Connects. Two engines share blocks where all of the following agree but how to reach the daemon.

        Args:
            layers: The tensors of each layer's KV.
            model: Name of the model; `revision` or a fingerprint of its weights beside it.
            block_tokens: Tokens in one block.
            endpoint: As for kvstore.connect.
            hash_name: Of the chain; see HASHES.
            lora, tenant, extra: Whatever else tells the bytes of equal prompts apart.
            promotion_s: How long a load waits for blocks that rest in a lower tier.
            attach_s: How long to wait here for a daemon; without one it goes on, and attaches when there is one.
            options: Others of kvstore.connect, such as `token`, `tls`, `timeout_s` and, for a daemon on another host,
                `staging_bytes` (at least the KV of the longest prompt that is loaded).

        Raises:
            CallerMistake: the daemon refuses this client (token, sizes), or the arguments make no sense.
        """
        if hash_name not in HASHES:
            raise InvalidRequest(f"hash_name is {hash_name!r}: one of {', '.join(HASHES)}")
        self._layout = Layout(layers, block_tokens)
        self._hash = HASHES[hash_name]
        self._promotion_s = promotion_s
        tensors = [tensor for layer in self._layout.layers for tensor in layer]
        shapes = json.dumps([[[each.dtype, each.shape] for each in layer] for layer in self._layout.layers])
        self._loads = started_pool(1, "kvstore-engine-load")
        self._helpers = started_pool(1, "kvstore-engine-help")
        self._stores = started_pool(1, "kvstore-engine-store")
        self._client = connect(
            endpoint,
            Namespace(
                model=model,
                dtype="+".join(sorted({each.dtype for each in tensors})),
                block_size=block_tokens,
                block_bytes=self._layout.block_bytes,
                revision=revision,
                layout="layer after layer",
                hash_algo=f"{hash_name} of int64",
                lora=lora,
                tenant=tenant,
                extra=(*extra, ("shapes", shapes)),
            ),
            **{"client_name": f"engine:{model}", **options, "wait": False},
        )
        try:
            self._await_daemon(attach_s)
        except BaseException:
            self.close()
            raise

    def _await_daemon(self, attach_s: float) -> None:
        deadline = time.monotonic() + attach_s
        while True:
            try:
                return self._client.wait_attached(0.0)
            except RetryLater:
                if time.monotonic() >= deadline:
                    return
            time.sleep(_LOOK_S)

    @property
    def attached(self) -> bool:
        """Whether there is a daemon now."""
        return self._client.attached

    @property
    def block_tokens(self) -> int:
        """Tokens in one block."""
        return self._layout.block_tokens

    def keys_of(self, token_ids: Any, salt: str = "") -> list[bytes]:
        """Keys of the whole blocks of a prompt.

        Args:
            token_ids: Integers: a sequence, an array or a tensor with one axis.
            salt: Whatever tells requests with equal tokens apart: another image, another user's privacy.
        """
        tokens = np.asarray(token_ids)
        if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
            raise InvalidRequest(f"token_ids is {tokens.dtype}{list(tokens.shape)}: give the integers of one prompt")
        tokens = tokens.astype("<i8")
        step = self.block_tokens
        keys, previous = [], self._hash(b"kvstore:" + salt.encode())
        for start in range(0, len(tokens) - step + 1, step):
            previous = self._hash(previous + tokens[start : start + step].tobytes())
            keys.append(previous)
        return keys

    # -- reading ---------------------------------------------------------------------------------------------------

    def match(self, token_ids: Any, *, salt: str = "") -> int:
        """How many tokens from the beginning are there, in any tier. Promises nothing: get pins."""
        keys = self.keys_of(token_ids, salt)
        try:
            return self._client.lookup(keys) * self.block_tokens
        except RetryLater:
            return 0

    def get(self, token_ids: Any, out: Layers | None = None, *, salt: str = "", library: Library = "numpy") -> Load:
        """Loads as much of a prompt's beginning as is there. Returns at once; a thread copies.

        Args:
            out: Tensors to fill, by layer, as long as the prompt or longer on the axis of tokens (else less is loaded);
                in host memory, any strides. None: new ones.
            library: What new tensors are of.

        Raises:
            InvalidRequest: `out` is of other shapes or dtypes than the layers that this was made with.
        """
        keys = self.keys_of(token_ids, salt)
        if out is not None:
            keys = keys[: self._layout.check(out) // self.block_tokens]
        with contextlib.ExitStack() as pins:
            runs: list[_Run] = []
            rest: list[bytes] = []
            with contextlib.suppress(RetryLater):
                if keys:
                    found = pins.enter_context(self._client.select(keys, 0.0))
                    # What is in the pool is pinned now. What rests below comes up while the thread waits for it.
                    if rest := keys[len(found) :]:
                        rest = rest[: self._client.lookup(rest)]
                    runs = [_Run(found, 0)]
            tokens = (len(runs[0].found) + len(rest)) * self.block_tokens if runs else 0
            layers = self._layout.empty(tokens, library) if out is None else self._layout.cut(out, tokens)
            load = Load(tokens, layers)
            if tokens:
                words = self._layout.words(layers)
                kept = pins.pop_all()
                try:
                    self._loads.submit(self._load, load, words, runs, rest, kept)
                except RuntimeError:
                    kept.close()
                    raise ClientClosed("this KVTransfer was closed") from None
        return load

    def _load(
        self, load: Load, targets: Words, runs: list[_Run], rest: list[bytes], pins: contextlib.ExitStack
    ) -> None:
        try:
            with pins:
                if rest:
                    load.check_wanted()
                    found = pins.enter_context(self._client.select(rest, self._promotion_s))
                    if len(found) < len(rest):
                        raise StaleGeneration("blocks that were there when the load began are not any more")
                    runs.append(_Run(found, len(runs[0].found)))
                self._copy_layers(load, targets, runs)
        except KVStoreError as error:
            load.fail(error)
        except Exception as error:  # a defect here must not leave an engine waiting for ever
            load.fail(Damage(f"the load failed, compute the whole prompt: {error!r}"))

    def _copy_layers(self, load: Load, targets: Words, runs: list[_Run]) -> None:
        def pieces_of(layer: int) -> Iterator[Piece]:
            for run in runs:
                pool = run.found.arena.as_numpy()
                yield from self._layout.load_pieces(layer, targets, run.first, pool, run.found.offsets)

        copy = LayerCopy(pieces_of, len(targets))
        shared = load.tokens // self.block_tokens * self._layout.block_bytes >= _SHARED_BYTES
        helper = self._helpers.submit(copy.help) if shared and len(os.sched_getaffinity(0)) > 1 else None
        try:
            for layer in range(len(targets)):
                load.check_wanted()
                if not copy.copy(layer):
                    break
                if not all(run.found.intact() for run in runs):
                    raise Damage("the bytes of a leased block changed while it was read: compute the whole prompt")
                load.advance()
        finally:
            # Nothing may be written to the tensors, nor read from the blocks, once this load is over.
            copy.stop()
            if helper is not None and helper.cancel():
                helper = None
            failed = helper.exception() if helper is not None else None
            helper = None  # an error that is kept would keep itself
        if failed is not None:
            raise Damage(f"the load failed, compute the whole prompt: {failed!r}")

    # -- writing ---------------------------------------------------------------------------------------------------

    def put(self, token_ids: Any, layers: Layers, *, salt: str = "") -> Ticket:
        """Stores the whole blocks of a prompt. Returns at once; a thread copies.

        Args:
            layers: The KV of at least these tokens, by layer, in host memory, any strides. It is read until the ticket
                is done: do not change it before.

        Returns:
            A ticket; its result counts blocks, and names why those that were not stored were refused.

        Raises:
            InvalidRequest: other shapes or dtypes than the layers that this was made with, or fewer tokens.
        """
        keys = self.keys_of(token_ids, salt)
        tokens = len(keys) * self.block_tokens
        if (have := self._layout.check(layers)) < tokens:
            raise InvalidRequest(f"the KV of {have} tokens for a prompt of {len(token_ids)}")
        sources = self._layout.words(self._layout.cut(layers, tokens))
        ticket = Ticket()
        try:
            self._stores.submit(self._store, ticket, keys, sources)
        except RuntimeError:
            raise ClientClosed("this KVTransfer was closed") from None
        return ticket

    def _store(self, ticket: Ticket, keys: list[bytes], sources: Words) -> None:
        stored = exists = 0
        refused: dict[str, int] = {}
        step = max(1, _ROUND_BYTES // self._layout.block_bytes)
        try:
            while (start := stored + exists) < len(keys):
                new, old, shortfall = self._store_round(keys, start, min(start + step, len(keys)), sources)
                stored, exists = stored + new, exists + old
                if shortfall is not None and not (shortfall == "staging" and new + old):
                    refused[shortfall] = len(keys) - stored - exists
                    break
        except Exception as error:  # a defect here must not leave an engine waiting for ever
            refused[type(error).__name__] = len(keys) - stored - exists
        ticket.settle(InsertResult(stored, exists, refused))

    def _store_round(self, keys: list[bytes], start: int, stop: int, sources: Words) -> tuple[int, int, str | None]:
        """Stores some blocks. Returns how many are new, how many were there, and why not all, if so."""
        asked = keys[start:stop]
        slots = self._client.reserve(len(asked), keys=asked, wait_s=_POPULATING_S)
        missing, got = np.flatnonzero(~slots.exists), len(slots.offsets)
        # What exists after the first block that got no slot answers nothing.
        end = len(asked) if got == len(missing) else int(missing[got])
        numbers = [start + int(index) for index in missing[:got]]
        old = int(slots.exists[:end].sum())
        if not numbers:
            return 0, old, slots.shortfall
        try:
            arena = self._client.arena
            if arena is None or arena.generation != slots.generation:
                raise StaleGeneration("the daemon was restarted while blocks were stored")
            for layer in range(len(sources)):
                self._layout.store_layer(layer, sources, numbers, arena.as_numpy(), slots.offsets)
            outcomes = self._client.commit(
                slots.generation,
                slots.offsets,
                [keys[number] for number in numbers],
                parent=keys[numbers[0] - 1] if numbers[0] else None,
                epochs=slots.epochs,
            ).tolist()
        except BaseException:
            self._client.give_up(slots)
            raise
        if 3 in outcomes:
            self._client.give_up(slots)
            raise StaleGeneration("the daemon does not know slots that it gave to this session")
        return outcomes.count(1), old + outcomes.count(2), slots.shortfall

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finishes what is under way, and leaves. The blocks stay. May be called twice."""
        self._loads.shutdown()
        self._helpers.shutdown()
        self._stores.shutdown()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
