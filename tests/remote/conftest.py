"""Daemons that are reached over TCP alone, as from another host: no socket, so no mapping."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.admin import AdminClient
from kvstore.data_wire import HELLO, Operation, Query, Request, SelectRequest, Stream
from kvstore.testing import make_block
from tests.support import PATIENCE_S, Daemon

#: Blocks of 64 KiB: small enough that a test may have a thousand.
NAMESPACE = kvstore.Namespace(model="remote", dtype="bfloat16", block_size=64, block_bytes=64 << 10)
SIZE = NAMESPACE.block_bytes


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


class FarDaemon(Daemon):
    """A daemon without a Unix socket. Its ports stay the same over restarts."""

    def __init__(self, folder: Path, *flags: str, cpu_bytes: str = "64MiB", tls: kvstore.Tls | None = None) -> None:
        super().__init__(folder, cpu_bytes=cpu_bytes)
        self.tls = tls
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.data_port = free_port()
        self._arguments = [sys.executable, "-m", "kvstore", "serve", "--cpu-bytes", cpu_bytes]
        self._arguments += ["--listen", self.endpoint, "--data-listen", f"127.0.0.1:{self.data_port}", *flags]

    def admin(self) -> AdminClient:
        return AdminClient(self.endpoint, timeout_s=PATIENCE_S, tls=self.tls)

    def connect(self, namespace: kvstore.Namespace | None = NAMESPACE, **options: Any) -> kvstore.Client:
        return super().connect(namespace, **{"tls": self.tls, **options})

    def data(self) -> dict[str, Any]:
        """Figures of the data port."""
        figures: dict[str, Any] = self.stats()["data_port"]
        return figures


@contextlib.contextmanager
def far_daemon(*flags: str, **options: Any) -> Iterator[FarDaemon]:
    """One until the end of the with-block."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        daemon = FarDaemon(Path(folder), *flags, **options)
        try:
            daemon.start()
            yield daemon
        finally:
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.kill()


@pytest.fixture(scope="module")
def shared() -> Iterator[FarDaemon]:
    with far_daemon() as daemon:
        yield daemon


@pytest.fixture
def far(shared: FarDaemon) -> Iterator[FarDaemon]:
    """The module's daemon, empty at first. Afterwards it must still run, and nobody may hold anything of it."""
    yield shared
    assert shared.process is not None and shared.process.poll() is None, shared.log.read_text()
    shared.check_nothing_held()
    with shared.admin() as admin:
        admin.flush(None)
        (tier,) = admin.stats()["tiers"]
        assert not tier["used_bytes"] and not tier["blocks"] and not tier["segments"]


def put(client: kvstore.Client, keys: list[bytes], size: int = SIZE) -> None:
    """Stores blocks; each of them is stored now."""
    result = client.insert(keys, [make_block(key, size) for key in keys]).wait(PATIENCE_S)
    assert result.stored == len(keys), result


def check(client: kvstore.Client, keys: list[bytes], size: int = SIZE) -> None:
    """All of them are there, with their bytes."""
    with client.select(keys, timeout_s=PATIENCE_S) as found:
        assert len(found) == len(keys)
        for key, view in zip(keys, found, strict=True):
            assert view == make_block(key, size)
        del view


def names(count: int, prefix: str = "k") -> list[bytes]:
    return [f"{prefix}{index}".encode() for index in range(count)]


class RawLine:
    """A data connection by hand, as the session of a client."""

    def __init__(self, daemon: FarDaemon, client: kvstore.Client) -> None:
        attached = client._connection.attached
        assert attached is not None
        arena: Any = client.arena
        self.who = arena._who
        self.stream = Stream(socket.create_connection(("127.0.0.1", daemon.data_port), PATIENCE_S), PATIENCE_S)
        _, self.nonce = HELLO.unpack(self.stream.receive(HELLO.size))
        self.number = 0

    def request(self, operation: Operation, offsets: Any, epochs: Any, length: int = SIZE, **changes: Any) -> Request:
        fields: dict[str, Any] = {
            "operation": operation,
            "session": self.who.session,
            "generation": self.who.generation,
            "first": 0,
            "length": length,
            "offsets": list(map(int, offsets)),
            "epochs": list(map(int, epochs)),
            **changes,
        }
        return Request(**fields)

    def select(
        self, keys: list[bytes], *, room: int | None = None, whole: bool = False, **changes: Any
    ) -> SelectRequest:
        """Keys of NAMESPACE."""
        query = {"namespace": NAMESPACE.digest(), "group": 0, "length": SIZE, "keys": keys, "whole": whole}
        who = {"session": self.who.session, "generation": self.who.generation}
        query |= {name: changes[name] for name in query if name in changes}
        who |= {name: changes[name] for name in who if name in changes}
        return SelectRequest(**who, query=Query(**query), room=len(keys) if room is None else room)

    def ask(self, request: Request | SelectRequest, secret: bytes | None = None) -> None:
        self.stream.send(request.pack(secret or self.who.secret, self.nonce, self.number))
        self.number += 1


@pytest.fixture
def raw(far: FarDaemon) -> Iterator[Callable[[kvstore.Client], RawLine]]:
    """Makes data connections that end with the test."""
    lines: list[RawLine] = []

    def make(client: kvstore.Client) -> RawLine:
        lines.append(RawLine(far, client))
        return lines[-1]

    yield make
    for line in lines:
        line.stream.close()


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two CAs, and a certificate of 127.0.0.1 from each."""
    folder = tmp_path_factory.mktemp("certificates")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for ours in ("", "other-"):
        ca, end = f"{ours}ca", f"{ours}end"
        openssl(folder, "req", "-x509", *curve, "-keyout", f"{ca}.key", "-out", f"{ca}.pem", "-subj", f"/CN={ca}")
        openssl(folder, "req", *curve, "-keyout", f"{end}.key", "-out", f"{end}.csr", "-subj", f"/CN={end}")
        sign = ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl(folder, "x509", "-req", "-in", f"{end}.csr", "-out", f"{end}.pem", *sign)
    return folder
