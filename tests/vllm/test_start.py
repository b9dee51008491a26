"""How engines and daemons find each other: no daemon at the start, autostart, the share, and vLLM's usual processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.vllm.harness import BLOCK_BYTES, BLOCK_TOKENS, BLOCKS, Daemon, Engine, prompt, stats_at, wait_until


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
        daemon.wait_attached()
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


def test_autostart_with_vllms_usual_processes(
    tmp_path: Path, engines: Callable[..., Engine], answers: Callable[[list[int]], list[int]]
) -> None:
    """Nothing but what a user writes: the default endpoint, no daemon, scheduler and worker in their own processes."""
    endpoint = f"unix:{tmp_path}/kvstore/kvstore.sock"
    extra = {"kvstore.autostart": True, "cpu_bytes_to_use": 300_000_000}
    pid = None
    try:
        engine = engines(
            "usual", extra, processes=True, environment={"XDG_RUNTIME_DIR": str(tmp_path), "KVSTORE_ENDPOINT": ""}
        ).ready()
        stats = stats_at(endpoint)
        pid = stats["pid"]
        assert stats["tiers"][0]["capacity_bytes"] == 300_000_000
        assert stats["block_size"] == BLOCK_TOKENS
        assert os.getsid(pid) == pid  # it outlives the engine
        assert engine.generate(prompt(34))[0]["tokens"] == answers(prompt(34))
        wait_until("the prompt is stored", lambda: stats_at(endpoint)["tiers"][0]["blocks"] >= BLOCKS)
        engine.forget_local()
        hits = engine.external_hits()
        assert engine.generate(prompt(34))[0]["tokens"] == answers(prompt(34))
        assert engine.external_hits() - hits == BLOCKS * BLOCK_TOKENS
        engine.stop()
        wait_until("the engine's sessions have ended", lambda: len(stats_at(endpoint)["sessions"]) <= 1, 20)
        assert stats_at(endpoint)["pid"] == pid
    finally:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
