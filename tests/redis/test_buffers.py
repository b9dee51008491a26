"""Borrowed buffers: nobody touches them once a call has returned, whatever the server does then.

The server here is a script, so that it can stop in the middle of a value and go on when it is too late.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import xxhash

from kvstore.testing import FakeClock, make_block
from kvstore.testing.tier_suite import name_of, store
from kvstore.tier import ReadOutcome, TierState, WriteOutcome
from kvstore.tiers.redis_value import pack_header, seal_of
from tests.redis.servers import PATIENCE_S
from tests.redis.tiers import SHORT_S, opened, promptly, until

SIZE = 3 << 19
KEY = name_of(1)
LATE = 0xEE


def value_of(key: bytes, size: int = SIZE) -> bytes:
    """A block of one part, as it lies in Redis."""
    data = make_block(key, size)
    check = xxhash.xxh3_64_intdigest(data)
    return pack_header(key, size, 0, check, seal_of([check])) + data


Answer = Callable[[list[bytes], asyncio.StreamWriter], Awaitable[None]]


class Script:
    """A server that does as it should, but for GET and SET.

    Attributes:
        get: Answers a GET.
        greets: Whether it answers at all; set it to let it go on.
        reads: Whether it takes values of SET; set it to let it go on.
        asked: Set when it was asked something and does not answer.
        stuck: Set when it was sent a value and does not take it.
        taken: What it got as values.
        lost: Connections that the other side has closed.
        version: What it says it is.
    """

    def __init__(self) -> None:
        self.get: Answer | None = None
        self.greets = asyncio.Event()
        self.greets.set()
        self.reads = asyncio.Event()
        self.reads.set()
        self.asked = asyncio.Event()
        self.stuck = asyncio.Event()
        self.taken: list[bytes] = []
        self.lost = 0
        self.version = "7.0.0"
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Script]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 16)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                await self._answer(await self._command(reader), writer)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, ValueError):
            self.lost += 1
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _command(self, reader: asyncio.StreamReader) -> list[bytes]:
        count = int((await reader.readuntil(b"\r\n"))[1:])
        arguments: list[bytes] = []
        for _ in range(count):
            size = int((await reader.readuntil(b"\r\n"))[1:])
            if size >= 1 << 16 and not self.reads.is_set():
                self.stuck.set()
                await self.reads.wait()
            data = b""
            try:
                data = await reader.readexactly(size)
            except asyncio.IncompleteReadError as error:
                self.taken.append(error.partial)
                raise
            if size >= 1 << 16:
                self.taken.append(data)
            arguments.append(data)
            await reader.readexactly(2)
        return arguments

    async def _answer(self, command: list[bytes], writer: asyncio.StreamWriter) -> None:
        if not self.greets.is_set():
            self.asked.set()
        await self.greets.wait()
        match command[0]:
            case b"GET" if self.get is not None:
                await self.get(command, writer)
            case b"GET":
                writer.write(b"$-1\r\n")
            case b"GETRANGE":
                writer.write(b"$0\r\n\r\n")
            case b"PING":
                writer.write(b"+PONG\r\n")
            case b"INFO":
                text = f"redis_version:{self.version}\r\nrole:master\r\nmaxmemory:0\r\n".encode()
                writer.write(b"$%d\r\n%b\r\n" % (len(text), text))
            case b"HGETALL":
                writer.write(b"*0\r\n")
            case b"SCAN":
                writer.write(b"*2\r\n$1\r\n0\r\n*0\r\n")
            case b"UNLINK" | b"EXISTS":
                writer.write(b":0\r\n")
            case _:
                writer.write(b"+OK\r\n")


@pytest.fixture
async def script() -> AsyncIterator[Script]:
    async with Script().running() as script:
        yield script


def url(script: Script) -> str:
    return f"redis://127.0.0.1:{script.port}"


async def settled(script: Script) -> None:
    """Waits until the script has noticed that its connection was closed."""
    async with asyncio.timeout(PATIENCE_S):
        while not script.lost:
            await asyncio.sleep(0)


class Halfway:
    """Answers GET with a value, stops in the middle, and ends with other bytes when it is let go on."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, command: list[bytes], writer: asyncio.StreamWriter) -> None:
        value = value_of(KEY)
        writer.write(b"$%d\r\n" % len(value) + value[: len(value) // 2])
        await writer.drain()
        self.reached.set()
        await self.go_on.wait()
        writer.write(bytes([LATE]) * (len(value) - len(value) // 2) + b"\r\n")
        await writer.drain()


async def whole(command: list[bytes], writer: asyncio.StreamWriter) -> None:
    """Answers GET as it should be."""
    value = value_of(KEY)
    writer.write(b"$%d\r\n" % len(value) + value + b"\r\n")


async def test_a_script_that_does_all_right(script: Script) -> None:
    script.get = whole
    async with opened(url(script)) as tier:
        room = bytearray(SIZE)
        assert await tier.read([(KEY, memoryview(room))], 30.0) == [ReadOutcome.OK]
        assert room == make_block(KEY, SIZE)
        assert await tier.write([(KEY, memoryview(room))], 30.0) == [WriteOutcome.STORED]
        assert script.taken == [value_of(KEY)]


@pytest.mark.parametrize("how", ["stall", "deadline", "cancel", "close"])
async def test_late_bytes_of_a_value_do_not_reach_the_buffer(script: Script, how: str) -> None:
    script.get = halfway = Halfway()
    async with opened(url(script), deadline_s=60.0 if how in ("cancel", "deadline") else SHORT_S) as tier:
        room = bytearray(SIZE)
        # The tier's own deadline, or the caller's.
        reading = asyncio.ensure_future(tier.read([(KEY, memoryview(room))], SHORT_S if how == "deadline" else 60.0))
        await asyncio.wait_for(halfway.reached.wait(), PATIENCE_S)
        if how == "cancel":
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        elif how == "close":
            await tier.close()
            await reading
        else:
            assert await promptly(reading) == [ReadOutcome.FAILED]
            assert tier.state is TierState.OK
        left = bytes(room)
        assert left != bytes(SIZE), "it was not in the middle of anything"
        halfway.go_on.set()
        await settled(script)
        assert room == left
        assert bytes([LATE]) * 64 not in left
        room.clear()  # nothing holds a view of it any more


@pytest.mark.parametrize("how", ["stall", "cancel"])
async def test_what_is_sent_is_what_was_there_during_the_call(script: Script, how: str) -> None:
    script.reads.clear()
    size = 64 << 20  # more than all buffers on the way take
    data = bytearray(make_block(KEY, size))
    async with opened(url(script), deadline_s=60.0 if how == "cancel" else SHORT_S) as tier:
        writing = asyncio.ensure_future(tier.write([(KEY, memoryview(data))], 60.0))
        await asyncio.wait_for(script.stuck.wait(), PATIENCE_S)
        if how == "cancel":
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
        else:
            assert await promptly(writing) == [WriteOutcome.FAILED]
        data[:] = bytes([LATE]) * size
        script.reads.set()
        await settled(script)
        assert all(bytes([LATE]) * 64 not in taken for taken in script.taken)


@pytest.mark.parametrize("how", ["stall", "deadline", "cancel"])
async def test_a_connection_that_comes_too_late_never_gets_the_buffer(script: Script, how: str) -> None:
    async with opened(url(script), deadline_s=SHORT_S if how == "stall" else 30.0) as tier:
        await asyncio.to_thread(tier.servers.close)  # so that it has to connect anew
        script.get = whole
        script.greets.clear()
        room = bytearray(SIZE)
        reading = asyncio.ensure_future(tier.read([(KEY, memoryview(room))], SHORT_S if how == "deadline" else 30.0))
        await asyncio.wait_for(script.asked.wait(), PATIENCE_S)
        if how == "cancel":
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await promptly(reading)
        else:
            assert await promptly(reading) == [ReadOutcome.FAILED]
        script.greets.set()
        await tier.close()  # its threads have ended
        assert room == bytes(SIZE)


async def test_a_version_that_is_too_old_is_said(script: Script) -> None:
    script.version = "5.0.14"
    clock = FakeClock()
    async with opened(url(script), clock) as tier:
        assert tier.state is TierState.FAILED
        assert tier.stats()["fault"]["text"] == "Redis 5.0.14 is too old: 6.0 is the least that works"
        assert await store(tier, [KEY]) == [WriteOutcome.FAILED]
        script.version = "6.0.20"
        clock.advance(60.0)
        await tier.tend()
        assert tier.state is TierState.OK


def let_go(room: bytearray) -> bool:
    """Whether nobody has a view of a buffer."""
    try:
        room.clear()
    except BufferError:
        return False
    return True


async def test_a_caller_without_time_says_nothing_about_the_server(script: Script) -> None:
    script.get = Halfway()
    async with opened(url(script), FakeClock(), deadline_s=60.0) as tier:
        for _ in range(10):
            room = bytearray(SIZE)
            assert await promptly(tier.read([(KEY, memoryview(room))], 0.01)) == [ReadOutcome.FAILED]
            # A thread that is still connecting has it in its hands, and will not touch it.
            await until(lambda room=room: let_go(room), "the buffer is let go of")
        assert tier.state is TierState.OK and not tier.stats()["faults"]


@pytest.mark.parametrize(
    "reply",
    [
        b"$5\r\nhelloXX",
        b"$99999999999999\r\n",
        b"$-7\r\n",
        b"$abc\r\n",
        b"*3\r\n$1\r\na\r\n",
        b":7\r\n",
        b"nonsense\r\n",
        b"x" * 10_000,
        b"$-1\r\n$-1\r\n+more\r\n",
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-ERR something new\r\n",
        b"$3\r\nabc\r\n",
        b"$0\r\n\r\n",
    ],
)
async def test_replies_that_make_no_sense_are_misses(script: Script, reply: bytes) -> None:
    async def nonsense(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.write(reply)

    script.get = nonsense
    async with opened(url(script), FakeClock(), deadline_s=60.0 if reply[:1] != b"$" else 2.0) as tier:
        room = bytearray(SIZE)
        (outcome,) = await promptly(tier.read([(KEY, memoryview(room))], 30.0), 2.0)
        assert outcome in (ReadOutcome.FAILED, ReadOutcome.ABSENT, ReadOutcome.DAMAGED)
        # What comes next is not taken for an answer to something else.
        assert room == bytes(SIZE)
        script.get = whole
        assert await tier.read([(KEY, memoryview(room))], 30.0) == [ReadOutcome.OK]
        assert room == make_block(KEY, SIZE) and tier.state is TierState.OK
