"""Models with several KV-cache groups: sliding windows and recurrent states beside full attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.vllm.harness import BLOCK_TOKENS, BLOCKS, Daemon, Engine, prompt, wait_until

Models = Callable[[str], Path]


def stores_then_loads(first: Engine, second: Engine, daemon: Daemon, seed: int, block_tokens: int) -> None:
    """What the first engine computes the second one loads, whole prompts and a shared beginning."""
    whole = prompt(seed)
    shared = whole[: 6 * BLOCK_TOKENS] + prompt(seed + 1, 150)
    expected = second.generate(shared, transfer={"max_offload_tokens": 0})[0]["tokens"]  # computed, and not stored
    second.forget_local()
    before = daemon.stored_blocks()
    computed = first.generate(whole)[0]
    daemon.wait_stored(before + len(whole) // block_tokens)
    wait_until("nothing is under way", lambda: daemon.stats()["reserved_slots"] == 0)
    hits = second.external_hits()
    loaded = second.generate(whole)[0]
    assert loaded["tokens"] == computed["tokens"]
    assert loaded["cached"] == second.external_hits() - hits > 0.9 * len(whole)
    answer = second.generate(shared)[0]
    assert answer["tokens"] == expected
    for engine in (first, second):
        assert engine.metric("vllm:kvstore_load_failures") == engine.metric("vllm:kvstore_hook_errors") == 0
    wait_until("the pins are given back", lambda: daemon.stats()["pins"] == 0)


def test_sliding_windows_beside_full_attention(daemon: Daemon, models: Models, engines: Callable[..., Engine]) -> None:
    options: dict[str, Any] = {"of": models("windows"), "num_gpu_blocks_override": 400}
    extra = {"kvstore.endpoint": daemon.endpoint}
    first, second = engines("windows-1", extra, **options), engines("windows-2", extra, **options)
    for engine in (first.ready(), second.ready()):
        engine.wait_storing(daemon)
    stores_then_loads(first, second, daemon, 91, BLOCK_TOKENS)
    # Disaggregated prefill speaks of the prefix with full attention, whichever group that is.
    handed = first.generate(prompt(93), max_tokens=1, transfer={"do_remote_decode": True})[0]["transfer"]
    assert handed["kvstore.tokens"] == BLOCKS * BLOCK_TOKENS
    hits = second.external_hits()
    assert second.generate(prompt(93), transfer=handed)[0]["tokens"] == first.generate(prompt(93))[0]["tokens"]
    assert second.external_hits() - hits > 0.9 * len(prompt(93))
    # A load that fails is computed, though vLLM cannot say which blocks of several groups are bad.
    second.forget_local()
    second.ask(do="damage_loads", count=1)
    again = second.generate(prompt(91))[0]
    assert again["tokens"] == first.generate(prompt(91))[0]["tokens"]
    assert second.metric("vllm:kvstore_load_failures") == 1
    first.stop()
    second.stop()


def test_recurrent_states_beside_full_attention(daemon: Daemon, models: Models, engines: Callable[..., Engine]) -> None:
    """A linear attention's state at the end of a block stands for the whole prefix before it."""
    options: dict[str, Any] = {
        "of": models("states"),
        "dtype": "bfloat16",  # the CPU build's kernels know nothing else
        "block_size": None,  # vLLM makes blocks as large as a state
        "num_gpu_blocks_override": 100,
    }
    extra = {"kvstore.endpoint": daemon.endpoint, "block_size": None}
    engine = engines("states", extra, **options).ready()
    whole = prompt(95, 1000)

    def stores() -> bool:
        engine.generate(prompt(next(seeds), 1000), max_tokens=2)
        return daemon.stored_blocks() > empty

    empty, seeds = daemon.stored_blocks(), itertools.count(7000)
    wait_until("the engine stores", stores, 60)
    wait_until("nothing is under way", lambda: daemon.stats()["reserved_slots"] == 0)
    before = daemon.stored_blocks()
    engine.generate(whole)
    wait_until("attention and states are stored", lambda: daemon.stored_blocks() >= before + 3)
    # In two bytes a token may differ where a prompt is computed in other steps, with or without a cache: what is loaded
    # is compared with what the engine finds in its own.
    own = engine.generate(whole)[0]
    engine.forget_local()
    hits = engine.external_hits()
    loaded = engine.generate(whole)[0]
    assert engine.external_hits() - hits == loaded["cached"] == own["cached"] > 0
    assert loaded["tokens"] == own["tokens"]
    assert engine.metric("vllm:kvstore_load_failures") == engine.metric("vllm:kvstore_hook_errors") == 0
