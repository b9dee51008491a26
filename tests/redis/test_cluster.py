"""A cluster in trouble: nodes that are killed, paused, replaced, moved."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.testing.tier_suite import OURS, THEIRS, load, name_of, present, store
from kvstore.tier import ReadOutcome, TierNamespace, TierState, WriteOutcome
from kvstore.tiers.redis import RedisTier
from tests.redis.servers import PATIENCE_S, RedisCluster, running_cluster
from tests.redis.tiers import SHORT_S, opened, promptly, until, until_ok

KEYS = [name_of(number) for number in range(96)]
LARGE = 5 << 20


async def stores_all(tier: RedisTier) -> None:
    """Stores KEYS, however often nodes believe for a moment that others are dead, as they do on a busy machine."""
    async with asyncio.timeout(PATIENCE_S):
        while not set(await store(tier, KEYS)) <= {WriteOutcome.STORED, WriteOutcome.EXISTS}:
            await asyncio.sleep(0.01)


async def count_there(tier: RedisTier) -> int:
    return sum(await present(tier, KEYS))


async def test_blocks_are_spread_and_the_parts_of_one_lie_together(shared_cluster: RedisCluster) -> None:
    async with opened(shared_cluster.url, key_prefix="spread:") as tier:
        keys = [name_of(number) for number in range(24)]
        for key in keys[:6]:
            assert await store(tier, [key], LARGE) == [WriteOutcome.STORED]
        assert await store(tier, keys[6:]) == [WriteOutcome.STORED] * 18
        tier.remember(TierNamespace(OURS, "{}", (1,)))
        for server in shared_cluster.servers:
            with server.client() as client:
                names = [key.decode().rpartition(":") for key in client.keys("spread:{*")]
                assert names
                blocks = [name for name, _, part in names if part == "0"]
                assert len(names) == len(blocks) + 2 * sum((name, ":", "2") in names for name in blocks)
        assert await load(tier, keys[:6], LARGE) == [ReadOutcome.OK] * 6
        assert await tier.delete_namespace(OURS) == 24
        for server in shared_cluster.servers:
            with server.client() as client:
                assert not client.keys("spread:{*")


def ours_at(cluster: RedisCluster) -> set[tuple[int, str]]:
    """Connections of tiers to any node."""
    found = set()
    for server in cluster.servers:
        with server.client() as client:
            found |= {(server.port, each["id"]) for each in client.client_list() if each["name"] == "kvstore"}
    return found


async def test_closing_ends_all_connections(shared_cluster: RedisCluster) -> None:
    """At once, not when the garbage collector comes by: it does so rarely in a daemon."""
    before = ours_at(shared_cluster)
    collects = gc.isenabled()
    gc.disable()
    try:
        async with opened(shared_cluster.url, key_prefix="closing:") as tier:
            await stores_all(tier)
            assert ours_at(shared_cluster) - before
            assert await tier.delete(KEYS) == len(KEYS)  # their slots move in another test
        await until(lambda: not ours_at(shared_cluster) - before, "no connection is left")
    finally:
        if collects:
            gc.enable()


@pytest.mark.parametrize("full_coverage", [False, True])
async def test_a_node_that_dies_costs_its_blocks_alone_and_comes_back(tmp_path: Path, full_coverage: bool) -> None:
    """Where the servers insist on full coverage, it costs all of them while it is away."""
    with running_cluster(tmp_path, full_coverage=full_coverage) as cluster:
        async with opened(cluster.url) as tier:
            await stores_all(tier)
            await store(tier, [name_of(1, THEIRS)])
            victim = cluster.servers[0]
            loads = [asyncio.ensure_future(load(tier, KEYS)) for _ in range(6)]
            await asyncio.wait(loads, return_when=asyncio.FIRST_COMPLETED)
            victim.kill()
            for task in loads:
                await promptly(task, 5.0)
            if full_coverage:

                async def gone() -> bool:
                    await load(tier, KEYS)
                    return tier.state is TierState.FAILED

                while not await gone():
                    pass
                assert await count_there(tier) == 0
            else:
                node = f"127.0.0.1:{victim.port}"

                def given_up() -> bool:
                    return any(each["node"] == node and each["given_up"] for each in tier.stats()["nodes"])

                while not given_up():
                    await load(tier, KEYS)
                assert tier.state is TierState.OK
                assert 0 < await count_there(tier) < 96
                assert set(await load(tier, KEYS)) == {ReadOutcome.OK, ReadOutcome.FAILED}
                # A flush meanwhile is finished when the node is back.
                await tier.delete_namespace(THEIRS)
            victim.start()
            await until(lambda: all(not each["given_up"] for each in tier.stats()["nodes"]), "all nodes are back")
            await until_ok(tier)
            # It has lost what it had.
            outcomes = await store(tier, KEYS)
            assert set(outcomes) == {WriteOutcome.STORED, WriteOutcome.EXISTS}
            assert await load(tier, KEYS) == [ReadOutcome.OK] * 96
            await until(lambda: not tier.stats()["owed"], "the flush is finished")


@contextlib.asynccontextmanager
async def load_on(tier: RedisTier) -> AsyncIterator[None]:
    """Three callers that load, store and remove without a pause, until the end of the block."""
    stopping = asyncio.Event()

    async def work(number: int) -> None:
        while not stopping.is_set():
            await load(tier, KEYS)  # looks at every byte that is handed out
            await store(tier, [name_of(1000 * number + each) for each in range(16)])
            await tier.delete([name_of(1000 * number + each) for each in range(16)])

    workers = [asyncio.ensure_future(work(number)) for number in range(1, 4)]
    try:
        yield
    finally:
        stopping.set()
        await asyncio.gather(*workers)


async def loads_all(tier: RedisTier) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await load(tier, KEYS) != [ReadOutcome.OK] * 96:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("full_coverage", [False, True])
async def test_a_node_is_replaced_by_its_replica_under_load(tmp_path: Path, full_coverage: bool) -> None:
    with running_cluster(tmp_path, replicas=1, full_coverage=full_coverage) as cluster:
        async with opened(cluster.url) as tier:
            await stores_all(tier)
            first, replica = cluster.servers[0], cluster.servers[-1]
            with first.client() as client:
                assert client.wait(1, 30_000) == 1
            async with load_on(tier):
                first.kill()
                with replica.client() as client:

                    def took_over() -> bool:
                        return bool(client.info("replication")["role"] == "master")

                    await until(took_over, "the replica has taken over")
                await loads_all(tier)
            nodes = {each["node"] for each in tier.stats()["nodes"]}
            assert f"127.0.0.1:{replica.port}" in nodes and f"127.0.0.1:{first.port}" not in nodes
            # The old one comes back as a replica of the new one, and nothing changes.
            first.start()
            assert await load(tier, KEYS) == [ReadOutcome.OK] * 96


@pytest.mark.parametrize("full_coverage", [False, True])
async def test_a_node_is_replaced_by_an_empty_one_under_load(tmp_path: Path, full_coverage: bool) -> None:
    with running_cluster(tmp_path, full_coverage=full_coverage) as cluster:
        async with opened(cluster.url) as tier:
            await stores_all(tier)
            async with load_on(tier):
                dead = cluster.servers[0]
                dead.kill()
                try:
                    new = await asyncio.to_thread(cluster.replace, 0)

                    await stores_all(tier)
                    await loads_all(tier)
                finally:
                    cluster.servers[0].kill()
            assert f"127.0.0.1:{new.port}" in {each["node"] for each in tier.stats()["nodes"]}


async def test_a_node_that_is_paused_holds_up_nobody_for_long(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        async with opened(cluster.url, deadline_s=2 * SHORT_S) as tier:
            await store(tier, KEYS)
            cluster.servers[1].pause()
            for _ in range(4):
                outcomes = await promptly(load(tier, KEYS), 2 * SHORT_S)
                assert ReadOutcome.BUFFER_LOST not in outcomes
                await promptly(tier.stat(KEYS), 2 * SHORT_S)
            cluster.servers[1].resume()
            await until_ok(tier)

            async def all_right() -> bool:
                await store(tier, KEYS)
                return set(await load(tier, KEYS)) == {ReadOutcome.OK}

            while not await all_right():
                await asyncio.sleep(0.01)


async def test_slots_that_move_cost_misses_at_most(shared_cluster: RedisCluster) -> None:
    async with opened(shared_cluster.url, key_prefix="moves:") as tier:
        assert await store(tier, KEYS) == [WriteOutcome.STORED] * 96
        clients = [server.client() for server in shared_cluster.servers]
        try:
            ids = [client.execute_command("CLUSTER MYID").decode() for client in clients]
            keys = clients[0].keys("moves:{*")
            slots = sorted({clients[0].execute_command("CLUSTER KEYSLOT", key) for key in keys})[:8]
            for slot in slots:
                clients[1].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
                clients[0].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
            moved = [key for key in keys if clients[0].execute_command("CLUSTER KEYSLOT", key) in slots]
            port = shared_cluster.servers[1].port
            for key in moved:
                clients[0].execute_command("MIGRATE", "127.0.0.1", port, key, 0, 10_000)
            # Between two nodes: a miss each, and no harm.
            outcomes = await load(tier, KEYS)
            assert outcomes.count(ReadOutcome.FAILED) == len(moved) > 0
            assert outcomes.count(ReadOutcome.OK) == 96 - len(moved)
            for slot in slots:
                for client in (clients[1], clients[0], clients[2]):
                    client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])
            # Redirected, and found at once.
            assert await load(tier, KEYS) == [ReadOutcome.OK] * 96
            assert tier.state is TierState.OK
        finally:
            for client in clients:
                client.close()


async def test_a_cluster_that_is_not_there_yet(tmp_path: Path) -> None:
    cluster = RedisCluster(tmp_path)
    async with opened(cluster.url) as tier:
        assert tier.state is TierState.FAILED
        assert await store(tier, KEYS) == [WriteOutcome.FAILED] * 96
        try:
            for server in cluster.servers:
                server.start()
            cluster.form()
            await until_ok(tier)
            await until(lambda: len(tier.stats()["nodes"]) == 3)

            async def all_right() -> bool:
                await store(tier, KEYS)
                return set(await load(tier, KEYS)) == {ReadOutcome.OK}

            while not await all_right():
                await asyncio.sleep(0.01)
        finally:
            for server in cluster.servers:
                server.kill()
