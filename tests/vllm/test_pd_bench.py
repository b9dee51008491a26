"""`python -m bench.pd_latency` in a small size: it runs, and its answers came through kvstore."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.harness import ROOT


@pytest.mark.timeout(600)
def test_smoke() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "bench.pd_latency", "--smoke"], cwd=ROOT, capture_output=True, text=True, timeout=580
    )
    assert run.returncode == 0, run.stderr[-4000:]
    line = json.loads(run.stdout.splitlines()[-1])
    assert line["bench"] == "pd_latency"
    figures = line["figures"]
    for role in ("decode", "mixed"):
        assert all(0 < p50 <= p99 for p50, p99 in zip(figures[role]["p50_s"], figures[role]["p99_s"], strict=True))
        assert figures[role]["prompts"] >= 1 and figures[role]["p99_ratio"][0] > 0
    # Prompts that went over the router, in a round that warms and in one that counts: all of their whole blocks were
    # loaded by the decode instance.
    assert figures["loaded_tokens"] == 2 * 2 * 512
