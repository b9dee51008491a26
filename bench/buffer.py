"""Pipe, LookupBuffer and KVTransfer against a plain memcpy in the same run.

What is compared
    pipe    One process sends tensors, another one receives them into tensors of its own (out=). Every byte is copied
            twice, by two processes at once: into the pool, out of the pool.
            memcpy: the same two processes copy the same bytes at once, one from private memory into slots of the
            pool that it reserved, the other one from such slots into private memory; nobody waits for anybody.
    get     KVTransfer.get of a prompt until the last layer is there, into tensors with heads before tokens, as
            transformers has them: each head of a block is a piece of its own.
            memcpy: the same bytes from the same slots into private memory of the same size, block by block.
    first   How long until the first layer is there, as a share of the whole load.
    insert and drop_select of small entries are counted, not compared: one after the other, each waited for, through one
    buffer of one process; and from one process into another, which takes out whatever comes.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any, Final

import click
import numpy as np

import kvstore
from bench.harness import Bytes, Ratio, Report, in_turn, prefault, private_memory, running_daemon, seconds
from kvstore.buffer import LookupBuffer, Pipe
from kvstore.buffer.records import GROUP_BYTES, LARGE, namespace_of
from kvstore.engine import KVTensor, KVTransfer
from kvstore.errors import EndOfPipe

_PATIENCE_S: Final = 120.0
_HEADS, _HEAD_SIZE, _BLOCK_TOKENS = 8, 128, 64


class Copier:
    """memcpy between private memory and slots of the pool that this process holds."""

    def __init__(self, endpoint: str, size: int, name: str) -> None:
        self._client = kvstore.connect(endpoint, namespace_of("copy", name), timeout_s=_PATIENCE_S)
        arena = self._client.arena
        assert arena is not None
        prefault(arena)  # type: ignore[arg-type]
        part = GROUP_BYTES[LARGE]
        self._slots = self._client.reserve(-(-size // part), kv_group=LARGE)
        assert self._slots.shortfall is None
        pool = arena.as_numpy()
        self._pieces = [pool[offset : offset + part] for offset in self._slots.offsets.tolist()]
        for piece in self._pieces:
            piece[:] = 1

    def copy(self, private: Bytes, *, out: bool) -> None:
        """All of the private memory, into the slots or out of them."""
        part = len(self._pieces[0])
        for index, piece in enumerate(self._pieces):
            mine = private[index * part : (index + 1) * part]
            if out:
                np.copyto(mine, piece[: len(mine)])
            else:
                np.copyto(piece[: len(mine)], mine)

    def close(self) -> None:
        """Gives the slots back."""
        self._pieces.clear()
        self._client.abort(self._slots.generation, self._slots.offsets)
        self._client.close()


def _send(endpoint: str, line: Connection) -> None:
    """The sending process: does what the line says."""
    pipe = Pipe("bench", endpoint, max_bytes=256 << 20, timeout_s=_PATIENCE_S)
    tensors: dict[int, list[Bytes]] = {}
    copiers: dict[int, Copier] = {}
    line.send("ready")
    while (order := line.recv()) is not None:
        what, size, count = order
        if size not in tensors:
            tensors[size] = _private(size)
            copiers[size] = Copier(endpoint, size, "sender")
            line.send("ready")
            continue
        for tensor in itertools.islice(itertools.cycle(tensors[size]), count):
            if what == "pipe":
                pipe.send_tensor(tensor, _PATIENCE_S)
            else:
                copiers[size].copy(tensor, out=False)
        line.send("done")
    pipe.close(_PATIENCE_S)
    for copier in copiers.values():
        copier.close()


def _private(size: int) -> list[Bytes]:
    """Tensors that together do not fit a cache."""
    count = max(2, (64 << 20) // size)
    memory = private_memory(count * size)
    memory[:] = np.random.default_rng(size).integers(0, 256, len(memory), dtype=np.uint8)
    return [memory[start : start + size] for start in range(0, len(memory), size)]


def measure_pipe(endpoint: str, sizes: list[tuple[int, int, int]], report: Report) -> None:
    """Triples of a tensor's bytes, tensors in a round, and rounds."""
    spawn: Any = multiprocessing.get_context("spawn")
    line, theirs = spawn.Pipe()
    process = spawn.Process(target=_send, args=(endpoint, theirs), daemon=True)
    process.start()
    line.recv()
    pipe = Pipe("bench", endpoint, timeout_s=_PATIENCE_S)
    for size, count, rounds in sizes:
        rooms, copier = _private(size), Copier(endpoint, size, "receiver")
        line.send(("prepare", size, 0))
        line.recv()

        def case(what: str, size: int = size, count: int = count, rooms: Any = rooms, copier: Any = copier) -> float:
            line.send((what, size, count))
            start = time.perf_counter()
            for room in itertools.islice(itertools.cycle(rooms), count):
                if what == "pipe":
                    pipe.recv_tensor(_PATIENCE_S, out=room)
                else:
                    copier.copy(room, out=True)
            line.recv()
            return time.perf_counter() - start

        times = in_turn({what: lambda what=what: case(what) for what in ("pipe", "copy")}, rounds)  # type: ignore[misc]
        copier.close()
        ratio = Ratio.of(times["copy"], times["pipe"])
        own, plain = (count * size / 1e9 / float(np.median(times[what])) for what in ("pipe", "copy"))
        each_us = float(np.median(times["pipe"])) / count * 1e6
        name = f"pipe, {size >> 10} KiB tensors"
        goal = report.goal(name, ratio.median, at_least=0.7) if size >= 16 << 20 else f"{each_us:.0f} us each"
        report.rows.append((name, f"{own:.2f} GB/s", f"{plain:.2f} GB/s", str(ratio), goal))
        report.figures[f"pipe_{size}"] = ratio.as_json()
        report.figures[f"pipe_{size}_us"] = round(each_us, 1)
    line.send(None)
    try:
        pipe.recv_tensor(_PATIENCE_S)
    except EndOfPipe:
        pass
    pipe.close()
    process.join(_PATIENCE_S)


def measure_get(endpoint: str, layers: int, tokens: int, rounds: int, report: Report) -> None:
    """One prompt, loaded again and again."""
    tensor = KVTensor("float16", (1, _HEADS, None, _HEAD_SIZE), 2)
    with KVTransfer([[tensor, tensor]] * layers, model="bench", block_tokens=_BLOCK_TOKENS, endpoint=endpoint) as kv:
        size = tensor.bytes_of(tokens)
        memory = private_memory(2 * layers * size)
        rows = [memory[start : start + size].view(np.float16) for start in range(0, len(memory), size)]
        shaped = [row.reshape(tensor.shape_of(tokens)) for row in rows]
        out = [shaped[index : index + 2] for index in range(0, len(shaped), 2)]
        memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), dtype=np.uint8)
        prompt = np.arange(tokens)
        stored = kv.put(prompt, out).wait(_PATIENCE_S)
        assert stored.stored == tokens // _BLOCK_TOKENS, stored
        wanted = memory.copy()
        memory[:] = 0
        kv.get(prompt, out).wait(_PATIENCE_S)
        assert np.array_equal(memory, wanted)
        del wanted
        first: list[float] = []

        def get() -> float:
            start = time.perf_counter()
            load = kv.get(prompt, out)
            load.wait_layer(0, _PATIENCE_S)
            middle = time.perf_counter()
            load.wait(_PATIENCE_S)
            end = time.perf_counter()
            first.append((middle - start) / (end - start))
            return end - start

        client = kv._client
        arena = client.arena
        assert arena is not None
        (lease,) = client.acquire([(0, kv.keys_of(prompt))])
        pool, block = arena.as_numpy(), len(memory) // (tokens // _BLOCK_TOKENS)
        slots = [pool[offset : offset + block] for offset in lease.offsets.tolist()]

        def copy() -> None:
            for index, slot in enumerate(slots):
                np.copyto(memory[index * block : (index + 1) * block], slot)

        times = in_turn({"get": get, "copy": lambda: seconds(copy)}, rounds)
        slots.clear()
        client.release([lease])
        del pool
    ratio = Ratio.of(times["copy"], times["get"])
    own, plain = (len(memory) / 1e9 / float(np.median(times[what])) for what in ("get", "copy"))
    name = f"KVTransfer.get, {tokens} tokens, {len(memory) >> 20} MiB"
    goal = report.goal(name, ratio.median, at_least=0.8)
    report.rows.append((name, f"{own:.2f} GB/s", f"{plain:.2f} GB/s", str(ratio), goal))
    share = float(np.median(first))
    report.rows.append((f"  until the first of {layers} layers", f"{share:.3f} of the load", "", "", ""))
    report.figures["get"] = ratio.as_json()
    report.figures["first_layer_share"] = round(share, 4)


def measure_entries(endpoint: str, count: int, report: Report) -> None:
    """Small entries through one buffer, in one process."""
    with LookupBuffer("bench", endpoint, timeout_s=_PATIENCE_S) as buffer:
        tokens, value = np.arange(100), np.zeros(40_000, np.uint8)

        def turn() -> None:
            assert buffer.insert(tokens, None, value, value, None).wait(_PATIENCE_S).stored == 1
            assert buffer.drop_select(tokens, None, _PATIENCE_S) is not None

        turn()
        took = seconds(lambda: [turn() for _ in range(count)])
    report.rows.append(("LookupBuffer, 80 KB entries in and out", f"{count / took:.0f} a second", "", "", ""))
    report.figures["entries_per_s"] = round(count / took, 1)
    spawn: Any = multiprocessing.get_context("spawn")
    line, theirs = spawn.Pipe()
    process = spawn.Process(target=_insert, args=(endpoint, 4 * count, theirs), daemon=True)
    process.start()
    with LookupBuffer("through", endpoint, timeout_s=_PATIENCE_S) as buffer:
        line.recv()
        line.send("go")

        def drain() -> None:
            for _ in range(4 * count):
                assert buffer.drop_select(None, None, _PATIENCE_S) is not None

        took = seconds(drain)
    process.join(_PATIENCE_S)
    report.rows.append(("  from process to process", f"{4 * count / took:.0f} a second", "", "", ""))
    report.figures["entries_through_per_s"] = round(4 * count / took, 1)


def _insert(endpoint: str, count: int, line: Connection) -> None:
    """The inserting process."""
    tokens, value = np.arange(100), np.zeros(40_000, np.uint8)
    with LookupBuffer("through", endpoint, timeout_s=_PATIENCE_S) as buffer:
        line.send("ready")
        line.recv()
        tickets = [buffer.insert(tokens, None, value, value, None) for _ in range(count)]
        assert all(ticket.wait(_PATIENCE_S).stored for ticket in tickets)


@click.command()
@click.option("--smoke", is_flag=True, help="A few small tensors, to see that the bench works.")
def main(smoke: bool) -> None:
    """Pipe, LookupBuffer and KVTransfer against memcpy."""
    mib = 1 << 20
    sizes = (
        [(4096, 4, 2), (2 * mib, 4, 2)]
        if smoke
        else [(4096, 200, 7), (mib, 64, 9), (16 * mib, 16, 15), (64 * mib, 6, 15)]
    )
    report = Report("buffer", ("what", "kvstore", "against", "ratio [middle half]", "goal"))
    with running_daemon((128 if smoke else 1536) * mib) as daemon:
        measure_pipe(daemon.endpoint, sizes, report)
        measure_get(daemon.endpoint, 4 if smoke else 32, 256 if smoke else 2048, 2 if smoke else 21, report)
        measure_entries(daemon.endpoint, 5 if smoke else 200, report)
    report.show()


if __name__ == "__main__":
    main()
