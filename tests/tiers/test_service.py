"""A daemon with a disk tier, as its clients and its operator see it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.admin import AdminClient
from kvstore.errors import RetryLater
from kvstore.testing import make_block

BLOCK = 1 << 20
NAMESPACE = kvstore.Namespace(model="m", dtype="bf16", block_size=16, block_bytes=BLOCK)
#: Generous: only a daemon that hangs reaches it.
LIMIT_S = 60.0


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {LIMIT_S} s"
        time.sleep(0.02)


class Daemon:
    """A daemon on folders that outlive it."""

    def __init__(self, folder: Path, *flags: str, disk: bool = True) -> None:
        self.endpoint = f"unix:{folder}/k.sock"
        self.command = [sys.executable, "-m", "kvstore", "serve", "--cpu-bytes", "40MiB", "--listen", self.endpoint]
        self.command += ["--disk-dir", f"{folder}/disk", "--disk-bytes", "200MB"] if disk else []
        self.command += flags
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environ = {**os.environ, "PYTHONPATH": str(Path(kvstore.__file__).parents[1])}
        self.process = subprocess.Popen(self.command, stderr=subprocess.DEVNULL, env=environ)
        until(self.answers, "the daemon is ready")

    def answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, "the daemon has ended"
        with contextlib.suppress(RetryLater), AdminClient(self.endpoint) as admin:
            admin.ping()
            return True
        return False

    def stop(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)

    def stats(self) -> dict[str, Any]:
        with AdminClient(self.endpoint) as admin:
            return admin.stats()

    def tier(self, name: str) -> dict[str, Any]:
        (found,) = (tier for tier in self.stats()["tiers"] if tier["name"] == name)
        return dict(found)

    def blocks_on_disk(self) -> int:
        return int(self.tier("disk")["blocks"])


@pytest.fixture(params=["one", "two"])
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    flags = ["--disk-dir", f"{tmp_path}/more"] if request.param == "two" else []
    daemon = Daemon(tmp_path, *flags)
    daemon.start()
    yield daemon
    if daemon.process is not None and daemon.process.poll() is None:
        daemon.stop(signal.SIGKILL)


def check(client: kvstore.Client, keys: list[bytes]) -> None:
    with client.select(keys, timeout_s=LIMIT_S) as found:
        assert len(found) == len(keys)
        for key, view in zip(keys, found, strict=True):
            assert view == make_block(key, BLOCK)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_blocks_survive_a_restart_and_the_client_goes_on(daemon: Daemon, number: int) -> None:
    keys = [b"%d" % index for index in range(60)]  # more than the pool holds
    with kvstore.connect(daemon.endpoint, NAMESPACE, timeout_s=LIMIT_S) as client:
        for start in range(0, len(keys), 6):
            several = keys[start : start + 6]
            result = client.insert(several, [make_block(key, BLOCK) for key in several]).wait(LIMIT_S)
            assert result.stored == len(several), result
            until(lambda done=start + 6: daemon.blocks_on_disk() == done, "copied down")
        assert client.lookup(keys) == len(keys)
        check(client, keys[:20])
        before = client.generation
        assert (daemon.stop(number) == 0) == (number == signal.SIGTERM)
        daemon.start()
        until(lambda: client.generation not in (None, before), "attached again")
        until(lambda: client.lookup(keys) == len(keys), "the index is read")
        for start in range(0, len(keys), 20):
            check(client, keys[start : start + 20])
        assert daemon.stats()["hits"]["disk"] >= len(keys) - 20
        # Removal reaches every tier, and stays after another restart.
        with client.drop_select(keys[:2], timeout_s=LIMIT_S) as found:
            assert len(found) == 2
        assert client.delete(keys[2:4]) == 2
        assert client.lookup(keys) == 0 and client.lookup(keys[4:]) == len(keys) - 4
        daemon.stop(signal.SIGKILL)
        daemon.start()
        until(lambda: client.lookup(keys[4:]) == len(keys) - 4, "the index is read")
        assert client.lookup(keys[:1]) == client.lookup(keys[2:3]) == 0
        assert client.flush() == len(keys) - 4
        assert daemon.blocks_on_disk() == 0


def test_an_operator_sees_lists_and_warms_what_is_on_disk(daemon: Daemon) -> None:
    keys = [b"%d" % index for index in range(10)]
    with kvstore.connect(daemon.endpoint, NAMESPACE, timeout_s=LIMIT_S) as client:
        client.insert(keys, [make_block(key, BLOCK) for key in keys]).wait(LIMIT_S)
        until(lambda: daemon.blocks_on_disk() == len(keys), "copied down")
    daemon.stop(signal.SIGTERM)
    daemon.start()
    until(lambda: daemon.blocks_on_disk() == len(keys), "the index is read")
    with AdminClient(daemon.endpoint) as admin:
        listed, total = admin.list_blocks(NAMESPACE.digest())
        assert {block.key for block in listed} == set(keys) and total == len(keys)
        assert all(block.tiers and "cpu" not in block.tiers for block in listed)
        *_, (blocks, size) = admin.prefetch(NAMESPACE.digest(), max_bytes=4 * BLOCK)
        assert (blocks, size) == (4, 4 * BLOCK)
        *_, (blocks, _) = admin.prefetch(None)
        assert blocks == len(keys) - 4
        listed, _ = admin.list_blocks(NAMESPACE.digest())
        assert all(block.tiers[0] == "cpu" and len(block.tiers) == 2 for block in listed)
    with kvstore.connect(daemon.endpoint, NAMESPACE, timeout_s=LIMIT_S) as client:
        check(client, keys)


def test_verify_checks_a_directory_that_no_daemon_uses(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.start()
    keys = [b"%d" % index for index in range(8)]
    with kvstore.connect(daemon.endpoint, NAMESPACE, timeout_s=LIMIT_S) as client:
        client.insert(keys, [make_block(key, BLOCK) for key in keys]).wait(LIMIT_S)
        until(lambda: daemon.blocks_on_disk() == len(keys), "copied down")

    def verify(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvstore", "verify", *flags, f"{tmp_path}/disk"]
        environ = {**os.environ, "PYTHONPATH": str(Path(kvstore.__file__).parents[1])}
        return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=LIMIT_S, check=False)

    held = verify()
    assert daemon.process is not None
    assert held.returncode == 2 and str(daemon.process.pid) in held.stderr and held.stderr.count("\n") == 1
    assert daemon.stop(signal.SIGTERM) == 0
    report = json.loads(verify("--json").stdout)
    assert report["ok"] and report["blocks_ok"] == len(keys)
    (slab, *_) = sorted((tmp_path / "disk").glob("slab-*"), key=lambda path: -path.stat().st_size)
    with slab.open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    damaged = verify()
    assert damaged.returncode == 5 and "damaged" in damaged.stdout
    assert verify("--repair").returncode == 0
    report = json.loads(verify("--json").stdout)
    assert report["ok"] and report["blocks_ok"] == len(keys) - 1
