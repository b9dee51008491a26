"""Engines of several ranks: tensor and pipeline parallelism, and who understands whom."""

from __future__ import annotations

import functools
import itertools
import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.vllm.harness import BLOCK_BYTES, BLOCK_TOKENS, BLOCKS, OUTPUT_TOKENS, Daemon, Engine, prompt, wait_until
from tests.vllm.servers import ANSWER_S, vllm_server

#: Ranks on cores of their own, in processes.
RANKS: dict[str, Any] = {
    "processes": True,
    "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    "distributed_executor_backend": "mp",
}
CANONICAL = {"canonical_layout": True}


def stores_and_loads(engine: Engine, daemon: Daemon, seed: int, blocks: int = BLOCKS) -> list[int]:
    """A prompt is computed and stored, and loaded again with the same answer. Returns that."""
    engine.wait_storing(daemon)
    before = daemon.stored_blocks()
    computed = engine.generate(prompt(seed))[0]
    daemon.wait_stored(before + blocks)
    engine.forget_local()
    loads(engine, seed, computed["tokens"])
    tokens: list[int] = computed["tokens"]
    assert len(tokens) == OUTPUT_TOKENS
    return tokens


def loads(engine: Engine, seed: int, tokens: list[int]) -> None:
    loaded = engine.generate(prompt(seed))[0]
    assert (loaded["tokens"], loaded["cached"]) == (tokens, BLOCKS * BLOCK_TOKENS)
    assert engine.metric("vllm:kvstore_load_failures") == engine.metric("vllm:kvstore_hook_errors") == 0


def test_what_two_ranks_stored_one_loads_and_the_other_way_round(
    daemon: Daemon, engines: Callable[..., Engine]
) -> None:
    extra = {"kvstore.endpoint": daemon.endpoint, **CANONICAL}
    two = engines("canonical-2", extra, tensor_parallel_size=2, **RANKS).ready()
    by_two = stores_and_loads(two, daemon, 81)

    one = engines("canonical-1", extra).ready()
    by_one = stores_and_loads(one, daemon, 82)
    loads(one, 81, by_two)
    loads(two, 82, by_one)
    stats = daemon.stats()
    assert [namespace["identity"]["parallel"] for namespace in stats["namespaces"]] == ["agnostic"]
    assert stats["namespaces"][0]["groups"][0]["block_bytes"] == BLOCK_BYTES
    two.stop()
    one.stop()


def test_pipeline_stages_of_different_sizes(daemon: Daemon, engines: Callable[..., Engine]) -> None:
    """Eight layers on two stages, five and three."""
    environment = {
        **RANKS["environment"],
        "VLLM_PP_LAYER_PARTITION": "5,3",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for the warm-up
    }
    extra = {"kvstore.endpoint": daemon.endpoint}
    options = {**RANKS, "environment": environment, "pipeline_parallel_size": 2, "warm_up": True}
    engine = engines("pipeline", extra, **options).ready()
    stores_and_loads(engine, daemon, 83)
    parallel = {namespace["identity"]["parallel"] for namespace in daemon.stats()["namespaces"]}
    assert any(shape.endswith("stages=5+3") for shape in parallel)
    engine.stop()


def test_latents_are_stored_once_for_all_ranks(
    daemon: Daemon, folder: Path, models: Callable[[str], Path], engines: Callable[..., Engine]
) -> None:
    """Multi-head latent attention: what two ranks hold alike is stored once, and one rank alone loads it."""
    # The CPU build has kernels for such layers for blocks of 16 tokens only.
    options: dict[str, Any] = {"of": models("latent"), "block_size": 16, "num_gpu_blocks_override": 640}
    extra = {"kvstore.endpoint": daemon.endpoint}
    two = engines("latent-2", extra, tensor_parallel_size=2, **options, **RANKS).ready()
    one = engines("latent-1", extra, **options).ready()
    by_two = stores_and_loads(two, daemon, 84)
    one.wait_storing(daemon)
    loads(one, 84, by_two)
    (namespace,) = [n for n in daemon.stats()["namespaces"] if n["identity"]["model"] == str(options["of"])]
    assert namespace["identity"]["parallel"] == "agnostic"
    # 4 layers with a latent of 512 and a key of 64 in four bytes each, whatever the number of ranks.
    assert namespace["groups"][0]["block_bytes"] == BLOCK_TOKENS * 4 * (512 + 64) * 4
    two.stop()
    one.stop()


def test_replicas_share_blocks(daemon: Daemon, model: Path, folder: Path) -> None:
    """Data parallelism: what one replica stored the other one loads."""
    extra = {"kvstore.endpoint": daemon.endpoint, "kvstore.load_policy": "always"}
    server = vllm_server(model, folder, "replicas", extra, "--data-parallel-size", "2")

    def answer(replica: int, tokens: list[int]) -> str:
        body = {"model": "tiny", "prompt": tokens, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
        request = server._request("/v1/completions", body)
        request.add_header("X-data-parallel-rank", str(replica))
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            text: str = json.load(reply)["choices"][0]["text"]
            return text

    seeds = itertools.count(8000)

    def stores(replica: int) -> bool:
        before = daemon.stored_blocks()
        answer(replica, prompt(next(seeds), 2 * BLOCK_TOKENS + 1))
        return daemon.stored_blocks() > before

    try:
        server.ready()
        for replica in (0, 1):
            wait_until(f"replica {replica} stores", functools.partial(stores, replica), 60)
        before = daemon.stored_blocks()
        computed = answer(0, prompt(85))
        daemon.wait_stored(before + BLOCKS)
        hits = server.metric("vllm:external_prefix_cache_hits_total")
        assert answer(1, prompt(85)) == computed
        wait_until(
            "the other replica has loaded it",
            lambda: server.metric("vllm:external_prefix_cache_hits_total") - hits == BLOCKS * BLOCK_TOKENS,
        )
        assert server.metric("vllm:kvstore_hook_errors_total") == 0
    finally:
        server.stop()
