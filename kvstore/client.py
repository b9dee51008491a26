"""The Python face of the daemon: Client.

Two levels. For programs: insert, lookup, select, drop_select, delete, flush, stats. For engines, in batches:
reserve/commit/abort and acquire/release, with offsets into the shared mapping (Client.arena).

A Client may be used from any thread. It does not survive a fork. It attaches again by itself when the daemon was
restarted; what belonged to the earlier life (leases, reservations) raises StaleGeneration or is dropped silently, as
each method says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from kvstore.arena import ArenaView, Epochs, Offsets
from kvstore.blocks import Namespace
from kvstore.connection import Attached, Connection
from kvstore.direct import DiskExtent
from kvstore.endpoint import Endpoint, default_endpoint, parse_endpoint
from kvstore.errors import Damage, InvalidRequest, KVStoreError, NoMapping, RetryLater, StaleGeneration
from kvstore.found import Found
from kvstore.insert import Inserter, Ticket
from kvstore.remote import STAGING_BYTES, RemoteArena, RemoteOptions
from kvstore.wire.convert import epochs_array, offsets_array, pack_offsets
from kvstore.wire.tls import Tls
from kvstore.wire.v1 import admin_pb2, engine_pb2

#: Why a reservation is smaller than asked, as words.
_SHORTFALL_WORDS: Final = {
    engine_pb2.SHORTFALL_NONE: None,
    engine_pb2.SHORTFALL_PINNED: "pinned",
    engine_pb2.SHORTFALL_SHARE: "share",
    engine_pb2.SHORTFALL_POPULATING: "populating",
    engine_pb2.SHORTFALL_TOO_LARGE: "too_large",
    engine_pb2.SHORTFALL_DRAINING: "draining",
    engine_pb2.SHORTFALL_COPYING: "copying",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    """Empty slots that this client may fill.

    Attributes:
        generation: The life of the pool they are in.
        offsets: Where they start in the mapping.
        epochs: Their epochs.
        shortfall: Why there are fewer than asked; None where there are not.
        exists: Where keys were given: which of them exist already, and so got no slot.
        request_id: Number of the call that took them, see give_up.
    """

    generation: bytes
    offsets: Offsets
    epochs: Epochs
    shortfall: str | None
    exists: npt.NDArray[np.bool_]
    request_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """Pins on a leading run of blocks.

    Attributes:
        id: 0 where nothing is held.
        generation: The life of the pool the blocks are in.
        offsets: Where they start in the mapping; as many as the run is long.
        epochs: Their epochs; compare with ArenaView.epochs_of after a copy, and discard it where they differ.
        pending: How many further keys are on their way up from a lower tier.
    """

    id: int
    generation: bytes
    offsets: Offsets
    epochs: Epochs
    pending: int


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

    Raises:
        ConfigError: a file of `tls` cannot be used.
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
        remote=RemoteOptions(staging_bytes, data_connections) if staging_bytes else None,
    )
    if wait:
        try:
            client.wait_attached(timeout_s)
        except BaseException:
            client.close()
            raise
    return client


class Client:
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
        self._connection = Connection(
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
                engine_pb2.LookupRequest(session=at.session, namespace=_digest(at), group=kv_group, keys=keys),
            )
        )
        return int(reply.available)

    @contextmanager
    def select(self, keys: Sequence[bytes], timeout_s: float, *, kv_group: int = 0) -> Iterator[Found]:
        """Waits until all blocks are there, or the time is up; gives the leading run as read-only views of the pool.

        The blocks are pinned until the with-block ends and no view of them, nor anything made from one (a slice, an
        array), is in use any more.

        Raises:
            Damage: bytes changed under the reader. Never seen while the daemon keeps its promises.
        """
        found, attached = self._select(keys, timeout_s, kv_group, drop=False)
        if found.lease_id == 0:
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
        _check_timeout(timeout_s)
        reply, _ = self._connection.ask(
            lambda at: (
                "Watch",
                engine_pb2.WatchRequest(
                    session=at.session,
                    namespace=_digest(at),
                    group=kv_group,
                    seen=seen,
                    wait_ms=int(timeout_s * 1000),
                ),
            ),
            wait_s=timeout_s,
        )
        return reply.changes, dict(zip(reply.keys, map(bool, reply.claimed), strict=True))

    def delete(self, keys: Sequence[bytes], *, kv_group: int = 0) -> int:
        """Removes blocks from every tier. Returns how many were there."""
        if not keys:
            return 0
        reply, _ = self._connection.ask(
            lambda at: (
                "Delete",
                engine_pb2.DeleteRequest(session=at.session, namespace=_digest(at), group=kv_group, keys=keys),
            )
        )
        return int(reply.removed)

    def flush(self) -> int:
        """Removes every block of this client's namespace from every tier. Returns how many were there."""
        reply, _ = self._connection.ask(lambda at: ("Flush", admin_pb2.FlushRequest(namespace=_digest(at))))
        return int(reply.removed)

    def stats(self) -> dict[str, Any]:
        """The daemon's figures; docs/stats.md says what each one means."""
        reply, _ = self._connection.ask(lambda at: ("Stats", admin_pb2.StatsRequest()))
        tree: dict[str, Any] = json.loads(reply.json)
        return tree

    # -- for engines -----------------------------------------------------------------------------------------------

    def reserve(
        self,
        count: int,
        *,
        kv_group: int = 0,
        wait_s: float = 0.0,
        keys: Sequence[bytes] = (),
        namespace: Namespace | None = None,
    ) -> Reservation:
        """Takes empty slots; colder blocks leave for them. One call.

        Args:
            count: How many. Ignored where keys are given.
            wait_s: How long to wait for a pool that is being populated.
            keys: What the slots are for, if known: those that exist already get none.
            namespace: The one that they are for; None: the one that is open.

        Raises:
            InvalidRequest: another namespace was opened meanwhile.
        """
        reservation, attached = self.reserve_slots(count, kv_group, wait_s, keys, namespace)
        if not isinstance(attached.arena, RemoteArena):
            return reservation
        assert attached.namespace is not None
        block_bytes = attached.namespace.group_bytes[kv_group]
        places, marks = attached.arena.stage(reservation.offsets, reservation.epochs, block_bytes)
        if len(places) == len(reservation.offsets):
            return dataclasses.replace(reservation, offsets=places, epochs=marks)
        got = len(places)
        self._abort_slots(attached, reservation.offsets[got:], reservation.epochs[got:])
        return dataclasses.replace(reservation, offsets=places, epochs=marks, shortfall="staging")

    def reserve_slots(
        self, count: int, kv_group: int, wait_s: float, keys: Sequence[bytes], namespace: Namespace | None
    ) -> tuple[Reservation, Attached]:
        """As reserve(), with slots of the pool in any case; for this package."""
        request_id = 0

        def build(at: Attached) -> tuple[str, engine_pb2.ReserveRequest]:
            nonlocal request_id
            request_id = self._connection.next_request_id()
            return "Reserve", engine_pb2.ReserveRequest(
                session=at.session,
                namespace=_digest(at, namespace),
                group=kv_group,
                count=count,
                wait_ms=int(wait_s * 1000),
                keys=keys,
                request_id=request_id,
            )

        reply, attached = self._connection.ask(build, wait_s=wait_s)
        return Reservation(
            generation=reply.generation,
            offsets=offsets_array(reply.offsets),
            epochs=epochs_array(reply.epochs),
            shortfall=_SHORTFALL_WORDS.get(reply.shortfall, "unknown"),
            exists=np.frombuffer(reply.exists, dtype=np.bool_),
            request_id=request_id,
        ), attached

    def give_up(self, reservation: Reservation) -> None:
        """Returns what was not committed of a reservation, in the background. For callers that do not know what was,
        since the answer never came: abort() could hit a slot that this client was given anew meanwhile.
        """
        attached = self._connection.attached
        if attached is not None and attached.generation == reservation.generation:
            self._connection.forget(reservation.request_id, attached)

    def commit(
        self,
        generation: bytes,
        offsets: Iterable[int] | Offsets,
        keys: Sequence[bytes],
        *,
        kv_group: int = 0,
        parent: bytes | None = None,
        epochs: Epochs | None = None,
    ) -> npt.NDArray[np.uint8]:
        """Publishes filled slots under their keys. One call. The bytes must be in place before.

        Args:
            parent: The key before keys[0]; None where there is none or it is not known.
            epochs: Of the slots, from their reservation. With them a call that arrives late cannot hit a slot that this
                client was handed anew meanwhile.

        Returns:
            For each slot: 1 stored, 2 the key existed (the slot went back), 3 this session does not hold that slot.

        Raises:
            StaleGeneration: the slots were of an earlier life of the daemon; nothing is lost but them.
        """
        arena = self._attached_to(generation).arena
        if not isinstance(arena, RemoteArena):
            return self.commit_slots(generation, offsets, epochs, keys, kv_group, parent)
        places = [int(offset) for offset in offsets]
        outcomes = self.commit_slots(generation, *arena.send_staged(places), keys, kv_group, parent)
        arena.unstage(places)
        return outcomes

    def commit_slots(
        self,
        generation: bytes,
        offsets: Iterable[int] | Offsets,
        epochs: Epochs | None,
        keys: Sequence[bytes],
        kv_group: int,
        parent: bytes | None,
    ) -> npt.NDArray[np.uint8]:
        """As commit(), with slots of the pool in any case; for this package."""
        attached = self._attached_to(generation)
        request = engine_pb2.CommitRequest(
            session=attached.session,
            namespace=_digest(attached),
            group=kv_group,
            offsets=_packed(offsets),
            keys=keys,
            parent=parent or b"",
            epochs=_packed_epochs(epochs),
        )
        reply = self._connection.call("Commit", request, attached)
        return np.frombuffer(reply.outcomes, dtype=np.uint8)

    def abort(self, generation: bytes, offsets: Iterable[int] | Offsets, epochs: Epochs | None = None) -> int:
        """Returns slots unfilled; those of an earlier life of the daemon went with it. Returns how many went back."""
        try:
            attached = self._attached_to(generation)
        except StaleGeneration:
            return 0
        if isinstance(attached.arena, RemoteArena):
            offsets, epochs = attached.arena.unstage([int(offset) for offset in offsets])
        return self._abort_slots(attached, offsets, epochs)

    def _abort_slots(self, attached: Attached, offsets: Iterable[int] | Offsets, epochs: Epochs | None) -> int:
        """As abort(), with slots of the pool."""
        request = engine_pb2.AbortRequest(
            session=attached.session, offsets=_packed(offsets), epochs=_packed_epochs(epochs)
        )
        return int(self._connection.call("Abort", request, attached).returned)

    def acquire(self, queries: Sequence[tuple[int, Sequence[bytes]]]) -> list[Lease]:
        """Hit and pin in one step, for several runs of keys in one call.

        Args:
            queries: Pairs of a KV-cache group and keys in prefix order.

        Returns:
            One lease for each query, over the leading run that is there.
        """
        leases, attached = self._acquire(queries)
        if not isinstance(attached.arena, RemoteArena):
            return leases
        here: list[Lease] = []
        try:
            for (group, _), lease in zip(queries, leases, strict=True):
                here.append(self._fetched(attached, lease, group))
        except BaseException:
            for lease in here:
                attached.arena.discard(lease.offsets, lease.epochs)
            self._release(attached, [lease.id for lease in leases if lease.id], remove=False)
            raise
        return here

    def pin(self, queries: Sequence[tuple[int, Sequence[bytes]]]) -> list[Lease] | None:
        """Pins several runs of keys whole, for a writer that sees to it that what it stored stays. No bytes move.

        Returns:
            Leases for release, without offsets; None where not all of the keys are in the pool: then nothing is pinned.
        """
        leases, attached = self._acquire(queries)
        whole = all(len(lease.offsets) == len(keys) for lease, (_, keys) in zip(leases, queries, strict=True))
        if not whole:
            self._release(attached, [lease.id for lease in leases if lease.id], remove=False)
            return None
        nothing, no_epochs = offsets_array(b""), epochs_array(b"")
        return [dataclasses.replace(lease, offsets=nothing, epochs=no_epochs) for lease in leases]

    def _acquire(self, queries: Sequence[tuple[int, Sequence[bytes]]]) -> tuple[list[Lease], Attached]:
        """As acquire, with offsets in the pool in any case."""
        reply, attached = self._connection.ask(
            lambda at: (
                "Acquire",
                engine_pb2.AcquireRequest(
                    session=at.session,
                    namespace=_digest(at),
                    queries=[engine_pb2.Query(group=group, keys=keys) for group, keys in queries],
                    request_id=self._connection.next_request_id(),
                ),
            )
        )
        return [_lease(reply.generation, grant) for grant in reply.grants], attached

    def claim(self, keys: Sequence[bytes], *, kv_group: int = 0) -> Lease:
        """As acquire for one run, and exclusive, as drop_select: each block is in the claim of one caller at most. What
        another has claimed ends the run.

        End it with release: with `remove` the blocks leave every tier, without it the next caller gets them; so it does
        where this session ends.
        """
        return self._claim(keys, 0.0, kv_group, drop=True)[0]

    @contextlib.contextmanager
    def lease_extents(self, keys: Sequence[bytes], *, kv_group: int = 0) -> Iterator[dict[bytes, DiskExtent]]:
        """Where blocks lie on the daemon's disk, to be read by this process itself; see kvstore.direct. Each key by
        itself: what is not on a disk is left out.

        Raises:
            InvalidRequest: this client is not on the daemon's host.
        """
        reply, attached = self._connection.ask(
            lambda at: (
                "LeaseExtents",
                engine_pb2.LeaseExtentsRequest(
                    session=at.session,
                    namespace=_digest(at),
                    group=kv_group,
                    keys=keys,
                    request_id=self._connection.next_request_id(),
                ),
            )
        )
        try:
            yield {
                keys[extent.key]: DiskExtent(reply.paths[extent.path], extent.offset, extent.size_bytes, extent.check)
                for extent in reply.extents
            }
        finally:
            if reply.lease:
                with contextlib.suppress(RetryLater):  # its session has gone, and the lease with it
                    self._release(attached, [reply.lease], remove=False)

    def release(self, leases: Iterable[Lease], *, remove: bool = False) -> int:
        """Gives leases back, in one call; those of an earlier life of the daemon ended with it. Returns how many.

        Args:
            remove: Only for leases of claim: the blocks leave every tier.
        """
        leases = list(leases)
        attached = self._connection.attached
        if attached is None:
            self._connection.check_usable()
            return 0
        if isinstance(attached.arena, RemoteArena):
            for lease in leases:
                attached.arena.discard(lease.offsets, lease.epochs)
        ids = [lease.id for lease in leases if lease.id and lease.generation == attached.generation]
        return self._release(attached, ids, remove=remove) if ids else 0

    def _release(self, attached: Attached, ids: Sequence[int], *, remove: bool) -> int:
        request = engine_pb2.ReleaseRequest(session=attached.session, leases=ids, remove=remove)
        return int(self._connection.call("Release", request, attached).released)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _attached_to(self, generation: bytes) -> Attached:
        attached = self._connection.current()
        if attached.generation != generation:
            raise StaleGeneration("these slots belong to an earlier life of the daemon")
        return attached

    def _claim(self, keys: Sequence[bytes], timeout_s: float, kv_group: int, *, drop: bool) -> tuple[Lease, Attached]:
        reply, attached = self._connection.ask(
            lambda at: (
                "Select",
                engine_pb2.SelectRequest(
                    session=at.session,
                    namespace=_digest(at),
                    query=engine_pb2.Query(group=kv_group, keys=keys),
                    drop=drop,
                    wait_ms=int(timeout_s * 1000),
                    request_id=self._connection.next_request_id(),
                ),
            ),
            wait_s=timeout_s,
        )
        return _lease(reply.generation, reply.grant), attached

    def _select(self, keys: Sequence[bytes], timeout_s: float, kv_group: int, *, drop: bool) -> tuple[Found, Attached]:
        _check_timeout(timeout_s)
        lease, attached = self._claim(keys, timeout_s, kv_group, drop=drop)
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

    @staticmethod
    def _fetched(
        attached: Attached, lease: Lease, kv_group: int, *, wait_s: float | None = None, whole: bool = False
    ) -> Lease:
        """A lease whose bytes were brought to this host, as far as they could be.

        Args:
            wait_s: How long to wait for room here; None: a run that is too long is cut.
            whole: All of it or an error: who takes blocks away must have seen each of them.

        Raises:
            LimitExceeded: there will never be room here for so many blocks.
            RetryLater: the bytes did not come.
        """
        arena, namespace = attached.arena, attached.namespace
        assert isinstance(arena, RemoteArena) and namespace is not None
        places, marks = arena.fetch(lease.offsets, lease.epochs, namespace.group_bytes[kv_group], wait_s)
        if whole and len(places) < len(lease.offsets):
            arena.discard(places, marks)
            raise RetryLater("not all of the blocks could be brought to this host; they stay where they are")
        return dataclasses.replace(lease, offsets=places, epochs=marks)

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
            request = engine_pb2.ReleaseRequest(session=session, leases=[lease_id], remove=remove, hold=hold)
            if remove:
                self._connection.call("Release", request, attached)
            else:  # nothing hangs on the answer
                self._connection.post("Release", request, attached)

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
    if timeout_s < 0:
        raise InvalidRequest(f"timeout_s is {timeout_s}: give seconds, 0 for what is there now")


def _digest(attached: Attached, expected: Namespace | None = None) -> bytes:
    if expected is not None and expected.settled(attached.block_size) != attached.namespace:
        raise InvalidRequest("another namespace was opened since these blocks were given to insert()")
    if not attached.digest:
        raise InvalidRequest("this client has no namespace: connect(..., namespace=kvstore.Namespace(...))")
    return attached.digest


def _lease(generation: bytes, grant: engine_pb2.Grant) -> Lease:
    return Lease(grant.lease, generation, offsets_array(grant.offsets), epochs_array(grant.epochs), grant.pending)


def _packed_epochs(epochs: Epochs | None) -> bytes:
    return b"" if epochs is None else np.asarray(epochs, dtype="<u4").tobytes()


def _packed(offsets: Iterable[int] | Offsets) -> bytes:
    if isinstance(offsets, np.ndarray):
        return offsets.astype("<u8", copy=False).tobytes()
    return pack_offsets(offsets)
