"""The daemon is killed while clients are at work: they see misses and refusals, and go on with its next life."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvstore.errors import RetryLater
from kvstore.testing import make_block
from tests.crash.conftest import NAMESPACE
from tests.support import PATIENCE_S, Daemon, eventually, running_daemon

pytestmark = pytest.mark.crash
SIZE = NAMESPACE.block_bytes
LIVES = 6


@pytest.fixture
def mortal() -> Iterator[Daemon]:
    """A daemon that is killed and started again by the test."""
    with running_daemon() as daemon:
        yield daemon


def test_killed_in_the_middle_of_inserts_and_reads_it_gives_no_wrong_byte(mortal: Daemon) -> None:
    failures: list[BaseException] = []
    seen = {"hits": 0, "refused": 0}
    over = threading.Event()
    stored = threading.Semaphore(0)
    read = threading.Semaphore(0)

    def writer(number: int) -> None:
        try:
            with mortal.connect(NAMESPACE, timeout_s=5.0, wait=False) as client:
                turn = 0
                while not over.is_set():
                    names = [b"%d/%d/%d" % (number, turn % 3, index) for index in range(8)]
                    result = client.insert(names, [make_block(name, SIZE) for name in names]).wait(PATIENCE_S)
                    assert result.stored + result.exists + sum(result.refused.values()) == len(names)
                    seen["refused"] += sum(result.refused.values())
                    if result.stored or result.exists:
                        stored.release()
                    else:
                        eventually(lambda: client.attached or over.is_set())
                    turn += 1
        except BaseException as error:
            failures.append(error)

    def reader(number: int) -> None:
        try:
            with mortal.connect(NAMESPACE, timeout_s=5.0, wait=False) as client:
                turn = 0
                while not over.is_set():
                    names = [b"%d/%d/%d" % (number, turn % 3, index) for index in range(8)]
                    turn += 1
                    try:
                        with client.select(names, timeout_s=0.05) as found:
                            for name, view in zip(names, found, strict=False):
                                assert bytes(view) == make_block(name, SIZE)
                                seen["hits"] += 1
                                read.release()
                    except RetryLater:
                        eventually(lambda: client.attached or over.is_set())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2) for work in (writer, reader)]
    for thread in threads:
        thread.start()
    for _ in range(LIVES):
        # In each life something is stored and something is read before it ends.
        for what in (stored, read):
            while what.acquire(blocking=False):
                pass
            assert what.acquire(timeout=PATIENCE_S) or failures
        mortal.kill()
        mortal.start()
    over.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failures and seen["hits"]
    mortal.check_nothing_held()


def test_killed_while_a_claim_stands_it_loses_the_blocks_and_says_so(mortal: Daemon) -> None:
    with mortal.connect(NAMESPACE) as client:
        client.insert([b"a"], [make_block(b"a", SIZE)]).wait(PATIENCE_S)
        with pytest.raises(RetryLater), client.drop_select([b"a"], timeout_s=5) as found:
            mortal.kill()
            assert bytes(found[0]) == make_block(b"a", SIZE)
        del found
        mortal.start()
        assert client.lookup([b"a"]) == 0
    mortal.check_nothing_held()
