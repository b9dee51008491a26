"""The versions of vLLM that have no CPU build: the Python part of their package, without what is compiled.

Enough for signatures, imports, and the scheduler and worker with fakes, which is what runs here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = "0.33.0"
#: The whole package has some hundred megabytes, and travels once for each virtual environment.
DOWNLOAD_S = 240


@pytest.fixture(scope="module")
def other_vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with that version's Python files."""
    kept = Path(sys.prefix) / "other-vllm" / VERSION
    if not kept.exists():
        folder = tmp_path_factory.mktemp("download")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        try:
            subprocess.run(
                [*command, "--dest", str(folder), f"vllm=={VERSION}"],
                check=True,
                capture_output=True,
                text=True,
                timeout=DOWNLOAD_S,
            )
        except (subprocess.SubprocessError, OSError) as error:
            said = str(getattr(error, "stderr", "") or error).strip().splitlines()
            pytest.skip(f"vLLM {VERSION} cannot be had by pip: {said[-1] if said else error}")
        (wheel,) = folder.glob("vllm-*.whl")
        unpacked = tmp_path_factory.mktemp("unpacked")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked, [name for name in archive.namelist() if name.endswith((".py", "METADATA"))])
        wheel.unlink()
        kept.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", str(unpacked), str(kept)], check=True)
    return kept


def test_the_plugin_in_that_version(other_vllm: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{other_vllm}{os.pathsep}{ROOT}"}
    run = subprocess.run(
        [sys.executable, "-c", "import vllm; print(vllm.__version__, vllm.__file__)"],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert f"{VERSION} {other_vllm}" in run.stdout, run.stderr[-2000:]
    tests = ["tests/vllm/test_scheduler.py", "tests/vllm/test_worker.py"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    print(run.stdout[-3000:])
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout.splitlines()[-1]
