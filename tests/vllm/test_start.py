"""How engines and daemons find each other: no daemon at the start, autostart, the share, and vLLM's usual processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.vllm.harness import BLOCK_BYTES, BLOCK_TOKENS, BLOCKS, Daemon, Engine, connector, prompt, wait_until


def test_engine_starts_without_a_daemon_and_keeps_to_its_share(
    folder: Path, engines: Callable[..., Engine], answers: Callable[[list[int]], list[int]]
) -> None:
    daemon = Daemon(folder)
    share = 15 * BLOCK_BYTES
    engine = engines("alone", {"kvstore.endpoint": daemon.endpoint, "cpu_bytes_to_use": share}).ready()
    assert engine.generate(prompt(30))[0]["tokens"] == answers(prompt(30))
    assert engine.metric("vllm:kvstore_attached") == 0
    assert engine.metrics()["vllm:kvstore_miss_blocks{reason=unavailable}"] > 0

    daemon.start()
    try:
        engine.wait_storing(daemon)
        for seed in (31, 32, 33):
            engine.generate(prompt(seed))
        wait_until("nothing is under way", lambda: daemon.stats()["reserved_slots"] == 0)
        stats = daemon.stats()
        assert 0 < stats["tiers"][0]["blocks"] * BLOCK_BYTES <= share
        assert all(s["share_bytes"] == share for s in stats["sessions"] if s["name"].startswith("vllm"))
        assert engine.metrics()["vllm:kvstore_store_skipped_blocks{reason=no_slots}"] > 0
        assert engine.metric("vllm:kvstore_hook_errors") == 0
    finally:
        engine.stop()
        daemon.stop()


def test_a_misspelt_key_is_refused_at_start(folder: Path, engines: Callable[..., Engine]) -> None:
    engine = engines("misspelt", {"blocks_per_chunks": 2})
    assert engine.process.wait(120) != 0
    assert "unknown key 'blocks_per_chunks'; did you mean 'blocks_per_chunk'?" in engine.log.read_text()


def test_autostart_with_vllms_usual_processes(
    tmp_path: Path, engines: Callable[..., Engine], answers: Callable[[list[int]], list[int]]
) -> None:
    """Nothing but what a user writes: the default endpoint, no daemon, scheduler and worker in their own processes."""
    daemon = Daemon(tmp_path / "kvstore")  # where the default endpoint is; the engine starts it
    environment = {"XDG_RUNTIME_DIR": str(tmp_path), "KVSTORE_ENDPOINT": ""}
    extra = {"kvstore.autostart": True, "cpu_bytes_to_use": 300_000_000}
    pid = None
    try:
        engine = engines("usual", extra, processes=True, environment=environment).ready()
        stats = daemon.stats()
        pid = stats["pid"]
        assert stats["tiers"][0]["capacity_bytes"] == 300_000_000
        assert stats["block_size"] == BLOCK_TOKENS
        assert os.getsid(pid) == pid  # it outlives the engine
        # Stores that find the pool without memory so far are skipped, and not offered again.
        wait_until("the pool is populated", lambda: daemon.stats()["tiers"][0]["state"] == "ok", 60)
        engine.wait_storing(daemon)
        before = daemon.stored_blocks()
        assert engine.generate(prompt(34))[0]["tokens"] == answers(prompt(34))
        daemon.wait_stored(before + BLOCKS)
        engine.forget_local()
        hits = engine.external_hits()
        assert engine.generate(prompt(34))[0]["tokens"] == answers(prompt(34))
        assert engine.external_hits() - hits == BLOCKS * BLOCK_TOKENS

        # This prompt's first token is its last, and no request follows: the engine ends its stores by itself.
        before = daemon.stored_blocks()
        engine.generate(prompt(35), max_tokens=1)
        daemon.wait_stored(before + BLOCKS)

        engine.stop()
        wait_until(
            "the engine's sessions have ended",
            lambda: not any(s["name"].startswith("vllm") for s in daemon.stats()["sessions"]),
        )
        assert daemon.stats()["pid"] == pid
    finally:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_two_ranks_and_blocks_larger_than_the_engines(tmp_path: Path, engines: Callable[..., Engine]) -> None:
    """Each rank copies its own part; a stored block holds two of the engine's."""
    daemon = Daemon(tmp_path)
    daemon.start()
    try:
        engine = engines(
            "ranks",
            {"kvstore.endpoint": daemon.endpoint, "block_size": 2 * BLOCK_TOKENS},
            processes=True,
            environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
        ).ready()
        engine.wait_storing(daemon)
        before = daemon.stored_blocks()
        computed = engine.generate(prompt(41))[0]
        daemon.wait_stored(before + BLOCKS // 2)
        stats = daemon.stats()
        assert stats["namespaces"][0]["identity"]["parallel"].startswith("tp=2,")
        assert stats["namespaces"][0]["groups"][0]["block_bytes"] == 2 * BLOCK_BYTES
        engine.forget_local()
        loaded = engine.generate(prompt(41))[0]
        assert loaded["cached"] == BLOCKS * BLOCK_TOKENS
        assert loaded["tokens"] == computed["tokens"]
        assert engine.metric("vllm:kvstore_hook_errors") == 0
    finally:
        engine.stop()
        daemon.stop()


def test_as_a_bare_spec_of_vllms_own_connector(
    folder: Path, engines: Callable[..., Engine], answers: Callable[[list[int]], list[int]]
) -> None:
    """`spec_name` alone: also then a load that fails is computed, where vLLM's connector would end the engine."""
    daemon = Daemon(folder)
    daemon.start()
    bare = connector(
        {
            "spec_name": "KVStoreSpec",
            "spec_module_path": "engine_plugin.vllm.spec",
            "kvstore.endpoint": daemon.endpoint,
        }
    )
    engine = engines("bare", None, kv_transfer_config={**bare, "kv_connector": "OffloadingConnector"}).ready()
    try:
        engine.wait_storing(daemon)
        before = daemon.stored_blocks()
        assert engine.generate(prompt(36))[0]["tokens"] == answers(prompt(36))
        daemon.wait_stored(before + BLOCKS)
        engine.forget_local()
        loaded = engine.generate(prompt(36))[0]
        assert (loaded["tokens"], loaded["cached"]) == (answers(prompt(36)), BLOCKS * BLOCK_TOKENS)
        engine.forget_local()
        engine.ask(do="damage_loads", count=1)
        assert engine.generate(prompt(36))[0]["tokens"] == answers(prompt(36))
        assert engine.metric("vllm:kvstore_load_failures") == 1
        assert engine.metric("vllm:kvstore_hook_errors") == 0
    finally:
        engine.stop()
        daemon.stop()
