"""The daemon's side of framed calls (kvstore/wire/frames.py): one protocol object for each connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, cast

import numpy as np
from google.protobuf.message import DecodeError

from kvstore.begun import begin
from kvstore.errors import InvalidRequest, KVStoreError, LimitExceeded
from kvstore.log import RateLimited, get_logger
from kvstore.wire.frames import METHOD_OF_NUMBER, NO_ANSWER, OK, Frame, Method, Splitter, packed, packed_error

#: Calls of one connection that may be under way. Most are over before the next is read; what waits (select) adds up.
_CALLS_MAX: Final = 1024
_RECEIVE_BYTES: Final = 1 << 16
#: Calls that one connection begins before others have their turn.
_TURN_CALLS: Final = 32

log = RateLimited(get_logger("kvstore.framed"))

#: What answers a method, by its name.
Methods = Mapping[str, Callable[[Any], Awaitable[Any]]]


class FramedConnection(asyncio.BufferedProtocol):
    """Reads frames, has them answered, writes the answers. On the daemon's event loop.

    Calls are begun in the order in which they came; those that wait overlap. When the connection ends, they are
    cancelled.

    Args:
        payload_max: Longest request, in bytes.
        refused: Told of each call that fails.
        expect_more: Told of each call that is over: the next one often comes soon.

    Attributes:
        lost: Done when the connection has ended.
    """

    def __init__(
        self,
        methods: Methods,
        payload_max: int,
        refused: Callable[[KVStoreError], None],
        expect_more: Callable[[], None],
    ) -> None:
        self._methods = methods
        self._expect_more = expect_more
        self._payload_max = payload_max
        self._refused = refused
        self._splitter = Splitter(payload_max)
        #: Kept, since asyncio's own would be made for each read, with 256 KiB.
        self._received = np.empty(_RECEIVE_BYTES, np.uint8).data
        self._frames: deque[Frame] = deque()  # calls that have come and were not begun
        self._resting = False  # while others have their turn
        self._calls: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._full = False  # the peer does not read its answers
        self.lost: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio.BufferedProtocol."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio.BufferedProtocol."""
        self._transport = None
        self._frames.clear()
        for call in self._calls:
            call.cancel()
        if not self.lost.done():
            self.lost.set_result(None)

    def pause_writing(self) -> None:
        """Of asyncio.BufferedProtocol: who does not read is not read either."""
        self._full = True
        self._pace()

    def resume_writing(self) -> None:
        """Of asyncio.BufferedProtocol."""
        self._full = False
        self._go_on()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Of asyncio.BufferedProtocol."""
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        """Of asyncio.BufferedProtocol."""
        self._frames.extend(self._splitter.feed(self._received[:nbytes]))
        self._go_on()

    def close(self) -> None:
        """Ends the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _go_on(self) -> None:
        """Begins calls that have come, in their order, and reads on when there is none left."""
        if self._resting:
            return
        call: asyncio.Task[None] | None = None
        for _ in range(_TURN_CALLS):
            if not self._frames or self._stuck:
                break
            call = begin(self._answer(self._frames.popleft()))
            if call is not None:
                self._calls.add(call)
                call.add_done_callback(self._done)
                break
        # A call that became a task may have done nothing so far: the next one is begun after its first step.
        if call is not None or (self._frames and not self._stuck):
            self._resting = True
            self._loop.call_soon(self._end_rest)
        self._pace()

    def _end_rest(self) -> None:
        self._resting = False
        self._go_on()

    def _done(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._go_on()

    @property
    def _stuck(self) -> bool:
        """Whether nothing can be begun before something else has happened."""
        return self._transport is None or self._full or len(self._calls) >= _CALLS_MAX

    def _pace(self) -> None:
        if self._transport is None:
            return
        if self._frames or self._stuck:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    async def _answer(self, frame: Frame) -> None:
        try:
            method = METHOD_OF_NUMBER.get(frame.kind)
            if method is None:
                raise InvalidRequest(f"there is no call {frame.kind}: client and daemon do not match")
            reply = await self._methods[method.name](self._request(method, frame))
            answer = packed(OK, frame.number, reply.SerializeToString()) if frame.number != NO_ANSWER else b""
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
        self._expect_more()

    def _request(self, method: Method, frame: Frame) -> Any:
        if frame.payload is None:
            raise LimitExceeded(
                f"message_bytes_max: a request of {frame.length} bytes; at most {self._payload_max}: split the batch"
            )
        try:
            return method.request.FromString(frame.payload)
        except DecodeError:
            raise InvalidRequest(f"{method.name}: the request is no {method.request.DESCRIPTOR.name}") from None
