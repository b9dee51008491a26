"""The bench of what the plugin costs an engine runs, and its figures are figures."""

from __future__ import annotations

import json
import subprocess
import sys

from bench.harness import ROOT


def test_a_small_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.plugin", "--smoke"], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert 0 < figures["lookup"]["bare_us"] < figures["lookup"]["plugin_us"]
    assert figures["waiting"]["lookups_per_step"] <= 2  # of 2,048 keys
    assert figures["waiting"]["steps_per_s"] > 0
