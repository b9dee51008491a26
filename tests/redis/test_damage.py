"""Keys that are deleted, changed, truncated or somebody else's: a miss, cleaned up, never wrong bytes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from redis import Redis

from kvstore.testing.tier_suite import BLOCK_BYTES, OURS, load, name_of, present, store
from kvstore.tier import ReadOutcome, TierNamespace, WriteOutcome
from kvstore.tiers.redis_value import Names, part_count
from tests.redis.servers import RedisServer
from tests.redis.tiers import new_prefix, opened, until

LARGE = 5 << 20
KEY, OTHER = name_of(1), name_of(2)


def first(names: Names) -> bytes:
    return names.part(KEY, 0)


def _flip(client: Redis, names: Names, part: int, at: int) -> None:
    key = names.part(KEY, part)
    (byte,) = client.getrange(key, at, at)
    client.setrange(key, at, bytes([byte ^ 1]))


def _end(client: Redis, names: Names, part: int) -> int:
    return int(client.strlen(names.part(KEY, part)))


Harm = Callable[[Redis, Names], object]
HARMS: dict[str, Harm] = {
    "magic": lambda client, names: _flip(client, names, 0, 0),
    "size": lambda client, names: _flip(client, names, 0, 20),
    "name": lambda client, names: _flip(client, names, 0, 60),
    "first byte": lambda client, names: _flip(client, names, 0, 130),
    "last byte": lambda client, names: _flip(client, names, 0, _end(client, names, 0) - 1),
    "shorter": lambda client, names: client.set(first(names), client.getrange(first(names), 0, 60_000)),
    "a little shorter": lambda client, names: client.set(first(names), client.getrange(first(names), 0, -2)),
    "header only": lambda client, names: client.set(first(names), client.getrange(first(names), 0, 40)),
    "empty": lambda client, names: client.set(first(names), b""),
    "longer": lambda client, names: client.append(first(names), b"x"),
    "another block": lambda client, names: client.copy(names.part(OTHER, 0), first(names), replace=True),
    "not a string": lambda client, names: (client.delete(first(names)), client.hset(first(names), "a", "b")),
    "far too long": lambda client, names: client.setrange(first(names), 40 << 20, b"x"),
}
LARGE_HARMS: dict[str, Harm] = {
    "a part is gone": lambda client, names: client.delete(names.part(KEY, 1)),
    "the last part is gone": lambda client, names: client.delete(names.part(KEY, 2)),
    "parts change places": lambda client, names: client.copy(names.part(KEY, 1), names.part(KEY, 2), replace=True),
    "a byte of a part": lambda client, names: _flip(client, names, 2, 1000),
    "a part of another block": lambda client, names: client.copy(
        names.part(OTHER, 1), names.part(KEY, 1), replace=True
    ),
    "a part is no string": lambda client, names: (
        client.delete(names.part(KEY, 1)),
        client.rpush(names.part(KEY, 1), "a"),
    ),
    "a part is shorter": lambda client, names: client.set(
        names.part(KEY, 1), client.getrange(names.part(KEY, 1), 0, 1 << 20)
    ),
}


async def harmed(server: RedisServer, harm: Harm, size: int, *, found_by_stat: bool) -> None:
    prefix = new_prefix()
    names = Names(prefix)
    async with opened(server.url, key_prefix=prefix) as tier:
        assert await store(tier, [KEY, OTHER], size) == [WriteOutcome.STORED] * 2
        with server.client() as client:
            harm(client, names)
            if found_by_stat:
                assert await present(tier, [KEY]) == [False]
            outcome, neighbour = await load(tier, [KEY, OTHER], size)
            assert outcome in (ReadOutcome.DAMAGED, ReadOutcome.ABSENT)
            assert neighbour is ReadOutcome.OK
            # Not promised again, and nothing of it takes room.
            assert await present(tier, [KEY, OTHER]) == [False, True]
            assert client.keys(f"{prefix}{{{KEY.hex()}}}:*") == []
        assert await load(tier, [KEY], size) == [ReadOutcome.ABSENT]
        assert await store(tier, [KEY], size) == [WriteOutcome.STORED]
        assert await load(tier, [KEY], size) == [ReadOutcome.OK]


@pytest.mark.parametrize("harm", HARMS)
async def test_a_block_of_one_part(shared_server: RedisServer, harm: str) -> None:
    found = harm in ("magic", "size", "name", "header only", "empty", "another block", "not a string")
    await harmed(shared_server, HARMS[harm], BLOCK_BYTES, found_by_stat=found)


@pytest.mark.parametrize("harm", LARGE_HARMS)
async def test_a_block_of_several_parts(shared_server: RedisServer, harm: str) -> None:
    assert part_count(LARGE) == 3
    await harmed(shared_server, LARGE_HARMS[harm], LARGE, found_by_stat=harm.endswith("gone"))


@pytest.mark.parametrize("harm", [*sorted(HARMS.keys() - {"empty"}), "a part is gone"])
async def test_a_store_puts_a_spoiled_block_right(shared_server: RedisServer, harm: str) -> None:
    """Also one that nobody has read meanwhile, as far as a look at its header tells (an empty one looks absent)."""
    prefix = new_prefix()
    size = LARGE if harm not in HARMS else BLOCK_BYTES
    async with opened(shared_server.url, key_prefix=prefix) as tier:
        await store(tier, [KEY, OTHER], size)
        with shared_server.client() as client:
            (HARMS | LARGE_HARMS)[harm](client, Names(prefix))
        if not (await present(tier, [KEY]))[0]:
            assert await store(tier, [KEY], size) == [WriteOutcome.STORED]
            assert await load(tier, [KEY], size) == [ReadOutcome.OK]


async def test_a_block_that_was_written_twice_at_once_is_one_or_the_other(shared_server: RedisServer) -> None:
    """Two hosts that computed different bytes for one block: parts of both don't pass for a block."""
    prefix = new_prefix()
    names = Names(prefix)
    async with opened(shared_server.url, key_prefix=prefix) as tier:
        mine, theirs = memoryview(random.Random(1).randbytes(LARGE)), memoryview(random.Random(2).randbytes(LARGE))
        room = bytearray(LARGE)
        with shared_server.client() as client:
            await tier.write([(KEY, theirs)], 30.0)
            part = client.get(names.part(KEY, 1))
            await tier.delete([KEY])
            await tier.write([(KEY, mine)], 30.0)
            client.set(names.part(KEY, 1), part)
        assert await present(tier, [KEY]) == [True]
        assert await tier.read([(KEY, memoryview(room))], 30.0) == [ReadOutcome.DAMAGED]
        assert await present(tier, [KEY]) == [False]


async def test_a_block_without_its_first_part_is_absent_and_its_parts_go_in_time(shared_server: RedisServer) -> None:
    prefix = new_prefix()
    async with opened(shared_server.url, key_prefix=prefix, sweep_interval_s=0.0) as tier:
        await store(tier, [KEY], LARGE)
        with shared_server.client() as client:
            client.delete(Names(prefix).part(KEY, 0))
            assert await present(tier, [KEY]) == [False]
            assert await load(tier, [KEY], LARGE) == [ReadOutcome.ABSENT]
            await until(lambda: not client.keys(f"{prefix}*"), "the rest is removed")
            await until(lambda: tier.stats()["counts"].get("orphans_removed") == 1, "and counted")


async def test_texts_that_somebody_changed_are_left_out(shared_server: RedisServer) -> None:
    prefix = new_prefix()
    async with opened(shared_server.url, key_prefix=prefix) as tier:
        tier.remember(TierNamespace(OURS, "{}", (1, 2)))
    with shared_server.client() as client:
        key = f"{prefix}namespaces"
        text = bytearray(client.hget(key, OURS))
        text[30] ^= 1
        client.hset(key, b"d" * 16, bytes(text))
        client.hset(key, b"short", b"x")
        client.hset(key, b"e" * 16, b"")
    async with opened(shared_server.url, key_prefix=prefix) as tier:
        assert tier.namespaces() == [TierNamespace(OURS, "{}", (1, 2))]


async def test_keys_of_others_are_left_alone(shared_server: RedisServer) -> None:
    prefix = new_prefix()
    others = [f"{prefix}{{zz}}:0", f"{prefix}{{{KEY.hex()}}}:x", f"{prefix}{{ab}}:0", f"x{prefix}a", "user:1"]
    async with opened(shared_server.url, key_prefix=prefix) as tier:
        with shared_server.client() as client:
            for key in others:
                client.set(key, "theirs")
            await store(tier, [KEY])
            assert await tier.delete_namespace(None) == 1
            assert all(client.get(key) == b"theirs" for key in others)
            client.delete(*others)


async def test_two_daemons_share_what_they_store(shared_server: RedisServer) -> None:
    prefix = new_prefix()
    keys = [name_of(number) for number in range(16)]
    async with opened(shared_server.url, key_prefix=prefix) as one, opened(shared_server.url, key_prefix=prefix) as two:
        assert await store(one, keys[:8]) == [WriteOutcome.STORED] * 8
        assert await store(two, keys) == [WriteOutcome.EXISTS] * 8 + [WriteOutcome.STORED] * 8
        assert two.stats()["counts"]["written_bytes"] == 8 * BLOCK_BYTES
        assert await load(one, keys) == [ReadOutcome.OK] * 16
        assert await two.delete(keys[:4]) == 4
        assert await present(one, keys) == [False] * 4 + [True] * 12
        assert await one.delete_namespace(OURS) == 12
        assert await load(two, keys) == [ReadOutcome.ABSENT] * 16
