"""The Python face of the daemon: Client.

Two levels. For programs: insert, lookup, select, drop_select, watch, delete, flush, stats. For engines, in batches:
kvstore.engine_calls.

A Client may be used from any thread. It does not survive a fork. It attaches again by itself when the daemon was
restarted; what belonged to the earlier life (leases, reservations) raises StaleGeneration or is dropped silently, as
each method says.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self

from kvstore import congestion
from kvstore.arena import ArenaView
from kvstore.blocks import Namespace
from kvstore.connection import AWAY_S, Attached, Connection
from kvstore.data_wire import Query
from kvstore.endpoint import Endpoint, default_endpoint, parse_endpoint
from kvstore.engine_calls import EngineCalls, digest_of
from kvstore.errors import (
    DaemonUnavailable,
    Damage,
    InvalidRequest,
    KVStoreError,
    NoMapping,
    RetryLater,
    StaleGeneration,
)
from kvstore.following import WANTED, Changes, Wanted, changes_in
from kvstore.found import Found
from kvstore.insert import Inserter, Ticket
from kvstore.remote import STAGING_BYTES, RemoteArena, RemoteOptions
from kvstore.wire.tls import Tls
from kvstore.wire.v1 import admin_pb2, engine_pb2

#: A wait is 32 bits of milliseconds on the wire. The daemon's own limit (wait_s_max) is far below.
_TIMEOUT_S_MAX: Final = ((1 << 32) - 1) / 1000


def connect(
    endpoint: str | None = None,
    namespace: Namespace | None = None,
    *,
    client_name: str = "",
    group: str = "",
    share_bytes: int = 0,
    token: str | None = None,
    timeout_s: float = 5.0,
    wait: bool = True,
    prefault: bool = True,
    tls: Tls | None = None,
    staging_bytes: int = STAGING_BYTES,
    data_connections: int | None = None,
    data_congestion: str = congestion.AUTO,
) -> Client:
    """Connects to a daemon.

    Args:
        endpoint: ``unix:PATH`` or ``HOST:PORT``; None: ``$KVSTORE_ENDPOINT``, else the socket in ``$XDG_RUNTIME_DIR``
            or ``/run``.
        namespace: Whose blocks this client speaks of. None: only stats, and whatever open_namespace names later.
        client_name: Shown by ``kvstore sessions``; empty: the program's name.
        group: The clients of one engine (scheduler and workers) name the same group: what one of them held when it
            ended stays held until the last of them has ended, since another may still be copying.
        share_bytes: Most bytes of the pool that this group's blocks may take; 0: no limit but the pool.
        token: The daemon's token, where it listens on TCP with one.
        timeout_s: Deadline of every call.
        wait: Whether calls wait, up to timeout_s, for a daemon that is away. False: they raise DaemonUnavailable at
            once, and connecting itself does not wait either.
        prefault: Make page-table entries for the pool in the background, so that copies do not stop for faults.
        tls: Files for a HOST:PORT that speaks TLS.
        staging_bytes: Where the daemon is on another host: memory of this client for the blocks that it reads and
            writes. 0: it has none; slots are named by their offset in the daemon's pool, and their bytes are others'
            affair (an engine's scheduler).
        data_connections: On another host: most connections that the bytes of one call travel over. None: as many as
            this machine's cores can use.
        data_congestion: On another host: TCP congestion control that their bytes are sent with. "auto": by loss where
            both ends are on one host, else the system's; "system"; or the name of one.

    Raises:
        ConfigError: a file of `tls` cannot be used, or the congestion control.
        DaemonUnavailable: `wait`, and no daemon answers within timeout_s.
        CallerMistake: the daemon refuses this client (token, namespace, size); the message says why.
    """
    where = default_endpoint() if endpoint is None else parse_endpoint(endpoint)
    client = Client(
        where,
        namespace,
        client_name=client_name or os.path.basename(sys.argv[0]) or "python",
        group=group,
        share_bytes=share_bytes,
        token=token,
        timeout_s=timeout_s,
        wait=wait,
        prefault=prefault,
        tls=tls,
        remote=RemoteOptions(staging_bytes, data_connections, congestion.check_choice(data_congestion))
        if staging_bytes
        else None,
    )
    if wait:
        try:
            client.wait_attached(timeout_s)
        except BaseException:
            client.close()
            raise
    return client


class Client(EngineCalls):
    """A session with the daemon. Made by connect(); close it, or use it as a context manager."""

    def __init__(
        self,
        endpoint: Endpoint,
        namespace: Namespace | None,
        *,
        client_name: str,
        group: str,
        share_bytes: int,
        token: str | None,
        timeout_s: float,
        wait: bool,
        prefault: bool,
        tls: Tls | None,
        remote: RemoteOptions | None,
    ) -> None:
        if share_bytes < 0:
            raise InvalidRequest(f"share_bytes is {share_bytes}: it counts bytes, and 0 means no limit")
        connection = Connection(
            endpoint,
            engine_pb2.AttachRequest(client_name=client_name, pid=os.getpid(), group=group, share_bytes=share_bytes),
            namespace,
            token=token,
            timeout_s=timeout_s,
            patient=wait,
            prefault=prefault,
            tls=tls,
            remote=remote,
        )
        super().__init__(connection)
        self._inserter = Inserter(self)

    # -- the session -----------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> Endpoint:
        """Where the daemon is."""
        return self._connection.endpoint

    @property
    def attached(self) -> bool:
        """Whether there is a session now."""
        return self._connection.attached is not None

    @property
    def draining(self) -> bool:
        """Whether the daemon is stopping: it hands out no more slots, and waits for those that are held."""
        return self._connection.draining

    def when_draining(self, call: Callable[[], None]) -> None:
        """Has a function called whenever a daemon says that it stops, by a thread of this client, which it must not
        keep waiting. `draining` is true by then.
        """
        self._connection.when_draining(call)

    @property
    def generation(self) -> bytes | None:
        """The life of the pool that this client is attached to; None where it is not attached."""
        attached = self._connection.attached
        return attached.generation if attached else None

    @property
    def arena(self) -> ArenaView | RemoteArena | None:
        """Where the bytes of this client's slots and leases lie: the mapping of the pool, or for a client on another
        host memory of its own. None while not attached, and on another host without staging_bytes.
        """
        attached = self._connection.attached
        return attached.arena if attached else None

    @property
    def block_size(self) -> int | None:
        """Tokens per block that the daemon advertises; None while not attached."""
        attached = self._connection.attached
        return attached.block_size if attached else None

    @property
    def gds(self) -> str | None:
        """The daemon's --gds, for engines on its host that were not told otherwise; None while not attached."""
        attached = self._connection.attached
        return attached.gds if attached else None

    @property
    def namespace(self) -> Namespace | None:
        """The namespace that is open, settled; None where none is."""
        attached = self._connection.attached
        return attached.namespace if attached else None

    def wait_attached(self, timeout_s: float) -> None:
        """Waits for a session; at once where calls do not wait (see connect).

        Raises:
            DaemonUnavailable, CallerMistake: there is none, and why.
        """
        self._connection.current(timeout_s)

    def open_namespace(self, namespace: Namespace) -> None:
        """Speaks of another namespace from here on, in this and every later session.

        Raises:
            SizeMismatch: the daemon knows it with other block sizes.
        """
        self._connection.open_namespace(namespace)

    def close(self) -> None:
        """Finishes what insert() was given (up to timeout_s), then ends the session. May be called twice.

        The session's pins last as long as a view of a block is in use somewhere in this process.
        """
        if not self._connection.forked:  # then its thread is not here, and its lock may be held for good
            self._inserter.close(self._connection.timeout_s)
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- for programs ----------------------------------------------------------------------------------------------

    def insert(self, keys: Sequence[bytes], blocks: Sequence[Any], *, kv_group: int = 0) -> Ticket:
        """Stores blocks. Returns at once; a thread of the client copies them.

        Args:
            keys: In prefix order.
            blocks: One for each key; anything C-contiguous with the buffer protocol, of the group's block size.
                They are read until the ticket is done: do not change them before.
            kv_group: Which of the namespace's groups (of block sizes) they belong to; as in every call below.

        Raises:
            SizeMismatch: a block has another size; both are named. Nothing is stored.
            InvalidRequest: not as many blocks as keys, a bad key or group, or not a contiguous buffer. Nothing is
                stored.
        """
        self._connection.check_usable()
        return self._inserter.insert(keys, blocks, self._connection.namespace, kv_group)

    def lookup(self, keys: Sequence[bytes], *, kv_group: int = 0) -> int:
        """Length of the leading run that is available in any tier. Promises nothing: acquire or select pins."""
        if not keys:
            return 0
        reply, _ = self._connection.ask(
            lambda at: (
                "Lookup",
                engine_pb2.LookupRequest(session=at.session, namespace=digest_of(at), group=kv_group, keys=keys),
            )
        )
        return int(reply.available)

    def present(self, keys: Sequence[bytes], *, kv_group: int = 0) -> list[bool]:
        """Which of these keys are in the pool or on the daemon's own disk, in any order. Promises nothing, and touches
        no block.
        """
        if not keys:
            return []
        reply, _ = self._connection.ask(
            lambda at: (
                "Stat",
                engine_pb2.StatRequest(session=at.session, namespace=digest_of(at), group=kv_group, keys=keys),
            )
        )
        return [bool(each) for each in reply.present]

    @contextmanager
    def select(self, keys: Sequence[bytes], timeout_s: float, *, kv_group: int = 0) -> Iterator[Found]:
        """Waits until all blocks are there, or the time is up; gives the leading run as read-only views of the pool.

        The blocks are pinned until the with-block ends and no view of them, nor anything made from one (a slice, an
        array), is in use any more.

        Raises:
            Damage: bytes changed under the reader. Never seen while the daemon keeps its promises.
            DaemonUnavailable: there is none, and has not been for as long as this waits and half a second more, or for
                the time that calls wait (see connect) where that is less.
        """
        found, attached = self._select_now(keys, timeout_s, kv_group) or self._select(
            keys, timeout_s, kv_group, drop=False
        )
        if found.lease_id == 0 and not len(found):
            yield found
            return
        try:
            yield found
            self._check_epochs(found)
        finally:
            self._give_back(found, attached, remove=False)

    @contextmanager
    def drop_select(self, keys: Sequence[bytes], timeout_s: float, *, kv_group: int = 0) -> Iterator[Found]:
        """As select, but exactly one caller gets each block. Leaving the with-block normally removes them from every
        tier; an exception, or the end of the process, gives them back, and the next caller that waits gets them.

        Raises:
            DaemonUnavailable: as select.
            RetryLater: on leaving, the daemon could not be told; whether the blocks are gone is not known.
        """
        found, attached = self._select(keys, timeout_s, kv_group, drop=True)
        if found.lease_id == 0:
            yield found
            return
        try:
            yield found
            self._check_epochs(found)
        except BaseException:
            self._give_back(found, attached, remove=False)
            raise
        self._give_back(found, attached, remove=True)

    def watch(self, seen: int, timeout_s: float, *, kv_group: int = 0) -> tuple[int, dict[bytes, bool]]:
        """Waits until something changed in a group: a block was stored or removed, or a claim given back. For groups of
        few blocks through which processes speak to each other.

        Args:
            seen: What the last call returned; 0: do not wait.

        Returns:
            A number for the next call, and the keys of all the group's blocks in the pool in the order in which they
            came, each with whether a drop_select holds it now. What was evicted is left out, but wakes nobody.

        Raises:
            LimitExceeded: the group has more blocks than one answer may hold.
        """
        reply, _ = self._watched(seen, timeout_s, kv_group)
        return reply.changes, dict(zip(reply.keys, map(bool, reply.claimed), strict=True))

    def follow(
        self, seen: int, timeout_s: float, *, kv_group: int = 0, wanted: Wanted = "anything", kinds: bytes = b""
    ) -> Changes:
        """As watch, and tells only what changed since the last call, and where it is; see kvstore.following.

        Args:
            seen: `changes` of the last answer; 0: everything, at once.
            wanted: What ends the wait: "coming" (a store, or a claim that is given back), "going", or "anything".
            kinds: Only changes of keys that begin with one of these bytes end it; empty: of all.

        Raises:
            LimitExceeded: all keys are to be told, and one answer may not hold as many.
        """
        return changes_in(*self._watched(seen, timeout_s, kv_group, follow=True, wanted=WANTED[wanted], kinds=kinds))

    def _watched(self, seen: int, timeout_s: float, kv_group: int, **how: Any) -> tuple[Any, Attached]:
        _check_timeout(timeout_s)
        return self._connection.ask(
            lambda at: (
                "Watch",
                engine_pb2.WatchRequest(
                    session=at.session,
                    namespace=digest_of(at),
                    group=kv_group,
                    seen=seen,
                    wait_ms=int(timeout_s * 1000),
                    **how,
                ),
            ),
            wait_s=timeout_s,
        )

    def delete(self, keys: Sequence[bytes], *, kv_group: int = 0) -> int:
        """Removes blocks from every tier. Returns how many were there."""
        if not keys:
            return 0
        reply, _ = self._connection.ask(
            lambda at: (
                "Delete",
                engine_pb2.DeleteRequest(session=at.session, namespace=digest_of(at), group=kv_group, keys=keys),
            )
        )
        return int(reply.removed)

    def post_delete(self, keys: Sequence[bytes], *, kv_group: int = 0) -> None:
        """As delete, and does not wait for the answer; what this client asks later comes after it.

        Raises:
            RetryLater: the daemon or the session has gone.
        """
        attached = self._connection.current()
        request = engine_pb2.DeleteRequest(
            session=attached.session, namespace=digest_of(attached), group=kv_group, keys=keys
        )
        self._connection.post(attached, ("Delete", request))

    def flush(self) -> int:
        """Removes every block of this client's namespace from every tier. Returns how many were there."""
        reply, _ = self._connection.ask(lambda at: ("Flush", admin_pb2.FlushRequest(namespace=digest_of(at))))
        return int(reply.removed)

    def stats(self) -> dict[str, Any]:
        """The daemon's figures; docs/stats.md says what each one means."""
        reply, _ = self._connection.ask(lambda at: ("Stats", admin_pb2.StatsRequest()))
        tree: dict[str, Any] = json.loads(reply.json)
        return tree

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _select(self, keys: Sequence[bytes], timeout_s: float, kv_group: int, *, drop: bool) -> tuple[Found, Attached]:
        _check_timeout(timeout_s)
        lease, attached = self._claim(keys, timeout_s, kv_group, drop=drop, away_s=timeout_s + AWAY_S)
        if attached.arena is None:
            self._connection.call(
                "Release",
                engine_pb2.ReleaseRequest(session=attached.session, leases=[lease.id]),
                attached,
            )
            raise NoMapping(
                f"{self.endpoint} is reached over the network, and this client has no memory for its blocks: connect "
                "with staging_bytes, or on the daemon's host (unix:PATH)"
            )
        assert attached.namespace is not None
        if isinstance(attached.arena, RemoteArena):
            try:
                lease = self._fetched(attached, lease, kv_group, wait_s=timeout_s, whole=drop)
            except BaseException:
                with contextlib.suppress(KVStoreError):
                    self._release(attached, [lease.id], remove=False)
                raise
        block_bytes = attached.namespace.group_bytes[kv_group]
        return Found(attached.arena, lease.id, lease.offsets, lease.epochs, block_bytes), attached

    def _select_now(self, keys: Sequence[bytes], timeout_s: float, kv_group: int) -> tuple[Found, Attached] | None:
        """What is in the pool of a daemon on another host now, in one request of its data port. None: that is not all
        there is to it, and _select is to find out.
        """
        _check_timeout(timeout_s)
        attached = self._connection.attached
        if attached is None or attached.namespace is None or not isinstance(attached.arena, RemoteArena):
            return None
        sizes = attached.namespace.group_bytes
        if not keys or not 0 <= kv_group < len(sizes):
            return None
        self._connection.check_usable()
        query = Query(digest_of(attached), kv_group, sizes[kv_group], keys, whole=timeout_s > 0)
        try:
            places = attached.arena.select(query, self._connection.timeout_s)
        except (DaemonUnavailable, StaleGeneration, InvalidRequest):
            return None
        if places is None:
            return None
        return Found(attached.arena, 0, *places, sizes[kv_group]), attached

    @staticmethod
    def _check_epochs(found: Found) -> None:
        if not found.intact():
            raise Damage("the bytes of a leased block changed while it was read; discard what was made of them")

    def _give_back(self, found: Found, attached: Attached, *, remove: bool) -> None:
        """Ends the lease, or leaves that to the last view where some are still in use."""
        session, lease_id = attached.session, found.lease_id

        def release(*, remove: bool = False, hold: bool = False) -> None:
            if isinstance(attached.arena, RemoteArena) and not hold:
                attached.arena.discard(found.offsets, found.epochs)
            if not lease_id:
                return  # the blocks are copies, and nothing was pinned for them any more
            request = engine_pb2.ReleaseRequest(session=session, leases=[lease_id], remove=remove, hold=hold)
            if remove:
                self._connection.call("Release", request, attached)
            else:  # nothing hangs on the answer
                self._connection.post(attached, ("Release", request))

        def later() -> None:
            # Called by whichever thread dropped the last view, perhaps inside the garbage collector: no call from here.
            self._inserter.call_soon(release)

        try:
            unused = found.close(later)
            if unused or remove:
                release(remove=remove, hold=not unused)
        except RetryLater:
            # The session is gone, and its pins with it. Only a removal that was not confirmed is worth an error.
            if remove:
                raise


def _check_timeout(timeout_s: float) -> None:
    if not 0 <= timeout_s <= _TIMEOUT_S_MAX:  # so is no number
        raise InvalidRequest(f"timeout_s is {timeout_s}: give seconds, 0 for what is there now")
