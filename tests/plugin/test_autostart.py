"""Autostart with real daemons."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import kvstore
from engine_plugin.vllm.autostart import ensure_daemon, log_path


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    endpoint = f"unix:{tmp_path}/run/kvstore.sock"
    yield endpoint
    # Also one that lost the race, and may still be on its way to find the lock free.
    started = [process for process in psutil.process_iter() if endpoint in command_of(process)]
    for process in started:
        process.kill()
    psutil.wait_procs(started, timeout=60)


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def pid_at(endpoint: str) -> int:
    with kvstore.connect(endpoint, timeout_s=1) as client:
        return int(client.stats()["pid"])


def test_starts_one_of_the_asked_size_and_leaves_it_alone_afterwards(endpoint: str) -> None:
    ensure_daemon(endpoint, cpu_bytes=64_000_000, block_size=32)
    with kvstore.connect(endpoint, timeout_s=1) as client:
        stats = client.stats()
    assert stats["tiers"][0]["capacity_bytes"] == 64_000_000
    assert stats["block_size"] == 32
    assert os.getsid(stats["pid"]) == stats["pid"] != os.getsid(0)
    ensure_daemon(endpoint, cpu_bytes=128_000_000, block_size=64)
    assert pid_at(endpoint) == stats["pid"]


def test_a_daemon_is_not_among_the_engines_processes(endpoint: str) -> None:
    """vLLM kills those where a worker takes long to end."""
    ensure_daemon(endpoint, cpu_bytes=64_000_000, block_size=32)
    pid = pid_at(endpoint)
    assert pid not in [process.pid for process in psutil.Process().children(recursive=True)]


def test_two_engines_at_once_end_with_one_daemon(endpoint: str) -> None:
    pids: list[int] = []

    def engine() -> None:
        ensure_daemon(endpoint, cpu_bytes=64_000_000, block_size=64)
        pids.append(pid_at(endpoint))

    threads = [threading.Thread(target=engine) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(pids) == 2
    assert len(set(pids)) == 1


def test_a_daemon_that_cannot_start_does_not_stop_the_engine(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="vllm.kvstore"):
        ensure_daemon(endpoint, cpu_bytes=1, block_size=64)
    assert "going on without a cache" in caplog.text
    log = log_path(endpoint)
    assert log is not None
    assert log.read_text()  # it says why
