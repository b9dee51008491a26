"""How fast blocks come up from below, as the daemon measures it and tells who asks."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import kvstore
from kvstore.gauge import STRETCH_BYTES, TRIAL_BYTES, TRIAL_DEADLINE_S, Gauge
from kvstore.testing import FakeClock, make_block
from kvstore.testing.tiers import DictTier, Fault
from kvstore.tier import ReadOutcome, TierState
from tests.tiers.test_extents import BLOCK as DISK_BLOCK
from tests.tiers.test_extents import NAMES, NAMESPACE, Daemon, until
from tests.tiers.test_transfers import BLOCK, Bench

KEYS = [bytes([i]) for i in range(6)]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def speed(bench: Bench) -> float | None:
    return bench.hierarchy.transfers.gauge.s_per_byte(bench.tier.name)


def below(bench: Bench, *keys: bytes) -> None:
    """Stores blocks that only the tier has then."""
    bench.store(*keys)
    bench.leave_pool(*keys)


def bring_up(bench: Bench, seconds: float, *keys: bytes) -> None:
    with bench.tier.gate("read"):
        bench.ask(*keys)
        bench.clock.advance(seconds)
    bench.settle()


def test_what_comes_up_is_measured_and_who_asks_is_told(bench: Bench) -> None:
    below(bench, *KEYS)
    transfers = bench.hierarchy.transfers

    async def asked(*keys: bytes) -> float | None:
        """In the step that has asked, before anything is read."""
        await bench.hierarchy.acquire_or_promote(bench.session, bench.keyspace, keys, 0)
        return transfers.coming_s(bench.keyspace, keys)

    assert speed(bench) is None
    with bench.tier.gate("read"):
        assert bench.run(asked(*KEYS[:2])) is None
        bench.clock.advance(0.2)
    bench.settle()
    assert speed(bench) == pytest.approx(0.1 / BLOCK)
    with bench.tier.gate("read"):
        assert bench.run(asked(*KEYS[2:4])) == pytest.approx(0.2)
        # What others wait for comes first, and what has no room yet comes last.
        assert transfers.coming_s(bench.keyspace, KEYS[2:6]) == pytest.approx(0.4)
    bench.settle()
    assert transfers.coming_s(bench.keyspace, KEYS[2:4]) is None  # they are here


def test_batches_that_overlap_are_measured_by_the_time_that_passes(bench: Bench) -> None:
    below(bench, *KEYS)
    with bench.tier.gate("read"):
        for key in KEYS[:4]:
            bench.ask(key)
        bench.clock.advance(0.4)
    bench.settle()
    assert speed(bench) == pytest.approx(0.1 / BLOCK)


def test_the_figure_follows_where_something_is_always_under_way() -> None:
    clock, tier = FakeClock(), DictTier(1 << 30)
    gauge = Gauge([tier], clock)
    with gauge.reading(tier, BLOCK):
        with gauge.reading(tier, STRETCH_BYTES) as read:
            clock.advance(STRETCH_BYTES / 1e9)
            read.append(STRETCH_BYTES)
        assert gauge.s_per_byte(tier.name) == pytest.approx(1e-9)


def test_a_medium_that_gives_nothing_is_slow_and_one_that_has_nothing_says_nothing(bench: Bench) -> None:
    below(bench, *KEYS[:2])
    bench.tier.inject("read", Fault.DAMAGED, count=1)
    bring_up(bench, 1.0, KEYS[0])
    assert speed(bench) is None
    bench.tier.inject("read", Fault.ERROR, count=1)
    bring_up(bench, 1.0, KEYS[1])
    assert (speed(bench) or 0) * BLOCK >= 100


def test_the_first_blocks_that_are_copied_down_are_read_back(bench: Bench) -> None:
    bench.store(KEYS[0])
    assert speed(bench) is None  # not of itself: a daemon asks for it
    bench.run(bench.hierarchy.transfers.measure())
    assert speed(bench) is not None and bench.tier.calls["read"] == 1  # what is there
    bench.store(KEYS[1])
    assert bench.tier.calls["read"] == 1  # it is known


def test_what_an_empty_tier_gets_first_is_read_back(bench: Bench) -> None:
    bench.run(bench.hierarchy.transfers.measure())
    assert bench.tier.calls["read"] == 0
    with bench.tier.gate("read"):
        bench.store(*KEYS[:3])
        bench.clock.advance(0.3)
    bench.settle()
    assert speed(bench) == pytest.approx(0.1 / BLOCK) and bench.tier.calls["read"] == 1
    assert set(bench.keyspace.blocks) == set(KEYS[:3])


def test_a_tier_that_reads_its_index_is_measured_afterwards(bench: Bench) -> None:
    below(bench, KEYS[0])
    bench.tier.force_state(TierState.LOADING)

    async def work() -> None:
        measuring = asyncio.get_running_loop().create_task(bench.hierarchy.transfers.measure())
        await asyncio.sleep(0)
        assert not measuring.done()
        bench.tier.force_state(None)
        await measuring

    asyncio.run(work())
    assert speed(bench) is not None


def test_a_trial_is_bounded_and_memory_that_a_hanging_medium_has_is_kept(bench: Bench) -> None:
    gauge = bench.hierarchy.transfers.gauge
    names = [bench.keyspace.prefix + bytes([i]) for i in range(sum(TRIAL_BYTES) // BLOCK + 5)]
    sizes: list[int] = []
    read = bench.tier.read

    async def counted(blocks: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[ReadOutcome]:
        sizes.extend(len(buffer) for _, buffer in blocks)
        return await read(blocks, deadline_s)

    bench.tier.read = counted  # type: ignore[method-assign]
    bench.run(bench.dict.write([(name, memoryview(make_block(name, BLOCK))) for name in names], 10))
    bench.tier.inject("read", Fault.HUNG, keys=names[20:])
    task = bench.start(gauge.try_out(bench.tier, [(name, BLOCK) for name in names]))
    bench.loop.advance(TRIAL_DEADLINE_S)
    assert task.done() and task.exception() is None
    assert sum(sizes) == sum(TRIAL_BYTES)
    bench.tier.release_hung()  # writes into that memory
    bench.tier.clear()


def test_a_slow_tier_is_not_kept_busy_by_its_trial(bench: Bench) -> None:
    below(bench, *KEYS)
    with bench.tier.gate("read"):
        task = bench.start(bench.hierarchy.transfers.measure())
        bench.clock.advance(8.0)
    bench.settle()
    assert task.done() and bench.tier.calls["read"] == 1
    assert speed(bench) == pytest.approx(8.0 / TRIAL_BYTES[0])


def test_engines_know_how_fast_the_disk_is_before_anybody_has_read_from_it(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.start()
    try:
        with kvstore.connect(daemon.endpoint, namespace=NAMESPACE) as client:
            assert "disk" not in daemon.stats()["speeds"]
            client.insert(NAMES, [make_block(name, DISK_BLOCK) for name in NAMES]).wait()
            until(lambda: "disk" in daemon.stats()["speeds"], "what was stored is read back")
        daemon.stop(signal.SIGTERM)
        daemon.start()
        until(lambda: "disk" in daemon.stats()["speeds"], "what was left is read")
        with kvstore.connect(daemon.endpoint, namespace=NAMESPACE) as client:
            queries = [(0, NAMES)]
            (lease,) = client.acquire(queries, extents_min=[1])
            assert len(lease.extents) == len(NAMES) and lease.below_s > 0 and lease.token_s == 0
            client.release([lease])
            (lease,) = client.acquire(queries, token_s=0.25)
            assert lease.pending == len(NAMES) and lease.below_s > 0
            client.release([lease])
            (lease,) = client.acquire([(0, [b"nowhere"])])
            assert lease.below_s == 0 and lease.token_s == 0.25
            client.release([lease])
    finally:
        daemon.stop(signal.SIGTERM)
