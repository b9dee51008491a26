"""The bench of the Redis tier runs, and says what it promises to say."""

from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner

from bench.redis import main


@pytest.mark.skipif(
    shutil.which("redis-server") is None or shutil.which("redis-benchmark") is None,
    reason="redis-server or redis-benchmark is not installed",
)
def test_the_bench_runs() -> None:
    result = CliRunner().invoke(main, ["--smoke"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    assert line["bench"] == "redis"
    assert line["figures"].keys() == {"get_4m", "set_4m", "get_8m", "set_8m", "get_64k", "set_64k"}
    for what, figures in line["figures"].items():
        expected = {"over_plain", "over_hiredis", "of_bare", "bare_over_plain"}
        if what.endswith("64k"):
            expected = {"of_redis_benchmark"}
        elif what.startswith("set"):
            expected |= {"most_over_plain"}
        assert figures.keys() == expected
        assert all(low <= median <= high and low > 0 for median, low, high in figures.values())
