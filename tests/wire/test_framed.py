"""Calls on the connection that the mapping came over: what a client must not be able to break, and their order."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from kvstore.client import Client
from kvstore.config import Limits
from kvstore.handoff import SUFFIX, receive
from kvstore.wire.frames import FAILED, HEAD, METHODS, NO_ANSWER, OK, Frame, Splitter, error_in, packed
from kvstore.wire.v1 import admin_pb2, engine_pb2
from tests.support import PATIENCE_S, Daemon, eventually, running_daemon
from tests.wire.conftest import NAMESPACE, Stranger

PIECE_BYTES = 1 << 16


class Line:
    """A connection with the mapping, by hand."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._splitter = Splitter()
        self._frames: list[Frame] = []

    def next(self) -> Frame:
        while not self._frames:
            data = self.connection.recv(1 << 16)
            assert data, "the daemon closed the connection"
            self._frames += self._splitter.feed(data)
        return self._frames.pop(0)

    def refused(self) -> tuple[int, str]:
        frame = self.next()
        assert frame.kind == FAILED
        assert frame.payload is not None
        error = error_in(frame.payload)
        return frame.number, f"{type(error).__name__}: {error}"

    def check_alive(self) -> None:
        self.connection.sendall(packed(METHODS["Ping"].number, 99, b""))
        frame = self.next()
        assert (frame.kind, frame.number) == (OK, 99)


@pytest.fixture
def line(served: Daemon, stranger: Stranger) -> Iterator[Line]:
    handoff = receive(str(served.socket) + SUFFIX, stranger.session, PATIENCE_S)
    with handoff.connection:
        os.close(handoff.pool_fd)
        os.close(handoff.epochs_fd)
        yield Line(handoff.connection)


def test_a_call_that_does_not_exist(line: Line) -> None:
    line.connection.sendall(packed(250, 3, b""))
    assert line.refused() == (3, "InvalidRequest: there is no call 250: client and daemon do not match")
    line.check_alive()


def test_a_message_that_is_none(line: Line) -> None:
    line.connection.sendall(packed(METHODS["Acquire"].number, 4, b"\xff" * 20))
    assert line.refused() == (4, "InvalidRequest: Acquire: the request is no AcquireRequest")
    line.check_alive()


def test_a_message_over_the_limit_costs_only_itself(line: Line) -> None:
    length = Limits().message_bytes_max + PIECE_BYTES
    line.connection.sendall(HEAD.pack(length, METHODS["Lookup"].number, 5))
    number, said = line.refused()  # before the rest has come
    assert number == 5
    assert "message_bytes_max" in said
    for _ in range(length // PIECE_BYTES):
        line.connection.sendall(b"\0" * PIECE_BYTES)
    line.check_alive()


def test_a_refusal_names_its_error_and_is_counted(served: Daemon, line: Line) -> None:
    before = served.stats()["errors"].get("UnknownSession", 0)
    request = engine_pb2.LookupRequest(session=b"x" * 16, keys=[b"a"])
    line.connection.sendall(packed(METHODS["Lookup"].number, 6, request.SerializeToString()))
    number, said = line.refused()
    assert (number, said.split(":")[0]) == (6, "UnknownSession")
    line.connection.sendall(packed(METHODS["Lookup"].number, NO_ANSWER, request.SerializeToString()))
    line.check_alive()  # and nothing was said about the one that wanted no answer
    assert served.stats()["errors"]["UnknownSession"] == before + 2


def test_who_does_not_read_is_not_read(served: Daemon, line: Line, stranger: Stranger) -> None:
    """Answers that nobody takes must not pile up in the daemon."""
    request = packed(METHODS["Stats"].number, 1, admin_pb2.StatsRequest().SerializeToString())
    line.connection.settimeout(2.0)
    before = served.resident_bytes()
    with pytest.raises(TimeoutError):
        for _ in range(200_000):
            line.connection.sendall(request)
    assert served.resident_bytes() - before < 64 << 20
    assert stranger.admin.Ping(admin_pb2.PingRequest(), timeout=PATIENCE_S).pid  # others are served


def test_what_a_client_asks_comes_after_what_it_posted(served: Daemon) -> None:
    with served.connect(NAMESPACE) as client:
        block = bytes(NAMESPACE.block_bytes)
        assert client.insert([b"order"], [block]).wait(PATIENCE_S).stored == 1
        for _ in range(100):
            with client.select([b"order"], timeout_s=PATIENCE_S) as found:
                assert len(found) == 1
            assert client.stats()["pins"] == 0
        client.flush()


def test_threads_share_a_client(served: Daemon) -> None:
    with served.connect(NAMESPACE) as client:
        wrong: list[str] = []

        def ask(name: bytes) -> None:
            for count in range(1, 20):
                keys = [name + bytes([index]) for index in range(count)]
                leases = client.acquire([(0, keys)])
                got = client.reserve(1)
                if len(leases[0].offsets) or len(got.offsets) != 1 or client.abort(got.generation, got.offsets) != 1:
                    wrong.append(f"{name!r} {count}")

        askers = [threading.Thread(target=ask, args=(bytes([65 + index]) * 3,)) for index in range(8)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join(PATIENCE_S)
        assert not wrong
        assert client.stats()["reserved_slots"] == 0


def test_a_call_that_waits_does_not_hold_up_the_others(served: Daemon) -> None:
    with served.connect(NAMESPACE) as client:
        found: list[int] = []

        def wait_for_block() -> None:
            with client.select([b"later"], timeout_s=PATIENCE_S) as blocks:
                found.append(len(blocks))

        waiting = threading.Thread(target=wait_for_block)
        waiting.start()
        eventually(lambda: client.stats()["waiters"] == 1)
        assert client.lookup([b"later"]) == 0
        assert client.insert([b"later"], [bytes(NAMESPACE.block_bytes)]).wait(PATIENCE_S).stored == 1
        waiting.join(PATIENCE_S)
        assert found == [1]
        client.flush()


def test_an_interrupt_gives_back_what_the_call_took(served: Daemon) -> None:
    """Ctrl-C while a call waits for its answer: nobody reads it, and what it took must not stay taken."""
    with served.connect(NAMESPACE) as client:
        assert served.process is not None

        def interrupt() -> None:
            eventually(lambda: client.stats()["waiters"] == 1)
            os.kill(os.getpid(), signal.SIGINT)

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt), client.select([b"never"], timeout_s=PATIENCE_S):
            pass
        interrupting.join(PATIENCE_S)
        # What it waited for comes now: the daemon must not pin it for a caller who has gone.
        assert client.insert([b"never"], [bytes(NAMESPACE.block_bytes)]).wait(PATIENCE_S).stored == 1
        eventually(lambda: (client.stats()["waiters"], client.stats()["pins"]) == (0, 0))
        client.flush()


def test_a_daemon_that_dies_under_a_call() -> None:
    with running_daemon() as daemon, daemon.connect(NAMESPACE, wait=False) as client:
        eventually(lambda: client.attached)
        told: list[type[BaseException]] = []

        def wait_for_block(client: Client) -> None:
            try:
                with client.select([b"never"], timeout_s=PATIENCE_S):
                    pass
            except Exception as error:
                told.append(type(error))

        waiting = threading.Thread(target=wait_for_block, args=(client,))
        waiting.start()
        eventually(lambda: daemon.stats()["waiters"] == 1)
        daemon.kill()
        waiting.join(PATIENCE_S / 2)  # at once, not when the time is up
        assert [error.__name__ for error in told] == ["DaemonUnavailable"]
