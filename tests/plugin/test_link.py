"""The link with its own thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import kvstore
from engine_plugin.vllm import stock
from engine_plugin.vllm.link import Commit, DaemonLink, Query
from engine_plugin.vllm.stock import STOCK_BASE, Slots
from tests.plugin.fakes import SLOT_BYTES, FakeClient, FakeDaemon, FakeLease
from tests.support import eventually, running_daemon

KEYS = [bytes([i]) * 32 for i in range(6)]


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def query(**changes: object) -> Query:
    return Query(KEYS, time.monotonic() + 10, **changes)  # type: ignore[arg-type]


def test_asked_stored_found_and_given_back() -> None:
    daemon = FakeDaemon(32)
    link = DaemonLink(FakeClient(daemon), stock_max=16)
    link.set_busy(True)
    link.ask([query()])
    link.wait_answer(10)
    (reply,) = link.replies()
    assert (reply.available, reply.pins, reply.problem) == (0, None, "")

    slots = link.take_slots(len(KEYS))
    assert len(slots) == len(KEYS)  # announced by the misses
    outcomes: list[np.ndarray] = []
    link.commit(Commit(slots, KEYS, None, done=outcomes.append))
    wait_until(lambda: outcomes)
    assert outcomes[0].tolist() == [1] * len(KEYS)

    link.ask([query()])
    wait_until(lambda: daemon.leases)
    link.wait_answer(10)
    (reply,) = link.replies()
    assert reply.available == len(KEYS)
    assert reply.pins is not None
    link.release([reply.pins])
    wait_until(lambda: not daemon.leases)
    link.close()
    assert not daemon.reserved
    assert len(daemon.blocks) == len(KEYS)


def test_blocks_on_disk_are_asked_for_again_without_anybody_s_doing() -> None:
    daemon = FakeDaemon(32)
    client = FakeClient(daemon)
    reservation = client.reserve(len(KEYS))
    client.commit(reservation.generation, reservation.offsets, KEYS, epochs=reservation.epochs)
    for key in KEYS:
        daemon.copy_down(key)
    for key in KEYS[2:]:
        daemon.evict(key)
    link = DaemonLink(client, stock_max=8)
    asked = query(alone=True)
    link.ask([asked])
    wait_until(lambda: daemon.calls.count("acquire") >= 3)
    assert asked.coming
    assert not asked.alone, "by the time of its answer others may store"
    assert not link.replies()
    for key in KEYS[2:]:
        daemon.come_up(key)
    link.wait_answer(10)
    (reply,) = link.replies()
    assert (reply.available, reply.late, reply.problem) == (len(KEYS), 0, "")
    assert reply.pins is not None
    assert [int(offset) // SLOT_BYTES for offset in reply.pins.offsets] == [daemon.blocks[key] for key in KEYS]

    for key in KEYS[4:]:
        daemon.leases.clear()
        daemon.evict(key)
    given_up = query()
    link.ask([given_up])
    wait_until(lambda: given_up.coming)
    link.forget(given_up)
    wait_until(lambda: not daemon.leases)
    link.close()


def test_an_engine_that_only_loads_reserves_nothing() -> None:
    daemon = FakeDaemon(32)
    link = DaemonLink(FakeClient(daemon), stock_max=0)
    link.set_busy(True)
    link.ask([query()])
    link.wait_answer(10)
    assert not len(link.take_slots(4))
    link.close()
    assert "reserve" not in daemon.calls


class SlowToReserve(FakeClient):
    def __init__(self, daemon: FakeDaemon) -> None:
        super().__init__(daemon)
        self.entered, self.released = threading.Event(), threading.Event()

    def reserve(self, count: int) -> Any:
        self.entered.set()
        assert self.released.wait(60)
        return super().reserve(count)


def answered_before_its_slots() -> tuple[DaemonLink, SlowToReserve]:
    """A lone question has its answer, while the slots for what is missing are being reserved."""
    client = SlowToReserve(FakeDaemon(32))
    link = DaemonLink(client, stock_max=16)
    link.set_busy(True)
    link.ask([query(alone=True)])
    assert link.wait_answer(10)
    assert client.entered.wait(10)
    return link, client


def test_a_store_waits_for_slots_that_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "ON_THEIR_WAY_S", 10)
    link, client = answered_before_its_slots()
    waiting = threading.Timer(0.01, client.released.set)
    waiting.start()
    assert len(link.take_slots(len(KEYS))) == len(KEYS)
    waiting.join()
    link.close()


def test_slots_that_are_late_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(threading.Condition, "wait_for", lambda _self, _holds, timeout: waits.append(timeout))
    link, client = answered_before_its_slots()
    assert [len(link.take_slots(4)) for _ in range(3)] == [0, 0, 0]
    assert waits == [stock.ON_THEIR_WAY_S]
    client.released.set()
    link.close()


def test_where_others_wait_too_slots_come_first() -> None:
    client = SlowToReserve(FakeDaemon(32))
    link = DaemonLink(client, stock_max=16)
    link.set_busy(True)
    link.ask([query(), query(alone=True)])
    assert client.entered.wait(10)
    assert not link.replies()
    client.released.set()
    assert link.wait_answer(10)
    assert len(link.replies()) == 2
    assert len(link.take_slots(len(KEYS))) == len(KEYS)
    link.close()


def test_nothing_waits_for_a_call_that_hangs() -> None:
    daemon = FakeDaemon(32)
    released = threading.Event()
    entered = threading.Event()

    class Hanging(FakeClient):
        def acquire(self, queries: Sequence[tuple[int, Sequence[bytes]]], **options: Any) -> list[FakeLease]:
            entered.set()
            released.wait(60)
            return super().acquire(queries, **options)

    link = DaemonLink(Hanging(daemon), stock_max=8)
    link.ask([query()])
    assert entered.wait(10)
    began = time.monotonic()
    link.ask([query()])
    link.release([])
    link.abort(Slots(b"", np.zeros(1, np.uint64), np.zeros(1, np.uint32)))
    link.flush()
    assert not link.replies()
    assert len(link.take_slots(3)) == 0
    link.close(timeout_s=0.05)
    assert time.monotonic() - began < 10  # and not the 60 s of the call
    released.set()


def test_a_call_that_raises_anything_does_not_end_the_thread() -> None:
    daemon = FakeDaemon(32)

    class Broken(FakeClient):
        def acquire(self, queries: Sequence[tuple[int, Sequence[bytes]]], **options: Any) -> list[FakeLease]:
            if daemon.calls.count("broken") == 0:
                daemon.calls.append("broken")
                raise RuntimeError("a defect")
            return super().acquire(queries, **options)

    link = DaemonLink(Broken(daemon), stock_max=8)
    link.ask([query()])
    link.wait_answer(10)
    (reply,) = link.replies()
    assert reply.problem == "error"
    link.ask([query()])
    link.wait_answer(10)
    wait_until(lambda: daemon.calls.count("acquire"))
    assert link.take_counts()["calls_failed", "error"] == 1
    link.close()


def test_a_busy_engine_does_not_keep_a_daemon_from_stopping() -> None:
    with running_daemon("--drain-s", "3600") as daemon:
        namespace = kvstore.Namespace(model="busy", dtype="bfloat16", block_size=64, block_bytes=64 << 10)
        link = DaemonLink(daemon.connect(namespace), stock_max=16)
        link.set_busy(True)
        link.ask([query()])
        eventually(lambda: daemon.stats()["reserved_slots"] == len(KEYS) + STOCK_BASE)
        assert daemon.stop() == 0
        link.close()
