"""The cpu tier: which slots are taken, which blocks rest in them, who has to leave.

Owned by the hierarchy and on its thread. It knows blocks, homes and segments, but neither sessions nor leases: a block
that somebody holds has pins, and a block with pins stays.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from kvstore.arena import GRANULE_BYTES, Arena, Segment
from kvstore.directory import Block, BlockState, Home, Keyspace, Share
from kvstore.policy import Ticker

#: Segments that are looked at when one has to change its size.
_STEAL_CANDIDATES: Final = 8
#: The same, of each size, where a size has nothing left that could leave.
_STARVED_CANDIDATES: Final = 256


class Shortfall(enum.Enum):
    """Why a reservation is smaller than asked."""

    PINNED = "pinned"
    SHARE = "share"
    POPULATING = "populating"
    TOO_LARGE = "too_large"
    DRAINING = "draining"
    COPYING = "copying"


class Eviction(enum.Enum):
    """What became of an attempt to evict one block."""

    DONE = "done"
    LATER = "later"  # one is being copied down, and leaves when that is done
    NOTHING = "nothing"  # all are pinned


@dataclasses.dataclass(frozen=True, slots=True)
class Reserved:
    """Empty slots. `shortfall` says why there are fewer than asked."""

    offsets: list[int]
    shortfall: Shortfall | None


class Pool:
    """See the module.

    Attributes:
        arena: The memory.
        used_bytes: Bytes of slots under blocks. Kept, not computed: stats and eviction ask often.
        block_count: Blocks that rest here, doomed ones included.
        removed: Blocks that left, by cause.
        segment_moves: Segments that changed their slot size under pressure.
        may_leave: Asked before an unpinned block is evicted. False: whoever answered has pinned it, and removes it
            later.
        leaves: Told of each block that is evicted now, whatever may_leave would say.
        dirty_stays: Whether blocks without a copy below keep their segment from changing its slot size.
        copying: Whether so much is being copied down that no block without a copy can be taken on.
        leaving_bytes: Bytes of slots that are being copied down now.
        population_failed: Whether population ended early for want of memory: what is there is all there will be.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.used_bytes = 0
        self.block_count = 0
        self.removed: Counter[str] = Counter()
        self.segment_moves = 0
        self.population_failed = False
        self.may_leave: Callable[[Block], bool] = lambda block: True
        self.leaves: Callable[[Block], None] = lambda block: None
        self.dirty_stays = False
        self.copying: Callable[[], bool] = lambda: False
        self.leaving_bytes: Callable[[], int] = lambda: 0
        self._ticker = Ticker()
        self._homes: dict[int, list[Home]] = {}
        #: What the last walk of _pop_stranded found and did not give so far, and for which homes it walked.
        self._stranded: list[Block] = []
        self._stranded_of: list[Home] = []

    # -- slots -----------------------------------------------------------------------------------------------------

    def take(self, group: Share, slot_bytes: int, count: int) -> Reserved:
        """Takes up to `count` empty slots, counted in the group's share; colder blocks leave for them."""
        shortfall: Shortfall | None = None
        allowed = count
        if not self.arena.fits(slot_bytes) or (group.share_bytes and slot_bytes > group.share_bytes):
            return Reserved([], Shortfall.TOO_LARGE)
        if group.share_bytes:
            later = self._shrink_share(group, min(count * slot_bytes, group.share_bytes))
            allowed = min(count, max(0, group.share_bytes - group.used_bytes) // slot_bytes)
            if allowed < count:
                shortfall = Shortfall.COPYING if later else Shortfall.SHARE
        taken = self.arena.allocate(slot_bytes, allowed) if allowed else []
        while len(taken) < allowed:
            if not self.arena.populated and not self.population_failed:
                # Memory is on its way; nothing has to leave for want of it.
                shortfall = Shortfall.POPULATING
                break
            made = self._make_room(slot_bytes, allowed - len(taken))
            if made is not Eviction.DONE:
                shortfall = Shortfall.COPYING if made is Eviction.LATER else Shortfall.PINNED
                break
            taken += self.arena.allocate(slot_bytes, allowed - len(taken))
        group.used_bytes += len(taken) * slot_bytes
        return Reserved(taken, shortfall)

    def give_back(self, group: Share, offset: int) -> None:
        """Takes an empty slot back."""
        segment = self.arena.segment_of(offset)
        group.used_bytes -= segment.slot_bytes
        self.arena.free(offset, segment, reserved=True)

    def place(self, key: bytes, keyspace: Keyspace, offset: int, parent: Block | None, group: Share) -> Block:
        """Turns a taken slot into a block that answers."""
        home = self._home(group if group.share_bytes else None, keyspace.slot_bytes)
        block = Block(key, keyspace, offset, parent, group, home)
        if parent is not None:
            parent.children += 1
        block.segment = self.arena.fill(offset, block)
        keyspace.blocks[key] = block
        if keyspace.journal is not None:
            keyspace.journal.came(key)
        home.blocks += 1
        self.used_bytes += keyspace.slot_bytes
        self.block_count += 1
        return block

    def remove(self, block: Block, cause: str) -> bool:
        """Takes a block out of the directory: from here on it does not answer. Its slot goes back with its last pin."""
        if block.state is BlockState.DOOMED:
            return False
        self._unlink(block, cause)
        keeper = block.keyspace.kept.pop(block, None)
        if keeper is not None:
            del keeper[block]
            block.pins -= 1
        if not block.pins:
            self._free_slot(block)
        return True

    def keep(self, block: Block, keeper: dict[Block, None]) -> None:
        """Pins a block until it is removed, or let go of; `keeper` is where that is counted."""
        block.pins += 1
        keeper[block] = None
        block.keyspace.kept[block] = keeper

    def let_go(self, keeper: dict[Block, None]) -> None:
        """Ends what keep() began, for all of a keeper."""
        while keeper:
            block, _ = keeper.popitem()
            del block.keyspace.kept[block]
            self.unpin(block)

    def unpin(self, block: Block) -> None:
        """Takes one pin off."""
        block.pins -= 1
        if block.pins:
            return
        if block.state is BlockState.DOOMED:
            self._free_slot(block)
        elif not block.tick:  # its turn to leave came while it was pinned
            self.touch([block])

    @property
    def free_bytes(self) -> int:
        """Populated bytes that hold neither a block nor a reservation."""
        free_slots = sum(
            len(segment.free) * size for size, class_ in self.arena.classes.items() for segment in class_.roomy.values()
        )
        return self.arena.free_granules * GRANULE_BYTES + free_slots

    def evict(self, free_bytes: int, limit: int) -> int:
        """Evicts up to `limit` of the coldest blocks, until so many bytes are free. Returns how many left."""
        evicted = 0
        before, free = self.used_bytes, self.free_bytes
        while evicted < limit and free + before - self.used_bytes < free_bytes:
            if self._evict_coldest(self.homes()) is not Eviction.DONE:
                break
            evicted += 1
        return evicted

    def homes(self) -> list[Home]:
        """All that have blocks here."""
        return [home for homes in self._homes.values() for home in homes]

    # -- who leaves ------------------------------------------------------------------------------------------------

    def _home(self, share: Share | None, slot_bytes: int) -> Home:
        homes = self._homes.setdefault(slot_bytes, [])
        for home in homes:
            if home.share is share:
                return home
        home = Home(share, slot_bytes, self._ticker)
        homes.append(home)
        return home

    def touch(self, chain: list[Block]) -> None:
        """Notes a use of blocks in prefix order.

        What comes before the first of them is not touched, however long it is: a block that others continue is passed
        over when its turn to leave comes.
        """
        if not chain:
            return
        first = chain[0].home
        if len({block.home for block in chain}) == 1:
            first.policy.touch(chain)
        else:
            by_home: dict[Home, list[Block]] = {}
            depth: dict[Home, int] = {}
            for index, block in enumerate(chain):
                by_home.setdefault(block.home, []).append(block)
                depth.setdefault(block.home, index)
            # A part that begins further down the chain counts as older, so that between homes, too, suffixes go first.
            age = self._ticker.advance(len(chain) + 1)
            for home, several in by_home.items():
                home.policy.touch(several, age - depth[home])

    def _shrink_share(self, group: Share, needed_bytes: int) -> bool:
        """Evicts a group's own blocks, coldest first, until its share has room for so many bytes more.

        Returns whether some of the room is made only when blocks have been copied down.
        """
        leaving_bytes = 0
        while group.used_bytes - leaving_bytes + needed_bytes > group.share_bytes:
            homes = [home for home in self.homes() if home.share is group]
            before = self.leaving_bytes()
            made = self._evict_coldest(homes)
            if made is Eviction.NOTHING or (made is Eviction.LATER and self.leaving_bytes() == before):
                break
            leaving_bytes += self.leaving_bytes() - before
        return leaving_bytes > 0

    def _evict_coldest(self, homes: list[Home]) -> Eviction:
        """Evicts the coldest unpinned block of these homes."""
        while True:
            block = self._pop_coldest(homes)
            if block is None:
                return Eviction.NOTHING
            if self.dirty_stays and self.copying() and not block.below:
                # It could only leave without a copy; a little later it leaves with one.
                self._pass(block)
                block.home.next.append(block)
                return Eviction.LATER
            if self.may_leave(block):
                self._unlink(block, "evicted")
                self._free_slot(block)
                return Eviction.DONE
            if self.dirty_stays:
                return Eviction.LATER  # it is being copied, and leaves then; taking on more would empty the pool

    def _pop_coldest(self, homes: list[Home]) -> Block | None:
        """Takes the block that should leave first out of the order.

        A block that others continue leaves right after them: their suffix goes first, however the two were used. Only
        where nothing else can leave does it go before.
        """
        block: Block | None
        for home in homes:
            while home.next:
                block = home.next.pop()
                if self._passed(block) and not block.children:
                    return block
        while True:
            ages = [(age, home) for home in homes if (age := home.policy.oldest_age()) is not None]
            if not ages:
                break
            block = min(ages, key=lambda pair: pair[0])[1].policy.pop()
            # A pinned one is left out of the order here; the end of its lease touches it and so puts it back.
            if block is None or block.pins:
                continue
            if not block.children:
                return block
            self._pass(block)
        return self._pop_stranded(homes)

    def _pop_stranded(self, homes: list[Home]) -> Block | None:
        """Of blocks that all continue into something pinned: one that nothing unpinned continues.

        A walk over all of them finds every such block at once. They are kept until one more is passed over, which may
        continue one of them.
        """
        if self._stranded_of != homes:
            self._stranded_of, self._stranded = list(homes), []
        for fresh in (False, True):
            if fresh:
                left = [block for home in homes for block in home.passed if self._passed(block)]
                inner = {block.parent for block in left}
                self._stranded = [block for block in reversed(left) if block not in inner]
            while self._stranded:
                block = self._stranded.pop()
                if self._passed(block):
                    del block.home.passed[block]
                    return block
        return None

    @staticmethod
    def _passed(block: Block) -> bool:
        """Whether a block that was passed over is out of the order still, and free to leave."""
        return block.state is BlockState.READY and not block.tick and not block.pins

    def _pass(self, block: Block) -> None:
        block.home.passed[block] = None
        self._stranded.clear()

    def _make_room(self, slot_bytes: int, wanted: int) -> Eviction:
        """Frees at least one slot of a size, or granules for it; about `wanted` if so many are cold.

        The coldest leave first over all sizes: a segment of another size changes hands if, on the average, its blocks
        are colder than the coldest block of this size. That is also what ends the starvation of a size: with few slots,
        all its blocks are young.
        """
        own = self._homes.get(slot_bytes, [])
        ages = [age for home in own if (age := home.policy.oldest_age()) is not None]
        if len(self.arena.classes) > (slot_bytes in self.arena.classes) and self._move_segment(
            slot_bytes, min(ages) if ages else None
        ):
            return Eviction.DONE
        outcomes: set[Eviction] = set()
        for _ in range(wanted):
            if not own:  # the last block of this size left and took its home along
                break
            outcomes.add(self._evict_coldest(own))
            if Eviction.NOTHING in outcomes:
                break
        if Eviction.DONE in outcomes:
            return Eviction.DONE
        if Eviction.LATER in outcomes:
            return Eviction.LATER
        # All that is left of this size is pinned, so whatever others have is colder than nothing.
        if self._move_segment(slot_bytes, None):
            return Eviction.DONE
        return Eviction.LATER if self.dirty_stays and self._clean_others(slot_bytes, wanted) else Eviction.NOTHING

    def _clean_others(self, slot_bytes: int, wanted: int) -> bool:
        """Has the coldest blocks of other sizes copied down, where only that keeps their segments from changing hands.

        Returns whether any are on their way.
        """
        others = [home for size, homes in self._homes.items() if size != slot_bytes for home in homes]
        for _ in range(max(1, wanted * slot_bytes // min((home.slot_bytes for home in others), default=slot_bytes))):
            if self._evict_coldest(others) is Eviction.NOTHING:
                break
        return self.leaving_bytes() > 0

    def _move_segment(self, slot_bytes: int, own_age: int | None) -> bool:
        """Empties the coldest run of segments of other sizes that is colder than `own_age` (None: than nothing)."""

        def movable(segment: Segment) -> bool:
            return (
                segment.slot_bytes != slot_bytes
                and not segment.reserved
                and all(not block.pins and (block.below or not self.dirty_stays) for block in self._blocks_in(segment))
            )

        others = [home for size, homes in self._homes.items() if size != slot_bytes for home in homes]
        others.sort(key=lambda home: home.policy.oldest_age() or 0)
        seeds: dict[Segment, None] = {}
        for home in others:
            for block in home.policy.peek(4 * _STEAL_CANDIDATES):
                if block.segment is not None and len(seeds) < _STEAL_CANDIDATES:
                    seeds[block.segment] = None
        if own_age is None:
            # This size has nothing that can leave: any segment that can move will do, after the coldest.
            for class_ in self.arena.classes.values():
                seeds.update(dict.fromkeys(itertools.islice(class_.segments.values(), _STARVED_CANDIDATES)))
        least = -(-slot_bytes // GRANULE_BYTES)
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
                        self.leaves(block)
                        self._unlink(block, "evicted")
                        self._free_slot(block)
                self.segment_moves += len(coldest[1])
                return True
        return False

    @staticmethod
    def _blocks_in(segment: Segment) -> Iterator[Block]:
        for block in segment.blocks:
            if block is not None:
                assert isinstance(block, Block)
                yield block

    def _unlink(self, block: Block, cause: str) -> None:
        """Takes a block out of the directory: from here on it does not answer."""
        keyspace = block.keyspace
        del keyspace.blocks[block.key]
        if keyspace.journal is not None:
            keyspace.journal.left(
                block.key, rests=cause == "evicted" and block.below and not keyspace.namespace.pool_only
            )
        parent, block.parent = block.parent, None
        if parent is not None:
            parent.children -= 1
            if not parent.children and self._passed(parent):
                parent.home.next.append(parent)
        block.home.passed.pop(block, None)
        block.home.policy.forget(block)
        keyspace.fresh.pop(block.key, None)
        block.state = BlockState.DOOMED
        self.removed[cause] += 1

    def _free_slot(self, block: Block) -> None:
        assert block.state is BlockState.DOOMED and not block.pins and block.segment is not None
        self.arena.free(block.offset, block.segment, reserved=False)
        block.segment = None
        slot_bytes, home = block.keyspace.slot_bytes, block.home
        self.used_bytes -= slot_bytes
        self.block_count -= 1
        block.share.used_bytes -= slot_bytes
        home.blocks -= 1
        if not home.blocks:
            self._homes[slot_bytes].remove(home)
            if not self._homes[slot_bytes]:
                del self._homes[slot_bytes]
