"""KVStoreConnector beside other connectors, inside vLLM's MultiConnector."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.harness import BLOCK_TOKENS, BLOCKS, Daemon, Engine, connector, prompt, several, wait_until

Answers = Callable[[list[int]], list[int]]


def test_beside_example_connector(
    daemon: Daemon, folder: Path, engines: Callable[..., Engine], answers: Answers
) -> None:
    """ExampleConnector is asked first. It knows whole prompts only; what it does not know comes from kvstore."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "example")},
    }
    ours = connector({"kvstore.endpoint": daemon.endpoint})
    engine = engines("beside-example", None, kv_transfer_config=several(example, ours)).ready()
    engine.wait_storing(daemon)

    before = daemon.stored_blocks()
    computed = engine.generate(prompt(51))[0]
    daemon.wait_stored(before + BLOCKS)
    assert computed["tokens"] == answers(prompt(51))

    # Both have it: the first one loads, and what was pinned for it here is given back.
    engine.forget_local()
    hits = engine.metric("vllm:kvstore_hit_blocks")
    loaded = engine.generate(prompt(51))[0]
    assert (loaded["tokens"], loaded["cached"]) == (computed["tokens"], BLOCKS * BLOCK_TOKENS)
    assert engine.metric("vllm:kvstore_hit_blocks") - hits == BLOCKS
    assert engine.metric("vllm:kv_offload_load_bytes") == 0
    wait_until("the pins are given back", lambda: daemon.stats()["pins"] == 0)

    # A prompt that continues in another way is only here. The damaged load before is computed instead, though
    # MultiConnector's own policy is vLLM's default: to fail the request.
    for damaged in (1, 0):
        engine.forget_local()
        engine.ask(do="damage_loads", count=damaged)
        other = prompt(51)[: 7 * BLOCK_TOKENS] + prompt(52 + damaged, 100)
        answer = engine.generate(other)[0]
        assert answer["tokens"] == answers(other)
        if not damaged:
            assert answer["cached"] == 7 * BLOCK_TOKENS
            assert engine.metric("vllm:kv_offload_load_bytes") > 0
        else:
            assert engine.metric("vllm:kvstore_load_failures") == 1
            # That copy is not promised again until it is stored anew.
            assert engine.ask(do="reset", connector=True)["reset"]
            before = daemon.stored_blocks()
            engine.generate(prompt(51))
            daemon.wait_stored(before + 7)
    assert engine.metric("vllm:kvstore_hook_errors") == 0


NO_NIXL = "nixl is not installed: pip install 'kvstore[nixl]'"


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason=NO_NIXL)
def test_beside_nixl_connector_between_two_instances(
    daemon: Daemon, engines: Callable[..., Engine], answers: Answers
) -> None:
    """NIXL moves a prompt's blocks from prefill to decode, and kvstore keeps them for later."""

    def options(role: str) -> dict[str, Any]:
        nixl = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return {
            "kv_transfer_config": several(nixl, connector({"kvstore.endpoint": daemon.endpoint})),
            # The sending side goes on stepping until its blocks have been read.
            "processes": True,
            "environment": {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"},
        }

    prefill = engines("nixl-prefill", None, **options("kv_producer"))
    decode = engines("nixl-decode", None, **options("kv_consumer"))
    for engine in (prefill.ready(), decode.ready()):
        engine.wait_storing(daemon)

    # Kept out of kvstore on the prefill side, so that only NIXL can have brought it.
    before = daemon.stored_blocks()
    sent = {"do_remote_decode": True, "do_remote_prefill": False, "max_offload_tokens": 0}
    reply = prefill.generate(prompt(61), max_tokens=1, transfer=sent)[0]["transfer"]
    assert daemon.stored_blocks() == before
    received = decode.generate(prompt(61), transfer=reply)[0]
    assert received["tokens"] == answers(prompt(61))
    assert decode.metrics()["vllm:prompt_tokens_cached_by_source{source=p2p}"] >= BLOCKS * BLOCK_TOKENS

    # The decode side has stored what it received, and loads it from kvstore when nobody sends it.
    daemon.wait_stored(before + BLOCKS)
    decode.forget_local()
    loaded = decode.generate(prompt(61))[0]
    assert (loaded["tokens"], loaded["cached"]) == (received["tokens"], BLOCKS * BLOCK_TOKENS)
    assert decode.metrics()["vllm:prompt_tokens_cached_by_source{source=host}"] == BLOCKS * BLOCK_TOKENS
    for engine in (prefill, decode):
        assert engine.metric("vllm:kvstore_hook_errors") == 0
