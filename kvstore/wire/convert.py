"""Message <-> value and error <-> status, each in one table.

A status carries the name of the error's class in its trailing metadata, so that a client raises what the daemon raised.
What comes without a name (from gRPC itself, or from a proxy) is told from the status code.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, Final

import grpc
import numpy as np
import numpy.typing as npt

from kvstore import errors
from kvstore.errors import InvalidRequest, KVStoreError

#: Trailing metadata that names the class of the error.
ERROR_KEY: Final = "kvstore-error"
#: Request metadata that carries the token, as `Bearer TOKEN`.
TOKEN_KEY: Final = "authorization"

#: The table. Order matters only to those who read it.
STATUS_OF: Final[dict[type[KVStoreError], grpc.StatusCode]] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SizeMismatch: grpc.StatusCode.INVALID_ARGUMENT,
    errors.LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnknownNamespace: grpc.StatusCode.NOT_FOUND,
    errors.UnknownSession: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StaleGeneration: grpc.StatusCode.FAILED_PRECONDITION,
    errors.AccessDenied: grpc.StatusCode.UNAUTHENTICATED,
    errors.Draining: grpc.StatusCode.UNAVAILABLE,
    errors.DaemonUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_CLASS_OF_NAME: Final = {class_.__name__: class_ for class_ in STATUS_OF}
#: What a status without a name means. Codes that are not here are a bug somewhere, not a condition.
_CLASS_OF_STATUS: Final[dict[grpc.StatusCode, type[KVStoreError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.LimitExceeded,
    grpc.StatusCode.NOT_FOUND: errors.UnknownNamespace,
    grpc.StatusCode.FAILED_PRECONDITION: errors.UnknownSession,
    grpc.StatusCode.UNAUTHENTICATED: errors.AccessDenied,
    grpc.StatusCode.PERMISSION_DENIED: errors.AccessDenied,
    grpc.StatusCode.UNAVAILABLE: errors.DaemonUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.DaemonUnavailable,
    grpc.StatusCode.UNIMPLEMENTED: errors.InvalidRequest,
}


def status_of(error: KVStoreError) -> grpc.StatusCode:
    """The status that tells this error."""
    for class_ in type(error).__mro__:
        if class_ in STATUS_OF:
            return STATUS_OF[class_]
    return grpc.StatusCode.INTERNAL


def error_named(name: str, text: str) -> KVStoreError | None:
    """The error of a class that may cross the wire; None where there is no such class."""
    class_ = _CLASS_OF_NAME.get(name)
    return class_(text) if class_ is not None else None


def error_of(failure: grpc.RpcError, endpoint: str) -> KVStoreError:
    """The error that a failed call tells. `endpoint` is named where nobody answers there."""
    code, details = failure.code(), failure.details() or ""
    metadata: Iterable[tuple[str, Any]] = failure.trailing_metadata() or ()  # type: ignore[assignment]
    for key, value in metadata:
        if key == ERROR_KEY and (named := error_named(str(value), details)) is not None:
            return named
    class_ = _CLASS_OF_STATUS.get(code, KVStoreError)
    if class_ is errors.DaemonUnavailable:
        return class_(f"no daemon answers at {endpoint}: start one with `kvstore serve --cpu-bytes 1GB`")
    if class_ is errors.DeadlineExceeded:
        return class_(f"the daemon at {endpoint} did not answer in time")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return class_(f"message_bytes_max: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return class_(f"{endpoint} does not offer this call: is it a kvstore daemon, and as new as this client?")
    return class_(f"{code.name}: {details}")


@contextlib.contextmanager
def client_errors(endpoint: object) -> Iterator[None]:
    """Turns what a call raises into this package's errors."""
    try:
        yield
    except grpc.RpcError as failure:
        raise error_of(failure, str(endpoint)) from None


def pack_offsets(offsets: Iterable[int]) -> bytes:
    """uint64, little-endian, side by side."""
    return array("Q", offsets).tobytes()


def unpack_offsets(packed: bytes) -> list[int]:
    """The inverse of pack_offsets.

    Raises:
        InvalidRequest: not a whole number of offsets.
    """
    if len(packed) % 8:
        raise InvalidRequest(f"packed offsets have {len(packed)} bytes, which is not a multiple of 8")
    return array("Q", packed).tolist()


def unpack_epochs(packed: bytes) -> list[int] | None:
    """uint32, little-endian, side by side; None where there are none.

    Raises:
        InvalidRequest: not a whole number of epochs.
    """
    if len(packed) % 4:
        raise InvalidRequest(f"packed epochs have {len(packed)} bytes, which is not a multiple of 4")
    return array("I", packed).tolist() or None


def offsets_array(packed: bytes) -> npt.NDArray[np.uint64]:
    """Packed offsets as an array, without a copy; read-only."""
    return np.frombuffer(packed, dtype="<u8")


def epochs_array(packed: bytes) -> npt.NDArray[np.uint32]:
    """Packed epochs as an array, without a copy; read-only."""
    return np.frombuffer(packed, dtype="<u4")
