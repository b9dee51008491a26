"""A small size of each bench, so that none of them rots. What they measure is not judged here, but must be figures."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from bench.__main__ import BENCHES
from bench.harness import ROOT
from kvstore.arena import BOOKKEEPING_BYTES


def run(bench: str) -> dict[str, Any]:
    """Runs a bench at its smallest; returns its line of JSON."""
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{bench}", "--smoke"], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return line


def numbers(tree: Any) -> Iterator[float]:
    """Every number in a tree of JSON."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from numbers(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from numbers(value)
    elif isinstance(tree, (int, float)):
        yield float(tree)


@pytest.mark.parametrize("bench", BENCHES)
def test_it_runs_and_gives_figures(bench: str) -> None:
    line = run(bench)
    assert line["bench"] == bench
    assert {"cpu", "kernel", "python", "date"} <= line["machine"].keys()
    found = list(numbers(line["figures"]))
    assert found and all(math.isfinite(number) and number >= 0 for number in found)
    if bench == "directory":
        # Memory is not a matter of load. A small directory pays for what the process takes once, hence the factor.
        assert line["figures"]["bytes_per_block"] < 2 * BOOKKEEPING_BYTES
        assert line["figures"]["bytes_per_block_told"] < BOOKKEEPING_BYTES
