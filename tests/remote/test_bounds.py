"""The data port's bounds, in this process: time limits made short, and memory that cannot be sent as a file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import data_port
from kvstore.arena import Arena
from kvstore.blocks import Namespace
from kvstore.data_link import DataLink, Pass, Slots
from kvstore.data_port import DataPort
from kvstore.data_wire import HELLO, MAGIC, Operation, Request, Status, Stream
from kvstore.endpoint import parse_endpoint
from kvstore.errors import DaemonUnavailable, DeadlineExceeded, RetryLater
from kvstore.hierarchy import Hierarchy
from kvstore.outcomes import Outcome
from kvstore.testing import FakeClock, make_block
from kvstore.testing.books import check_idle
from tests.support import PATIENCE_S

SIZE = 300 << 10
GENERATION = b"generatn"


class Served:
    """A hierarchy with a data port, and one session that has slots."""

    def __init__(self, memory: Any = None, **limits: Any) -> None:
        self.arena = Arena(64 << 20, "off")
        self.arena.add_populated(self.arena.size_bytes)
        self.hierarchy = Hierarchy(self.arena, FakeClock())
        self.port = DataPort(
            self.hierarchy,
            memory or self.arena.memory,
            GENERATION,
            parse_endpoint("127.0.0.1:0"),
            None,
            **limits,
        )
        self.session = self.hierarchy.sessions.attach("test", 1, "", 0)
        namespace = Namespace(model="bounds", dtype="x", block_size=1, block_bytes=SIZE)
        self.keyspace = self.hierarchy.namespaces.open(namespace.identity(), namespace.group_bytes).keyspaces[0]
        self.who = Pass(self.session.id, GENERATION + self.session.group.id, self.session.data_secret)

    def reserve(self, count: int) -> Slots:
        offsets = self.hierarchy.reserve(self.session, self.keyspace, count).offsets
        return Slots(offsets, self.hierarchy.arrivals.epochs_of(offsets))

    def link(self, **options: Any) -> DataLink:
        return DataLink(self.port.address, None, **{"stall_s": PATIENCE_S, **options})

    def event(self, name: str) -> int:
        return int(self.port.stats()["events"].get(name, 0))


@contextlib.asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Served]:
    served = Served(**options)
    served.port.open()
    try:
        yield served
    finally:
        await served.port.close()
        assert served.port.stats()["connections"] == 0
        served.hierarchy.end_session(served.session)
        check_idle(served.hierarchy)


async def until(holds: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.002)


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    with socket.socket() as stranger:
        stranger.settimeout(PATIENCE_S)
        yield stranger


@pytest.mark.parametrize("begins", [b"", MAGIC + b"\x01"])
async def test_who_says_nothing_is_sent_away(
    monkeypatch: pytest.MonkeyPatch, stranger: socket.socket, begins: bytes
) -> None:
    monkeypatch.setattr(data_port, "HELLO_S", 0.05)
    async with serving() as served:
        await asyncio.to_thread(stranger.connect, (served.port.address.host, served.port.address.port))
        stranger.sendall(begins)
        assert len(await asyncio.to_thread(stranger.recv, HELLO.size, socket.MSG_WAITALL)) == HELLO.size
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.to_thread(stranger.recv, 1) == b""
        await until(lambda: served.event("timeouts") == 1)


async def test_connections_have_a_ceiling(stranger: socket.socket) -> None:
    async with serving(connections_max=1) as served:
        place = served.port.address.host, served.port.address.port
        await asyncio.to_thread(stranger.connect, place)
        assert await asyncio.to_thread(stranger.recv, HELLO.size, socket.MSG_WAITALL)
        link = served.link()
        with pytest.raises(DaemonUnavailable):
            await asyncio.to_thread(link.write, served.who, served.reserve(1), [memoryview(bytes(SIZE))])
        assert served.event("over_limit") == 1
        link.close()


async def test_a_connection_that_rested_too_long_is_made_anew() -> None:
    async with serving(idle_s=0.05) as served:
        link = served.link()
        slots = served.reserve(2)
        blocks = [memoryview(make_block(key, SIZE)) for key in (b"a", b"b")]
        await asyncio.to_thread(link.write, served.who, slots, blocks)
        await until(lambda: served.event("timeouts") == 1)
        await asyncio.to_thread(link.write, served.who, slots, blocks)
        assert served.event("write") == 2
        for offset, block in zip(slots.offsets, blocks, strict=True):
            assert served.arena.memory.buffer[offset : offset + SIZE] == block
        link.close()


async def begin_write(served: Served) -> tuple[Slots, Stream]:
    """A write of one slot that the daemon waits for the bytes of."""
    slots = served.reserve(1)
    connected = await asyncio.to_thread(socket.create_connection, (served.port.address.host, served.port.address.port))
    stream = Stream(connected, PATIENCE_S)
    _, nonce = HELLO.unpack(await asyncio.to_thread(stream.receive, HELLO.size))
    request = Request(Operation.WRITE, served.who.session, served.who.generation, 0, SIZE, slots.offsets, slots.epochs)
    await asyncio.to_thread(stream.send, request.pack(served.who.secret, nonce, 0))
    assert (await asyncio.to_thread(stream.receive_reply))[0] is Status.GO
    return slots, stream


async def test_a_writer_that_stalls_is_cut_off_and_its_slot_is_free() -> None:
    async with serving(stall_s=0.05) as served:
        slots, stream = await begin_write(served)
        await until(lambda: slots.offsets[0] in served.hierarchy.arrivals)
        await until(lambda: slots.offsets[0] not in served.hierarchy.arrivals)
        await until(lambda: served.event("timeouts") == 1)
        stream.close()


async def test_a_write_that_ends_while_the_loop_is_busy_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_port, "_LOOP_S", 0.02)
    async with serving() as served:
        slots, stream = await begin_write(served)
        # From here on nothing else runs on this loop.
        stream.send(make_block(b"a", SIZE))
        assert stream.receive_reply()[0] is Status.OK
        await asyncio.sleep(0)  # what was told before comes first
        assert slots.offsets[0] not in served.hierarchy.arrivals
        assert served.hierarchy.commit(
            served.session, served.keyspace, slots.offsets, [b"a"], epochs=slots.epochs, arrived=True
        ) == [Outcome.STORED]
        stream.close()


async def test_a_link_that_is_closed_under_a_call_leaves_nobody_behind_in_its_buffers() -> None:
    """The session may end between the beginnings of two parts."""
    async with serving() as served:
        link = served.link(connections=3)
        count = 3 * (4 << 20) // SIZE + 3
        slots = served.reserve(count)
        begun: list[Any] = []
        submit = link._threads.submit

        def closing(*arguments: Any) -> Any:
            if begun:
                link._threads.shutdown(wait=False)
            begun.append(submit(*arguments))
            return begun[-1]

        link._threads.submit = closing  # type: ignore[method-assign]
        blocks = [memoryview(make_block(b"a", SIZE))] * count
        with pytest.raises(DaemonUnavailable):
            await asyncio.to_thread(link.write, served.who, slots, blocks)
        assert len(begun) == 1 and begun[0].done()
        link.close()
        with pytest.raises(DaemonUnavailable):
            await asyncio.to_thread(link.write, served.who, slots, blocks)


async def test_a_machine_without_threads_costs_a_connection_and_not_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    start, failed = threading.Thread.start, threading.Event()

    def no_thread(thread: threading.Thread) -> None:
        if thread.name == "kvstore-data" and not failed.is_set():
            failed.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    async with serving() as served:
        link = served.link()
        slots, blocks = served.reserve(1), [memoryview(make_block(b"a", SIZE))]
        with pytest.raises(DaemonUnavailable):
            await asyncio.to_thread(link.write, served.who, slots, blocks)
        assert failed.is_set() and served.event("over_limit") == 1
        await asyncio.to_thread(link.write, served.who, slots, blocks)
        link.close()


async def test_a_daemon_that_stalls_costs_the_caller_its_limit() -> None:
    """Nobody accepts: the system takes the connection, and nothing ever comes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = DataLink(parse_endpoint(f"127.0.0.1:{silent.getsockname()[1]}"), None, stall_s=0.05)
        who = Pass(bytes(16), bytes(16), bytes(32))
        with pytest.raises(DeadlineExceeded):
            await asyncio.to_thread(link.write, who, Slots([0], [0]), [memoryview(b"x")])
        link.close()


async def test_memory_that_cannot_be_sent_as_a_file_is_copied(tmp_path: Path) -> None:
    """As hugetlb pages on most kernels; a folder is refused in the same words."""
    served = Served()

    class Unsendable:
        fd = os.open(tmp_path, os.O_RDONLY)
        buffer = served.arena.memory.buffer

    served.port._memory = Unsendable()  # type: ignore[assignment]
    served.port.open()
    slots = served.reserve(3)
    keys = [b"x", b"y", b"z"]
    link = served.link()
    await asyncio.to_thread(link.write, served.who, slots, [memoryview(make_block(key, SIZE)) for key in keys])
    served.hierarchy.commit(served.session, served.keyspace, slots.offsets, keys)
    lease = served.hierarchy.acquire(served.session, served.keyspace, keys)
    assert lease is not None
    for _ in range(2):
        rooms = [memoryview(bytearray(SIZE)) for _ in keys]
        valid = await asyncio.to_thread(link.read, served.who, slots, rooms)
        assert np.asarray(valid).all() and rooms == [make_block(key, SIZE) for key in keys]
    assert not served.port._sends_files
    link.close()
    await served.port.close()
    os.close(Unsendable.fd)


async def test_closing_ends_transfers_under_way() -> None:
    served = Served()
    served.port.open()
    slots = served.reserve(1)
    link = served.link()
    writing = asyncio.ensure_future(
        asyncio.to_thread(link.write, served.who, slots, [memoryview(make_block(b"a", SIZE))])
    )
    await asyncio.sleep(0)
    await served.port.close()
    with contextlib.suppress(RetryLater):
        await writing
    assert not any(offset in served.hierarchy.arrivals for offset in slots.offsets)
    link.close()
