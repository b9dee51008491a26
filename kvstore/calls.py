"""How a client's calls reach its daemon: over gRPC, or as frames on the connection that it holds for the mapping."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol

import grpc
import numpy as np

from kvstore.errors import DaemonUnavailable, DeadlineExceeded
from kvstore.looking import MAY_LOOK
from kvstore.wire.convert import client_errors
from kvstore.wire.frames import FAILED, METHODS, NO_ANSWER, Frame, Splitter, error_in, packed
from kvstore.wire.v1 import admin_pb2_grpc, engine_pb2_grpc

_RECEIVE_BYTES: Final = 1 << 16
#: How long a caller looks for its answer before it sleeps: most come within 200 us, and a quarter of that is the time
#: that the kernel takes to put a caller to sleep and to wake it. Only where that takes a CPU from nobody.
_LOOK_S: Final = 0.0003 if MAY_LOOK else 0.0


class Calls(Protocol):
    """One way to make calls. Safe from any thread."""

    def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """Makes a call by the name of its method and returns the reply.

        Raises:
            KVStoreError: what the daemon answered; DaemonUnavailable or DeadlineExceeded where it did not.
        """

    def post(self, calls: Sequence[tuple[str, Any]], timeout_s: float) -> None:
        """Makes calls, one after the other, whose answers nobody needs: pairs of a method and a request. They take
        effect before any later call through the same object.

        Raises:
            DaemonUnavailable: the daemon has gone.
        """


class GrpcCalls:
    """Calls over gRPC.

    Args:
        channel: The caller's to close, after the last call.
    """

    def __init__(self, channel: grpc.Channel, endpoint: object) -> None:
        # Made here and not where they are used: gRPC crashes the process where a stub is made for a closed channel.
        engine, admin = engine_pb2_grpc.EngineStub(channel), admin_pb2_grpc.AdminStub(channel)
        self._methods = {name: getattr(engine, name, None) or getattr(admin, name) for name in METHODS}
        self._endpoint = endpoint
        self._lock = threading.Lock()  # guards the one below
        self._posted: list[grpc.Future[Any]] = []  # what was sent and has no answer, as far as is known

    def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """See Calls."""
        deadline = time.monotonic() + timeout_s
        self.settle(deadline)
        with client_errors(self._endpoint):
            return self._methods[method](request, timeout=max(0.001, deadline - time.monotonic()))

    def post(self, calls: Sequence[tuple[str, Any]], timeout_s: float) -> None:
        """See Calls. Does not wait for the last answer; the next call does: nothing else orders two gRPC calls."""
        for index, (method, request) in enumerate(calls):
            if index:
                self.settle(time.monotonic() + timeout_s)
            posted = self._methods[method].future(request, timeout=timeout_s)
            with self._lock:
                self._posted = [*(each for each in self._posted if not each.done()), posted]

    def settle(self, deadline: float) -> None:
        """Waits for the answers to all that was posted, whatever they are, up to a time by time.monotonic. For whoever
        asks the daemon past this object.
        """
        with self._lock:
            posted = self._posted
        for each in posted:
            with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                each.result(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._posted = [each for each in self._posted if not each.done()]


class _Waiting:
    """A call whose answer has not come."""

    __slots__ = ("answer",)

    def __init__(self) -> None:
        self.answer: Frame | None = None


class FramedCalls:
    """Calls as frames on a Unix connection, which stays the caller's.

    No thread of its own: of those that wait for answers one reads, and hands the others theirs.
    """

    def __init__(self, connection: socket.socket, endpoint: object) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._endpoint = endpoint
        self._sending = threading.Lock()  # guards the next one
        #: What a caller whose time was up could not send of its frame. It goes before anything else: half a frame would
        #: make noise of all that follows, and a new connection would end the session.
        self._unsent = memoryview(b"")
        #: Frames of post, in order. Whoever sends takes them along.
        self._posted: deque[bytes] = deque()
        self._lock = threading.Lock()  # guards the four below
        self._changed = threading.Condition(self._lock)
        self._numbers = 0
        self._waiting: dict[int, _Waiting] = {}
        self._reading = False
        self._gone: str | None = None
        # Of the thread that reads:
        self._splitter = Splitter()
        #: Kept, since recv() would make one for each call.
        self._received = np.empty(_RECEIVE_BYTES, np.uint8).data
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)

    def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """See Calls."""
        deadline = time.monotonic() + timeout_s
        entry = METHODS[method]
        payload = request.SerializeToString()
        waiting = _Waiting()
        with self._lock:
            self._numbers += 1
            number = self._numbers
            self._waiting[number] = waiting
        try:
            self._send(packed(entry.number, number, payload), deadline)
            self._receive(waiting, deadline)
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        assert waiting.answer is not None
        if waiting.answer.kind == FAILED:
            # Not in a variable: with its traceback it would keep this frame and itself, and the session for as long.
            raise error_in(waiting.answer.payload or b"")
        return entry.reply.FromString(waiting.answer.payload)

    def post(self, calls: Sequence[tuple[str, Any]], timeout_s: float) -> None:
        """See Calls. Returns once the frames are sent, or are the next to be sent where the daemon does not read."""
        frames = [packed(METHODS[method].number, NO_ANSWER, request.SerializeToString()) for method, request in calls]
        self._posted.append(b"".join(frames))
        try:
            self._send(b"", time.monotonic() + timeout_s)
        except DeadlineExceeded:
            pass  # it is kept, and goes before the next call

    def _send(self, frame: bytes, deadline: float) -> None:
        """Sends what others left, and a frame. One that was begun is finished by the next caller; one that was not is
        dropped, so that callers whose time is up leave nothing behind while the daemon does not read.

        Raises:
            DeadlineExceeded: not all of it was sent.
            DaemonUnavailable: the connection has ended.
        """
        # The one who is sending may have more time than this caller.
        if not self._sending.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._late()
        begun = True
        try:
            self._send_left(deadline)
            while self._posted:
                self._unsent = memoryview(self._posted.popleft())
                self._send_left(deadline)
            self._unsent, begun = memoryview(frame), False
            self._send_left(deadline)
        except OSError as error:
            self._unsent = memoryview(b"")
            self._end(str(error))
            raise self._unavailable() from None
        finally:
            if not begun and len(self._unsent) == len(frame):
                self._unsent = memoryview(b"")
            self._sending.release()

    def _send_left(self, deadline: float) -> None:
        while self._unsent:
            try:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
            except BlockingIOError:
                if not self._writable(deadline):
                    raise self._late() from None

    def _writable(self, deadline: float) -> bool:
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        return bool(poll.poll(_ms_until(deadline)))

    def _receive(self, waiting: _Waiting, deadline: float) -> None:
        """Returns once this call has its answer, or an error in its place.

        Raises:
            DeadlineExceeded: neither came in time.
        """
        while True:
            mine = False
            try:
                with self._lock:
                    while self._reading and waiting.answer is None:
                        if not self._changed.wait(deadline - time.monotonic()):
                            raise self._late()
                    if waiting.answer is not None:
                        return
                    if self._gone is not None:
                        raise self._unavailable()
                    mine = True  # before the next line, between which and this one an interrupt may come
                    self._reading = True
                self._read(waiting, deadline)
            finally:
                if mine:
                    with self._lock:
                        self._reading = False
                        if len(self._waiting) > 1:
                            self._changed.notify_all()

    def _read(self, waiting: _Waiting, deadline: float) -> None:
        """Reads as the one thread that does, until this call has its answer or the connection has ended."""
        looks_until = time.monotonic() + _LOOK_S
        while waiting.answer is None and self._gone is None:
            try:
                length = self._connection.recv_into(self._received)
            except BlockingIOError:
                if time.monotonic() >= looks_until and not self._readable.poll(_ms_until(deadline)):
                    raise self._late() from None
                continue
            except OSError as error:
                self._end(str(error))
                return
            if not length:
                self._end("it closed the connection")
                return
            with self._lock:
                others = False
                for frame in self._splitter.feed(self._received[:length]):
                    found = self._waiting.get(frame.number)  # None: that caller's time was up
                    if found is None:
                        continue
                    found.answer = frame
                    others |= found is not waiting
                if others:
                    self._changed.notify_all()

    def _end(self, why: str) -> None:
        with self._changed:
            self._gone = why
            self._changed.notify_all()

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the daemon at {self._endpoint} did not answer in time")

    def _unavailable(self) -> DaemonUnavailable:
        return DaemonUnavailable(f"the daemon at {self._endpoint} has gone: {self._gone}")


def _ms_until(deadline: float) -> int:
    """Milliseconds, rounded up, so that a poll does not end before its time and spin."""
    return max(0, int((deadline - time.monotonic()) * 1000) + 1)
