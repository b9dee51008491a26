"""What one host's daemon stored, the other host gets over a link with delay and loss, every byte of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.testing import make_block
from tests.hosts.netns import Host, two_hosts
from tests.redis.servers import RedisServer, needs_redis, running
from tests.support import PATIENCE_S, Daemon, child, eventually, line_of, running_daemon

#: There and back takes 40 ms, and of what is sent on the way, one packet in a hundred is lost.
DELAY_S, LOSS = 0.02, 0.01
BLOCK = 128 << 10
NAMESPACE = kvstore.Namespace(model="m", dtype="bf16", block_size=16, block_bytes=BLOCK)
KEYS = [b"%d" % index for index in range(16)]
#: A busy machine on top of a slow link.
WAIT_S = str(PATIENCE_S / 2)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts(DELAY_S, LOSS) as hosts:
        yield hosts


LISTENER = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("ready")
    while True:
        server.accept()[0].close()
"""
CALLER = """
import socket, sys, time
for _ in range(5):
    begun = time.monotonic()
    socket.create_connection((sys.argv[1], 7000)).close()
    print(time.monotonic() - begun)
"""


def test_the_link_takes_its_time(hosts: tuple[Host, Host]) -> None:
    here, there = hosts
    with child(LISTENER, there.address, prefix=there.prefix) as listener:
        assert line_of(listener) == "ready"
        with child(CALLER, there.address, prefix=here.prefix) as caller:
            assert all(float(line_of(caller)) >= 2 * DELAY_S for _ in range(5))


#: Sends 4 MiB, thousands of packets, and says which of them the kernel had to send again.
SENDER = """
import socket, struct, sys
with socket.create_connection((sys.argv[1], 7000)) as sender:
    sender.sendall(bytes(4 << 20))
    sender.shutdown(socket.SHUT_WR)
    sender.recv(1)
    # tcpi_total_retrans of linux/tcp.h
    print(struct.unpack_from("I", sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 100)[0])
"""
DRAIN = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("ready")
    with server.accept()[0] as taker:
        while taker.recv(1 << 20):
            pass
"""


def test_the_link_loses_packets(hosts: tuple[Host, Host]) -> None:
    here, there = hosts
    with child(DRAIN, there.address, prefix=there.prefix) as drain:
        assert line_of(drain) == "ready"
        with child(SENDER, there.address, prefix=here.prefix) as sender:
            assert int(line_of(sender)) > 0


def store(daemon: Daemon) -> None:
    with daemon.connect(NAMESPACE) as client:
        done = client.insert(KEYS, [make_block(key, BLOCK) for key in KEYS]).wait(PATIENCE_S)
        assert done.stored == len(KEYS), done
    eventually(lambda: daemon.stats()["transfers"]["queued_bytes"] == 0, "copied down")


def check(daemon: Daemon, source: str) -> None:
    """Every block comes from there, and is right."""
    with daemon.connect(NAMESPACE) as client:
        eventually(lambda: client.lookup(KEYS) == len(KEYS), f"found in {source}")
        with client.select(KEYS, timeout_s=PATIENCE_S) as found:
            assert len(found) == len(KEYS)
            for key, view in zip(KEYS, found, strict=True):
                assert view == make_block(key, BLOCK)
    assert daemon.stats()["hits"][source] == len(KEYS)


def tier_is_ok(daemon: Daemon, name: str) -> bool:
    return any(tier["name"] == name and tier["state"] == "ok" for tier in daemon.stats()["tiers"])


@needs_redis
def test_through_redis(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    here, there = hosts
    socket = str(tmp_path / "redis.sock")
    # The test itself is on neither host, and asks over a file.
    server = RedisServer(
        *(tmp_path, 6379, "--bind", here.address, "--protected-mode", "no", "--unixsocket", socket),
        login={"unix_socket_path": socket},
        prefix=here.prefix,
    )
    flags = ("--redis-url", f"redis://{here.address}:6379", "--redis-deadline-s", WAIT_S)
    with (
        running(server),
        running_daemon(*flags, prefix=here.prefix) as near,
        running_daemon(*flags, prefix=there.prefix) as far,
    ):
        for daemon in (near, far):
            eventually(lambda daemon=daemon: tier_is_ok(daemon, "redis"), "Redis answers")
        store(near)
        check(far, "redis")


@pytest.fixture
def token(tmp_path: Path) -> Path:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    return token


def test_through_a_peer(hosts: tuple[Host, Host], token: Path) -> None:
    here, there = hosts
    flags = ("--token-file", str(token))
    listen = ("--listen", f"{here.address}:7070")
    peer = ("--peer", f"{here.address}:7070", "--peer-deadline-s", WAIT_S)
    with running_daemon(*flags, *listen, prefix=here.prefix) as near:
        store(near)
        with running_daemon(*flags, *peer, prefix=there.prefix) as far:
            eventually(lambda: tier_is_ok(far, "peer"), "it has attached to its peer")
            check(far, "peer")


REMOTE = """
import sys
import kvstore
from kvstore.testing import make_block
from tests.hosts.test_hosts import BLOCK, KEYS, NAMESPACE, PATIENCE_S

endpoint, token = sys.argv[1:]
with kvstore.connect(endpoint, NAMESPACE, token=token, timeout_s=PATIENCE_S) as client:
    with client.select(KEYS, timeout_s=PATIENCE_S) as found:
        print(sum(view == make_block(key, BLOCK) for key, view in zip(KEYS, found)))
    more = [b"from afar " + key for key in KEYS]
    print(client.insert(more, [make_block(key, BLOCK) for key in more]).wait(PATIENCE_S).stored)
"""


def test_through_a_client_without_a_daemon_of_its_own(hosts: tuple[Host, Host], token: Path) -> None:
    here, there = hosts
    flags = ("--token-file", str(token), "--listen", f"{here.address}:7070")
    with child("import socket; from kvstore.congestion import *; print(current(socket.socket()))") as process:
        default = line_of(process)
    with running_daemon(*flags, prefix=here.prefix) as near:
        store(near)
        with child(REMOTE, f"{here.address}:7070", token.read_text().strip(), prefix=there.prefix) as process:
            assert line_of(process) == str(len(KEYS))
            assert line_of(process) == str(len(KEYS))
            # Between hosts the system decides.
            assert list(near.stats()["data_port"]["congestion"]) == [default]
        with near.connect(NAMESPACE) as client:
            more = [b"from afar " + key for key in KEYS]
            with client.select(more, timeout_s=PATIENCE_S) as found:
                assert [bytes(view) for view in found] == [make_block(key, BLOCK) for key in more]
