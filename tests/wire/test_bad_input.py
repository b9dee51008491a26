"""What is wrong is answered with a clear status, costs nothing, and harms nobody else."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.handoff import SUFFIX
from kvstore.handoff import receive as receive_mapping
from kvstore.wire.convert import ERROR_KEY, pack_offsets
from kvstore.wire.v1 import admin_pb2, engine_pb2
from tests.support import PATIENCE_S, Daemon, eventually, running_daemon
from tests.wire.conftest import NAMESPACE, Stranger

NOBODY = b"x" * 16


def refusal(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str, str]:
    """Status, name of the error and message of a call that is refused."""
    with pytest.raises(grpc.RpcError) as refused:
        call()
    failure: Any = refused.value
    names = [value for key, value in failure.trailing_metadata() or () if key == ERROR_KEY]
    return failure.code(), names[0] if names else "", failure.details()


CALLS: dict[str, Callable[[Stranger, bytes, bytes], tuple[str, Any]]] = {
    "OpenNamespace": lambda who, session, digest: (
        "OpenNamespace",
        engine_pb2.OpenNamespaceRequest(session=session, text=NAMESPACE.identity(), group_bytes=NAMESPACE.group_bytes),
    ),
    "Lookup": lambda who, session, digest: (
        "Lookup",
        engine_pb2.LookupRequest(session=session, namespace=digest, keys=[b"a"]),
    ),
    "Acquire": lambda who, session, digest: (
        "Acquire",
        engine_pb2.AcquireRequest(session=session, namespace=digest, queries=[engine_pb2.Query(keys=[b"a"])]),
    ),
    "Select": lambda who, session, digest: (
        "Select",
        engine_pb2.SelectRequest(session=session, namespace=digest, query=engine_pb2.Query(keys=[b"a"])),
    ),
    "Release": lambda who, session, digest: ("Release", engine_pb2.ReleaseRequest(session=session, leases=[1])),
    "Reserve": lambda who, session, digest: (
        "Reserve",
        engine_pb2.ReserveRequest(session=session, namespace=digest, count=1),
    ),
    "Commit": lambda who, session, digest: (
        "Commit",
        engine_pb2.CommitRequest(session=session, namespace=digest, offsets=pack_offsets([0]), keys=[b"a"]),
    ),
    "Abort": lambda who, session, digest: (
        "Abort",
        engine_pb2.AbortRequest(session=session, offsets=pack_offsets([0])),
    ),
    "Delete": lambda who, session, digest: (
        "Delete",
        engine_pb2.DeleteRequest(session=session, namespace=digest, keys=[b"a"]),
    ),
}
IN_A_NAMESPACE = [name for name in CALLS if name not in ("OpenNamespace", "Release", "Abort")]


@pytest.mark.parametrize("session", [b"", NOBODY, b"y" * 100_000])
@pytest.mark.parametrize("call", CALLS)
def test_a_session_that_is_not_attached(stranger: Stranger, call: str, session: bytes) -> None:
    method, request = CALLS[call](stranger, session, stranger.digest)
    code, name, _ = refusal(lambda: stranger.call(method, request))
    assert (code, name) == (grpc.StatusCode.FAILED_PRECONDITION, "UnknownSession")


@pytest.mark.parametrize("call", IN_A_NAMESPACE)
def test_a_namespace_that_is_not_open(stranger: Stranger, call: str) -> None:
    method, request = CALLS[call](stranger, stranger.session, NOBODY)
    assert refusal(lambda: stranger.call(method, request))[:2] == (grpc.StatusCode.NOT_FOUND, "UnknownNamespace")
    method, request = CALLS[call](stranger, stranger.session, b"short")
    code, name, said = refusal(lambda: stranger.call(method, request))
    assert (code, name) == (grpc.StatusCode.INVALID_ARGUMENT, "InvalidRequest") and "16 bytes, not 5" in said


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("", [4096]),
        ("null", [4096]),
        ("{}", [4096]),
        ("[" * 50_000, [4096]),
        (NAMESPACE.identity() + " ", [4096]),
        (NAMESPACE.identity(), []),
        (NAMESPACE.identity(), [0]),
        (NAMESPACE.identity(), [NAMESPACE.block_bytes, 1]),
    ],
)
def test_a_namespace_that_is_none(stranger: Stranger, text: str, sizes: list[int]) -> None:
    request = engine_pb2.OpenNamespaceRequest(session=stranger.session, text=text, group_bytes=sizes)
    assert refusal(lambda: stranger.call("OpenNamespace", request))[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("text", [NAMESPACE.identity().replace("wire", "x" * 300_000)])
def test_a_namespace_text_that_is_too_long(stranger: Stranger, text: str) -> None:
    request = engine_pb2.OpenNamespaceRequest(session=stranger.session, text=text, group_bytes=[4096])
    code, _, said = refusal(lambda: stranger.call("OpenNamespace", request))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "namespace_text_bytes_max" in said


def test_offsets_that_are_not_whole(stranger: Stranger) -> None:
    for method, request in (
        ("Commit", engine_pb2.CommitRequest(session=stranger.session, namespace=stranger.digest, offsets=b"1234567")),
        ("Abort", engine_pb2.AbortRequest(session=stranger.session, offsets=b"123456789")),
    ):
        code, name, said = refusal(lambda method=method, request=request: stranger.call(method, request))  # type: ignore[misc]
        assert (code, name) == (grpc.StatusCode.INVALID_ARGUMENT, "InvalidRequest") and "multiple of 8" in said


def test_a_session_without_the_mapping_cannot_commit_what_it_did_not_send(stranger: Stranger) -> None:
    at = {"session": stranger.session, "namespace": stranger.digest}
    slots = stranger.call("Reserve", engine_pb2.ReserveRequest(**at, count=2))
    request = engine_pb2.CommitRequest(**at, offsets=slots.offsets, keys=[b"a", b"b"])
    status, _, why = refusal(lambda: stranger.call("Commit", request))
    assert status is grpc.StatusCode.INVALID_ARGUMENT and "2 of 2 slots have not all arrived" in why
    assert stranger.call("Lookup", engine_pb2.LookupRequest(**at, keys=[b"a"])).available == 0


def test_an_ordinary_lease_takes_nothing_away(served: Daemon, stranger: Stranger) -> None:
    with served.connect(NAMESPACE) as client:
        assert client.insert([b"a"], [bytes(NAMESPACE.block_bytes)]).wait(PATIENCE_S).stored == 1
    at = {"session": stranger.session, "namespace": stranger.digest}
    granted = stranger.call("Acquire", engine_pb2.AcquireRequest(**at, queries=[engine_pb2.Query(keys=[b"a"])]))
    lease = granted.grants[0].lease
    request = engine_pb2.ReleaseRequest(session=stranger.session, leases=[lease], remove=True)
    assert refusal(lambda: stranger.call("Release", request))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert stranger.call("Lookup", engine_pb2.LookupRequest(**at, keys=[b"a"])).available == 1
    request.remove = False
    assert stranger.call("Release", request).released == 1
    assert stranger.call("Release", request).released == 0


@pytest.mark.parametrize("method", ["List", "Flush"])
def test_an_operator_who_names_no_namespace(stranger: Stranger, method: str) -> None:
    request = {"List": admin_pb2.ListRequest, "Flush": admin_pb2.FlushRequest}[method]
    call = getattr(stranger.admin, method)
    assert refusal(lambda: call(request(namespace=b"short")))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal(lambda: call(request(namespace=NOBODY)))[0] is grpc.StatusCode.NOT_FOUND


def test_messages_and_methods_that_are_none(stranger: Stranger) -> None:
    def send(method: str, message: bytes) -> Any:
        return stranger.channel.unary_unary(method)(message, timeout=PATIENCE_S)

    chance = random.Random(3)
    codes = set()
    for _ in range(200):
        codes.add(refusal(lambda: send("/kvstore.v1.Engine/Lookup", b"\xff" + chance.randbytes(40)))[0])
    assert codes <= {
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNKNOWN,
    }
    assert refusal(lambda: send("/kvstore.v1.Engine/Nothing", b""))[0] is grpc.StatusCode.UNIMPLEMENTED
    assert refusal(lambda: send("nonsense", b""))[0] in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)


def test_a_message_over_the_limit_is_refused_with_the_limit(stranger: Stranger) -> None:
    request = engine_pb2.LookupRequest(session=stranger.session, namespace=stranger.digest, keys=[b"x" * (17 << 20)])
    code, _, said = refusal(lambda: stranger.call("Lookup", request))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and str(16 << 20) in said


def test_an_empty_request_is_answered(stranger: Stranger) -> None:
    at = {"session": stranger.session, "namespace": stranger.digest}
    assert stranger.call("Lookup", engine_pb2.LookupRequest(**at)).available == 0
    assert not stranger.call("Acquire", engine_pb2.AcquireRequest(**at)).grants
    assert stranger.call("Acquire", engine_pb2.AcquireRequest(**at, queries=[engine_pb2.Query()])).grants[0].lease == 0
    assert stranger.call("Select", engine_pb2.SelectRequest(**at)).grant.lease == 0
    assert not stranger.call("Reserve", engine_pb2.ReserveRequest(**at)).offsets
    assert not stranger.call("Commit", engine_pb2.CommitRequest(**at)).outcomes
    assert stranger.call("Abort", engine_pb2.AbortRequest(session=stranger.session)).returned == 0
    assert stranger.call("Release", engine_pb2.ReleaseRequest(session=stranger.session)).released == 0


# -- bytes ---------------------------------------------------------------------------------------------------------


GARBAGE = (
    b"",
    b"\x00",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(10_000),
    b"\x16\x03\x01\x02\x00" + bytes(512),
    *[random.Random(seed).randbytes(1 << seed) for seed in range(4, 18)],
)


def throw(family: int, address: Any, data: bytes) -> None:
    """Sends bytes and goes away, whatever the other side says."""
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(address)
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
        except OSError:
            pass


def test_random_bytes_harm_nobody() -> None:
    """On the Unix socket, on the TCP port and on the socket of the mapping; descriptors come back."""
    with running_daemon("--listen", "127.0.0.1:0") as daemon:
        tcp = next(each for each in daemon.stats()["listen"] if not each.startswith("unix:"))
        host, port = tcp.rsplit(":", 1)
        with daemon.connect(NAMESPACE) as client:
            client.insert([b"a"], [bytes(NAMESPACE.block_bytes)]).wait(PATIENCE_S)
            before = daemon.open_files()
            for data in GARBAGE:
                throw(socket.AF_UNIX, str(daemon.socket), data)
                throw(socket.AF_INET, (host, int(port)), data)
                throw(socket.AF_UNIX, str(daemon.socket) + SUFFIX, data)
                assert client.lookup([b"a"]) == 1
            eventually(lambda: daemon.open_files() <= before, "descriptors come back")
        daemon.check_nothing_held()


def test_the_mapping_is_given_to_sessions_only_and_once_each(served: Daemon, stranger: Stranger) -> None:
    path = str(served.socket) + SUFFIX

    def ask(data: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect(path)
            connection.sendall(data)
            with contextlib.suppress(ConnectionResetError):  # there is more than anybody reads
                return connection.recv(100)
            return b""

    assert ask(NOBODY) == b"" and ask(NOBODY * 100) == b""
    handoff = receive_mapping(path, stranger.session, PATIENCE_S)
    assert ask(stranger.session) == b"", "one mapping for each session: two could not both be its life"
    for fd in (handoff.pool_fd, handoff.epochs_fd):
        socket.close(fd)
    # It is the session's life from now on.
    handoff.connection.close()
    request = engine_pb2.LookupRequest(session=stranger.session, namespace=stranger.digest, keys=[b"a"])

    def is_over() -> bool:
        try:
            stranger.call("Lookup", request)
        except grpc.RpcError as failure:
            return failure.code() is grpc.StatusCode.FAILED_PRECONDITION  # type: ignore[attr-defined]
        return False

    eventually(is_over, "the session has ended with its mapping")


def test_descriptors_sent_to_the_daemon_do_not_stay_there(served: Daemon) -> None:
    before = served.open_files()
    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(served.socket) + SUFFIX)
            rights = struct.pack("4i", *[connection.fileno()] * 4)
            connection.sendmsg([NOBODY], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    eventually(lambda: served.open_files() <= before, "descriptors come back")


# -- standard services ---------------------------------------------------------------------------------------------


def test_health_answers(stranger: Stranger) -> None:
    health = health_pb2_grpc.HealthStub(stranger.channel)
    for service in ("", "kvstore.v1.Engine", "kvstore.v1.Admin"):
        reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    unknown = health_pb2.HealthCheckRequest(service="nothing")
    assert refusal(lambda: health.Check(unknown, timeout=PATIENCE_S))[0] is grpc.StatusCode.NOT_FOUND


def test_reflection_answers(stranger: Stranger) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(stranger.channel)
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    (reply,) = stub.ServerReflectionInfo(requests, timeout=PATIENCE_S)
    names = {service.name for service in reply.list_services_response.service}
    assert {"kvstore.v1.Engine", "kvstore.v1.Admin", "grpc.health.v1.Health"} <= names
