"""The only decider: which block is where, who may read it, who has to leave.

Runs on one thread (the daemon's event loop), owns all books, takes no locks. A method without ``await`` is one step:
nobody sees it half done. ``select`` is the only one that waits; what it re-checks is written there.

Promises
    * What acquire or select granted stays readable, byte for byte, until the lease is released or the last session of
      its group has ended, whatever is stored, deleted or flushed meanwhile.
    * A key answers only between its commit and its removal, and always with the bytes of one commit.
    * Each slot is in exactly one place: free in its segment, reserved by a session, or under a block.
    * Time alone takes nothing away from a session that lives.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from kvstore.arena import Arena, Epochs, Offsets
from kvstore.arrivals import Arrivals
from kvstore.begun import in_task
from kvstore.blocks import KEY_BYTES_MAX
from kvstore.clock import Clock
from kvstore.directory import Block, BlockState, Keyspace
from kvstore.errors import InvalidRequest
from kvstore.extents import Extents
from kvstore.leases import Lease, LeaseTable, Reservation, Session
from kvstore.namespaces import Namespaces
from kvstore.outcomes import Counts, Outcome
from kvstore.pool import Pool, Reserved, Shortfall
from kvstore.tier import Held, Tier
from kvstore.transfers import Transfers, WritePolicy
from kvstore.watches import Watches

#: How soon a select that found no room for a promotion tries again.
_NO_ROOM_S: Final = 0.02
#: Blocks that an operator's call removes before it lets others run.
_STEP_BLOCKS: Final = 2048


class Hierarchy:
    """See the module. All arguments in prefix order where they are keys."""

    def __init__(
        self,
        arena: Arena,
        clock: Clock,
        tiers: Sequence[Tier] = (),
        write_policy: WritePolicy = WritePolicy.THROUGH,
        keepers: Sequence[Tier] = (),
    ) -> None:
        """
        Args:
            tiers: What is below the pool, in the order of copy-down. The caller opens them before and closes them
                afterwards.
            keepers: Those of them that keep what came up from another one, too.
        """
        self.arena = arena
        self.pool = Pool(arena)
        self.arrivals = Arrivals(arena, self.pool.give_back)
        self.watches = Watches(lambda keyspace: self.transfers.tiers_of(keyspace), lambda: self.draining)
        self.transfers = Transfers(
            self.pool, tiers, write_policy, clock, self.watches.wake, self._wake_reservers, keepers
        )
        self.sessions = LeaseTable(clock)
        self.extents = Extents(self.transfers, self.sessions)
        self.namespaces = Namespaces(tiers)
        self.counts = Counts()
        self.draining = False
        self._progress: asyncio.Future[None] | None = None
        #: What tiers are asked for selects, some of which no longer wait for the answer.
        self._questions: set[asyncio.Task[int]] = set()

    # -- reading ---------------------------------------------------------------------------------------------------

    def lookup(self, keyspace: Keyspace, keys: Sequence[bytes]) -> int:
        """Length of the leading run that is available. Pins nothing and changes nothing."""
        blocks = keyspace.blocks
        for index, key in enumerate(keys):
            if key not in blocks:
                return index
        return len(keys)

    def acquire(
        self, session: Session, keyspace: Keyspace, keys: Sequence[bytes], request_id: int = 0, *, whole: bool = False
    ) -> Lease | None:
        """Pins the leading run that is available; None where that is empty. Hit and pin are one step.

        Args:
            whole: All of them or none; none is no miss then, since the caller goes on to wait for them.
        """
        lease = self._pin(session, keyspace, keys, request_id, whole=whole)
        if not whole:
            self.counts.misses["absent"] += len(keys) - (len(lease.blocks) if lease is not None else 0)
        return lease

    def _pin(
        self, session: Session, keyspace: Keyspace, keys: Sequence[bytes], request_id: int, *, whole: bool = False
    ) -> Lease | None:
        # Between two queries of one call the session may have ended, or its client may have given the call up.
        if session.ended or request_id in session.forgotten:
            return None
        run: list[Block | None] = list(map(keyspace.blocks.get, keys))
        if None in run:
            del run[run.index(None) :]
        if not run or (whole and len(run) < len(keys)):
            return None
        return self._grant(session, keyspace, run, False, request_id)  # type: ignore[arg-type]

    async def available(self, keyspace: Keyspace, keys: Sequence[bytes]) -> int:
        """Length of the leading run that is available in any tier. Pins nothing and changes nothing."""
        ready = self.lookup(keyspace, keys)
        if ready == len(keys) or not self.transfers.tiers_of(keyspace):
            return ready
        return ready + await self.transfers.available(keyspace, keys[ready:])

    async def present(self, keyspace: Keyspace, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are in the pool or in this daemon's own tiers, in any order. Pins nothing and changes nothing."""
        sources = await self.transfers.own(keyspace, [key for key in keys if key not in keyspace.blocks])
        return [key in keyspace.blocks or key in sources for key in keys]

    async def acquire_or_promote(
        self,
        session: Session,
        keyspace: Keyspace,
        keys: Sequence[bytes],
        request_id: int,
        *,
        from_peer: bool = False,
        extents_min: int = 0,
    ) -> tuple[Lease | None, int, int, list[Held]]:
        """As acquire, and brings up what follows from the tiers below (for a peer, from this daemon's own). With
        `extents_min`, so many blocks or more that are on a disk are leased there instead.

        Returns:
            The lease, and how many further keys are on their way: ask again for those. Then the lease on the disk (0:
            there is none), and where the keys lie that follow the first lease's.
        """
        lease = self._pin(session, keyspace, keys, request_id)
        ready = len(lease.blocks) if lease is not None else 0
        if ready == len(keys):
            return lease, 0, 0, []
        if 0 < extents_min <= len(keys) - ready and self.transfers.tiers and not self.draining:
            number, places = await self.extents.lease_run(session, keyspace, keys[ready:], request_id, extents_min)
            if number:
                self.counts.misses["absent"] += len(keys) - ready - len(places)
                self.counts.hits["extents"] += len(places)
                return lease, 0, number, places
        pending = await self._promote(session, keyspace, keys, ready, from_peer=from_peer)
        # What is on its way is neither hit nor miss yet. Counted only now: a counter that falls again is taken for that
        # of another life.
        self.counts.misses["absent"] += len(keys) - ready - pending
        return lease, pending, 0, []

    def coming_from(self, keyspace: Keyspace, keys: Sequence[bytes]) -> str:
        """Name of the slowest tier that keys are on their way up from; empty where none is, or has no room so far."""
        sources = {coming.source for coming in map(keyspace.coming.get, keys) if coming is not None}
        return next((tier.name for tier in reversed(self.transfers.tiers) if tier.name in sources), "")

    def extents_s(self, session: Session, number: int) -> float | None:
        """About how long it would take to bring up what is leased on the disk; None: not known."""
        lease = session.extents.get(number)
        sizes: Counter[str] = Counter()
        for tier, held in lease.places if lease is not None else ():
            sizes[tier.name] += held.size_bytes
        return self.transfers.seconds(sizes)

    async def _promote(
        self, session: Session, keyspace: Keyspace, keys: Sequence[bytes], ready: int, *, from_peer: bool = False
    ) -> int:
        """Brings up what comes after the first `ready` keys. Returns how many of those are on their way."""
        if ready == len(keys) or not self.transfers.tiers_of(keyspace) or self.draining:
            return 0
        parent = keys[ready - 1] if ready else None
        return await self.transfers.promote(session.group, keyspace, keys[ready:], parent, from_peer=from_peer)

    async def _promote_within(
        self, wait_s: float, session: Session, keyspace: Keyspace, keys: Sequence[bytes], ready: int
    ) -> int | None:
        """As _promote; None where the tiers have not said so soon what they have. They go on: they have deadlines of
        their own, by which they also learn that a server is away, and what they have is there for the next caller.
        """
        question = asyncio.get_running_loop().create_task(self._promote(session, keyspace, keys, ready))
        self._questions.add(question)
        question.add_done_callback(self._questions.discard)
        try:
            await asyncio.wait({question}, timeout=wait_s)
        except asyncio.CancelledError:
            question.cancel()
            raise
        return question.result() if question.done() else None

    async def select(
        self,
        session: Session,
        keyspace: Keyspace,
        keys: Sequence[bytes],
        *,
        drop: bool,
        wait_s: float,
        request_id: int = 0,
    ) -> Lease | None:
        """As acquire, but waits until all keys are there or the time is up.

        With `drop` the lease is a claim: a block is in at most one. Whoever waits for a claimed block goes on waiting
        and finds it there again (the claimer gave it back or died), stored anew, or gone.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            run: list[Block] = []
            missing: bytes | None = None
            for key in keys:
                block = keyspace.blocks.get(key)
                if block is None or (drop and block.claim):
                    missing = key
                    break
                run.append(block)
            left = deadline - loop.time()
            if missing is None or left <= 0 or self.draining:
                break
            if missing not in keyspace.blocks and self.transfers.tiers_of(keyspace):
                pending = await self._promote_within(left, session, keyspace, keys, len(run))
                if session.ended or request_id in session.forgotten:
                    return None
                left = deadline - loop.time()
                # Whatever came up meanwhile woke nobody, since nobody waited yet: look before waiting.
                if pending is None or missing in keyspace.blocks or left <= 0:
                    continue
                if pending and missing not in keyspace.coming:
                    left = min(left, _NO_ROOM_S)  # there was no room to bring it up; nobody tells when there is
            await self.watches.wait_for(keyspace, missing, left)
            # The world has changed: keys came and went, other callers claimed, this session may have ended. Nothing
            # that was seen above is used again.
            if session.ended or request_id in session.forgotten:
                return None
        if missing is not None:
            claimed = missing in keyspace.blocks
            self.counts.misses["claimed" if claimed else "absent"] += len(keys) - len(run)
        return self._grant(session, keyspace, run, drop, request_id) if run else None

    def _grant(self, session: Session, keyspace: Keyspace, run: list[Block], drop: bool, request_id: int) -> Lease:
        for block in run:
            block.pins += 1
        lease = self.sessions.grant(session, run, drop, request_id)
        if drop:
            for block in run:
                block.claim = lease.id
                if keyspace.journal is not None:
                    keyspace.journal.claimed(block.key)
        if keyspace.fresh:
            sources = Counter(keyspace.fresh.pop(block.key, "cpu") for block in run)
            self.counts.hits.update(sources)
        else:
            self.counts.hits["cpu"] += len(run)
        self.counts.bytes["read"] += len(run) * keyspace.block_bytes
        return lease

    def locations(self, lease: Lease) -> tuple[Offsets, Epochs]:
        """Where the blocks of a lease lie."""
        offsets = np.frombuffer(array("Q", [block.offset for block in lease.blocks]), dtype=np.uint64)
        return offsets, self.arena.epochs_of(offsets)

    def release(
        self, session: Session, lease_ids: Iterable[int], *, remove: bool = False, hold: bool = False
    ) -> tuple[int, int]:
        """Gives leases back; with `remove`, their blocks leave every tier. Ids that the session does not hold are
        skipped.

        With `hold` the blocks stop answering, but the lease stays, pins and all: a reader still looks at the bytes.

        Returns:
            How many leases were released and how many blocks removed.

        Raises:
            InvalidRequest: `remove` for a lease that is not a claim.
        """
        leases = [lease for lease in map(session.leases.get, dict.fromkeys(lease_ids)) if lease is not None]
        if remove and any(not lease.drop for lease in leases):
            raise InvalidRequest("remove is for leases of drop_select: an ordinary reader may not take blocks away")
        removed = 0
        for lease in leases:
            if remove:
                removed += sum(self.pool.remove(block, "dropped") for block in lease.blocks)
                for block in lease.blocks[:1]:  # a lease is over blocks of one group
                    self.watches.changed(block.keyspace)
            if not hold:
                del session.leases[lease.id]
                self._end_lease(lease)
        return len(leases), removed

    async def confirm(self, session: Session, lease_ids: Sequence[int], *, hold: bool) -> tuple[int, int]:
        """As release with `remove`, in every tier.

        The tiers below come first, while the claim still stands: the next caller must not find a copy there.
        """
        for lease in [session.leases[each] for each in lease_ids if each in session.leases]:
            if lease.drop and lease.blocks and self.transfers.tiers_of(lease.blocks[0].keyspace):
                await self.transfers.delete(lease.blocks[0].keyspace, [block.key for block in lease.blocks])
        # The session may have ended meanwhile, and its leases with it: release skips what is not there.
        return self.release(session, lease_ids, remove=True, hold=hold)

    def forget(self, session: Session, request_id: int) -> None:
        """The client never saw the answer to a request: what it took goes back, also if the request comes only now."""
        session.forgotten.append(request_id)
        self.release(session, [lease.id for lease in session.leases.values() if lease.request_id == request_id])
        self.abort(session, [offset for offset, held in session.reserved.items() if held.request_id == request_id])
        self.extents.forget(session, request_id)

    def _end_lease(self, lease: Lease) -> None:
        if lease.drop:
            self._unclaim(lease)
        # The touch comes here and not at the grant: until now the pins kept the blocks, and the reader did not wait for
        # it. All at once, and before the pins go, or unpin() would touch the blocks whose turn had come one by one.
        self.pool.touch([block for block in lease.blocks if block.state is BlockState.READY])
        for block in lease.blocks:
            self.pool.unpin(block)

    def _unclaim(self, lease: Lease) -> None:
        for block in lease.blocks:
            if block.claim == lease.id:
                block.claim = 0
                if block.keyspace.journal is not None:
                    block.keyspace.journal.given_back(block.key)
                self.watches.wake(block.keyspace, block.key)

    # -- writing ---------------------------------------------------------------------------------------------------

    def reserve(self, session: Session, keyspace: Keyspace, count: int, request_id: int = 0) -> Reserved:
        """Takes up to `count` empty slots; colder blocks leave for them."""
        if self.draining:
            return Reserved([], Shortfall.DRAINING)
        got = self.pool.take(session.group, keyspace.slot_bytes, count)
        for offset in got.offsets:
            session.reserved[offset] = Reservation(keyspace, request_id)
        return got

    async def reserve_within(
        self, session: Session, keyspace: Keyspace, count: int, wait_s: float, request_id: int = 0
    ) -> Reserved:
        """As reserve, but waits up to `wait_s` for room that is on its way: memory that is being populated, blocks that
        are being copied down. Counts what is refused in the end.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        got = self.reserve(session, keyspace, count, request_id)
        while got.shortfall in (Shortfall.POPULATING, Shortfall.COPYING) and (left := deadline - loop.time()) > 0:
            room = self.room_made()  # before others have a turn, who may make it
            try:
                await in_task()
                # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the answer.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await room
            except asyncio.CancelledError:
                # The caller has gone and never learns of these slots.
                self._abort_own(session, got.offsets, request_id)
                raise
            # The session may have ended in between; what it held went back then, or is left to its group.
            if session.ended or request_id in session.forgotten:
                self._abort_own(session, got.offsets, request_id)
                return Reserved([], Shortfall.DRAINING)
            more = self.reserve(session, keyspace, count - len(got.offsets), request_id)
            got = Reserved(got.offsets + more.offsets, more.shortfall)
        if got.shortfall is not None:
            self.counts.refused[got.shortfall.value] += count - len(got.offsets)
        return got

    @property
    def populating(self) -> bool:
        """Whether more of the pool gets its memory, by and by."""
        return not self.arena.populated and not self.pool.population_failed and not self.draining

    def room_made(self) -> asyncio.Future[None]:
        """Done when, from now on, more of the pool has its memory or a block was copied down."""
        self._progress = self._progress or asyncio.get_running_loop().create_future()
        return asyncio.shield(self._progress)

    def add_populated(self, length: int) -> None:
        """The next `length` bytes of the pool have their memory."""
        self.arena.add_populated(length)
        self._wake_reservers()

    def end_population(self) -> None:
        """The machine has no more memory: what is populated now is all there will be."""
        self.pool.population_failed = True
        self._wake_reservers()

    def _wake_reservers(self) -> None:
        if self._progress is not None:
            self._progress.set_result(None)
            self._progress = None

    def commit(
        self,
        session: Session,
        keyspace: Keyspace,
        offsets: Sequence[int],
        keys: Sequence[bytes],
        parent: bytes = b"",
        epochs: Sequence[int] | None = None,
        *,
        arrived: bool = False,
        keep: bool = False,
    ) -> list[Outcome]:
        """Publishes filled slots. A key that exists already sends its slot back.

        Args:
            parent: The key before keys[0]; empty where there is none or it is not known.
            epochs: Of the slots, as they were handed out. A call that comes late, when a slot has been handed out anew
                (to this very session, perhaps), is told by them. None: not checked.
            arrived: Whether all bytes must have come over the data port, since nobody in the session's group has the
                mapping.
            keep: What is stored stays in the pool until it is removed or this session ends.

        Raises:
            InvalidRequest: a key is empty or too long, there are not as many keys as slots, or bytes have not arrived.
                Nothing was changed.
        """
        if len(offsets) != len(keys):
            raise InvalidRequest(f"{len(offsets)} slots and {len(keys)} keys: each slot needs one key")
        self.check_keys(keys)
        stale = self._stale(offsets, epochs)
        if arrived:
            self._check_arrived(session, keyspace, [offset for offset in offsets if offset not in stale])
        blocks, before = keyspace.blocks, keyspace.blocks.get(parent) if parent else None
        outcomes, chain, fates = [], [], []
        for offset, key in zip(offsets, keys, strict=True):
            reservation = session.reserved.get(offset)
            if (
                reservation is None
                or reservation.keyspace is not keyspace
                or offset in stale
                or offset in self.arrivals  # its bytes are not all there
            ):
                outcomes.append(Outcome.NOT_RESERVED)
                continue
            self.arrivals.forget(offset)
            block = blocks.get(key)
            if block is not None:
                del session.reserved[offset]
                self.pool.give_back(session.group, offset)
                outcomes.append(Outcome.EXISTS)
            else:
                del session.reserved[offset]
                block = self.pool.place(key, keyspace, offset, before, session.group)
                if keep:
                    self.pool.keep(block, session.kept)
                outcomes.append(Outcome.STORED)
                if keyspace.waiters:
                    self.watches.wake(keyspace, key)
            chain.append(block)
            fates.append(outcomes[-1])
            before = block
        self.pool.touch(chain)
        if Outcome.STORED in fates:
            self.watches.changed(keyspace)
        if self.transfers.tiers:
            self.transfers.offer(
                [block for block, outcome in zip(chain, fates, strict=True) if outcome is Outcome.STORED]
            )
        for outcome, number in Counter(outcomes).items():
            self.counts.stores[outcome.name.lower()] += number
        self.counts.bytes["stored"] += outcomes.count(Outcome.STORED) * keyspace.block_bytes
        return outcomes

    def _check_arrived(self, session: Session, keyspace: Keyspace, offsets: Sequence[int]) -> None:
        mine = [offset for offset in offsets if offset in session.reserved]
        if unfilled := self.arrivals.unfilled(session, mine, keyspace.block_bytes):
            raise InvalidRequest(
                f"the bytes of {len(unfilled)} of {len(offsets)} slots have not all arrived over the data port: send "
                "them before the commit, which has published nothing"
            )

    def abort(self, session: Session, offsets: Sequence[int], epochs: Sequence[int] | None = None) -> int:
        """Returns slots unfilled. Those that the session does not hold (any more, see commit) are skipped.

        Returns:
            How many went back.
        """
        returned = 0
        stale = self._stale(offsets, epochs)
        for offset in offsets:
            if offset not in stale and (held := session.reserved.pop(offset, None)) is not None:
                self.arrivals.give_back(session.group, held.keyspace, offset)
                returned += 1
        return returned

    def _abort_own(self, session: Session, offsets: Iterable[int], request_id: int) -> None:
        """Returns slots that this very request took and still holds."""
        self.abort(
            session,
            [
                offset
                for offset in offsets
                if (held := session.reserved.get(offset)) is not None and held.request_id == request_id
            ],
        )

    def _stale(self, offsets: Sequence[int], epochs: Sequence[int] | None) -> set[int]:
        """Slots that were handed out anew since these epochs.

        Raises:
            InvalidRequest: not as many epochs as slots.
        """
        if epochs is None:
            return set()
        if len(epochs) != len(offsets):
            raise InvalidRequest(f"{len(offsets)} slots and {len(epochs)} epochs: each slot needs one epoch")
        # An offset that is none is in no session's books, and is skipped by those.
        known = [offset for offset in offsets if offset < self.arena.size_bytes]
        now = dict(zip(known, self.arena.epochs_of(np.array(known, dtype=np.uint64)).tolist(), strict=True))
        return {offset for offset, epoch in zip(offsets, epochs, strict=True) if now.get(offset) != epoch}

    @staticmethod
    def check_keys(keys: Iterable[bytes]) -> None:
        """Raises InvalidRequest where a key is empty or longer than KEY_BYTES_MAX."""
        lengths = set(map(len, keys))
        if lengths and (min(lengths) == 0 or max(lengths) > KEY_BYTES_MAX):
            raise InvalidRequest(f"a key has {min(lengths) or max(lengths)} bytes; keys have 1 to {KEY_BYTES_MAX}")

    # -- removing --------------------------------------------------------------------------------------------------

    def delete(self, keyspace: Keyspace, keys: Iterable[bytes]) -> int:
        """Removes blocks from every tier; pinned ones stop answering now and give their slots back with the last
        pin.
        """
        keys = list(keys)
        found = [block for block in map(keyspace.blocks.get, keys) if block is not None]
        removed = sum(self.pool.remove(block, "deleted") for block in found)
        if keyspace.journal is not None:
            for key in keys:
                keyspace.journal.gone(key)  # also where it rests below
        if removed:
            self.watches.changed(keyspace)
        return removed

    async def delete_everywhere(self, keyspace: Keyspace, keys: Sequence[bytes], *, from_peer: bool = False) -> int:
        """As delete, in every tier (for a peer, in this daemon's own). Returns how many keys were in the pool, or in
        the tier that had the most.
        """
        removed = self.delete(keyspace, keys)
        if not self.transfers.tiers_of(keyspace):
            return removed
        return max(removed, await self.transfers.delete(keyspace, keys, from_peer=from_peer))

    async def flush_everywhere(self, digest: bytes | None, *, from_peer: bool = False) -> int:
        """Removes a namespace (None: all) from every tier. Returns how many blocks were in the fullest one.

        Raises:
            UnknownNamespace: it was never opened in this life of the daemon.
        """
        if digest is not None:
            self.namespaces.keyspace(digest, 0)
        self.namespaces.adopt()
        with self.transfers.flushing(digest, self.namespaces.keyspaces(digest)):
            removed = 0
            for keyspace in self.namespaces.keyspaces(digest):
                if keyspace.journal is not None:
                    keyspace.journal.forget_resting()
                    self.watches.changed(keyspace)
            while step := self.flush(digest, _STEP_BLOCKS):
                removed += step
                await asyncio.sleep(0)  # engines come first; what they store meanwhile is flushed too
            return max(removed, await self.transfers.delete_namespace(digest, from_peer=from_peer))

    def flush(self, digest: bytes | None, limit: int) -> int:
        """Removes up to `limit` blocks of a namespace (None: of all). Call again until it gives less than that.

        Raises:
            UnknownNamespace: it was never opened in this life of the daemon.
        """
        if digest is not None:
            self.namespaces.keyspace(digest, 0)
        doomed: list[Block] = []
        for keyspace in self.namespaces.keyspaces(digest):
            for block in keyspace.blocks.values():
                if len(doomed) == limit:
                    break
                doomed.append(block)
        removed = sum(self.pool.remove(block, "flushed") for block in doomed)
        for keyspace in {block.keyspace for block in doomed}:
            self.watches.changed(keyspace)
        return removed

    # -- sessions --------------------------------------------------------------------------------------------------

    def end_session(self, session: Session) -> None:
        """A process has gone. What it held comes back, at once or with the last session of its group.

        Claims come back at once in any case: they are promises to others, not memory that someone may still touch.
        """
        if session.ended:
            return
        for lease in session.leases.values():
            if lease.drop:
                self._unclaim(lease)
        self.pool.let_go(session.kept)
        for gone in self.sessions.end(session):
            leases, gone.leases = list(gone.leases.values()), {}
            for lease in leases:
                self._end_lease(lease)
            self.extents.end(gone)
            reserved, gone.reserved = list(gone.reserved.items()), {}
            for offset, held in reserved:
                self.arrivals.give_back(gone.group, held.keyspace, offset)

    # -- looking ---------------------------------------------------------------------------------------------------

    async def settle(self, timeout_s: float) -> bool:
        """Copies every block down that has no copy below. Returns whether all of it was done in time."""
        blocks = [block for keyspace in self.namespaces.keyspaces(None) for block in keyspace.blocks.values()]
        return await self.transfers.settle(timeout_s, blocks)

    @property
    def waiting(self) -> int:
        """How many calls of select and watch wait."""
        return self.watches.waiting

    def wake_all(self) -> None:
        """Lets everyone who waits look again; for draining."""
        self._wake_reservers()
        for keyspace in self.namespaces.keyspaces(None):
            self.watches.wake_all(keyspace)
