"""The bodies of the two steps. What vLLM 0.32 and 0.33 take and answer; no I/O.

==================  ======================================  ==================================================
                    prefill                                 decode
==================  ======================================  ==================================================
both                one token, no stream, `return_token_ids`  as the client wrote it
kv_transfer_params  `do_remote_decode`                      what prefill answered, `do_remote_prefill`
chat completions    as the client wrote it                  `kv_transfer_params.prompt_token_ids`
completions         as the client wrote it                  the ids in the place of `prompt`
==================  ======================================  ==================================================
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"

#: Fields that ask for more than the one token that prefill is for, or do not go with it.
_NOT_FOR_PREFILL: Final = (
    "stream_options",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "best_of",
    "use_beam_search",
    "logprobs",
    "top_logprobs",
    "ignore_eos",
)
#: Parameters that the two steps set themselves. A client's own, such as max_load_tokens, are passed on.
_OURS: Final = ("do_remote_prefill", "do_remote_decode", "prompt_token_ids")
_OURS_BEGIN: Final = ("kvstore.", "remote_")


class BadRequest(ValueError):
    """The client's body cannot be passed on; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Handover:
    """What a prefill instance has answered.

    Attributes:
        prompts: Token ids of each prompt of the request; empty where the instance has not told them.
        params: Its `kv_transfer_params`, without the ids; empty where they are of one prompt of several.
    """

    prompts: tuple[list[int], ...]
    params: Mapping[str, Any]


def parse_body(raw: bytes) -> dict[str, Any]:
    """The client's body.

    Raises:
        BadRequest: it is not a JSON object.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    params = body.get("kv_transfer_params")
    if params is not None and not isinstance(params, dict):
        raise BadRequest("kv_transfer_params is not a JSON object")
    return body


def gains_by_prefill(path: str, body: Mapping[str, Any]) -> bool:
    """Whether a decode instance could load what a prefill instance computes.

    It computes the prompt itself where its own log-probabilities are asked for, and where the prompt is not tokens.
    """
    if body.get("prompt_logprobs") is not None or body.get("prompt_embeds") is not None:
        return False
    if body.get("echo"):
        return False
    return path == CHAT or bool(body.get("prompt"))


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The first step: compute the prompt, keep its blocks, tell its ids."""
    step = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    params = {**_clients_params(body), "do_remote_decode": True}
    return {**step, "stream": False, "max_tokens": 1, "return_token_ids": True, "kv_transfer_params": params}


def read_handover(path: str, answer: Any) -> Handover:
    """Reads the answer to the first step. What is not as vLLM writes it is left out, not refused."""
    if not isinstance(answer, dict):
        return Handover((), {})
    found = answer.get("kv_transfer_params")
    params: dict[str, Any] = dict(found) if isinstance(found, dict) else {}
    told = params.pop("prompt_token_ids", None)
    if path == CHAT:
        prompts = [answer.get("prompt_token_ids") or told]
    else:
        choices = answer.get("choices")
        choices = choices if isinstance(choices, list) and choices else [None]
        prompts = [choice.get("prompt_token_ids") if isinstance(choice, dict) else None for choice in choices]
    if len(prompts) > 1:
        params = {}
    if not all(isinstance(ids, list) and ids and all(type(token) is int for token in ids) for ids in prompts):
        return Handover((), params)
    return Handover(tuple(prompts), params)


def decode_body(path: str, body: Mapping[str, Any], handover: Handover | None) -> dict[str, Any]:
    """The second step: what the client asked for, with what the first one has found out.

    Args:
        handover: None where there was no first step, or it failed.
    """
    params = _clients_params(body)
    step = dict(body)
    if handover is not None:
        params = {**params, **handover.params, "do_remote_prefill": True}
        params.pop("do_remote_decode", None)
        if handover.prompts and path == CHAT:
            params["prompt_token_ids"] = handover.prompts[0]
        elif handover.prompts:
            step["prompt"] = handover.prompts[0] if len(handover.prompts) == 1 else list(handover.prompts)
    step.pop("kv_transfer_params", None)
    return {**step, "kv_transfer_params": params} if params else step


def _clients_params(body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in (body.get("kv_transfer_params") or {}).items()
        if name not in _OURS and not name.startswith(_OURS_BEGIN)
    }
