"""A request that goes well, through both steps, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.router.conftest import Start, chat_body


async def test_chat_reuses_the_token_ids(routed: Start) -> None:
    run = await routed()
    (prefill,), (decode,) = run.prefills, run.decodes
    asked = chat_body("a question", max_tokens=7, min_tokens=3, n=2, temperature=0, stop=["x"], tools=[{"type": "f"}])
    status, answer = await run.ask("/v1/chat/completions", asked)
    assert status == 200
    assert (prefill.tokenized, decode.tokenized) == (1, 0)

    (first,), (second,) = prefill.requests, decode.requests
    assert first["max_tokens"] == 1 and first["return_token_ids"] and first["stream"] is False
    assert first["kv_transfer_params"] == {"do_remote_decode": True}
    assert not {"min_tokens", "n", "max_completion_tokens", "stream_options"} & first.keys()
    assert first["tools"] == asked["tools"]  # they are part of the prompt
    ids = second["kv_transfer_params"].pop("prompt_token_ids")
    assert bytes(ids).decode() == json.dumps(asked["messages"])
    assert second.pop("kv_transfer_params") == {"do_remote_prefill": True, "kvstore.tokens": len(ids)}
    assert second == asked

    plain = await (await run.http.post(f"{decode.url}/v1/chat/completions", json=asked)).json()
    assert answer == plain
    assert await run.figure('kvstore_router_prefills_total{outcome="ok"}') == 1
    assert await run.figure('kvstore_router_requests_total{path="/v1/chat/completions",status="200"}') == 1


async def test_a_stream_is_passed_on_as_it_is(routed: Start) -> None:
    run = await routed()
    (decode,) = run.decodes
    asked = chat_body("a question", stream=True, stream_options={"include_usage": True})
    async with run.http.post(run.url("/v1/chat/completions"), json=asked) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        streamed = await answer.read()
    assert decode.tokenized == 0
    plain = await (await run.http.post(f"{decode.url}/v1/chat/completions", json=asked)).read()
    assert streamed == plain
    assert streamed.endswith(b"data: [DONE]\n\n")


async def test_a_stream_is_passed_on_at_once(routed: Start) -> None:
    """The first chunk arrives while the instance has not made the second."""
    run = await routed()
    (decode,) = run.decodes
    decode.gate.clear()
    async with run.http.post(run.url("/v1/completions"), json={"prompt": "x", "stream": True}) as answer:
        await answer.content.readuntil(b"\n\n")
        decode.gate.set()
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("prompt", "handed"),
    [
        ("abc", [97, 98, 99]),
        ([97, 98], [97, 98]),
        (["ab", "c"], [[97, 98], [99]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_completions_get_ids_for_their_prompt(routed: Start, prompt: Any, handed: Any) -> None:
    run = await routed()
    (decode,) = run.decodes
    status, answer = await run.ask("/v1/completions", {"prompt": prompt, "max_tokens": 5})
    assert status == 200 and len(answer["choices"]) == (len(prompt) if isinstance(handed[0], list) else 1)
    (second,) = decode.requests
    assert second["prompt"] == handed and decode.tokenized == 0
    # What prefill says of the first of several prompts must not be taken for all of them.
    single = not isinstance(handed[0], list)
    assert second["kv_transfer_params"] == {
        "do_remote_prefill": True,
        **({"kvstore.tokens": len(handed)} if single else {}),
    }


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 1}, {"echo": True}, {"prompt": None, "prompt_embeds": "AAAA"}, {"prompt": ""}]
)
async def test_what_cannot_gain_skips_prefill(routed: Start, fields: dict[str, Any]) -> None:
    run = await routed()
    asked = {"prompt": "abc", **fields}
    await run.ask("/v1/completions", {key: value for key, value in asked.items() if value is not None} | {"n": 1})
    assert not run.prefills[0].requests
    assert len(run.decodes[0].requests) == 1 and "kv_transfer_params" not in run.decodes[0].requests[0]
    assert await run.figure('kvstore_router_prefills_total{outcome="skipped"}') == 1


async def test_a_clients_own_parameters_go_along_and_ours_are_not_his(routed: Start) -> None:
    run = await routed()
    theirs = {
        "max_load_tokens": 64,
        "do_remote_prefill": True,
        "prompt_token_ids": [1],
        "kvstore.tokens": 10**9,
        "remote_engine_id": "x",
    }
    await run.chat(kv_transfer_params=theirs)
    assert run.prefills[0].requests[0]["kv_transfer_params"] == {"max_load_tokens": 64, "do_remote_decode": True}
    second = run.decodes[0].requests[0]["kv_transfer_params"]
    assert second["max_load_tokens"] == 64 and second["kvstore.tokens"] == len(second["prompt_token_ids"]) > 1
    assert "remote_engine_id" not in second


async def test_headers_go_to_both_and_come_back(routed: Start) -> None:
    run = await routed()
    headers = {
        "Authorization": "Bearer secret",
        "traceparent": "00-1-2-01",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
    }
    async with run.http.post(run.url("/v1/chat/completions"), json=chat_body(), headers=headers) as answer:
        assert answer.headers["X-Instance"] == run.decodes[0].name
    first, second = run.prefills[0].headers[0], run.decodes[0].headers[0]
    for sent in (first, second):
        assert sent["Authorization"] == "Bearer secret" and sent["traceparent"] == "00-1-2-01"
        assert "X-Hop" not in sent
    assert first["X-Request-Id"] == second["X-Request-Id"]  # made here where the client has none
    await run.ask("/v1/chat/completions", chat_body(), headers={"X-Request-Id": "mine"})
    assert run.decodes[0].headers[1]["X-Request-Id"] == "mine"


async def test_models_and_health(routed: Start) -> None:
    run = await routed(1, 2)
    status, text = await run.get("/v1/models", headers={"Authorization": "Bearer secret"})
    assert status == 200 and "instance" in text
    asked = next(decode for decode in run.decodes if decode.headers)
    assert asked.headers[0]["Authorization"] == "Bearer secret"
    asked.status = 500
    assert (await run.get("/v1/models"))[0] == 200  # the other one
    status, text = await run.get("/health")
    assert status == 200 and json.loads(text)["status"] == "ok"
    assert await run.figure(f'kvstore_router_instance_up{{role="decode",url="{run.decodes[0].url}"}}') == 1


async def test_requests_spread_over_what_has_least_to_do(routed: Start) -> None:
    run = await routed(2, 2)
    for number in range(4):
        await run.chat(str(number))
    assert [len(each.requests) for each in run.prefills + run.decodes] == [2, 2, 2, 2]
    # One instance is busy with a request: the next ones go to the other.
    first, other = run.decodes
    for each in run.decodes:
        each.gate.clear()
        each.arrived.clear()
    running = asyncio.create_task(run.chat())
    await run.until(lambda: first.arrived.is_set() or other.arrived.is_set())
    busy, free = (first, other) if first.arrived.is_set() else (other, first)
    free.gate.set()
    for _ in range(3):
        await run.chat()
    assert len(free.requests) == 5 and len(busy.requests) == 3
    busy.gate.set()
    assert (await running)[0] == 200
