"""The calling side of the data port: a few connections over which the bytes of many blocks travel side by side."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore import congestion
from kvstore.data_wire import (
    HELLO,
    MAGIC,
    REQUEST_BYTES,
    SLOTS_MAX,
    Lost,
    Operation,
    Query,
    Request,
    SelectRequest,
    Status,
    Stream,
)
from kvstore.endpoint import Endpoint, EndpointKind, parse_endpoint
from kvstore.errors import DaemonUnavailable, DeadlineExceeded, InvalidRequest, StaleGeneration
from kvstore.threads import started_pool

#: Requests ahead of the bytes that are being received on one connection, so that the daemon never waits for one.
_AHEAD: Final = 2
#: Least bytes for which another connection is worth it.
_PART_BYTES: Final = 4 << 20
#: An idle connection younger than this is used again; the daemon closes those that rest longer (data_port.IDLE_S).
_FRESH_S: Final = 60.0

R = TypeVar("R")
Valid = npt.NDArray[np.bool_]


def default_connections() -> int:
    """Connections that pay: on two cores a second one only takes the core away from the first."""
    return min(4, max(1, len(os.sched_getaffinity(0)) // 2))


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """What lets a session's bytes through: see data_wire."""

    session: bytes
    generation: bytes
    secret: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    """Slots of the daemon's pool, and which bytes of each are meant.

    Attributes:
        epochs: As they were handed out.
        first: First byte.
    """

    offsets: Sequence[int]
    epochs: Sequence[int]
    first: int = 0

    def part(self, start: int, stop: int) -> Slots:
        return Slots(self.offsets[start:stop], self.epochs[start:stop], self.first)


def data_endpoint(advertised: str, called: Endpoint) -> Endpoint | None:
    """Where the data port is, as seen from here: a wildcard stands for the host that was called.

    Returns:
        None where the daemon has none.
    """
    if not advertised:
        return None
    endpoint = parse_endpoint(advertised)
    if endpoint.host in ("0.0.0.0", "::") and not called.is_unix:
        return Endpoint(EndpointKind.TCP, host=called.host, port=endpoint.port)
    return endpoint


class _Line:
    """One connection."""

    def __init__(self, connected: socket.socket, stall_s: float) -> None:
        self.stream = Stream(connected, stall_s)
        magic, self._nonce = HELLO.unpack(self.stream.receive(HELLO.size))
        if magic != MAGIC:
            raise Lost("what answers on the data port is not a kvstore daemon of this version")
        self._number = 0
        self.rested_since = time.monotonic()

    def ask(self, request: Request | SelectRequest, secret: bytes) -> None:
        self.stream.send(request.pack(secret, self._nonce, self._number))
        self._number += 1

    def expect(self, wanted: Status) -> None:
        """The next reply must be this one.

        Raises:
            StaleGeneration, InvalidRequest: the daemon refused, and why.
        """
        status, text = self.stream.receive_reply()
        if status is Status.STALE:
            raise StaleGeneration(text)
        if status is Status.REFUSED:
            raise InvalidRequest(text)
        if status is not wanted:
            raise Lost(f"the data port answered {status.name}")


class DataLink:
    """Connections to one data port. Safe from any thread.

    A call returns only when no thread touches a buffer of it any more, whatever happens.

    Args:
        endpoint: Where it is.
        context: Of TLS; None: without.
        stall_s: Longest time without a byte.
        connections: Most that one call uses.
        congestion_choice: What they send with, see congestion.

    Raises:
        DaemonUnavailable: there are no threads to be had for it.

    Attributes:
        algorithm: What the last new connection sends with; empty before there was one.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        context: ssl.SSLContext | None,
        *,
        stall_s: float,
        connections: int | None = None,
        congestion_choice: str = congestion.AUTO,
    ) -> None:
        self.endpoint = endpoint
        self.algorithm = ""
        self._congestion_choice = congestion_choice
        self._context = context
        self._stall_s = stall_s
        self._parallel = connections or default_connections()
        self._lock = threading.Lock()  # guards the three below
        self._idle: list[_Line] = []
        self._busy: set[_Line] = set()
        self._closed = False
        try:
            self._threads = started_pool(self._parallel, "kvstore-data")
        except RuntimeError as error:
            raise DaemonUnavailable(f"the data port {endpoint} cannot be used: {error}") from None

    def read(self, who: Pass, slots: Slots, rooms: Sequence[memoryview], until: float = float("inf")) -> Valid:
        """Receives blocks.

        Args:
            rooms: One writable buffer for each slot, all of one length.
            until: Latest end, by time.monotonic.

        Returns:
            For each block whether its bytes are those that were asked for. Others are not to be looked at.

        Raises:
            StaleGeneration: the daemon does not know the session or what it holds (any more).
            DaemonUnavailable, DeadlineExceeded: the bytes did not come.
        """
        if not rooms:
            return np.zeros(0, dtype=np.bool_)
        calls = [
            functools.partial(self._read, who=who, slots=slots.part(start, stop), rooms=rooms[start:stop])
            for start, stop in self._in_parts(len(rooms), len(rooms[0]))
        ]
        return np.concatenate(self._side_by_side(calls, until))

    def select(self, who: Pass, query: Query, rooms: Sequence[memoryview]) -> Valid:
        """Receives the leading run of some keys that is in the daemon's pool now. Nothing is pinned afterwards.

        Args:
            query: Must fit.
            rooms: One writable buffer for each key, of the length that the query names.

        Returns:
            As read(), for the blocks of the run.

        Raises:
            As read(), and InvalidRequest: the daemon does not know these blocks, or by another length.
        """
        call = functools.partial(self._select, who=who, query=query, rooms=rooms)
        return self._on_line(call, until=float("inf"))

    def write(self, who: Pass, slots: Slots, blocks: Sequence[memoryview], until: float = float("inf")) -> None:
        """Sends blocks into slots that are reserved. When it returns they are all there, and can be committed.

        Raises:
            StaleGeneration: the daemon does not know the session or what it holds (any more).
            DaemonUnavailable, DeadlineExceeded: not all bytes have arrived, as far as is known.
        """
        if not blocks:
            return
        calls = [
            functools.partial(self._write, who=who, slots=slots.part(start, stop), blocks=blocks[start:stop])
            for start, stop in self._in_parts(len(blocks), len(blocks[0]))
        ]
        self._side_by_side(calls, until)

    def close(self) -> None:
        """Ends every connection; calls under way raise."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for line in self._busy:
                line.stream.abandon()
        for line in idle:
            line.stream.close()
        self._threads.shutdown(wait=False)

    # -- parts of a call ---------------------------------------------------------------------------------------------

    def _in_parts(self, count: int, length: int) -> list[tuple[int, int]]:
        """Where to cut blocks so that each connection has about as many bytes."""
        parts = max(1, min(self._parallel, count, count * length // _PART_BYTES))
        bounds = [count * index // parts for index in range(parts + 1)]
        return list(itertools.pairwise(bounds))

    def _side_by_side(self, calls: Sequence[Callable[[_Line], R]], until: float) -> list[R]:
        """Each on a connection of its own. All of them have ended when this returns or raises."""
        with self._beside(calls[1:], until) as others:
            first = self._on_line(calls[0], until)
        return [first, *(other.result() for other in others)]

    @contextlib.contextmanager
    def _beside(
        self, calls: Sequence[Callable[[_Line], R]], until: float
    ) -> Iterator[list[concurrent.futures.Future[R]]]:
        """Each on a connection of its own, beside what is done in the block. All of them have ended after it."""
        begun: list[concurrent.futures.Future[R]] = []
        try:
            try:
                for call in calls:
                    begun.append(self._threads.submit(self._on_line, call, until))
            except RuntimeError:  # the session has ended meanwhile
                raise DaemonUnavailable("the client was closed") from None
            yield begun
        finally:
            concurrent.futures.wait(begun)

    def _on_line(self, call: Callable[[_Line], R], until: float) -> R:
        line, is_new = self._take(until)
        while True:
            try:
                result = call(line)
            except Lost as error:
                self._drop(line)
                if is_new or self._closed:
                    raise DaemonUnavailable(f"{self.endpoint}: {error}") from error
                # It may have been closed while it rested. What was asked may be asked again.
                line, is_new = self._connect(until), True
            except BaseException:
                self._drop(line)  # there may be answers on it that nobody reads
                raise
            else:
                self._rest(line)
                return result

    def _read(self, line: _Line, who: Pass, slots: Slots, rooms: Sequence[memoryview]) -> Valid:
        length = len(rooms[0])
        steps = list(_steps(len(rooms), max(1, REQUEST_BYTES // length)))
        asked = 0
        for done, (start, stop) in enumerate(steps):
            while asked < len(steps) and asked < done + _AHEAD:
                line.ask(_request(Operation.READ, who, slots.part(*steps[asked]), length), who.secret)
                asked += 1
            line.expect(Status.OK)
            line.stream.receive_blocks(rooms[start:stop])
        return self._check(line, who, slots, length)

    def _select(self, line: _Line, who: Pass, query: Query, rooms: Sequence[memoryview]) -> Valid:
        # The first part comes with the answer; for the others there are other connections once it is known where they
        # are. Their pins end with the check on this connection, so that is the last one.
        (_, own), *parts = self._in_parts(len(rooms), query.length)
        line.ask(SelectRequest(who.session, who.generation, query, own), who.secret)
        line.expect(Status.OK)
        slots = Slots(*line.stream.receive_slots(len(rooms)))
        count = len(slots.offsets)
        if not count:
            return np.zeros(0, dtype=np.bool_)
        calls = [
            functools.partial(self._read, who=who, slots=slots.part(start, stop), rooms=rooms[start : min(stop, count)])
            for start, stop in parts
            if start < count
        ]
        with self._beside(calls, float("inf")) as others:
            line.stream.receive_blocks(rooms[: min(own, count)])
        valid = [other.result() for other in others]
        return np.concatenate([self._check(line, who, slots.part(0, own), query.length), *valid])

    def _check(self, line: _Line, who: Pass, slots: Slots, length: int) -> Valid:
        """Which slots still hold what they were granted with, after the last byte of them has come."""
        now: list[npt.NDArray[np.uint32]] = []
        for start, stop in _steps(len(slots.offsets), SLOTS_MAX):
            line.ask(_request(Operation.CHECK, who, slots.part(start, stop), length), who.secret)
            line.expect(Status.OK)
            now.append(np.frombuffer(line.stream.receive(4 * (stop - start)), dtype="<u4"))
        valid: Valid = np.concatenate(now) == np.asarray(slots.epochs, dtype=np.uint32)
        return valid

    def _write(self, line: _Line, who: Pass, slots: Slots, blocks: Sequence[memoryview]) -> None:
        length = len(blocks[0])
        for start, stop in _steps(len(blocks), max(1, REQUEST_BYTES // length)):
            line.ask(_request(Operation.WRITE, who, slots.part(start, stop), length), who.secret)
            line.expect(Status.GO)
            line.stream.send_blocks(blocks[start:stop])
            line.expect(Status.OK)

    # -- connections -------------------------------------------------------------------------------------------------

    def _take(self, until: float) -> tuple[_Line, bool]:
        """A connection, and whether it is new."""
        with self._lock:
            while self._idle:
                line = self._idle.pop()
                if time.monotonic() - line.rested_since < _FRESH_S:
                    self._busy.add(line)
                    line.stream.limit(until, self._stall_s)
                    return line, False
                line.stream.close()
        return self._connect(until), True

    def _connect(self, until: float) -> _Line:
        try:
            timeout_s = max(0.001, min(self._stall_s, until - time.monotonic()))
            connected = socket.create_connection((self.endpoint.host, self.endpoint.port), timeout_s)
        except OSError as error:
            raise DaemonUnavailable(f"the data port {self.endpoint} cannot be reached: {error}") from error
        self.algorithm = congestion.choose(connected, self._congestion_choice)
        try:
            if self._context is not None:
                connected = self._context.wrap_socket(connected, server_hostname=self.endpoint.host)
            line = _Line(connected, timeout_s)
        except (OSError, Lost) as error:
            connected.close()
            raise DaemonUnavailable(f"the data port {self.endpoint} does not answer as it should: {error}") from error
        except DeadlineExceeded:
            connected.close()
            raise
        line.stream.limit(until, self._stall_s)
        with self._lock:
            self._busy.add(line)
            closed = self._closed
        if closed:
            self._drop(line)
            raise DaemonUnavailable("the client was closed")
        return line

    def _drop(self, line: _Line) -> None:
        with self._lock:
            self._busy.discard(line)
        line.stream.close()

    def _rest(self, line: _Line) -> None:
        line.rested_since = time.monotonic()
        with self._lock:
            self._busy.discard(line)
            if not self._closed and len(self._idle) < 2 * self._parallel:
                self._idle.append(line)
                return
        line.stream.close()


def _steps(count: int, step: int) -> Iterator[tuple[int, int]]:
    """Pieces of at most `step` blocks, and never more than fit a request."""
    step = min(step, SLOTS_MAX)
    for start in range(0, count, step):
        yield start, min(count, start + step)


def _request(operation: Operation, who: Pass, slots: Slots, length: int) -> Request:
    return Request(operation, who.session, who.generation, slots.first, length, slots.offsets, slots.epochs)
