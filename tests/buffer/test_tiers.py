"""Buffers and pipes over a daemon with tiers below its pool: what left the pool is found, what should not go there does
not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.buffer import LookupBuffer, Pipe, lookup
from kvstore.errors import InvalidRequest, PipeBroken, RetryLater
from tests.buffer.samples import same, sample
from tests.support import PATIENCE_S, Daemon, eventually, running_daemon


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with a disk."""
    with running_daemon("--disk-dir", str(tmp_path), "--disk-bytes", "256MiB") as daemon:
        yield daemon


def blocks(daemon: Daemon) -> list[int]:
    """In the pool, and in each tier below it."""
    return [tier["blocks"] for tier in daemon.stats()["tiers"]]


def tensors(number: int) -> list[Any]:
    return [np.arange(300) + 1000 * number, None, sample(number, none=False), sample(number + 500), None]


def put(buffer: LookupBuffer, numbers: range) -> None:
    tickets = [buffer.insert(*tensors(number)) for number in numbers]
    assert all(ticket.wait(PATIENCE_S).stored for ticket in tickets)


def empty_pool(daemon: Daemon) -> None:
    """Evicts everything, once it has a copy below."""
    eventually(lambda: blocks(daemon)[0] == blocks(daemon)[1], "all is copied down")
    with daemon.admin() as admin:
        admin.evict(64 << 20)
    assert blocks(daemon)[0] == 0


def check_taken(buffer: LookupBuffer, numbers: list[int]) -> None:
    """All that is there comes out, in this order, whole, and once."""
    for number in numbers:
        entry = buffer.drop_select(None, None, 0)
        assert entry is not None
        assert all(map(same, entry, tensors(number))), number
    assert buffer.drop_select(None, None, 0) is None


@pytest.mark.parametrize("known", [True, False])
def test_entries_that_left_the_pool_are_found_and_leave_every_tier(deep: Daemon, name: str, known: bool) -> None:
    with LookupBuffer(name, deep.endpoint) as buffer:
        put(buffer, range(12))
        if known:  # it has seen what is there
            assert buffer.drop_select(np.arange(5) - 9, None, 0) is None
        empty_pool(deep)
        entry = buffer.drop_select(tensors(7)[0][:100], None, 0)
        assert entry is not None and all(map(same, entry, tensors(7)))
        put(buffer, range(12, 14))
        with LookupBuffer(name, deep.endpoint) as other:
            check_taken(other, [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13])
        assert buffer.drop_select(None, None, 0) is None
    eventually(lambda: blocks(deep) == [0, 0], "nothing is left anywhere")


def test_entries_on_the_disk_outlive_the_daemon(deep: Daemon, name: str) -> None:
    with LookupBuffer(name, deep.endpoint) as buffer:
        put(buffer, range(6))
        eventually(lambda: blocks(deep)[0] == blocks(deep)[1], "all is copied down")
        deep.stop()
        deep.start()
        found = eventually(lambda: buffer.drop_select(tensors(3)[0], None, 1))
        assert all(map(same, found, tensors(3)))
        check_taken(buffer, [0, 1, 2, 4, 5])


def test_an_entry_whose_removal_nobody_confirmed_is_not_handed_out(
    deep: Daemon, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LookupBuffer(name, deep.endpoint) as buffer:
        put(buffer, range(1))
        eventually(lambda: blocks(deep)[0] == blocks(deep)[1], "all is copied down")
        read = buffer._records.read

        def dying(*arguments: Any) -> list[Any]:
            entry = read(*arguments)
            deep.kill()
            eventually(lambda: buffer._client.generation is None, "the client knows that the daemon has gone")
            return entry

        with monkeypatch.context() as context:
            context.setattr(buffer._records, "read", dying)
            with pytest.raises(RetryLater):
                buffer.drop_select(None, None, 0)


def test_who_waits_looks_again_for_an_entry_that_could_not_be_brought_up(
    deep: Daemon, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is well again tells nobody."""
    monkeypatch.setattr(lookup, "_ABSENT_S", 0.05)
    with LookupBuffer(name, deep.endpoint) as buffer:
        put(buffer, range(1))
        empty_pool(deep)
    with LookupBuffer(name, deep.endpoint) as buffer:
        present, asked = buffer._client.present, list[bytes]()

        def ill(keys: list[bytes]) -> list[bool]:
            asked.extend(keys)
            return present(keys) if len(asked) > 2 else [False] * len(keys)

        monkeypatch.setattr(buffer._client, "present", ill)
        entry = buffer.drop_select(None, None, 600)  # far beyond this test's own limit
        assert entry is not None and all(map(same, entry, tensors(0)))
        assert len(asked) == 3


def test_an_entry_that_is_nowhere_any_more_is_passed_over(deep: Daemon, name: str) -> None:
    with LookupBuffer(name, deep.endpoint) as buffer:
        put(buffer, range(3))
        assert buffer.drop_select(np.arange(5) - 9, None, 0) is None
        empty_pool(deep)
        with deep.admin() as admin:
            admin.flush(None)
        assert buffer.drop_select(None, None, 0) is None
        put(buffer, range(3, 4))
        check_taken(buffer, [3])


def test_what_passes_a_pipe_goes_to_no_tier_unless_asked(deep: Daemon, name: str) -> None:
    for copied in (False, True):
        with (
            Pipe(f"{name}-{copied}", deep.endpoint, copy_down=copied) as receiver,
            Pipe(f"{name}-{copied}", deep.endpoint, copy_down=copied) as sender,
        ):
            for number in range(20):
                sender.send_tensor(sample(number))
            if copied:
                eventually(lambda: blocks(deep)[1] > 20, "it is copied down")
            for number in range(20):
                assert same(receiver.recv_tensor(PATIENCE_S), sample(number))
            counts = deep.stats()["transfers"]
            assert bool(counts.get("disk_write_stored")) == copied
            with pytest.raises(InvalidRequest, match="copy_down"):
                Pipe(f"{name}-{copied}", deep.endpoint, copy_down=not copied, timeout_s=1)
            sender.__exit__(KeyboardInterrupt, None, None)


def test_a_pipe_on_the_disk_does_not_go_on_in_another_life_of_the_daemon(deep: Daemon, name: str) -> None:
    """The last cursors may not have got there, and what was handed out would be handed out again."""
    with Pipe(name, deep.endpoint, copy_down=True) as receiver:
        sender = Pipe(name, deep.endpoint, copy_down=True)
        for number in range(4):
            sender.send_tensor(sample(number))
        assert same(receiver.recv_tensor(PATIENCE_S), sample(0))
        eventually(lambda: blocks(deep)[0] == blocks(deep)[1], "all is copied down")
        eventually(lambda: deep.stats()["tiers"][1]["uncommitted"] == 0, "and outlives the daemon")
        deep.kill()
        deep.start()
        sender.__exit__(KeyboardInterrupt, None, None)
    with Pipe(name, deep.endpoint, copy_down=True) as receiver, Pipe(name, deep.endpoint, copy_down=True) as sender:
        with pytest.raises(PipeBroken, match="restarted"):
            receiver.recv_tensor(PATIENCE_S)
        sender.send_tensor(sample(9))
        assert same(receiver.recv_tensor(PATIENCE_S), sample(9))
        sender.__exit__(KeyboardInterrupt, None, None)


def test_a_buffer_may_stay_in_the_pool(deep: Daemon, name: str) -> None:
    with LookupBuffer(name, deep.endpoint, copy_down=False) as buffer:
        put(buffer, range(4))
        with deep.admin() as admin:
            admin.evict(64 << 20)
        assert blocks(deep) == [0, 0]
        assert buffer.drop_select(None, None, 0) is None
        put(buffer, range(4, 6))
        check_taken(buffer, [4, 5])
