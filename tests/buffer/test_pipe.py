"""Pipes between real processes: order, bytes, back-pressure, and what happens when somebody dies."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.buffer import Pipe
from kvstore.buffer.records import HEADS, LARGE, namespace_of
from kvstore.errors import ClientClosed, DeadlineExceeded, EndOfPipe, InvalidRequest, PipeBroken
from tests.buffer.samples import lose, same, sample
from tests.support import PATIENCE_S, Daemon, child, eventually, line_of, running_daemon

MIB = 1 << 20

SEND = """
import sys
from kvstore.buffer import Pipe
from tests.buffer.samples import sample
endpoint, name, first, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
pipe = Pipe(name, endpoint, max_bytes=16 << 20)
for number in range(first, last):
    pipe.send_tensor(sample(number))
print("sent", flush=True)
if sys.stdin.readline():
    pipe.close(60)
"""

RECEIVE = """
import sys
from kvstore.buffer import Pipe
from tests.buffer.samples import lose, same, sample
pipe = Pipe(sys.argv[2], sys.argv[1])
for number in range(int(sys.argv[3])):
    assert same(pipe.recv_tensor(60), sample(number)), number
print("received", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def ends(served: Daemon, name: str) -> Iterator[tuple[Pipe, Pipe]]:
    """A sending and a receiving end in this process."""
    sender, receiver = Pipe(name, served.endpoint, max_bytes=8 * MIB), Pipe(name, served.endpoint)
    yield sender, receiver
    for pipe in (sender, receiver):
        pipe.__exit__(KeyboardInterrupt, None, None)


def drained(pipe: Pipe) -> list[object]:
    """Everything up to the end."""
    received = []
    with pytest.raises(EndOfPipe):
        while True:
            received.append(pipe.recv_tensor(PATIENCE_S))
    return received


def closing(pipe: Pipe) -> threading.Thread:
    thread = threading.Thread(target=pipe.close, args=(PATIENCE_S,))
    thread.start()
    return thread


def test_a_thousand_random_tensors_between_two_processes(served: Daemon, name: str) -> None:
    with child(SEND, served.endpoint, name, "0", "1000") as sender, Pipe(name, served.endpoint) as pipe:
        for number in range(1000):
            assert same(pipe.recv_tensor(PATIENCE_S), sample(number)), number
        assert line_of(sender) == "sent"
        print(file=sender.stdin, flush=True)
        with pytest.raises(EndOfPipe):
            pipe.recv_tensor(PATIENCE_S)
        assert sender.wait(PATIENCE_S) == 0


def test_several_are_on_their_way_at_once_and_may_be_changed_after_send(ends: tuple[Pipe, Pipe]) -> None:
    sender, receiver = ends
    buffer = np.zeros(100_000, np.int32)
    for number in range(10):
        buffer[:] = number
        sender.send_tensor(buffer)
    for number in range(10):
        assert (receiver.recv_tensor(PATIENCE_S) == number).all()


def test_the_sender_waits_for_room_and_for_nothing_else(ends: tuple[Pipe, Pipe]) -> None:
    sender, receiver = ends
    tensor = np.ones(3 * MIB, np.uint8)
    sender.send_tensor(tensor)
    sender.send_tensor(tensor)
    with pytest.raises(DeadlineExceeded, match="room"):
        sender.send_tensor(tensor, timeout_s=0)
    thread = threading.Thread(target=sender.send_tensor, args=(tensor, PATIENCE_S))
    thread.start()
    for _ in range(3):
        assert same(receiver.recv_tensor(PATIENCE_S), tensor)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    sender.send_tensor(np.ones(9 * MIB, np.uint8), PATIENCE_S)  # larger than the bound: alone
    with pytest.raises(DeadlineExceeded):
        sender.send_tensor(None, timeout_s=0)
    assert len(receiver.recv_tensor(PATIENCE_S)) == 9 * MIB


def test_a_pool_without_room_makes_the_sender_wait_too(served: Daemon, name: str) -> None:
    with Pipe(name, served.endpoint, max_bytes=1 << 40) as sender, Pipe(name, served.endpoint) as receiver:
        sent = 0
        with pytest.raises(DeadlineExceeded, match="pool has no room"):
            while True:
                sender.send_tensor(np.full(4 * MIB, sent, np.uint8), timeout_s=0)
                sent += 1
        assert 8 <= sent < 16
        for number in range(sent):
            assert (receiver.recv_tensor(PATIENCE_S) == number).all()
        sender.send_tensor(np.full(4 * MIB, 99, np.uint8), PATIENCE_S)
        assert (receiver.recv_tensor(PATIENCE_S) == 99).all()
        thread = closing(sender)
        assert drained(receiver) == []
        thread.join()


def test_nothing_comes_in_time(ends: tuple[Pipe, Pipe]) -> None:
    sender, receiver = ends
    with pytest.raises(DeadlineExceeded):
        receiver.recv_tensor(0)
    sender.send_tensor(np.arange(3))
    assert receiver.recv_tensor(0).tolist() == [0, 1, 2]
    with pytest.raises(DeadlineExceeded):
        receiver.recv_tensor(0.01)


def test_out_is_filled_and_a_wrong_one_leaves_the_tensor_where_it_is(ends: tuple[Pipe, Pipe]) -> None:
    sender, receiver = ends
    sender.send_tensor(np.arange(100_000))
    out = np.zeros(100_000, np.int64)
    with pytest.raises(InvalidRequest, match="out"):
        receiver.recv_tensor(PATIENCE_S, out=out[1:])
    assert receiver.recv_tensor(PATIENCE_S, out=out) is out and out[-1] == 99_999


def test_the_end_comes_after_everything_and_then_the_next_sender(served: Daemon, name: str) -> None:
    receiver = Pipe(name, served.endpoint)
    for generation in range(3):
        sender = Pipe(name, served.endpoint)
        sender.send_tensor(np.array(generation))
        sender.send_tensor(None)
        thread = closing(sender)
        assert [None if each is None else int(each) for each in drained(receiver)] == [generation, None]
        thread.join()
        with pytest.raises(ClientClosed):
            sender.send_tensor(None)
    receiver.close()


def test_closing_says_when_not_everything_was_received(served: Daemon, name: str) -> None:
    sender = Pipe(name, served.endpoint)
    sender.send_tensor(np.arange(5))
    with pytest.raises(DeadlineExceeded, match="receiver"):
        sender.close(0)
    with Pipe(name, served.endpoint) as receiver:  # and still it gets it, if the pool had room for it
        assert [each.tolist() for each in drained(receiver)] == [[0, 1, 2, 3, 4]]  # type: ignore[attr-defined]
    with Pipe(name, served.endpoint) as again:
        again.send_tensor(None)  # a new sender tidies up what the one before left behind
        with Pipe(name, served.endpoint) as receiver:
            thread = closing(again)
            assert drained(receiver) == [None]
            thread.join()


def test_an_end_is_one_process_and_one_direction(ends: tuple[Pipe, Pipe], served: Daemon, name: str) -> None:
    sender, receiver = ends
    sender.send_tensor(np.arange(2))
    receiver.recv_tensor(PATIENCE_S)
    with pytest.raises(InvalidRequest, match="sending end"):
        sender.recv_tensor(0)
    with pytest.raises(InvalidRequest, match="receiving end"):
        receiver.send_tensor(None, 0)
    other = Pipe(name, served.endpoint)
    with pytest.raises(DeadlineExceeded, match="another sender"):
        other.send_tensor(None, 0)
    with pytest.raises(DeadlineExceeded, match="another receiver"):
        other.recv_tensor(0)
    receiver.close()
    sender.send_tensor(np.arange(3))
    assert other.recv_tensor(PATIENCE_S).tolist() == [0, 1, 2]
    other.close()
    with pytest.raises(InvalidRequest, match="name"):
        Pipe("", served.endpoint)


@pytest.mark.parametrize("size", [10, 70_000, 5 * MIB])
def test_a_receiver_that_dies_is_followed_by_the_next_without_loss_or_repetition(
    served: Daemon, name: str, size: int
) -> None:
    with Pipe(name, served.endpoint, max_bytes=30 * MIB) as sender:
        for number in range(4):
            sender.send_tensor(np.full(size, number, np.uint8))
        killed = """
import sys
from kvstore.buffer import Pipe
pipe = Pipe(sys.argv[2], sys.argv[1])
for number in range(2):
    assert (pipe.recv_tensor(60) == number).all()
from kvstore.buffer.receiver import Receiver
def here(*args):
    print("copied", flush=True)
    sys.stdin.readline()
Receiver._advance = here  # all bytes were copied, and it was not said so far
pipe.recv_tensor(60)
"""
        with child(killed, served.endpoint, name) as receiver:
            assert line_of(receiver) == "copied"
            receiver.kill()
        with Pipe(name, served.endpoint) as pipe:
            for number in (2, 3):
                assert (pipe.recv_tensor(PATIENCE_S) == number).all()
            thread = closing(sender)
            assert drained(pipe) == []
            thread.join()


def test_a_sender_that_dies_is_an_error_after_what_it_sent_and_the_next_one_goes_on(served: Daemon, name: str) -> None:
    with Pipe(name, served.endpoint) as pipe:
        with child(SEND, served.endpoint, name, "0", "20") as sender:
            assert line_of(sender) == "sent"
            sender.kill()
        with child(SEND, served.endpoint, name, "100", "110") as sender:  # before anything of the first is received
            assert line_of(sender) == "sent"
            for number in range(20):
                assert same(pipe.recv_tensor(PATIENCE_S), sample(number)), number
            with pytest.raises(PipeBroken, match="without closing it, after 20"):
                pipe.recv_tensor(PATIENCE_S)
            for number in range(100, 110):
                assert same(pipe.recv_tensor(PATIENCE_S), sample(number)), number
            sender.stdin.write("\n")  # type: ignore[union-attr]
            sender.stdin.flush()  # type: ignore[union-attr]
            with pytest.raises(EndOfPipe):
                pipe.recv_tensor(PATIENCE_S)
            assert sender.wait(PATIENCE_S) == 0
        with served.connect(
            namespace_of("pipe", name, copy_down=False)
        ) as client:  # nothing is left but the receiver's own end
            assert [len(client.watch(0, 0, kv_group=group)[1]) for group in range(3)] == [1, 0, 0]


def test_a_receiver_that_waits_learns_of_the_death_at_once(served: Daemon, name: str) -> None:
    with Pipe(name, served.endpoint) as pipe, child(SEND, served.endpoint, name, "0", "1") as sender:
        assert same(pipe.recv_tensor(PATIENCE_S), sample(0))
        errors: list[Exception] = []

        def wait() -> None:
            try:
                pipe.recv_tensor()
            except PipeBroken as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: served.stats()["waiters"], "the receiver waits")
        sender.kill()
        thread.join(PATIENCE_S)
        assert "without closing" in str(errors[0])


@pytest.mark.parametrize("group", [HEADS, LARGE])
def test_a_lost_block_is_an_error_at_both_ends(ends: tuple[Pipe, Pipe], served: Daemon, name: str, group: int) -> None:
    sender, receiver = ends
    sender.send_tensor(np.full(2 * MIB, 0, np.uint8))
    assert receiver.recv_tensor(PATIENCE_S)[0] == 0
    for number in (1, 2):
        sender.send_tensor(np.full(2 * MIB, number, np.uint8))
    with served.connect(namespace_of("pipe", name, copy_down=False)) as client:
        _, listed = client.watch(0, 0, kv_group=group)
        doomed = [key for key in listed if group == LARGE or key.startswith(b"H")][-2]
        lose(client, doomed, group)
    with pytest.raises(PipeBroken, match="tensor 1"):
        receiver.recv_tensor(PATIENCE_S)
    with pytest.raises(PipeBroken, match="open the pipe anew"):
        for _ in range(10):
            sender.send_tensor(np.zeros(2 * MIB, np.uint8), PATIENCE_S)
    with Pipe(name, served.endpoint) as again:
        sender.__exit__(KeyboardInterrupt, None, None)
        again.send_tensor(np.arange(4), PATIENCE_S)
        assert receiver.recv_tensor(PATIENCE_S).tolist() == [0, 1, 2, 3]
        thread = closing(again)
        assert drained(receiver) == []
        thread.join()


def test_an_operator_flushes_it(ends: tuple[Pipe, Pipe], served: Daemon, name: str) -> None:
    sender, receiver = ends
    sender.send_tensor(np.arange(100_000))
    with served.admin() as admin:
        admin.flush(None)
    with pytest.raises(DeadlineExceeded):
        receiver.recv_tensor(0)
    with pytest.raises(PipeBroken):
        sender.close(PATIENCE_S)


def test_the_daemon_restarts(name: str) -> None:
    with running_daemon() as daemon:
        sender, receiver = Pipe(name, daemon.endpoint), Pipe(name, daemon.endpoint)
        for number in range(3):
            sender.send_tensor(np.full(100_000, number))
        assert receiver.recv_tensor(PATIENCE_S)[0] == 0
        daemon.kill()
        daemon.start()
        for _ in range(2):
            with pytest.raises(PipeBroken, match="restarted"):
                sender.send_tensor(None, PATIENCE_S)
        with pytest.raises(PipeBroken, match="restarted"):
            receiver.recv_tensor(PATIENCE_S)
        sender.__exit__(KeyboardInterrupt, None, None)
        with Pipe(name, daemon.endpoint) as again:
            again.send_tensor(np.arange(3))
            assert receiver.recv_tensor(PATIENCE_S).tolist() == [0, 1, 2]
            thread = closing(again)
            assert drained(receiver) == []
            thread.join()
        receiver.close()
        daemon.check_nothing_held()
