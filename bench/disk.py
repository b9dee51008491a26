"""The disk tier beside fio: blocks of 8 MiB and 64 KiB, from and to a pool on huge pages and on pages of 4 KiB; and how
long a start with a million blocks takes.

fio runs io_uring, queue depth 4, O_DIRECT, over a file that was written before, on the same file system, in the same
rounds, with buffers on the same kind of pages (a file on a tmpfs with huge pages, or plain memory). Ours overwrites
extents that were written before, and hashes every byte on both ways; no side syncs within the time, and the sync that
follows ours is shown beside it. A device that is shared with others varies by more than the two differ, so look at the
ratios within the rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import numpy as np
import xxhash
from rich.progress import Progress

from bench.harness import Ratio, Report, heap_bytes
from kvstore.backing import HugePages, SharedMemory, open_pool_memory
from kvstore.clock import SystemClock
from kvstore.tier import ReadOutcome, WriteOutcome, tier_key
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_index import RECORD, write_index
from kvstore.tiers.disk_load import map_bytes_for
from kvstore.tiers.extent import extent_bytes_for

_GOALS: Final = {8 << 20: 0.9, 64 << 10: 0.6}
_READY_GOAL_S: Final = 2.0
_ENTRY_GOAL_BYTES: Final = 400
_DEADLINE_S: Final = 120.0


@dataclasses.dataclass(slots=True)
class Measured:
    """One way of one side in one round.

    Attributes:
        rate: Bytes per second.
        cpu_s_per_gib: Seconds of processor for each GiB.
    """

    rate: float
    cpu_s_per_gib: float


class Ours:
    """A tier with all its extents written before, and a pool to move from and to."""

    def __init__(self, folder: Path, block_bytes: int, total_bytes: int, huge_pages: HugePages) -> None:
        self.block_bytes = block_bytes
        self.count = total_bytes // block_bytes
        stride = extent_bytes_for(block_bytes)
        capacity = int(self.count * stride * 1.1) + (16 << 20)
        self.tier = DiskTier(folder, capacity, SystemClock(), write_queue_bytes=1 << 40, prewrite=False)
        self.memory: SharedMemory = open_pool_memory(total_bytes, huge_pages)
        self.memory.populate(0, total_bytes)
        np.frombuffer(self.memory.buffer, dtype=np.uint64)[:] = np.arange(total_bytes // 8, dtype=np.uint64)
        self._rounds = itertools.count()
        self.sync_s: list[float] = []

    async def open(self) -> None:
        await self.tier.open()
        await self.tier.wait_loaded()
        await self.round()  # every extent is written once
        self.sync_s.clear()

    async def round(self) -> tuple[Measured, Measured]:
        """Writes all blocks under new names, reads them, forgets them."""
        number = next(self._rounds)
        blocks = [
            (
                tier_key(b"bench disk tier!", 0, (number << 32 | index).to_bytes(32, "big")),
                self.memory.buffer[index * self.block_bytes : (index + 1) * self.block_bytes],
            )
            for index in range(self.count)
        ]
        with self._measured() as written:
            stored = await self.tier.write(blocks, _DEADLINE_S)
        assert set(stored) == {WriteOutcome.STORED}
        begin = time.perf_counter()
        assert await self.tier.sync()
        self.sync_s.append(time.perf_counter() - begin)
        with self._measured() as read:
            loaded = await self.tier.read(blocks, _DEADLINE_S)
        assert set(loaded) == {ReadOutcome.OK}
        await self.tier.delete([key for key, _ in blocks])
        return written, read

    def hash_s_per_gib(self) -> float:
        """What the checksums of one way cost by themselves."""
        begin = time.process_time()
        for at in range(0, self.count * self.block_bytes, self.block_bytes):
            xxhash.xxh3_64_intdigest(self.memory.buffer[at : at + self.block_bytes])
        return (time.process_time() - begin) / (self.count * self.block_bytes / 2**30)

    @contextlib.contextmanager
    def _measured(self) -> Iterator[Measured]:
        result = Measured(0.0, 0.0)
        total = self.count * self.block_bytes
        cpu, begin = time.process_time(), time.perf_counter()
        yield result
        result.rate = total / (time.perf_counter() - begin)
        result.cpu_s_per_gib = (time.process_time() - cpu) / (total / 2**30)


def fio(file: Path, way: str, block_bytes: int, total_bytes: int, memory: str) -> Measured:
    """One pass over the file."""
    command = ["fio", "--name=bench", f"--filename={file}", f"--rw={way}", f"--bs={block_bytes}"]
    command += [f"--size={total_bytes}", "--ioengine=io_uring", "--iodepth=4", "--direct=1", f"--mem={memory}"]
    command += ["--overwrite=1", "--invalidate=0", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    assert job["error"] == 0
    seconds = job[way]["runtime"] / 1000
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    # By the bytes and the time with its fractions: the runtime of a pass is in whole milliseconds.
    return Measured(job[way]["io_bytes"] / max(seconds, 0.001), cpu_s / (total_bytes / 2**30))


@contextlib.contextmanager
def huge_tmpfs(folder: Path) -> Iterator[Path | None]:
    """A file on huge pages for fio's buffers; None where this user may not mount a tmpfs of that kind."""
    point = folder / "huge"
    point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "huge=always,size=512m", "kvstore-bench", str(point)]
    if subprocess.run(mount, capture_output=True).returncode:
        yield None
        return
    try:
        # fio maps the file and never gives it a length: 4 buffers, and room for their alignment.
        with (point / "buffers").open("wb") as file:
            file.truncate(4 * max(_GOALS) + (4 << 20))
        yield point / "buffers"
    finally:
        subprocess.run(["umount", str(point)], check=True)


#: By kind of pages, way and side, a figure for each round.
Results = dict[tuple[HugePages, str, str], list[Measured]]


async def compare(report: Report, folder: Path, block_bytes: int, total_bytes: int, setups: int, rounds: int) -> None:
    """Ours and fio in turn, for both kinds of pages.

    Files and memory are made anew for each of the set-ups: where they come to lie changes either side by a third, and
    stays as it is for as long as they live.
    """
    results: Results = {}
    hashing: list[float] = []
    sides: dict[HugePages, Ours] = {}
    with Progress(transient=True) as progress:
        for _ in progress.track(range(setups), description=f"blocks of {block_bytes >> 10} KiB"):
            sides, fio_has_huge = await _setup(folder, block_bytes, total_bytes, rounds, results, hashing)
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
    for kind, ours in sides.items():
        _report(report, kind, ours, results, fio_has_huge)
    report.notes.append(
        f"{block_bytes >> 10} KiB: of ours, xxh3 of the bytes takes {statistics.median(hashing):.3f} s of CPU per GiB"
    )


async def _setup(
    folder: Path, block_bytes: int, total_bytes: int, rounds: int, results: Results, hashing: list[float]
) -> tuple[dict[HugePages, Ours], bool]:
    file = folder / "fio.dat"
    fio(file, "write", 1 << 20, total_bytes, "malloc")
    with huge_tmpfs(folder) as huge:
        memories: dict[HugePages, str] = {"auto": f"mmapshared:{huge}" if huge else "malloc", "off": "malloc"}
        sides = {kind: Ours(folder / f"tier-{kind}", block_bytes, total_bytes, kind) for kind in memories}
        for ours in sides.values():
            await ours.open()
        for number in range(rounds):
            # The order changes, so that nobody always runs after the same neighbour.
            for kind in list(memories) if number % 2 else list(memories)[::-1]:
                for side in ("fio", "ours") if number // 2 % 2 else ("ours", "fio"):
                    if side == "ours":
                        written, read = await sides[kind].round()
                    else:
                        written, read = (
                            fio(file, way, block_bytes, total_bytes, memories[kind]) for way in ("write", "read")
                        )
                    results.setdefault((kind, "write", side), []).append(written)
                    results.setdefault((kind, "read", side), []).append(read)
                hashing.append(sides[kind].hash_s_per_gib())
        for ours in sides.values():
            await ours.tier.close()
            ours.memory.buffer.release()
    return sides, huge is not None


def _report(
    report: Report,
    kind: HugePages,
    ours: Ours,
    results: Results,
    fio_has_huge: bool,
) -> None:
    backing = ours.memory.backing.kind
    size = f"{ours.block_bytes >> 10} KiB"
    for way in ("write", "read"):
        mine, theirs = results[kind, way, "ours"], results[kind, way, "fio"]
        ratio = Ratio.of([one.rate for one in mine], [one.rate for one in theirs])
        cpu = statistics.median(one.cpu_s_per_gib for one in mine)
        fio_cpu = statistics.median(one.cpu_s_per_gib for one in theirs)
        # The goal is for pools as they should be.
        goal = "" if kind == "off" else report.goal(f"{way} {size}", ratio.median, at_least=_GOALS[ours.block_bytes])
        report.rows.append(
            (
                f"{way} {size}, pool on {backing}",
                f"{statistics.median(one.rate for one in mine) / 1e9:.2f}",
                f"{statistics.median(one.rate for one in theirs) / 1e9:.2f}",
                str(ratio),
                f"{cpu:.3f} / {fio_cpu:.3f}",
                goal,
            )
        )
        report.figures[f"{way} {size} {backing}"] = {
            "ratio": ratio.as_json(),
            "cpu_s_per_gib": [round(cpu, 4), round(fio_cpu, 4)],
            "rounds": [[round(a.rate / 1e9, 3), round(b.rate / 1e9, 3)] for a, b in zip(mine, theirs, strict=True)],
        }
    report.notes.append(f"{size}, pool on {backing}: sync after a round {statistics.median(ours.sync_s) * 1e3:.0f} ms")
    if kind != "off" and not fio_has_huge:
        report.notes.append("fio's buffers were on 4 KiB pages: this user may not mount a tmpfs with huge pages")


async def restart(report: Report, folder: Path, entries: int, rounds: int) -> None:
    """Starts over an index of so many blocks. Their slabs are sparse: nothing reads a block at the start."""
    capacity = entries * 10_000 + (64 << 20)
    tier = DiskTier(folder / "tier", capacity, SystemClock())
    await tier.open()
    await tier.wait_loaded()
    await tier.close()
    slabs = 16
    each = -(-entries // slabs)
    for number in range(1, slabs + 1):
        with (folder / "tier" / f"slab-{number:08x}-8192.kv").open("wb") as file:
            file.truncate(each * 8192)
    records = [
        (
            tier_key(b"bench disk tier!", 0, os.urandom(32)),
            RECORD.pack(index // each + 1, index % each, 4096, index + 2),
        )
        for index in range(entries)
    ]
    write_index(folder / "tier" / "index", records, [], map_bytes_for(capacity))
    data = folder / "tier" / "index" / "data.mdb"
    ready, cpu, bare, heap = [], [], [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        data.read_bytes()
        bare.append(time.perf_counter() - begin)
        before = heap_bytes()
        tier = DiskTier(folder / "tier", capacity, SystemClock(), prewrite=False)
        cpu_begin, begin = time.process_time(), time.perf_counter()
        await tier.open()
        await tier.wait_loaded()
        ready.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - cpu_begin)
        heap.append((heap_bytes() - before) / entries)
        assert tier.stats()["blocks"] == entries
        await tier.close()
        del tier
    ratio = Ratio.of(ready, bare)
    goal = report.goal(f"ready with {entries} blocks", statistics.median(ready), at_most=_READY_GOAL_S)
    report.rows.append(
        (
            f"ready with {entries} blocks",
            f"{statistics.median(ready):.2f} s",
            f"{statistics.median(bare):.3f} s",
            str(ratio),
            f"{statistics.median(cpu):.2f} s",
            goal,
        )
    )
    report.notes.append(f"beside it: reading the index file ({data.stat().st_size >> 20} MiB) from the page cache")
    if entries >= 100_000:  # below, what Python allocates anyway is in the figure
        report.goal("heap per block", heap[0], at_most=_ENTRY_GOAL_BYTES)
    report.notes.append(f"heap per block: {heap[0]:.0f} bytes")
    report.figures["restart"] = {
        "entries": entries,
        "ready_s": round(statistics.median(ready), 3),
        "cpu_s": round(statistics.median(cpu), 3),
        "to_reading": ratio.as_json(),
        "heap_bytes_per_block": round(heap[0]),
    }
    shutil.rmtree(folder / "tier")


@click.command()
@click.option("--smoke", is_flag=True, help="Few bytes, one round.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="On the device to measure.")
def main(smoke: bool, folder: Path | None) -> None:
    """The disk tier beside fio."""
    if shutil.which("fio") is None:
        raise SystemExit("fio is needed: apt-get install fio")
    report = Report("disk", ("case", "ours GB/s", "fio GB/s", "ratio", "cpu s/GiB, ours / fio", "goal"))
    setups, rounds = (1, 1) if smoke else (5, 4)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=folder) as name:
        place = Path(name)
        for block_bytes in _GOALS:
            total_bytes = (32 << 20) if smoke else (512 << 20) if block_bytes > 1 << 20 else (256 << 20)
            asyncio.run(compare(report, place, block_bytes, total_bytes, setups, rounds))
        asyncio.run(restart(report, place, 10_000 if smoke else 1_000_000, 1 if smoke else 5))
    report.show()


if __name__ == "__main__":
    main()
