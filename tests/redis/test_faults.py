"""Servers that are stopped, killed, paused, full or not there: misses in time, right bytes, and back by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.testing import FakeClock, make_block
from kvstore.testing.tier_suite import BLOCK_BYTES, OURS, THEIRS, load, name_of, present, store
from kvstore.tier import ReadOutcome, TierNamespace, TierState, WriteOutcome
from kvstore.tiers.redis_value import PAYLOAD_BYTES, part_count
from tests.redis.servers import RedisServer, one_server, running
from tests.redis.tiers import SHORT_S, opened, promptly, until, until_ok

#: Policies that evict only what expires.
VOLATILE = ["volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl"]
KEYS = [name_of(number) for number in range(32)]


async def test_a_server_that_is_not_there_is_no_error_and_may_come_later(tmp_path: Path) -> None:
    server = one_server(tmp_path)
    async with opened(server.url) as tier:
        assert tier.state is TierState.FAILED
        assert await present(tier, KEYS) == [False] * 32
        assert await load(tier, KEYS) == [ReadOutcome.ABSENT] * 32
        assert await store(tier, KEYS) == [WriteOutcome.FAILED] * 32
        assert await tier.delete(KEYS) == 0
        assert tier.stats()["fault"]["kind"] == "connection"
        tier.remember(TierNamespace(OURS, "{}", (BLOCK_BYTES,)))
        with running(server):
            await until_ok(tier)
            assert await store(tier, KEYS) == [WriteOutcome.STORED] * 32
            assert await load(tier, KEYS) == [ReadOutcome.OK] * 32
            await until(lambda: tier.stats()["swept"])


async def test_what_was_deleted_while_the_server_was_away_is_gone_when_it_is_back(server: RedisServer) -> None:
    async with opened(server.url, deadline_s=SHORT_S) as tier:
        assert await store(tier, KEYS) == [WriteOutcome.STORED] * 32
        await store(tier, [name_of(1, THEIRS)])
        server.pause()
        assert await promptly(tier.delete(KEYS[:4])) == 0
        while tier.state is not TierState.FAILED:
            await promptly(tier.stat(KEYS))
        assert await promptly(tier.delete_namespace(THEIRS)) == 0
        server.resume()
        await until_ok(tier)
        # Absent from the first moment on, not only when it is done.
        assert await present(tier, KEYS[:4]) == [False] * 4
        assert await present(tier, [name_of(1, THEIRS)]) == [False]
        await until(lambda: not tier.stats()["owed"], "all is removed")
        assert await present(tier, KEYS[4:]) == [True] * 28
    with server.client() as client:
        assert client.dbsize() == 28


@pytest.mark.parametrize("how", ["killed", "stopped", "paused"])
async def test_calls_end_in_time_and_the_tier_comes_back(server: RedisServer, how: str) -> None:
    """In the middle of loads and stores, again and again."""
    async with opened(server.url, deadline_s=SHORT_S) as tier:
        for life in range(3):
            await until_ok(tier)
            keys = [name_of(1000 * life + number) for number in range(64)]
            assert set(await store(tier, keys)) <= {WriteOutcome.STORED, WriteOutcome.FAILED}
            more = [name_of(1000 * life + 100 + number) for number in range(64)]
            calls = [asyncio.ensure_future(load(tier, keys)) for _ in range(4)]
            calls += [asyncio.ensure_future(store(tier, more[at : at + 16])) for at in range(0, 64, 16)]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            match how:
                case "paused":
                    server.pause()
                case "stopped":
                    await asyncio.to_thread(server.stop)
                case _:
                    server.kill()
            for call in calls:
                # load() has looked at every byte that was handed out.
                assert ReadOutcome.BUFFER_LOST not in await promptly(call)
            while tier.state is not TierState.FAILED:
                await promptly(load(tier, keys))
            # Given up: nobody waits any more, not even once.
            before = tier.stats()["faults"]
            assert await load(tier, keys) == [ReadOutcome.ABSENT] * 64
            assert await store(tier, keys) == [WriteOutcome.FAILED] * 64
            assert await tier.stat(keys) == [None] * 64
            assert set(before) == set(tier.stats()["faults"])
            if how == "paused":
                server.resume()
            else:
                server.start()
        await until_ok(tier)
        last = [name_of(9000 + number) for number in range(32)]
        assert await store(tier, last) == [WriteOutcome.STORED] * 32
        assert await load(tier, last) == [ReadOutcome.OK] * 32


async def test_the_breaker_opens_after_three_failures_and_probes_by_the_clock(server: RedisServer) -> None:
    clock = FakeClock()
    async with opened(server.url, clock, probe_interval_s=1.0) as tier:
        await store(tier, KEYS)
        server.kill()
        for failures in range(3):
            assert tier.state is TierState.OK, failures
            assert await load(tier, KEYS[:1]) == [ReadOutcome.FAILED]
        assert tier.state is TierState.FAILED
        assert await load(tier, KEYS[:1]) == [ReadOutcome.ABSENT]
        faults = tier.stats()["faults"]["connection"]
        await tier.tend()
        assert tier.stats()["faults"]["connection"] == faults, "it was looked at before its time"
        clock.advance(1.0)
        await tier.tend()
        assert tier.stats()["faults"]["connection"] > faults and tier.state is TierState.FAILED
        server.start()
        clock.advance(1.0)
        await tier.tend()
        assert tier.state is TierState.FAILED, "the second wait is longer than the first one"
        clock.advance(1.0)
        await tier.tend()
        assert tier.state is TierState.OK
        assert await load(tier, KEYS[:1]) == [ReadOutcome.ABSENT]  # it has lost everything
        assert await store(tier, KEYS[:1]) == [WriteOutcome.STORED]


async def test_what_a_server_has_lost_is_told_again(server: RedisServer) -> None:
    namespace = TierNamespace(OURS, '{"model":"m"}', (BLOCK_BYTES,))
    prefix = "again:"
    async with opened(server.url, key_prefix=prefix) as tier:
        tier.remember(namespace)
        server.kill()
        while tier.state is not TierState.FAILED:
            await load(tier, KEYS[:1])
        server.start()
        await until_ok(tier)
    async with opened(server.url, key_prefix=prefix) as tier:
        assert tier.namespaces() == [namespace]


async def test_a_host_that_can_not_be_found() -> None:
    async with opened("redis://no-such-host.invalid:6379", deadline_s=SHORT_S) as tier:
        assert tier.state is TierState.FAILED
        assert await promptly(tier.stat(KEYS)) == [None] * 32


async def test_a_password_that_changes_meanwhile(server: RedisServer) -> None:
    """Misses in time, said, and back by itself when the old one counts again."""
    with server.client() as client:
        client.execute_command("ACL SETUSER kv on >one ~* +@all")
        async with opened(f"redis://kv:one@127.0.0.1:{server.port}", deadline_s=SHORT_S) as tier:
            assert await store(tier, KEYS) == [WriteOutcome.STORED] * 32
            client.execute_command("ACL SETUSER kv resetpass >other")
            client.client_kill_filter(user="kv")
            while tier.state is not TierState.FAILED:
                assert ReadOutcome.OK not in await promptly(load(tier, KEYS))
            assert tier.stats()["fault"]["kind"] == "login"
            assert await store(tier, KEYS) == [WriteOutcome.FAILED] * 32
            client.execute_command("ACL SETUSER kv resetpass >one")
            await until_ok(tier)
            assert await load(tier, KEYS) == [ReadOutcome.OK] * 32


# -- no memory ---------------------------------------------------------------------------------------------------------


async def test_noeviction_without_a_budget_is_said_and_a_full_server_takes_nothing_more(tmp_path: Path) -> None:
    server = one_server(tmp_path, "--maxmemory", "16mb", "--maxmemory-policy", "noeviction")
    clock = FakeClock()
    with running(server):
        async with opened(server.url, clock) as tier:
            assert "noeviction" in tier.stats()["notes"][0]
            outcomes = []
            for at in range(0, 512, 32):
                outcomes += await store(tier, [name_of(at + number) for number in range(32)])
            assert set(outcomes) == {WriteOutcome.STORED, WriteOutcome.NO_ROOM}
            assert tier.state is TierState.DEGRADED
            stored = [name_of(n) for n, outcome in enumerate(outcomes) if outcome is WriteOutcome.STORED]
            assert await load(tier, stored) == [ReadOutcome.OK] * len(stored)
            # What could not be stored is not even tried for a while.
            faults = tier.stats()["faults"]["memory"]
            assert await store(tier, [name_of(9000)]) == [WriteOutcome.NO_ROOM]
            assert tier.stats()["faults"]["memory"] == faults
            await tier.delete(stored)
            clock.advance(31.0)
            assert tier.state is TierState.OK
            assert await store(tier, [name_of(9000)]) == [WriteOutcome.STORED]


async def test_large_blocks_are_stored_whole_or_not_at_all_when_memory_ends(tmp_path: Path) -> None:
    server = one_server(tmp_path, "--maxmemory", "32mb", "--maxmemory-policy", "noeviction")
    clock = FakeClock()
    size = 9 << 20
    keys = [name_of(number) for number in range(4)]
    with running(server):
        async with opened(server.url, clock) as tier:
            outcomes = await store(tier, keys, size)
            assert WriteOutcome.STORED in outcomes and WriteOutcome.NO_ROOM in outcomes
            there = [outcome is WriteOutcome.STORED for outcome in outcomes]
            assert await present(tier, keys) == there
            assert [outcome is ReadOutcome.OK for outcome in await load(tier, keys, size)] == there
        with server.client() as client:
            # No part is left of what is not there.
            assert client.dbsize() == part_count(size) * sum(there)


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random", *VOLATILE])
async def test_the_server_evicts_what_it_likes(tmp_path: Path, policy: str) -> None:
    server = one_server(tmp_path, "--maxmemory", "16mb", "--maxmemory-policy", policy)
    with running(server):
        async with opened(server.url, ttl_s=600) as tier:
            assert not tier.stats()["notes"]
            for at in range(0, 512, 32):
                outcomes = await store(tier, [name_of(at + number) for number in range(32)])
                assert set(outcomes) <= {WriteOutcome.STORED, WriteOutcome.NO_ROOM}
            keys = [name_of(number) for number in range(512)]
            loaded = await load(tier, keys)
            assert set(loaded) == {ReadOutcome.OK, ReadOutcome.ABSENT}
            # Answers on their way count as memory, so that loads evict as well.
            there = await present(tier, keys)
            assert not any(has for has, outcome in zip(there, loaded, strict=True) if outcome is not ReadOutcome.OK)
            assert tier.stats()["capacity_bytes"] == 16 << 20


async def test_large_blocks_lose_parts_to_eviction_and_are_misses(tmp_path: Path) -> None:
    server = one_server(tmp_path, "--maxmemory", "40mb", "--maxmemory-policy", "allkeys-random")
    size = 9 << 20
    keys = [name_of(number) for number in range(12)]
    with running(server):
        async with opened(server.url) as tier:
            for key in keys:
                await store(tier, [key], size)
            loaded = await load(tier, keys, size)
            assert set(loaded) <= {ReadOutcome.OK, ReadOutcome.ABSENT}
            there = await present(tier, keys)
            assert not any(has for has, outcome in zip(there, loaded, strict=True) if outcome is not ReadOutcome.OK)


async def test_settings_that_never_evict_are_said(server: RedisServer) -> None:
    with server.client() as client:
        client.config_set("maxmemory", "64mb")
        client.config_set("maxmemory-policy", "volatile-lru")
    async with opened(server.url) as tier:
        assert "only keys that expire" in tier.stats()["notes"][0]
    async with opened(server.url, ttl_s=60) as tier:
        assert not tier.stats()["notes"]
    async with opened(server.url, capacity_bytes=65 << 20) as tier:
        assert "more than the servers' maxmemory" in tier.stats()["notes"][0]
    with server.client() as client:
        client.config_set("maxmemory", "0")
    async with opened(server.url) as tier:
        assert "nothing bounds" in tier.stats()["notes"][0]


async def test_every_key_expires_where_there_is_a_ttl(server: RedisServer) -> None:
    async with opened(server.url, ttl_s=600, capacity_bytes=1 << 30) as tier:
        tier.remember(TierNamespace(OURS, "{}", (BLOCK_BYTES,)))
        await store(tier, KEYS[:2])
        await store(tier, [name_of(100)], 5 << 20)
    with server.client() as client:
        keys = client.keys()
        assert len(keys) == 2 + part_count(5 << 20) + 2
        assert all(0 < client.ttl(key) <= 600 for key in keys)


async def test_bytes_of_a_batch_that_is_far_larger_than_any_buffer(server: RedisServer) -> None:
    keys = [name_of(number) for number in range(3000)]
    async with opened(server.url) as tier:
        assert await store(tier, keys, 3000) == [WriteOutcome.STORED] * 3000
        assert await tier.stat(keys) == [3000] * 3000
        assert await load(tier, keys, 3000) == [ReadOutcome.OK] * 3000
        assert await tier.delete(keys) == 3000


async def test_blocks_of_several_parts(server: RedisServer) -> None:
    sizes = [PAYLOAD_BYTES, PAYLOAD_BYTES + 1, 2 << 20, 4 << 20, 8 << 20, (9 << 20) + 1]
    async with opened(server.url) as tier:
        for number, size in enumerate(sizes):
            key = name_of(number)
            data = bytearray(make_block(key, size))
            assert await tier.write([(key, memoryview(data))], 30.0) == [WriteOutcome.STORED]
            data[:] = bytes(size)
            assert await tier.stat([key]) == [size]
            assert await load(tier, [key], size) == [ReadOutcome.OK]
            assert await load(tier, [key], size - 1) == [ReadOutcome.ABSENT]
            assert await store(tier, [key], size) == [WriteOutcome.EXISTS]
    with server.client() as client:
        assert all(client.strlen(key) <= 2 << 20 for key in client.scan_iter())
