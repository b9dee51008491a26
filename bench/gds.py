"""Blocks on disk into GPU memory: past the pool (kvikio), beside through the pool. Needs a CUDA GPU and a disk.

A daemon has more blocks on its disk than its pool holds; those that are loaded are not in the pool. Its disk tier
reads with O_DIRECT and so does kvikio, so that no page cache is in between: every byte comes from the disk. Each side
takes other blocks, sides in turn.

    past the pool      one call leases the blocks; they are read, checked on the GPU, and copied to their pages
    through the pool   the daemon brings them up and checks them; then the copy engine loads them from registered memory
    O_DIRECT           the disk alone: 16 threads read leased blocks into host memory with preadv, unchecked

The time is from asking the daemon until every page is in place. All bytes are compared in the first two rounds; past
the pool every block's checksum is compared always, and a wrong one ends the bench.

Each load is printed when it is through; after --limit-s those until then count. About a minute with a disk of 1.7 GB/s.
--device cpu is a dry run: KV memory on the host, and files read by threads.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch

import kvstore
from bench.harness import Ratio, Report, in_turn, start_daemon, time_limit, wait_populated
from engine_plugin.copy.contract import CopyEngine, Fragments
from engine_plugin.copy.gds import THREADS, open_reads
from engine_plugin.copy.reads import DirectReads

_LAYERS: Final = 32
_PAGE: Final = 256 << 10  # of 64 tokens, as Llama-3-8B has them
_BLOCK_BYTES: Final = _LAYERS * _PAGE
_ASK_AGAIN_S: Final = 0.002
#: Longest wait for what was stored to be on the disk, or to be found there after a restart.
_DISK_S: Final = 30.0


class Bench:
    """KV memory for one load, and the ways into it."""

    def __init__(self, client: kvstore.Client, blocks: int, chunks: list[list[int]], seed: int, device: str) -> None:
        self.client = client
        self.blocks = blocks
        self.chunks = chunks
        self.seed = seed
        self.compare = 4
        self.kv = torch.zeros((_LAYERS, 2 * blocks, _PAGE), dtype=torch.uint8, device=device)
        rows = np.random.default_rng(0).permutation(2 * blocks)[:blocks].astype(np.uint64)
        self._rows = torch.from_numpy(rows.astype(np.int64)).to(device)
        layers = np.arange(_LAYERS, dtype=np.uint64)[None]
        page = np.uint64(_PAGE)
        self._kv = np.uint64(self.kv.data_ptr()) + (layers * np.uint64(2 * blocks) + rows[:, None]) * page
        self._places = np.broadcast_to(layers * page, self._kv.shape)
        self._sizes = np.full(self._kv.size, _PAGE, np.uint64)
        self.engine, self.reads = _parts(device)
        self._synchronize: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else _nothing
        self.engine.use_pool(client.arena)
        while self.engine.stats().registering:
            time.sleep(0.01)
        if self.engine.stats().register_error:
            raise SystemExit(self.engine.stats().register_error)
        self._buffers = [mmap.mmap(-1, _BLOCK_BYTES) for _ in range(THREADS)]

    def _fragments(self, starts: np.ndarray) -> Fragments:
        return Fragments(self._kv.ravel(), (starts[:, None] + self._places).ravel(), self._sizes)

    def _check(self, numbers: Sequence[int]) -> None:
        if not self.compare:
            return
        self.compare -= 1
        for place, number in enumerate(numbers):
            found = self.kv[:, self._rows[place]].reshape(-1).cpu().numpy()
            assert np.array_equal(found, content_of(number, self.seed)), "wrong bytes"

    def past(self) -> float:
        """Seconds of one load past the pool."""
        numbers = self.chunks.pop()
        self.kv.zero_()
        self._synchronize()
        started = time.perf_counter()
        (lease,) = self.client.acquire([(0, [key_of(number) for number in numbers])], extents_min=[1])
        assert len(lease.extents) == len(numbers), lease
        starts = np.arange(len(numbers), dtype=np.uint64) * np.uint64(_BLOCK_BYTES)
        job = self.reads.begin(lease.extents, self._fragments(starts), _must)
        self.reads.wait([job])
        took = time.perf_counter() - started
        self.client.release([lease])
        self._check(numbers)
        return took

    def through(self) -> float:
        """Seconds of one load through the pool."""
        numbers = self.chunks.pop()
        keys = [key_of(number) for number in numbers]
        self.kv.zero_()
        self._synchronize()
        started = time.perf_counter()
        while True:
            (lease,) = self.client.acquire([(0, keys)])
            if len(lease.offsets) == len(keys):
                break
            assert lease.pending, lease
            self.client.release([lease])
            time.sleep(_ASK_AGAIN_S)
        assert self.client.arena is not None
        starts = lease.offsets + np.uint64(self.client.arena.address)
        self.engine.wait([self.engine.load(self._fragments(starts), _must)])
        took = time.perf_counter() - started
        self.client.release([lease])
        self._check(numbers)
        return took

    def disk(self) -> float:
        """Seconds of reading one load's bytes with the CPU."""
        numbers = self.chunks.pop()
        with self.client.lease_extents([key_of(number) for number in numbers]) as extents:
            files = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in {e.path for e in extents.values()}}
            wanted = list(extents.values())

            def read(thread: int) -> None:
                for extent in wanted[thread::THREADS]:
                    got = os.preadv(files[extent.path], [self._buffers[thread]], extent.offset)
                    assert got == _BLOCK_BYTES, got

            started = time.perf_counter()
            with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
                list(threads.map(read, range(THREADS)))
            took = time.perf_counter() - started
            for file in files.values():
                os.close(file)
        return took

    def close(self) -> None:
        self.reads.close()
        self.engine.close()


def _parts(device: str) -> tuple[CopyEngine, DirectReads]:
    """What copies between KV memory and the pool, and what reads past it."""
    if device == "cuda":
        from engine_plugin.copy.cuda import CudaCopyEngine

        return CudaCopyEngine(device), open_reads(device, _BLOCK_BYTES, compat=True)
    from engine_plugin.copy.cpu import CpuCopyEngine
    from tests.plugin.host_reads import host_reads

    return CpuCopyEngine(2), host_reads(_BLOCK_BYTES)[0]


def _nothing() -> None: ...


def _must(_seconds: float, error: BaseException | None) -> None:
    if error is not None:
        print(f"a load failed: {error!r}", flush=True)
        os._exit(1)  # on a thread of the engine nobody would hear of an exception


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content_of(number: int, seed: int) -> np.ndarray:
    return np.random.default_rng((seed, number)).integers(0, 256, _BLOCK_BYTES, dtype=np.uint8)


def fill(client: kvstore.Client, count: int, seed: int) -> None:
    """Stores blocks and waits until all are on the disk."""
    with concurrent.futures.ThreadPoolExecutor() as threads:
        step = min(32, count // 21)  # less than the pool holds
        for first in range(0, count, step):
            numbers = range(first, min(count, first + step))
            blocks = list(threads.map(lambda number: content_of(number, seed), numbers))
            stored = client.insert([key_of(number) for number in numbers], [memoryview(b) for b in blocks]).wait(120)
            assert stored.stored == len(numbers), stored
            wait_on_disk(client, numbers[-1] + 1)


def wait_on_disk(client: kvstore.Client, count: int) -> None:
    """Returns when so many blocks are on the disk and can be read."""
    deadline = time.monotonic() + _DISK_S
    while (tier := client.stats()["tiers"][1])["blocks"] < count:
        if time.monotonic() > deadline:
            raise SystemExit(
                f"{tier['blocks']} of {count} blocks are on the disk, whose state is {tier['state']}: {tier['fault']}"
            )
        time.sleep(0.01)


@click.command()
@click.option("--smoke", is_flag=True, help="A small size, to see that it runs.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--rounds", default=8, show_default=True, help="Loads of each side.")
@click.option("--limit-s", default=240.0, show_default=True, help="After that it tells what it has.")
@click.option(
    "--dir", "folder", type=click.Path(file_okay=False), help="Where the disk is. Default: the temporary folder."
)
def main(smoke: bool, device: str, rounds: int, limit_s: float, folder: str | None) -> None:
    """Blocks on disk into GPU memory, past the pool and through it."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device")
    blocks = 32
    if smoke:
        blocks, rounds = 4, 2
    facts: dict[str, Any] = {"torch": torch.__version__, "nvidia_fs": Path("/proc/driver/nvidia-fs").exists()}
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    taken: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=folder))
        stack.enter_context(time_limit(limit_s))
        stack.callback(_show, taken, blocks, facts)  # before anything is ended
        _measure(Path(place), blocks, rounds, device, facts, taken)


def _measure(
    place: Path, blocks: int, rounds: int, device: str, facts: dict[str, Any], taken: dict[str, list[float]]
) -> None:
    seed, started = 1, time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}", flush=True)

    def told(name: str, load: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            seconds = load()
            taken.setdefault(name, []).append(seconds)
            say(f"{name:16s} {blocks * _BLOCK_BYTES / seconds / 1e9:6.2f} GB/s")
            return seconds

        return run

    endpoint = f"unix:{place}/kvstore.sock"
    count = blocks * 3 * (rounds + 1)
    in_pool = 6 * blocks  # a quarter of the pool is brought up at a time
    stored = count + 2 * in_pool  # the last ones push all others out of the pool
    flags = ("--disk-dir", f"{place}/disk", "--disk-bytes", str(int(stored * _BLOCK_BYTES * 1.3)))
    namespace = kvstore.Namespace(model="bench", dtype="bfloat16", block_size=64, block_bytes=_BLOCK_BYTES)
    with (
        start_daemon(in_pool * _BLOCK_BYTES, endpoint, *flags),
        kvstore.connect(endpoint, namespace, timeout_s=60) as client,
    ):
        wait_populated(client)
        say(f"storing {stored} blocks, {stored * _BLOCK_BYTES / 1e9:.1f} GB")
        fill(client, stored, seed)
        facts["filesystem"] = client.stats()["tiers"][1]["filesystem"]
        chunks = [list(range(first, first + blocks)) for first in range(0, count, blocks)]
        say("all of them are on the disk")
        bench = Bench(client, blocks, chunks, seed, device)
        facts["how"] = bench.reads.how
        say(f"ready to load, {bench.reads.how}")
        try:
            cases = {"past the pool": bench.past, "through the pool": bench.through, "O_DIRECT": bench.disk}
            in_turn({name: told(name, load) for name, load in cases.items()}, rounds)
        finally:
            bench.close()


def _show(taken: dict[str, list[float]], blocks: int, facts: dict[str, Any]) -> None:
    """The report of whole rounds, without the first one, which warms up."""
    report = Report("gds", ("case", "GB/s", "of O_DIRECT", "of through the pool"))
    rounds = min(map(len, taken.values())) if len(taken) == 3 else 0
    report.figures["rounds"] = max(0, rounds - 1)
    rates = {
        name: [blocks * _BLOCK_BYTES / seconds / 1e9 for seconds in each[1:rounds]] for name, each in taken.items()
    }
    for name, values in rates.items() if rounds > 1 else ():
        middle = sorted(values)[len(values) // 2]
        of_disk, of_pool = Ratio.of(values, rates["O_DIRECT"]), Ratio.of(values, rates["through the pool"])
        report.rows.append((name, f"{middle:.2f} [{min(values):.2f}..{max(values):.2f}]", str(of_disk), str(of_pool)))
        report.figures[name] = {"gb_s": round(middle, 3), "of_disk": of_disk.as_json(), "of_pool": of_pool.as_json()}
    report.notes.append(f"{blocks} blocks of 8 MiB a load, {_LAYERS * blocks} pages of 256 KiB in random order; cold.")
    report.show(facts)


if __name__ == "__main__":
    main()
