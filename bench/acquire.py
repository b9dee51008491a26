"""Acquire of many keys against a gRPC call with the same request and reply and an empty handler, in the same run.

The other side is a grpc.aio server in a process of its own, on a Unix socket like the daemon's, whose
handler returns a reply of the same size that was made beforehand. Its caller builds and sends the same request and reads
the reply's fields, as every gRPC client must.

The directory holds a million blocks, and each call asks for a run of other keys, spread over it at random and spelled anew,
so that neither the daemon's caches nor the interpreter's know them: what an engine asks for is like that. All keys are
there. The lease is released after each call, outside the time; what that costs has rows of its own, since the daemon
notes the use of blocks there and not at the hit.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import click
import grpc
import numpy as np

import kvstore
from bench.harness import Report, running_daemon, seconds
from kvstore.config import Limits
from kvstore.endpoint import parse_endpoint
from kvstore.wire.channel import open_channel
from kvstore.wire.v1 import engine_pb2, engine_pb2_grpc

_BLOCK_BYTES: Final = 4096
_KEY_BYTES: Final = 32
_FILL_BATCH: Final = 4096
#: Goals: acquire costs at most so many times the empty call, by keys.
_GOALS: Final = {256: 1.5, 2048: 2.5}


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
    grant = engine_pb2.Grant(lease=1 << 20, ready=count, offsets=bytes(range(8)) * count, epochs=bytes(range(4)) * count)
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


def fill(client: kvstore.Client, blocks: int, seed: int) -> list[bytes]:
    """Stores blocks of whatever the pool holds, in chains of 256; returns their keys, spread over memory at random."""
    chance = random.Random(seed)
    for _ in range(blocks // _FILL_BATCH):
        keys = [chance.randbytes(_KEY_BYTES) for _ in range(_FILL_BATCH)]
        slots = client.reserve(_FILL_BATCH)
        assert len(slots.offsets) == _FILL_BATCH, slots.shortfall
        for start in range(0, _FILL_BATCH, 256):
            outcomes = client.commit(slots.generation, slots.offsets[start : start + 256], keys[start : start + 256])
            assert (outcomes == 1).all()
    chance.seed(seed)
    keys = [chance.randbytes(_KEY_BYTES) for _ in range(blocks // _FILL_BATCH * _FILL_BATCH)]
    chance.shuffle(keys)
    return keys


def measure(
    client: kvstore.Client, channel: grpc.Channel, keys: Sequence[bytes], count: int, calls: int, report: Report
) -> None:
    """Acquire and Release of `count` keys against the empty call, in turn."""
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
        start = chance.randrange(len(keys) - count + 1)
        chance.shuffle(sides)
        for side in sides:
            side([bytes(bytearray(key)) for key in keys[start : start + count]])
    for name, against in (("acquire", "empty"), ("release", "empty release")):
        own, plain = (statistics.median(times[which][warm:]) for which in (name, against))
        ratio = own / plain
        wanted = _GOALS.get(count) if name == "acquire" else None
        goal = report.goal(f"{name} of {count}", ratio, at_most=wanted) if wanted else ""
        tail = float(np.percentile(times[name][warm:], 99))
        report.rows.append(
            (f"{name}, {count} keys", f"{own * 1e6:.0f} us", f"{plain * 1e6:.0f} us", f"{ratio:.2f}", goal, f"{tail * 1e6:.0f} us")
        )
        report.figures[f"{name}_{count}"] = round(ratio, 3)
        report.figures[f"{name}_{count}_us"] = [round(own * 1e6), round(plain * 1e6)]


@click.command()
@click.option("--smoke", is_flag=True, help="A small directory and few calls, to see that the bench works.")
@click.option("--blocks", default=1_000_000, help="Blocks in the directory.")
def main(smoke: bool, blocks: int) -> None:
    """Acquire against an empty gRPC call."""
    blocks = 8192 if smoke else blocks
    calls = 20 if smoke else 400
    report = Report("acquire", ("what", "kvstore p50", "empty call p50", "ratio", "goal", "kvstore p99"))
    namespace = kvstore.Namespace(model="bench", dtype="bfloat16", block_size=64, block_bytes=_BLOCK_BYTES)
    with running_daemon(int(blocks * (_BLOCK_BYTES + 500) * 1.02) + (64 << 20)) as daemon, empty_server(
        list(_GOALS)
    ) as channel, kvstore.connect(daemon.endpoint, namespace, timeout_s=30.0, prefault=False) as client:
        before = daemon.heap_bytes()
        keys = fill(client, blocks, seed=1)
        report.figures["heap_bytes_per_block"] = round((daemon.heap_bytes() - before) / len(keys))
        for count in _GOALS:
            measure(client, channel, keys, count, calls, report)
    report.show({"blocks": len(keys)})


if __name__ == "__main__":
    main()
