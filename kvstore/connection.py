"""The client's line to a daemon: attaches, maps the pool, notices when the daemon goes, attaches again."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

import grpc

from kvstore.arena import ArenaView
from kvstore.blocks import Namespace
from kvstore.calls import Calls, FramedCalls, GrpcCalls
from kvstore.data_link import DataLink, Pass, data_endpoint
from kvstore.endpoint import Endpoint
from kvstore.errors import (
    CallerMistake,
    ClientClosed,
    DaemonUnavailable,
    ForkedClient,
    KVStoreError,
    StaleGeneration,
    UnknownSession,
)
from kvstore.handoff import SUFFIX as HANDOFF_SUFFIX
from kvstore.handoff import receive
from kvstore.remote import RemoteArena, RemoteOptions
from kvstore.staging import Staging
from kvstore.wire.channel import open_channel
from kvstore.wire.convert import error_of
from kvstore.wire.tls import Tls
from kvstore.wire.v1 import engine_pb2, engine_pb2_grpc

Reply = TypeVar("Reply")

#: Pauses between attempts to attach. The last one keeps the promise to be back within 2 s of the daemon's return.
_PAUSES_S: Final = (0.02, 0.05, 0.1, 0.2, 0.5)
#: How much longer than its own time a select waits for a daemon that is away: until it has been called once more.
AWAY_S: Final = _PAUSES_S[-1]
_FORGET_PAUSE_S: Final = 0.2
#: Step in which page-table entries are made; between two steps the thread looks whether it should stop.
_PREFAULT_BYTES: Final = 64 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Attached:
    """One session with one life of a daemon.

    Attributes:
        arena: The mapping, or what stands in for it on another host; None where this client wants neither.
        digest: Digest of the namespace that was opened; empty where none was.
        calls: How calls within this session are made.
    """

    session: bytes
    generation: bytes
    arena: ArenaView | RemoteArena | None
    namespace: Namespace | None
    digest: bytes
    block_size: int
    gds: str
    keys_max: int
    calls: Calls


class Connection:
    """Keeps a session with the daemon at one endpoint. Safe from any thread, not over a fork.

    Args:
        patient: Whether calls wait (up to their timeout) for a daemon that is away, or fail at once.
        prefault: Whether to make page-table entries for the pool in the background, so that copies do not stop for
            faults.
        remote: What to do where the pool cannot be mapped; None: without the bytes of blocks.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        request: engine_pb2.AttachRequest,
        namespace: Namespace | None,
        *,
        token: str | None,
        timeout_s: float,
        patient: bool,
        prefault: bool,
        tls: Tls | None,
        remote: RemoteOptions | None,
    ) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self.patient = patient
        self._pid = os.getpid()
        self._request_ids = itertools.count(1)
        self._request = request
        self._namespace = namespace
        self._prefault_wanted = prefault
        self._tls = tls
        self._remote = remote
        self._staging: Staging | None = None
        self._channel = open_channel(endpoint, token, tls)
        self._stub: Any = engine_pb2_grpc.EngineStub(self._channel)
        self._grpc_calls = GrpcCalls(self._channel, endpoint)
        self._changed = threading.Condition()  # guards the fields below
        self._attached: Attached | None = None
        self._last_error: KVStoreError | None = None
        self._closed = False
        self._draining = False
        self._draining_calls: list[Callable[[], None]] = []
        self._stream: Any = None
        #: Requests that are to be forgotten, each with its session. A thread is there while there are any.
        self._given_up: list[tuple[int, Attached]] = []
        self._forgetting = False
        self._stop = threading.Event()
        self._population = threading.Event()
        self._thread = threading.Thread(target=self._keep_attached, name="kvstore-attach", daemon=True)
        self._thread.start()

    # -- calls -----------------------------------------------------------------------------------------------------

    @property
    def attached(self) -> Attached | None:
        """The session, if there is one now."""
        return self._attached

    @property
    def namespace(self) -> Namespace | None:
        """The namespace that was asked for, as it was given; also while there is no session."""
        return self._namespace

    @property
    def draining(self) -> bool:
        """Whether the daemon has said that it is stopping."""
        return self._draining

    def when_draining(self, call: Callable[[], None]) -> None:
        """As Client.when_draining."""
        self._draining_calls.append(call)

    @property
    def forked(self) -> bool:
        """Whether this is another process than the one that made the client."""
        return os.getpid() != self._pid

    def check_usable(self) -> None:
        """Raises ForkedClient or ClientClosed where no call can work any more."""
        if self.forked:
            raise ForkedClient(
                "this client was made before a fork: neither gRPC nor its session survives one. Connect in the child"
            )
        if self._closed:
            raise ClientClosed("this client was closed")

    def current(self, timeout_s: float | None = None, other_than: Attached | None = None) -> Attached:
        """The session. A patient client waits for one for up to timeout_s (None: the client's own).

        Raises:
            DaemonUnavailable: there is none.
            CallerMistake: the daemon refuses this client, and why.
        """
        self.check_usable()
        found = self._attached
        if found is not None and found is not other_than:
            return found
        with self._changed:
            if self.patient:
                self._changed.wait_for(
                    lambda: self._closed or self._refused or (self._attached not in (None, other_than)),
                    self.timeout_s if timeout_s is None else timeout_s,
                )
            self.check_usable()
            found, error = self._attached, self._last_error
        if found is not None and found is not other_than:
            return found
        if error is not None:
            raise _bare(error)
        raise DaemonUnavailable(f"no daemon answers at {self.endpoint}: start one with `kvstore serve --cpu-bytes 1GB`")

    @property
    def _refused(self) -> bool:
        """Whether the daemon is there and says no: waiting does not help."""
        return self._last_error is not None and not isinstance(self._last_error, DaemonUnavailable)

    def call(self, method: str, request: Any, attached: Attached, timeout_s: float | None = None) -> Any:
        """One call within a session, by the name of its method. Not repeated: what it names belongs to that session.

        A request with a request_id whose answer does not come is forgotten on the daemon's side, as soon as it can be
        told: what it took goes back.

        Raises:
            StaleGeneration: the session has ended on the daemon's side; a new one is being attached.
            KVStoreError: what the daemon answered.
        """
        self.check_usable()
        try:
            return attached.calls.call(method, request, self.timeout_s if timeout_s is None else timeout_s)
        except ValueError:  # of gRPC: closed by another thread between the check and the call
            self.check_usable()
            raise
        except UnknownSession as error:
            self._lose(attached)
            raise StaleGeneration("the daemon was restarted, or ended this session: attaching again") from error
        except CallerMistake:
            raise  # refused: it took nothing
        except BaseException:  # also an interrupt from the keyboard, after which nobody reads the answer
            if request_id := getattr(request, "request_id", 0):
                self.forget(request_id, attached)
            raise

    def post(self, attached: Attached, *calls: tuple[str, Any]) -> None:
        """Calls within a session whose answers nobody needs: pairs of a method and a request. What this client asks
        later comes after them.

        Raises:
            RetryLater: the daemon or the session has gone.
        """
        self.check_usable()
        try:
            attached.calls.post(calls, self.timeout_s)
        except ValueError:  # of gRPC, as in call()
            self.check_usable()
            raise

    def next_request_id(self) -> int:
        """A number for a call that takes something, see proto/kvstore/v1/engine.proto."""
        return next(self._request_ids)

    def forget(self, request_id: int, attached: Attached) -> None:
        """Gives back what a request took and what was not given back so far, in the background."""
        with self._changed:
            self._given_up.append((request_id, attached))
            if self._forgetting:
                return
            self._forgetting = True
            try:
                threading.Thread(target=self._forget, name="kvstore-forget", daemon=True).start()
            except RuntimeError:  # there is none to be had now: the next one tells of this one too
                self._forgetting = False

    def _forget(self) -> None:
        """The thread that tells the daemon, for as long as a session lives: one for all requests, since a daemon that
        hangs lets one after the other be given up.
        """
        while True:
            with self._changed:
                now = self._attached
                if now is None:
                    self._given_up.clear()
                self._given_up = [each for each in self._given_up if now is not None and each[1].session == now.session]
                told = {request_id for request_id, _ in self._given_up}
                if now is None or not told:
                    self._forgetting = False
                    return
            message = engine_pb2.ReleaseRequest(session=now.session, forget=told)
            try:
                now.calls.call("Release", message, self.timeout_s)
            except CallerMistake:
                pass  # the session has ended, and what it held with it
            except KVStoreError:
                self._stop.wait(_FORGET_PAUSE_S)
                continue
            with self._changed:
                self._given_up = [each for each in self._given_up if each[0] not in told]

    def ask(
        self,
        build: Callable[[Attached], tuple[str, Any]],
        wait_s: float = 0.0,
        away_s: float = math.inf,
    ) -> tuple[Any, Attached]:
        """One call that may be repeated: a patient client asks the next life of the daemon where this one goes away.

        Args:
            build: Gives the name of the method, and the request for a session.
            wait_s: How long the daemon may wait before it answers, on top of the deadline.
            away_s: How long a daemon that is away is waited for, where that is less than the deadline.
        """
        begun = time.monotonic()
        deadline, away_until = begun + self.timeout_s, begun + min(self.timeout_s, away_s)
        lost: Attached | None = None
        while True:
            attached = self.current(max(0.001, away_until - time.monotonic()), other_than=lost)
            method, request = build(attached)
            left = max(0.001, deadline - time.monotonic())
            try:
                return self.call(method, request, attached, left + wait_s), attached
            except (DaemonUnavailable, StaleGeneration):
                if not self.patient or time.monotonic() >= away_until:
                    raise
                lost = attached

    # -- attaching -------------------------------------------------------------------------------------------------

    def open_namespace(self, namespace: Namespace) -> Attached:
        """Opens another namespace in this and every later session.

        Raises:
            SizeMismatch, InvalidRequest, DaemonUnavailable: it cannot be opened; the one before stays.
        """
        while True:
            attached = self.current()
            settled, digest = self._open(attached.calls, attached.session, namespace, attached.block_size)
            with self._changed:
                if self._attached is attached:
                    self._namespace = namespace
                    self._attached = dataclasses.replace(attached, namespace=settled, digest=digest)
                    return self._attached

    def _open(self, calls: Calls, session: bytes, namespace: Namespace, block_size: int) -> tuple[Namespace, bytes]:
        settled = namespace.settled(block_size)
        request = engine_pb2.OpenNamespaceRequest(
            session=session,
            text=settled.identity(),
            group_bytes=settled.group_bytes,
            pool_only=not settled.copy_down,
        )
        return settled, calls.call("OpenNamespace", request, self.timeout_s).digest

    def _keep_attached(self) -> None:
        """The thread: one round for each life of the daemon."""
        attempt = 0
        while not self._stop.is_set():
            error: KVStoreError
            try:
                if self._attach_and_listen():
                    attempt = 0
                error = DaemonUnavailable(f"the daemon at {self.endpoint} has gone")
            except KVStoreError as raised:
                error = _bare(raised)
            except RuntimeError as raised:  # there are no more threads to be had: others will end
                error = DaemonUnavailable(f"cannot attach to {self.endpoint}: {raised}")
                if self._stream is not None:
                    self._stream.cancel()
            except grpc.RpcError as failure:
                error = error_of(failure, str(self.endpoint))
            with self._changed:
                self._attached = None
                self._last_error = error
                self._changed.notify_all()
            self._stop.wait(_PAUSES_S[min(attempt, len(_PAUSES_S) - 1)])
            attempt += 1

    def _attach_and_listen(self) -> bool:
        """Attaches and reads events until the stream ends. Returns whether it had got as far as a session."""
        stream = self._stub.Attach(self._request)
        with self._changed:
            if self._closed:
                stream.cancel()
                return False
            self._stream = stream
        # The stream has no deadline, as it lives as long as the session; its first event has one.
        watchdog = threading.Timer(self.timeout_s, stream.cancel)
        watchdog.daemon = True
        watchdog.start()
        try:
            welcome = next(stream).welcome
            attached = self._settle(welcome)
        except StopIteration:
            return False
        except KVStoreError:
            stream.cancel()
            raise
        finally:
            watchdog.cancel()
        with self._changed:
            self._attached = attached
            self._draining = False
            self._last_error = None
            self._changed.notify_all()
        if isinstance(attached.arena, ArenaView) and self._prefault_wanted:
            threading.Thread(
                target=self._prefault, args=(weakref.ref(attached.arena),), name="kvstore-prefault", daemon=True
            ).start()
        try:
            for event in stream:
                if event.HasField("population") and isinstance(attached.arena, ArenaView):
                    attached.arena.populated_bytes = event.population.populated_bytes
                    self._population.set()
                if event.HasField("draining"):
                    self._draining = True
                    for call in self._draining_calls:
                        call()
        except grpc.RpcError as gone:
            # The daemon has gone, or this client was closed. gRPC raises the stream itself, which this client keeps:
            # its traceback would keep this frame, and with it the mapping.
            gone.with_traceback(None)
        finally:
            if isinstance(attached.arena, RemoteArena):
                attached.arena.close()
        return True

    def _settle(self, welcome: engine_pb2.Welcome) -> Attached:
        """Maps the pool and opens the namespace."""
        calls: Calls
        arena: ArenaView | RemoteArena | None = None
        handoff = None
        # A client in a container sees the socket's folder under another name than the daemon: go by its own.
        path = self.endpoint.path + HANDOFF_SUFFIX if self.endpoint.is_unix else welcome.handoff_path
        if path and (self.endpoint.is_unix or (self.endpoint.is_loopback and os.path.exists(path))):
            handoff = receive(path, welcome.session, self.timeout_s)
            try:
                arena = view = ArenaView(handoff.pool_fd, handoff.epochs_fd, handoff.size_bytes, welcome.generation)
            except BaseException:
                handoff.connection.close()
                raise
            finally:
                os.close(handoff.pool_fd)
                os.close(handoff.epochs_fd)
            view.populated_bytes = welcome.populated_bytes
            # The connection is the session's life. It ends with the last view of the mapping, not with this object, so
            # that no slot is given to others under a reader.
            view.on_unmapped(handoff.connection.close)
        else:
            arena = self._open_remote(welcome)
        calls = self._grpc_calls if handoff is None else FramedCalls(handoff.connection, self.endpoint)
        namespace, digest = self._namespace, b""
        if namespace is not None:
            try:
                namespace, digest = self._open(calls, welcome.session, namespace, welcome.block_size)
            except BaseException:
                # Nobody has seen the mapping. The error's traceback may keep it for long, and the session with it.
                if handoff is not None:
                    handoff.connection.close()
                elif isinstance(arena, RemoteArena):
                    arena.close()
                raise
        return Attached(
            session=welcome.session,
            generation=welcome.generation,
            arena=arena,
            namespace=namespace,
            digest=digest,
            block_size=welcome.block_size,
            gds=welcome.gds,
            keys_max=welcome.keys_max,
            calls=calls,
        )

    def _open_remote(self, welcome: engine_pb2.Welcome) -> RemoteArena | None:
        """What stands in for the mapping: memory of this client, which lives as long as the client does."""
        where = data_endpoint(welcome.data_address, self.endpoint)
        if self._remote is None or where is None:
            return None
        if self._staging is None:
            self._staging = Staging(self._remote.staging_bytes)
        link = DataLink(
            where,
            self._tls.client_context() if self._tls is not None else None,
            stall_s=self.timeout_s,
            connections=self._remote.connections,
            congestion_choice=self._remote.congestion_choice,
        )
        who = Pass(welcome.session, welcome.generation, welcome.data_secret)
        return RemoteArena(self._staging, link, who, self._grpc_calls.settle)

    def _prefault(self, arena_ref: weakref.ref[ArenaView]) -> None:
        """The thread that makes page-table entries, as far as the pool is populated."""
        done = 0
        while not self._stop.is_set():
            arena = arena_ref()
            if arena is None or done >= arena.size_bytes:
                return
            self._population.clear()
            length = min(_PREFAULT_BYTES, arena.populated_bytes - done)
            if length > 0:
                try:
                    arena.prefault(done, length)
                except MemoryError:
                    return  # copies will fault the pages in, or fail, by themselves
                done += length
            del arena
            if length <= 0:
                self._population.wait(timeout=1.0)

    def _lose(self, attached: Attached) -> None:
        """The daemon does not know this session: drop it and attach again."""
        with self._changed:
            if self._attached is attached:
                self._attached = None
                self._last_error = None
                if self._stream is not None:
                    self._stream.cancel()

    def close(self) -> None:
        """Ends the session once nothing touches the mapping any more. Calls after this raise ClientClosed."""
        if self.forked:
            self._closed = True
            return  # the parent's channel and threads are not this process's to end, and may have held the locks
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._attached = None
            stream = self._stream
            self._changed.notify_all()
        self._stop.set()
        self._population.set()
        if stream is not None:
            stream.cancel()
        self._thread.join(self.timeout_s)
        self._channel.close()


def _bare(error: KVStoreError) -> KVStoreError:
    """The same error without its history: the frames in there would keep a mapping, and with it a session, for as long
    as the error is kept.
    """
    return type(error)(*error.args)
