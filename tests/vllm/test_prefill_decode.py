"""The main job: a prefill engine and a decode engine in separate processes, with one daemon between them, and what
happens to them when the daemon dies, comes back or hangs.

The tests of this module share their engines and run in order; each uses prompts of its own.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from tests.vllm.harness import BLOCK_TOKENS, FULL_BLOCKS, Daemon, Engine, prompt, wait_until


@pytest.fixture(scope="module")
def pair(daemon: Daemon, engines: Callable[..., Engine]) -> Iterator[tuple[Engine, Engine]]:
    extra = {"kvstore.endpoint": daemon.endpoint}
    prefill, decode = engines("prefill", extra), engines("decode", extra)
    for engine in (prefill.ready(), decode.ready()):
        engine.generate(prompt(1000, 640))  # the first request of an engine pays for its warm-up
    daemon.wait_attached(sessions=4)
    yield prefill, decode


def test_decode_loads_what_prefill_stored(
    daemon: Daemon, pair: tuple[Engine, Engine], answers: Callable[[int], list[int]]
) -> None:
    prefill, decode = pair
    before = daemon.stored_blocks()
    cold = prefill.generate(prompt(1))[0]
    daemon.wait_stored(before + FULL_BLOCKS)
    hits = decode.external_hits()
    loaded = decode.generate(prompt(1))[0]

    assert decode.external_hits() - hits >= 0.95 * FULL_BLOCKS * BLOCK_TOKENS
    assert loaded["cached"] >= 0.95 * FULL_BLOCKS * BLOCK_TOKENS
    assert cold["tokens"] == answers(1)
    assert loaded["tokens"] == answers(1)
    assert cold["cached"] == 0
    ratio = cold["ttft_s"] / loaded["ttft_s"]
    print(f"time to first token: cold {cold['ttft_s']:.3f} s, loaded {loaded['ttft_s']:.3f} s, {ratio:.1f}x")
    assert ratio >= 8


def test_loads_leave_no_pins(daemon: Daemon, pair: tuple[Engine, Engine]) -> None:
    stats = daemon.stats()
    assert stats["pins"] == 0
    assert stats["leases"] == 0


def test_blocks_are_not_stored_twice(daemon: Daemon, pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    stored = daemon.stats()["stores"]
    assert decode.generate(prompt(1))[0]["cached"] > 0
    assert prefill.generate(prompt(1))[0]["cached"] > 0
    assert daemon.stats()["stores"] == stored


def test_part_of_a_prefix_is_loaded(daemon: Daemon, pair: tuple[Engine, Engine]) -> None:
    """Another prompt that shares the first half: exactly that half is loaded."""
    prefill, decode = pair
    before = daemon.stored_blocks()
    prefill.generate(prompt(2))
    daemon.wait_stored(before + FULL_BLOCKS)
    shared = 30 * BLOCK_TOKENS
    mixed = prompt(2)[:shared] + prompt(3)[shared:]
    assert decode.generate(mixed)[0]["cached"] == shared


def test_daemon_killed_between_store_and_load(
    daemon: Daemon, pair: tuple[Engine, Engine], answers: Callable[[int], list[int]]
) -> None:
    prefill, decode = pair
    before = daemon.stored_blocks()
    prefill.generate(prompt(4))
    daemon.wait_stored(before + FULL_BLOCKS)
    daemon.kill(signal.SIGKILL)
    hits = decode.external_hits()
    computed = decode.generate(prompt(4))[0]
    assert computed["tokens"] == answers(4)
    assert computed["cached"] == 0
    assert decode.external_hits() == hits
    assert decode.metric("vllm:kvstore_attached") == 0
    assert decode.metric("vllm:kvstore_hook_errors") == 0


def test_daemon_restarted_under_running_engines(
    daemon: Daemon, pair: tuple[Engine, Engine], answers: Callable[[int], list[int]]
) -> None:
    prefill, decode = pair
    daemon.start()
    daemon.wait_attached(sessions=4)
    assert daemon.stored_blocks() == 0
    prefill.generate(prompt(5))
    daemon.wait_stored(FULL_BLOCKS)
    hits = decode.external_hits()
    loaded = decode.generate(prompt(5))[0]
    assert loaded["tokens"] == answers(5)
    assert decode.external_hits() - hits >= 0.95 * FULL_BLOCKS * BLOCK_TOKENS
    assert decode.metric("vllm:kvstore_attached") == 1


def test_daemon_that_hangs_costs_a_bounded_wait(
    daemon: Daemon, pair: tuple[Engine, Engine], answers: Callable[[int], list[int]]
) -> None:
    prefill, decode = pair
    before = daemon.stored_blocks()
    prefill.generate(prompt(6))
    daemon.wait_stored(before + FULL_BLOCKS)
    daemon.send(signal.SIGSTOP)
    try:
        computed = decode.generate(prompt(6))[0]
        silent = decode.metrics().get("vllm:kvstore_miss_blocks{reason=silent}", 0)
    finally:
        daemon.send(signal.SIGCONT)
    assert computed["tokens"] == answers(6)
    assert computed["cached"] == 0
    assert silent >= FULL_BLOCKS
    daemon.wait_attached(sessions=4)
    decode.forget_local()
    assert decode.generate(prompt(6), max_tokens=1)[0]["cached"] in (0, FULL_BLOCKS * BLOCK_TOKENS)


def test_reset_of_the_engines_caches_reaches_the_daemon(daemon: Daemon, pair: tuple[Engine, Engine]) -> None:
    """After new weights vLLM resets its caches and the connector's: old KV must not be found by anybody."""
    prefill, decode = pair
    prefill.generate(prompt(7))
    daemon.wait_stored(FULL_BLOCKS)
    assert prefill.ask(do="reset", connector=True)["reset"]
    hits = decode.external_hits()
    wait_until("the daemon has forgotten", lambda: daemon.stored_blocks() < FULL_BLOCKS)
    assert decode.generate(prompt(7))[0]["cached"] == 0
    assert decode.external_hits() == hits
