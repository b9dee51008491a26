"""Frames survive any cut of the stream, and what is too long costs only itself."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.calls import FramedCalls
from kvstore.errors import DaemonUnavailable, DeadlineExceeded, InvalidRequest, KVStoreError, LimitExceeded
from kvstore.wire.frames import HEAD, METHODS, NO_ANSWER, OK, Frame, Splitter, error_in, packed, packed_error
from kvstore.wire.v1 import admin_pb2, engine_pb2
from tests.support import PATIENCE_S

PAYLOAD_MAX = 40


@given(
    frames=st.lists(st.tuples(st.integers(0, 255), st.integers(0, 2**64 - 1), st.binary(max_size=2 * PAYLOAD_MAX))),
    cuts=st.lists(st.integers(1, 60)),
)
def test_a_stream_may_be_cut_anywhere(frames: list[tuple[int, int, bytes]], cuts: list[int]) -> None:
    stream = b"".join(packed(*frame) for frame in frames)
    splitter = Splitter(PAYLOAD_MAX)
    seen: list[Frame] = []
    for cut in cuts:
        seen += splitter.feed(stream[:cut])
        stream = stream[cut:]
    seen += splitter.feed(stream)
    assert seen == [
        Frame(kind, number, payload if len(payload) <= PAYLOAD_MAX else None, len(payload))
        for kind, number, payload in frames
    ]


@pytest.mark.parametrize("error", [LimitExceeded("at most 3\nof them"), InvalidRequest(""), KVStoreError("else")])
def test_an_error_comes_as_what_it_was(error: KVStoreError) -> None:
    (frame,) = Splitter().feed(packed_error(7, error))
    assert frame.payload is not None
    told = error_in(frame.payload)
    assert (type(told), str(told), frame.number) == (type(error), str(error), 7)


def test_methods_have_numbers_of_their_own_and_no_streams() -> None:
    numbers = [method.number for method in METHODS.values()]
    assert len(set(numbers)) == len(numbers)
    assert "Acquire" in METHODS
    assert "Attach" not in METHODS
    assert "Prefetch" not in METHODS


@pytest.fixture
def line() -> Iterator[tuple[FramedCalls, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(PATIENCE_S)
        yield FramedCalls(ours, "unix:/test"), theirs


class Peer:
    """The other end of a line, by hand."""

    def __init__(self, theirs: socket.socket) -> None:
        self._theirs = theirs
        self._splitter = Splitter()
        self._frames: list[Frame] = []

    def next(self) -> Frame:
        while not self._frames:
            self._frames += self._splitter.feed(self._theirs.recv(1 << 16))
        return self._frames.pop(0)

    def answer(self, frame: Frame, uptime_s: float) -> None:
        self._theirs.sendall(packed(OK, frame.number, admin_pb2.PingReply(uptime_s=uptime_s).SerializeToString()))


def test_answers_in_any_order_reach_who_asked(line: tuple[FramedCalls, socket.socket]) -> None:
    calls, theirs = line
    got: dict[int, float] = {}

    def ask(count: int) -> None:
        request = engine_pb2.LookupRequest(group=count)
        reply = calls.call("Lookup", request, PATIENCE_S)
        got[count] = reply.available

    askers = [threading.Thread(target=ask, args=(count,)) for count in range(8)]
    for asker in askers:
        asker.start()
    peer = Peer(theirs)
    frames = [peer.next() for _ in askers]
    for frame in reversed(frames):
        assert frame.payload is not None
        asked = engine_pb2.LookupRequest.FromString(frame.payload).group
        reply = engine_pb2.LookupReply(available=100 + asked)
        theirs.sendall(packed(OK, frame.number, reply.SerializeToString()))
    for asker in askers:
        asker.join(PATIENCE_S)
    assert got == {count: 100 + count for count in range(8)}


def test_an_answer_that_comes_too_late_is_nobodys(line: tuple[FramedCalls, socket.socket]) -> None:
    calls, theirs = line
    peer = Peer(theirs)
    with pytest.raises(DeadlineExceeded, match="unix:/test"):
        calls.call("Ping", admin_pb2.PingRequest(), 0.001)
    late = peer.next()

    def answer_both() -> None:
        peer.answer(late, 1.0)
        peer.answer(peer.next(), 2.0)

    answering = threading.Thread(target=answer_both)
    answering.start()
    assert calls.call("Ping", admin_pb2.PingRequest(), PATIENCE_S).uptime_s == 2.0
    answering.join(PATIENCE_S)


def test_half_a_frame_is_finished_before_the_next(line: tuple[FramedCalls, socket.socket]) -> None:
    """A peer that does not read makes callers late, and must not find noise when it reads again."""
    calls, theirs = line
    peer = Peer(theirs)
    large = engine_pb2.LookupRequest(namespace=b"x" * (4 << 20))  # more than a socket holds
    with pytest.raises(DeadlineExceeded):
        calls.call("Lookup", large, 0.001)
    calls.post([("Release", engine_pb2.ReleaseRequest(leases=[5]))], 0.001)  # not sent either: nothing is read

    def serve() -> None:
        first, second, third = peer.next(), peer.next(), peer.next()
        assert first.payload == large.SerializeToString()
        assert (second.number, second.payload) == (
            NO_ANSWER,
            engine_pb2.ReleaseRequest(leases=[5]).SerializeToString(),
        )
        peer.answer(first, 1.0)
        peer.answer(third, 3.0)

    serving = threading.Thread(target=serve)
    serving.start()
    assert calls.call("Ping", admin_pb2.PingRequest(), PATIENCE_S).uptime_s == 3.0
    serving.join(PATIENCE_S)
    assert not serving.is_alive()


def test_callers_whose_time_is_up_leave_nothing_behind(line: tuple[FramedCalls, socket.socket]) -> None:
    """A daemon that hangs for an hour must not find an hour of calls that nobody waits for, nor a client keep them."""
    calls, theirs = line
    large = engine_pb2.LookupRequest(namespace=b"x" * (4 << 20))  # more than a socket holds
    for group in range(5):
        with pytest.raises(DeadlineExceeded):
            calls.call("Lookup", engine_pb2.LookupRequest(namespace=large.namespace, group=group), 0.001)
        calls.post([("Release", engine_pb2.ReleaseRequest(leases=[group]))], 0.001)
    peer = Peer(theirs)
    seen: list[tuple[int, int]] = []

    def serve() -> None:
        while not seen or seen[-1][0] != METHODS["Ping"].number:
            frame = peer.next()
            if frame.kind == METHODS["Lookup"].number:
                seen.append((frame.kind, engine_pb2.LookupRequest.FromString(frame.payload or b"").group))
            elif frame.kind == METHODS["Release"].number:
                seen.append((frame.kind, engine_pb2.ReleaseRequest.FromString(frame.payload or b"").leases[0]))
            else:
                seen.append((frame.kind, 0))
        peer.answer(frame, 1.0)

    serving = threading.Thread(target=serve)
    serving.start()
    calls.call("Ping", admin_pb2.PingRequest(), PATIENCE_S)
    serving.join(PATIENCE_S)
    release = METHODS["Release"].number
    assert seen == [(METHODS["Lookup"].number, 0), *((release, group) for group in range(5)), (seen[-1][0], 0)]


def test_a_caller_with_less_time_does_not_wait_for_one_with_more(line: tuple[FramedCalls, socket.socket]) -> None:
    calls, theirs = line
    large = engine_pb2.LookupRequest(namespace=b"x" * (4 << 20))  # more than a socket holds
    outcome: list[type[BaseException]] = []

    def ask() -> None:
        try:
            calls.call("Lookup", large, PATIENCE_S)
        except DaemonUnavailable as error:
            outcome.append(type(error))

    patient = threading.Thread(target=ask)
    patient.start()
    theirs.recv(1)  # it has begun to send
    with pytest.raises(DeadlineExceeded):
        calls.call("Ping", admin_pb2.PingRequest(), 0.001)
    assert patient.is_alive() and not outcome
    theirs.close()
    patient.join(PATIENCE_S)
    assert outcome == [DaemonUnavailable]


def test_whoever_waits_is_told_when_the_peer_goes(line: tuple[FramedCalls, socket.socket]) -> None:
    calls, theirs = line
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            calls.call("Ping", admin_pb2.PingRequest(), PATIENCE_S)
        except DaemonUnavailable as error:
            failures.append(error)

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for asker in askers:
        asker.start()
    peer = Peer(theirs)
    for _ in askers:
        peer.next()
    theirs.sendall(HEAD.pack(100, OK, 1))  # half an answer
    theirs.close()
    for asker in askers:
        asker.join(PATIENCE_S)
    assert len(failures) == 3
    with pytest.raises(DaemonUnavailable):
        calls.call("Ping", admin_pb2.PingRequest(), PATIENCE_S)
    with pytest.raises(DaemonUnavailable):
        calls.post([("Ping", admin_pb2.PingRequest())], PATIENCE_S)
