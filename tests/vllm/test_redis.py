"""Two hosts, each with a daemon and a disk of its own, that share Redis: one engine stores, the other one loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.redis.servers import needs_redis, one_server, running
from tests.vllm.harness import BLOCK_TOKENS, BLOCKS, Daemon, Engine, prompt, wait_until

Answers = Callable[[list[int]], list[int]]


def redis_blocks(daemon: Daemon) -> int:
    (redis,) = (tier for tier in daemon.stats()["tiers"] if tier["name"] == "redis")
    return int(redis["blocks"])


@needs_redis
def test_what_an_engine_of_one_host_stored_an_engine_of_another_loads(
    tmp_path: Path, engines: Callable[..., Engine], answers: Answers
) -> None:
    server = one_server(tmp_path / "redis")
    flags = ("--redis-url", server.url, "--redis-deadline-s", "20")
    hosts = []
    for name in "ab":
        (folder := tmp_path / name).mkdir()
        hosts.append(Daemon(folder, cpu_bytes=200_000_000, disk_bytes=200_000_000, flags=flags))
    one, other = hosts
    with running(server):
        try:
            for daemon in hosts:
                daemon.start()
                wait_until("Redis answers", lambda daemon=daemon: daemon.stats()["tiers"][2]["state"] == "ok")
            extra = {"kvstore.pending_deadline_s": 60, "cpu_bytes_to_use": 100_000_000}
            prefill = engines("host-a", extra | {"kvstore.endpoint": one.endpoint})
            decode = engines("host-b", extra | {"kvstore.endpoint": other.endpoint})
            prefill.ready(), decode.ready()
            prefill.wait_storing(one)
            wait_until("all is copied", lambda: one.stats()["transfers"]["queued_bytes"] == 0)
            before = redis_blocks(one)
            prefill.generate(prompt(70))
            wait_until("all is in Redis", lambda: redis_blocks(one) >= before + BLOCKS)

            hits = decode.external_hits()
            loaded = decode.generate(prompt(70))[0]
            assert decode.external_hits() - hits == BLOCKS * BLOCK_TOKENS
            assert loaded["cached"] == BLOCKS * BLOCK_TOKENS
            assert other.stats()["hits"]["redis"] == BLOCKS
            assert loaded["tokens"] == answers(prompt(70))
            assert decode.metric("vllm:kvstore_hook_errors") == 0
        finally:
            for daemon in hosts:
                daemon.stop()
