"""The bench of the disk tier runs, and says what it promises to say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.disk import main


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_a_small_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--smoke", "--folder", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    figures = line["figures"]
    for way in ("write", "read"):
        for size in ("8192 KiB", "64 KiB"):
            cases = [figure for name, figure in figures.items() if name.startswith(f"{way} {size} ")]
            assert len(cases) == 2 or "4k" in str(list(figures)), figures
            assert all(case["ratio"][0] > 0 and case["cpu_s_per_gib"][0] > 0 for case in cases)
    assert figures["restart"]["entries"] == 10_000 and figures["restart"]["ready_s"] > 0
    assert list(tmp_path.iterdir()) == [], "something was left behind"
