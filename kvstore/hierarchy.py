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
import dataclasses
import enum
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from kvstore.arena import Arena, Epochs, Offsets, Segment
from kvstore.blocks import DIGEST_BYTES, KEY_BYTES_MAX, check_block_bytes, digest_of_identity, parse_identity
from kvstore.clock import Clock
from kvstore.directory import Block, BlockState, Home, Keyspace, NamespaceEntry
from kvstore.errors import InvalidRequest, LimitExceeded, UnknownNamespace
from kvstore.leases import Group, Lease, LeaseTable, Session
from kvstore.policy import Ticker

#: Namespaces in one life of the daemon. Each costs about a kilobyte; a client that makes one per request is mistaken.
NAMESPACES_MAX: Final = 4096
#: KV-cache groups of one namespace. The largest hybrid model known has 12.
GROUPS_MAX: Final = 64
#: Segments that are looked at when one has to change its size.
_STEAL_CANDIDATES: Final = 8


class Shortfall(enum.Enum):
    """Why a reservation is smaller than asked."""

    PINNED = "pinned"
    SHARE = "share"
    POPULATING = "populating"
    TOO_LARGE = "too_large"
    DRAINING = "draining"


class Outcome(enum.IntEnum):
    """What became of one committed slot."""

    STORED = 1
    EXISTS = 2
    NOT_RESERVED = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Reserved:
    """Empty slots. `shortfall` says why there are fewer than asked."""

    offsets: list[int]
    shortfall: Shortfall | None


@dataclasses.dataclass(slots=True)
class Counts:
    """What happened since the start, for stats and metrics. Only ever grows."""

    hits: Counter[str] = dataclasses.field(default_factory=Counter)  # blocks handed to a reader, by tier
    misses: Counter[str] = dataclasses.field(default_factory=Counter)  # keys asked for and not handed out, by reason
    stores: Counter[str] = dataclasses.field(default_factory=Counter)  # slots committed, by outcome
    refused: Counter[str] = dataclasses.field(default_factory=Counter)  # slots asked for and not given, by reason
    removed: Counter[str] = dataclasses.field(default_factory=Counter)  # blocks that left, by cause
    bytes: Counter[str] = dataclasses.field(default_factory=Counter)  # block bytes stored and handed out
    segment_moves: int = 0


class Hierarchy:
    """See the module. All arguments in prefix order where they are keys."""

    def __init__(self, arena: Arena, clock: Clock) -> None:
        self.arena = arena
        self.sessions = LeaseTable(clock)
        self.namespaces: dict[bytes, NamespaceEntry] = {}
        self.counts = Counts()
        self.draining = False
        #: Whether population ended early for want of memory: what is there is all there will be.
        self.population_failed = False
        self._progress: asyncio.Future[None] | None = None
        self._ticker = Ticker()
        self._homes: dict[int, list[Home]] = {}
        self._waiting = 0
        #: Bytes of slots under blocks. Kept, not computed: stats and eviction ask often.
        self.used_bytes = 0
        self.block_count = 0

    # -- namespaces ------------------------------------------------------------------------------------------------

    def open_namespace(self, identity: str, group_bytes: Sequence[int]) -> NamespaceEntry:
        """Opens a namespace, or finds it open.

        Raises:
            InvalidRequest: the identity is not one.
            SizeMismatch: it is open with other block sizes; both are named.
            LimitExceeded: too many groups or namespaces.
        """
        fields = parse_identity(identity)
        sizes = tuple(group_bytes)
        if not sizes or any(size < 1 for size in sizes):
            raise InvalidRequest(f"block bytes by group are {list(sizes)}: give one size of at least 1 for each group")
        if len(sizes) > GROUPS_MAX:
            raise LimitExceeded(f"{len(sizes)} KV-cache groups; at most {GROUPS_MAX} (groups_max) are supported")
        digest = digest_of_identity(identity)
        entry = self.namespaces.get(digest)
        if entry is not None:
            check_block_bytes(identity, entry.group_bytes, sizes)
            return entry
        if len(self.namespaces) >= NAMESPACES_MAX:
            raise LimitExceeded(
                f"{NAMESPACES_MAX} namespaces are open (namespaces_max); restart the daemon to forget them"
            )
        entry = self.namespaces[digest] = NamespaceEntry(digest, identity, dict(fields), sizes)
        return entry

    def keyspace(self, digest: bytes, kv_group: int) -> Keyspace:
        """The directory of one group of an open namespace.

        Raises:
            UnknownNamespace: it was never opened in this life of the daemon.
            InvalidRequest: it has no such group.
        """
        entry = self.namespaces.get(digest)
        if entry is None:
            if len(digest) != DIGEST_BYTES:
                raise InvalidRequest(f"a namespace digest has {DIGEST_BYTES} bytes, not {len(digest)}")
            raise UnknownNamespace(f"namespace {digest.hex()} is not open here: call OpenNamespace first")
        if kv_group >= len(entry.keyspaces):
            raise InvalidRequest(f"group {kv_group} of namespace {digest.hex()}: it has {len(entry.keyspaces)} groups")
        return entry.keyspaces[kv_group]

    # -- reading ---------------------------------------------------------------------------------------------------

    def lookup(self, keyspace: Keyspace, keys: Sequence[bytes]) -> int:
        """Length of the leading run that is available. Pins nothing and changes nothing."""
        blocks = keyspace.blocks
        for index, key in enumerate(keys):
            if key not in blocks:
                return index
        return len(keys)

    def acquire(self, session: Session, keyspace: Keyspace, keys: Sequence[bytes]) -> Lease | None:
        """Pins the leading run that is available; None where that is empty. Hit and pin are one step."""
        run: list[Block | None] = list(map(keyspace.blocks.get, keys))
        if None in run:
            del run[run.index(None) :]
            self.counts.misses["absent"] += len(keys) - len(run)
        if not run:
            return None
        return self._grant(session, keyspace, run, drop=False)  # type: ignore[arg-type]

    async def select(
        self, session: Session, keyspace: Keyspace, keys: Sequence[bytes], *, drop: bool, wait_s: float
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
            await self._wait_for(keyspace, missing, left)
            # The world has changed: keys came and went, other callers claimed, this session may have ended. Nothing
            # that was seen above is used again.
            if session.ended:
                return None
        if missing is not None:
            claimed = missing in keyspace.blocks
            self.counts.misses["claimed" if claimed else "absent"] += len(keys) - len(run)
        return self._grant(session, keyspace, run, drop=drop) if run else None

    async def _wait_for(self, keyspace: Keyspace, key: bytes, timeout_s: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = keyspace.waiters.setdefault(key, [])
        queue.append(woken)
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await woken
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1
            # Everyone is woken at once and asks again, so a wake-up that comes too late takes nothing from the others.
            if not woken.done() or woken.cancelled():
                queue.remove(woken)
                if not queue and keyspace.waiters.get(key) is queue:
                    del keyspace.waiters[key]

    def _wake(self, keyspace: Keyspace, key: bytes) -> None:
        for woken in keyspace.waiters.pop(key, ()):
            if not woken.done():
                woken.set_result(None)

    def _grant(self, session: Session, keyspace: Keyspace, run: list[Block], *, drop: bool) -> Lease:
        for block in run:
            block.pins += 1
        lease = self.sessions.grant(session, run, drop)
        if drop:
            for block in run:
                block.claim = lease.id
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
        leases = [lease for lease in map(session.leases.get, lease_ids) if lease is not None]
        if remove and any(not lease.drop for lease in leases):
            raise InvalidRequest("remove is for leases of drop_select: an ordinary reader may not take blocks away")
        removed = 0
        for lease in leases:
            if lease.id not in session.leases:
                continue  # named twice in one call
            if remove:
                removed += sum(self._remove(block, "dropped") for block in lease.blocks)
            if not hold:
                del session.leases[lease.id]
                self._end_lease(lease)
        return len(leases), removed

    def _end_lease(self, lease: Lease) -> None:
        if lease.drop:
            self._unclaim(lease)
        for block in lease.blocks:
            block.pins -= 1
            if not block.pins and block.state is BlockState.DOOMED:
                self._free_slot(block)
        # The touch comes here and not at the grant: until now the pins kept the blocks, and the reader did not wait for
        # it.
        self._touch([block for block in lease.blocks if block.state is BlockState.READY])

    def _unclaim(self, lease: Lease) -> None:
        for block in lease.blocks:
            if block.claim == lease.id:
                block.claim = 0
                self._wake(block.keyspace, block.key)

    # -- writing ---------------------------------------------------------------------------------------------------

    def reserve(self, session: Session, keyspace: Keyspace, count: int) -> Reserved:
        """Takes up to `count` empty slots; colder blocks leave for them."""
        slot_bytes, group = keyspace.slot_bytes, session.group
        shortfall: Shortfall | None = None
        allowed = count
        if self.draining:
            shortfall, allowed = Shortfall.DRAINING, 0
        elif not self.arena.fits(slot_bytes) or (group.share_bytes and slot_bytes > group.share_bytes):
            shortfall, allowed = Shortfall.TOO_LARGE, 0
        elif group.share_bytes:
            self._shrink_share(group, min(count * slot_bytes, group.share_bytes))
            allowed = min(count, max(0, group.share_bytes - group.used_bytes) // slot_bytes)
            shortfall = Shortfall.SHARE if allowed < count else None
        taken = self.arena.allocate(slot_bytes, allowed) if allowed else []
        while len(taken) < allowed:
            if not self.arena.populated and not self.population_failed:
                # Memory is on its way; nothing has to leave for want of it.
                shortfall = Shortfall.POPULATING
                break
            if not self._make_room(slot_bytes, allowed - len(taken)):
                shortfall = Shortfall.PINNED
                break
            taken += self.arena.allocate(slot_bytes, allowed - len(taken))
        for offset in taken:
            session.reserved[offset] = keyspace
        group.used_bytes += len(taken) * slot_bytes
        return Reserved(taken, shortfall)

    async def reserve_within(self, session: Session, keyspace: Keyspace, count: int, wait_s: float) -> Reserved:
        """As reserve, but waits up to `wait_s` for memory that is still on its way. Counts what is refused in the
        end.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        got = self.reserve(session, keyspace, count)
        while got.shortfall is Shortfall.POPULATING and (left := deadline - loop.time()) > 0:
            self._progress = self._progress or loop.create_future()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._progress), left)
            # The session may have ended in between; what it held went back then.
            if session.ended:
                return Reserved([], Shortfall.DRAINING)
            more = self.reserve(session, keyspace, count - len(got.offsets))
            got = Reserved(got.offsets + more.offsets, more.shortfall)
        if got.shortfall is not None:
            self.counts.refused[got.shortfall.value] += count - len(got.offsets)
        return got

    def add_populated(self, length: int) -> None:
        """The next `length` bytes of the pool have their memory."""
        self.arena.add_populated(length)
        self._wake_population()

    def end_population(self) -> None:
        """The machine has no more memory: what is populated now is all there will be."""
        self.population_failed = True
        self._wake_population()

    def _wake_population(self) -> None:
        if self._progress is not None:
            self._progress.set_result(None)
            self._progress = None

    def commit(
        self, session: Session, keyspace: Keyspace, offsets: Sequence[int], keys: Sequence[bytes], parent: bytes = b""
    ) -> list[Outcome]:
        """Publishes filled slots. A key that exists already sends its slot back.

        Args:
            parent: The key before keys[0]; empty where there is none or it is not known.

        Raises:
            InvalidRequest: a key is empty or too long, or there are not as many keys as slots. Nothing was changed.
        """
        if len(offsets) != len(keys):
            raise InvalidRequest(f"{len(offsets)} slots and {len(keys)} keys: each slot needs one key")
        self.check_keys(keys)
        blocks, before = keyspace.blocks, keyspace.blocks.get(parent) if parent else None
        outcomes, chain = [], []
        home: Home | None = None
        for offset, key in zip(offsets, keys, strict=True):
            if session.reserved.get(offset) is not keyspace:
                outcomes.append(Outcome.NOT_RESERVED)
                continue
            block = blocks.get(key)
            if block is not None:
                del session.reserved[offset]
                self._return_reserved(session.group, offset)
                outcomes.append(Outcome.EXISTS)
            else:
                del session.reserved[offset]
                home = home or self._home(session.group, keyspace.slot_bytes)
                block = Block(key, keyspace, offset, before, home)
                block.segment = self.arena.fill(offset, block)
                blocks[key] = block
                home.blocks += 1
                self.used_bytes += keyspace.slot_bytes
                self.block_count += 1
                outcomes.append(Outcome.STORED)
                if keyspace.waiters:
                    self._wake(keyspace, key)
            chain.append(block)
            before = block
        self._touch(chain)
        for outcome, number in Counter(outcomes).items():
            self.counts.stores[outcome.name.lower()] += number
        self.counts.bytes["stored"] += outcomes.count(Outcome.STORED) * keyspace.block_bytes
        return outcomes

    def abort(self, session: Session, offsets: Iterable[int]) -> int:
        """Returns slots unfilled. Those that the session does not hold are skipped. Returns how many went back."""
        returned = 0
        for offset in offsets:
            if session.reserved.pop(offset, None) is not None:
                self._return_reserved(session.group, offset)
                returned += 1
        return returned

    @staticmethod
    def check_keys(keys: Iterable[bytes]) -> None:
        """Raises InvalidRequest where a key is empty or longer than KEY_BYTES_MAX."""
        lengths = set(map(len, keys))
        if lengths and (min(lengths) == 0 or max(lengths) > KEY_BYTES_MAX):
            raise InvalidRequest(f"a key has {min(lengths) or max(lengths)} bytes; keys have 1 to {KEY_BYTES_MAX}")

    def _return_reserved(self, group: Group, offset: int) -> None:
        segment = self.arena.segment_of(offset)
        group.used_bytes -= segment.slot_bytes
        self.arena.free(offset, segment, reserved=True)

    # -- removing --------------------------------------------------------------------------------------------------

    def delete(self, keyspace: Keyspace, keys: Iterable[bytes]) -> int:
        """Removes blocks from every tier; pinned ones stop answering now and give their slots back with the last
        pin.
        """
        found = [block for block in map(keyspace.blocks.get, keys) if block is not None]
        return sum(self._remove(block, "deleted") for block in found)

    def flush(self, digest: bytes | None, limit: int) -> int:
        """Removes up to `limit` blocks of a namespace (None: of all). Call again until it gives less than that.

        Raises:
            UnknownNamespace: it was never opened in this life of the daemon.
        """
        if digest is not None:
            self.keyspace(digest, 0)
        doomed: list[Block] = []
        for keyspace in self._keyspaces(digest):
            for block in keyspace.blocks.values():
                if len(doomed) == limit:
                    break
                doomed.append(block)
        return sum(self._remove(block, "flushed") for block in doomed)

    def evict(self, free_bytes: int, limit: int) -> int:
        """Evicts up to `limit` of the coldest blocks, until so many bytes of the pool are free. Returns how many
        left.
        """
        evicted = 0
        before, free = self.used_bytes, self.free_bytes
        while evicted < limit and free + before - self.used_bytes < free_bytes:
            if not self._evict_coldest([home for homes in self._homes.values() for home in homes]):
                break
            evicted += 1
        return evicted

    @property
    def free_bytes(self) -> int:
        """Populated bytes that hold neither a block nor a reservation."""
        free_slots = sum(
            len(segment.free) * size for size, class_ in self.arena.classes.items() for segment in class_.roomy.values()
        )
        return self.arena.free_granules * (2 << 20) + free_slots

    def _remove(self, block: Block, cause: str) -> bool:
        if block.state is BlockState.DOOMED:
            return False
        self._unlink(block, cause)
        if not block.pins:
            self._free_slot(block)
        return True

    def _unlink(self, block: Block, cause: str) -> None:
        """Takes a block out of the directory: from here on it does not answer."""
        del block.keyspace.blocks[block.key]
        block.home.policy.forget(block)
        block.state = BlockState.DOOMED
        self.counts.removed[cause] += 1

    def _free_slot(self, block: Block) -> None:
        assert block.state is BlockState.DOOMED and not block.pins and block.segment is not None
        self.arena.free(block.offset, block.segment, reserved=False)
        block.segment = None
        slot_bytes, home = block.keyspace.slot_bytes, block.home
        self.used_bytes -= slot_bytes
        self.block_count -= 1
        home.group.used_bytes -= slot_bytes
        home.blocks -= 1
        if not home.blocks:
            self._homes[slot_bytes].remove(home)
            if not self._homes[slot_bytes]:
                del self._homes[slot_bytes]

    # -- making room -----------------------------------------------------------------------------------------------

    def _home(self, group: Group, slot_bytes: int) -> Home:
        homes = self._homes.setdefault(slot_bytes, [])
        for home in homes:
            if home.group is group:
                return home
        home = Home(group, slot_bytes, self._ticker)
        homes.append(home)
        return home

    def _touch(self, chain: list[Block]) -> None:
        """Notes a use of blocks in prefix order, and of all that come before the first of them."""
        if not chain:
            return
        ancestors: list[Block] = []
        block: Block | None = chain[0]
        while block is not None:
            parent = block.parent
            while parent is not None and parent.state is BlockState.DOOMED:
                parent = block.parent = parent.parent
            if parent is not None:
                ancestors.append(parent)
            block = parent
        if ancestors:
            ancestors.reverse()
            chain = ancestors + chain
        first = chain[0].home
        if all(block.home is first for block in chain):
            first.policy.touch(chain)
        else:
            by_home: dict[Home, list[Block]] = {}
            for block in chain:
                by_home.setdefault(block.home, []).append(block)
            for home, several in by_home.items():
                home.policy.touch(several)

    def _shrink_share(self, group: Group, needed_bytes: int) -> None:
        """Evicts a group's own blocks, coldest first, until its share has room for so many bytes more."""
        while group.used_bytes + needed_bytes > group.share_bytes:
            own = [home for homes in self._homes.values() for home in homes if home.group is group]
            if not self._evict_coldest(own):
                return

    def _evict_coldest(self, homes: Iterable[Home]) -> bool:
        """Evicts the coldest unpinned block of these homes; False where all are pinned."""
        while True:
            ages = [(age, home) for home in homes if (age := home.policy.oldest_tick()) is not None]
            if not ages:
                return False
            block = min(ages, key=lambda pair: pair[0])[1].policy.pop()
            # A pinned one is left out of the order here; the end of its lease touches it and so puts it back.
            if block is not None and not block.pins:
                self._unlink(block, "evicted")
                self._free_slot(block)
                return True

    def _make_room(self, slot_bytes: int, wanted: int) -> bool:
        """Frees at least one slot of a size, or granules for it, if anything can leave; about `wanted` if so many are
        cold.

        The coldest leave first over all sizes: a segment of another size changes hands if, on the average, its blocks
        are colder than the coldest block of this size. That is also what ends the starvation of a size: with few slots,
        all its blocks are young.
        """
        own = self._homes.get(slot_bytes, [])
        ages = [age for home in own if (age := home.policy.oldest_tick()) is not None]
        if len(self.arena.classes) > (slot_bytes in self.arena.classes) and self._move_segment(
            slot_bytes, min(ages) if ages else None
        ):
            return True
        for freed in range(wanted):
            if not self._evict_coldest(own):
                return freed > 0
            if not own:  # the last block of this size left and took its home along
                return True
        return True

    def _move_segment(self, slot_bytes: int, own_age: int | None) -> bool:
        """Empties the coldest run of segments of other sizes that is colder than `own_age` (None: than nothing)."""

        def movable(segment: Segment) -> bool:
            return (
                segment.slot_bytes != slot_bytes
                and not segment.reserved
                and all(not block.pins for block in self._blocks_in(segment))
            )

        others = [home for size, homes in self._homes.items() if size != slot_bytes for home in homes]
        others.sort(key=lambda home: home.policy.oldest_tick() or 0)
        seeds: dict[Segment, None] = {}
        for home in others:
            for block in home.policy.peek(4 * _STEAL_CANDIDATES):
                if block.segment is not None and len(seeds) < _STEAL_CANDIDATES:
                    seeds[block.segment] = None
        least = -(-slot_bytes // (2 << 20))
        for granules in sorted({self.arena.granules_for(slot_bytes), least}, reverse=True):
            coldest: tuple[float, list[Segment]] | None = None
            for run in self.arena.windows(granules, seeds, movable):
                ticks = [block.tick for segment in run for block in self._blocks_in(segment)]
                age = sum(ticks) / len(ticks) if ticks else 0.0
                if (own_age is None or age < own_age) and (coldest is None or age < coldest[0]):
                    coldest = (age, run)
            if coldest is not None:
                for segment in coldest[1]:
                    for block in list(self._blocks_in(segment)):
                        self._unlink(block, "evicted")
                        self._free_slot(block)
                self.counts.segment_moves += len(coldest[1])
                return True
        return False

    @staticmethod
    def _blocks_in(segment: Segment) -> Iterator[Block]:
        for block in segment.blocks:
            if block is not None:
                assert isinstance(block, Block)
                yield block

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
        for gone in self.sessions.end(session):
            leases, gone.leases = list(gone.leases.values()), {}
            for lease in leases:
                self._end_lease(lease)
            reserved, gone.reserved = list(gone.reserved), {}
            for offset in reserved:
                self._return_reserved(gone.group, offset)

    # -- looking ---------------------------------------------------------------------------------------------------

    def _keyspaces(self, digest: bytes | None) -> Iterator[Keyspace]:
        for entry in self.namespaces.values() if digest is None else [self.namespaces[digest]]:
            yield from entry.keyspaces

    def list_blocks(self, digest: bytes | None, limit: int) -> tuple[list[Block], int]:
        """Up to `limit` blocks of a namespace (None: of all) and how many there are.

        Raises:
            UnknownNamespace: it was never opened in this life of the daemon.
        """
        if digest is not None:
            self.keyspace(digest, 0)
        listed: list[Block] = []
        total = 0
        for keyspace in self._keyspaces(digest):
            total += len(keyspace.blocks)
            for block in keyspace.blocks.values():
                if len(listed) == limit:
                    break
                listed.append(block)
        return listed, total

    @property
    def waiting(self) -> int:
        """How many select calls wait."""
        return self._waiting

    def wake_all(self) -> None:
        """Lets every waiting select look again; for draining."""
        for keyspace in self._keyspaces(None):
            for key in list(keyspace.waiters):
                self._wake(keyspace, key)
