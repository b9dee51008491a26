"""LookupBuffers between real processes: which entry answers, who gets it, and what happens when somebody dies."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.buffer import LookupBuffer, lookup
from kvstore.buffer.records import LARGE, Draft, namespace_of
from kvstore.errors import ClientClosed, InvalidRequest, LimitExceeded
from tests.buffer.samples import lose, same
from tests.support import PATIENCE_S, Daemon, child, eventually, line_of, running_daemon

MIB = 1 << 20

#: Entry number `n` has tokens of its own, beginning with n, and a random key, value and hidden.
ENTRIES = """
import numpy as np
from tests.buffer.samples import same, sample

def tokens(number):
    return np.random.default_rng(number).integers(0, 50_000, 40 + number % 700)

def tensors(number):
    return [sample(5 * number + each, bytes_max=65537) for each in range(3)]
"""

INSERT = (
    ENTRIES
    + """
import sys
from kvstore.buffer import LookupBuffer
with LookupBuffer(sys.argv[2], sys.argv[1], max_bytes=8 << 20) as buffer:
    for number in range(int(sys.argv[3])):
        while (result := buffer.insert(tokens(number), None, *tensors(number)).wait(60)).refused == {"queue_full": 1}:
            pass
        assert result.stored == 1, result
"""
)

TAKE = """
import sys, threading
from kvstore.buffer import LookupBuffer
import numpy as np
buffer = LookupBuffer(sys.argv[2], sys.argv[1])
taken = []
def take():
    while (entry := buffer.drop_select(np.arange(100), None, 60)) is not None and entry[3] is not None:
        taken.append(int(entry[2][0]))
        assert (entry[2] == entry[2][0]).all() and len(entry[2]) == 3 << 20
        if int(sys.argv[3]):
            return
threads = [threading.Thread(target=take) for _ in range(8)]
for thread in threads: thread.start()
print("waiting", flush=True)
for thread in threads: thread.join()
print(*taken, flush=True)
buffer.close()
"""

exec(ENTRIES)


@pytest.fixture
def buffer(served: Daemon, name: str) -> Iterator[LookupBuffer]:
    with LookupBuffer(name, served.endpoint) as buffer:
        yield buffer


def put(buffer: LookupBuffer, tokens: Any, mark: int, roi: Any = None) -> None:
    ticket = buffer.insert(tokens, roi, np.full(10, mark), None, np.full(100_000, mark, np.float16))
    assert ticket.wait(PATIENCE_S).stored == 1


def mark_of(entry: list[Any] | None) -> int | None:
    return None if entry is None else int(entry[2][0])


def test_a_thousand_entries_between_two_processes(served: Daemon, name: str) -> None:
    order = list(range(1000))
    for start in range(0, 1000, 20):  # taken out in another order than they come, within what fits the bound
        part = order[start : start + 20]
        random.Random(start).shuffle(part)
        order[start : start + 20] = part
    with child(INSERT, served.endpoint, name, "1000") as inserting, LookupBuffer(name, served.endpoint) as buffer:
        for number in order:
            entry = buffer.drop_select(tokens(number), None, PATIENCE_S)  # type: ignore[name-defined]  # noqa: F821
            assert entry is not None
            wanted = [tokens(number), None, *tensors(number)]  # type: ignore[name-defined]  # noqa: F821
            assert all(map(same, entry, wanted)), number
        assert inserting.wait(PATIENCE_S) == 0
        assert buffer.drop_select(None, None, 0) is None


@pytest.mark.parametrize(
    ("stored", "asked", "matches"),
    [
        ([1, 2, 3], [1, 2, 3], True),
        ([1, 2, 3], [1, 2, 3, 4], True),
        ([1, 2, 3, 4], [1, 2, 3], True),
        ([1, 2, 3], [1, 2, 4], False),
        ([1, 2, 3], [2, 3], False),
        ([1, 2, 3], [], False),
        ([], [1], False),
        ([1], None, True),
        (None, [1], False),
        (None, None, True),
        (range(5000), range(4999), True),
        (range(5000), [*range(4998), 7], False),
        (range(4000), range(5000), True),
        (range(5000), range(3), True),
    ],
)
def test_prefixes(buffer: LookupBuffer, stored: Any, asked: Any, matches: bool) -> None:
    put(buffer, None if stored is None else np.array(stored, int), 1)
    query = None if asked is None else np.array(asked, np.int32)
    assert mark_of(buffer.drop_select(query, None, 0)) == (1 if matches else None)
    assert mark_of(buffer.drop_select(None, None, 0)) == (None if matches else 1)


def test_masks_select_what_is_compared(buffer: LookupBuffer) -> None:
    put(buffer, np.array([9, 1, 2, 9]), 1, roi=np.array([0, 1, 1, 0], bool))
    assert buffer.drop_select(np.array([9, 1, 2, 9]), None, 0) is None
    entry = buffer.drop_select(np.array([1, 7, 2, 3]), np.array([1.0, 0.0, 1.0, 1.0]), 0)
    assert entry is not None and entry[0].tolist() == [9, 1, 2, 9] and entry[1].tolist() == [False, True, True, False]


def test_the_oldest_that_matches_is_taken_and_equal_ones_are_kept_apart(buffer: LookupBuffer) -> None:
    for mark, length in enumerate((5, 3, 5, 4)):
        put(buffer, np.arange(length), mark)
    put(buffer, np.arange(10, 20), 9)
    assert [mark_of(buffer.drop_select(np.arange(4), None, 0)) for _ in range(5)] == [0, 1, 2, 3, None]
    assert mark_of(buffer.drop_select(None, None, 0)) == 9


def test_who_waits_is_woken_and_others_time_out(buffer: LookupBuffer, served: Daemon) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(buffer.drop_select(np.arange(10), None, PATIENCE_S)))
    thread.start()
    eventually(lambda: served.stats()["waiters"], "it waits")
    put(buffer, np.arange(50, 60), 1)
    assert buffer.drop_select(np.arange(30, 40), None, 0.05) is None
    put(buffer, np.arange(7), 2)
    thread.join(PATIENCE_S)
    assert mark_of(found[0]) == 2 and mark_of(buffer.drop_select(None, None, 0)) == 1


@pytest.mark.parametrize("each", [1, 0])
def test_sixteen_callers_and_one_winner_for_each_entry(served: Daemon, name: str, each: int) -> None:
    """Two processes of eight threads; in the first case one entry for each, in the second whoever is faster."""
    with (
        LookupBuffer(name, served.endpoint) as buffer,
        child(TAKE, served.endpoint, name, str(each)) as one,
        child(TAKE, served.endpoint, name, str(each)) as other,
    ):
        assert line_of(one) == line_of(other) == "waiting"
        count = 16 if each else 40
        for mark in range(count):
            value = np.full(3 * MIB, mark, np.uint8)
            assert buffer.insert(np.arange(120), None, value, np.ones(1), None).wait(PATIENCE_S).stored
        if not each:
            for _ in range(16):  # no value: the sign to stop
                assert buffer.insert(np.arange(90), None, None, None, None).wait(PATIENCE_S).stored
        taken = [*map(int, line_of(one).split()), *map(int, line_of(other).split())]
        assert Counter(taken) == Counter(range(count))
        assert buffer.drop_select(None, None, 0) is None


def test_what_another_thread_was_told_of_meanwhile_is_not_waited_for(
    served: Daemon, buffer: LookupBuffer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads share one list of entries: news that came while one of them looked through an older one."""
    monkeypatch.setattr(lookup, "_WAIT_S", 200.0)  # beyond this test's own limit
    known = buffer._known
    with LookupBuffer(name, served.endpoint) as other:

        def slowly(listed: Any) -> Any:
            monkeypatch.setattr(buffer, "_known", known)
            yield from known(listed)
            put(other, np.arange(5), 7)
            buffer._look(0.0, listed)  # as another thread does

        monkeypatch.setattr(buffer, "_known", slowly)
        put(other, np.arange(50, 60), 1)
        assert mark_of(buffer.drop_select(np.arange(5))) == 7
        assert mark_of(buffer.drop_select()) == 1


def test_news_of_an_entry_that_was_given_back_are_kept(
    served: Daemon, buffer: LookupBuffer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread learns too late that it did not win: another knows already that the winner gave it back."""
    monkeypatch.setattr(lookup, "_WAIT_S", 200.0)
    claim = buffer._client.claim
    with LookupBuffer(name, served.endpoint) as other:

        def late(keys: list[bytes]) -> Any:
            monkeypatch.setattr(buffer._client, "claim", claim)
            won = other._client.claim(keys)
            lost = claim(keys)
            assert won.id and not lost.id
            other._client.release([won])
            buffer._look(0.0, buffer._recent())
            return lost

        monkeypatch.setattr(buffer._client, "claim", late)
        put(other, np.arange(5), 7)
        assert mark_of(buffer.drop_select(np.arange(5))) == 7


def test_of_sixteen_that_do_not_wait_one_wins(buffer: LookupBuffer) -> None:
    put(buffer, np.arange(5), 1)
    barrier = threading.Barrier(16)
    found: list[Any] = []

    def take() -> None:
        barrier.wait()
        found.append(mark_of(buffer.drop_select(np.arange(5), None, 0)))

    threads = [threading.Thread(target=take) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(found) == {1: 1, None: 15}


@pytest.mark.parametrize("point", ["read", "delete_parts"])
def test_a_winner_that_dies_loses_nothing_before_it_has_all(served: Daemon, name: str, point: str) -> None:
    dying = f"""
import sys
import numpy as np
from kvstore.buffer import LookupBuffer
from kvstore.buffer.records import Records
def here(*args, **options):
    print("here", flush=True)
    sys.stdin.readline()
Records.{point} = here
LookupBuffer(sys.argv[2], sys.argv[1]).drop_select(np.arange(5), None, 60)
"""
    with LookupBuffer(name, served.endpoint) as buffer:
        put(buffer, np.arange(5), 1)
        with child(dying, served.endpoint, name) as winner:
            assert line_of(winner) == "here"
            assert buffer.drop_select(np.arange(5), None, 0) is None
            winner.kill()
        if point == "read":
            assert mark_of(buffer.drop_select(np.arange(5), None, PATIENCE_S)) == 1
        else:  # it had the whole entry, and had said so
            assert buffer.drop_select(np.arange(5), None, 0) is None


def test_half_an_entry_is_never_seen(buffer: LookupBuffer, served: Daemon, name: str) -> None:
    with served.connect(namespace_of("buffer", name)) as client:
        half = Draft([np.arange(5), None, np.zeros(5 * MIB, np.uint8), None, None], {})
        assert client.insert(half.keys(LARGE), half.blocks[LARGE], kv_group=LARGE).wait().stored == 2
        assert buffer.drop_select(None, None, 0) is None
        put(buffer, np.arange(5), 1)
        assert buffer.insert(np.arange(5), None, np.full(5 * MIB, 2), None, None).wait(PATIENCE_S).stored == 1
        _, listed = client.watch(0, 0, kv_group=LARGE)
        lose(client, list(listed)[-1], LARGE)
        # The one that is damaged is passed over, and what is left of it removed.
        assert mark_of(buffer.drop_select(np.arange(5), None, 0)) == 1
        assert buffer.drop_select(np.arange(5), None, 0) is None
        assert client.watch(0, 0)[1] == {}


def test_what_does_not_fit_the_bound_waits_and_what_is_too_much_is_refused(served: Daemon, name: str) -> None:
    value = np.zeros(3 * MIB, np.uint8)
    with LookupBuffer(name, served.endpoint, max_bytes=9 * MIB) as buffer:
        first = [buffer.insert(np.arange(5), None, value, None, None) for _ in range(2)]
        assert [ticket.wait(PATIENCE_S).stored for ticket in first] == [1, 1]
        waiting = [buffer.insert(np.arange(5), None, value, None, None) for _ in range(2)]
        refused = buffer.insert(np.arange(5), None, value, None, None)
        assert refused.wait(0).refused == {"queue_full": 1}
        assert not any(ticket.done for ticket in waiting)
        for _ in range(4):
            assert buffer.drop_select(np.arange(5), None, PATIENCE_S) is not None
        assert [ticket.wait(PATIENCE_S).stored for ticket in waiting] == [1, 1]
        with pytest.raises(LimitExceeded, match="max_bytes"):
            buffer.insert(np.arange(5), None, np.zeros(10 * MIB, np.uint8), None, None)
        for _ in range(2):
            assert buffer.insert(np.arange(5), None, value, None, None).wait(PATIENCE_S).stored == 1
        last = buffer.insert(np.arange(5), None, value, None, None)
        buffer.close(0)
        assert last.wait(0).refused == {"closed": 1}
        with pytest.raises(ClientClosed):
            buffer.insert(None, None, None, None, None)
    with LookupBuffer(name, served.endpoint) as other:  # entries outlive who inserted them
        assert other.drop_select(np.arange(5), None, 0) is not None


def test_a_pool_that_is_full_of_pinned_blocks(name: str) -> None:
    with running_daemon(cpu_bytes="32MiB") as daemon, daemon.connect(namespace_of("other", name)) as hog:
        eventually(lambda: hog.stats()["tiers"][0]["state"] != "populating", "all of the pool can be had")
        slots = hog.reserve(20, kv_group=LARGE)
        with LookupBuffer(name, daemon.endpoint) as buffer:
            ticket = buffer.insert(np.arange(5), None, np.ones(3 * MIB, np.uint8), None, None)
            assert buffer.drop_select(np.arange(5), None, 0.05) is None and not ticket.done
            assert hog.abort(slots.generation, slots.offsets) == len(slots.offsets)
            assert buffer.drop_select(np.arange(5), None, PATIENCE_S) is not None
            assert ticket.wait(PATIENCE_S).stored == 1


def test_bad_input_is_named(buffer: LookupBuffer) -> None:
    with pytest.raises(InvalidRequest, match="input_tokens"):
        buffer.insert(np.zeros((2, 2)), None, None, None, None)
    with pytest.raises(InvalidRequest, match="roi"):
        buffer.drop_select(np.arange(3), np.ones(4), 0)
    with pytest.raises(InvalidRequest, match="list"):
        buffer.insert(None, None, [1], None, None)
    with pytest.raises(InvalidRequest, match="timeout_s"):
        buffer.drop_select(None, None, -1)


def test_a_daemon_that_stops_does_not_wait_for_empty_slots_of_a_buffer(name: str) -> None:
    with running_daemon("--drain-s", "600") as daemon, LookupBuffer(name, daemon.endpoint) as buffer:
        put(buffer, np.arange(3), 0)
        assert daemon.stats()["reserved_slots"]
        assert daemon.stop() == 0
