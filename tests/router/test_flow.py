"""What prefill answers, right and wrong, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.router.flow import CHAT, COMPLETIONS, Handover, decode_body, prefill_body, read_handover
from kvstore.router.settings import router_settings


@pytest.mark.parametrize(
    ("path", "answer", "expected"),
    [
        (CHAT, {"prompt_token_ids": [1, 2], "kv_transfer_params": {"a": 1}}, Handover(([1, 2],), {"a": 1})),
        # Ids that only the connector tells.
        (CHAT, {"kv_transfer_params": {"a": 1, "prompt_token_ids": [3]}}, Handover(([3],), {"a": 1})),
        (CHAT, {"prompt_token_ids": [1, 2], "kv_transfer_params": None}, Handover(([1, 2],), {})),
        (CHAT, {}, Handover((), {})),
        (CHAT, [], Handover((), {})),
        (CHAT, {"prompt_token_ids": "1 2", "kv_transfer_params": "x"}, Handover((), {})),
        (CHAT, {"prompt_token_ids": [1, True]}, Handover((), {})),
        (CHAT, {"prompt_token_ids": [1, 2.5]}, Handover((), {})),
        (COMPLETIONS, {"choices": [{"prompt_token_ids": [1]}]}, Handover(([1],), {})),
        (COMPLETIONS, {"choices": [{"prompt_token_ids": [1]}, {}]}, Handover((), {})),
        (COMPLETIONS, {"choices": "x"}, Handover((), {})),
        (COMPLETIONS, {"choices": None, "kv_transfer_params": {"a": 1}}, Handover((), {"a": 1})),
    ],
)
def test_handover(path: str, answer: Any, expected: Handover) -> None:
    assert read_handover(path, answer) == expected


def test_steps_leave_the_clients_body_alone() -> None:
    body = {"messages": [], "max_tokens": 9, "kv_transfer_params": {"max_load_tokens": 1}}
    kept = {**body, "kv_transfer_params": dict(body["kv_transfer_params"])}  # type: ignore[call-overload]
    prefill_body(body)
    decode_body(CHAT, body, Handover(([1],), {"kvstore.tokens": 64}))
    assert body == kept
    assert decode_body(CHAT, body, None) == body


@pytest.mark.parametrize(
    ("prefill", "decode", "listen", "part"),
    [
        (["localhost:8000"], ["http://d"], "h:1", "http://HOST:PORT"),
        (["http://p:99999"], ["http://d"], "h:1", "65535"),
        (["http://user:pw@p"], ["http://d"], "h:1", "more than an address"),
        (["http://p/v1"], ["http://d"], "h:1", "leave out /v1"),
        (["http://p"], ["http://d", "http://d/"], "h:1", "twice"),
        (["http://p"], ["http://d"], "unix:/run/x", "HOST:PORT"),
        (["http://p"], ["http://d"], "8000", "--listen"),
        ([], ["http://d"], "h:1", "--prefill"),
    ],
)
def test_settings_that_cannot_be(prefill: list[str], decode: list[str], listen: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        router_settings(prefill, decode, listen)


def test_addresses_are_normalized() -> None:
    settings = router_settings(["http://P:80/"], ["https://[::1]:8000", "http://d/base/"], "0.0.0.0:1")
    assert settings.prefill == ("http://p:80",)
    assert settings.decode == ("https://[::1]:8000", "http://d/base")
