"""Workers' word between steps, over a real socket."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from engine_plugin.vllm.acks import _WORDS_MAX, Acks, AckSender, _Expected
from engine_plugin.vllm.link import Commit
from engine_plugin.vllm.stock import Slots

COMMIT = Commit(Slots(b"now", np.zeros(1, np.uint64), np.zeros(1, np.uint32)), [b"key"], None)


class Rig:
    def __init__(self) -> None:
        self.published: list[Commit] = []
        self.told = threading.Event()
        self.acks = Acks(self.publish)
        self.sender = AckSender()

    def publish(self, commit: Commit) -> None:
        self.published.append(commit)
        self.told.set()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.acks.close()
    rig.sender.close()


def test_the_last_word_publishes(rig: Rig) -> None:
    assert rig.acks.address is not None
    rig.acks.expect(1, range(2), lambda: [COMMIT, COMMIT])
    rig.sender.send(rig.acks.address, 1, 1, True)
    rig.sender.send(rig.acks.address, 1, 0, True)
    assert rig.told.wait(20)
    assert rig.acks.withdraw(1), "published before"
    assert rig.published == [COMMIT, COMMIT]


def test_who_does_not_know_the_secret_publishes_nothing(rig: Rig) -> None:
    address = rig.acks.address
    assert address is not None
    rig.acks.expect(1, [0], lambda: [COMMIT])
    rig.acks.expect(2, [0], lambda: [COMMIT])
    rig.sender.send(dataclasses.replace(address, secret=bytes(16)), 1, 0, True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for noise in (b"", b"x" * 29, b"x" * 5000):
            stranger.sendto(noise, address.name)
    rig.sender.send(address, 2, 0, True)  # what came before it has been read
    assert rig.told.wait(20)
    assert not rig.acks.withdraw(1)
    assert len(rig.published) == 1


def test_many_words_at_once_arrive(rig: Rig) -> None:
    """More than the kernel queues for a socket, while nobody takes them."""
    assert rig.acks.address is not None
    ranks = 200
    with rig.acks._lock:  # the socket's thread stands still
        for rank in range(ranks):
            rig.sender.send(rig.acks.address, 1, rank, True)
        rig.acks._expected[1] = _Expected(set(range(ranks)), lambda: [COMMIT])
    assert rig.told.wait(20)


def test_words_that_nobody_takes_do_not_add_up(rig: Rig) -> None:
    assert rig.acks.address is not None
    with rig.acks._lock:  # the socket's thread stands still, and the kernel queues a few only
        for ticket in range(3 * _WORDS_MAX):
            rig.sender.send(rig.acks.address, ticket, 0, True)
        assert rig.sender._words.qsize() <= _WORDS_MAX


def test_what_cannot_be_sent_is_left_to_the_step(rig: Rig) -> None:
    address = rig.acks.address
    assert address is not None
    rig.sender.send(dataclasses.replace(address, name=b"\0nobody is here"), 1, 0, True)
    rig.acks.expect(1, [0], lambda: [COMMIT])
    rig.acks.close()
    rig.sender.send(address, 1, 0, True)
    rig.sender.close()
    assert not rig.published
