"""Insert and select of 8 MiB blocks against a plain memcpy of the same bytes in the same run.

What is compared
    insert  Client.insert(keys, blocks) until the ticket is done, into a pool that is full, so colder blocks leave.
            memcpy: np.copyto from the same buffers into the same slots of the pool, found and pinned beforehand.
    select  Client.select, a copy of each block into private memory, the end of the with-block.
            memcpy: np.copyto from the same slots into the same private memory, found and pinned beforehand.
    So both sides use the very same pages, all of them touched before by this process. Two mappings of the same kind
    would not do: where their pages happen to lie makes a difference of up to a third. A batch is larger than the cache.
Two engines
    Two processes do the same at once, each with a client of its own. Their rates are added and compared with one
    process alone, and beside it stands what two processes that only copy lose on this machine.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import click
import numpy as np

import kvstore
from bench.harness import (
    Bytes,
    Ratio,
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
    """One client with private memory of its own.

    Batches go round through all of the private memory and all of the pool, so that nobody finds bytes in a cache.
    """

    def __init__(self, endpoint: str, block_bytes: int, blocks: int, name: str) -> None:
        namespace = kvstore.Namespace(model=f"bench-{name}", dtype="bfloat16", block_size=64, block_bytes=block_bytes)
        self.client = kvstore.connect(endpoint, namespace, timeout_s=30.0)
        assert self.client.arena is not None
        prefault(self.client.arena)
        self._pool: Bytes = self.client.arena.as_numpy()
        self._block_bytes = block_bytes
        memory = private_memory(blocks * block_bytes)
        memory[:] = np.random.default_rng(_SEED).integers(0, 256, len(memory), dtype=np.uint8)
        self.private_address = memory.ctypes.data
        self._private = [memory[start : start + block_bytes] for start in range(0, len(memory), block_bytes)]
        self._window = slice(0)
        self._numbers = itertools.count()
        self._stored: Sequence[bytes] = ()
        self._earlier: dict[int, tuple[Sequence[bytes], slice]] = {}

    def _next_batch(self, count: int) -> None:
        start = self._window.stop if self._window.stop + count <= len(self._private) else 0
        self._window = slice(start, start + count)
        self._stored = [b"%032d" % next(self._numbers) for _ in range(count)]
        self._earlier[start] = self._stored, self._window

    def insert(self, count: int) -> float:
        """Stores `count` blocks under new keys. Returns the seconds it took."""
        self._next_batch(count)
        keys, blocks = self._stored, self._private[self._window]
        start = time.perf_counter()
        result = self.client.insert(keys, blocks).wait(60.0)
        took = time.perf_counter() - start
        assert result.stored == count, result
        return took

    def prepare(self, count: int) -> None:
        """Sees to it that the last batch is there; others may have stored so much that it had to leave."""
        if len(self._stored) != count or self.client.lookup(self._stored) < count:
            self.insert(count)

    def select(self, count: int) -> float:
        """Copies the blocks that were stored last into private memory. Returns the seconds it took."""
        blocks = self._private[self._window]
        start = time.perf_counter()
        with self.client.select(self._stored, timeout_s=30.0) as found:
            for block, view in zip(blocks, found, strict=True):
                np.copyto(block, np.frombuffer(view, dtype=np.uint8))
            del view
        took = time.perf_counter() - start
        assert len(blocks) == count
        return took

    def copy_insert(self, count: int) -> float:
        """memcpy of a batch to where it lies. Returns the seconds it took.

        Of the batch that was stored half a round ago, if it is there still: the last one is in caches and page walks,
        while an insert reads and writes what nobody touched for a round.
        """
        half = len(self._private) // count // 2 * count
        keys, window = self._earlier.get((self._window.start - half) % len(self._private), ((), slice(0)))
        if len(keys) != count or self.client.lookup(keys) < count:
            keys, window = self._stored, self._window
        with self._slots(keys) as slots:
            return seconds(lambda: self._copy(slots, self._private[window]))

    def copy_select(self, count: int) -> float:
        """memcpy of the batch that was stored last, from where it lies. Returns the seconds it took."""
        assert len(self._stored) == count
        with self._slots(self._stored) as slots:
            return seconds(lambda: self._copy(self._private[self._window], slots))

    @contextlib.contextmanager
    def _slots(self, keys: Sequence[bytes]) -> Iterator[list[Bytes]]:
        leases = self.client.acquire([(0, keys)])
        assert len(leases[0].offsets) == len(keys)
        yield [self._pool[offset : offset + self._block_bytes] for offset in leases[0].offsets.tolist()]
        self.client.release(leases)

    @staticmethod
    def _copy(to: list[Bytes], of: list[Bytes]) -> None:
        for target, source in zip(to, of, strict=True):
            np.copyto(target, source)

    def check(self, count: int) -> None:
        """Stores a batch, wipes the private copy, reads it back; a bench of wrong bytes is worth nothing."""
        self.insert(count)
        blocks = self._private[self._window][:: max(1, count // 4)]
        wanted = [block.copy() for block in blocks]
        for block in blocks:
            block[:] = 0
        self.select(count)
        assert all(np.array_equal(*pair) for pair in zip(wanted, blocks, strict=True))

    def close(self) -> None:
        """Ends the session."""
        del self._pool
        self.client.close()


def _work(endpoint: str, block_bytes: int, blocks: int, batch: int, name: str, line: Connection) -> None:
    """An engine process: does what the line says, as long as it says, and answers with bytes per second."""
    engine = Engine(endpoint, block_bytes, blocks, name)
    calls: dict[str, Callable[[int], float]] = {
        "insert": engine.insert,
        "select": engine.select,
        "copy_insert": engine.copy_insert,
        "copy_select": engine.copy_select,
    }
    engine.check(batch)
    line.send(0.0)
    while (order := line.recv()) is not None:
        name, start_at, stop_at = order
        engine.prepare(batch)
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
    kind = engine.client.stats()["tiers"][0]["backing"]["kind"]
    facts = {
        "pool": f"{kind}, {huge_share(arena.address):.0%} on huge pages",
        "private": f"{huge_share(engine.private_address):.0%} on huge pages",
    }
    for count, rounds in batches:
        engine.check(count)

        def case(call: Callable[[int], float], count: int = count) -> Callable[[], float]:
            return lambda: call(count)

        calls = (engine.insert, engine.select, engine.copy_insert, engine.copy_select)
        times = in_turn({call.__name__: case(call) for call in calls}, rounds)
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
