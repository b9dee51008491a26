"""What a million blocks cost the daemon: memory for each, and how long the loop is kept busy by one step.

books
    The hierarchy alone, in this process, over a pool whose memory is only said to be there, so that nothing but the
    books takes any. Memory is the growth of anonymous resident memory; beside it stands the sum of the sizes that the
    interpreter tells of the objects of a block. Times are processor time of this thread: what a step takes where nobody
    interrupts it. A step is what one call does: 256 keys of a commit, 2,048 of an acquire.
daemon
    A daemon with as many blocks, stored over gRPC by a client that keeps no bytes; memory of its process.

Ends with 1 where a block costs more than kvstore.arena.BOOKKEEPING_BYTES, which the byte budget of the pool counts on.
"""

from __future__ import annotations

import gc
import hashlib
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final

import click

import kvstore
from bench.harness import Report, heap_bytes, peak_bytes, running_daemon
from kvstore import daemon as daemon_module
from kvstore.arena import BOOKKEEPING_BYTES, Arena
from kvstore.clock import SystemClock
from kvstore.directory import Keyspace
from kvstore.hierarchy import Hierarchy

_BLOCK_BYTES: Final = 4096
_COMMIT_KEYS: Final = 256
_ACQUIRE_KEYS: Final = 2048
#: Turns of a conversation are stored one after the other, with those of others in between.
_CHAIN_KEYS: Final = 2048
_CHAINS_OPEN: Final = 64


def pool_bytes_for(blocks: int) -> int:
    """A pool with room for so many of the smallest blocks and their bookkeeping."""
    return int(blocks * (_BLOCK_BYTES + BOOKKEEPING_BYTES + 32) * 1.01) + (64 << 20)


def key_of(chain: int, index: int) -> bytes:
    """A key as engines have them, made anew at each call, so that the books hold the only copy."""
    return hashlib.sha256(b"%d/%d" % (chain, index)).digest()


def turns(blocks: int) -> Iterator[tuple[int, int]]:
    """Chain and first index of each batch, in an order in which many conversations take turns."""
    chance = random.Random(1)
    chains = max(1, blocks // _CHAIN_KEYS)
    waiting = iter(range(chains))
    going = {chain: 0 for _, chain in zip(range(_CHAINS_OPEN), waiting, strict=False)}
    while going:
        chain = chance.choice(list(going))
        yield chain, going[chain]
        going[chain] += _COMMIT_KEYS
        if going[chain] >= _CHAIN_KEYS:
            del going[chain]
            for following in waiting:
                going[following] = 0
                break


class Steps:
    """Processor time of steps, by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def time(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Makes a call and notes how long it took."""
        start = time.thread_time()
        result = call(*arguments)
        self.seconds[name].append(time.thread_time() - start)
        return result


class Collections:
    """How long the garbage collector stops everything, as the daemon sets it up."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.counts = [0, 0, 0]
        self._start = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._start = time.thread_time()
        else:
            self.counts[info["generation"]] += 1
            self.longest_s = max(self.longest_s, time.thread_time() - self._start)


def told_bytes(keyspace: Keyspace, hierarchy: Hierarchy) -> float:
    """What the interpreter tells of a block's objects: entry, block, key, slot number, and its places in lists."""
    sample = [block for _, block in zip(range(1000), keyspace.blocks.values(), strict=False)]
    objects = sum(sys.getsizeof(block) + sys.getsizeof(block.key) + sys.getsizeof(block.offset) for block in sample)
    segments = [segment for class_ in hierarchy.arena.classes.values() for segment in class_.segments.values()]
    lists = sum(sys.getsizeof(segment.blocks) + sys.getsizeof(segment.free) for segment in segments)
    slots = sum(segment.slots for segment in segments)
    # 8 bytes: one reference in the policy's log.
    return objects / len(sample) + sys.getsizeof(keyspace.blocks) / len(keyspace.blocks) + lists / slots + 8


def measure_books(blocks: int, report: Report) -> float:
    """The hierarchy alone. Returns bytes for each block."""
    daemon_module._tune_garbage_collector()
    collections = Collections()
    arena = Arena(pool_bytes_for(blocks), "off")
    hierarchy = Hierarchy(arena, SystemClock())
    hierarchy.add_populated(arena.size_bytes)
    session = hierarchy.sessions.attach("bench", 0, "", 0)
    namespace = kvstore.Namespace(model="bench", dtype="bfloat16", block_size=64, block_bytes=_BLOCK_BYTES)
    keyspace = hierarchy.namespaces.open(namespace.identity(), namespace.group_bytes).keyspaces[0]
    steps = Steps()

    def store(chain: int, index: int, name: str) -> None:
        keys = [key_of(chain, index + position) for position in range(_COMMIT_KEYS)]
        parent = key_of(chain, index - 1) if index else b""
        slots = steps.time(f"reserve{name}", hierarchy.reserve, session, keyspace, _COMMIT_KEYS)
        assert slots.shortfall is None
        steps.time(f"commit{name}", hierarchy.commit, session, keyspace, slots.offsets, keys, parent)

    before, before_peak = heap_bytes(), peak_bytes()
    for chain, index in turns(blocks):
        store(chain, index, "")
    stored = len(keyspace.blocks)
    grown = (heap_bytes() - before) / stored
    peak = max(0, peak_bytes() - before_peak) / stored
    told = told_bytes(keyspace, hierarchy)
    chance = random.Random(2)
    chains = stored // _CHAIN_KEYS
    for _ in range(min(200, 4 * chains)):
        chain = chance.randrange(chains)
        keys = [key_of(chain, index) for index in range(_ACQUIRE_KEYS)]
        lease = steps.time("acquire", hierarchy.acquire, session, keyspace, keys)
        steps.time("locations", hierarchy.locations, lease)
        steps.time("release", hierarchy.release, session, [lease.id])
    # A tenth of the blocks leaves for others once the free slots are used up.
    free = hierarchy.pool.free_bytes // _BLOCK_BYTES
    for number in range((free + stored // 10) // _CHAIN_KEYS):
        for index in range(0, _CHAIN_KEYS, _COMMIT_KEYS):
            store(chains + number, index, ", pool full" if hierarchy.pool.free_bytes < 4 << 20 else "")
    after = (heap_bytes() - before) / len(keyspace.blocks)
    evicted = steps.time("evict", hierarchy.pool.evict, 64 << 20, _ACQUIRE_KEYS)

    sizes = {"acquire": _ACQUIRE_KEYS, "locations": _ACQUIRE_KEYS, "release": _ACQUIRE_KEYS, "evict": evicted}
    for name, times in steps.seconds.items():
        count = sizes.get(name, _COMMIT_KEYS)
        median = statistics.median(times)
        rate = count / median / 1e6 if median else float("inf")
        report.rows.append(
            (
                f"{name}, {count} blocks a step",
                f"{median * 1e3:.2f} ms",
                f"{max(times) * 1e3:.1f} ms",
                f"{rate:.2f} M/s",
                "",
            )
        )
        report.figures[name.replace(", ", "_").replace(" ", "_")] = {
            "p50_ms": round(median * 1e3, 3),
            "max_ms": round(max(times) * 1e3, 2),
            "blocks": count,
        }
    report.rows.append(
        (f"garbage collector, runs {collections.counts}", "", f"{collections.longest_s * 1e3:.1f} ms", "", "")
    )
    longest = max(max(times) for times in steps.seconds.values())
    for name, value in (
        ("memory", grown),
        ("memory after churn", after),
        ("memory at the peak", peak),
        ("as told by the interpreter", told),
    ):
        goal = report.goal(f"{name} a block", value, at_most=BOOKKEEPING_BYTES) if name != "memory at the peak" else ""
        report.rows.append((f"books: {name}, {stored} blocks", f"{value:.0f} B a block", "", "", goal))
    report.figures |= {
        "blocks": stored,
        "bytes_per_block": round(grown),
        "bytes_per_block_after_churn": round(after),
        "bytes_per_block_peak": round(peak),
        "bytes_per_block_told": round(told),
        "longest_step_ms": round(longest * 1e3, 1),
        "longest_collection_ms": round(collections.longest_s * 1e3, 2),
        "collections": collections.counts,
    }
    return max(grown, after)


def measure_daemon(blocks: int, report: Report) -> float:
    """A daemon's process. Returns bytes for each block."""
    namespace = kvstore.Namespace(model="bench", dtype="bfloat16", block_size=64, block_bytes=_BLOCK_BYTES)
    with (
        running_daemon(pool_bytes_for(blocks)) as daemon,
        kvstore.connect(daemon.endpoint, namespace, timeout_s=30.0, prefault=False) as client,
    ):
        before = daemon.heap_bytes()
        for chain, index in turns(blocks):
            keys = [key_of(chain, index + position) for position in range(_COMMIT_KEYS)]
            parent = key_of(chain, index - 1) if index else None
            slots = client.reserve(_COMMIT_KEYS)
            client.commit(slots.generation, slots.offsets, keys, parent=parent)
        stored = int(client.stats()["tiers"][0]["blocks"])
        grown = (daemon.heap_bytes() - before) / stored
    goal = report.goal("daemon's memory a block", grown, at_most=BOOKKEEPING_BYTES)
    report.rows.append((f"daemon: memory, {stored} blocks", f"{grown:.0f} B a block", "", "", goal))
    report.figures["daemon_bytes_per_block"] = round(grown)
    return grown


@click.command()
@click.option("--smoke", is_flag=True, help="A small directory, to see that the bench works.")
@click.option("--blocks", default=1_000_000, help="Blocks in the directory.")
def main(smoke: bool, blocks: int) -> None:
    """A million blocks."""
    blocks = 32_768 if smoke else blocks
    report = Report("directory", ("what", "median", "longest", "rate", "goal"))
    cost = max(measure_books(blocks, report), measure_daemon(blocks, report))
    report.show()
    # In a small directory what the process takes once weighs more than the blocks.
    if cost > BOOKKEEPING_BYTES and not smoke:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
