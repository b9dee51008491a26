"""Disaggregated prefill: what a prefill engine says about a request, and what a decode engine takes from it.

The two engines share nothing but the daemon, so a prefill engine hands over no addresses, only facts::

    do_remote_prefill         true: the prompt has been computed elsewhere
    prompt_token_ids          so that the decode side does not tokenize (vLLM's front end takes them out)
    kvstore.namespace         hex digest: blocks of another one cannot be loaded here
    kvstore.model             for people
    kvstore.tokens            leading tokens of the prompt whose blocks are in the daemon, or on their way there
    kvstore.settled_tokens    those of them that were there before this request

The copies of a prefill's last step are made in the engine's next one, after its answer has gone out. So a decode
request may be early, and waits for the blocks that were on their way; never for those that were there before, since
one of them that is missing has been evicted. Nothing here waits: the bound goes with the request's query to the link,
which asks again until the blocks are there or the time is over.

Parameters come from whoever can send a request. What cannot be right is counted and said, and the request goes on as
one without parameters: they decide how long it waits, never which bytes it gets.

Scheduler thread only. Knows nothing of vLLM.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from engine_plugin.vllm.coming import NOTHING_EXPECTED, Expected
from engine_plugin.vllm.guard import limited_log

REMOTE_PREFILL: Final = "do_remote_prefill"
REMOTE_DECODE: Final = "do_remote_decode"
TOKEN_IDS: Final = "prompt_token_ids"
NAMESPACE: Final = "kvstore.namespace"
MODEL: Final = "kvstore.model"
TOKENS: Final = "kvstore.tokens"
SETTLED: Final = "kvstore.settled_tokens"


class BadParams(ValueError):
    """Parameters that cannot be right.

    Attributes:
        outcome: What it is counted as.
    """

    def __init__(self, outcome: str, why: str) -> None:
        super().__init__(why)
        self.outcome = outcome


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """What an engine is, towards the other one.

    Attributes:
        digest: Digest of its namespace, in hex.
        model: Name of its model.
        block_tokens: Tokens of one stored block.
        wait_s: Longest time that a request waits for blocks on their way, from its arrival on.
        loads, stores: What its role lets it do.
    """

    digest: str
    model: str
    block_tokens: int
    wait_s: float
    loads: bool = True
    stores: bool = True


@dataclasses.dataclass(slots=True)
class _Offered:
    """How far a prompt's blocks were offered for storing, in tokens.

    Attributes:
        end: Offered so far, or found there.
        settled: Leading part that was there already.
        left_out: Where the first block begins that found no room; None: all did.
    """

    end: int = 0
    settled: int = 0
    left_out: int | None = None


class PrefillDecode:
    """See the module. One per engine.

    Args:
        nested: The engine's connector is one of several in a MultiConnector. Another one may have the blocks, and only
            one of them may write the parameters that all connectors share; so nothing waits, and those are left out.
    """

    def __init__(self, side: Side, *, now: Callable[[], float], nested: bool = False) -> None:
        self._side = side
        self._now = now
        self.nested = nested
        self._promised: dict[str, tuple[int, int, float]] = {}  # request -> tokens, settled tokens, until when
        self._offered: dict[str, _Offered] = {}  # requests of which a prefill engine is asked to tell
        self.counts: Counter[tuple[str, str]] = Counter()

    # -- both sides ----------------------------------------------------------------------------------------------------

    def arrived(self, req_id: str, params: object, prompt_tokens: int) -> None:
        """A request has come in."""
        if params is None:
            return
        try:
            if not isinstance(params, dict):
                raise BadParams("bad_params", f"kv_transfer_params is of type {type(params).__name__}, not an object")
            if _flag(params, REMOTE_DECODE):
                if not self._side.stores:
                    raise BadParams("wrong_role", "this engine does not store (kv_role): it cannot prefill for others")
                self._offered[req_id] = _Offered()
            if _flag(params, REMOTE_PREFILL):
                if not self._side.loads:
                    raise BadParams("wrong_role", "this engine does not load (kv_role): it cannot decode for others")
                tokens, settled = self._read_promise(params, prompt_tokens)
                if not self.nested:
                    self._promised[req_id] = (tokens, settled, self._now() + self._side.wait_s)
        except BadParams as error:
            self.counts["pd", error.outcome] += 1
            limited_log(f"pd {error.outcome}", logging.WARNING, "kvstore: request %s: %s; going on", req_id, error)

    def finished(self, req_id: str) -> None:
        self._promised.pop(req_id, None)
        self._offered.pop(req_id, None)

    # -- prefill -------------------------------------------------------------------------------------------------------

    def tells_of(self, req_id: str) -> bool:
        """Whether somebody has asked this engine to prefill for a request."""
        return req_id in self._offered

    def note_offered(self, req_id: str, begin: int, settled: int, stored: int, blocks: int) -> None:
        """Blocks of a prompt were offered for storing, or loaded; calls come in prefix order.

        Args:
            begin: Where the first of them begins, in tokens.
            settled: How many of them, from the first on, were there already.
            stored: How many are there or on their way now.
            blocks: How many they are.
        """
        offered = self._offered[req_id]
        block = self._side.block_tokens
        if offered.settled == begin:
            offered.settled = begin + settled * block
        if stored < blocks and offered.left_out is None:
            offered.left_out = begin + stored * block
        offered.end = max(offered.end, begin + blocks * block)

    def handover(self, req_id: str, token_ids: Sequence[int] | None) -> dict[str, Any] | None:
        """What to answer to whoever asked this engine to prefill; None where nobody did.

        Args:
            token_ids: The prompt; None where it is not tokens.
        """
        offered = self._offered.get(req_id)
        if offered is None:
            return None
        ids = list(token_ids or ())
        whole = len(ids) // self._side.block_tokens * self._side.block_tokens
        tokens = min(offered.end, whole, offered.end if offered.left_out is None else offered.left_out)
        params: dict[str, Any] = {
            NAMESPACE: self._side.digest,
            MODEL: self._side.model,
            TOKENS: tokens,
            SETTLED: min(offered.settled, tokens),
        }
        if ids:
            params[TOKEN_IDS] = ids
        if not self.nested:
            params[REMOTE_PREFILL] = True
            params[REMOTE_DECODE] = False
        self.counts["pd", "handed_over"] += 1
        return params

    # -- decode --------------------------------------------------------------------------------------------------------

    def expected(self, req_id: str, begin: int, keys: int) -> Expected:
        """What a request's query may wait for.

        Args:
            begin: Where the block of the query's first key begins, in tokens.
            keys: Number of its keys, of blocks that follow one another.
        """
        promise = self._promised.get(req_id)
        if promise is None:
            return NOTHING_EXPECTED
        tokens, settled, until = promise
        block = self._side.block_tokens
        return Expected(
            min(keys, max(0, (tokens - begin) // block)), min(keys, max(0, (settled - begin) // block)), until
        )

    def _read_promise(self, params: Mapping[str, Any], prompt_tokens: int) -> tuple[int, int]:
        """Tokens that are in the daemon or on their way, and those of them that were there before.

        Parameters without any of ours come from a router that writes its own: then all of the prompt is waited for.
        """
        digest = params.get(NAMESPACE)
        if digest is not None and digest != self._side.digest:
            raise BadParams(
                "foreign_namespace",
                f"it was prefilled by an engine of namespace {_short(digest)} (model {_short(params.get(MODEL))}) and "
                f"this one's is {self._side.digest} (model {self._side.model}): `kvstore stats` shows what differs",
            )
        tokens = _count(params, TOKENS, prompt_tokens)
        settled = _count(params, SETTLED, 0)
        if tokens > prompt_tokens or settled > tokens:
            raise BadParams(
                "too_many_tokens",
                f"{TOKENS} is {tokens} and {SETTLED} {settled}, of a prompt of {prompt_tokens} tokens",
            )
        return tokens, settled


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise BadParams("bad_params", f"{name} is {_short(value)}, not true or false")


def _count(params: Mapping[str, Any], name: str, default: int) -> int:
    value = params.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadParams("bad_params", f"{name} is {_short(value)}, not a number of tokens")
    return value


def _short(value: object) -> str:
    """For a log line, whatever it is."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
