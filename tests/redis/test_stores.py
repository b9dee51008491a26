"""Many blocks in one store: groups that are asked about ahead, and answers that are read many at once."""

from __future__ import annotations

import asyncio
import socket

import pytest

from kvstore.testing.tier_suite import load, name_of, present, store
from kvstore.tier import ReadOutcome, WriteOutcome
from kvstore.tiers.redis_value import PAYLOAD_BYTES, Names
from tests.redis.servers import RedisCluster, RedisServer
from tests.redis.test_buffers import Script, url
from tests.redis.tiers import new_prefix, opened

SIZE = 4096
#: More than one group, and not a multiple of it.
KEYS = [name_of(number) for number in range(300)]


async def test_a_batch_of_which_some_is_there_and_some_is_in_the_way(shared_server: RedisServer) -> None:
    prefix = new_prefix()
    names = Names(prefix)
    there, spoiled, foreign = KEYS[::7], KEYS[3::50], KEYS[5::50]
    async with opened(shared_server.url, key_prefix=prefix) as tier:
        assert set(await store(tier, list(dict.fromkeys([*there, *spoiled])), SIZE)) == {WriteOutcome.STORED}
        with shared_server.client() as client:
            for key in spoiled:
                client.append(names.part(key, 0), b"x")
                client.setrange(names.part(key, 0), 0, b"?")
            for key in foreign:
                client.delete(names.part(key, 0))
                client.rpush(names.part(key, 0), b"of somebody else")
        expected = [
            WriteOutcome.EXISTS if key in there and key not in spoiled and key not in foreign else WriteOutcome.STORED
            for key in KEYS
        ]
        assert await store(tier, KEYS, SIZE) == expected
        assert await load(tier, KEYS, SIZE) == [ReadOutcome.OK] * len(KEYS)


async def test_blocks_of_one_part_and_of_several_in_one_batch(shared_server: RedisServer) -> None:
    async with opened(shared_server.url) as tier:
        large, small = KEYS[:2], KEYS[2:130]
        blocks = [(large[0], 2 * PAYLOAD_BYTES + 1), *((key, SIZE) for key in small), (large[1], PAYLOAD_BYTES + 1)]
        datas = [memoryview(bytes([at % 251]) * size) for at, (_, size) in enumerate(blocks)]
        for expected in (WriteOutcome.STORED, WriteOutcome.EXISTS):
            written = await tier.write([(key, data) for (key, _), data in zip(blocks, datas, strict=True)], 30.0)
            assert written == [expected] * len(blocks)
        rooms = [bytearray(size) for _, size in blocks]
        read = await tier.read([(key, memoryview(room)) for (key, _), room in zip(blocks, rooms, strict=True)], 30.0)
        assert set(read) == {ReadOutcome.OK}
        assert all(room == data for room, data in zip(rooms, datas, strict=True))


async def test_a_large_batch_in_a_cluster(shared_cluster: RedisCluster) -> None:
    async with opened(shared_cluster.url) as tier:
        assert set(await store(tier, KEYS[::2], SIZE)) == {WriteOutcome.STORED}
        expected = [WriteOutcome.STORED if at % 2 else WriteOutcome.EXISTS for at in range(len(KEYS))]
        assert await store(tier, KEYS, SIZE) == expected
        assert await load(tier, KEYS, SIZE) == [ReadOutcome.OK] * len(KEYS)


async def test_little_is_under_way_to_a_server_on_this_host(shared_server: RedisServer) -> None:
    async with opened(shared_server.url) as tier:
        (node,) = tier.servers.nodes()
        with tier.servers.connection(node) as connection:
            # Linux doubles what is asked for, and stays below what an ordinary user may have.
            assert connection._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 1 << 20


def sets_of(server: RedisServer) -> int:
    """How many values the server was ever sent."""
    with server.client() as client:
        return int(client.info("commandstats").get("cmdstat_set", {}).get("calls", 0))


class Uneven(Script):
    """Answers stores as it is told, in pieces that end anywhere.

    Attributes:
        answers: To EXISTS and SET of a block, by the number of the question since the last store().
        asked_of: What it was asked, in order.
    """

    def __init__(self, exists: dict[int, bytes], sets: dict[int, bytes], step: int) -> None:
        super().__init__()
        self._left = {b"EXISTS": exists, b"SET": sets}
        self._numbers = {b"EXISTS": 0, b"SET": 0}
        self._step = step
        self._waiting = b""
        self.asked_of: list[bytes] = []

    async def _answer(self, command: list[bytes], writer: asyncio.StreamWriter) -> None:
        name = command[0]
        if name not in self._numbers or (name == b"EXISTS" and len(command) > 2):
            await super()._answer(command, writer)
            return
        self.asked_of.append(name)
        number = self._numbers[name]
        self._numbers[name] += 1
        self._waiting += self._left[name].get(number, b":0\r\n" if name == b"EXISTS" else b"+OK\r\n")
        while self._waiting:
            piece, self._waiting = self._waiting[: self._step], self._waiting[self._step :]
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)  # so that the pieces are sent one by one


@pytest.mark.parametrize("step", [1, 3, 64])
async def test_answers_that_come_in_pieces(step: int) -> None:
    sets = {
        0: b"$-1\r\n",
        63: b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
        64: b"+OK\r\n",
        65: b"-ERR something else\r\n",
        128: b"+QUEUED\r\n",
        199: b"$-1\r\n",
    }
    async with Uneven({}, sets, step).running() as script, opened(url(script)) as tier:
        outcomes = await store(tier, KEYS[:200], SIZE)
        assert {at: outcome for at, outcome in enumerate(outcomes) if outcome is not WriteOutcome.STORED} == {
            0: WriteOutcome.EXISTS,
            63: WriteOutcome.NO_ROOM,
            65: WriteOutcome.FAILED,
            128: WriteOutcome.FAILED,
            199: WriteOutcome.EXISTS,
        }
        # While a group is on its way the next one is asked about.
        order = [("EXISTS", 128), ("SET", 64), ("EXISTS", 64), ("SET", 64), ("EXISTS", 8), ("SET", 72)]
        assert script.asked_of == [name.encode() for name, count in order for _ in range(count)]


@pytest.mark.parametrize("where", ["EXISTS", "SET"])
@pytest.mark.parametrize("reply", [b"*1\r\n:1\r\n", b"$3\r\nabc\r\n", b":one\r\n", b"nonsense\r\n"])
async def test_answers_that_make_no_sense_cost_no_more_than_the_store(where: str, reply: bytes) -> None:
    replies = {70: reply}
    script = Uneven(replies if where == "EXISTS" else {}, replies if where == "SET" else {}, 1 << 16)
    async with script.running(), opened(url(script)) as tier:
        outcomes = await store(tier, KEYS[:200], SIZE)
        assert set(outcomes) <= {WriteOutcome.STORED, WriteOutcome.FAILED}
        assert sum(tier.stats()["faults"].values()) >= 1
        assert set(await store(tier, KEYS[200:], SIZE)) == {WriteOutcome.STORED}


async def test_nothing_of_a_block_is_sent_twice_by_two_calls_at_once(shared_server: RedisServer) -> None:
    async with opened(shared_server.url) as tier:
        before = sets_of(shared_server)
        both = await asyncio.gather(store(tier, KEYS, SIZE), store(tier, KEYS[100:], SIZE))
        assert both == [[WriteOutcome.STORED] * 300, [WriteOutcome.EXISTS] * 200]
        assert sets_of(shared_server) - before == 300
        assert await present(tier, KEYS) == [True] * 300
