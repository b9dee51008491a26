"""One other daemon: a session with it, what it says it has, and its bytes.

Control on the event loop, bytes on threads. A daemon that fails three times in a row is given up: it is not asked any
more, and looked after by probes until it answers again (redis_health.Breaker).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import grpc
import numpy as np

from kvstore.clock import Clock
from kvstore.data_link import DataLink, Pass, Slots, data_endpoint
from kvstore.endpoint import Endpoint
from kvstore.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    KVStoreError,
    StaleGeneration,
    UnknownNamespace,
    UnknownSession,
)
from kvstore.log import RateLimited, get_logger
from kvstore.threads import started_pool
from kvstore.tier import KEY_PREFIX_BYTES, ReadOutcome, TierState
from kvstore.tiers.redis_health import Breaker
from kvstore.wire.channel import open_async_channel
from kvstore.wire.convert import TOKEN_KEY, epochs_array, error_of, offsets_array
from kvstore.wire.tls import Tls
from kvstore.wire.v1 import admin_pb2, admin_pb2_grpc, engine_pb2, engine_pb2_grpc

_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
#: Attaching may take longer than a question: a name is resolved, TLS is greeted.
_ATTACH_S: Final = 5.0
_PROBE_S: Final = 0.5
_TEND_S: Final = 0.1
#: Between two looks at blocks that the other daemon brings up from its own disk.
_COMING_S: Final = 0.02
#: Longest removal.
_REMOVE_S: Final = 5.0
#: Threads that move bytes from one daemon.
_THREADS: Final = 4
#: Removed names that are remembered for a daemon that is away. Beyond that it is not asked for their namespaces again.
_OWED_MAX: Final = 65_536


@dataclasses.dataclass(frozen=True, slots=True)
class _Attached:
    session: bytes
    generation: bytes
    keys_max: int
    data: DataLink
    secret: bytes


class PeerLink:
    """See the module. All methods on one event loop.

    Attributes:
        endpoint: Where it is.
        counts: What happened; only ever grows.
        fault: The last one, in words.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        clock: Clock,
        token: str | None,
        tls: Tls | None,
        deadline_s: float,
        congestion_choice: str,
    ) -> None:
        self.endpoint = endpoint
        self.counts: Counter[str] = Counter()
        self.fault = ""
        self._tls = tls
        self._deadline_s = deadline_s
        self._congestion_choice = congestion_choice
        self._metadata = ((TOKEN_KEY, f"Bearer {token}"),) if token is not None else ()
        self._breaker = Breaker(clock, _PROBE_S)
        self._log = RateLimited(get_logger("kvstore.tiers.peer"), clock=clock)
        self._attached: _Attached | None = None
        self._stream: Any = None
        self._request_ids = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        #: What this daemon removed and the other one could not be told, by name and by namespace.
        self._owed: set[bytes] = set()
        self._owed_namespaces: set[bytes] = set()
        self._muted: set[bytes] = set()

    # -- life --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begins to attach, and goes on until close()."""
        self._channel = open_async_channel(self.endpoint, self._tls)
        self._engine: Any = engine_pb2_grpc.EngineStub(self._channel)
        self._admin: Any = admin_pb2_grpc.AdminStub(self._channel)
        self._threads = started_pool(_THREADS, "kvstore-peer")
        self._spawn(self._keep_attached())
        self._spawn(self._tend())

    async def close(self) -> None:
        """Ends the session. Reads under way fail."""
        self._detach()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)
        await asyncio.to_thread(self._threads.shutdown)

    @property
    def state(self) -> TierState:
        return TierState.OK if self._attached is not None and not self._breaker.open else TierState.FAILED

    def describe(self) -> dict[str, Any]:
        """Figures for stats."""
        return {
            "endpoint": str(self.endpoint),
            "state": self.state.value,
            "fault": self.fault,
            "congestion": self._attached.data.algorithm if self._attached is not None else "",
            "owed": len(self._owed) + len(self._owed_namespaces),
            "muted_namespaces": len(self._muted),
            **{name: self.counts[name] for name in ("asked", "found", "loaded", "loaded_bytes", "failed")},
        }

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_attached(self) -> None:
        """One round for each life of the other daemon."""
        attempt = 0
        while True:
            try:
                if await self._attach_and_listen():
                    attempt = 0
                self._note(DaemonUnavailable(f"the daemon at {self.endpoint} has gone"))
            except grpc.RpcError as failure:
                self._note(error_of(failure, str(self.endpoint)))
            except (KVStoreError, StopAsyncIteration, TimeoutError) as error:
                self._note(error)
            self._detach()
            await asyncio.sleep(_PAUSES_S[min(attempt, len(_PAUSES_S) - 1)])
            attempt += 1

    async def _attach_and_listen(self) -> bool:
        """Attaches and reads events until the stream ends. Whether it had got as far as a session."""
        request = engine_pb2.AttachRequest(client_name="peer", pid=os.getpid())
        self._stream = stream = self._engine.Attach(request, metadata=self._metadata)
        try:
            events = aiter(stream)
            async with asyncio.timeout(_ATTACH_S):
                welcome = (await anext(events)).welcome
            where = data_endpoint(welcome.data_address, self.endpoint)
            if where is None:
                raise DaemonUnavailable(f"the daemon at {self.endpoint} has no data port: give it --listen HOST:PORT")
            context = self._tls.client_context() if self._tls is not None else None
            data = DataLink(where, context, stall_s=self._deadline_s, congestion_choice=self._congestion_choice)
            self._attached = _Attached(welcome.session, welcome.generation, welcome.keys_max, data, welcome.data_secret)
            self._well()
            async for _ in events:
                pass
            return True
        finally:
            stream.cancel()

    def _detach(self) -> None:
        attached, self._attached = self._attached, None
        if attached is not None:
            attached.data.close()

    async def _tend(self) -> None:
        """Probes a daemon that was given up, and tells what it is owed."""
        while True:
            await asyncio.sleep(_TEND_S)
            if self._breaker.open and self._breaker.probe_due():
                with contextlib.suppress(KVStoreError):
                    await self._call(self._admin.Ping, admin_pb2.PingRequest(), self._deadline_s)
                    self._well()
            if (self._owed or self._owed_namespaces) and self.state is TierState.OK:
                with contextlib.suppress(KVStoreError):
                    await self._pay()

    # -- health ------------------------------------------------------------------------------------------------------

    def _well(self) -> None:
        if self._breaker.fine() or self.fault:
            self._log.info("peer answers", key=("well", self.endpoint), peer=str(self.endpoint))
        self.fault = ""

    def _note(self, error: BaseException) -> None:
        self.fault = str(error) or type(error).__name__
        self._log.warning("peer fault", key=(type(error), self.endpoint), peer=str(self.endpoint), error=self.fault)

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        """One call.

        Raises:
            KVStoreError: what went wrong; silence counts against the other daemon.
        """
        try:
            reply = await method(request, timeout=max(0.001, timeout_s), metadata=self._metadata)
        except grpc.RpcError as failure:
            error = error_of(failure, str(self.endpoint))
            if isinstance(error, (DaemonUnavailable, DeadlineExceeded)):
                self._failed(error)
            elif isinstance(error, UnknownSession) and self._stream is not None:
                self._stream.cancel()  # attaches again
            raise error from None
        self._breaker.answered()
        return reply

    def _failed(self, error: KVStoreError) -> None:
        self.counts["failed"] += 1
        self._note(error)
        self._breaker.failed()

    # -- questions ---------------------------------------------------------------------------------------------------

    async def stat(self, prefix: bytes, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Sizes of those blocks of one keyspace that it has. Answers within the deadline, with nothing if need be."""
        attached = self._attached
        if attached is None or self.state is TierState.FAILED or self._hides(prefix):
            return {}
        wanted = [key for key in keys if prefix + key not in self._owed] if self._owed else keys
        self.counts["asked"] += len(wanted)
        until = time.monotonic() + self._deadline_s
        found: dict[bytes, int] = {}
        for start in range(0, len(wanted), attached.keys_max):
            some = wanted[start : start + attached.keys_max]
            request = engine_pb2.StatRequest(
                session=attached.session, namespace=prefix[:16], group=_group_of(prefix), keys=some
            )
            try:
                reply = await self._call(self._engine.Stat, request, until - time.monotonic())
            except KVStoreError:  # also a namespace that it does not know
                break
            for key, there in zip(some, reply.present, strict=True):
                if there:
                    found[key] = reply.block_bytes
        # What was removed while the answer was on its way is not there.
        if self._hides(prefix):
            return {}
        self.counts["found"] += len(found)
        return {key: size for key, size in found.items() if prefix + key not in self._owed}

    def _hides(self, prefix: bytes) -> bool:
        return prefix[:16] in self._owed_namespaces or prefix[:16] in self._muted

    # -- bytes -------------------------------------------------------------------------------------------------------

    async def read(self, prefix: bytes, blocks: Sequence[tuple[bytes, memoryview]], until: float) -> list[ReadOutcome]:
        """Reads blocks of one keyspace into buffers of one size."""
        outcomes = [ReadOutcome.FAILED] * len(blocks)
        left = list(range(len(blocks)))
        while left and (attached := self._attached) is not None and time.monotonic() < until:
            request_id = next(self._request_ids)
            try:
                ready, pending = await self._lease(attached, prefix, [blocks[at][0] for at in left], request_id, until)
            except KVStoreError:
                self._spawn(self._forget(attached, request_id))
                break
            got = left[: ready.ready]
            if ready.lease:
                await self._load(attached, ready, [blocks[at] for at in got], got, outcomes, until)
                self._spawn(self._release(attached, ready.lease))
            left = left[len(got) :]
            if pending:
                await asyncio.sleep(_COMING_S)
            elif left:
                outcomes[left.pop(0)] = ReadOutcome.ABSENT
        return outcomes

    async def _lease(
        self, attached: _Attached, prefix: bytes, keys: list[bytes], request_id: int, until: float
    ) -> tuple[engine_pb2.Grant, int]:
        """Pins the leading run that is in the other daemon's pool, and has it bring up what follows."""
        request = engine_pb2.AcquireRequest(
            session=attached.session,
            namespace=prefix[:16],
            queries=[engine_pb2.Query(group=_group_of(prefix), keys=keys)],
            request_id=request_id,
            from_peer=True,
        )
        reply = await self._call(self._engine.Acquire, request, min(self._deadline_s, until - time.monotonic()))
        return reply.grants[0], reply.grants[0].pending

    async def _load(
        self,
        attached: _Attached,
        grant: engine_pb2.Grant,
        blocks: list[tuple[bytes, memoryview]],
        places: list[int],
        outcomes: list[ReadOutcome],
        until: float,
    ) -> None:
        slots = Slots(offsets_array(grant.offsets).tolist(), epochs_array(grant.epochs).tolist())
        who = Pass(attached.session, attached.generation, attached.secret)
        rooms = [room for _, room in blocks]
        work = asyncio.get_running_loop().run_in_executor(self._threads, attached.data.read, who, slots, rooms, until)
        try:
            valid = await work
        except StaleGeneration:
            return
        except (DaemonUnavailable, DeadlineExceeded) as error:
            self._failed(error)
            return
        except KVStoreError as error:
            self._note(error)
            return
        for at, right in zip(places, np.asarray(valid).tolist(), strict=True):
            if right:
                outcomes[at] = ReadOutcome.OK
                self.counts["loaded"] += 1
                self.counts["loaded_bytes"] += len(rooms[0])

    async def _release(self, attached: _Attached, lease: int) -> None:
        request = engine_pb2.ReleaseRequest(session=attached.session, leases=[lease])
        await self._tell(attached, request)

    async def _forget(self, attached: _Attached, request_id: int) -> None:
        """What a call took whose answer never came goes back."""
        await self._tell(attached, engine_pb2.ReleaseRequest(session=attached.session, forget=[request_id]))

    async def _tell(self, attached: _Attached, request: engine_pb2.ReleaseRequest) -> None:
        """Tells it until it has heard, or the session has ended."""
        while self._attached is attached:
            with contextlib.suppress(KVStoreError):
                await self._call(self._engine.Release, request, _REMOVE_S)
                return
            await asyncio.sleep(_PROBE_S)

    # -- removal -----------------------------------------------------------------------------------------------------

    async def delete(self, names: Sequence[bytes]) -> int:
        """Removes blocks there, at once or when it can be told; until then they count as absent."""
        self._owed.update(names)
        if len(self._owed) > _OWED_MAX:
            self._muted |= {name[:16] for name in self._owed}
            self._owed.clear()
        with contextlib.suppress(KVStoreError):
            return await self._pay(names)
        return 0

    async def delete_namespace(self, digest: bytes) -> int:
        """As delete, for all of a namespace."""
        self._owed_namespaces.add(digest)
        with contextlib.suppress(KVStoreError):
            return await self._pay()
        return 0

    async def _pay(self, names: Sequence[bytes] | None = None) -> int:
        """Tells what is owed: of the blocks, these (None: all). Returns how many it removed."""
        removed = 0
        for digest in list(self._owed_namespaces):
            request = admin_pb2.FlushRequest(namespace=digest, from_peer=True)
            removed += await self._removed(self._admin.Flush, request)
            self._owed_namespaces.discard(digest)
        by_prefix: dict[bytes, list[bytes]] = {}
        for name in list(self._owed) if names is None else names:
            by_prefix.setdefault(name[:KEY_PREFIX_BYTES], []).append(name[KEY_PREFIX_BYTES:])
        for prefix, keys in by_prefix.items():
            attached = self._attached
            if attached is None:
                raise DaemonUnavailable(f"the daemon at {self.endpoint} is away")
            for start in range(0, len(keys), attached.keys_max):
                some = keys[start : start + attached.keys_max]
                delete = engine_pb2.DeleteRequest(
                    session=attached.session,
                    namespace=prefix[:16],
                    group=_group_of(prefix),
                    keys=some,
                    from_peer=True,
                )
                removed += await self._removed(self._engine.Delete, delete)
                self._owed.difference_update(prefix + key for key in some)
        return removed

    async def _removed(self, method: Any, request: Any) -> int:
        if self.state is TierState.FAILED:
            raise DaemonUnavailable(f"the daemon at {self.endpoint} is away")
        try:
            return int((await self._call(method, request, _REMOVE_S)).removed)
        except UnknownNamespace:
            return 0


def _group_of(prefix: bytes) -> int:
    return int.from_bytes(prefix[16:KEY_PREFIX_BYTES], "big")
