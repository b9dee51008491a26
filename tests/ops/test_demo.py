"""The main job without engines, at its smoke size."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.conversations import Shape, block_content, chained_keys, script
from tests.ops.conftest import clean_environ

ROOT = Path(__file__).parents[2]
SMALL = Shape(conversations=3, turns=3, system_prompts=2, system_tokens=128)


@pytest.mark.slow
def test_the_demo_at_its_smoke_size() -> None:
    sizes = ["--conversations", "2", "--turns", "3", "--cpu-bytes", "64MiB", "--block-bytes", "64KiB"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.demo", *sizes],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        env=clean_environ(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    assert rows["wrong blocks"].split()[2:] == ["0", "0"]
    # The pool holds everything, so the decode process finds all that was prefilled.
    assert rows["hit ratio"].split()[-1] == "100.0%"
    assert "6 of 6 turns" in done.stdout
    assert "nothing is held" in done.stdout
    assert "\x1b" not in done.stdout
    # The tiers below: all from disk after a restart, all from Redis at another daemon, or why not.
    after = rows["after its restart"].split()[3:]
    assert int(after[0]) == int(after[2]) + int(after[3]) > 0 and after[1] == after[4] == "0" != after[3]
    if shutil.which("redis-server"):
        other = rows["another daemon, another disk"].split()[4:]
        assert other[0] == other[4] and other[1] == other[2] == other[3] == "0"
    else:
        assert "redis-server is not installed" in done.stdout


def test_the_demo_refuses_a_pool_that_cannot_be() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.demo", "--cpu-bytes", "1MB"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        env=clean_environ(),
    )
    assert done.returncode == 1
    assert "cpu_bytes" in done.stderr


def test_a_seed_gives_the_same_script_each_time_and_another_seed_another_one() -> None:
    first, again, other = (list(script(seed, SMALL)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == SMALL.conversations * SMALL.turns


def test_a_prompt_continues_the_conversation_and_system_prompts_are_shared() -> None:
    turns = list(script(7, SMALL))
    by_conversation = {index: [turn for turn in turns if turn.conversation == index] for index in range(3)}
    for conversation in by_conversation.values():
        for earlier, later in itertools.pairwise(conversation):
            history = earlier.prompt + earlier.answer
            assert later.prompt[: len(history)] == history
    start = SMALL.system_tokens
    assert by_conversation[0][0].prompt[:start] == by_conversation[2][0].prompt[:start]
    assert by_conversation[0][0].prompt[:start] != by_conversation[1][0].prompt[:start]


def test_keys_are_chained() -> None:
    tokens = list(range(100))
    keys = chained_keys(tokens, 16)
    assert len(keys) == 6, "only full blocks have a key"
    assert chained_keys(tokens[:32], 16) == keys[:2]
    changed = chained_keys([99, *tokens[1:]], 16)
    assert not set(changed) & set(keys), "a change at the start changes every key after it"


def test_content_follows_from_the_key() -> None:
    first, again, other = (block_content(key, 1001) for key in (b"a" * 32, b"a" * 32, b"b" * 32))
    assert first.nbytes == 1001
    assert np.array_equal(first, again)
    assert np.count_nonzero(first == other) < 50
