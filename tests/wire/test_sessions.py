"""Sessions come and go by the thousand and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore import handoff_server
from kvstore.endpoint import parse_endpoint
from kvstore.errors import LimitExceeded
from kvstore.wire.channel import open_channel
from kvstore.wire.convert import error_of
from kvstore.wire.v1 import engine_pb2, engine_pb2_grpc
from tests.support import PATIENCE_S, Daemon, eventually, running_daemon
from tests.wire.conftest import NAMESPACE

CYCLES = 10_000
BATCH = 500
CLIENTS = 300
SESSIONS_MAX = 4096
#: What the daemon may keep of ten thousand sessions: caches of gRPC and of the allocator, not a record of each.
GROWTH_BYTES_MAX = 32 << 20


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


class Streams:
    """Attach streams on one channel, read by nobody."""

    def __init__(self, daemon: Daemon) -> None:
        self.channel = open_channel(parse_endpoint(daemon.endpoint), None)
        self.stub = engine_pb2_grpc.EngineStub(self.channel)
        self.open: list[Any] = []

    def attach(self) -> bytes:
        stream = self.stub.Attach(engine_pb2.AttachRequest(client_name="idle", pid=1))
        self.open.append(stream)
        return bytes(next(stream).welcome.session)

    def detach_all(self) -> None:
        while self.open:
            self.open.pop().cancel()


def cycle(daemon: Daemon, streams: Streams, count: int) -> None:
    ids = {streams.attach() for _ in range(count)}
    assert len(ids) == count
    streams.detach_all()


@pytest.mark.timeout(300)
def test_ten_thousand_attaches_and_detaches_leave_nothing(daemon: Daemon) -> None:
    streams = Streams(daemon)
    cycle(daemon, streams, BATCH)
    daemon.check_nothing_held()
    files, memory = daemon.open_files(), daemon.resident_bytes()
    for _ in range(CYCLES // BATCH):
        cycle(daemon, streams, BATCH)
    daemon.check_nothing_held()
    assert daemon.stats()["calls"]["Attach"] >= CYCLES
    eventually(lambda: daemon.open_files() <= files, "descriptors come back")
    eventually(lambda: daemon.resident_bytes() <= memory + GROWTH_BYTES_MAX, "memory comes back")
    streams.channel.close()


def test_hundreds_of_clients_that_map_the_pool_leave_nothing(daemon: Daemon) -> None:
    def use(number: int) -> None:
        with daemon.connect(NAMESPACE, prefault=False, client_name=f"c{number}") as client:
            client.reserve(1)

    use(0)
    daemon.check_nothing_held()
    files, memory = daemon.open_files(), daemon.resident_bytes()
    failures: list[BaseException] = []

    def several(numbers: range) -> None:
        try:
            for number in numbers:
                use(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=several, args=(range(start, CLIENTS, 4),)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failures
    daemon.check_nothing_held()
    eventually(lambda: daemon.open_files() <= files + 2, "descriptors come back")
    eventually(lambda: daemon.resident_bytes() <= memory + GROWTH_BYTES_MAX, "memory comes back")


def test_the_number_of_sessions_has_a_ceiling_that_is_named(daemon: Daemon) -> None:
    streams = Streams(daemon)
    for _ in range(SESSIONS_MAX):
        streams.attach()
    with pytest.raises(grpc.RpcError) as refused:
        streams.attach()
    error = error_of(refused.value, "x")
    assert isinstance(error, LimitExceeded) and "4096 sessions are attached (sessions_max)" in str(error)
    assert daemon.stats()["errors"]["LimitExceeded"]
    streams.detach_all()
    daemon.check_nothing_held()
    streams.attach()
    streams.detach_all()
    streams.channel.close()


async def test_a_connection_that_says_nothing_to_the_mapping_socket_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff_server, "_HELLO_S", 0.05)

    def never(*_: object) -> Any:
        raise AssertionError("nobody has said who it is")

    with open("/dev/null") as nothing:
        server = handoff_server.HandoffServer(nothing.fileno(), nothing.fileno(), 0, never, never, never)
        server.listen(str(tmp_path / "s"))
        loop = asyncio.get_running_loop()
        before = len(os.listdir("/proc/self/fd"))
        idle = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(50)]
        async with asyncio.timeout(PATIENCE_S):
            for number, connection in enumerate(idle):
                connection.setblocking(False)
                await loop.sock_connect(connection, str(tmp_path / "s"))
                if number % 2:  # not all of it
                    await loop.sock_sendall(connection, b"half")
            for connection in idle:
                assert await loop.sock_recv(connection, 1) == b""
                connection.close()
            while len(os.listdir("/proc/self/fd")) > before:
                await asyncio.sleep(0.001)
        await server.close()
