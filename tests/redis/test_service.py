"""Two daemons that share one Redis: what one stored, the other one's clients get."""

from __future__ import annotations

import contextlib
import io
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import kvstore
from kvstore import render
from kvstore.metrics import exposition
from kvstore.testing import make_block
from tests.redis.servers import RedisServer
from tests.tiers.test_service import BLOCK, LIMIT_S, NAMESPACE, Daemon, check, until

KEYS = [b"%d" % index for index in range(12)]


def store(daemon: Daemon) -> None:
    """Stores KEYS until all of them are in Redis: stores are throttled until the tier has looked at what is there."""
    until(lambda: daemon.tier("redis")["state"] == "ok", "Redis answers")
    with kvstore.connect(daemon.endpoint, NAMESPACE, timeout_s=LIMIT_S) as client:
        deadline = time.monotonic() + LIMIT_S
        while daemon.tier("redis")["blocks"] < len(KEYS):
            assert time.monotonic() < deadline, daemon.stats()["transfers"]
            client.delete(KEYS)
            client.insert(KEYS, [make_block(key, BLOCK) for key in KEYS]).wait(LIMIT_S)
            until(lambda: daemon.stats()["transfers"]["queued_bytes"] == 0, "copied")


@contextlib.contextmanager
def running(*daemons: Daemon) -> Iterator[None]:
    """Starts daemons, ends them in any case."""
    try:
        for daemon in daemons:
            daemon.start()
        yield
    finally:
        for daemon in daemons:
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.stop(signal.SIGKILL)


def folder(parent: Path, name: str) -> Path:
    path = parent / name
    path.mkdir()
    return path


def test_what_one_daemon_stored_another_one_loads(server: RedisServer, tmp_path: Path) -> None:
    flags = ("--redis-url", f"redis://127.0.0.1:{server.port}/0", "--redis-bytes", "200MB", "--redis-deadline-s", "10")
    one, other = (Daemon(folder(tmp_path, name), *flags, disk=False) for name in "ab")
    with running(one, other):
        store(one)
        assert one.stop(signal.SIGTERM) == 0
        with kvstore.connect(other.endpoint, NAMESPACE, timeout_s=LIMIT_S) as client:
            until(lambda: client.lookup(KEYS) == len(KEYS), "the other daemon finds them")
            check(client, KEYS)
            assert other.stats()["hits"]["redis"] == len(KEYS)
            # A server that is gone costs misses, and nothing else.
            server.kill()
            client.flush()
            assert client.lookup(KEYS) == 0
            assert client.insert(KEYS, [make_block(key, BLOCK) for key in KEYS]).wait(LIMIT_S).stored == len(KEYS)
            check(client, KEYS)


def test_a_disk_after_redis_keeps_what_came_from_another_host(server: RedisServer, tmp_path: Path) -> None:
    """cpu -> redis -> disk by a configuration file; the disk alone serves after a restart without Redis."""
    there = folder(tmp_path, "b")
    config = there / "kvstore.toml"
    config.write_text(
        f"""
        [[tiers]]
        kind = "redis"
        url = "redis://127.0.0.1:{server.port}"
        deadline_s = 10
        [[tiers]]
        kind = "disk"
        dir = "{there}/disk"
        bytes = "200MB"
        keep_promoted = true
        """
    )
    one = Daemon(folder(tmp_path, "a"), "--redis-url", server.url, "--redis-deadline-s", "10", disk=False)
    other = Daemon(there, "--config", str(config), disk=False)
    with running(one, other):
        store(one)
        assert [tier["name"] for tier in other.stats()["tiers"]] == ["cpu", "redis", "disk"]
        with kvstore.connect(other.endpoint, NAMESPACE, timeout_s=LIMIT_S) as client:
            check(client, KEYS)
            assert other.stats()["hits"]["redis"] == len(KEYS)
        until(lambda: other.tier("disk")["blocks"] == len(KEYS), "the disk keeps them")
        # With blocks in every tier, both pages can be made: for people and for Prometheus.
        stats = other.stats()
        page = io.StringIO()
        render.console_for(page).print(render.stats_view(stats))
        assert "cpu -> redis -> disk" in page.getvalue() and "extents of tier disk" in page.getvalue()
        assert f'kvstore_tier_blocks{{tier="redis"}} {len(KEYS)}.0' in exposition(stats)
        assert other.stop(signal.SIGTERM) == 0
        server.kill()
        other.start()
        with kvstore.connect(other.endpoint, NAMESPACE, timeout_s=LIMIT_S) as client:
            until(lambda: client.lookup(KEYS) == len(KEYS), "the index of the disk is read")
            check(client, KEYS)
            assert other.stats()["hits"]["disk"] == len(KEYS)
