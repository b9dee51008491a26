"""TLS on HOST:PORT: control and bytes alike."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.admin import AdminClient
from kvstore.errors import ConfigError, DaemonUnavailable
from tests.remote.conftest import FarDaemon, check, far_daemon, names, put
from tests.support import eventually


def flags(folder: Path, *more: str) -> tuple[str, ...]:
    return ("--tls-cert", str(folder / "end.pem"), "--tls-key", str(folder / "end.key"), *more)


@pytest.fixture(scope="module")
def daemon(certificates: Path) -> Iterator[FarDaemon]:
    with far_daemon(*flags(certificates), tls=kvstore.Tls(certificates / "ca.pem")) as daemon:
        yield daemon


def test_bytes_travel_over_tls(daemon: FarDaemon) -> None:
    with daemon.connect(data_connections=2) as client:
        put(client, names(200))
        check(client, names(200))
        figures = daemon.data()
    assert figures["tls"] and figures["sent_bytes"] and figures["received_bytes"]


def test_a_daemon_of_another_ca_is_not_trusted(daemon: FarDaemon, certificates: Path) -> None:
    other = kvstore.Tls(certificates / "other-ca.pem")
    with pytest.raises(DaemonUnavailable):
        daemon.connect(tls=other, timeout_s=1.0)
    with pytest.raises(DaemonUnavailable), AdminClient(daemon.endpoint, timeout_s=1.0, tls=other) as admin:
        admin.ping()


def test_who_does_not_speak_tls_gets_nothing(daemon: FarDaemon) -> None:
    before = daemon.data()["events"].get("broken", 0)
    with socket.create_connection(("127.0.0.1", daemon.data_port), 60) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert b"kvd" not in stranger.recv(100)
    eventually(lambda: daemon.data()["events"].get("broken", 0) > before, "it is counted")


def test_clients_may_have_to_show_a_certificate(certificates: Path) -> None:
    ours = kvstore.Tls(certificates / "ca.pem", certificates / "end.pem", certificates / "end.key")
    more = ("--tls-ca", str(certificates / "ca.pem"), "--tls-clients", "verified")
    with far_daemon(*flags(certificates, *more), tls=ours) as daemon:
        with daemon.connect() as client:
            put(client, names(3))
            check(client, names(3))
        theirs = kvstore.Tls(certificates / "ca.pem", certificates / "other-end.pem", certificates / "other-end.key")
        for tls in (theirs, kvstore.Tls(certificates / "ca.pem")):
            with pytest.raises(DaemonUnavailable):
                daemon.connect(tls=tls, timeout_s=1.0)


@pytest.mark.parametrize("missing", ["ca", "cert", "key"])
def test_a_file_that_is_missing_is_named(tmp_path: Path, certificates: Path, missing: str) -> None:
    files = {"ca": "ca.pem", "cert": "end.pem", "key": "end.key"}
    given = {name: certificates / file for name, file in files.items()}
    given[missing] = tmp_path / "nowhere.pem"
    with pytest.raises(ConfigError, match=r"nowhere\.pem"):
        kvstore.connect("127.0.0.1:1", tls=kvstore.Tls(**given), wait=False)
