"""Dry runs of benches that are made for a GPU, on this host: what they would lose a GPU machine's time by is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from bench.harness import ROOT
from tests.vllm.harness import engine_environment


def run(*command: str) -> tuple[dict[str, Any], str]:
    """Gives a bench's line of JSON, and all that it printed."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, **engine_environment()},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"bench"')]
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures, done.stdout


def test_loads_past_the_pool_and_through_it() -> None:
    line, told = run("bench.gds", "--smoke", "--device", "cpu")
    figures = line["figures"]
    assert figures["rounds"] == 2
    for case in ("past the pool", "through the pool", "O_DIRECT"):
        assert figures[case]["gb_s"] > 0 and figures[case]["of_pool"][0] > 0
        assert told.count(f"{case:16s} ") >= 3  # as it went


def test_one_that_is_broken_off_tells_what_it_has() -> None:
    line, told = run("bench.gds", "--device", "cpu", "--smoke", "--limit-s", "0.3")
    assert "broken off" in told and line["figures"]["rounds"] == 0


def test_tokens_after_a_load_are_those_after_a_prefix_hit() -> None:
    line, told = run("bench.gpu_exact", "--smoke", "--limit-s", "300")
    assert line["figures"] == {"tried": 2, "whole": 2, "equal": 2, "told_apart": 2}, told
    assert line["misses"] == [] and "1 of 1 equal" in told
