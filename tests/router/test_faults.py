"""Instances that refuse, fail, hang and die, and clients that leave: what it costs, and that it costs no answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from kvstore.router.instances import MISSED_MAX
from tests.router.conftest import Routed, Start, chat_body
from tests.router.vllm_server import FakeVLLM, answer_of


def text_of(answer: Any) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def right_answer(text: str = "hello") -> str:
    return answer_of(list(json.dumps(chat_body(text)["messages"]).encode()))


def _answers(status: int) -> Callable[[FakeVLLM], None]:
    return lambda instance: setattr(instance, "status", status)


@pytest.mark.parametrize(
    ("break_it", "outcome"),
    [
        (_answers(500), "failed"),
        (_answers(503), "failed"),
        (_answers(400), "refused"),
        (_answers(401), "refused"),
        (lambda instance: setattr(instance, "garbage", True), "failed"),
        (lambda instance: setattr(instance, "die_before_body", True), "failed"),
        (lambda instance: instance.gate.clear(), "timeout"),
    ],
)
async def test_without_prefill_decode_computes(
    routed: Start, break_it: Callable[[FakeVLLM], None], outcome: str
) -> None:
    run = await routed(prefill_timeout_s=0.05 if outcome == "timeout" else 30)
    break_it(run.prefills[0])
    status, answer = await run.chat()
    assert status == 200 and text_of(answer) == right_answer()
    assert run.decodes[0].requests == [chat_body()] and run.decodes[0].tokenized == 1
    assert await run.figure(f'kvstore_router_prefills_total{{outcome="{outcome}"}}') == 1
    if outcome == "timeout":
        await run.until(lambda: run.prefills[0].cancelled == 1)


async def test_without_any_prefill_instance_decode_computes(routed: Start, refusing_url: str) -> None:
    run = await routed(0, 1, more_prefill=(refusing_url,))
    status, answer = await run.chat()
    assert status == 200 and text_of(answer) == right_answer()
    assert await run.figure('kvstore_router_prefills_total{outcome="none_up"}') == 1
    status, page = await run.get("/health")
    assert status == 200 and json.loads(page)["status"] == "degraded"


async def test_another_prefill_instance_is_tried(routed: Start) -> None:
    run = await routed(2, 1)
    for number in range(2):
        run.prefills[0].status = 500
        await run.chat(str(number))
    assert len(run.prefills[1].requests) == 2 and run.decodes[0].tokenized == 0
    assert await run.figure('kvstore_router_retries_total{role="prefill"}') >= 1


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429])
async def test_what_decode_answers_is_the_answer(routed: Start, status: int) -> None:
    run = await routed(1, 2)
    for decode in run.decodes:
        decode.status = status
    got, answer = await run.chat()
    assert got == status and str(status) in answer["error"]["message"]
    assert sum(len(decode.requests) for decode in run.decodes) == 1
    assert await run.figure('kvstore_router_retries_total{role="decode"}') == 0


@pytest.mark.parametrize("status", [500, 502, 503, 504])
async def test_a_server_error_is_tried_elsewhere(routed: Start, status: int) -> None:
    run = await routed(1, 2)
    run.decodes[0].status = status
    for number in range(2):
        got, answer = await run.chat(str(number))
        assert got == 200 and text_of(answer) == right_answer(str(number))
    assert await run.figure('kvstore_router_retries_total{role="decode"}') >= 1
    run.decodes[1].status = status
    got, answer = await run.chat()
    assert got == status and "says" in answer["error"]["message"]  # the instance's own words


async def test_retries_are_bounded(routed: Start) -> None:
    run = await routed(1, 4, retries=1)
    for decode in run.decodes:
        decode.status = 500
    assert (await run.chat())[0] == 500
    assert sum(len(decode.requests) for decode in run.decodes) == 2


async def test_an_instance_that_is_gone_gets_nothing_more(routed: Start) -> None:
    # Without looks in between it is the request that finds out.
    run = await routed(1, 2, health_interval_s=60)
    await run.decodes[0].stop()
    for number in range(3):
        status, answer = await run.chat(str(number))
        assert status == 200 and text_of(answer) == right_answer(str(number))
    assert await run.figure('kvstore_router_retries_total{role="decode"}') == 1
    await run.decodes[1].stop()
    status, answer = await run.chat()
    assert status == 502 and "pd-router" in answer["error"]["message"]
    status, _ = await run.chat()
    assert status == 503
    assert (await run.get("/health"))[0] == 503
    assert (await run.get("/v1/models"))[0] == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_death_before_the_first_byte_costs_a_retry(routed: Start, stream: bool) -> None:
    run = await routed(1, 2)
    run.decodes[0].die_before_body = True
    for number in range(2):
        body = chat_body(str(number), stream=stream)
        async with run.http.post(run.url("/v1/chat/completions"), json=body) as answer:
            assert answer.status == 200
            content = await answer.read()
        assert content.endswith(b"[DONE]\n\n") if stream else json.loads(content)
    assert len(run.decodes[0].requests) == 1 or len(run.decodes[1].requests) == 2
    assert await run.figure('kvstore_router_retries_total{role="decode"}') >= 1


async def test_death_in_the_middle_is_said_and_is_no_end(routed: Start) -> None:
    run = await routed(1, 2)
    for decode in run.decodes:
        decode.die_after = 2
    received = b""
    async with run.http.post(run.url("/v1/chat/completions"), json=chat_body(stream=True)) as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            while chunk := await answer.content.readany():
                received += chunk
    assert b"[DONE]" not in received
    events = [json.loads(line[6:]) for line in received.decode().splitlines() if line.startswith("data: ")]
    assert len(events) == 3 and events[-1]["error"]["code"] == 502
    assert sum(len(decode.requests) for decode in run.decodes) == 1
    assert await run.figure("kvstore_router_broken_answers_total") == 1


async def test_a_silent_decode_instance_is_left(routed: Start) -> None:
    run = await routed(1, 1, decode_timeout_s=0.1)
    run.decodes[0].gate.clear()
    assert (await run.chat())[0] == 502
    await run.until(lambda: run.decodes[0].cancelled == 1)


async def test_a_silent_decode_instance_is_left_for_another(routed: Start) -> None:
    run = await routed(1, 2, decode_timeout_s=2)  # the other one's time as well, on a busy machine
    run.decodes[0].gate.clear()
    status, answer = await run.chat()
    assert status == 200 and text_of(answer) == right_answer()
    assert len(run.decodes[0].requests) == len(run.decodes[1].requests) == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_takes_its_request_along(routed: Start, role: str, stream: bool) -> None:
    run = await routed()
    instance = (run.prefills if role == "prefill" else run.decodes)[0]
    instance.gate.clear()
    task = asyncio.create_task(_read(run, chat_body(stream=stream)))
    await run.until(instance.arrived.is_set)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await run.until(lambda: instance.cancelled == 1)
    await run.until(lambda: not sum(each.load for each in run.router.instances))
    assert await run.figure('kvstore_router_requests_total{path="/v1/chat/completions",status="gone"}') == 1
    assert await run.figure("kvstore_router_running") == 0
    assert role == "decode" or not run.decodes[0].requests


async def _read(run: Routed, body: Any) -> bytes:
    async with run.http.post(run.url("/v1/chat/completions"), json=body) as answer:
        return await answer.read()


async def test_requests_at_a_time_are_bounded(routed: Start) -> None:
    run = await routed(requests_max=2)
    run.decodes[0].gate.clear()
    running = [asyncio.create_task(run.chat(str(number))) for number in range(2)]
    await run.until(lambda: len(run.decodes[0].requests) == 2)
    async with run.http.post(run.url("/v1/chat/completions"), json=chat_body()) as answer:
        assert answer.status == 429 and answer.headers["Retry-After"]
        assert "limit" in (await answer.json())["error"]["message"]
    run.decodes[0].gate.set()
    assert [status for status, _ in await asyncio.gather(*running)] == [200, 200]
    assert (await run.chat())[0] == 200


async def test_draining_ends_what_runs_and_takes_nothing_new(routed: Start) -> None:
    run = await routed()
    run.decodes[0].gate.clear()
    running = asyncio.create_task(_read(run, chat_body(stream=True)))
    await run.until(run.decodes[0].arrived.is_set)
    run.router.drain()
    assert (await run.chat())[0] == 503
    status, page = await run.get("/health")
    assert status == 503 and json.loads(page)["status"] == "draining"
    run.decodes[0].gate.set()
    assert (await running).endswith(b"[DONE]\n\n")


async def test_an_instance_that_is_not_well_rests_until_it_is(routed: Start) -> None:
    run = await routed(1, 2)
    sick, well = run.decodes
    sick.healthy = False
    await run.until(lambda: not _up(run, sick))
    for number in range(3):
        assert (await run.chat(str(number)))[0] == 200
    assert not sick.requests and len(well.requests) == 3
    sick.healthy = True
    await run.until(lambda: _up(run, sick))
    await run.chat()
    assert len(sick.requests) == 1


async def test_only_several_late_looks_are_an_illness(routed: Start) -> None:
    run = await routed(health_timeout_s=0.1)
    (decode,) = run.decodes
    await run.until(lambda: _up(run, decode))
    decode.healthy = None
    await run.until(lambda: not _up(run, decode))
    assert next(each.missed for each in run.router.instances if each.url == decode.url) >= MISSED_MAX
    decode.healthy = True
    await run.until(lambda: _up(run, decode))


def _up(run: Routed, instance: FakeVLLM) -> bool:
    return next(each.up for each in run.router.instances if each.url == instance.url)


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b"{nonsense", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"kv_transfer_params": 5}', "kv_transfer_params"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
    ],
)
async def test_bodies_that_are_none(routed: Start, raw: bytes, part: str) -> None:
    run = await routed()
    async with run.http.post(run.url("/v1/chat/completions"), data=raw) as answer:
        assert answer.status == 400
        assert part in (await answer.json())["error"]["message"]
    assert not run.prefills[0].requests and not run.decodes[0].requests


async def test_a_body_that_is_too_large(routed: Start) -> None:
    run = await routed(body_bytes_max=1000)
    status, answer = await run.chat("x" * 2000)
    assert status == 413 and "--max-body" in answer["error"]["message"]
