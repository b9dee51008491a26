"""gRPC servicers: each method reads a message, asks the hierarchy, writes a message. No decisions.

Everything runs on the daemon's event loop, which owns the hierarchy, so a method that does not await is one step.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Final

import numpy as np

from kvstore.begun import in_task
from kvstore.blocks import DIGEST_BYTES
from kvstore.directory import Keyspace
from kvstore.errors import AccessDenied, InvalidRequest, KVStoreError, LimitExceeded
from kvstore.hierarchy import Hierarchy
from kvstore.journal import Change
from kvstore.leases import Lease, Session
from kvstore.listing import list_blocks
from kvstore.log import RateLimited, get_logger
from kvstore.pool import Shortfall
from kvstore.prefetch import prefetch
from kvstore.tier import Held
from kvstore.wire.convert import ERROR_KEY, TOKEN_KEY, status_of, unpack_epochs, unpack_offsets
from kvstore.wire.frames import METHODS
from kvstore.wire.v1 import admin_pb2, admin_pb2_grpc, engine_pb2, engine_pb2_grpc

#: Blocks that an operator's call removes before it lets others run.
_STEP_BLOCKS: Final = 2048
_LIST_MAX: Final = 10_000
_SHORTFALLS: Final = {
    None: engine_pb2.SHORTFALL_NONE,
    Shortfall.PINNED: engine_pb2.SHORTFALL_PINNED,
    Shortfall.SHARE: engine_pb2.SHORTFALL_SHARE,
    Shortfall.POPULATING: engine_pb2.SHORTFALL_POPULATING,
    Shortfall.TOO_LARGE: engine_pb2.SHORTFALL_TOO_LARGE,
    Shortfall.DRAINING: engine_pb2.SHORTFALL_DRAINING,
    Shortfall.COPYING: engine_pb2.SHORTFALL_COPYING,
}

#: Changes that end a wait of Watch.
_WANTED: Final = {
    engine_pb2.WATCH_FOR_ANYTHING: None,
    engine_pb2.WATCH_FOR_COMING: Change.CAME,
    engine_pb2.WATCH_FOR_GOING: Change.GONE,
}
#: For the offset of a block that is not in the pool.
_NOWHERE: Final = (1 << 64) - 1

Method = Callable[[Any, Any, Any], Awaitable[Any]]


class Gate:
    """What every call passes: the token where it came over TCP, counters, and the translation of errors.

    Attributes:
        calls: Calls by method.
        seconds: Time that they took, by method.
        errors: Failed calls by the name of their error.
    """

    def __init__(self, token: str | None) -> None:
        self._token = f"Bearer {token}".encode() if token is not None else None
        self._log = RateLimited(get_logger("kvstore.service"))
        self.calls: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self.errors: Counter[str] = Counter()

    def check(self, context: Any) -> None:
        """Raises AccessDenied where a TCP peer has no token or a wrong one. The mode of a Unix socket is its own
        gate.
        """
        if self._token is None or context.peer().startswith("unix:"):
            return
        for key, value in context.invocation_metadata() or ():
            if key == TOKEN_KEY and hmac.compare_digest(str(value).encode(), self._token):
                return
        # Its port is another one with each connection.
        host = context.peer().rpartition(":")[0]
        self._log.warning("refused a call without the daemon's token", key=host, peer=host)
        raise AccessDenied("this listener needs the daemon's token: --token-file on the command line, token= in Python")

    def timed(self, method: str) -> _Timed:
        """Counts a call, and the time until it is answered: for a with statement."""
        self.calls[method] += 1
        return _Timed(self.seconds, method)

    def count_error(self, error: KVStoreError) -> None:
        """Counts a call that failed."""
        self.errors[type(error).__name__] += 1

    async def refuse(self, context: Any, error: KVStoreError) -> None:
        """Answers with an error. Does not return."""
        self.count_error(error)
        await context.abort(status_of(error), str(error), ((ERROR_KEY, type(error).__name__),))


class _Timed:
    """Adds the time that a block takes. No generator makes it, which would take as long as the call it is for."""

    __slots__ = ("_began", "_name", "_seconds")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds = seconds
        self._name = name

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] += time.perf_counter() - self._began


class _Servicer:
    def __init__(self, gate: Gate) -> None:
        self.gate = gate


def _method(function: Method) -> Method:
    """Puts a method behind the gate."""
    name = function.__name__

    @functools.wraps(function)
    async def gated(self: _Servicer, request: Any, context: Any) -> Any:
        with self.gate.timed(name):
            try:
                self.gate.check(context)
                return await function(self, request, context)
            except KVStoreError as error:
                return await self.gate.refuse(context, error)

    return gated


#: Methods that are mostly over without waiting for anything, and that come to in_task() before they do.
_AT_ONCE: Final[set[Method]] = set()


def _at_once(method: Method) -> Method:
    """Marks one of them."""
    _AT_ONCE.add(method.__wrapped__)  # type: ignore[attr-defined]
    return method


def local_methods(*servicers: _Servicer) -> dict[str, Callable[[Any], Awaitable[Any]]]:
    """Methods by name for a peer that the mode of a Unix socket has let in: counted, past the token, without gRPC."""

    def local(servicer: _Servicer, name: str, function: Method) -> Callable[[Any], Awaitable[Any]]:
        async def call(request: Any) -> Any:
            if function not in _AT_ONCE:
                await in_task()
            with servicer.gate.timed(name):
                return await function(servicer, request, None)

        return call

    return {
        name: local(servicer, name, method.__wrapped__)
        for servicer in servicers
        for name in METHODS
        if (method := getattr(type(servicer), name, None)) is not None and hasattr(method, "__wrapped__")
    }


class EngineService(_Servicer, engine_pb2_grpc.EngineServicer):
    """The engine face; see proto/kvstore/v1/engine.proto for what each method promises.

    Args:
        handoff_path: Where clients of this host get the mapping; empty where no listener is a Unix socket.
        data_address: Where bytes travel for the others; empty where no listener is on TCP.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        gate: Gate,
        *,
        generation: bytes,
        block_size: int,
        gds: str,
        handoff_path: str,
        keys_max: int,
        sessions_max: int,
        wait_s_max: float,
        data_address: Callable[[], str],
    ) -> None:
        super().__init__(gate)
        self._hierarchy = hierarchy
        self._data_address = data_address
        self._generation = generation
        self._gds = gds
        self._block_size = block_size
        self._handoff_path = handoff_path
        self._keys_max = keys_max
        self._sessions_max = sessions_max
        self._wait_s_max = wait_s_max
        self._news: set[asyncio.Event] = set()

    # -- sessions --------------------------------------------------------------------------------------------------

    async def Attach(self, request: engine_pb2.AttachRequest, context: Any) -> AsyncIterator[engine_pb2.AttachEvent]:
        self.gate.calls["Attach"] += 1
        try:
            self.gate.check(context)
            if len(self._hierarchy.sessions) >= self._sessions_max:
                raise LimitExceeded(f"{self._sessions_max} sessions are attached (sessions_max)")
            session = self._hierarchy.sessions.attach(
                request.client_name, request.pid, request.group, request.share_bytes
            )
        except KVStoreError as error:
            await self.gate.refuse(context, error)
            return
        news = asyncio.Event()
        self._news.add(news)
        arena = self._hierarchy.arena
        # Clients make page-table entries for what is populated, which would give retired granules their memory again.
        told, draining = 0 if arena.retired_granules else arena.populated_bytes, False
        try:
            yield engine_pb2.AttachEvent(
                welcome=engine_pb2.Welcome(
                    session=session.id,
                    generation=self._generation + session.group.id,
                    pool_bytes=arena.size_bytes,
                    handoff_path=self._handoff_path,
                    block_size=self._block_size,
                    keys_max=self._keys_max,
                    populated_bytes=told,
                    data_address=self._data_address(),
                    data_secret=session.data_secret,
                    gds=self._gds,
                )
            )
            while not session.ended:
                await news.wait()
                news.clear()
                if arena.populated_bytes != told and not arena.retired_granules:
                    told = arena.populated_bytes
                    yield engine_pb2.AttachEvent(population=engine_pb2.Population(populated_bytes=told))
                if self._hierarchy.draining and not draining:
                    draining = True
                    yield engine_pb2.AttachEvent(draining=engine_pb2.Draining(reason="the daemon is stopping"))
        finally:
            self._news.discard(news)
            # A client that has the mapping may still be copying: its handoff connection is its life, not this stream.
            if not session.mapped:
                self._hierarchy.end_session(session)

    def tell(self) -> None:
        """Lets every Attach stream look for news: population, draining."""
        for news in self._news:
            news.set()

    def mapping_opened(self, session_id: bytes) -> bool:
        """A client asks for the mapping; False where its session is not known."""
        try:
            session = self._hierarchy.sessions.session(session_id)
        except KVStoreError:
            return False
        first, session.mapped = not session.mapped, True
        session.group.mapped = True
        if first:
            self._hierarchy.arena.opened_by(session_id)
        return first

    def mapping_closed(self, session_id: bytes) -> None:
        """That client has ended or given the mapping up."""
        self._hierarchy.arena.closed_by(session_id)
        try:
            session = self._hierarchy.sessions.session(session_id)
        except KVStoreError:
            return
        self._hierarchy.end_session(session)
        self.tell()

    @_at_once
    @_method
    async def OpenNamespace(self, request: engine_pb2.OpenNamespaceRequest, context: Any) -> Any:
        self._hierarchy.sessions.session(request.session)
        entry = self._hierarchy.namespaces.open(request.text, request.group_bytes, pool_only=request.pool_only)
        return engine_pb2.OpenNamespaceReply(digest=entry.digest)

    # -- reading ---------------------------------------------------------------------------------------------------

    @_at_once
    @_method
    async def Lookup(self, request: engine_pb2.LookupRequest, context: Any) -> Any:
        self._hierarchy.sessions.session(request.session)
        self._check_count(len(request.keys))
        keyspace = self._hierarchy.namespaces.keyspace(request.namespace, request.group)
        return engine_pb2.LookupReply(available=await self._hierarchy.available(keyspace, request.keys))

    @_method
    async def Stat(self, request: engine_pb2.StatRequest, context: Any) -> Any:
        _, keyspace = self._session_and_keyspace(request.session, request.namespace, request.group)
        self._check_count(len(request.keys))
        present = await self._hierarchy.present(keyspace, request.keys)
        return engine_pb2.StatReply(present=bytes(present), block_bytes=keyspace.block_bytes)

    @_at_once
    @_method
    async def Acquire(self, request: engine_pb2.AcquireRequest, context: Any) -> Any:
        hierarchy = self._hierarchy
        session = hierarchy.sessions.session(request.session)
        # Each access to a field of a message makes an object, and a slice takes half as long as what iterates over it.
        queries = [(query, query.keys[:]) for query in request.queries[:]]
        self._check_count(sum([len(keys) for _, keys in queries]))
        self._check_wanted(session, request.request_id)
        # Every group is looked up before the first pin is taken, so that a bad query leaves nothing held.
        keyspaces = [hierarchy.namespaces.keyspace(request.namespace, query.group) for query, _ in queries]
        entry = keyspaces[0].namespace if keyspaces else None
        if entry is not None and 0 < request.token_s < math.inf:
            entry.token_s = request.token_s
        paths: dict[str, int] = {}
        reply = engine_pb2.AcquireReply(generation=self._generation + session.group.id)
        for keyspace, (query, keys) in zip(keyspaces, queries, strict=True):
            await self._acquire(session, keyspace, query, keys, request, reply.grants, paths)
        if paths:
            reply.paths.extend(paths)
        if entry is not None and entry.token_s:
            reply.token_s = entry.token_s
        return reply

    async def _acquire(
        self,
        session: Session,
        keyspace: Keyspace,
        query: engine_pb2.Query,
        keys: list[bytes],
        request: engine_pb2.AcquireRequest,
        grants: Any,
        paths: dict[str, int],
    ) -> None:
        hierarchy = self._hierarchy
        lease, pending, number, places = await hierarchy.acquire_or_promote(
            session,
            keyspace,
            keys,
            request.request_id,
            from_peer=request.from_peer,
            extents_min=query.extents_min if session.mapped else 0,
        )
        grant = grants.add()
        self._fill(grant, lease, pending)
        if number:
            grant.extents_lease = number
            grant.extents.extend(_extents(enumerate(places, grant.ready), paths))
            grant.below_s = hierarchy.extents_s(session, number) or 0.0
        if pending:
            coming = keys[grant.ready : grant.ready + pending]
            grant.pending_from = hierarchy.coming_from(keyspace, coming)
            grant.below_s = hierarchy.transfers.coming_s(keyspace, coming) or 0.0

    @_method
    async def Select(self, request: engine_pb2.SelectRequest, context: Any) -> Any:
        session, keyspace = self._session_and_keyspace(request.session, request.namespace, request.query.group)
        keys = request.query.keys[:]
        self._check_count(len(keys))
        self._check_wanted(session, request.request_id)
        lease = await self._hierarchy.select(
            session,
            keyspace,
            keys,
            drop=request.drop,
            wait_s=self._wait_s(request.wait_ms),
            request_id=request.request_id,
        )
        reply = engine_pb2.SelectReply(generation=self._generation + session.group.id)
        self._fill(reply.grant, lease)
        return reply

    @_at_once
    @_method
    async def Release(self, request: engine_pb2.ReleaseRequest, context: Any) -> Any:
        if request.remove:
            await in_task()
        session = self._hierarchy.sessions.session(request.session)
        for request_id in request.forget[:]:
            self._hierarchy.forget(session, request_id)
        leases = request.leases[:]
        if request.remove:
            released, removed = await self._hierarchy.confirm(session, leases, hold=request.hold)
        else:
            released, removed = self._hierarchy.release(session, leases)
        released += self._hierarchy.extents.release(session, leases)
        return engine_pb2.ReleaseReply(released=released, removed=removed)

    @_method
    async def LeaseExtents(self, request: engine_pb2.LeaseExtentsRequest, context: Any) -> Any:
        session, keyspace = self._session_and_keyspace(request.session, request.namespace, request.group)
        self._check_count(len(request.keys))
        self._check_wanted(session, request.request_id)
        if not session.mapped:
            raise InvalidRequest("files can be read by clients on this host only, which have the pool's mapping")
        lease, places = await self._hierarchy.extents.lease(session, keyspace, list(request.keys), request.request_id)
        paths: dict[str, int] = {}
        extents = _extents(enumerate(places), paths)
        return engine_pb2.LeaseExtentsReply(
            generation=self._generation + session.group.id, lease=lease, paths=list(paths), extents=extents
        )

    @_method
    async def Watch(self, request: engine_pb2.WatchRequest, context: Any) -> Any:
        session, keyspace = self._session_and_keyspace(request.session, request.namespace, request.group)
        if request.follow:
            return await self._follow(session, keyspace, request)
        blocks = await self._hierarchy.watches.watch(
            session, keyspace, request.seen, limit=self._keys_max, wait_s=self._wait_s(request.wait_ms)
        )
        return engine_pb2.WatchReply(
            changes=keyspace.changes,
            keys=[block.key for block in blocks],
            claimed=bytes(bool(block.claim) for block in blocks),
        )

    async def _follow(self, session: Session, keyspace: Keyspace, request: engine_pb2.WatchRequest) -> Any:
        whole, keys = await self._hierarchy.watches.follow(
            session,
            keyspace,
            request.seen,
            limit=self._keys_max,
            wait_s=self._wait_s(request.wait_ms),
            wanted=_WANTED[request.wanted],
            kinds=request.kinds,
        )
        journal = keyspace.journal
        assert journal is not None
        listed = [key for key in keys if key in journal.keys]
        blocks = [keyspace.blocks.get(key) for key in listed]
        offsets = np.array([_NOWHERE if block is None else block.offset for block in blocks], dtype="<u8")
        here = offsets != _NOWHERE
        epochs = np.zeros(len(blocks), dtype="<u4")
        epochs[here] = self._hierarchy.arena.epochs_of(offsets[here])
        return engine_pb2.WatchReply(
            changes=journal.position,
            keys=listed,
            claimed=bytes(block is not None and bool(block.claim) for block in blocks),
            whole=whole,
            gone=[key for key in keys if key not in journal.keys],
            offsets=offsets.tobytes(),
            epochs=epochs.tobytes(),
        )

    # -- writing ---------------------------------------------------------------------------------------------------

    @_at_once
    @_method
    async def Reserve(self, request: engine_pb2.ReserveRequest, context: Any) -> Any:
        session, keyspace = self._session_and_keyspace(request.session, request.namespace, request.group)
        self._check_count(max(request.count, len(request.keys)))
        exists = bytes(map(keyspace.blocks.__contains__, request.keys))
        count = len(exists) - sum(exists) if exists else request.count
        self._check_wanted(session, request.request_id)
        got = await self._hierarchy.reserve_within(
            session, keyspace, count, self._wait_s(request.wait_ms), request.request_id
        )
        offsets = np.array(got.offsets, dtype="<u8")
        return engine_pb2.ReserveReply(
            generation=self._generation + session.group.id,
            offsets=offsets.tobytes(),
            epochs=self._hierarchy.arena.epochs_of(offsets).tobytes(),
            shortfall=_SHORTFALLS[got.shortfall],
            exists=exists,
        )

    @_at_once
    @_method
    async def Commit(self, request: engine_pb2.CommitRequest, context: Any) -> Any:
        session, keyspace = self._session_and_keyspace(request.session, request.namespace, request.group)
        self._check_count(len(request.keys))
        outcomes = self._hierarchy.commit(
            session,
            keyspace,
            unpack_offsets(request.offsets),
            request.keys,
            request.parent,
            unpack_epochs(request.epochs),
            arrived=not session.group.mapped,
            keep=request.keep,
        )
        return engine_pb2.CommitReply(outcomes=bytes(outcomes))

    @_at_once
    @_method
    async def Abort(self, request: engine_pb2.AbortRequest, context: Any) -> Any:
        session = self._hierarchy.sessions.session(request.session)
        return engine_pb2.AbortReply(
            returned=self._hierarchy.abort(session, unpack_offsets(request.offsets), unpack_epochs(request.epochs))
        )

    @_method
    async def Delete(self, request: engine_pb2.DeleteRequest, context: Any) -> Any:
        _, keyspace = self._session_and_keyspace(request.session, request.namespace, request.group)
        self._check_count(len(request.keys))
        removed = await self._hierarchy.delete_everywhere(keyspace, request.keys, from_peer=request.from_peer)
        return engine_pb2.DeleteReply(removed=removed)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _session_and_keyspace(self, session: bytes, namespace: bytes, group: int) -> tuple[Session, Keyspace]:
        return self._hierarchy.sessions.session(session), self._hierarchy.namespaces.keyspace(namespace, group)

    def _check_count(self, count: int) -> None:
        if count > self._keys_max:
            raise LimitExceeded(f"{count} keys in one call; at most {self._keys_max} (keys_max): split the batch")

    @staticmethod
    def _check_wanted(session: Session, request_id: int) -> None:
        if request_id in session.forgotten:
            raise InvalidRequest("the client has given this request up")

    def _wait_s(self, wait_ms: int) -> float:
        if wait_ms > self._wait_s_max * 1000:
            raise LimitExceeded(
                f"a wait of {wait_ms} ms; at most {self._wait_s_max:.0f} s (wait_s_max): ask again instead"
            )
        return wait_ms / 1000

    def _fill(self, grant: engine_pb2.Grant, lease: Lease | None, pending: int = 0) -> None:
        """Writes a lease where it travels: a message that is handed to another one is copied."""
        if pending:
            grant.pending = pending
        if lease is not None:
            offsets, epochs = self._hierarchy.locations(lease)
            grant.lease = lease.id
            grant.ready = len(lease.blocks)
            grant.offsets = offsets.tobytes()
            grant.epochs = epochs.tobytes()


def _extents(places: Iterable[tuple[int, Held | None]], paths: dict[str, int]) -> list[engine_pb2.Extent]:
    """Places as they travel, with the indices of their keys; `paths` learns the number of each file."""
    return [
        engine_pb2.Extent(
            key=index,
            path=paths.setdefault(held.path, len(paths)),
            offset=held.offset,
            size_bytes=held.size_bytes,
            check=held.check,
        )
        for index, held in places
        if held is not None
    ]


class AdminService(_Servicer, admin_pb2_grpc.AdminServicer):
    """The operator face; see proto/kvstore/v1/admin.proto.

    Args:
        stats: Gives the figures of docs/stats.md as JSON.
        ping: Gives the answer to Ping.
    """

    def __init__(
        self, hierarchy: Hierarchy, gate: Gate, *, stats: Callable[[], str], ping: Callable[[], admin_pb2.PingReply]
    ) -> None:
        super().__init__(gate)
        self._hierarchy = hierarchy
        self._stats = stats
        self._ping = ping
        self._flushes: set[asyncio.Task[int]] = set()

    @_at_once
    @_method
    async def Ping(self, request: admin_pb2.PingRequest, context: Any) -> Any:
        return self._ping()

    @_method
    async def Stats(self, request: admin_pb2.StatsRequest, context: Any) -> Any:
        return admin_pb2.StatsReply(json=self._stats())

    @_method
    async def List(self, request: admin_pb2.ListRequest, context: Any) -> Any:
        blocks, total = list_blocks(self._hierarchy, _digest(request.namespace), min(request.limit, _LIST_MAX))
        return admin_pb2.ListReply(
            total=total,
            blocks=[
                admin_pb2.ListedBlock(
                    namespace=block.digest,
                    group=block.kv_group,
                    key=block.key,
                    size_bytes=block.size_bytes,
                    pins=block.pins,
                    tiers=block.tiers,
                )
                for block in blocks
            ],
        )

    @_method
    async def Flush(self, request: admin_pb2.FlushRequest, context: Any) -> Any:
        digest = _digest(request.namespace)
        # It goes on where the caller's time is up: half a flush would leave blocks of before it, below the pool say.
        flush = asyncio.create_task(self._hierarchy.flush_everywhere(digest, from_peer=request.from_peer))
        self._flushes.add(flush)
        flush.add_done_callback(self._flushes.discard)
        return admin_pb2.FlushReply(removed=await asyncio.shield(flush))

    async def Prefetch(
        self, request: admin_pb2.PrefetchRequest, context: Any
    ) -> AsyncIterator[admin_pb2.PrefetchEvent]:
        self.gate.calls["Prefetch"] += 1
        blocks = size = 0
        try:
            self.gate.check(context)
            async for blocks, size in prefetch(self._hierarchy, _digest(request.namespace), request.max_bytes):
                yield admin_pb2.PrefetchEvent(blocks=blocks, bytes=size)
        except KVStoreError as error:
            await self.gate.refuse(context, error)
        yield admin_pb2.PrefetchEvent(blocks=blocks, bytes=size, done=True)

    @_method
    async def Evict(self, request: admin_pb2.EvictRequest, context: Any) -> Any:
        evicted = 0
        while step := self._hierarchy.pool.evict(request.free_bytes, _STEP_BLOCKS):
            evicted += step
            await asyncio.sleep(0)
        return admin_pb2.EvictReply(evicted_blocks=evicted, free_bytes=self._hierarchy.pool.free_bytes)


def _digest(sent: bytes) -> bytes | None:
    if sent and len(sent) != DIGEST_BYTES:
        raise InvalidRequest(f"a namespace digest has {DIGEST_BYTES} bytes, not {len(sent)}")
    return sent or None
