"""Blocks that outlive both the daemon and the engine, on disk."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

from kvstore.admin import AdminClient
from tests.vllm.harness import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    BLOCKS,
    HERE,
    LONG_BLOCKS,
    LONG_TOKENS,
    Daemon,
    Engine,
    prompt,
    wait_until,
)

Answers = Callable[[list[int]], list[int]]


def test_decode_loads_from_disk_after_a_restart_of_everything(
    tmp_path: Path, engines: Callable[..., Engine], answers: Answers
) -> None:
    # The daemon brings up a quarter of its pool at a time: the long prompt comes in two pieces.
    daemon = Daemon(tmp_path, cpu_bytes=3 * LONG_BLOCKS * BLOCK_BYTES, disk_bytes=400_000_000)
    daemon.start()
    try:
        extra = {"kvstore.endpoint": daemon.endpoint, "kvstore.pending_deadline_s": 20}
        prefill = engines("disk-prefill", extra).ready()
        prefill.generate(prompt(50))
        prefill.wait_storing(daemon)
        before = daemon.stats()["tiers"][1]["blocks"]
        prefill.generate(prompt(51, LONG_TOKENS), max_tokens=1)
        prefill.generate(prompt(52), max_tokens=1)
        daemon.wait_on_disk(before + LONG_BLOCKS + BLOCKS)
        prefill.kill()
        daemon.kill(signal.SIGKILL)

        daemon.start()
        assert daemon.stored_blocks() == 0
        decode = engines("disk-decode", extra).ready()
        decode.generate(prompt(53, LONG_TOKENS))  # the first request of an engine pays for its warm-up
        decode.wait_storing(daemon)
        cold = decode.generate(prompt(54, LONG_TOKENS))[0]
        decode.forget_local()
        hits, from_disk = decode.external_hits(), daemon.stats()["hits"].get("disk", 0)
        loaded = decode.generate(prompt(51, LONG_TOKENS))[0]

        assert decode.external_hits() - hits == LONG_BLOCKS * BLOCK_TOKENS
        assert daemon.stats()["hits"]["disk"] - from_disk == LONG_BLOCKS
        assert loaded["tokens"] == answers(prompt(51, LONG_TOKENS))
        assert cold["cached"] == 0
        ratio = cold["ttft_s"] / loaded["ttft_s"]
        print(f"time to first token: cold {cold['ttft_s']:.3f} s, from disk {loaded['ttft_s']:.3f} s, {ratio:.1f}x")
        assert ratio >= 5

        # The daemon alone is restarted: what is on disk is found again without a restart of the engine.
        daemon.kill(signal.SIGTERM)
        daemon.start()
        wait_until("scheduler and worker are back", lambda: len(daemon.sessions_of("vllm")) == 2)
        decode.forget_local()
        loaded = decode.generate(prompt(52))[0]
        assert loaded["cached"] == BLOCKS * BLOCK_TOKENS
        assert loaded["tokens"] == answers(prompt(52))
        assert daemon.stats()["hits"]["disk"] >= BLOCKS
        assert decode.metric("vllm:kvstore_hook_errors") == 0
        wait_until("nothing is pinned", lambda: daemon.stats()["leases"] == 0)
    finally:
        daemon.stop()


def test_what_is_slower_to_read_than_to_compute_is_computed_from_the_first_attempt_on(
    tmp_path: Path, engines: Callable[..., Engine], answers: Answers
) -> None:
    # The 13 MB of a prompt take six seconds to read, and less to compute.
    slow = (str(HERE / "slow_disk.py"), "2e6")
    daemon = Daemon(tmp_path, cpu_bytes=20 * BLOCKS * BLOCK_BYTES, disk_bytes=400_000_000, program=slow)
    daemon.start()
    try:
        engine = engines("disk-slow", {"kvstore.endpoint": daemon.endpoint, "kvstore.load_policy": "auto"}).ready()
        for seed in (62, 60):  # the first one pays for the engine's warm-up
            engine.generate(prompt(seed), max_tokens=1)
        engine.wait_storing(daemon)
        before = daemon.stats()["tiers"][1]["blocks"]
        cold = engine.generate(prompt(61))[0]
        daemon.wait_on_disk(before + BLOCKS)
        wait_until("the disk was measured", lambda: "disk" in daemon.stats()["speeds"])
        with contextlib.closing(AdminClient(daemon.endpoint)) as admin:
            admin.evict(1 << 40)
        assert daemon.stored_blocks() == 0
        engine.forget_local()
        first = engine.generate(prompt(61))[0]
        print(f"time to first token: cold {cold['ttft_s']:.3f} s, first attempt {first['ttft_s']:.3f} s")
        assert first["cached"] == 0 and first["tokens"] == cold["tokens"] == answers(prompt(61))
        decisions = engine.metrics()
        assert decisions["vllm:kvstore_load_decisions{decision=compute_below}"] == 1
        assert not decisions.get("vllm:kvstore_load_decisions{decision=wait}")

        # The same directory on a disk that is fast: the first attempt waits for it.
        daemon.kill(signal.SIGTERM)
        daemon.program = ("-m", "kvstore")
        daemon.start()
        wait_until("the disk was measured", lambda: "disk" in daemon.stats()["speeds"])
        wait_until("scheduler and worker are back", lambda: len(daemon.sessions_of("vllm")) == 2)
        engine.forget_local()
        engine.generate(prompt(61))
        assert engine.metrics()["vllm:kvstore_load_decisions{decision=wait}"] == 1

        def loaded() -> bool:  # a busy machine may make it give up, with what has come so far
            engine.forget_local()
            return bool(engine.generate(prompt(61))[0]["cached"] == BLOCKS * BLOCK_TOKENS)

        wait_until("it is loaded", loaded)
        assert engine.metric("vllm:kvstore_hook_errors") == 0
    finally:
        daemon.stop()
