"""Acquire of many keys against a gRPC call with the same request and reply and an empty handler, in the same run.

The other side is a grpc.aio server in a process of its own, on a Unix socket like the daemon's, whose handler returns a
reply of the same size that was made beforehand. Its caller builds and sends the same request and reads the reply's
fields, as every gRPC client must.

The directory holds a million blocks, in conversations of 2,048 blocks that lie in the daemon's memory in one of three
ways:
    whole       stored at once
    turns       stored 16 blocks at a time, other conversations in between, as engines with many users do
    scattered   stored one by one, each between 255 of others: the worst there is, as each key misses the processor's
                caches
Each call asks for another conversation, and spells its keys anew, so that nothing of it is known from the call before.
All keys are there. The lease is released after each call, outside the time; what that costs has rows of its own, since
the daemon notes the use of blocks there and not at the hit.

The last row is a call whose own work is next to nothing: one key of eight, whose lease goes back 0.25 ms later, as if
one block of 8 MiB had been copied. It stands against as many bytes each way between two processes that do nothing but
wait in recv(). Caller and peer have CPUs of their own there: whether they share one makes it 20 or 70 us.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import click
import grpc
import numpy as np

import kvstore
from bench.directory import key_of, pool_bytes_for
from bench.harness import Report, running_daemon, seconds
from kvstore.config import Limits
from kvstore.endpoint import parse_endpoint
from kvstore.wire.channel import open_channel
from kvstore.wire.v1 import engine_pb2, engine_pb2_grpc

_BLOCK_BYTES: Final = 4096
_CHAIN_KEYS: Final = 2048
_COMMIT_KEYS: Final = 256
#: How many blocks of a conversation lie side by side, by layout.
_LAYOUTS: Final = {"whole": 256, "turns": 16, "scattered": 1}
#: Goals: acquire costs at most so many times the empty call, by keys.
_GOALS: Final = {256: 1.5, 2048: 2.5}
#: Goal of one key: at most so many times the bare exchange.
_ONE_GOAL: Final = 4.0
_ONE_KEYS: Final = 8
#: What else the caller of one key does before the lease goes back and before the next call.
_COPY_S: Final = 0.00025
#: Bytes of that call and of its answer on the socket.
_ONE_BYTES: Final = (116, 80)


class _Empty(engine_pb2_grpc.EngineServicer):
    """Answers with what was made beforehand, by the number of keys."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._replies = {count: _reply(count) for count in counts}
        self._released = engine_pb2.ReleaseReply(released=1)

    async def Acquire(self, request: engine_pb2.AcquireRequest, context: Any) -> engine_pb2.AcquireReply:
        return self._replies[len(request.queries[0].keys)]

    async def Release(self, request: engine_pb2.ReleaseRequest, context: Any) -> engine_pb2.ReleaseReply:
        return self._released


def _reply(count: int) -> engine_pb2.AcquireReply:
    grant = engine_pb2.Grant(
        lease=1 << 20, ready=count, offsets=bytes(range(8)) * count, epochs=bytes(range(4)) * count
    )
    return engine_pb2.AcquireReply(generation=bytes(8), grants=[grant])


def _serve_empty(path: str, counts: Sequence[int], line: Any) -> None:
    async def serve() -> None:
        server = grpc.aio.server(options=(("grpc.max_receive_message_length", Limits().message_bytes_max),))
        engine_pb2_grpc.add_EngineServicer_to_server(_Empty(counts), server)
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        line.send(None)
        await asyncio.get_running_loop().run_in_executor(None, line.recv)
        await server.stop(0)

    asyncio.run(serve())


@contextlib.contextmanager
def empty_server(counts: Sequence[int]) -> Iterator[grpc.Channel]:
    """The server of empty handlers, and a channel to it like the client's own."""
    spawn: Any = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        path = f"{folder}/empty.sock"
        mine, theirs = spawn.Pipe()
        process = spawn.Process(target=_serve_empty, args=(path, counts, theirs), daemon=True)
        process.start()
        theirs.close()  # so that the end of that process is the end of the line
        mine.recv()
        with open_channel(parse_endpoint(f"unix:{path}"), None) as channel:
            yield channel
        mine.send(None)
        process.join(20)


def fill(client: kvstore.Client, first: int, chains: int, piece: int) -> None:
    """Stores conversations, `piece` blocks of each side by side. What the blocks hold does not matter here."""
    chance = random.Random(first)
    side_by_side = min(chains, _COMMIT_KEYS // piece)
    for start in range(first, first + chains, side_by_side):
        group = list(range(start, min(start + side_by_side, first + chains)))
        for index in range(0, _CHAIN_KEYS, piece):
            chance.shuffle(group)
            keys = [key_of(chain, index + position) for chain in group for position in range(piece)]
            slots = client.reserve(len(keys))
            assert slots.shortfall is None, slots.shortfall
            assert (client.commit(slots.generation, slots.offsets, keys) == 1).all()


def measure(
    client: kvstore.Client, channel: grpc.Channel, layout: str, chains: range, count: int, calls: int, report: Report
) -> None:
    """Acquire and Release of `count` keys of some conversation against the empty call, in turn."""
    stub: Any = engine_pb2_grpc.EngineStub(channel)
    session, digest = bytes(16), bytes(16)
    times: dict[str, list[float]] = {"acquire": [], "empty": [], "release": [], "empty release": []}
    chance = random.Random(2)

    def empty(wanted: list[bytes]) -> None:
        request = engine_pb2.AcquireRequest(
            session=session, namespace=digest, queries=[engine_pb2.Query(group=0, keys=wanted)]
        )
        reply = stub.Acquire(request, timeout=5.0)
        for grant in reply.grants:
            np.frombuffer(grant.offsets, dtype="<u8")
            np.frombuffer(grant.epochs, dtype="<u4")

    def empty_release() -> None:
        stub.Release(engine_pb2.ReleaseRequest(session=session, leases=[1 << 20]), timeout=5.0)

    def acquire_and_release(wanted: list[bytes]) -> None:
        start = time.perf_counter()
        leases = client.acquire([(0, wanted)])
        middle = time.perf_counter()
        assert len(leases[0].offsets) == count
        begin = time.perf_counter()
        client.release(leases)
        times["acquire"].append(middle - start)
        times["release"].append(time.perf_counter() - begin)

    def empties(wanted: list[bytes]) -> None:
        times["empty"].append(seconds(lambda: empty(wanted)))
        times["empty release"].append(seconds(empty_release))

    sides: list[Callable[[list[bytes]], None]] = [acquire_and_release, empties]
    warm = 20
    for _ in range(calls + warm):
        chain = chance.choice(chains)
        chance.shuffle(sides)
        for side in sides:
            side([key_of(chain, index) for index in range(count)])
    for name, against in (("acquire", "empty"), ("release", "empty release")):
        own, plain = (statistics.median(times[which][warm:]) for which in (name, against))
        ratio = own / plain
        wanted = _GOALS[count] if name == "acquire" else None
        goal = report.goal(f"{name} of {count} keys, {layout}", ratio, at_most=wanted) if wanted else ""
        tail = float(np.percentile(times[name][warm:], 99))
        report.rows.append(
            (
                f"{name} of {count} keys, {layout}",
                f"{own * 1e6:.0f} us",
                f"{plain * 1e6:.0f} us",
                f"{ratio:.2f}",
                goal,
                f"{tail * 1e6:.0f} us",
            )
        )
        report.figures[f"{name}_{count}_{layout}"] = {
            "ratio": round(ratio, 3),
            "us": round(own * 1e6),
            "empty_us": round(plain * 1e6),
        }


def _echo(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        while line.recv(1 << 16):
            line.send(bytes(_ONE_BYTES[1]))


@contextlib.contextmanager
def bare_peer() -> Iterator[tuple[socket.socket, int]]:
    """A line to a process that answers whatever comes at once, and its pid."""
    spawn: Any = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/bare.sock")
        listener.listen()
        process = spawn.Process(target=_echo, args=(f"{folder}/bare.sock",), daemon=True)
        process.start()
        line, _ = listener.accept()
        with line:
            yield line, process.pid
        process.join(20)


@contextlib.contextmanager
def apart(*pids: int) -> Iterator[None]:
    """This thread on one CPU, and the main threads of other processes on the others."""
    cpus = os.sched_getaffinity(0)
    own = {min(cpus)}
    for pid in pids:
        os.sched_setaffinity(pid, cpus - own or cpus)
    os.sched_setaffinity(0, own)
    try:
        yield
    finally:
        for pid in (0, *pids):
            os.sched_setaffinity(pid, cpus)


def one_key(client: kvstore.Client, line: socket.socket, calls: int, report: Report) -> None:
    """Acquire of one key against a bare exchange, in turn."""
    keys = [key_of(-1, index) for index in range(_ONE_KEYS)]
    slots = client.reserve(len(keys))
    client.commit(slots.generation, slots.offsets, keys)
    times: dict[str, list[float]] = {"acquire": [], "bare": []}
    chance = random.Random(3)

    def copy() -> None:
        end = time.perf_counter() + _COPY_S
        while time.perf_counter() < end:
            pass

    def acquire() -> None:
        start = time.perf_counter()
        leases = client.acquire([(0, [chance.choice(keys)])])
        times["acquire"].append(time.perf_counter() - start)
        copy()
        client.release(leases, wait=False)

    def bare() -> None:
        start = time.perf_counter()
        line.send(bytes(_ONE_BYTES[0]))
        line.recv(1 << 16)
        times["bare"].append(time.perf_counter() - start)
        copy()

    for _ in range(10):
        for case in (acquire, bare):
            for _ in range(calls // 10):
                case()
    own, plain = (statistics.median(times[which][calls // 10 :]) for which in ("acquire", "bare"))
    goal = report.goal("acquire of one key", own / plain, at_most=_ONE_GOAL)
    tail = float(np.percentile(times["acquire"], 99))
    figures = [f"{own * 1e6:.0f} us", f"{plain * 1e6:.0f} us", f"{own / plain:.2f}", goal, f"{tail * 1e6:.0f} us"]
    report.rows.append(("acquire of one key, bare exchange", *figures))
    report.figures["acquire_1"] = {
        "ratio": round(own / plain, 3),
        "us": round(own * 1e6),
        "bare_us": round(plain * 1e6),
    }


@click.command()
@click.option("--smoke", is_flag=True, help="A small directory and few calls, to see that the bench works.")
@click.option("--blocks", default=1_000_000, help="Blocks in the directory.")
def main(smoke: bool, blocks: int) -> None:
    """Acquire against an empty gRPC call."""
    chains = 3 if smoke else max(1, blocks // len(_LAYOUTS) // _CHAIN_KEYS)
    calls = 20 if smoke else 300
    report = Report("acquire", ("what", "kvstore p50", "empty call p50", "ratio", "goal", "kvstore p99"))
    namespace = kvstore.Namespace(model="bench", dtype="bfloat16", block_size=64, block_bytes=_BLOCK_BYTES)
    with (
        running_daemon(pool_bytes_for(chains * len(_LAYOUTS) * _CHAIN_KEYS)) as daemon,
        empty_server(list(_GOALS)) as channel,
        bare_peer() as (line, peer),
        kvstore.connect(daemon.endpoint, namespace, timeout_s=30.0, prefault=False) as client,
    ):
        numbers = {layout: range(start * chains, (start + 1) * chains) for start, layout in enumerate(_LAYOUTS)}
        for layout, piece in _LAYOUTS.items():
            fill(client, numbers[layout][0], chains, piece)
        stored = int(client.stats()["tiers"][0]["blocks"])
        for count in _GOALS:
            for layout in _LAYOUTS:
                measure(client, channel, layout, numbers[layout], count, calls, report)
        with apart(daemon.pid, peer):
            one_key(client, line, 10 * calls, report)
    report.show({"blocks": stored})


if __name__ == "__main__":
    main()
