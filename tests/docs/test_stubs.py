from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUBS = ROOT / "kvstore/wire/v1"


def documented_command() -> list[str]:
    """What `make stubs` runs, so that this test and the Makefile cannot differ."""
    match = re.search(r"-m (grpc_tools\.protoc .+?(?<!\\))\n", (ROOT / "Makefile").read_text(), re.DOTALL)
    assert match is not None
    return match[1].replace("\\\n", " ").split()


def test_the_generated_stubs_are_those_of_the_protocol(tmp_path: Path) -> None:
    command = [argument.replace("_out=.", f"_out={tmp_path}") for argument in documented_command()]
    subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True, timeout=60)
    made = {path.name: path.read_text() for path in (tmp_path / "kvstore/wire/v1").iterdir()}
    assert set(made) == {f"{stem}_pb2{end}" for stem in ("admin", "engine") for end in (".py", ".pyi", "_grpc.py")}
    for name, text in made.items():
        assert (STUBS / name).read_text() == text, f"{name} is stale: run `make stubs`"


@pytest.mark.parametrize(
    ("distribution", "pattern"),
    [("grpcio", r"GRPC_GENERATED_VERSION = '([\d.]+)'"), ("protobuf", r"Protobuf Python Version: ([\d.]+)")],
)
def test_the_lower_bounds_are_the_versions_the_stubs_ask_for(distribution: str, pattern: str) -> None:
    asked = {match for path in STUBS.glob("*.py") for match in re.findall(pattern, path.read_text())}
    assert len(asked) == 1
    assert f'"{distribution}>={asked.pop()}"' in (ROOT / "pyproject.toml").read_text()
    assert metadata.version(distribution)
