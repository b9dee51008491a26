"""Disaggregated prefill over HTTP: two of vLLM's servers that are tuned differently, with the router in front.

The decode server has another chat template than the prefill server. So an answer that belongs to the right prompt shows
that it has not rendered or tokenized anything.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.harness import BLOCK_TOKENS, OUTPUT_TOKENS, TOKENS, Daemon, prompt, wait_until
from tests.vllm.servers import OTHER_TEMPLATE, TEMPLATE, HTTPServer, router, vllm_server

Answers = Callable[[list[int]], list[int]]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PD_WAIT_S = 60.0
ASKED = {
    "model": "tiny",
    "max_tokens": OUTPUT_TOKENS,
    "min_tokens": OUTPUT_TOKENS,
    "ignore_eos": True,
    "temperature": 0,
    "return_token_ids": True,
}


@dataclasses.dataclass
class Fleet:
    prefill: HTTPServer
    decode: HTTPServer
    router: HTTPServer

    def hits(self) -> float:
        return self.decode.metric("vllm:external_prefix_cache_hits_total")

    def outcomes(self, server: HTTPServer) -> dict[str, float]:
        return {
            key.partition('outcome="')[2].rstrip('"}'): value
            for key, value in server.metrics().items()
            if key.startswith("vllm:kvstore_pd_requests_total")
        }


@pytest.fixture(scope="module")
def fleet(model: Path, folder: Path, daemon: Daemon) -> Iterator[Fleet]:
    # Always: whether a load is faster than computing is not the question here, and depends on the machine.
    extra = {"kvstore.endpoint": daemon.endpoint, "kvstore.pd_wait_s": PD_WAIT_S, "kvstore.load_policy": "always"}
    made: list[HTTPServer] = []
    try:
        tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
        tuned = ("--max-num-batched-tokens", "512", *tools)
        made += [
            vllm_server(model, folder, "prefill", extra, *tuned, role="kv_producer"),
            vllm_server(model, folder, "decode", extra, *tools, role="kv_consumer", template=OTHER_TEMPLATE),
        ]
        made.append(router(folder, made[:1], made[1:], "--health-interval", "0.2", "--decode-timeout", "120"))
        prefill, decode, front = (each.ready() for each in made)
        # The first requests of an engine pay for its warm-up, and show that it stores.
        completion(decode, prompt(1000))
        seeds = iter(range(2000, 3000))

        def stores() -> bool:
            completion(prefill, prompt(next(seeds), 2 * BLOCK_TOKENS + 1))
            return daemon.stored_blocks() > 0

        wait_until("prefill stores", stores, 60)
        yield Fleet(prefill, decode, front)
    finally:
        for server in reversed(made):
            server.stop()


def completion(server: HTTPServer, ids: list[int], **fields: Any) -> dict[str, Any]:
    status, answer = server.post(COMPLETIONS, {**ASKED, "prompt": ids, **fields})
    assert status == 200, answer
    return dict(answer)


def spends(server: HTTPServer, *, during_s: float, after_s: float) -> float:
    """Processor time of a server's processes."""
    time.sleep(after_s)
    before = server.cpu_seconds()
    time.sleep(during_s)
    return server.cpu_seconds() - before


def conversation(seed: int) -> list[dict[str, str]]:
    words = " ".join(f"w{token}" for token in prompt(seed, 120))
    return [{"role": "system", "content": "answer in few words"}, {"role": "user", "content": words}]


def rendered(model: Path, messages: list[dict[str, str]]) -> list[int]:
    """The prompt's tokens, by nobody's word but the tokenizer's."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids: list[int] = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, return_dict=False)
    return ids


def test_chat_completions(fleet: Fleet, model: Path, answers: Answers) -> None:
    messages = conversation(1)
    ids = rendered(model, messages)
    blocks = len(ids) // BLOCK_TOKENS
    assert blocks >= 4
    hits = fleet.hits()
    status, answer = fleet.router.post(CHAT, {**ASKED, "messages": messages})
    assert status == 200, answer
    assert answer["prompt_token_ids"] == ids
    assert answer["choices"][0]["token_ids"] == answers(ids)
    assert fleet.hits() - hits == blocks * BLOCK_TOKENS
    assert fleet.outcomes(fleet.prefill) == {"handed_over": 1}
    assert fleet.outcomes(fleet.decode) == {"complete": 1}
    # The decode server itself would have asked its model something else.
    status, alone = fleet.decode.post(CHAT, {**ASKED, "messages": messages})
    assert status == 200 and alone["prompt_token_ids"] != ids


def test_chat_completions_streamed(fleet: Fleet, model: Path, answers: Answers) -> None:
    messages = conversation(2)
    ids = rendered(model, messages)
    hits = fleet.hits()
    events = list(fleet.router.stream(CHAT, {**ASKED, "messages": messages}))
    chunks = [chunk for _, chunk in events]
    assert next(chunk["prompt_token_ids"] for chunk in chunks if chunk.get("prompt_token_ids")) == ids
    streamed = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or []]
    assert streamed == answers(ids)
    assert fleet.hits() - hits == len(ids) // BLOCK_TOKENS * BLOCK_TOKENS
    # The same text as without a stream, now from the decode server's own prefix cache.
    status, whole = fleet.router.post(CHAT, {**ASKED, "messages": messages})
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert status == 200 and text == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_completions(fleet: Fleet, answers: Answers, stream: bool) -> None:
    ids = prompt(10 + stream)
    hits = fleet.hits()
    if stream:
        chunks = [chunk for _, chunk in fleet.router.stream(COMPLETIONS, {**ASKED, "prompt": ids})]
        tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"] or []]
    else:
        tokens = completion(fleet.router, ids)["choices"][0]["token_ids"]
    assert tokens == answers(ids)
    assert fleet.hits() - hits == TOKENS // BLOCK_TOKENS * BLOCK_TOKENS


def test_tools_and_structured_output_go_both_ways(fleet: Fleet) -> None:
    """What is asked of the whole answer must not trip over the one token that prefill makes."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    for more in (
        {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [tool], "tool_choice": "required"},
        {"tools": [tool], "tool_choice": "auto"},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True, "top_logprobs": 2, "n": 2, "temperature": 1, "seed": 5},
    ):
        asked = {"model": "tiny", "temperature": 0, "max_tokens": 4, "messages": conversation(4), **more}
        status, answer = fleet.router.post(CHAT, asked)
        assert status == 200, (more, answer)
    status, page = fleet.router.get("/metrics")
    assert 'outcome="failed"' not in page and 'outcome="refused"' not in page


def test_a_decode_request_that_is_early_waits(fleet: Fleet, answers: Answers) -> None:
    ids = prompt(20)
    answers(ids), answers(prompt(21))  # the engine without a cache takes its time, which is not to pass below
    hits, complete = fleet.hits(), fleet.outcomes(fleet.decode).get("complete", 0)
    lookups = fleet.decode.metric("vllm:kv_offload_lookup_sync_delay_seconds_count")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        began = time.monotonic()
        early = pool.submit(completion, fleet.decode, ids, kv_transfer_params={"do_remote_prefill": True})
        wait_until("it waits", lambda: fleet.decode.metric("vllm:num_requests_waiting") == 1)
        # Others are served meanwhile.
        other = completion(fleet.decode, prompt(21))
        assert other["choices"][0]["token_ids"] == answers(prompt(21))
        assert not early.done()
        spent = time.monotonic() - began
        asked = fleet.decode.metric("vllm:kv_offload_lookup_sync_delay_seconds_count") - lookups
        assert asked <= 5 + spent / 0.002, "the engine spins"
        # vLLM's workers spin for a second after each step, and would take the cores that prefill needs.
        seconds = spends(fleet.decode, during_s=4.0, after_s=2.0)
        assert seconds < 0.25 * 4.0, "an engine that waits takes a core"
        assert not early.done()

        completion(fleet.prefill, ids, max_tokens=1, min_tokens=1)
        answer = early.result(PD_WAIT_S)
    assert answer["choices"][0]["token_ids"] == answers(ids)
    assert fleet.hits() - hits == TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
    assert fleet.outcomes(fleet.decode)["complete"] == complete + 1


def test_parameters_that_cannot_be_right_cost_nothing_but_themselves(fleet: Fleet, answers: Answers) -> None:
    ids = prompt(30)
    expected = fleet.outcomes(fleet.decode)
    right = {"do_remote_prefill": True, "kvstore.tokens": 64, "kvstore.settled_tokens": 0}
    for params, outcome in (
        ({**right, "kvstore.tokens": 1 << 60}, "too_many_tokens"),
        ({**right, "kvstore.tokens": "64"}, "bad_params"),
        ({**right, "kvstore.tokens": [[]]}, "bad_params"),
        ({**right, "kvstore.settled_tokens": -1}, "bad_params"),
        ({**right, "do_remote_prefill": "true"}, "bad_params"),
        ({**right, "kvstore.namespace": "00" * 16}, "foreign_namespace"),
        ({**right, "kvstore.namespace": {"a": ["b"] * 1000}}, "foreign_namespace"),
        ({"do_remote_decode": True}, "wrong_role"),
    ):
        answer = completion(fleet.decode, ids, kv_transfer_params=params)
        assert answer["choices"][0]["token_ids"] == answers(ids), params
        expected[outcome] = expected.get(outcome, 0) + 1
    wait_until(f"all are counted: {expected}", lambda: fleet.outcomes(fleet.decode) == expected)
    # What vLLM itself refuses, and what is no object at all.
    for body in (
        {"kv_transfer_params": "text"},
        {"kv_transfer_params": [1]},
        {"vllm_xargs": {"kv_transfer_params": "text"}},
        {"vllm_xargs": {"kv_transfer_params": [1]}},
    ):
        status, _ = fleet.decode.post(COMPLETIONS, {**ASKED, "prompt": ids, **body})
        assert status >= 200
    for told in ([-1], "1 2", [10**9], [], [1.5]):
        params = {"do_remote_prefill": True, "prompt_token_ids": told}
        status, _ = fleet.decode.post(CHAT, {**ASKED, "messages": conversation(5), "kv_transfer_params": params})
        assert status == 400, told
    assert completion(fleet.decode, prompt(31))["choices"][0]["token_ids"] == answers(prompt(31))
    for server in (fleet.prefill, fleet.decode):
        assert server.metric("vllm:kvstore_hook_errors_total") == 0


def test_prefill_that_dies_costs_time_only(fleet: Fleet, answers: Answers) -> None:
    """Last in this module: it has no prefill server afterwards."""
    fleet.prefill.kill()
    for seed in (40, 41):
        ids = prompt(seed)
        assert completion(fleet.router, ids)["choices"][0]["token_ids"] == answers(ids)
    status, page = fleet.router.get("/health")
    assert status == 200 and json.loads(page)["status"] == "degraded"
