"""The tree of errors, and the table that carries it over the wire."""

from __future__ import annotations

import inspect
from typing import Any

import grpc
import pytest

from kvstore import errors
from kvstore.errors import KVStoreError
from kvstore.wire.convert import ERROR_KEY, STATUS_OF, error_of, pack_offsets, status_of, unpack_offsets

ALL = [class_ for _, class_ in inspect.getmembers(errors, inspect.isclass) if issubclass(class_, KVStoreError)]
LEAVES = [class_ for class_ in ALL if not class_.__subclasses__()]
#: Raised on this side only: no daemon ever answers with them.
LOCAL = {
    errors.NoMapping,
    errors.ForkedClient,
    errors.ClientClosed,
    errors.ConfigError,
    errors.AlreadyRunning,
    errors.Damage,
    errors.EndOfPipe,
    errors.PipeBroken,
}


class Failure(grpc.RpcError):
    """What a client gets: gRPC's own class cannot be made by hand."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Any = ()) -> None:
        self._answer = (code, details, metadata)

    def code(self) -> grpc.StatusCode:
        return self._answer[0]

    def details(self) -> str:
        return self._answer[1]

    def trailing_metadata(self) -> Any:
        return self._answer[2]


def test_each_error_travels_or_is_local() -> None:
    assert set(LEAVES) == set(STATUS_OF) | LOCAL
    assert not set(STATUS_OF) & LOCAL


@pytest.mark.parametrize("class_", STATUS_OF)
def test_what_the_daemon_raises_the_client_raises(class_: type[KVStoreError]) -> None:
    sent = class_("what to change")
    failure = Failure(status_of(sent), str(sent), ((ERROR_KEY, type(sent).__name__),))
    found = error_of(failure, "unix:/x")
    assert type(found) is class_ and str(found) == "what to change"


def test_a_subclass_travels_as_what_it_is() -> None:
    class Special(errors.InvalidRequest):
        pass

    assert status_of(Special("x")) is grpc.StatusCode.INVALID_ARGUMENT
    assert status_of(KVStoreError("x")) is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("code", "class_", "said"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.DaemonUnavailable, "unix:/x"),
        (grpc.StatusCode.CANCELLED, errors.DaemonUnavailable, "kvstore serve"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded, "unix:/x"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.LimitExceeded, "message_bytes_max"),
        (grpc.StatusCode.UNIMPLEMENTED, errors.InvalidRequest, "as new as"),
        (grpc.StatusCode.PERMISSION_DENIED, errors.AccessDenied, "because"),
        (grpc.StatusCode.INTERNAL, KVStoreError, "INTERNAL: because"),
    ],
)
def test_a_status_without_a_name_is_told_from_its_code(
    code: grpc.StatusCode, class_: type[KVStoreError], said: str
) -> None:
    found = error_of(Failure(code, "because"), "unix:/x")
    assert type(found) is class_ and said in str(found)


def test_a_name_that_nobody_knows_is_ignored() -> None:
    failure = Failure(grpc.StatusCode.INVALID_ARGUMENT, "because", ((ERROR_KEY, "SystemExit"),))
    assert type(error_of(failure, "x")) is errors.InvalidRequest


def test_each_error_says_what_the_caller_should_do() -> None:
    kinds = (errors.RetryLater, errors.CallerMistake, errors.AlreadyRunning, errors.Damage)
    kinds += (errors.EndOfPipe, errors.PipeBroken)
    for class_ in LEAVES:
        assert issubclass(class_, kinds)
        assert class_.__doc__ and class_.__name__ in (errors.__doc__ or "")


def test_offsets_are_packed_and_unpacked() -> None:
    offsets = [0, 4096, (1 << 64) - 1]
    assert unpack_offsets(pack_offsets(offsets)) == offsets
    assert pack_offsets([1]) == b"\x01" + bytes(7)
    with pytest.raises(errors.InvalidRequest, match="9 bytes"):
        unpack_offsets(bytes(9))
