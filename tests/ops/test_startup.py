"""Start-up time is a promise of `serve`; what is not imported takes none."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"grpc", "numpy", "prometheus_client", "pydantic", "redis", "rich", "structlog", "torch"}


def imported_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return HEAVY & set(done.stdout.split())


@pytest.mark.parametrize(
    ("code", "needed"),
    [
        ("import kvstore", set()),
        ("import kvstore.cli", set()),
        ("import kvstore.errors, kvstore.blocks, kvstore.endpoint", set()),
        ("import kvstore.cli_serve", {"pydantic"}),
        ("import kvstore.client", {"grpc", "numpy"}),
    ],
)
def test_what_an_import_brings_along(code: str, needed: set[str]) -> None:
    assert imported_by(code) <= needed
