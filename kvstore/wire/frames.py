"""Calls as frames on a Unix socket: the same messages as over gRPC, without HTTP/2 around them.

A gRPC call costs a millisecond of CPU on both sides together, as much as copying a block of 8 MiB. Clients that have
the mapping hold a Unix connection anyhow (kvstore/handoff.py), and one frame each way on it costs a third of that.

A frame is a head (length of the payload, kind, number of the call) and the payload, little-endian. In a request the
kind names the method; in a reply it is OK or FAILED. The number is the caller's own; 0 says that no answer is wanted.
Requests of one connection are begun in the order in which they were sent, so a request that waits for no answer is done
before what the same client asks next.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

from google.protobuf import message_factory

from kvstore.errors import KVStoreError
from kvstore.wire.convert import error_named
from kvstore.wire.v1 import admin_pb2, engine_pb2

HEAD: Final = struct.Struct("<IBQ")
OK: Final = 0
FAILED: Final = 1
#: No answer wanted.
NO_ANSWER: Final = 0
#: Methods of a service are numbered in the order of its declaration, from here times the index of the service. Methods
#: are only ever added at the end, as in every protocol.
_SERVICE_STEP: Final = 64


class Method(NamedTuple):
    """A call that may travel as a frame.

    Attributes:
        number: Its kind in a request.
        request, reply: Classes of its messages.
    """

    name: str
    number: int
    request: Any
    reply: Any


def _methods() -> dict[str, Method]:
    services = (engine_pb2.DESCRIPTOR.services_by_name["Engine"], admin_pb2.DESCRIPTOR.services_by_name["Admin"])
    return {
        method.name: Method(
            method.name,
            index * _SERVICE_STEP + number,
            message_factory.GetMessageClass(method.input_type),
            message_factory.GetMessageClass(method.output_type),
        )
        for index, service in enumerate(services)
        for number, method in enumerate(service.methods)
        if not method.server_streaming
    }


METHODS: Final = _methods()
METHOD_OF_NUMBER: Final = {method.number: method for method in METHODS.values()}


def packed(kind: int, number: int, payload: bytes) -> bytes:
    """One frame."""
    return HEAD.pack(len(payload), kind, number) + payload


def packed_error(number: int, error: KVStoreError) -> bytes:
    """A reply that says what went wrong."""
    return packed(FAILED, number, f"{type(error).__name__}\n{error}".encode())


def error_in(payload: bytes) -> KVStoreError:
    """The error that such a reply says."""
    name, _, text = payload.decode(errors="replace").partition("\n")
    return error_named(name, text) or KVStoreError(text)


class Frame(NamedTuple):
    """One frame that came. payload None: it was longer than allowed, and has been or will be skipped."""

    kind: int
    number: int
    payload: bytes | None
    length: int


class Splitter:
    """Cuts a stream of bytes into frames.

    Args:
        payload_max: Bytes. What is longer is skipped, not kept; None: no limit.
    """

    def __init__(self, payload_max: int | None = None) -> None:
        self._payload_max = payload_max
        self._rest = bytearray()  # of a frame that has begun
        self._needed = 0  # bytes of it that are to be looked at together
        self._skip = 0

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """Frames that are complete with these bytes, which are not kept."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return []
            data, self._rest = memoryview(self._rest), bytearray()
        frames: list[Frame] = []
        end = len(data)
        at = min(self._skip, end)
        self._skip -= at
        while at < end:
            self._needed = HEAD.size
            if end - at < HEAD.size:
                break
            length, kind, number = HEAD.unpack_from(data, at)
            start = at + HEAD.size
            if self._payload_max is not None and length > self._payload_max:
                frames.append(Frame(kind, number, None, length))
                at = min(start + length, end)
                self._skip = start + length - at
            elif end - start < length:
                self._needed += length
                break
            else:
                at = start + length
                frames.append(Frame(kind, number, bytes(data[start:at]), length))
        if at < end:
            self._rest = bytearray(data[at:])
        return frames
