"""KVStoreTier below vLLM's own CPU tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.vllm.harness import BLOCK_BYTES, BLOCK_TOKENS, BLOCKS, Daemon, Engine, prompt, wait_until


def transfer_of(daemon: Daemon) -> dict[str, Any]:
    tier = {"type": "KVStoreTier", "module_path": "engine_plugin.vllm.tier", "kvstore.endpoint": daemon.endpoint}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "cpu_tiering",
            "block_size": BLOCK_TOKENS,
            "cpu_bytes_to_use": 20 * BLOCK_BYTES,  # vLLM's own tier: not much more than one prompt
            "secondary_tiers": [{**tier, "kvstore.timeout_s": 10}],
        },
    }


def test_blocks_outlive_the_engine_and_faults_are_misses(
    folder: Path, engines: Callable[..., Engine], answers: Callable[[list[int]], list[int]]
) -> None:
    daemon = Daemon(folder)
    daemon.start()
    transfer = transfer_of(daemon)
    engine = engines("tier-first", None, kv_transfer_config=transfer).ready()
    try:
        wait_until("the tier has attached", lambda: daemon.sessions_of("vllm tier"))
        assert engine.generate(prompt(71))[0]["tokens"] == answers(prompt(71))
        engine.generate(prompt(72))  # pushes the first one out of vLLM's own tier
        daemon.wait_stored(2 * BLOCKS)
        engine.stop()

        engine = engines("tier-second", None, kv_transfer_config=transfer).ready()
        wait_until("the tier has attached", lambda: daemon.sessions_of("vllm tier"))
        wait_until(
            "the engine has seen it", lambda: engine.generate(prompt(73, 10)) and engine.metric("vllm:kvstore_attached")
        )
        for seed in (71, 72):
            loaded = engine.generate(prompt(seed))[0]
            assert (loaded["tokens"], loaded["cached"]) == (answers(prompt(seed)), BLOCKS * BLOCK_TOKENS)
        wait_until("the pins are given back", lambda: daemon.stats()["pins"] == 0)

        daemon.kill()
        engine.forget_local()
        assert engine.generate(prompt(71))[0]["tokens"] == answers(prompt(71))
        assert engine.generate(prompt(74))[0]["tokens"] == answers(prompt(74))
        assert engine.metric("vllm:kvstore_hook_errors") == 0
    finally:
        engine.stop()
        daemon.stop()


def test_two_ranks(tmp_path: Path, engines: Callable[..., Engine]) -> None:
    """A row holds what all ranks have."""
    daemon = Daemon(tmp_path)
    daemon.start()
    options: dict[str, Any] = {
        "kv_transfer_config": transfer_of(daemon),
        "processes": True,
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
    }
    engine = engines("tier-ranks", None, **options).ready()
    try:
        wait_until("the tier has attached", lambda: daemon.sessions_of("vllm tier"))
        computed = engine.generate(prompt(75))[0]
        engine.generate(prompt(76))  # pushes the first one out of vLLM's own tier
        daemon.wait_stored(2 * BLOCKS)
        (namespace,) = daemon.stats()["namespaces"]
        assert namespace["groups"][0]["block_bytes"] >= BLOCK_BYTES
        assert "tp=2" in namespace["identity"]["parallel"]
        engine.forget_local()
        loaded = engine.generate(prompt(75))[0]
        assert (loaded["tokens"], loaded["cached"]) == (computed["tokens"], BLOCKS * BLOCK_TOKENS)
        assert engine.metric("vllm:kvstore_hook_errors") == 0
        wait_until("the pins are given back", lambda: daemon.stats()["pins"] == 0)
    finally:
        engine.stop()
        daemon.stop()
