"""What every tier must do, as tests: subclass TierSuite once for each tier.

::

    class TestMyTier(TierSuite):
        def new_tier(self, folder: Path, capacity_bytes: int) -> Tier:
            return MyTier(folder, capacity_bytes)

Needs pytest with pytest-asyncio in its auto mode.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from kvstore.testing.data import make_block
from kvstore.tier import ReadOutcome, Tier, TierNamespace, TierState, WriteOutcome, tier_key

#: Longer than any healthy medium takes for what is asked here.
DEADLINE_S: Final = 30.0
#: Sizes around the alignments that media have.
SIZES: Final = (1, 511, 512, 513, 3839, 3840, 3841, 4095, 4096, 4097, 8192, 65536, 100_001, 1 << 20)
BLOCK_BYTES: Final = 64 << 10
OURS: Final = b"o" * 16
THEIRS: Final = b"t" * 16
#: Around a buffer, to see that nothing is written beside it.
_GUARD: Final = b"\xa5" * 64


def name_of(number: int, digest: bytes = OURS, group: int = 0) -> bytes:
    """A block's full name."""
    return tier_key(digest, group, number.to_bytes(32, "big"))


def filled(keys: Sequence[bytes], size_bytes: int = BLOCK_BYTES) -> list[tuple[bytes, memoryview]]:
    """Blocks with the bytes that they must have."""
    return [(key, memoryview(make_block(key, size_bytes))) for key in keys]


async def store(tier: Tier, keys: Sequence[bytes], size_bytes: int = BLOCK_BYTES) -> list[WriteOutcome]:
    """Writes blocks."""
    return await tier.write(filled(keys, size_bytes), DEADLINE_S)


async def load(tier: Tier, keys: Sequence[bytes], size_bytes: int = BLOCK_BYTES) -> list[ReadOutcome]:
    """Reads blocks; whatever is handed out must be right, and nothing beside the buffers may change."""
    rooms = [bytearray(_GUARD + bytes(size_bytes) + _GUARD) for _ in keys]
    buffers = [memoryview(room)[len(_GUARD) : len(_GUARD) + size_bytes] for room in rooms]
    outcomes = await tier.read(list(zip(keys, buffers, strict=True)), DEADLINE_S)
    for key, room, buffer, outcome in zip(keys, rooms, buffers, outcomes, strict=True):
        assert room[: len(_GUARD)] == _GUARD and room[-len(_GUARD) :] == _GUARD
        if outcome is ReadOutcome.OK:
            assert buffer == make_block(key, size_bytes), "wrong bytes were handed out"
    return outcomes


async def present(tier: Tier, keys: Sequence[bytes]) -> list[bool]:
    """Which blocks are there."""
    return [size is not None for size in await tier.stat(keys)]


class TierSuite:
    """See the module.

    Attributes:
        capacity_bytes: Budget of the tiers under test.
        survives: Whether blocks outlive close() and another new_tier() in the same folder.
    """

    capacity_bytes: int = 24 << 20
    survives: bool = True

    def new_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        """A tier that was not opened yet, over what earlier ones left in the folder."""
        raise NotImplementedError

    async def ready(self, tier: Tier) -> None:
        """Waits until an opened tier has read its index."""
        async with asyncio.timeout(DEADLINE_S):
            while tier.state is TierState.LOADING:
                await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def opened(self, folder: Path, capacity_bytes: int | None = None) -> AsyncIterator[Tier]:
        """A tier from open() to close()."""
        tier = self.new_tier(folder, capacity_bytes or self.capacity_bytes)
        await tier.open()
        try:
            await self.ready(tier)
            yield tier
        finally:
            await tier.close()

    @pytest.fixture
    async def tier(self, tmp_path: Path) -> AsyncIterator[Tier]:
        async with self.opened(tmp_path / "tier") as tier:
            yield tier

    # -- one block -----------------------------------------------------------------------------------------------------

    async def test_an_empty_tier_has_nothing(self, tier: Tier) -> None:
        assert tier.state is TierState.OK
        assert await tier.stat([name_of(1)]) == [None]
        assert await load(tier, [name_of(1)]) == [ReadOutcome.ABSENT]
        assert await tier.delete([name_of(1)]) == 0
        assert await tier.delete_namespace(None) == 0
        assert list(tier.scan()) == []
        tier.touch([name_of(1)])

    async def test_empty_batches_are_answered(self, tier: Tier) -> None:
        assert await tier.stat([]) == []
        assert await tier.read([], DEADLINE_S) == []
        assert await tier.write([], DEADLINE_S) == []
        assert await tier.delete([]) == 0

    @pytest.mark.parametrize("size_bytes", SIZES)
    async def test_bytes_come_back_as_they_went(self, tier: Tier, size_bytes: int) -> None:
        keys = [name_of(number) for number in range(4)]
        assert await store(tier, keys, size_bytes) == [WriteOutcome.STORED] * 4
        assert await tier.stat(keys) == [size_bytes] * 4
        assert await load(tier, keys, size_bytes) == [ReadOutcome.OK] * 4
        assert await load(tier, keys[::-1], size_bytes) == [ReadOutcome.OK] * 4

    async def test_sizes_and_groups_live_side_by_side(self, tier: Tier) -> None:
        keys = {size: tier_key(OURS, group, b"same hash") for group, size in enumerate(SIZES)}
        outcomes = await tier.write(
            [(key, memoryview(make_block(key, size))) for size, key in keys.items()], DEADLINE_S
        )
        assert outcomes == [WriteOutcome.STORED] * len(SIZES)
        for size, key in keys.items():
            assert await load(tier, [key], size) == [ReadOutcome.OK]

    async def test_the_longest_name_is_a_name(self, tier: Tier) -> None:
        key = tier_key(OURS, 0xFFFF, b"\xff" * 128)
        assert await store(tier, [key]) == [WriteOutcome.STORED]
        assert await load(tier, [key]) == [ReadOutcome.OK]

    async def test_another_size_is_not_handed_out(self, tier: Tier) -> None:
        await store(tier, [name_of(1)])
        for size_bytes in (BLOCK_BYTES - 1, BLOCK_BYTES + 1, 2 * BLOCK_BYTES):
            assert await load(tier, [name_of(1)], size_bytes) != [ReadOutcome.OK]
        assert await load(tier, [name_of(1)]) == [ReadOutcome.OK]

    async def test_buffers_are_the_callers_again_after_the_call(self, tier: Tier) -> None:
        key = name_of(1)
        buffer = bytearray(make_block(key, BLOCK_BYTES))
        assert await tier.write([(key, memoryview(buffer))], DEADLINE_S) == [WriteOutcome.STORED]
        buffer[:] = bytes(BLOCK_BYTES)
        assert await load(tier, [key]) == [ReadOutcome.OK]

    async def test_buffers_need_no_alignment_and_no_right_to_write(self, tier: Tier) -> None:
        key = name_of(1)
        shifted = memoryview(b"xyz" + make_block(key, BLOCK_BYTES)).toreadonly()[3:]
        assert await tier.write([(key, shifted)], DEADLINE_S) == [WriteOutcome.STORED]
        assert await load(tier, [key]) == [ReadOutcome.OK]

    # -- what is there already -----------------------------------------------------------------------------------------

    async def test_what_is_there_is_left_alone(self, tier: Tier) -> None:
        key = name_of(1)
        await store(tier, [key])
        other = memoryview(bytes(BLOCK_BYTES))
        assert await tier.write([(key, other)], DEADLINE_S) == [WriteOutcome.EXISTS]
        assert await load(tier, [key]) == [ReadOutcome.OK]

    async def test_a_name_twice_in_a_batch_is_stored_once(self, tier: Tier) -> None:
        outcomes = await store(tier, [name_of(1), name_of(2), name_of(1)])
        assert outcomes == [WriteOutcome.STORED, WriteOutcome.STORED, WriteOutcome.EXISTS]
        assert len(list(tier.scan())) == 2

    async def test_many_writers_of_one_name_store_it_once(self, tier: Tier) -> None:
        outcomes = await asyncio.gather(*(store(tier, [name_of(1)]) for _ in range(8)))
        assert sorted(outcome.value for (outcome,) in outcomes) == ["exists"] * 7 + ["stored"]
        assert await load(tier, [name_of(1)]) == [ReadOutcome.OK]

    async def test_absent_blocks_do_not_disturb_their_neighbours(self, tier: Tier) -> None:
        keys = [name_of(number) for number in range(6)]
        await store(tier, keys[::2])
        expected = [ReadOutcome.OK, ReadOutcome.ABSENT] * 3
        assert await load(tier, keys) == expected

    async def test_readers_and_writers_at_once(self, tier: Tier) -> None:
        keys = [name_of(number) for number in range(40)]
        await store(tier, keys[:20])
        loads = [asyncio.ensure_future(load(tier, keys[at : at + 10])) for at in range(0, 20, 5)]
        stores = [asyncio.ensure_future(store(tier, keys[at : at + 10])) for at in range(20, 40, 5)]
        assert await loads[0] == [ReadOutcome.OK] * 10
        stored = [outcome for task in stores for outcome in await task]
        assert stored.count(WriteOutcome.STORED) == 20 and set(stored) <= {WriteOutcome.STORED, WriteOutcome.EXISTS}
        await asyncio.wait(loads)
        assert await load(tier, keys) == [ReadOutcome.OK] * 40

    # -- removal -------------------------------------------------------------------------------------------------------

    async def test_deleted_blocks_are_gone_and_may_come_again(self, tier: Tier) -> None:
        keys = [name_of(number) for number in range(4)]
        await store(tier, keys)
        assert await tier.delete([keys[1], keys[3], name_of(99)]) == 2
        assert await present(tier, keys) == [True, False, True, False]
        assert await load(tier, [keys[1]]) == [ReadOutcome.ABSENT]
        assert await store(tier, keys) == [
            WriteOutcome.EXISTS,
            WriteOutcome.STORED,
            WriteOutcome.EXISTS,
            WriteOutcome.STORED,
        ]
        assert await load(tier, keys) == [ReadOutcome.OK] * 4

    async def test_a_namespace_goes_and_the_others_stay(self, tier: Tier) -> None:
        ours = [name_of(number, OURS, group) for number in range(3) for group in range(2)]
        theirs = [name_of(number, THEIRS) for number in range(3)]
        await store(tier, ours)
        await store(tier, theirs)
        assert await tier.delete_namespace(OURS) == len(ours)
        assert await present(tier, ours) == [False] * len(ours)
        assert await load(tier, theirs) == [ReadOutcome.OK] * 3
        assert await tier.delete_namespace(None) == 3
        assert list(tier.scan()) == []

    async def test_scan_names_what_is_there(self, tier: Tier) -> None:
        await store(tier, [name_of(1), name_of(2)])
        await store(tier, [name_of(3, THEIRS)], 1000)
        assert sorted(tier.scan()) == sorted(
            [(name_of(1), BLOCK_BYTES), (name_of(2), BLOCK_BYTES), (name_of(3, THEIRS), 1000)]
        )
        assert list(tier.scan(THEIRS)) == [(name_of(3, THEIRS), 1000)]
        scan = tier.scan()
        await tier.delete_namespace(None)
        list(scan)  # it may be read on

    # -- space ---------------------------------------------------------------------------------------------------------

    async def test_what_can_never_fit_is_refused(self, tier: Tier) -> None:
        assert await store(tier, [name_of(1)]) == [WriteOutcome.STORED]
        assert await store(tier, [name_of(2)], self.capacity_bytes + 1) == [WriteOutcome.NO_ROOM]
        assert await load(tier, [name_of(1)]) == [ReadOutcome.OK]

    async def test_suffixes_leave_first_and_the_coldest_chains(self, tier: Tier) -> None:
        chains = [[name_of(100 * chain + number) for number in range(16)] for chain in range(40)]
        for chain in chains:
            assert await store(tier, chain) == [WriteOutcome.STORED] * 16
            tier.touch(chains[0])
        there = [await present(tier, chain) for chain in chains]
        for have in there:
            assert have == sorted(have, reverse=True), "a block is there whose prefix is not"
        assert all(there[0]), "what was used all the time has left"
        assert all(there[-1])
        assert not all(there[1]), "the budget was not reached"
        kept = [sum(have) for have in there[1:]]
        assert kept == sorted(kept), "a younger chain left before an older one"
        for chain, have in zip(chains, there, strict=True):
            keys = [key for key, is_there in zip(chain, have, strict=True) if is_there]
            assert await load(tier, keys) == [ReadOutcome.OK] * len(keys)

    async def test_a_new_size_gets_room_from_a_cold_one(self, tier: Tier) -> None:
        small = [name_of(number) for number in range(self.capacity_bytes // BLOCK_BYTES)]
        for at in range(0, len(small), 16):
            await store(tier, small[at : at + 16])
        large = [name_of(10_000 + number) for number in range(8)]
        for key in large:
            assert await store(tier, [key], 1 << 20) == [WriteOutcome.STORED]
        assert await load(tier, large, 1 << 20) == [ReadOutcome.OK] * 8
        assert any(await present(tier, small))

    # -- time ----------------------------------------------------------------------------------------------------------

    async def test_a_deadline_that_is_over_raises_nothing(self, tier: Tier) -> None:
        keys = [name_of(number) for number in range(8)]
        stored = await tier.write(filled(keys), 0.0)
        assert WriteOutcome.BUFFER_LOST not in stored
        read = await tier.read([(key, memoryview(bytearray(BLOCK_BYTES))) for key in keys], 0.0)
        assert ReadOutcome.BUFFER_LOST not in read and ReadOutcome.DAMAGED not in read
        assert tier.state is TierState.OK
        await store(tier, keys)
        assert await load(tier, keys) == [ReadOutcome.OK] * 8

    async def test_a_cancelled_call_leaves_the_tier_whole(self, tier: Tier) -> None:
        keys = [name_of(number) for number in range(64)]
        for delay in range(6):
            task = asyncio.ensure_future(store(tier, keys))
            for _ in range(delay):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        await store(tier, keys)
        reading = asyncio.ensure_future(load(tier, keys))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        assert await load(tier, keys) == [ReadOutcome.OK] * 64
        assert tier.state is TierState.OK

    # -- after a restart -----------------------------------------------------------------------------------------------

    async def test_namespaces_are_remembered(self, tmp_path: Path) -> None:
        namespaces = [TierNamespace(OURS, '{"model":"m"}', (BLOCK_BYTES, 4096)), TierNamespace(THEIRS, "{}", (1,))]
        async with self.opened(tmp_path / "tier") as tier:
            for namespace in namespaces:
                tier.remember(namespace)
                tier.remember(namespace)
            assert sorted(tier.namespaces(), key=repr) == sorted(namespaces, key=repr)
        if self.survives:
            async with self.opened(tmp_path / "tier") as tier:
                assert sorted(tier.namespaces(), key=repr) == sorted(namespaces, key=repr)
                await tier.delete_namespace(THEIRS)
                assert tier.namespaces() == namespaces[:1]

    async def test_blocks_outlive_a_restart_and_deleted_ones_do_not(self, tmp_path: Path) -> None:
        if not self.survives:
            pytest.skip("this tier forgets")
        keys = [name_of(number) for number in range(32)]
        async with self.opened(tmp_path / "tier") as tier:
            await store(tier, keys)
            assert await tier.delete(keys[:8]) == 8
        async with self.opened(tmp_path / "tier") as tier:
            assert await present(tier, keys) == [False] * 8 + [True] * 24
            assert await load(tier, keys[8:]) == [ReadOutcome.OK] * 24
            assert await store(tier, keys) == [WriteOutcome.STORED] * 8 + [WriteOutcome.EXISTS] * 24

    async def test_the_order_of_use_outlives_a_restart(self, tmp_path: Path) -> None:
        if not self.survives:
            pytest.skip("this tier forgets")
        chains = [[name_of(100 * chain + number) for number in range(16)] for chain in range(8)]
        async with self.opened(tmp_path / "tier") as tier:
            for chain in chains:
                await store(tier, chain)
            tier.touch(chains[0])
        async with self.opened(tmp_path / "tier") as tier:
            number = 10_000
            while all(await present(tier, chains[2])):
                await store(tier, [name_of(number + step) for step in range(16)])
                number += 16
            assert await present(tier, chains[0]) == [True] * 16
            for chain in chains:
                there = await present(tier, chain)
                assert there == sorted(there, reverse=True)

    # -- figures -------------------------------------------------------------------------------------------------------

    async def test_figures_add_up(self, tier: Tier) -> None:
        await store(tier, [name_of(number) for number in range(5)])
        stats = tier.stats()
        assert stats["name"] == tier.name
        assert stats["state"] == "ok"
        assert stats["capacity_bytes"] == self.capacity_bytes
        assert stats["blocks"] == 5
        assert stats["used_bytes"] == 5 * BLOCK_BYTES
