"""The data port: a TCP listener beside gRPC that sends and receives the bytes of blocks, see data_wire.

Threads
    One accepts, and each connection has one of its own, which sleeps in the kernel while bytes move. What they may
    touch is decided on the event loop, which owns the books: each request goes there once, and each transfer that
    writes or has pinned something tells it when it is over.
Bounds
    CONNECTIONS_MAX connections; HELLO_S for the first request and for the rest of one that has begun; IDLE_S between
    two requests; STALL_S without a byte. What is not a request ends the connection, and is counted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from secrets import token_bytes
from typing import Any, Final, TypeVar

import numpy as np

from kvstore import congestion
from kvstore.arena import Epochs, Offsets
from kvstore.backing import SharedMemory
from kvstore.data_wire import (
    HELLO,
    MAGIC,
    NONCE_BYTES,
    REQUEST_HEAD_BYTES,
    Garbage,
    Lost,
    Operation,
    Request,
    Sealed,
    SelectRequest,
    Status,
    Stream,
    body_bytes,
    pack_reply,
    pack_slots,
    parse_request,
)
from kvstore.endpoint import Endpoint, EndpointKind
from kvstore.errors import ConfigError, DeadlineExceeded, InvalidRequest, KVStoreError, StaleGeneration
from kvstore.hierarchy import Hierarchy
from kvstore.leases import Session
from kvstore.log import RateLimited, get_logger

#: Each costs a thread that sleeps and two descriptors; a client has a handful, a host tens of clients.
CONNECTIONS_MAX: Final = 256
HELLO_S: Final = 10.0
IDLE_S: Final = 120.0
STALL_S: Final = 10.0
#: How long a thread waits for the event loop, which is never busy for long.
_LOOP_S: Final = 30.0
_CLOSE_S: Final = 5.0
_BACKLOG: Final = 64
_NO_OFFSETS: Final[Offsets] = np.zeros(0, dtype=np.uint64)
_NO_EPOCHS: Final[Epochs] = np.zeros(0, dtype=np.uint32)

R = TypeVar("R")


class _Refused(Exception):
    """The answer is no, and the connection goes on."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status


class DataPort:
    """See the module. Made, opened and closed on the event loop.

    Args:
        generation: Of this life of the daemon.
        context: Of TLS; None where the control listener has none.
        congestion_choice: What connections send with, see congestion.

    Attributes:
        address: Where it listens, once open.
        counts: What happened; only ever grows.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        memory: SharedMemory,
        generation: bytes,
        endpoint: Endpoint,
        context: ssl.SSLContext | None,
        *,
        congestion_choice: str = congestion.AUTO,
        connections_max: int = CONNECTIONS_MAX,
        idle_s: float = IDLE_S,
        stall_s: float = STALL_S,
    ) -> None:
        self._hierarchy = hierarchy
        self._memory = memory
        self._generation = generation
        self._endpoint = endpoint
        self._context = context
        self._congestion_choice = congestion_choice
        self._connections_max = connections_max
        self._idle_s = idle_s
        self._stall_s = stall_s
        self._log = RateLimited(get_logger("kvstore.data_port"))
        self._sends_files = True
        self._lock = threading.Lock()  # guards the four below
        self._connections: dict[threading.Thread, Stream | None] = {}
        self._congestion: Counter[str] = Counter()
        self._closing = False
        self.counts: Counter[str] = Counter()

    # -- life --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Listens.

        Raises:
            ConfigError: the address cannot be had.
        """
        self._loop = asyncio.get_running_loop()
        endpoint = self._endpoint
        try:
            ((family, *_, place), *_) = socket.getaddrinfo(
                endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            self._listener = socket.create_server(place[:2], family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(f"--data-listen {endpoint}: cannot listen there: {error}") from error
        self.address = Endpoint(EndpointKind.TCP, host=endpoint.host, port=self._listener.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept, name="kvstore-data-accept", daemon=True)
        self._acceptor.start()

    async def close(self) -> None:
        """Ends every connection and waits for their threads."""
        with self._lock:
            self._closing = True
            threads = [self._acceptor, *self._connections]
            for stream in self._connections.values():
                if stream is not None:
                    stream.abandon()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
        until = time.monotonic() + _CLOSE_S
        for thread in threads:
            # On a thread: those that end have something to tell the loop.
            await asyncio.to_thread(thread.join, max(0.0, until - time.monotonic()))
        self._listener.close()

    def stats(self) -> dict[str, Any]:
        """Figures for `kvstore stats`."""
        with self._lock:
            return {
                "listen": str(self.address),
                "tls": self._context is not None,
                "connections": len(self._connections),
                "congestion": dict(+self._congestion),
                "events": {
                    "read": 0,
                    "select": 0,
                    "write": 0,
                    "garbage": 0,
                    **{name: value for name, value in self.counts.items() if not name.endswith("_bytes")},
                },
                "sent_bytes": self.counts["sent_bytes"],
                "received_bytes": self.counts["received_bytes"],
            }

    # -- threads -----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connected, address = self._listener.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(0.1)  # out of descriptors, most likely: others will end
                continue
            thread = threading.Thread(target=self._serve, args=(connected, address), name="kvstore-data", daemon=True)
            with self._lock:
                refused = self._closing or len(self._connections) >= self._connections_max
                if not refused:
                    self._connections[thread] = None
            if not refused:
                try:
                    thread.start()
                    continue
                except RuntimeError:  # there are no more threads to be had: others will end
                    with self._lock:
                        del self._connections[thread]
            self._count("over_limit")
            connected.close()

    def _serve(self, connected: socket.socket, address: Any) -> None:
        algorithm = congestion.choose(connected, self._congestion_choice)
        self._use(algorithm, 1)
        try:
            if self._context is not None:
                connected.settimeout(HELLO_S)
                connected = self._context.wrap_socket(connected, server_side=True)
            stream = Stream(connected, self._stall_s)
            with self._lock:
                if self._closing:
                    return
                self._connections[threading.current_thread()] = stream
            _Connection(self, stream).run()
        except Garbage as error:
            self._count("garbage")
            self._log.warning("garbage on the data port", peer=str(address[0]), why=str(error))
        except DeadlineExceeded:
            self._count("timeouts")
        except (Lost, OSError):
            self._count("broken")  # also a handshake that failed
        finally:
            self._use(algorithm, -1)
            with self._lock:
                del self._connections[threading.current_thread()]
            connected.close()

    def _use(self, algorithm: str, connections: int) -> None:
        with self._lock:
            self._congestion[algorithm] += connections

    def _count(self, event: str, amount: int = 1) -> None:
        with self._lock:
            self.counts[event] += amount

    def _on_loop(self, call: Callable[[], R]) -> R:
        """Calls something where the books are."""
        done: concurrent.futures.Future[R] = concurrent.futures.Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError:
            raise Lost("the daemon has stopped") from None
        try:
            return done.result(_LOOP_S)
        except concurrent.futures.TimeoutError:
            if done.cancel():
                raise Lost("the daemon is too busy") from None
            return done.result()

    def _tell_loop(self, call: Callable[[], object]) -> None:
        """Calls something where the books are, before whatever is asked of them from now on."""
        with contextlib.suppress(RuntimeError):  # the daemon has stopped, and its books are closed
            self._loop.call_soon_threadsafe(call)

    # -- on the loop -------------------------------------------------------------------------------------------------

    def _asker(self, sealed: Sealed, nonce: bytes, number: int) -> Session:
        """Whose request it is."""
        request = sealed.request
        try:
            session = self._hierarchy.sessions.session(request.session)
        except KVStoreError:
            session = None
        # One answer to both, so that nobody learns which sessions there are.
        if session is None or not sealed.is_from(session.data_secret, nonce, number):
            raise _Refused(Status.STALE, "no such session, or not its secret")
        if request.generation != self._generation + session.group.id:
            raise _Refused(Status.STALE, "these slots are of another life of the pool")
        return session

    def _admit(self, sealed: Sealed, request: Request, nonce: bytes, number: int) -> Session:
        """Who asks about slots, if he may. A transfer that writes has begun when this returns."""
        session = self._asker(sealed, nonce, number)
        arrivals = self._hierarchy.arrivals
        try:
            if request.operation is Operation.READ:
                arrivals.check_readable(session, request.offsets, request.epochs, request.end)
            elif request.operation is Operation.WRITE:
                arrivals.begin(session, request.offsets, request.epochs, request.first, request.end)
        except StaleGeneration as error:
            raise _Refused(Status.STALE, str(error)) from None
        except InvalidRequest as error:
            raise _Refused(Status.REFUSED, str(error)) from None
        return session

    def _pin(self, sealed: Sealed, request: SelectRequest, nonce: bytes, number: int) -> _Pinned:
        """Pins what was asked for by its keys."""
        session = self._asker(sealed, nonce, number)
        query, hierarchy = request.query, self._hierarchy
        try:
            keyspace = hierarchy.namespaces.keyspace(query.namespace, query.group)
        except KVStoreError as error:
            raise _Refused(Status.REFUSED, str(error)) from None
        if keyspace.block_bytes != query.length:
            raise _Refused(Status.REFUSED, f"blocks of {query.length} bytes, and they have {keyspace.block_bytes}")
        lease = hierarchy.acquire(session, keyspace, query.keys, whole=query.whole)
        if lease is None:
            return _Pinned(session, 0, _NO_OFFSETS, _NO_EPOCHS)
        return _Pinned(session, lease.id, *hierarchy.locations(lease))


@dataclasses.dataclass(frozen=True, slots=True)
class _Pinned:
    """What a SELECT pinned. lease 0: nothing."""

    session: Session
    lease: int
    offsets: Offsets
    epochs: Epochs


class _Connection:
    """One connection, on its thread."""

    def __init__(self, port: DataPort, stream: Stream) -> None:
        self._port = port
        self._stream = stream
        self._nonce = token_bytes(NONCE_BYTES)
        self._numbers = 0
        self._known = False
        self._session: Session | None = None  # whose the last request was
        self._pinned: _Pinned | None = None  # what the last SELECT pinned, if it has not ended

    def run(self) -> None:
        """Serves until the other side has gone, or is not worth it."""
        try:
            self._stream.send(HELLO.pack(MAGIC, self._nonce))
            while (sealed := self._next()) is not None:
                self._answer(sealed)
        finally:
            self._unpin()

    def _answer(self, sealed: Sealed) -> None:
        port, request = self._port, sealed.request
        try:
            if isinstance(request, SelectRequest):
                self._unpin()
                # Kept before anything is looked at, so that it ends whatever happens.
                pin = functools.partial(port._pin, sealed, request, self._nonce, self._numbers - 1)
                self._pinned = pinned = port._on_loop(pin)
                session = pinned.session
            else:
                admit = functools.partial(port._admit, sealed, request, self._nonce, self._numbers - 1)
                session = self._checked(sealed) or port._on_loop(admit)
        except _Refused as refused:
            port._count(f"refused_{refused.status.name.lower()}")
            self._stream.limit(stall_s=port._stall_s)
            self._stream.send(pack_reply(refused.status, str(refused)))
            if not self._known:
                raise Garbage("the first request was refused") from None
            return
        self._known = True
        self._session = session
        self._stream.limit(stall_s=port._stall_s)
        if isinstance(request, SelectRequest):
            self._select(request, pinned)
        elif request.operation is Operation.CHECK:
            self._check(request)
        elif request.operation is Operation.READ:
            self._send(request, session)
        else:
            self._receive(request, session)

    def _unpin(self) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned is not None and pinned.lease:
            hierarchy = self._port._hierarchy
            self._port._tell_loop(lambda: hierarchy.release(pinned.session, [pinned.lease]))

    def _checked(self, sealed: Sealed) -> Session | None:
        """Who asks for epochs after bytes that he was sent here just now. That needs nothing of the loop, and a way
        there and back takes as long as a block. None: the loop is to judge.
        """
        request, session = sealed.request, self._session
        if request.operation is not Operation.CHECK or session is None or session.ended:
            return None
        same = request.session == session.id and request.generation == self._port._generation + session.group.id
        return session if same and sealed.is_from(session.data_secret, self._nonce, self._numbers - 1) else None

    def _next(self) -> Sealed | None:
        """The next request; None where the other side has ended the connection between two."""
        begin = self._port._idle_s if self._known else HELLO_S
        self._stream.limit(stall_s=begin)
        head = bytearray(REQUEST_HEAD_BYTES)
        view = memoryview(head)
        try:
            got = self._stream.receive_some(view)
        except Lost:
            return None
        self._stream.limit(time.monotonic() + HELLO_S, HELLO_S)
        self._stream.receive_into(view[got:])
        sealed = parse_request(bytes(head), self._stream.receive(body_bytes(bytes(head))))
        self._numbers += 1
        return sealed

    def _check(self, request: Request) -> None:
        # Epochs may be read from any thread: the loop only ever adds to them.
        epochs = self._port._hierarchy.arrivals.epochs_of(request.offsets)
        # Before the answer, after which the other side may ask what comes after the end of its pins.
        self._unpin()
        self._stream.send(pack_reply(Status.OK) + np.maximum(epochs, 0).astype("<u4").tobytes())

    def _select(self, request: SelectRequest, pinned: _Pinned) -> None:
        sent = pinned.offsets[: request.room].tolist()
        self._stream.send(pack_reply(Status.OK) + pack_slots(pinned.offsets, pinned.epochs), more=bool(sent))
        self._send_runs(pinned.session, sent, 0, request.query.length)
        self._port._count("select")

    def _send(self, request: Request, session: Session) -> None:
        self._stream.send(pack_reply(Status.OK), more=True)
        self._send_runs(session, request.offsets, request.first, request.length)
        self._port._count("read")

    def _send_runs(self, session: Session, offsets: Sequence[int], first: int, length: int) -> None:
        for start, run_bytes in _runs(offsets, first, length):
            if session.ended:
                raise Lost("the session has ended")
            self._send_run(start, run_bytes)
        self._port._count("sent_bytes", length * len(offsets))

    def _send_run(self, offset: int, length: int) -> None:
        port = self._port
        if self._stream.takes_files and port._sends_files:
            try:
                self._stream.send_file(port._memory.fd, offset, length)
                return
            except OSError:
                port._sends_files = False  # hugetlb pages cannot be handed on
        with port._memory.buffer[offset : offset + length] as view:
            self._stream.send(view)

    def _receive(self, request: Request, session: Session) -> None:
        port = self._port
        received = 0
        try:
            self._stream.send(pack_reply(Status.GO))
            for offset, length in _runs(request.offsets, request.first, request.length):
                if session.ended:
                    raise Lost("the session has ended")
                with port._memory.buffer[offset : offset + length] as room:
                    self._stream.receive_into(room)
                received += length // request.length if request.length else 0
        finally:
            # Told and not asked, however busy the loop is: what it does not hear of would be written to for ever.
            arrivals = port._hierarchy.arrivals
            port._tell_loop(lambda: arrivals.finish(request.offsets, request.first, request.end, received=received))
        port._count("write")
        port._count("received_bytes", request.length * len(request.offsets))
        self._stream.send(pack_reply(Status.OK))


def _runs(offsets: Sequence[int], first: int, length: int) -> Iterator[tuple[int, int]]:
    """Where bytes of blocks lie, and how many: what is side by side is one run."""
    start, end = -1, -1
    for offset in offsets:
        begin = offset + first
        if begin != end:
            if end >= 0:
                yield start, end - start
            start = begin
        end = begin + length
    if end >= 0:
        yield start, end - start
