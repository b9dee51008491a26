"""Insert and select of 8 MiB blocks against a plain memcpy of the same bytes in the same run.

What is compared
    insert  Client.insert(keys, blocks) until the ticket is done, into a pool that is full, so colder blocks leave for it.
            memcpy: np.copyto from the same buffers into shared memory on the same pages, mapped the same way.
    select  Client.select, a copy of each block into private memory, the end of the with-block.
            memcpy: np.copyto from that shared memory into the same private memory.
    Every page on either side has been touched before, in this process.
Two engines
    Two processes do the same at once, each with a client of its own. Their rates are added and compared with one process
    alone, and beside it stands what two processes that only copy lose on this machine.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import click
import numpy as np

import kvstore
from bench.harness import (
    Bytes,
    Ratio,
    ReferencePool,
    Report,
    huge_share,
    in_turn,
    prefault,
    private_memory,
    running_daemon,
    seconds,
)

_SEED: Final = 7
_OPERATIONS: Final = ("insert", "select")


class Engine:
    """One client with private memory of its own, and shared memory like the pool's to compare with.

    Batches go round through all of the memory, so that no side finds its bytes in a cache where the other does not.
    """

    def __init__(self, endpoint: str, block_bytes: int, blocks: int, name: str) -> None:
        namespace = kvstore.Namespace(model=f"bench-{name}", dtype="bfloat16", block_size=64, block_bytes=block_bytes)
        self.client = kvstore.connect(endpoint, namespace, timeout_s=30.0)
        assert self.client.arena is not None
        prefault(self.client.arena)
        self.reference = ReferencePool(blocks * block_bytes)
        memory = private_memory(blocks * block_bytes)
        memory[:] = np.random.default_rng(_SEED).integers(0, 256, len(memory), dtype=np.uint8)
        self.private_address = memory.ctypes.data
        self._private = self._cut(memory, block_bytes)
        self._shared = self._cut(self.reference.bytes, block_bytes)
        self._turn = itertools.count()
        self._numbers = itertools.count()
        self._stored: Sequence[bytes] = ()
        self._expected = int(self._private[0][:4096].sum())

    @staticmethod
    def _cut(memory: Bytes, block_bytes: int) -> list[Bytes]:
        return [memory[start : start + block_bytes] for start in range(0, len(memory) - block_bytes + 1, block_bytes)]

    def _window(self, count: int) -> slice:
        start = next(self._turn) * count % (len(self._private) - count + 1)
        return slice(start, start + count)

    def insert(self, count: int) -> float:
        """Stores `count` blocks under new keys. Returns the seconds it took."""
        blocks = self._private[self._window(count)]
        keys = [b"%032d" % next(self._numbers) for _ in range(count)]
        start = time.perf_counter()
        result = self.client.insert(keys, blocks).wait(60.0)
        took = time.perf_counter() - start
        assert result.stored == count, result
        self._stored = keys
        return took

    def prepare_select(self, count: int) -> None:
        """Sees to it that there are blocks to select; others may have stored so much that they had to leave."""
        if len(self._stored) < count or self.client.lookup(self._stored[:count]) < count:
            self.insert(count)

    def select(self, count: int) -> float:
        """Copies the blocks that were stored last into private memory. Returns the seconds it took."""
        keys, blocks = self._stored[:count], self._private[self._window(count)]
        start = time.perf_counter()
        with self.client.select(keys, timeout_s=30.0) as found:
            for block, view in zip(blocks, found, strict=True):
                np.copyto(block, np.frombuffer(view, dtype=np.uint8))
            del view
        return time.perf_counter() - start

    def copy_in(self, count: int) -> float:
        """memcpy from private into shared memory. Returns the seconds it took."""
        window = self._window(count)
        return seconds(lambda: self._copy(self._shared[window], self._private[window]))

    def copy_out(self, count: int) -> float:
        """memcpy from shared into private memory. Returns the seconds it took."""
        window = self._window(count)
        return seconds(lambda: self._copy(self._private[window], self._shared[window]))

    @staticmethod
    def _copy(to: list[Bytes], of: list[Bytes]) -> None:
        for target, source in zip(to, of, strict=True):
            np.copyto(target, source)

    def check(self, count: int) -> None:
        """Stores blocks of known bytes and reads them back; a bench of wrong bytes is worth nothing."""
        blocks = self._private[:count]
        wanted = [block.copy() for block in blocks[:: max(1, count // 4)]]
        keys = [b"check%027d" % index for index in range(count)]
        result = self.client.insert(keys, blocks).wait(60.0)
        assert result.stored == count, result
        with self.client.select(keys, timeout_s=30.0) as found:
            assert len(found) == count
            for block, view in zip(wanted, found[:: max(1, count // 4)], strict=True):
                assert np.array_equal(block, np.frombuffer(view, dtype=np.uint8))
            del view
        self.client.delete(keys)

    def close(self) -> None:
        """Ends the session."""
        self.client.close()


def _work(endpoint: str, block_bytes: int, blocks: int, batch: int, name: str, line: Connection) -> None:
    """An engine process: does what the line says, as long as it says, and answers with bytes per second."""
    engine = Engine(endpoint, block_bytes, blocks, name)
    calls: dict[str, Callable[[int], float]] = {
        "insert": engine.insert,
        "select": engine.select,
        "copy_insert": engine.copy_in,
        "copy_select": engine.copy_out,
    }
    engine.check(min(batch, blocks))
    line.send(0.0)
    while (order := line.recv()) is not None:
        name, start_at, stop_at = order
        if name == "select":
            engine.prepare_select(batch)
        calls[name](batch)
        while time.monotonic() < start_at:
            time.sleep(0.0005)
        began, done = time.monotonic(), 0
        while time.monotonic() < stop_at:
            calls[name](batch)
            done += batch * block_bytes
        line.send(done / (time.monotonic() - began))
    engine.close()


class Pair:
    """Two engine processes; either works alone or both at once."""

    def __init__(self, endpoint: str, block_bytes: int, blocks: int, batch: int, window_s: float) -> None:
        self._window_s = window_s
        self._lines: list[Connection] = []
        self._processes = []
        spawn: Any = multiprocessing.get_context("spawn")
        for name in ("first", "second"):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_work, args=(endpoint, block_bytes, blocks, batch, name, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._lines.append(mine)
            self._processes.append(process)
        for line in self._lines:
            line.recv()

    def rate(self, name: str, engines: int) -> float:
        """Bytes per second of one or both together."""
        start = time.monotonic() + 0.1
        for line in self._lines[:engines]:
            line.send((name, start, start + self._window_s))
        return sum(line.recv() for line in self._lines[:engines])

    def close(self) -> None:
        """Ends both."""
        for line in self._lines:
            line.send(None)
        for process in self._processes:
            process.join(20)


def measure_batches(
    endpoint: str, block_bytes: int, batches: Sequence[tuple[int, int]], report: Report
) -> dict[str, Any]:
    """One engine alone. `batches` are pairs of a batch size and a number of rounds."""
    engine = Engine(endpoint, block_bytes, max(count for count, _ in batches), "one")
    arena = engine.client.arena
    assert arena is not None
    facts = {
        "pool": f"{engine.client.stats()['tiers'][0]['backing']['kind']}, {huge_share(arena.address):.0%} on huge pages",
        "reference": f"{engine.reference.kind}, {huge_share(engine.reference.address):.0%} on huge pages",
        "private": f"{huge_share(engine.private_address):.0%} on huge pages",
    }
    for count, rounds in batches:
        engine.check(count)

        def case(call: Callable[[int], float], count: int = count) -> Callable[[], float]:
            return lambda: call(count)

        def select(count: int = count) -> float:
            engine.prepare_select(count)
            return engine.select(count)

        times = in_turn(
            {
                "insert": case(engine.insert),
                "select": select,
                "copy_insert": case(engine.copy_in),
                "copy_select": case(engine.copy_out),
            },
            rounds,
        )
        for name in _OPERATIONS:
            ratio = Ratio.of(times[f"copy_{name}"], times[name])
            own, plain = (
                count * block_bytes / 1e9 / float(np.median(times[which])) for which in (name, f"copy_{name}")
            )
            goal = report.goal(f"{name} of {count}", ratio.median, at_least=0.9)
            report.rows.append((f"{name}, {count} blocks", f"{own:.1f} GB/s", f"{plain:.1f} GB/s", str(ratio), goal))
            report.figures[f"{name}_{count}"] = ratio.as_json()
    engine.close()
    return facts


def measure_pair(
    endpoint: str, block_bytes: int, blocks: int, batch: int, window_s: float, rounds: int, report: Report
) -> None:
    """Two engine processes at once against one alone."""
    pair = Pair(endpoint, block_bytes, blocks, batch, window_s)

    def case(name: str, engines: int) -> Callable[[], float]:
        return lambda: pair.rate(name, engines)

    names = [*_OPERATIONS, *(f"copy_{name}" for name in _OPERATIONS)]
    rates = in_turn({f"{name}_{engines}": case(name, engines) for name in names for engines in (1, 2)}, rounds)
    pair.close()
    for name in _OPERATIONS:
        kept = Ratio.of(rates[f"{name}_2"], rates[f"{name}_1"])
        plain = Ratio.of(rates[f"copy_{name}_2"], rates[f"copy_{name}_1"])
        against_copy = Ratio.of(rates[f"{name}_2"], rates[f"copy_{name}_2"])
        both, alone = (float(np.median(rates[f"{name}_{engines}"])) / 1e9 for engines in (2, 1))
        report.rows.append(
            (
                f"{name}, two engines at once",
                f"{both:.1f} GB/s",
                f"{alone:.1f} GB/s (one alone)",
                str(kept),
                report.goal(f"{name} by two engines", kept.median, at_least=0.8),
            )
        )
        both_plain, alone_plain = (float(np.median(rates[f"copy_{name}_{engines}"])) / 1e9 for engines in (2, 1))
        report.rows.append(
            (
                f"  memcpy for {name}, two at once",
                f"{both_plain:.1f} GB/s",
                f"{alone_plain:.1f} GB/s (one alone)",
                str(plain),
                "",
            )
        )
        report.rows.append(
            (f"  {name} / memcpy, both by two", f"{both:.1f} GB/s", f"{both_plain:.1f} GB/s", str(against_copy), "")
        )
        report.figures[f"{name}_two_to_one"] = kept.as_json()
        report.figures[f"copy_{name}_two_to_one"] = plain.as_json()
        report.figures[f"{name}_two_to_copy_two"] = against_copy.as_json()


@click.command()
@click.option("--smoke", is_flag=True, help="A few small blocks, to see that the bench works.")
@click.option("--one", is_flag=True, help="One engine only.")
def main(smoke: bool, one: bool) -> None:
    """Insert and select against memcpy."""
    block_bytes = (1 if smoke else 8) << 20
    batches = ((4, 2), (16, 2)) if smoke else ((16, 41), (256, 9))
    most = max(count for count, _ in batches)
    report = Report("same_host", ("what", "kvstore", "against", "ratio [middle half]", "goal"))
    # Full after a few rounds, and from then on every insert has to make room.
    with running_daemon(int(most * block_bytes * 1.3) + (64 << 20)) as daemon:
        facts = measure_batches(daemon.endpoint, block_bytes, batches, report)
        if not one:
            measure_pair(
                daemon.endpoint,
                block_bytes,
                blocks=8 if smoke else 64,
                batch=4 if smoke else 16,
                window_s=0.1 if smoke else 1.0,
                rounds=1 if smoke else 7,
                report=report,
            )
    report.show({**facts, "block_bytes": block_bytes})


if __name__ == "__main__":
    main()
