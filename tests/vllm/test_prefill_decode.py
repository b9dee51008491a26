"""The main job: a prefill engine and a decode engine in separate processes, with one daemon between them, and what
happens to them when the daemon dies, comes back or hangs, and when an engine dies.

The tests of this module share their engines and run in order; each uses prompts of its own.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from tests.vllm.harness import (
    BLOCK_TOKENS,
    BLOCKS,
    LONG_BLOCKS,
    LONG_TOKENS,
    Daemon,
    Engine,
    prompt,
    wait_until,
)

Answers = Callable[[list[int]], list[int]]
Pair = tuple[Engine, Engine]


@pytest.fixture(scope="module")
def pair(daemon: Daemon, engines: Callable[..., Engine]) -> Iterator[Pair]:
    extra = {"kvstore.endpoint": daemon.endpoint}
    # The prefill engine computes in steps of 512 tokens, and so stores a prompt in several parts.
    prefill, decode = engines("prefill", extra, max_num_batched_tokens=512), engines("decode", extra)
    for engine in (prefill.ready(), decode.ready()):
        engine.generate(prompt(1000))  # the first request of an engine pays for its warm-up
        engine.wait_storing(daemon)
    yield prefill, decode


def test_decode_loads_what_prefill_stored(daemon: Daemon, pair: Pair, answers: Answers) -> None:
    prefill, decode = pair
    decode.generate(prompt(1, LONG_TOKENS))
    cold = decode.generate(prompt(2, LONG_TOKENS))[0]
    before = daemon.stored_blocks()
    computed = prefill.generate(prompt(3, LONG_TOKENS))[0]
    daemon.wait_stored(before + LONG_BLOCKS)
    hits = decode.external_hits()
    loaded = decode.generate(prompt(3, LONG_TOKENS))[0]

    assert decode.external_hits() - hits >= 0.95 * LONG_BLOCKS * BLOCK_TOKENS
    assert loaded["cached"] >= 0.95 * LONG_BLOCKS * BLOCK_TOKENS
    assert computed["tokens"] == loaded["tokens"] == answers(prompt(3, LONG_TOKENS))
    assert cold["cached"] == computed["cached"] == 0
    ratio = cold["ttft_s"] / loaded["ttft_s"]
    print(f"time to first token: cold {cold['ttft_s']:.3f} s, loaded {loaded['ttft_s']:.3f} s, {ratio:.1f}x")
    assert ratio >= 8


def test_loads_leave_no_pins(daemon: Daemon, pair: Pair) -> None:
    def none() -> bool:
        stats = daemon.stats()
        return bool(stats["pins"] == stats["leases"] == 0)

    wait_until("the pins are given back", none)


def test_blocks_are_not_stored_twice(daemon: Daemon, pair: Pair) -> None:
    prefill, decode = pair
    stored = daemon.stats()["stores"]
    for engine in (decode, prefill):
        assert engine.generate(prompt(3, LONG_TOKENS))[0]["cached"] > 0
    assert daemon.stats()["stores"] == stored


def test_the_shared_part_of_a_prefix_is_loaded(daemon: Daemon, pair: Pair, answers: Answers) -> None:
    prefill, decode = pair
    before = daemon.stored_blocks()
    prefill.generate(prompt(4))
    daemon.wait_stored(before + BLOCKS)
    shared = 7 * BLOCK_TOKENS
    mixed = prompt(4)[:shared] + prompt(5)[shared:]
    loaded = decode.generate(mixed)[0]
    assert loaded["cached"] == shared
    assert loaded["tokens"] == answers(mixed)


def test_daemon_killed_between_store_and_load(daemon: Daemon, pair: Pair, answers: Answers) -> None:
    prefill, decode = pair
    before = daemon.stored_blocks()
    prefill.generate(prompt(6))
    daemon.wait_stored(before + BLOCKS)
    daemon.kill(signal.SIGKILL)
    hits = decode.external_hits()
    computed = decode.generate(prompt(6))[0]
    assert computed["tokens"] == answers(prompt(6))
    assert computed["cached"] == 0
    assert decode.external_hits() == hits
    assert decode.metric("vllm:kvstore_attached") == 0


def test_daemon_restarted_under_running_engines(daemon: Daemon, pair: Pair, answers: Answers) -> None:
    prefill, decode = pair
    daemon.start()
    prefill.wait_storing(daemon)
    decode.wait_storing(daemon)
    before = daemon.stored_blocks()
    assert before < BLOCKS
    prefill.generate(prompt(7))
    daemon.wait_stored(before + BLOCKS)
    hits = decode.external_hits()
    loaded = decode.generate(prompt(7))[0]
    assert loaded["tokens"] == answers(prompt(7))
    assert decode.external_hits() - hits == BLOCKS * BLOCK_TOKENS
    assert decode.metric("vllm:kvstore_attached") == 1


def test_daemon_that_hangs_costs_a_bounded_wait(daemon: Daemon, pair: Pair, answers: Answers) -> None:
    prefill, decode = pair
    before = daemon.stored_blocks()
    prefill.generate(prompt(8))
    daemon.wait_stored(before + BLOCKS)
    daemon.send(signal.SIGSTOP)
    try:
        computed = decode.generate(prompt(8))[0]
        figures = decode.metrics()
    finally:
        daemon.send(signal.SIGCONT)
    assert computed["tokens"] == answers(prompt(8))
    assert computed["cached"] == 0
    # Unavailable, where the client has noticed before it asked.
    missed = [figures.get(f"vllm:kvstore_miss_blocks{{reason={reason}}}", 0) for reason in ("silent", "unavailable")]
    assert sum(missed) >= BLOCKS, figures

    def loads_again() -> bool:
        decode.forget_local()
        return bool(decode.generate(prompt(8), max_tokens=1)[0]["cached"] == BLOCKS * BLOCK_TOKENS)

    wait_until("hits are back", loads_again)


def test_reset_of_the_engines_caches_reaches_the_daemon(daemon: Daemon, pair: Pair) -> None:
    """After new weights vLLM resets its caches and the connector's: old KV must not be found by anybody."""
    prefill, decode = pair
    before = daemon.stored_blocks()
    prefill.generate(prompt(9))
    daemon.wait_stored(before + BLOCKS)
    assert prefill.ask(do="reset", connector=True)["reset"]
    wait_until("the daemon has forgotten", lambda: daemon.stored_blocks() == 0)
    hits = decode.external_hits()
    assert decode.generate(prompt(9))[0]["cached"] == 0
    assert decode.external_hits() == hits


def test_a_damaged_load_is_computed_and_not_promised_again(daemon: Daemon, pair: Pair, answers: Answers) -> None:
    """vLLM's default would fail the request (kv_load_failure_policy): the plugin has it computed."""
    prefill, decode = pair
    before = daemon.stored_blocks()
    prefill.generate(prompt(11))
    daemon.wait_stored(before + BLOCKS)
    assert decode.ask(do="damage_loads", count=1)["damaged"]
    hits = decode.metric("vllm:kvstore_hit_blocks")
    assert decode.generate(prompt(11))[0]["tokens"] == answers(prompt(11))
    assert decode.metric("vllm:kvstore_hit_blocks") - hits == BLOCKS  # it was promised, and loaded in vain
    assert decode.metrics()["vllm:kvstore_load_failures{reason=epoch}"] == 1
    decode.forget_local()
    assert decode.generate(prompt(11))[0]["cached"] == 0
    assert decode.metrics()["vllm:kvstore_miss_blocks{reason=distrusted}"] >= 1
    wait_until("the pins are given back", lambda: daemon.stats()["pins"] == 0)


def test_no_hook_has_failed(pair: Pair) -> None:
    for engine in pair:
        assert engine.metric("vllm:kvstore_hook_errors") == 0


def test_engine_killed_in_mid_store(daemon: Daemon, pair: Pair, answers: Answers) -> None:
    victim, survivor = pair
    before = daemon.stored_blocks()
    victim.send(do="generate", prompts=[prompt(10, LONG_TOKENS)], max_tokens=1)

    def in_mid_store() -> bool:
        stats = daemon.stats()
        mine = [s for s in stats["sessions"] if s["pid"] == victim.process.pid]
        return stats["tiers"][0]["blocks"] > before and any(s["reserved_slots"] for s in mine)

    wait_until("the victim has stored a part and holds slots for more", in_mid_store, 60)
    victim.kill()
    wait_until(
        "the victim's sessions are gone",
        lambda: all(s["pid"] != victim.process.pid for s in daemon.stats()["sessions"]),
    )
    wait_until("nothing is pinned", lambda: daemon.stats()["pins"] == 0)
    wait_until("no slot is reserved", lambda: daemon.stats()["reserved_slots"] == 0)

    stored = daemon.stored_blocks() - before
    assert 0 < stored <= LONG_BLOCKS
    loaded = survivor.generate(prompt(10, LONG_TOKENS))[0]
    assert loaded["cached"] == stored * BLOCK_TOKENS
    assert loaded["tokens"] == answers(prompt(10, LONG_TOKENS))
