"""Several tiers below the pool: their order, and the one that keeps what came up from another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.directory import BlockState
from kvstore.postponed import AGAIN_S
from kvstore.testing.tiers import DictTier, Fault, FaultyTier
from kvstore.tier import TierState
from tests.tiers.test_transfers import Bench


class Chain(Bench):
    """Two tiers below the pool, each of them faulty: `tier`, and `second` behind it."""

    def __init__(self, *, keeps: bool = False) -> None:
        self.second_dict = DictTier(name="second")
        self.second = FaultyTier(self.second_dict)
        super().__init__(below=[self.second], keeps=keeps)

    def in_second(self) -> set[bytes]:
        return {key.removeprefix(self.keyspace.prefix) for key, _ in self.second_dict.scan()}

    def lose_first(self, *keys: bytes) -> None:
        """The first tier has evicted them, and the pool too."""
        self.run(self.dict.delete([self.keyspace.prefix + key for key in keys]))
        self.leave_pool(*keys)


@pytest.fixture
def chain() -> Iterator[Chain]:
    made = Chain()
    yield made
    made.close()


@pytest.fixture
def keeping() -> Iterator[Chain]:
    made = Chain(keeps=True)
    yield made
    made.close()


def test_copies_go_along_the_order(chain: Chain) -> None:
    with chain.tier.gate("write") as gate:
        chain.store(b"a")
        assert gate.reached.is_set()
        assert chain.second.calls["write"] == 0
    chain.settle()
    assert chain.in_tier() == chain.in_second() == {b"a"}


def test_what_a_tier_takes_only_later_is_copied_then(chain: Chain) -> None:
    """It reads its index, say. What is stored meanwhile must not wait for its turn to leave the pool."""
    chain.tier.force_state(TierState.LOADING)
    chain.store(b"a", b"b")
    chain.store(b"c", b"gone")
    chain.run(chain.hierarchy.delete_everywhere(chain.keyspace, [b"gone"]))
    assert (chain.in_tier(), chain.in_second()) == (set(), {b"a", b"b", b"c"})
    for _ in range(3):
        chain.loop.advance(AGAIN_S)
        chain.settle()
    assert not chain.in_tier() and chain.tier.calls["write"] >= 2 + 3
    chain.tier.force_state(None)
    chain.loop.advance(AGAIN_S)
    chain.settle()
    assert chain.in_tier() == chain.in_second() == {b"a", b"b", b"c"}
    calls = chain.tier.calls["write"]
    chain.loop.advance(10 * AGAIN_S)
    chain.settle()
    assert chain.tier.calls["write"] == calls  # nothing is left to be offered


def test_what_was_refused_goes_down_with_the_next_that_is_taken(chain: Chain) -> None:
    chain.tier.inject("write", Fault.THROTTLED, count=2)
    chain.store(b"a", b"b", b"c")
    assert chain.in_tier() == {b"c"}
    chain.store(b"d")
    assert chain.in_tier() == {b"a", b"b", b"c", b"d"}


def test_what_was_refused_and_leaves_is_counted(chain: Chain) -> None:
    chain.tier.inject("write", Fault.THROTTLED)
    chain.store(b"a")
    assert chain.hierarchy.transfers.counts["not_kept"] == 0
    chain.hierarchy.pool.evict(chain.arena.size_bytes, 1000)
    assert chain.hierarchy.transfers.counts["not_kept"] == 1


def test_a_tier_that_fails_keeps_nothing_from_the_next(chain: Chain) -> None:
    chain.tier.force_state(TierState.FAILED)
    chain.store(b"a")
    assert (chain.in_tier(), chain.in_second()) == (set(), {b"a"})
    chain.leave_pool(b"a")
    assert chain.ask(b"a") == (None, 1)
    chain.settle()
    chain.check_lease(chain.ask(b"a")[0], b"a")
    assert chain.hierarchy.counts.hits == {"second": 1}


def test_the_first_tier_that_has_a_block_gives_it(chain: Chain) -> None:
    chain.store(b"a", b"b")
    chain.lose_first(b"b")
    chain.leave_pool(b"a")
    assert chain.ask(b"a", b"b") == (None, 2)
    chain.settle()
    chain.check_lease(chain.ask(b"a", b"b")[0], b"a", b"b")
    assert chain.hierarchy.counts.hits == {"dict": 1, "second": 1}
    assert chain.in_tier() == {b"a"}, "nothing is kept that was not told to be"


def test_a_keeper_keeps_what_came_up_from_another_tier(keeping: Chain) -> None:
    keeping.store(b"a", b"b")
    keeping.lose_first(b"b")
    keeping.leave_pool(b"a")
    before = keeping.second.calls["write"], keeping.tier.calls["write"]
    keeping.ask(b"a", b"b")
    keeping.settle()
    keeping.check_lease(keeping.ask(b"a", b"b")[0], b"a", b"b")
    assert keeping.in_tier() == {b"a", b"b"}
    # What came up from the keeper itself is not written there again, and nothing goes to the other tier.
    assert (keeping.second.calls["write"], keeping.tier.calls["write"]) == (before[0], before[1] + 1)
    assert keeping.hierarchy.transfers.counts["dict_write_exists"] == 0
    keeping.leave_pool(b"b")
    keeping.ask(b"b")
    keeping.settle()
    keeping.check_lease(keeping.ask(b"b")[0], b"b")
    assert keeping.hierarchy.counts.hits["dict"] == 2


def test_a_block_removed_while_it_is_being_kept_does_not_come_back(keeping: Chain) -> None:
    keeping.store(b"a")
    keeping.lose_first(b"a")
    with keeping.tier.gate("write"):
        keeping.ask(b"a")
        keeping.settle()
        removal = keeping.start(keeping.hierarchy.delete_everywhere(keeping.keyspace, [b"a"]))
        keeping.settle()
    keeping.settle()
    assert removal.done()
    assert keeping.in_tier() == keeping.in_second() == set()
    assert keeping.ask(b"a") == (None, 0)


def test_what_can_not_be_kept_is_served_all_the_same(keeping: Chain) -> None:
    keeping.store(b"a")
    keeping.lose_first(b"a")
    keeping.tier.inject("write", Fault.ERROR)
    keeping.ask(b"a")
    keeping.settle()
    keeping.check_lease(keeping.ask(b"a")[0], b"a")
    assert keeping.in_tier() == set()
    keeping.leave_pool(b"a")
    keeping.ask(b"a")
    keeping.settle()
    keeping.check_lease(keeping.ask(b"a")[0], b"a")


def test_what_finds_the_queue_full_is_kept_later(keeping: Chain) -> None:
    keeping.store(b"a")
    keeping.lose_first(b"a")
    with keeping.tier.gate("write"):
        keeping.store(*(b"%d" % index for index in range(10)))
        keeping.ask(b"a")
        keeping.settle()
        keeping.check_lease(keeping.ask(b"a")[0], b"a")
    keeping.settle()
    assert b"a" in keeping.in_tier()


def test_what_leaves_before_it_was_kept_is_counted(keeping: Chain) -> None:
    keeping.store(b"a")
    keeping.lose_first(b"a")
    with keeping.tier.gate("write"):
        keeping.store(*(b"%d" % index for index in range(10)))
        keeping.ask(b"a")
        keeping.settle()
        block = keeping.keyspace.blocks[b"a"]
        keeping.hierarchy.pool.evict(keeping.arena.size_bytes, 1000)
        assert block.state is not BlockState.READY
        assert keeping.hierarchy.transfers.counts["not_kept"] == 1
    keeping.settle()
    assert b"a" not in keeping.in_tier()
