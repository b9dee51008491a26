"""What is shipped for tests: does it find what it is for?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import kvstore.testing
from kvstore.arena import Arena
from kvstore.directory import Block, BlockState
from kvstore.hierarchy import Hierarchy
from kvstore.testing import FakeClock, SteppedLoop, check_idle, check_invariants, make_block
from tests.unit.conftest import MIB, Pool


def test_a_block_tells_its_key_from_the_first_byte_on() -> None:
    one, other = make_block(b"a", 100_000), make_block(b"b", 100_000)
    assert len(one) == 100_000 and one == make_block(b"a", 100_000)
    assert one[:16] != other[:16] and one[-16:] != other[-16:]
    assert make_block(b"a", 100_001)[:16] != one[:16]
    assert [len(make_block(b"a", size)) for size in (1, 4098, 4099, 4100)] == [1, 4098, 4099, 4100]
    for shift in (512, 4096, 2 * MIB):
        assert make_block(b"a", 3 * MIB)[shift : shift + 64] != make_block(b"a", 3 * MIB)[:64]


def test_everything_that_is_named_is_there() -> None:
    for name in kvstore.testing.__all__:
        assert getattr(kvstore.testing, name)
    with pytest.raises(AttributeError):
        _ = kvstore.testing.nothing


def test_time_stands_still_until_it_is_moved(stepped_loop: SteppedLoop) -> None:
    clock = FakeClock(5.0)
    clock.advance(2.5)
    assert clock.monotonic() == 7.5 and clock.wall() > 1e9
    done = []

    async def sleep() -> None:
        await asyncio.sleep(3600)
        done.append(1)

    task = stepped_loop.create_task(sleep())
    stepped_loop.settle()
    stepped_loop.advance(3599)
    assert not done and not task.done()
    stepped_loop.advance(1)
    assert done and task.done()


def _leak_a_pin(pool: Pool, block: Block) -> None:
    block.pins += 1


def _lose_a_pin(pool: Pool, block: Block) -> None:
    session = next(iter(pool.hierarchy.sessions))
    pool.hierarchy.acquire(session, block.keyspace, [block.key])
    block.pins -= 1


def _forget_a_block(pool: Pool, block: Block) -> None:
    block.home.policy.forget(block)


def _lose_the_directory_entry(pool: Pool, block: Block) -> None:
    del block.keyspace.blocks[block.key]


def _free_twice(pool: Pool, block: Block) -> None:
    assert block.segment is not None
    block.segment.free.append(block.offset)


def _reserve_twice(pool: Pool, block: Block) -> None:
    first, second = pool.attach(), pool.attach()
    pool.hierarchy.reserve(first, block.keyspace, 1)
    second.reserved.update(first.reserved)


def _miscount_bytes(pool: Pool, block: Block) -> None:
    pool.hierarchy.pool.used_bytes += 1


def _miscount_the_group(pool: Pool, block: Block) -> None:
    block.share.used_bytes -= 4096


def _doom_and_keep(pool: Pool, block: Block) -> None:
    block.state = BlockState.DOOMED


def _claim_for_nobody(pool: Pool, block: Block) -> None:
    block.claim = 99


def _swap_keys(pool: Pool, block: Block) -> None:
    other = next(each for each in block.keyspace.blocks.values() if each is not block)
    blocks = block.keyspace.blocks
    blocks[block.key], blocks[other.key] = other, block


def _break_the_budget(pool: Pool, block: Block) -> None:
    pool.hierarchy.arena.budget_bytes = 20 * MIB


def _keep_an_empty_queue(pool: Pool, block: Block) -> None:
    block.keyspace.waiters[b"x"] = []


@pytest.mark.parametrize(
    "spoil",
    [
        _leak_a_pin,
        _lose_a_pin,
        _forget_a_block,
        _lose_the_directory_entry,
        _free_twice,
        _reserve_twice,
        _miscount_bytes,
        _miscount_the_group,
        _doom_and_keep,
        _claim_for_nobody,
        _swap_keys,
        _break_the_budget,
        _keep_an_empty_queue,
    ],
)
def test_a_book_that_does_not_balance_is_found(
    spoil: Callable[[Pool, Block], None],
) -> None:
    arena = Arena(32 * MIB, "off")
    arena.add_populated(arena.size_bytes)
    pool = Pool(Hierarchy(arena, FakeClock()), FakeClock())
    session, space = pool.attach(), pool.space(MIB)
    pool.store(session, space, [b"a", b"b"])
    check_invariants(pool.hierarchy)
    spoil(pool, space.blocks[b"a"])
    with pytest.raises(AssertionError) as found:
        check_invariants(pool.hierarchy)
    assert str(found.value), "a finding says what it found"
    arena.close()


def test_what_is_left_over_is_found(pool: Pool) -> None:
    session, space = pool.attach(), pool.space(MIB)
    with pytest.raises(AssertionError, match="1 sessions are left"):
        check_idle(pool.hierarchy)
    pool.hierarchy.reserve(session, space, 1)
    check_invariants(pool.hierarchy)
