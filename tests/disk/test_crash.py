"""SIGKILL at any moment: what is served afterwards is right, and what was synced is there."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.testing.data import make_block
from kvstore.tier import ReadOutcome
from tests.disk.crash_child import CAPACITY_BYTES, NAMES, POINTS, key_of, size_of
from tests.disk.media import opened

ROOT = Path(__file__).parents[2]
#: A child that was not killed within this many lines is killed by the test. Enough for evictions to be under way.
LINES_MAX = 3000
#: How often a point may be passed before it kills, where it is passed often.
COUNTS = {
    "torn payload": 20,
    "before sync": 20,
    "after sync": 20,
    "after commit": 20,
    "marking": 20,
    "evicting": 40,
    "loading": 60,
}


class Directory:
    """A directory that lives through many processes, and what it must and may hold.

    Attributes:
        must: Blocks that were synced.
        may: Blocks that may be there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.must: set[bytes] = set()
        self.may: set[bytes] = set()

    def run_and_kill(self, point: str, count: int, seed: int, lines_max: int) -> bool:
        """Has a process work until it kills itself, or until it has said so many lines. Whether it killed itself."""
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.disk.crash_child", str(self.path), point, str(count), str(seed)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None and process.stderr is not None
        lines = 0
        with process:
            for line in process.stdout:
                if line.endswith(b"\n"):
                    self._hear(line.decode().split())
                lines += 1
                if lines == lines_max:
                    process.send_signal(signal.SIGKILL)
            errors = process.stderr.read().decode()
        assert process.returncode == -signal.SIGKILL, errors
        return lines < lines_max

    def _hear(self, words: list[str]) -> None:
        if words[0] == "ready":
            return
        key = bytes.fromhex(words[1])
        if words[0] == "W":
            self.may.add(key)
        elif words[0] == "S":
            self.must.add(key)
        else:
            self.must.discard(key)
            if words[0] == "D":
                self.may.discard(key)

    async def check(self, *, rebuilt: bool = False) -> None:
        """Opens it here and reads all of it."""
        keys = [key_of(number) for number in range(NAMES)]
        sizes = [size_of(number) for number in range(NAMES)]
        async with opened(self.path, CAPACITY_BYTES, prewrite=False) as tier:
            stats = tier.stats()
            assert bool(stats["index_rebuilt"]) == rebuilt
            assert stats["charged_bytes"] <= CAPACITY_BYTES
            there = {key for key, size in zip(keys, await tier.stat(keys), strict=True) if size is not None}
            assert not self.must - there, "a synced block is gone"
            assert not there - self.may, "a deleted block is back"
            buffers = [memoryview(bytearray(size)) for size in sizes]
            outcomes = await tier.read(list(zip(keys, buffers, strict=True)), 60)
            for key, size, buffer, outcome in zip(keys, sizes, buffers, outcomes, strict=True):
                assert outcome is (ReadOutcome.OK if key in there else ReadOutcome.ABSENT)
                assert outcome is ReadOutcome.ABSENT or buffer == make_block(key, size), "wrong bytes were handed out"
        self.must = set(there)
        self.may = set(there)


async def live_and_die(path: Path, points: Sequence[str], seed: int) -> None:
    """Kills of one directory: at each of the points, and each time at random afterwards."""
    rng = random.Random(seed)
    directory = Directory(path)
    for point in points:
        if point == "loading" and (path / "index").exists():
            shutil.rmtree(path / "index")  # so that loading reads footers; what was deleted stays away all the same
        at_point = directory.run_and_kill(point, rng.randint(1, COUNTS.get(point, 1)), rng.getrandbits(32), LINES_MAX)
        assert at_point, f"the process never came to {point!r}"
        await directory.check(rebuilt=point == "loading")
        directory.run_and_kill("nowhere", 1, rng.getrandbits(32), rng.randint(1, LINES_MAX))
        await directory.check()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("seed", "half"), [(0, POINTS[:5]), (1, POINTS[5:])], ids=["writing", "keeping"])
async def test_a_kill_at_each_point_and_as_many_at_random(seed: int, half: tuple[str, ...]) -> None:
    # In memory: what a killed process has written is kept by the kernel either way, and syncing costs nothing there.
    with tempfile.TemporaryDirectory(prefix="kvstore-test-", dir="/dev/shm") as folder:
        await live_and_die(Path(folder) / "disk", half, seed)


@pytest.mark.crash
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(100, 116))
async def test_three_hundred_and_twenty_kills(tmp_path: Path, seed: int) -> None:
    points = list(POINTS)
    random.Random(seed).shuffle(points)
    if points[0] == "loading":  # nothing is there yet that could be loaded
        points.append(points.pop(0))
    await live_and_die(tmp_path / "disk", points, seed)
