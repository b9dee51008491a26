"""Fixtures for tests with real engines.

Skipped as a whole where vLLM's CPU build is not installed (`make test-vllm` installs it).
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.harness import HERE, Daemon, Engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("vllm") is None
    if not missing and "kvstore" not in importlib.metadata.entry_points(group="vllm.general_plugins").names:
        raise pytest.UsageError("vLLM does not find kvstore's plugin: pip install --no-deps --editable . beside vLLM")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(600))
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make test-vllm installs it"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, str(HERE / "tiny_llama.py"), str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes models of other kinds than the usual one (see tiny_models.py), once each."""

    @functools.cache
    def write(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        subprocess.run(
            [sys.executable, "-m", "tests.vllm.tiny_models", kind, str(folder)],
            check=True,
            capture_output=True,
            cwd=HERE.parent.parent,
        )
        return folder

    return write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    daemon = Daemon(folder)
    daemon.start()
    yield daemon
    daemon.stop()


@pytest.fixture(scope="module")
def engines(model: Path, folder: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines that end with the module."""
    made: list[Engine] = []

    def make(name: str, extra: dict[str, Any] | None, *, of: Path = model, **options: Any) -> Engine:
        made.append(Engine(of, folder, name, extra, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.stop()


@pytest.fixture(scope="session")
def answers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[list[int]], list[int]]]:
    """What an engine without the plugin answers to a prompt."""
    engine = Engine(model, tmp_path_factory.mktemp("plain"), "plain", None).ready()

    def answer(tokens: list[int]) -> list[int]:
        found: list[int] = engine.generate(tokens)[0]["tokens"]
        return found

    yield answer
    engine.stop()
