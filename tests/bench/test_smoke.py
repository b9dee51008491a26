"""A small size of each bench, so that none of them rots. What they measure is not judged here, but must be figures."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import BENCHES
from bench.harness import ROOT
from kvstore.arena import BOOKKEEPING_BYTES

#: What some need beside this package.
PROGRAMS = {"disk": ["fio"], "redis": ["redis-server", "redis-benchmark"]}


def run(bench: str, *arguments: str) -> dict[str, Any]:
    """Runs a bench at its smallest; returns its line of JSON."""
    command = [sys.executable, "-m", f"bench.{bench}", "--smoke", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
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


def check_directory(figures: dict[str, Any]) -> None:
    # Memory is not a matter of load. A small directory pays for what the process takes once, hence the factor.
    assert figures["bytes_per_block"] < 2 * BOOKKEEPING_BYTES
    assert figures["bytes_per_block_told"] < BOOKKEEPING_BYTES


def check_disk(figures: dict[str, Any]) -> None:
    for way in ("write", "read"):
        for size in ("8192 KiB", "64 KiB"):
            cases = [figure for name, figure in figures.items() if name.startswith(f"{way} {size} ")]
            assert len(cases) == 2 or "4k" in str(list(figures)), figures
            assert all(case["ratio"][0] > 0 and case["cpu_s_per_gib"][0] > 0 for case in cases)
    assert figures["restart"]["entries"] == 10_000 and figures["restart"]["ready_s"] > 0


def check_redis(figures: dict[str, Any]) -> None:
    assert figures.keys() == {"get_4m", "set_4m", "get_8m", "set_8m", "get_64k", "set_64k"}
    for what, some in figures.items():
        expected = {"over_plain", "over_hiredis", "of_bare", "bare_over_plain"}
        if what.endswith("64k"):
            expected = {"of_redis_benchmark"}
        elif what.startswith("set"):
            expected |= {"most_over_plain"}
        assert some.keys() == expected
        assert all(low <= median <= high and low > 0 for median, low, high in some.values())


#: What they promise to say.
CHECKS = {"directory": check_directory, "disk": check_disk, "redis": check_redis}


@pytest.mark.parametrize("bench", BENCHES)
def test_it_runs_and_gives_figures(bench: str, tmp_path: Path) -> None:
    if missing := [program for program in PROGRAMS.get(bench, []) if shutil.which(program) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    line = run(bench, *(["--folder", str(tmp_path)] if bench == "disk" else []))
    assert line["bench"] == bench
    assert {"cpu", "kernel", "python", "date"} <= line["machine"].keys()
    found = list(numbers(line["figures"]))
    assert found and all(math.isfinite(number) and number >= 0 for number in found)
    if bench in CHECKS:
        CHECKS[bench](line["figures"])
    assert list(tmp_path.iterdir()) == [], "something was left behind"
