"""Load or recompute."""

from __future__ import annotations

import math

import pytest

from engine_plugin.vllm.coming import DOUBT_PART
from engine_plugin.vllm.rates import BATCH_BYTES, MARGIN, PREFILL_TOKENS_MIN, PROBE_S, LoadPolicy, Steps
from engine_plugin.vllm.runs import hash_of
from kvstore.rates import Rate
from tests.plugin.engine_model import TOKENS, Engine, Request, stored
from tests.plugin.fakes import SLOT_BYTES

TOKENS_PER_BLOCK = 100
BLOCK_BYTES = 1000


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def worth(blocks: int) -> tuple[int, int]:
    """Bytes and tokens."""
    return blocks * BLOCK_BYTES, blocks * TOKENS_PER_BLOCK


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def policy(clock: Clock) -> LoadPolicy:
    return LoadPolicy(BLOCK_BYTES, clock)


def test_a_rate_follows_what_is_measured_and_large_measurements_count_more() -> None:
    rate = Rate()
    assert rate.s is None
    for _ in range(30):
        rate.note(10, 1.0, 0.0)
    assert rate.s == pytest.approx(0.1)
    rate.note(1, 5.0, 0.0)
    assert 0.1 < rate.s < 0.3
    for _ in range(30):
        rate.note(10, 4.0, 0.0)
    assert rate.s == pytest.approx(0.4, rel=0.01)


def test_what_is_not_known_is_loaded_from_the_pool_and_not_waited_for_below(policy: LoadPolicy) -> None:
    tokens = 5 * TOKENS_PER_BLOCK
    assert policy.loads(*worth(5))
    assert policy.wait_s("disk", 5, tokens, 0.001) == 0  # how fast this engine computes is not known
    policy.note_step(1000, 1000, 1.0)  # 1 ms a token, 100 ms a block
    assert policy.loads(*worth(5))
    assert policy.wait_s("disk", 5, tokens, 0.0) == 0  # and here how fast the disk is
    assert policy.wait_s("disk", 5, tokens, 0.501 / MARGIN) == 0
    # Whoever waits does so no longer than computing would take.
    assert policy.wait_s("disk", 5, tokens, 0.499 / MARGIN) == pytest.approx(0.5)


def test_what_another_engine_has_told_counts_until_this_one_knows(policy: LoadPolicy) -> None:
    policy.note_told(0.002)
    assert policy.wait_s("disk", 5, 500, 0.8) == pytest.approx(1.0)
    assert policy.token_s == 0  # it is not passed on as its own
    policy.note_step(1000, 1000, 1.0)
    assert policy.token_s == pytest.approx(0.001)
    assert policy.wait_s("disk", 5, 500, 0.8) == 0


def test_an_engine_for_prompts_of_others_waits_until_it_knows_better(clock: Clock) -> None:
    policy = LoadPolicy(BLOCK_BYTES, clock, computes=False)
    assert policy.wait_s("disk", 5, 500, 0.0) == math.inf
    assert policy.direct_pays(5 * BLOCK_BYTES, 500, 0.0)
    policy.note_step(1000, 1000, 1.0)
    assert policy.wait_s("disk", 5, 500, 0.6) == 0
    assert not policy.direct_pays(5 * BLOCK_BYTES, 500, 0.6)


def test_a_load_takes_its_copies_too(policy: LoadPolicy) -> None:
    policy.note_step(1000, 1000, 1.0)
    policy.note_load(10 * BLOCK_BYTES, copy_s=0.1, whole_s=0.15)  # 10 ms a block, and 50 ms beside
    assert policy.wait_s("disk", 5, 500, 0.5 / MARGIN - 0.09) == 0
    assert policy.wait_s("disk", 5, 500, 0.5 / MARGIN - 0.11) > 0


def test_the_first_blocks_are_expected_with_the_first_batch(clock: Clock) -> None:
    policy = LoadPolicy(8 << 20, clock)
    assert policy.first_s(2, 0.1) == 0.1
    assert policy.first_s(4 * BATCH_BYTES // (8 << 20), 0.4) == pytest.approx(0.1)


def test_the_pool_is_loaded_where_that_is_faster(policy: LoadPolicy) -> None:
    policy.note_step(1000, 1000, 1.0)
    policy.note_load(10 * BLOCK_BYTES, copy_s=0.1, whole_s=0.15)  # 10 ms a block, and 50 ms beside
    assert policy.loads(*worth(10))
    assert policy.loads(*worth(1))
    policy.note_load(10 * BLOCK_BYTES, copy_s=20.0, whole_s=20.05)
    assert not policy.loads(*worth(10))
    assert dict(policy.counts) == {("decisions", "load"): 2, ("decisions", "compute"): 1}


def test_what_a_load_takes_beside_its_copies_counts_once(policy: LoadPolicy) -> None:
    policy.note_step(1000, 1000, 1.0)
    policy.note_load(10 * BLOCK_BYTES, copy_s=0.1, whole_s=0.4)
    assert not policy.loads(*worth(1))  # 0.31 s against 0.1 s
    assert policy.loads(*worth(10))  # 0.4 s against 1 s


def test_a_slow_tier_is_left_alone_until_the_daemon_says_otherwise(policy: LoadPolicy, clock: Clock) -> None:
    policy.note_step(1000, 1000, 1.0)
    policy.note_coming("disk", 10, 2.5)
    policy.note_coming("redis", 10, 0.5)
    assert policy.wait_s("disk", 10, 10 * TOKENS_PER_BLOCK, 0.1) == 0
    assert policy.wait_s("redis", 10, 10 * TOKENS_PER_BLOCK, 0.1) == pytest.approx(1.0)
    assert policy.wait_s("redis", 10, 10 * TOKENS_PER_BLOCK, 1.1) == 0
    clock.time += PROBE_S
    assert policy.wait_s("disk", 10, 10 * TOKENS_PER_BLOCK, 0.0) == 0  # nobody is the one to find out
    assert policy.wait_s("disk", 10, 10 * TOKENS_PER_BLOCK, 0.1) == pytest.approx(1.0)
    policy.note_coming("disk", 0, 1.0)  # nothing has come in the time that computing takes
    assert policy.wait_s("disk", 10, 10 * TOKENS_PER_BLOCK, 0.1) == 0


def test_steps_that_do_not_prefill_are_not_measured(policy: LoadPolicy) -> None:
    policy.note_step(PREFILL_TOKENS_MIN - 1, PREFILL_TOKENS_MIN - 1, 9.0)
    policy.note_step(1000, 800, 9.0)
    assert policy.compute_s(TOKENS_PER_BLOCK) == math.inf
    policy.note_step(1000, 950, 1.0)
    assert policy.compute_s(TOKENS_PER_BLOCK) == pytest.approx(0.1)


def test_always_loads_everything(clock: Clock) -> None:
    policy = LoadPolicy(BLOCK_BYTES, clock, auto=False)
    policy.note_step(1000, 1000, 0.001)
    policy.note_load(10 * BLOCK_BYTES, copy_s=20.0, whole_s=20.0)
    policy.note_coming("disk", 1, 20.0)
    assert policy.loads(*worth(1))
    assert policy.wait_s("disk", 1, 1 * TOKENS_PER_BLOCK, 0.0) == math.inf
    assert policy.direct_pays(*worth(1), 20.0)


def test_steps_that_overlap_are_timed_one_after_the_other(clock: Clock) -> None:
    noted: list[tuple[int, int, float]] = []
    steps = Steps(lambda *each: noted.append(each), clock)
    steps.end()
    steps.begin(500, 500)
    clock.time += 1
    steps.begin(7, 0)  # while the first one runs
    clock.time += 2
    steps.end()
    clock.time += 0.5
    steps.end()
    clock.time += 9
    steps.begin(3, 0)
    clock.time += 1
    steps.end()
    steps.end()
    assert noted == [(500, 500, 3.0), (7, 0, 0.5), (3, 0, 1.0)]


def waiting(
    ready: int, token_s: float | None, below_s: float | None = None, told_s: float = 0.0
) -> tuple[Engine, Request]:
    """A request for 8 blocks, all but the first ones on disk, in an engine that knows its rates; `told_s` is how long a
    block takes in the daemon's opinion.
    """
    daemon, keys = stored(1, 8)
    daemon.block_s = told_s
    for key in keys[ready:]:
        daemon.copy_down(hash_of(key))
        daemon.evict(hash_of(key))
    engine = Engine(daemon, auto=True)
    if token_s is not None:
        engine.policy.note_step(1000, 1000, 1000 * token_s)
    if below_s is not None:
        engine.policy.note_coming("disk", 10, 10 * below_s)
    return engine, engine.submit("request", keys)


def steps_until_it_goes_on(engine: Engine, request: Request) -> int:
    for number in range(1000):
        if request.state != "waiting":
            return number
        engine.schedule()
    raise AssertionError


def test_a_slow_disk_is_not_waited_for_and_the_pools_part_is_loaded() -> None:
    engine, request = waiting(3, token_s=0.001, below_s=0.1)  # a block: 16 ms to compute, 100 ms from disk
    assert steps_until_it_goes_on(engine, request) == 2
    assert request.load is not None and len(request.load.keys) == 3
    assert engine.lookups.counts["misses", "slow"] == 5
    assert engine.lookups.counts["misses", "absent"] == 0
    assert engine.lookups.counts["decisions", "compute_below"] == 1


@pytest.mark.parametrize(("below_s", "told_s"), [(0.01, 0.0), (None, 0.01)])
def test_a_fast_disk_is_waited_for(below_s: float | None, told_s: float) -> None:
    engine, request = waiting(3, token_s=0.01, below_s=below_s, told_s=told_s)
    engine.schedule()
    for key in list(engine.daemon.coming):
        engine.daemon.come_up(key)
    assert steps_until_it_goes_on(engine, request) <= 3
    assert request.load is not None and len(request.load.keys) == 8
    assert engine.lookups.counts["decisions", "wait"] == 1


@pytest.mark.parametrize(("token_s", "told_s"), [(0.005, 0.0), (None, 0.001), (0.005, 0.1)])
def test_the_first_attempt_does_not_wait_in_order_to_learn(token_s: float | None, told_s: float) -> None:
    """How fast the disk is is not known, or not how fast this engine is, or the disk is known to be slow."""
    engine, request = waiting(3, token_s=token_s, told_s=told_s)
    assert steps_until_it_goes_on(engine, request) == 2
    assert request.load is not None and len(request.load.keys) == 3
    assert engine.lookups.counts["misses", "slow"] == 5
    assert engine.lookups.counts["decisions", "compute_below"] == 1
    assert len(engine.daemon.coming) == 5  # from which the daemon learns


def test_a_disk_that_is_slower_than_it_was_is_given_up_soon() -> None:
    engine, request = waiting(3, token_s=0.05, told_s=0.01)  # 5 blocks: 4 s to compute, 0.05 s to come up
    compute_s = 5 * TOKENS * 0.05
    began = engine.time
    steps_until_it_goes_on(engine, request)
    assert DOUBT_PART * compute_s <= engine.time - began < DOUBT_PART * compute_s + 0.1
    assert request.load is not None and len(request.load.keys) == 3
    assert engine.lookups.counts["misses", "late"] == 5


def test_what_has_come_from_a_disk_that_is_given_up_is_loaded() -> None:
    engine, request = waiting(2, token_s=0.05, told_s=0.01)  # 0.8 s a block
    engine.schedule()
    began, daemon = engine.time, engine.daemon
    for number, key in enumerate([key for key in daemon.disk if key in daemon.coming][:3]):
        while engine.time - began < number * 0.5:  # two blocks a second: not as told, and faster than computing
            engine.schedule()
        daemon.come_up(key)
    assert request.state == "waiting"
    while request.state == "waiting":  # and then none
        engine.schedule()
    assert engine.time - began < 1.0 + 1.0 + 0.1
    assert request.load is not None and len(request.load.keys) == 5
    assert engine.policy.wait_s("disk", 6, 6 * TOKENS, 0.0) > 0  # it is as fast as it was seen to be


def test_a_slow_pool_is_computed_and_its_pins_go_back() -> None:
    engine, request = waiting(8, token_s=0.0001)
    engine.policy.note_load(8 * SLOT_BYTES, copy_s=1.0, whole_s=1.0)
    steps_until_it_goes_on(engine, request)
    assert request.state == "running"
    assert engine.lookups.counts["misses", "slow"] == 8
    assert engine.lookups.counts["hits", ""] == 0
    engine.link.turn()
    assert not engine.daemon.leases


def test_a_request_that_excludes_storage_does_not_wait() -> None:
    engine, request = waiting(3, token_s=None)
    engine.lookups.restrict("request")
    assert steps_until_it_goes_on(engine, request) == 2
    assert request.load is not None and len(request.load.keys) == 3
    assert engine.lookups.counts["misses", "not_allowed"] == 5
