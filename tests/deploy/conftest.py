"""The services of docker-compose.yml as processes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.compose import Composed


@pytest.fixture
def composed() -> Iterator[Composed]:
    # Not tmp_path: a socket's path is short.
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        composed = Composed(Path(folder))
        yield composed
        composed.down()
