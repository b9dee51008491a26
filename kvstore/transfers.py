"""Moves copies between the pool and the tiers below it: promotion up, copy-down down.

On the hierarchy's thread; tiers move the bytes on executors of their own. Both directions hold what they touch: a block
that is being copied down has a pin, a slot that is being filled from below is taken and not yet a block.

Copy-down
    Along the tiers, one after the other, in the order that was configured. ``through``: a block is copied down as soon
    as it is committed. ``back``: when its turn to leave has come. Either way the queue is bounded, in bytes; what does
    not fit, and what a tier does not take now, is copied when there is time for it, or lost (counted) if its turn to
    leave comes before. Loads never wait for a store.
Promotion
    One for each key, however many ask. It ends with the block in the pool, or with the knowledge that it cannot be had;
    in both cases whoever waits for the key looks again. A key that could not be read is not tried again for RETRY_S.
    What came up is copied to the tiers that are told to keep such blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import itertools
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Final

from kvstore.begun import in_task
from kvstore.clock import Clock
from kvstore.directory import Block, BlockState, Keyspace, Promotion, Share
from kvstore.gauge import Gauge, read_bytes
from kvstore.pool import Pool
from kvstore.postponed import Postponed
from kvstore.tier import ReadOutcome, Tier, TierState, WriteOutcome

#: Share of the pool that may be pinned by copy-down, and taken by promotion.
_SHARE: Final = 0.25
#: Share of the pool that is kept free or clean under `back`.
_CLEAN_SHARE: Final = 0.125
#: Bytes of one call to a tier: many of its extents, and still soon done.
_BATCH_BYTES: Final = 32 << 20
_BATCH_BLOCKS: Final = 512
#: Batches of copy-down under way at once for each tier.
_WRITES: Final = 2
READ_DEADLINE_S: Final = 10.0
WRITE_DEADLINE_S: Final = 30.0
#: How long a key that a tier promised and could not give counts as absent.
RETRY_S: Final = 5.0
_FAILED_MAX: Final = 65_536
#: How often a tier that reads its index is looked at.
_LOADING_S: Final = 0.1


class WritePolicy(enum.Enum):
    """When a block is copied to the tier below."""

    THROUGH = "through"
    BACK = "back"


@dataclasses.dataclass(slots=True)
class Moved:
    """What went from or to one tier, in one direction: whole blocks, in batches, and how long those took."""

    bytes: int = 0
    batches: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(slots=True)
class _Copy:
    """One block that is to be copied down.

    Attributes:
        leaves: Whether it leaves the pool afterwards.
        tiers: Where it goes.
    """

    block: Block
    leaves: bool
    tiers: tuple[Tier, ...]


class Transfers:
    """See the module.

    Args:
        tiers: In the order in which they are written and looked at.
        wake: Called for each key whose promotion has ended, one way or the other.
        room_made: Called when copies have been made, so that blocks can leave the pool that could not before.
        keepers: Those of the tiers that keep what came up from another one.

    Attributes:
        counts: What happened: promoted, copied, and what was not and why. Only ever grows.
        moved: Bytes and times, by tier and direction.
        gauge: How fast blocks come up.
        held: Blocks that wait for copy-down or are being copied; each has one pin of ours. One whose slot a hanging
            medium may still read stays here for good.
        filling: Slots that are being filled from below, by offset. One that a hanging medium may still write stays here
            for good.
    """

    def __init__(
        self,
        pool: Pool,
        tiers: Sequence[Tier],
        policy: WritePolicy,
        clock: Clock,
        wake: Callable[[Keyspace, bytes], None],
        room_made: Callable[[], None],
        keepers: Sequence[Tier] = (),
    ) -> None:
        self.tiers = tuple(tiers)
        #: Those that copies are made in.
        self._below = tuple(tier for tier in tiers if not tier.asks_others)
        self.counts: Counter[str] = Counter()
        self.moved = {tier.name: {"read": Moved(), "write": Moved()} for tier in tiers}
        self.gauge = Gauge(tiers, clock)
        self._measures = False
        self.held: set[Block] = set()
        self.filling: dict[int, Promotion] = {}
        self._pool = pool
        self._policy = policy
        self._keepers = tuple(keepers)
        self._clock = clock
        self._wake = wake
        self._room_made = room_made
        self._bytes_max = int(pool.arena.size_bytes * _SHARE)
        self._clean_bytes = int(pool.arena.size_bytes * _CLEAN_SHARE)
        self._queued_bytes = 0
        self._coming_bytes = 0
        self._coming_from: Counter[str] = Counter()  # those bytes, by tier
        #: Blocks to copy down, oldest first.
        self._queue: deque[_Copy] = deque()
        self._postponed = Postponed(self._below, self._go_on)
        self._writing = 0
        self._failed: dict[bytes, float] = {}
        #: Names that are being removed: until that is done, the tiers may still have them, and nobody may get them.
        self._removing: Counter[bytes] = Counter()
        #: Names of held blocks. What the pool no longer has of them was removed while it was copied down, and the copy
        #: goes as soon as it is complete.
        self._held_names: Counter[bytes] = Counter()
        self._flushing: Counter[bytes | None] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        if self._below:
            pool.may_leave = self._may_leave
            pool.leaves = self._leaves
            pool.leaving_bytes = lambda: self._queued_bytes
            pool.dirty_stays = policy is WritePolicy.BACK
            pool.copying = lambda: self._queued_bytes >= self._bytes_max

    # -- down ------------------------------------------------------------------------------------------------------

    def offer(self, blocks: Iterable[Block]) -> None:
        """Takes note of blocks that were committed just now."""
        if not self._below:
            return
        if self._policy is WritePolicy.THROUGH:
            for block in blocks:
                if not block.keyspace.namespace.pool_only and not self._enqueue(block, leaves=False):
                    self._postponed.add(block, self._below)
        elif self._pool.arena.size_bytes - self._pool.used_bytes < self._clean_bytes:
            self._clean_ahead()
        self._start_writing()

    def _clean_ahead(self) -> None:
        """Copies the next ones to leave before their turn comes, so that stores need not wait for it then."""
        for home in self._pool.homes():
            for block in home.policy.peek(max(1, self._clean_bytes // home.slot_bytes)):
                if not block.below and not block.pins and not self._enqueue(block, leaves=True):
                    return

    def _may_leave(self, block: Block) -> bool:
        """Whether the pool may free a block now. If not, it leaves by itself once it is copied."""
        # Under `through` too: when it was stored there was too much to copy, and by now there may be time for it.
        if not block.below and self._enqueue(block, leaves=True):
            self._start_writing()
            return False
        self._leaves(block)
        return True

    def _leaves(self, block: Block) -> None:
        """The pool frees a block now."""
        waited = self._postponed.forget(block)
        if block.keyspace.namespace.pool_only:
            return
        if block.below:
            self.counts["not_kept"] += waited
            # From now on the copy below is the only one: its recency is that of this block.
            for tier in self._below:
                tier.touch([block.name])
        else:
            self.counts["left_without_copy"] += 1

    def _enqueue(self, block: Block, *, leaves: bool, tiers: tuple[Tier, ...] | None = None) -> bool:
        """Whether a block is going to be copied now, to `tiers`: None is all of them."""
        size = block.keyspace.slot_bytes
        if block in self.held:
            return False
        if self._queued_bytes >= self._bytes_max:
            return False
        self._postponed.forget(block)
        self._queued_bytes += size
        block.pins += 1
        self.held.add(block)
        self._held_names[block.name] += 1
        self._queue.append(_Copy(block, leaves, self._below if tiers is None else tiers))
        return True

    def _catch_up(self) -> None:
        """What was stored faster than it could be copied is copied when there is time for it."""
        while self._queued_bytes < self._bytes_max and (next_one := self._postponed.take()) is not None:
            block, tiers = next_one
            self._enqueue(block, leaves=False, tiers=tiers)

    def _go_on(self) -> None:
        self._catch_up()
        self._start_writing()

    def _start_writing(self) -> None:
        while self._queue and self._writing < _WRITES:
            batch: list[_Copy] = []
            size = 0
            while self._queue and len(batch) < _BATCH_BLOCKS and (not batch or size < _BATCH_BYTES):
                batch.append(self._queue.popleft())
                size += batch[-1].block.keyspace.slot_bytes
            self._writing += 1
            self._spawn(self._copy_down(batch))

    async def _copy_down(self, batch: list[_Copy]) -> None:
        # A tier that raises has a defect, and nobody knows what still reads these slots.
        lost = {copy.block for copy in batch}
        refused: dict[Tier, list[Block]] = {}
        try:
            lost_here: set[Block] = set()
            for tier in self._below:
                # Removed by a caller while it waited: nobody wants a copy.
                blocks = [
                    copy.block
                    for copy in batch
                    if tier in copy.tiers and copy.block.state is BlockState.READY and copy.block not in lost_here
                ]
                if not blocks:
                    continue
                began = self._clock.monotonic()
                outcomes = await tier.write(
                    [(block.name, self._view(block.keyspace, block.offset)) for block in blocks], WRITE_DEADLINE_S
                )
                moved = self.moved[tier.name]["write"]
                moved.batches += 1
                moved.seconds += self._clock.monotonic() - began
                removed: list[bytes] = []
                for block, outcome in zip(blocks, outcomes, strict=True):
                    self.counts[f"{tier.name}_write_{outcome.value}"] += 1
                    moved.bytes += block.keyspace.block_bytes * (outcome is WriteOutcome.STORED)
                    if outcome is WriteOutcome.BUFFER_LOST:
                        lost_here.add(block)
                    elif outcome in (WriteOutcome.STORED, WriteOutcome.EXISTS):
                        # The world has changed while the bytes moved: a block that was removed since then must not come
                        # back from below.
                        if block.state is BlockState.DOOMED:
                            removed.append(block.name)
                        else:
                            block.below = True
                stored = [
                    (block.name, block.keyspace.block_bytes)
                    for block, outcome in zip(blocks, outcomes, strict=True)
                    if outcome is WriteOutcome.STORED
                ]
                if WriteOutcome.THROTTLED in outcomes:
                    refused[tier] = list(
                        itertools.compress(blocks, (outcome is WriteOutcome.THROTTLED for outcome in outcomes))
                    )
                elif stored:
                    self._postponed.took(tier)
                if self._measures and stored and self.gauge.s_per_byte(tier.name) is None:
                    self._spawn(self.gauge.try_out(tier, stored))
                if removed:
                    await tier.delete(removed)
                    # A block that was stored anew under such a name has lost its copy too, if it had found one.
                    for block in blocks:
                        living = block.keyspace.blocks.get(block.key)
                        if living is not None and living is not block:
                            living.below = False
            lost = lost_here
        finally:
            self._writing -= 1
            for copy in batch:
                block = copy.block
                if block not in lost:
                    self.held.discard(block)
                self._held_names[block.name] -= 1
                if not self._held_names[block.name]:
                    del self._held_names[block.name]
                self._queued_bytes -= block.keyspace.slot_bytes
                if block in lost:
                    # Its pin stays for good: the medium may read the slot at any time.
                    self._pool.remove(block, "buffer_lost")
                    continue
                # One that was read again since its turn came is no longer the coldest, and stays: it is clean now.
                cold = copy.leaves and not block.tick
                self._pool.unpin(block)
                if cold and block.state is BlockState.READY and not block.pins:
                    self._pool.remove(block, "evicted")
            for tier, blocks in refused.items():
                self._postponed.refused(tier, [block for block in blocks if block.state is BlockState.READY])
            self._go_on()
            self._room_made()

    # -- up --------------------------------------------------------------------------------------------------------

    async def available(self, keyspace: Keyspace, keys: Sequence[bytes]) -> int:
        """How many of these keys, from the first on, are in a tier or on their way up."""
        return self._run(keyspace, keys, await self._sources(keyspace, keys))

    async def promote(
        self,
        group: Share,
        keyspace: Keyspace,
        keys: Sequence[bytes],
        parent: bytes | None,
        *,
        chained: bool = True,
        from_peer: bool = False,
    ) -> int:
        """Brings keys up that are not in the pool. Returns how many of them, from the first on, are on their way.

        Args:
            group: Whose share the blocks are counted in.
            parent: The key before keys[0], if any.
            chained: Whether each key continues the one before it.
            from_peer: Whether another daemon asks: only this one's own tiers are looked at.
        """
        sources = await self._sources(keyspace, keys, from_peer=from_peer)
        # The tiers may have taken their time: keys were committed, and other callers began to bring them up.
        run = self._run(keyspace, keys, sources)
        wanted = [
            index for index in range(run) if keys[index] not in keyspace.coming and keys[index] not in keyspace.blocks
        ]
        slot_bytes = keyspace.slot_bytes
        room = (self._bytes_max - self._coming_bytes) // slot_bytes
        limit = max(room, 0 if self._coming_bytes else 1)
        # What finds no room now comes up when it is asked for again; it is on its way all the same.
        del wanted[limit:]
        taken = self._pool.take(group, slot_bytes, len(wanted)) if wanted else None
        if taken is not None and taken.shortfall is not None:
            self.counts[f"not_promoted_{taken.shortfall.value}"] += len(wanted) - len(taken.offsets)
        batches: dict[Tier, list[Promotion]] = {}
        for index, offset in zip(wanted, taken.offsets if taken else (), strict=False):
            source = sources[index]
            assert source is not None
            before = (keys[index - 1] if index else parent) if chained else None
            promotion = Promotion(keys[index], keyspace, offset, before, group, source.name)
            keyspace.coming[keys[index]] = promotion
            self.filling[offset] = promotion
            self._coming_bytes += slot_bytes
            self._coming_from[source.name] += slot_bytes
            batch = batches.setdefault(source, [])
            batch.append(promotion)
            if len(batch) * slot_bytes >= _BATCH_BYTES or len(batch) == _BATCH_BLOCKS:
                self._spawn(self._bring_up(source, batches.pop(source)))
        for source, batch in batches.items():
            self._spawn(self._bring_up(source, batch))
        return run

    async def own(self, keyspace: Keyspace, keys: Sequence[bytes]) -> set[bytes]:
        """Which of these keys are in this daemon's own tiers, or on their way up."""
        sources = await self._sources(keyspace, keys, from_peer=True)
        return {key for key, source in zip(keys, sources, strict=True) if source or key in keyspace.coming}

    async def _sources(
        self, keyspace: Keyspace, keys: Sequence[bytes], *, from_peer: bool = False
    ) -> list[Tier | None]:
        """The fastest tier that has each key."""
        await in_task()
        names = [keyspace.prefix + key for key in keys]
        now = self._clock.monotonic()
        sources: list[Tier | None] = [None] * len(keys)
        for tier in self._asked(from_peer, keyspace):
            missing = [index for index, source in enumerate(sources) if source is None]
            if not missing or tier.state is TierState.FAILED:
                continue
            for index, size in zip(missing, await tier.stat([names[index] for index in missing]), strict=True):
                if size == keyspace.block_bytes and self._failed.get(names[index], 0.0) <= now:
                    sources[index] = tier
        if self._flushing and (None in self._flushing or keyspace.namespace.digest in self._flushing):
            return [None] * len(keys)
        # After the tiers' answers, since a removal may have begun while they took their time.
        hidden = self._removing.keys() | self._held_names.keys()
        if hidden:
            return [None if name in hidden else source for name, source in zip(names, sources, strict=True)]
        return sources

    @staticmethod
    def _run(keyspace: Keyspace, keys: Sequence[bytes], sources: Sequence[Tier | None]) -> int:
        for index, (key, source) in enumerate(zip(keys, sources, strict=True)):
            if source is None and key not in keyspace.coming and key not in keyspace.blocks:
                return index
        return len(keys)

    async def _bring_up(self, tier: Tier, batch: list[Promotion]) -> None:
        outcomes = [ReadOutcome.BUFFER_LOST] * len(batch)  # a tier that raises has a defect, and may still write
        moved, began = self.moved[tier.name]["read"], self._clock.monotonic()
        sizes = [promotion.keyspace.block_bytes for promotion in batch]
        try:
            with self.gauge.reading(tier, sum(sizes)) as read:
                outcomes = await tier.read(
                    [
                        (promotion.keyspace.prefix + promotion.key, self._view(promotion.keyspace, promotion.offset))
                        for promotion in batch
                    ],
                    READ_DEADLINE_S,
                )
                read += read_bytes(outcomes, sizes)
        finally:
            moved.batches += 1
            moved.seconds += self._clock.monotonic() - began
            for promotion, outcome in zip(batch, outcomes, strict=True):
                self.counts[f"{tier.name}_read_{outcome.value}"] += 1
                moved.bytes += promotion.keyspace.block_bytes * (outcome is ReadOutcome.OK)
                self._finish(promotion, outcome, tier)
            self._start_writing()
            tier.touch([promotion.keyspace.prefix + promotion.key for promotion in batch])

    def _finish(self, promotion: Promotion, outcome: ReadOutcome, tier: Tier) -> None:
        """One key has come up, or will not. The world may have changed since it was asked for: it may have been
        committed by a client (then that copy stays) or removed (then nothing may come back).
        """
        keyspace, key = promotion.keyspace, promotion.key
        self._coming_bytes -= keyspace.slot_bytes
        self._coming_from[tier.name] -= keyspace.slot_bytes
        if keyspace.coming.get(key) is promotion:
            del keyspace.coming[key]
        # Never given back where the medium may still write into it.
        if outcome is not ReadOutcome.BUFFER_LOST:
            del self.filling[promotion.offset]
            if outcome is ReadOutcome.OK and not promotion.cancelled and key not in keyspace.blocks:
                parent = keyspace.blocks.get(promotion.parent) if promotion.parent is not None else None
                block = self._pool.place(key, keyspace, promotion.offset, parent, promotion.group)
                block.below = not tier.asks_others
                self._pool.touch([block])
                keyspace.fresh[key] = tier.name
                if tier.asks_others:
                    self.offer([block])  # from here on this daemon has it, and the other one may lose it
                else:
                    others = tuple(keeper for keeper in self._keepers if keeper is not tier)
                    if others and not self._enqueue(block, leaves=False, tiers=others):
                        self._postponed.add(block, others)
            else:
                self._pool.give_back(promotion.group, promotion.offset)
        if outcome in (ReadOutcome.FAILED, ReadOutcome.BUFFER_LOST):
            self._remember_failure(keyspace.prefix + key)
        self._wake(keyspace, key)

    def _remember_failure(self, name: bytes) -> None:
        now = self._clock.monotonic()
        if len(self._failed) >= _FAILED_MAX:
            self._failed = {each: until for each, until in self._failed.items() if until > now}
        if len(self._failed) < _FAILED_MAX:
            self._failed[name] = now + RETRY_S

    # -- how long that takes ---------------------------------------------------------------------------------------

    async def measure(self) -> None:
        """From now on a tier's speed is found out before a request needs to know it: with what is there, once its index
        was read, or else with the first blocks that are copied down.
        """
        self._measures = True
        for tier in self._below:
            while tier.state is TierState.LOADING:
                await asyncio.sleep(_LOADING_S)
            await self.gauge.try_out(tier, tier.scan())

    def coming_s(self, keyspace: Keyspace, keys: Sequence[bytes]) -> float | None:
        """About how long until these keys have come up, which promote() has said to be on their way; None: not
        known.
        """
        sources = {coming.source for coming in map(keyspace.coming.get, keys) if coming is not None}
        # What had no room so far comes after that. From where is not known: the slowest one, in doubt.
        later = sum(key not in keyspace.coming and key not in keyspace.blocks for key in keys)
        last = ""
        if later:
            last = next((tier.name for tier in reversed(self.tiers) if tier.name in sources), self.gauge.slowest())
            sources.add(last)
        return self.seconds({name: later * keyspace.block_bytes if name == last else 0 for name in sources})

    def seconds(self, more_bytes: Mapping[str, int]) -> float | None:
        """About how long until all that is on its way from these tiers is here, and so many bytes after that; None: not
        known.
        """
        slowest = 0.0
        for name, size_bytes in more_bytes.items():
            s_per_byte = self.gauge.s_per_byte(name)
            if s_per_byte is None:
                return None
            slowest = max(slowest, (self._coming_from[name] + size_bytes) * s_per_byte)
        return slowest or None

    # -- removal ---------------------------------------------------------------------------------------------------

    async def delete(self, keyspace: Keyspace, keys: Sequence[bytes], *, from_peer: bool = False) -> int:
        """Removes keys from every tier (for a peer, from this daemon's own), and stops those that are on their way up.
        Returns the most that one tier had.
        """
        names = [keyspace.prefix + key for key in keys]
        self._removing.update(names)
        try:
            for key in keys:
                self._cancel(keyspace, key)
            return max([await tier.delete(names) for tier in self._asked(from_peer, keyspace)], default=0)
        finally:
            self._removing.subtract(names)
            for name in names:
                if not self._removing[name]:
                    del self._removing[name]

    @contextlib.contextmanager
    def flushing(self, digest: bytes | None, keyspaces: Iterable[Keyspace]) -> Iterator[None]:
        """While a namespace (None: every one) is being flushed, nothing of it comes up."""
        for keyspace in keyspaces:
            for key in list(keyspace.coming):
                self._cancel(keyspace, key)
        self._flushing[digest] += 1
        try:
            yield
        finally:
            self._flushing[digest] -= 1
            if not self._flushing[digest]:
                del self._flushing[digest]

    async def delete_namespace(self, digest: bytes | None, *, from_peer: bool = False) -> int:
        """Removes a namespace (None: all) from every tier. Returns the most blocks that one tier had."""
        return max([await tier.delete_namespace(digest) for tier in self._asked(from_peer)], default=0)

    def tiers_of(self, keyspace: Keyspace) -> Sequence[Tier]:
        """The tiers that its blocks may be in."""
        return () if keyspace.namespace.pool_only else self.tiers

    def _asked(self, from_peer: bool, keyspace: Keyspace | None = None) -> Sequence[Tier]:
        """The tiers that are asked; on behalf of another daemon only this one's own."""
        if keyspace is not None and keyspace.namespace.pool_only:
            return ()
        return self._below if from_peer else self.tiers

    def _cancel(self, keyspace: Keyspace, key: bytes) -> None:
        promotion = keyspace.coming.pop(key, None)
        if promotion is not None:
            promotion.cancelled = True
            self._wake(keyspace, key)

    # -- life ------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or under way."""
        return not self._queue and not self._tasks

    @property
    def coming_bytes(self) -> int:
        """Bytes of slots that are being filled from below."""
        return self._coming_bytes

    async def wait_for_some(self) -> None:
        """Until something that is under way has ended."""
        if self._tasks:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for copy-down or are being copied."""
        return self._queued_bytes

    async def settle(self, timeout_s: float, blocks: Iterable[Block] = ()) -> bool:
        """Copies down what is queued, and blocks that have no copy below. Returns whether all of it was done in
        time.
        """
        left = deque(blocks) if self._below else deque()
        try:
            async with asyncio.timeout(timeout_s):
                while left or not self.idle:
                    while left:
                        block = left[0]
                        copied = block.below or block.state is BlockState.DOOMED or block in self.held
                        if not copied and not self._enqueue(block, leaves=False):
                            break
                        left.popleft()
                    self._start_writing()
                    await self.wait_for_some()
        except TimeoutError:
            return False
        return True

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _view(self, keyspace: Keyspace, offset: int) -> memoryview:
        return self._pool.arena.memory.buffer[offset : offset + keyspace.block_bytes]
