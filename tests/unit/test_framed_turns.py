"""When the daemon begins the calls of one connection: in order, at once where it can, not at the cost of others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.begun import begin, in_task
from kvstore.framed import _CALLS_MAX, _TURN_CALLS, FramedConnection
from kvstore.testing import SteppedLoop
from kvstore.wire.frames import METHODS, NO_ANSWER, Splitter, packed
from kvstore.wire.v1 import admin_pb2, engine_pb2

PAYLOAD_MAX = 1 << 20


class Line(asyncio.Transport):
    """The daemon's end of a connection, and a peer that sends and reads when the test says so."""

    def __init__(self, loop: SteppedLoop) -> None:
        super().__init__()
        self.loop = loop
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.answered: list[int] = []
        self.reading = True
        self.room = 1 << 30  # answers that the peer takes before it is full
        self.over = 0
        self.gate: asyncio.Future[None] = loop.create_future()
        self._splitter = Splitter()

        async def lookup(request: engine_pb2.LookupRequest) -> engine_pb2.LookupReply:
            """At once."""
            self.begun.append(request.group)
            return engine_pb2.LookupReply()

        async def select(request: engine_pb2.SelectRequest) -> engine_pb2.SelectReply:
            """Waits, and does nothing before it is in a task."""
            await in_task()
            self.begun.append(request.wait_ms)
            try:
                async with asyncio.timeout(60):
                    await asyncio.shield(self.gate)
            except asyncio.CancelledError:
                self.cancelled.append(request.wait_ms)
                raise
            return engine_pb2.SelectReply()

        async def acquire(request: engine_pb2.AcquireRequest) -> engine_pb2.AcquireReply:
            """Begins at once, and waits later."""
            self.begun.append(request.request_id)
            await in_task()
            async with asyncio.timeout(60):
                await asyncio.shield(self.gate)
            return engine_pb2.AcquireReply()

        methods: dict[str, Callable[[Any], Any]] = {"Lookup": lookup, "Select": select, "Acquire": acquire}

        async def make() -> FramedConnection:
            return FramedConnection(methods, PAYLOAD_MAX, lambda error: None, self._count)

        self.connection = loop.run_until_complete(make())
        self.connection.connection_made(self)

    def _count(self) -> None:
        self.over += 1

    def send(self, *frames: bytes) -> None:
        """As the loop does it, of its own accord."""
        data = b"".join(frames)
        assert self.reading

        def received() -> None:
            self.connection.get_buffer(-1)[: len(data)] = data
            self.connection.buffer_updated(len(data))

        self.loop.call_soon(received)

    # Of asyncio.Transport:

    def write(self, data: Any) -> None:
        self.answered += [frame.number for frame in self._splitter.feed(data)]
        if len(self.answered) == self.room:
            self.connection.pause_writing()

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.loop.call_soon(self.connection.connection_lost, None)


@pytest.fixture
def line(stepped_loop: SteppedLoop) -> Line:
    return Line(stepped_loop)


def at_once(number: int) -> bytes:
    return packed(METHODS["Lookup"].number, number, engine_pb2.LookupRequest(group=number).SerializeToString())


def waits(number: int) -> bytes:
    return packed(METHODS["Select"].number, number, engine_pb2.SelectRequest(wait_ms=number).SerializeToString())


def waits_later(number: int) -> bytes:
    return packed(METHODS["Acquire"].number, number, engine_pb2.AcquireRequest(request_id=number).SerializeToString())


def step(loop: SteppedLoop) -> None:
    """One turn of the loop."""
    loop.call_soon(loop.stop)
    loop.run_forever()


def test_what_need_not_wait_is_answered_in_the_turn_in_which_it_came(line: Line) -> None:
    line.send(at_once(1), at_once(2))
    step(line.loop)
    assert line.answered == [1, 2]
    assert line.over == 2
    assert line.reading


def test_calls_are_begun_in_their_order(line: Line) -> None:
    line.send(at_once(1), waits(2), at_once(3), waits_later(4), waits(5), at_once(6), at_once(7))
    line.loop.settle()
    assert line.begun == [1, 2, 3, 4, 5, 6, 7]
    assert line.answered == [1, 3, 6, 7]
    assert line.over == 4
    line.gate.set_result(None)
    line.loop.settle()
    assert sorted(line.answered) == [1, 2, 3, 4, 5, 6, 7]
    assert line.reading


def test_a_call_that_ends_does_not_let_another_one_go_before_its_turn(line: Line) -> None:
    line.send(waits(1))
    line.loop.settle()
    line.gate.set_result(None)  # 1 is over in the turn in which the others come
    line.send(waits(2), at_once(3))
    line.loop.settle()
    assert line.begun == [1, 2, 3]


def test_others_have_their_turn(line: Line) -> None:
    others: list[int] = []
    total = 3 * _TURN_CALLS
    line.send(*[at_once(number + 1) for number in range(total)])
    for _ in range(3):
        step(line.loop)
        others.append(len(line.begun))
        assert line.reading == (others[-1] == total)  # nothing more is read meanwhile
    assert others == [_TURN_CALLS, 2 * _TURN_CALLS, total]
    assert line.begun == [number + 1 for number in range(total)]


def test_who_does_not_read_has_nothing_begun(line: Line) -> None:
    line.room = 3
    line.send(*[at_once(number) for number in range(1, 9)])
    line.loop.settle()
    assert line.begun == [1, 2, 3]
    assert not line.reading
    line.room = 6
    line.connection.resume_writing()
    line.loop.settle()
    assert line.begun == [1, 2, 3, 4, 5, 6]
    line.room = 1 << 30
    line.connection.resume_writing()
    line.loop.settle()
    assert line.answered == [1, 2, 3, 4, 5, 6, 7, 8]
    assert line.reading


def test_so_many_calls_may_wait(line: Line) -> None:
    line.send(*[waits(number + 1) for number in range(_CALLS_MAX)], at_once(5000))
    for _ in range(_CALLS_MAX // 5):
        line.loop.settle()
    assert len(line.begun) == _CALLS_MAX
    assert not line.reading
    line.gate.set_result(None)
    for _ in range(_CALLS_MAX // 5):
        line.loop.settle()
    assert line.begun[-1] == 5000
    assert len(line.answered) == _CALLS_MAX + 1
    assert line.reading


def test_the_end_of_a_connection_ends_what_waits_and_begins_nothing(line: Line) -> None:
    line.send(waits(1), waits_later(2), waits(3), at_once(4))
    line.loop.settle()
    line.send(waits(5), at_once(6))
    line.connection.close()  # in the same turn, before the first step of 5
    line.loop.settle()
    assert line.begun == [1, 2, 3, 4]
    assert sorted(line.cancelled) == [1, 3]
    assert line.answered == [4]
    assert line.connection.lost.done()


def test_nothing_is_said_where_no_answer_is_wanted(line: Line) -> None:
    line.send(packed(METHODS["Lookup"].number, NO_ANSWER, b""), packed(250, NO_ANSWER, b""), at_once(1))
    line.loop.settle()
    assert line.answered == [1]
    assert line.over == 3


def test_what_waits_outside_of_a_task_is_a_defect_that_is_told(line: Line) -> None:
    async def careless(request: admin_pb2.PingRequest) -> admin_pb2.PingReply:
        await asyncio.shield(line.gate)
        return admin_pb2.PingReply()

    line.connection._methods = {"Ping": careless}
    line.send(packed(METHODS["Ping"].number, 1, b""))
    line.loop.settle()
    assert line.answered == [1]


def test_begun_without_a_task(stepped_loop: SteppedLoop) -> None:
    tasks: list[asyncio.Task[Any] | None] = []

    async def work(wait: bool) -> None:
        tasks.append(asyncio.current_task())
        if wait:
            await in_task()
            tasks.append(asyncio.current_task())
            await in_task()  # nothing happens
            tasks.append(asyncio.current_task())

    def go() -> None:
        assert begin(work(False)) is None
        assert tasks == [None]
        tasks.clear()
        task = begin(work(True))
        assert tasks == [None]
        tasks.append(task)

    stepped_loop.call_soon(go)
    stepped_loop.settle()
    assert tasks[1] is not None
    assert tasks[1:] == [tasks[1]] * 3
