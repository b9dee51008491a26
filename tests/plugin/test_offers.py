"""vLLM's `store_threshold`."""

from __future__ import annotations

import pytest

from engine_plugin.vllm.offers import Offers
from tests.plugin.engine_model import Engine, key_of
from tests.plugin.fakes import FakeDaemon

KEYS = [bytes([i]) * 36 for i in range(100)]


@pytest.mark.parametrize("threshold", [0, 1])
def test_no_threshold_counts_nothing(threshold: int) -> None:
    assert Offers(threshold, most=1).due(KEYS) == KEYS


def test_all_of_a_long_prefix_is_due_at_its_second_offer() -> None:
    offers = Offers(2)
    assert offers.due(KEYS) == []
    assert offers.due(KEYS) == KEYS
    assert offers.due(KEYS) == KEYS


def test_what_is_counted_is_bounded_and_the_oldest_is_forgotten_first() -> None:
    offers = Offers(2, most=10)
    offers.due(KEYS[:5])
    offers.due(KEYS[5:10])
    offers.due(KEYS[10:15])  # the first five are forgotten
    assert offers.due(KEYS[:5]) == []  # and now the next five
    assert offers.due(KEYS[10:15]) == KEYS[10:15]
    assert offers.due(KEYS[5:10]) == []


def test_of_an_offer_that_is_too_long_the_front_is_counted() -> None:
    offers = Offers(2, most=10)
    assert offers.due(KEYS) == []
    assert offers.due(KEYS) == KEYS[:10]


def test_a_prompt_is_stored_when_it_comes_for_the_second_time_and_takes_no_slots_before() -> None:
    daemon = FakeDaemon(64)
    engine = Engine(daemon, offers=Offers(2))
    keys = [key_of(1, place) for place in range(8)]
    for number in range(2):
        assert not engine.copies
        request = engine.submit(f"request {number}", keys)
        while request.computed < len(keys):
            engine.schedule()
        engine.finish(request)
    assert sum(len(copy.store.keys) for copy in engine.copies if copy.rank == 0) == len(keys)
    assert engine.stores.counts["skipped", "threshold"] == len(keys)
    held = len(daemon.reserved)
    for number in range(20):  # new prompts, none of which is stored: no slots pile up for them
        request = engine.submit(f"other {number}", [key_of(100 + number, place) for place in range(8)])
        while request.computed < 8:
            engine.schedule()
        engine.finish(request)
    assert len(daemon.reserved) <= held + 8
