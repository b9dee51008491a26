"""What engines call, in batches: reserve/commit/abort and acquire/release, with offsets into the shared mapping.

A client on another host has memory of its own in place of the mapping (kvstore.remote): offsets are places in there,
and the bytes travel when a lease is taken and right before a commit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.arena import Epochs, Offsets
from kvstore.blocks import Namespace
from kvstore.connection import Attached, Connection
from kvstore.direct import DiskExtent
from kvstore.errors import InvalidRequest, RetryLater, StaleGeneration
from kvstore.remote import RemoteArena
from kvstore.wire.convert import epochs_array, offsets_array, pack_offsets
from kvstore.wire.v1 import engine_pb2

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
        pending_from: Name of the slowest tier that they come from; empty: not known.
        extents: Where the blocks lie on the daemon's disk that follow those of `offsets`; see kvstore.direct.
        extents_id: 0 where there are none.
        below_s: About how long until the pending ones have come up, or how long those of `extents` would take to; 0:
            not known.
        token_s: How long a token of a prompt takes an engine to compute, as one that shares these blocks has told last;
            0: none has.
    """

    id: int
    generation: bytes
    offsets: Offsets
    epochs: Epochs
    pending: int
    pending_from: str = ""
    extents: tuple[DiskExtent, ...] = ()
    extents_id: int = 0
    below_s: float = 0.0
    token_s: float = 0.0


class EngineCalls:
    """See the module. Client is one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

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
                namespace=digest_of(at, namespace),
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
        *,
        keep: bool = False,
    ) -> npt.NDArray[np.uint8]:
        """As commit(), with slots of the pool in any case; for this package.

        Args:
            keep: What is stored stays in the pool until it is removed or this session has ended.
        """
        attached = self._attached_to(generation)
        request = self._commit_request(attached, offsets, epochs, keys, kv_group, parent, keep)
        reply = self._connection.call("Commit", request, attached)
        return np.frombuffer(reply.outcomes, dtype=np.uint8)

    def post_commits(
        self, generation: bytes, commits: Sequence[tuple[int, Offsets, Epochs, Sequence[bytes]]], *, keep: bool = False
    ) -> None:
        """As commit_slots, for several groups one after the other, and does not wait for the answers: for keys that
        nobody else stores, and slots that this session holds, so that the answers are known; unless the session has
        ended, which the generation tells.

        Args:
            commits: The group, the slots, and their keys.
        """
        attached = self._attached_to(generation)
        self._connection.post(
            attached,
            *(
                ("Commit", self._commit_request(attached, offsets, epochs, keys, kv_group, None, keep))
                for kv_group, offsets, epochs, keys in commits
            ),
        )

    @staticmethod
    def _commit_request(
        attached: Attached,
        offsets: Iterable[int] | Offsets,
        epochs: Epochs | None,
        keys: Sequence[bytes],
        kv_group: int,
        parent: bytes | None,
        keep: bool,
    ) -> engine_pb2.CommitRequest:
        return engine_pb2.CommitRequest(
            session=attached.session,
            namespace=digest_of(attached),
            group=kv_group,
            offsets=_packed(offsets),
            keys=keys,
            parent=parent or b"",
            epochs=_packed_epochs(epochs),
            keep=keep,
        )

    def abort(self, generation: bytes, offsets: Iterable[int] | Offsets, epochs: Epochs | None = None) -> int:
        """Returns slots unfilled; those of an earlier life of the daemon went with it. Returns how many went back."""
        try:
            attached = self._attached_to(generation)
        except StaleGeneration:
            return 0
        if isinstance(attached.arena, RemoteArena):
            offsets, epochs = attached.arena.unstage([int(offset) for offset in offsets])
        return self._abort_slots(attached, offsets, epochs)

    def abort_slots(self, generation: bytes, offsets: Offsets, epochs: Epochs) -> int:
        """As abort(), with slots of the pool in any case; for this package."""
        try:
            return self._abort_slots(self._attached_to(generation), offsets, epochs)
        except StaleGeneration:
            return 0

    def _abort_slots(self, attached: Attached, offsets: Iterable[int] | Offsets, epochs: Epochs | None) -> int:
        """As abort(), with slots of the pool."""
        request = engine_pb2.AbortRequest(
            session=attached.session, offsets=_packed(offsets), epochs=_packed_epochs(epochs)
        )
        return int(self._connection.call("Abort", request, attached).returned)

    def acquire(
        self,
        queries: Sequence[tuple[int, Sequence[bytes]]],
        *,
        extents_min: Sequence[int] = (),
        token_s: float = 0.0,
    ) -> list[Lease]:
        """Hit and pin in one step, for several runs of keys in one call.

        Args:
            queries: Pairs of a KV-cache group and keys in prefix order.
            extents_min: For each of them: where all that could come up is on a disk of this host, and so many blocks or
                more, they are leased where they lie and do not come up. 0: never. Empty: for none.
            token_s: How long a token of a prompt takes this engine to compute, for others to know; 0: not known.

        Returns:
            One lease for each query, over the leading run that is there.
        """
        leases, attached = self._acquire(queries, extents_min, token_s)
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

    def _acquire(
        self, queries: Sequence[tuple[int, Sequence[bytes]]], extents_min: Sequence[int] = (), token_s: float = 0.0
    ) -> tuple[list[Lease], Attached]:
        """As acquire, with offsets in the pool in any case."""

        def build(at: Attached) -> tuple[str, engine_pb2.AcquireRequest]:
            request = engine_pb2.AcquireRequest(
                session=at.session,
                namespace=digest_of(at),
                request_id=self._connection.next_request_id(),
                token_s=token_s,
            )
            # Made in place: a message that is handed to another one is copied.
            for (group, keys), least in zip(queries, extents_min or [0] * len(queries), strict=True):
                request.queries.add(group=group, keys=keys, extents_min=least)
            return "Acquire", request

        reply, attached = self._connection.ask(build)
        return [_lease(reply.generation, grant, reply.paths, reply.token_s) for grant in reply.grants], attached

    def claim(self, keys: Sequence[bytes], *, kv_group: int = 0) -> Lease:
        """As acquire for one run, and exclusive, as drop_select: each block is in the claim of one caller at most. What
        another has claimed ends the run.

        End it with release: with `remove` the blocks leave every tier, without it the next caller gets them; so it does
        where this session ends.
        """
        lease, attached = self._claim(keys, 0.0, kv_group, drop=True)
        if not isinstance(attached.arena, RemoteArena) or not lease.id:
            return lease
        try:
            return self._fetched(attached, lease, kv_group, whole=True)
        except BaseException:
            self._release(attached, [lease.id], remove=False)
            raise

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
                    namespace=digest_of(at),
                    group=kv_group,
                    keys=keys,
                    request_id=self._connection.next_request_id(),
                ),
            )
        )
        try:
            yield {keys[extent.key]: _extent(extent, reply.paths) for extent in reply.extents}
        finally:
            if reply.lease:
                with contextlib.suppress(RetryLater):  # its session has gone, and the lease with it
                    self._release(attached, [reply.lease], remove=False)

    def release(self, leases: Iterable[Lease], *, remove: bool = False, wait: bool = True) -> int:
        """Gives leases back, in one call; those of an earlier life of the daemon ended with it. Returns how many.

        Args:
            remove: Only for leases of claim: the blocks leave every tier.
            wait: False: returns 0 as soon as the call is on its way. What this client asks later comes after it.
        """
        leases = list(leases)
        attached = self._connection.attached
        if attached is None:
            self._connection.check_usable()
            return 0
        if isinstance(attached.arena, RemoteArena):
            for lease in leases:
                attached.arena.discard(lease.offsets, lease.epochs)
        ours = [lease for lease in leases if lease.generation == attached.generation]
        ids = [number for lease in ours for number in (lease.id, lease.extents_id) if number]
        if not ids:
            return 0
        if wait:
            return self._release(attached, ids, remove=remove)
        request = engine_pb2.ReleaseRequest(session=attached.session, leases=ids, remove=remove)
        self._connection.post(attached, ("Release", request))
        return 0

    def _release(self, attached: Attached, ids: Sequence[int], *, remove: bool) -> int:
        request = engine_pb2.ReleaseRequest(session=attached.session, leases=ids, remove=remove)
        return int(self._connection.call("Release", request, attached).released)

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _attached_to(self, generation: bytes) -> Attached:
        attached = self._connection.current()
        if attached.generation != generation:
            raise StaleGeneration("these slots belong to an earlier life of the daemon")
        return attached

    def _claim(
        self, keys: Sequence[bytes], timeout_s: float, kv_group: int, *, drop: bool, away_s: float = math.inf
    ) -> tuple[Lease, Attached]:
        until = time.monotonic() + timeout_s
        reply, attached = self._connection.ask(
            lambda at: (
                "Select",
                engine_pb2.SelectRequest(
                    session=at.session,
                    namespace=digest_of(at),
                    query=engine_pb2.Query(group=kv_group, keys=keys),
                    drop=drop,
                    wait_ms=math.ceil(max(0.0, until - time.monotonic()) * 1000),
                    request_id=self._connection.next_request_id(),
                ),
            ),
            wait_s=timeout_s,
            away_s=away_s,
        )
        return _lease(reply.generation, reply.grant), attached

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


def digest_of(attached: Attached, expected: Namespace | None = None) -> bytes:
    if expected is not None and expected.settled(attached.block_size) != attached.namespace:
        raise InvalidRequest("another namespace was opened since these blocks were given to insert()")
    if not attached.digest:
        raise InvalidRequest("this client has no namespace: connect(..., namespace=kvstore.Namespace(...))")
    return attached.digest


def _lease(generation: bytes, grant: engine_pb2.Grant, paths: Sequence[str] = (), token_s: float = 0.0) -> Lease:
    return Lease(
        grant.lease,
        generation,
        offsets_array(grant.offsets),
        epochs_array(grant.epochs),
        grant.pending,
        grant.pending_from,
        tuple([_extent(extent, paths) for extent in grant.extents]) if grant.extents_lease else (),
        grant.extents_lease,
        grant.below_s,
        token_s,
    )


def _extent(extent: engine_pb2.Extent, paths: Sequence[str]) -> DiskExtent:
    return DiskExtent(paths[extent.path], extent.offset, extent.size_bytes, extent.check)


def _packed_epochs(epochs: Epochs | None) -> bytes:
    return b"" if epochs is None else np.asarray(epochs, dtype="<u4").tobytes()


def _packed(offsets: Iterable[int] | Offsets) -> bytes:
    if isinstance(offsets, np.ndarray):
        return offsets.astype("<u8", copy=False).tobytes()
    return pack_offsets(offsets)
