"""Disaggregated prefill: what a prefill engine says, what a decode engine takes from it, and how long it waits."""

from __future__ import annotations

from typing import Any

import pytest

from engine_plugin.vllm.coming import Expected
from engine_plugin.vllm.lookups import ANSWERS_MAX, PROMISED_MAX
from engine_plugin.vllm.pd import BadParams, PrefillDecode, Side
from engine_plugin.vllm.runs import hash_of
from tests.plugin.engine_model import Engine, Request, key_of, stored
from tests.plugin.fakes import FakeDaemon
from tests.plugin.test_coming import DEADLINE_S, STEP_S, load, steps

BLOCK = 64
WAIT_S = 2.0
SIDE = Side(digest="ab" * 16, model="tiny", block_tokens=BLOCK, wait_s=WAIT_S)


def side_of(*, nested: bool = False, **changes: Any) -> PrefillDecode:
    fields = {name: getattr(SIDE, name) for name in Side.__dataclass_fields__}
    return PrefillDecode(Side(**{**fields, **changes}), now=lambda: 100.0, nested=nested)


def handed_over(prompt_tokens: int, *offers: tuple[int, int, int, int], **options: Any) -> dict[str, Any]:
    prefill = side_of(**options)
    prefill.arrived("p", {"do_remote_decode": True}, prompt_tokens)
    for offer in offers:
        prefill.note_offered("p", *offer)
    params = prefill.handover("p", list(range(prompt_tokens)))
    assert params is not None
    return params


# -- what is said ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offers", "tokens", "settled"),
    [
        ([], 0, 0),
        ([(0, 0, 8, 8)], 512, 0),
        ([(0, 0, 4, 4), (256, 0, 4, 4)], 512, 0),
        ([(0, 4, 4, 4), (256, 0, 4, 4)], 512, 256),  # the first part was there
        ([(0, 3, 4, 4), (256, 4, 4, 4)], 512, 192),  # a later part that was there says nothing of the first hole
        ([(0, 0, 3, 4), (256, 0, 4, 4)], 192, 0),  # no room for the fourth block: what follows is of no use
        ([(0, 4, 4, 4), (256, 0, 0, 4)], 256, 256),
        ([(0, 8, 8, 8), (512, 0, 2, 2)], 576, 512),  # generated tokens are no part of the promise
    ],
)
def test_what_is_promised_is_there_or_on_its_way(
    offers: list[tuple[int, int, int, int]], tokens: int, settled: int
) -> None:
    params = handed_over(600, *offers)
    assert (params["kvstore.tokens"], params["kvstore.settled_tokens"]) == (tokens, settled)
    assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
    assert params["prompt_token_ids"] == list(range(600))
    assert params["kvstore.namespace"] == SIDE.digest and params["kvstore.model"] == "tiny"


def test_nobody_is_told_who_did_not_ask() -> None:
    prefill = side_of()
    prefill.arrived("plain", None, 100)
    prefill.arrived("other", {"max_load_tokens": 5}, 100)
    assert not prefill.tells_of("plain") and not prefill.tells_of("other")
    assert prefill.handover("plain", [1]) is None and prefill.handover("other", [1]) is None
    prefill.arrived("p", {"do_remote_decode": True}, 100)
    prefill.finished("p")
    assert prefill.handover("p", [1]) is None


def test_a_prompt_that_is_not_tokens_has_no_ids() -> None:
    prefill = side_of()
    prefill.arrived("p", {"do_remote_decode": True}, 100)
    params = prefill.handover("p", None)
    assert params is not None and "prompt_token_ids" not in params and params["kvstore.tokens"] == 0


def test_beside_other_connectors_only_our_own_parameters_are_written() -> None:
    """MultiConnector raises, in the scheduler, where two of its parts answer with one key."""
    params = handed_over(128, (0, 0, 2, 2), nested=True)
    assert not {"do_remote_prefill", "do_remote_decode"} & params.keys()
    assert params["kvstore.tokens"] == 128
    decode = side_of(nested=True)
    decode.arrived("d", {**params, "do_remote_prefill": True}, 128)
    assert not decode.expected("d", 0, 2).keys  # another one may have them: nothing waits here


# -- what is believed --------------------------------------------------------------------------------------------------


def test_what_one_side_says_the_other_understands() -> None:
    decode = side_of()
    decode.arrived("d", handed_over(600, (0, 2, 4, 4), (256, 0, 4, 4)), 600)
    assert decode.expected("d", 0, 9) == Expected(8, 2, 100.0 + WAIT_S)
    # The engine has some of them itself, and asks for what follows.
    assert decode.expected("d", 3 * BLOCK, 6) == Expected(5, 0, 100.0 + WAIT_S)
    assert decode.expected("d", 9 * BLOCK, 1).keys == 0
    assert decode.expected("other", 0, 9).keys == 0
    decode.finished("d")
    assert decode.expected("d", 0, 9).keys == 0
    assert not decode.counts


def test_a_router_that_knows_nothing_of_us_has_all_waited_for() -> None:
    decode = side_of()
    decode.arrived("d", {"do_remote_prefill": True, "remote_prefill_cached_tokens": 5}, 600)
    assert decode.expected("d", 0, 9) == Expected(9, 0, 100.0 + WAIT_S)


@pytest.mark.parametrize(
    ("params", "outcome"),
    [
        ("text", "bad_params"),
        (["do_remote_prefill"], "bad_params"),
        (7, "bad_params"),
        ({"do_remote_prefill": "yes"}, "bad_params"),
        ({"do_remote_prefill": 1}, "bad_params"),
        ({"do_remote_decode": {}}, "bad_params"),
        ({"do_remote_prefill": True, "kvstore.tokens": "512"}, "bad_params"),
        ({"do_remote_prefill": True, "kvstore.tokens": True}, "bad_params"),
        ({"do_remote_prefill": True, "kvstore.tokens": -64}, "bad_params"),
        ({"do_remote_prefill": True, "kvstore.tokens": 1e300}, "bad_params"),
        ({"do_remote_prefill": True, "kvstore.settled_tokens": [1]}, "bad_params"),
        ({"do_remote_prefill": True, "kvstore.tokens": 601}, "too_many_tokens"),
        ({"do_remote_prefill": True, "kvstore.tokens": 1 << 80}, "too_many_tokens"),
        ({"do_remote_prefill": True, "kvstore.tokens": 64, "kvstore.settled_tokens": 128}, "too_many_tokens"),
        ({"do_remote_prefill": True, "kvstore.namespace": "cd" * 16}, "foreign_namespace"),
        ({"do_remote_prefill": True, "kvstore.namespace": {"x": "y" * 9999}}, "foreign_namespace"),
    ],
)
def test_what_cannot_be_right_is_counted_and_nothing_waits(params: Any, outcome: str) -> None:
    decode = side_of()
    decode.arrived("d", params, 600)
    assert decode.counts == {("pd", outcome): 1}
    assert not decode.expected("d", 0, 9).keys and not decode.tells_of("d")


def test_roles() -> None:
    producer, consumer = side_of(loads=False), side_of(stores=False)
    producer.arrived("r", {"do_remote_prefill": True}, 600)
    consumer.arrived("r", {"do_remote_decode": True}, 600)
    for side in (producer, consumer):
        assert side.counts == {("pd", "wrong_role"): 1}
    assert not producer.expected("r", 0, 9).keys and consumer.handover("r", [1]) is None
    producer.arrived("p", {"do_remote_decode": True}, 600)
    consumer.arrived("p", {"do_remote_prefill": True}, 600)
    assert producer.tells_of("p") and consumer.expected("p", 0, 9).keys == 9


def test_the_messages_say_what_to_do() -> None:
    with pytest.raises(BadParams, match="kvstore stats"):
        side_of()._read_promise({"kvstore.namespace": "x", "kvstore.model": "other"}, 5)


# -- how long it waits -------------------------------------------------------------------------------------------------


def promised(keys: int, *, there: int = 0, settled: int = 0, of: int = 8) -> tuple[FakeDaemon, Engine, Request]:
    """A request of eight blocks of which so many are promised and so many are there; it has been asked for."""
    daemon, chain = stored(1, of)
    for key in chain[there:]:
        daemon.evict(hash_of(key))
    daemon.calls.clear()
    engine = Engine(daemon)
    engine.expected["request"] = Expected(keys, settled, engine.time + WAIT_S)
    request = engine.submit("request", chain)
    engine.schedule()
    return daemon, engine, request


def publish(daemon: FakeDaemon, request: Request, places: range) -> None:
    """The prefill engine's blocks come in."""
    _, chain = stored(1, len(request.keys))
    source, _ = stored(1, len(request.keys))
    for place in places:
        key = hash_of(chain[place])
        slot = daemon.free.pop()
        daemon.arena.memory[slot] = source.arena.memory[source.blocks[key]]
        daemon.blocks[key] = slot


@pytest.mark.parametrize("there", [0, 5])
def test_an_early_request_waits_for_what_is_on_its_way(there: int) -> None:
    daemon, engine, request = promised(8, there=there)
    assert steps(engine, request, 100) == 100 and 100 * STEP_S > DEADLINE_S
    assert engine.lookups.waiting() and not engine.lookups.loading()
    publish(daemon, request, range(there, 7))
    assert steps(engine, request, 20) == 20  # the last one is missing
    publish(daemon, request, range(7, 8))
    assert steps(engine, request, 5) < 5
    assert load(engine, request) == 8
    assert engine.lookups.counts["pd", "complete"] == 1
    engine.link.turn()
    assert not daemon.leases


def test_the_wait_ends_and_what_came_is_loaded() -> None:
    daemon, engine, request = promised(8, there=3)
    waited = steps(engine, request, 1000)
    assert WAIT_S - 0.1 <= waited * STEP_S <= WAIT_S + 0.1
    assert load(engine, request) == 3
    assert engine.lookups.counts["pd", "incomplete"] == 1
    engine.link.turn()
    assert not daemon.leases


def test_only_what_is_promised_is_waited_for() -> None:
    _, engine, request = promised(5, there=5)
    assert steps(engine, request, 5) < 5
    assert load(engine, request) == 5


def test_what_was_there_and_is_gone_is_not_waited_for() -> None:
    _, engine, request = promised(8, there=2, settled=4)
    assert steps(engine, request, 5) < 5
    assert load(engine, request) == 2


def test_calls_get_rarer_while_a_request_waits() -> None:
    daemon, engine, request = promised(8)
    assert steps(engine, request, 150) == 150
    assert len(daemon.calls) <= 150 * STEP_S / 0.01


def test_a_daemon_that_dies_ends_the_wait() -> None:
    daemon, engine, request = promised(8, there=2)
    steps(engine, request, 10)
    daemon.die()
    assert steps(engine, request, 10) < 10
    assert request.load is None


def test_a_request_that_leaves_holds_nothing() -> None:
    daemon, engine, request = promised(8, there=2)
    steps(engine, request, 10)
    engine.finish(request)
    engine.link.turn()
    engine.link.turn()
    assert not daemon.leases and not engine.lookups.waiting()


def test_other_requests_find_a_place_beside_those_that_wait() -> None:
    daemon, chain = stored(1, 4)
    engine = Engine(daemon)
    for number in range(2 * ANSWERS_MAX):
        engine.expected[f"early {number}"] = Expected(4, 0, engine.time + WAIT_S)
        engine.submit(f"early {number}", [key_of(number + 100, place) for place in range(4)])
    engine.schedule()
    assert len(engine.lookups._holders) == PROMISED_MAX
    request = engine.submit("plain", chain)
    assert steps(engine, request, 5) < 5
    assert request.load is not None
