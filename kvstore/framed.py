"""The daemon's side of framed calls (kvstore/wire/frames.py): one protocol object for each connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, cast

from google.protobuf.message import DecodeError

from kvstore.errors import InvalidRequest, KVStoreError, LimitExceeded
from kvstore.log import RateLimited, get_logger
from kvstore.wire.frames import METHOD_OF_NUMBER, NO_ANSWER, OK, Frame, Method, Splitter, packed, packed_error

#: Calls of one connection that may be under way. Most are over before the next is read; what waits (select) adds up.
_CALLS_MAX: Final = 1024

log = RateLimited(get_logger("kvstore.framed"))

#: What answers a method, by its name.
Methods = Mapping[str, Callable[[Any], Awaitable[Any]]]


class FramedConnection(asyncio.Protocol):
    """Reads frames, has them answered, writes the answers. On the daemon's event loop.

    Calls are begun in the order in which they came; those that wait overlap. When the connection ends, they are
    cancelled.

    Args:
        payload_max: Longest request, in bytes.
        refused: Told of each call that fails.

    Attributes:
        lost: Done when the connection has ended.
    """

    def __init__(self, methods: Methods, payload_max: int, refused: Callable[[KVStoreError], None]) -> None:
        self._methods = methods
        self._payload_max = payload_max
        self._refused = refused
        self._splitter = Splitter(payload_max)
        self._calls: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._full = False  # the peer does not read its answers
        self.lost: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio.Protocol."""
        self._transport = None
        for call in self._calls:
            call.cancel()
        if not self.lost.done():
            self.lost.set_result(None)

    def pause_writing(self) -> None:
        """Of asyncio.Protocol: who does not read is not read either."""
        self._full = True
        self._pace()

    def resume_writing(self) -> None:
        """Of asyncio.Protocol."""
        self._full = False
        self._pace()

    def data_received(self, data: bytes) -> None:
        """Of asyncio.Protocol."""
        for frame in self._splitter.feed(data):
            call = self._loop.create_task(self._answer(frame))
            self._calls.add(call)
            call.add_done_callback(self._done)
        self._pace()

    def close(self) -> None:
        """Ends the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _done(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._pace()

    def _pace(self) -> None:
        if self._transport is None:
            return
        if self._full or len(self._calls) >= _CALLS_MAX:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    async def _answer(self, frame: Frame) -> None:
        try:
            method = METHOD_OF_NUMBER.get(frame.kind)
            if method is None:
                raise InvalidRequest(f"there is no call {frame.kind}: client and daemon do not match")
            reply = await self._methods[method.name](self._request(method, frame))
            answer = packed(OK, frame.number, reply.SerializeToString())
        except KVStoreError as error:
            self._refused(error)
            answer = packed_error(frame.number, error)
        except (
            Exception
        ):  # a defect must not leave the caller waiting, nor end the connection, which is a session's life
            log.error("a call failed", key=frame.kind, call=frame.kind, exc_info=True)
            answer = packed_error(frame.number, KVStoreError("INTERNAL: the daemon's log says more"))
        if frame.number != NO_ANSWER and self._transport is not None:
            self._transport.write(answer)

    def _request(self, method: Method, frame: Frame) -> Any:
        if frame.payload is None:
            raise LimitExceeded(
                f"message_bytes_max: a request of {frame.length} bytes; at most {self._payload_max}: split the batch"
            )
        try:
            return method.request.FromString(frame.payload)
        except DecodeError:
            raise InvalidRequest(f"{method.name}: the request is no {method.request.DESCRIPTOR.name}") from None
