"""Copies between the pool and a tier below, with the tier's answers held, failed and reordered by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from kvstore.arena import Arena
from kvstore.blocks import Namespace
from kvstore.directory import Keyspace
from kvstore.hierarchy import Hierarchy
from kvstore.leases import Lease, Session
from kvstore.outcomes import Outcome
from kvstore.pool import Shortfall
from kvstore.service import AdminService, Gate
from kvstore.testing import FakeClock, SteppedLoop, check_invariants, make_block
from kvstore.testing.tiers import DictTier, Fault, FaultyTier
from kvstore.tier import Tier, TierState
from kvstore.transfers import READ_DEADLINE_S, RETRY_S, WRITE_DEADLINE_S, WritePolicy
from kvstore.wire.v1 import admin_pb2

BLOCK = 1 << 20
Answer = TypeVar("Answer")


class Bench:
    """A hierarchy over one faulty tier, on a loop that runs when told to. `below`: tiers after that one."""

    def __init__(
        self,
        policy: WritePolicy = WritePolicy.THROUGH,
        tier_bytes: int = 1 << 30,
        below: Sequence[Tier] = (),
        *,
        keeps: bool = False,
    ) -> None:
        self.loop = SteppedLoop()
        asyncio.set_event_loop(self.loop)
        self.clock = FakeClock()
        self.arena = Arena(24 << 20, "off")
        self.arena.add_populated(self.arena.size_bytes)
        self.dict = DictTier(tier_bytes)
        self.tier = FaultyTier(self.dict)
        self.hierarchy = Hierarchy(
            self.arena, self.clock, [self.tier, *below], policy, keepers=[self.tier] if keeps else []
        )
        namespace = Namespace(model="m", dtype="bf16", block_size=16, block_bytes=BLOCK)
        entry = self.hierarchy.namespaces.open(namespace.identity(), namespace.group_bytes)
        self.keyspace: Keyspace = entry.keyspaces[0]
        self.session = self.attach()

    def attach(self) -> Session:
        return self.hierarchy.sessions.attach("test", 1, "", 0)

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        task = self.start(work)
        assert task.done(), "the call waits for something that the test did not expect"
        return task.result()

    def start(self, work: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
        task = self.loop.create_task(work)
        self.loop.settle()
        self.loop.settle()
        check_invariants(self.hierarchy)
        return task

    def settle(self) -> None:
        for _ in range(8):
            self.loop.settle()
        check_invariants(self.hierarchy)

    def store(self, *keys: bytes) -> list[Outcome]:
        """Stores blocks; copy-down runs as far as the tier lets it."""

        async def work() -> list[Outcome]:
            got = self.hierarchy.reserve(self.session, self.keyspace, len(keys))
            assert len(got.offsets) == len(keys), got.shortfall
            for offset, key in zip(got.offsets, keys, strict=True):
                self.arena.memory.buffer[offset : offset + BLOCK] = make_block(key, BLOCK)
            return self.hierarchy.commit(self.session, self.keyspace, got.offsets, keys)

        outcomes = self.run(work())
        self.settle()
        return outcomes

    def leave_pool(self, *keys: bytes) -> None:
        """Lets blocks leave the pool as eviction would, so that only the tier has them."""
        for key in keys:
            block = self.keyspace.blocks[key]
            assert block.below and not block.pins
            self.hierarchy.pool.remove(block, "evicted")

    def ask(self, *keys: bytes) -> tuple[Lease | None, int]:
        return self.run(self.hierarchy.acquire_or_promote(self.session, self.keyspace, keys, 0))[:2]

    def check_lease(self, lease: Lease | None, *keys: bytes) -> None:
        assert lease is not None and [block.key for block in lease.blocks] == list(keys)
        for block in lease.blocks:
            assert self.arena.memory.buffer[block.offset : block.offset + BLOCK] == make_block(block.key, BLOCK)
        self.hierarchy.release(self.session, [lease.id])

    def in_tier(self) -> set[bytes]:
        return {key.removeprefix(self.keyspace.prefix) for key, _ in self.dict.scan()}

    def close(self) -> None:
        self.settle()
        self.hierarchy.end_session(self.session)
        check_invariants(self.hierarchy)
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.settle()
        self.loop.close()
        asyncio.set_event_loop(None)
        self.arena.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


@pytest.fixture
def back() -> Iterator[Bench]:
    made = Bench(WritePolicy.BACK)
    yield made
    made.close()


def test_a_stored_block_is_copied_down_and_leaves_without_io(bench: Bench) -> None:
    bench.store(b"a", b"b")
    assert bench.in_tier() == {b"a", b"b"}
    writes = bench.tier.calls["write"]
    bench.store(*(b"%d" % index for index in range(22)))  # more than the pool holds: a and b leave
    assert b"a" not in bench.keyspace.blocks
    assert bench.tier.calls["write"] > writes
    assert bench.run(bench.hierarchy.available(bench.keyspace, [b"a", b"b"])) == 2


def test_promotion_answers_pending_then_ready(bench: Bench) -> None:
    bench.store(b"a", b"b", b"c")
    bench.leave_pool(b"b", b"c")
    with bench.tier.gate("read"):
        lease, pending = bench.ask(b"a", b"b", b"c", b"absent")
        assert pending == 2
        assert bench.hierarchy.coming_from(bench.keyspace, [b"b", b"c"]) == bench.tier.name
        assert bench.hierarchy.coming_from(bench.keyspace, [b"a", b"absent"]) == ""
        bench.check_lease(lease, b"a")
    bench.settle()
    lease, pending = bench.ask(b"a", b"b", b"c", b"absent")
    assert pending == 0
    bench.check_lease(lease, b"a", b"b", b"c")
    assert bench.hierarchy.counts.hits == {"cpu": 2, "dict": 2}


def test_a_key_on_its_way_is_no_miss_not_for_a_moment(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter that falls again is a restart to whoever reads it in between."""
    bench.store(b"a", b"b")
    bench.leave_pool(b"a", b"b")
    seen: list[int] = []
    stat = bench.tier.stat

    async def looked_at(names: Sequence[bytes]) -> Any:
        seen.append(bench.hierarchy.counts.misses["absent"])
        return await stat(names)

    monkeypatch.setattr(bench.tier, "stat", looked_at)
    lease, pending = bench.ask(b"a", b"b", b"never")
    assert (lease, pending) == (None, 2)
    assert seen == [0] and bench.hierarchy.counts.misses["absent"] == 1


def test_what_is_moved_is_measured(bench: Bench) -> None:
    bench.store(b"a", b"b")
    bench.leave_pool(b"a", b"b")
    bench.ask(b"a", b"b")
    bench.settle()
    moved = bench.hierarchy.transfers.moved[bench.tier.name]
    assert {direction: figures.bytes for direction, figures in moved.items()} == {"read": 2 * BLOCK, "write": 2 * BLOCK}
    assert all(figures.batches and figures.seconds >= 0 for figures in moved.values())


def test_one_promotion_for_each_key_however_many_ask(bench: Bench) -> None:
    bench.store(b"a")
    bench.leave_pool(b"a")
    with bench.tier.gate("read"):
        for _ in range(5):
            assert bench.ask(b"a") == (None, 1)
    bench.settle()
    assert bench.tier.calls["read"] == 1


def test_select_waits_for_the_promotion(bench: Bench) -> None:
    bench.store(b"a", b"b")
    bench.leave_pool(b"a", b"b")
    with bench.tier.gate("read") as gate:
        task = bench.start(bench.hierarchy.select(bench.session, bench.keyspace, [b"a", b"b"], drop=False, wait_s=60))
        assert gate.reached.is_set() and not task.done()
    bench.settle()
    bench.check_lease(task.result(), b"a", b"b")


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.DAMAGED])
def test_a_block_that_cannot_be_read_is_a_miss_and_costs_no_neighbour(bench: Bench, fault: Fault) -> None:
    bench.store(b"a", b"b", b"c")
    bench.leave_pool(b"a", b"b", b"c")
    bench.tier.inject("read", fault, keys=[bench.keyspace.prefix + b"b"])
    assert bench.ask(b"a", b"b", b"c") == (None, 3)
    bench.settle()
    lease, pending = bench.ask(b"a", b"b", b"c")
    assert pending == 0, "what could not be read is promised again at once"
    bench.check_lease(lease, b"a")
    bench.check_lease(bench.ask(b"c")[0], b"c")


def test_a_failed_read_is_tried_again_after_a_while(bench: Bench) -> None:
    bench.store(b"a")
    bench.leave_pool(b"a")
    bench.tier.inject("read", Fault.ERROR, count=1)
    assert bench.ask(b"a") == (None, 1)
    bench.settle()
    assert bench.ask(b"a") == (None, 0)
    bench.clock.advance(RETRY_S + 0.1)
    assert bench.ask(b"a") == (None, 1)
    bench.settle()
    bench.check_lease(bench.ask(b"a")[0], b"a")


def test_a_waiting_select_ends_at_its_deadline_when_the_read_fails(bench: Bench) -> None:
    bench.store(b"a")
    bench.leave_pool(b"a")
    bench.tier.inject("read", Fault.ERROR)
    task = bench.start(bench.hierarchy.select(bench.session, bench.keyspace, [b"a"], drop=False, wait_s=3))
    bench.settle()
    assert not task.done()
    assert bench.tier.calls["read"] == 1, "a failing read is repeated in a loop"
    bench.loop.advance(3.1)
    bench.settle()
    assert task.result() is None


def test_the_time_in_which_tiers_are_asked_is_part_of_a_selects_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat, asked, answers = bench.tier.stat, asyncio.Event(), asyncio.Event()

    async def slowly(names: Sequence[bytes]) -> Any:
        asked.set()
        await answers.wait()
        return await stat(names)

    bench.store(b"a")
    bench.leave_pool(b"a")
    monkeypatch.setattr(bench.tier, "stat", slowly)

    def select(key: bytes) -> asyncio.Task[Lease | None]:
        return bench.start(bench.hierarchy.select(bench.session, bench.keyspace, [key], drop=False, wait_s=3))

    absent, late, gone = select(b"absent"), select(b"a"), select(b"a")
    assert asked.is_set()
    gone.cancel()
    bench.settle()
    assert gone.cancelled()
    bench.loop.advance(2.5)
    assert not absent.done() and not late.done()
    bench.loop.advance(0.6)
    assert absent.done() and absent.result() is None  # and not when the tier answers
    assert late.done() and late.result() is None
    answers.set()
    bench.settle()
    bench.check_lease(bench.ask(b"a")[0], b"a")  # what was asked for came up all the same
    patient = select(b"never")
    bench.loop.advance(2.5)
    assert not patient.done()
    bench.loop.advance(0.6)
    assert patient.done() and patient.result() is None


def test_a_buffer_that_a_hung_read_may_still_write_is_never_used_again(bench: Bench) -> None:
    bench.store(b"a")
    bench.leave_pool(b"a")
    bench.tier.inject("read", Fault.HUNG)
    assert bench.ask(b"a") == (None, 1)
    (offset,) = bench.hierarchy.transfers.filling
    bench.loop.advance(READ_DEADLINE_S + 1)
    bench.settle()
    bench.tier.clear()
    bench.tier.force_state(TierState.FAILED)
    keys = [b"%d" % index for index in range(30)]
    for key in keys:
        bench.store(key)
    assert all(block.offset != offset for block in bench.keyspace.blocks.values())
    bench.tier.release_hung()  # the late bytes come now
    for key, block in bench.keyspace.blocks.items():
        assert bench.arena.memory.buffer[block.offset : block.offset + BLOCK] == make_block(key, BLOCK)


def test_a_buffer_that_a_hung_write_may_still_read_keeps_its_bytes(bench: Bench) -> None:
    bench.tier.inject("write", Fault.HUNG)
    bench.store(b"a")
    offset = bench.keyspace.blocks[b"a"].offset
    bench.loop.advance(WRITE_DEADLINE_S + 1)
    bench.settle()
    for index in range(30):
        bench.store(b"%d" % index)
    assert bench.arena.memory.buffer[offset : offset + BLOCK] == make_block(b"a", BLOCK)


def test_a_tier_with_a_defect_keeps_the_slots_that_it_may_still_use(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raised, and some of its threads went on: a read's slot is not handed out again, nor a write's filled anew."""
    bench.store(b"a")
    bench.leave_pool(b"a")
    buffers: list[memoryview] = []

    async def defect(blocks: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> Any:
        buffers.extend(buffer for _, buffer in blocks)
        del blocks  # else the error's traceback keeps them
        raise ValueError("a defect")

    monkeypatch.setattr(bench.tier, "read", defect)
    assert bench.ask(b"a") == (None, 1)
    bench.settle()
    assert bench.ask(b"a") == (None, 0), "not tried again for a while"
    with monkeypatch.context() as context:
        context.setattr(bench.tier, "write", defect)
        bench.store(b"b")
    for index in range(30):
        bench.store(b"%d" % index)
    late, held = buffers
    assert held == make_block(b"b", BLOCK)
    late[:] = bytes(BLOCK)
    for key, block in bench.keyspace.blocks.items():
        assert bench.arena.memory.buffer[block.offset : block.offset + BLOCK] == make_block(key, BLOCK)
    buffers.clear()
    late.release()
    held.release()


# -- removal against copies under way ----------------------------------------------------------------------------------


def test_a_block_deleted_while_it_is_copied_down_does_not_come_back(bench: Bench) -> None:
    with bench.tier.gate("write"):
        bench.store(b"a")
        assert bench.run(bench.hierarchy.delete_everywhere(bench.keyspace, [b"a"])) == 1
        assert bench.ask(b"a") == (None, 0)
    bench.settle()
    assert bench.in_tier() == set()
    assert bench.ask(b"a") == (None, 0)


def test_between_the_write_and_its_deletion_nobody_sees_a_removed_block(bench: Bench) -> None:
    with bench.tier.gate("delete"):
        with bench.tier.gate("write"):
            bench.store(b"a")
            removal = bench.start(bench.hierarchy.delete_everywhere(bench.keyspace, [b"a"]))
        bench.settle()
        assert bench.in_tier() == {b"a"}, "the copy was made after the removal began"
        assert bench.ask(b"a") == (None, 0), "and nobody may get it"
    bench.settle()
    assert removal.done() and bench.in_tier() == set()


def test_a_block_deleted_while_it_comes_up_does_not_come_back(bench: Bench) -> None:
    bench.store(b"a")
    bench.leave_pool(b"a")
    with bench.tier.gate("read"):
        assert bench.ask(b"a") == (None, 1)
        assert bench.run(bench.hierarchy.delete_everywhere(bench.keyspace, [b"a"])) == 1
    bench.settle()
    assert bench.ask(b"a") == (None, 0)
    assert b"a" not in bench.keyspace.blocks


def test_a_block_stored_while_it_comes_up_stays(bench: Bench) -> None:
    bench.store(b"a")
    bench.leave_pool(b"a")
    with bench.tier.gate("read"):
        assert bench.ask(b"a") == (None, 1)
        assert bench.store(b"a") == [Outcome.STORED]
    bench.settle()
    bench.check_lease(bench.ask(b"a")[0], b"a")
    assert bench.hierarchy.counts.hits == {"cpu": 1}


@pytest.mark.parametrize("held", ["write", "delete", "nothing"])
def test_drop_select_has_one_winner_whatever_the_tier_is_busy_with(bench: Bench, held: str) -> None:
    """The winner confirms while a copy is being made or removed; the next caller finds nothing, in any tier."""
    bench.store(b"a") if held != "write" else None
    select = bench.hierarchy.select
    if held == "nothing":
        lease = bench.run(select(bench.session, bench.keyspace, [b"a"], drop=True, wait_s=0))
        assert lease is not None
        rival = bench.start(select(bench.attach(), bench.keyspace, [b"a"], drop=True, wait_s=60))
        bench.run(bench.hierarchy.confirm(bench.session, [lease.id], hold=False))
    else:
        with bench.tier.gate(held):  # type: ignore[arg-type]
            if held == "write":
                bench.store(b"a")
            lease = bench.run(select(bench.session, bench.keyspace, [b"a"], drop=True, wait_s=0))
            assert lease is not None
            rival = bench.start(select(bench.attach(), bench.keyspace, [b"a"], drop=True, wait_s=60))
            confirmed = bench.start(bench.hierarchy.confirm(bench.session, [lease.id], hold=False))
            assert not rival.done()
        bench.settle()
        assert confirmed.result() == (1, 1)
    bench.settle()
    assert not rival.done() and bench.in_tier() == set()
    bench.loop.advance(61)
    bench.settle()
    assert rival.result() is None


def test_a_flush_takes_what_comes_up_and_what_goes_down(bench: Bench) -> None:
    bench.store(b"a")
    bench.leave_pool(b"a")
    with bench.tier.gate("read"), bench.tier.gate("write"):
        assert bench.ask(b"a") == (None, 1)
        bench.store(b"b")
        bench.run(bench.hierarchy.flush_everywhere(bench.keyspace.namespace.digest))
    bench.settle()
    assert bench.in_tier() == set() and not bench.keyspace.blocks
    assert bench.ask(b"a") == (None, 0)


def test_a_flush_is_finished_where_its_caller_goes_away(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's deadline ends the call, and gRPC ends what answers it."""
    bench.store(b"a")
    may, delete_namespace = asyncio.Event(), bench.tier.delete_namespace

    async def slowly(digest: bytes | None) -> int:
        await may.wait()
        return await delete_namespace(digest)

    monkeypatch.setattr(bench.tier, "delete_namespace", slowly)
    admin = AdminService(bench.hierarchy, Gate(None), stats=str, ping=admin_pb2.PingReply)
    call = bench.start(admin.Flush(admin_pb2.FlushRequest(), None))
    call.cancel()
    bench.settle()
    assert call.cancelled() and bench.in_tier() == {b"a"}
    may.set()
    bench.settle()
    assert bench.in_tier() == set() and not bench.keyspace.blocks


# -- limits ------------------------------------------------------------------------------------------------------------


def test_copy_down_pins_no_more_than_its_share_of_the_pool(bench: Bench) -> None:
    with bench.tier.gate("write"):
        for index in range(40):  # twice what the pool holds, and the tier takes nothing
            bench.store(b"%d" % index)
        assert bench.hierarchy.transfers.queued_bytes <= bench.arena.size_bytes // 4 + BLOCK
        assert bench.hierarchy.transfers.counts["left_without_copy"] > 0
    bench.settle()
    assert bench.hierarchy.transfers.idle
    assert all(block.below for block in bench.keyspace.blocks.values()), "what found the queue full is copied later"


def test_promotion_takes_no_more_than_its_share_of_the_pool(bench: Bench) -> None:
    keys = [b"%d" % index for index in range(16)]
    for key in keys:
        bench.store(key)
    bench.leave_pool(*keys)
    with bench.tier.gate("read"):
        _, pending = bench.ask(*keys)
        assert pending == len(keys), "what finds no room yet is on its way all the same"
        assert 0 < bench.hierarchy.transfers.coming_bytes <= bench.arena.size_bytes // 4
    for _ in range(8):
        bench.settle()
        lease, pending = bench.ask(*keys)
        if not pending:
            break
        assert lease is not None
        bench.hierarchy.release(bench.session, [lease.id])
    bench.check_lease(lease, *keys)


def test_write_back_copies_only_what_has_to_leave(back: Bench) -> None:
    back.store(b"a", b"b")
    assert back.in_tier() == set()
    for index in range(30):
        back.store(b"%d" % index)
    assert {b"a", b"b"} <= back.in_tier()
    assert b"a" not in back.keyspace.blocks


def test_write_back_refuses_a_store_rather_than_lose_a_block(back: Bench) -> None:
    slots = back.arena.size_bytes // BLOCK
    back.store(*(b"%d" % index for index in range(slots)))
    with back.tier.gate("write"):

        async def take() -> Shortfall | None:
            return back.hierarchy.reserve(back.session, back.keyspace, slots).shortfall

        assert back.run(take()) is Shortfall.COPYING
        waiting = back.start(back.hierarchy.reserve_within(back.session, back.keyspace, 1, 30))
        assert not waiting.done()
    back.settle()
    assert waiting.result().shortfall is None
    kept = back.in_tier() | set(back.keyspace.blocks)
    assert kept == {b"%d" % index for index in range(slots)}


def test_at_a_clean_stop_write_back_copies_everything(back: Bench) -> None:
    keys = [b"%d" % index for index in range(20)]
    back.store(*keys)
    task = back.start(back.hierarchy.settle(60))
    back.settle()
    assert task.result() is True
    assert back.in_tier() == set(keys)


def test_stores_go_on_while_the_tier_fails(bench: Bench) -> None:
    bench.tier.inject("write", Fault.ERROR)
    for index in range(40):
        assert bench.store(b"%d" % index) == [Outcome.STORED]
    assert bench.in_tier() == set()


def test_namespaces_of_a_tier_are_known_after_a_restart(bench: Bench) -> None:
    bench.store(b"a")
    again = Hierarchy(bench.arena, bench.clock, [bench.tier])
    again.namespaces.adopt()
    assert list(again.namespaces.entries) == [bench.keyspace.namespace.digest]
