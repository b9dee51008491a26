"""Two daemons that share one Redis: what one stored, the other one's clients get."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import kvstore
from kvstore.testing import make_block
from tests.redis.servers import RedisServer
from tests.tiers.test_service import BLOCK, LIMIT_S, NAMESPACE, Daemon, check, until


def test_what_one_daemon_stored_another_one_loads(server: RedisServer, tmp_path: Path) -> None:
    flags = ("--redis-url", f"redis://127.0.0.1:{server.port}/0", "--redis-bytes", "200MB", "--redis-deadline-s", "10")
    folders = tmp_path / "a", tmp_path / "b"
    daemons = [Daemon(folder, *flags, disk=False) for folder in folders]
    keys = [b"%d" % index for index in range(12)]
    try:
        for folder, daemon in zip(folders, daemons, strict=True):
            folder.mkdir()
            daemon.start()
        one, other = daemons
        with kvstore.connect(one.endpoint, NAMESPACE, timeout_s=LIMIT_S) as client:
            # Stores are throttled until the tier has looked at what is there.
            until(lambda: one.tier("redis")["state"] == "ok", "Redis answers")
            deadline = time.monotonic() + LIMIT_S
            while one.tier("redis")["blocks"] < len(keys):
                assert time.monotonic() < deadline, one.stats()["transfers"]
                client.delete(keys)
                client.insert(keys, [make_block(key, BLOCK) for key in keys]).wait(LIMIT_S)
                until(lambda: one.stats()["transfers"]["queued_bytes"] == 0, "copied")
        assert one.stop(signal.SIGTERM) == 0
        with kvstore.connect(other.endpoint, NAMESPACE, timeout_s=LIMIT_S) as client:
            until(lambda: client.lookup(keys) == len(keys), "the other daemon finds them")
            check(client, keys)
            assert other.stats()["hits"]["redis"] == len(keys)
            # A server that is gone costs misses, and nothing else.
            server.kill()
            client.flush()
            assert client.lookup(keys) == 0
            assert client.insert(keys, [make_block(key, BLOCK) for key in keys]).wait(LIMIT_S).stored == len(keys)
            check(client, keys)
    finally:
        for daemon in daemons:
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.stop(signal.SIGKILL)
