"""An engine whose daemon is on another host: bytes over the data port, through a staging memory of its own."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.errors import RetryLater, StaleGeneration
from kvstore.remote import RemoteArena
from tests.vllm.harness import BLOCK_BYTES, BLOCK_TOKENS, BLOCKS, Daemon, Engine, prompt, wait_until

pytestmark = pytest.mark.filterwarnings("ignore")

Answers = Callable[[list[int]], list[int]]


def far(daemon: Daemon) -> str:
    """The daemon's TCP endpoint as a client on another host would see it.

    0.0.0.0 reaches this machine, and does not look like it: clients of a loopback address map the pool.
    """
    tcp = next(endpoint for endpoint in daemon.stats()["listen"] if not endpoint.startswith("unix:"))
    return f"0.0.0.0:{tcp.rpartition(':')[2]}"


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    daemon = Daemon(folder, flags=("--listen", f"127.0.0.1:{port}"))
    daemon.start()
    yield daemon
    daemon.stop()


# -- without an engine -----------------------------------------------------------------------------------------------

#: Parts of two ranks, one next to the other all through a slot.
RANKS, PART, PARTS = 2, 3000, 4
SLOT = RANKS * PART * PARTS
SLOTS = 40


class Ranks:
    """A scheduler and a worker for each rank, on one group, with KV memory of their own."""

    def __init__(self, endpoint: str) -> None:
        from engine_plugin.copy.cpu import CpuCopyEngine
        from engine_plugin.vllm.far import FarCopies

        namespace = kvstore.Namespace(model="far", dtype="x", block_size=1, block_bytes=SLOT)
        options: dict[str, Any] = {"group": "far", "timeout_s": 30}
        self.scheduler = kvstore.connect(endpoint, namespace, staging_bytes=0, **options)
        # Room for a few slots: a job goes in many pieces.
        self.workers = [kvstore.connect(endpoint, None, staging_bytes=9 * SLOT, **options) for _ in range(RANKS)]
        self.engines = [CpuCopyEngine(1) for _ in range(RANKS)]
        self.copies = [FarCopies(engine) for engine in self.engines]
        random = np.random.default_rng(1)
        self.arenas = [worker.arena for worker in self.workers]
        self.memory = [random.integers(0, 256, (SLOTS, PARTS, PART), np.uint8) for _ in range(RANKS)]

    def run(self, rank: int, held: Any, slots: list[int], *, is_load: bool) -> BaseException | None:
        """Moves one rank's part of some slots; what went wrong."""
        arena = self.arenas[rank]
        assert isinstance(arena, RemoteArena)
        memory = self.memory[rank]
        index, part = (each.ravel() for each in np.meshgrid(np.arange(len(slots)), np.arange(PARTS), indexing="ij"))
        kv = memory.ctypes.data + (np.array(slots)[index] * PARTS + part) * PART
        pool = held.offsets[index] + ((part * RANKS + rank) * PART).astype(np.uint64)
        fragments = kv.astype(np.uint64), pool, np.full(len(kv), PART, np.uint64)
        ends: list[BaseException | None] = []
        job = self.copies[rank].begin(
            arena,
            (held.offsets, held.epochs),
            fragments,
            lambda seconds, error: ends.append(error),
            is_load=is_load,
        )
        self.copies[rank].wait([job])
        assert len(ends) == 1 and arena.staging.used_bytes == 0
        return ends[0]

    def close(self) -> None:
        for copies, engine in zip(self.copies, self.engines, strict=True):
            copies.close()
            engine.close()
        for client in (self.scheduler, *self.workers):
            client.close()


@pytest.fixture
def ranks(daemon: Daemon) -> Iterator[Ranks]:
    ranks = Ranks(far(daemon))
    yield ranks
    ranks.scheduler.flush()
    ranks.close()


def test_ranks_write_and_read_their_parts_of_a_slot(ranks: Ranks) -> None:
    keys = [b"%d" % index for index in range(SLOTS)]
    slots = ranks.scheduler.reserve(SLOTS)
    for rank in range(RANKS):
        assert ranks.run(rank, slots, list(range(SLOTS)), is_load=False) is None
    outcomes = ranks.scheduler.commit(slots.generation, slots.offsets, keys, epochs=slots.epochs)
    assert outcomes.tolist() == [1] * SLOTS
    kept = [memory.copy() for memory in ranks.memory]
    for memory in ranks.memory:
        memory[:] = 0
    (lease,) = ranks.scheduler.acquire([(0, keys)])
    backwards = list(range(SLOTS))[::-1]
    for rank in range(RANKS):
        assert ranks.run(rank, lease, backwards, is_load=True) is None
        assert np.array_equal(ranks.memory[rank][::-1], kept[rank])
    ranks.scheduler.release([lease])
    assert isinstance(ranks.run(0, lease, backwards, is_load=True), StaleGeneration)
    assert isinstance(ranks.run(0, slots, backwards, is_load=False), StaleGeneration)


def test_a_daemon_that_dies_ends_jobs_with_an_error(ranks: Ranks, daemon: Daemon) -> None:
    slots = ranks.scheduler.reserve(4)
    daemon.kill(signal.SIGKILL)
    assert isinstance(ranks.run(0, slots, [0, 1, 2, 3], is_load=False), RetryLater)
    daemon.start()


# -- engines ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def near(daemon: Daemon, engines: Callable[..., Engine]) -> Engine:
    """An engine on the daemon's host."""
    return engines("near", {"kvstore.endpoint": daemon.endpoint})


def test_an_engine_without_a_local_daemon_loads_what_another_one_stored(
    daemon: Daemon, near: Engine, engines: Callable[..., Engine], answers: Answers
) -> None:
    # Room for 8 blocks: loads of 12 go in pieces.
    other = engines("far", {"kvstore.endpoint": far(daemon), "kvstore.staging_bytes": 8 * BLOCK_BYTES})
    for engine in (near.ready(), other.ready()):
        engine.generate(prompt(1000))
        engine.wait_storing(daemon)
    mapped = {
        session["name"]: session["mapped"]
        for session in daemon.stats()["sessions"]
        if session["pid"] == other.process.pid
    }
    assert mapped and not any(mapped.values())

    before = daemon.stored_blocks()
    computed = near.generate(prompt(1))[0]
    daemon.wait_stored(before + BLOCKS)
    hits = other.external_hits()
    loaded = other.generate(prompt(1))[0]
    assert computed["tokens"] == loaded["tokens"] == answers(prompt(1))
    assert other.external_hits() - hits == loaded["cached"] == BLOCKS * BLOCK_TOKENS

    # And the other way round: what it stores over the network the local engine maps.
    before = daemon.stored_blocks()
    computed = other.generate(prompt(2))[0]
    daemon.wait_stored(before + BLOCKS)
    loaded = near.generate(prompt(2))[0]
    assert computed["tokens"] == loaded["tokens"] == answers(prompt(2))
    assert loaded["cached"] == BLOCKS * BLOCK_TOKENS

    figures = daemon.stats()["data_port"]
    assert figures["sent_bytes"] >= BLOCKS * BLOCK_BYTES and figures["received_bytes"] >= BLOCKS * BLOCK_BYTES
    wait_until("nothing is held", lambda: daemon.stats()["pins"] == 0)
    for engine in (near, other):
        assert engine.metric("vllm:kvstore_hook_errors") == engine.metric("vllm:kvstore_load_failures") == 0

    daemon.kill(signal.SIGKILL)
    assert other.generate(prompt(3))[0]["tokens"] == answers(prompt(3))
    daemon.start()


def test_an_engine_loads_what_the_peer_of_its_daemon_has(
    daemon: Daemon, near: Engine, engines: Callable[..., Engine], answers: Answers, tmp_path: Path
) -> None:
    """Two hosts with a daemon each: one engine stores on its own, the other one's daemon asks there."""
    peer = far(daemon)
    second = Daemon(tmp_path, flags=("--peer", peer, "--peer-deadline-s", "10"))
    second.start()
    try:
        other = engines("asks", {"kvstore.endpoint": second.endpoint})
        other.ready().generate(prompt(1000))
        other.wait_storing(second)
        near.wait_storing(daemon)
        before = daemon.stored_blocks()
        computed = near.generate(prompt(4))[0]
        daemon.wait_stored(before + BLOCKS)
        loaded = other.generate(prompt(4))[0]
        assert computed["tokens"] == loaded["tokens"] == answers(prompt(4))
        assert loaded["cached"] == BLOCKS * BLOCK_TOKENS
        assert second.stats()["hits"]["peer"] >= BLOCKS
    finally:
        second.stop()
