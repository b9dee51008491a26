"""Select from a daemon on another host against a bare sendfile/recv_into pair and against gRPC, on the same link.

What is compared
    select  kvstore.connect("HOST:PORT") and Client.select, until the bytes are in this process and the with-block has
            ended.
    bare    A process that sends the same number of bytes from a file in memory of the same kind with sendfile, and
            recv_into here. One request of eight bytes, one connection, with the congestion control that ours has, and
            nothing else.
    grpc    A process that streams the same blocks, one message with a bytes field for each, and a copy into place here.
    grpc in pieces
            The same with messages of at most 1 MiB, the size that is fastest.
    raw grpc
            The least that gRPC can do: such pieces through handlers that pass bytes on as they are, without protobuf.
gRPC cannot be told a congestion control and sends with the system's default, which costs it half its rate or more where
that is bbr. --own-network gives all of them reno.
All of them receive into memory of this process that was touched before. The batch is larger than the caches, and the
senders go round through several batches. The link is loopback, so this measures what the processors do, not a network.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Final

import click
import grpc
import numpy as np
from google.protobuf.wrappers_pb2 import BytesValue

import kvstore
from bench.harness import (
    Bytes,
    Ratio,
    Report,
    in_turn,
    own_network,
    private_memory,
    seconds,
    start_daemon,
    wait_populated,
)
from kvstore import congestion
from kvstore.backing import open_pool_memory
from kvstore.remote import RemoteArena

_MESSAGE_BYTES: Final = 1 << 20
_SERVICE: Final = "bench.Bytes"
#: Batches that each sender goes round through.
_BATCHES: Final = 3
_COUNT: Final = struct.Struct("<Q")


def _serve(kind: str, batch_bytes: int, line: Connection) -> None:
    """A sender in a process of its own: says its port, and ends with the line."""
    memory = open_pool_memory(_BATCHES * batch_bytes, "auto")
    memory.populate(0, memory.size_bytes)
    memory.buffer[:: 1 << 12] = b"\1" * (memory.size_bytes >> 12)
    starts = itertools.cycle(range(0, memory.size_bytes, batch_bytes))
    if kind == "grpc":
        server, port = _serve_grpc(memory.buffer, batch_bytes, starts)
        line.send(port)
        server.wait_for_termination()
    listener = socket.create_server(("127.0.0.1", 0))
    line.send(listener.getsockname()[1])
    connected, _ = listener.accept()
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    congestion.choose(connected)
    while request := connected.recv(_COUNT.size, socket.MSG_WAITALL):
        start, (left,) = next(starts), _COUNT.unpack(request)
        while left:
            sent = os.sendfile(connected.fileno(), memory.fd, start, left)
            start, left = start + sent, left - sent


def _serve_grpc(buffer: memoryview, batch_bytes: int, starts: Iterator[int]) -> tuple[grpc.Server, int]:
    def pieces(step: int) -> Iterator[bytes]:
        start = next(starts)
        for at in range(start, start + batch_bytes, step):
            yield bytes(buffer[at : at + step])

    def raw(request: bytes, _context: Any) -> Iterator[bytes]:
        return pieces(_COUNT.unpack(request)[0])

    def blocks(request: bytes, _context: Any) -> Iterator[BytesValue]:
        return (BytesValue(value=piece) for piece in pieces(_COUNT.unpack(request)[0]))

    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.max_send_message_length", -1)])
    methods = {
        "raw": grpc.unary_stream_rpc_method_handler(raw),
        "blocks": grpc.unary_stream_rpc_method_handler(blocks, response_serializer=BytesValue.SerializeToString),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


@contextlib.contextmanager
def sender(kind: str, batch_bytes: int) -> Iterator[int]:
    """Starts one; gives its port."""
    spawn: Any = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(kind, batch_bytes, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield mine.recv()
    finally:
        process.kill()
        process.join()


class Receiver:
    """This end of all three."""

    def __init__(self, endpoint: str, block_bytes: int, count: int, connections: int | None) -> None:
        self._count = count
        self._block_bytes = block_bytes
        self.batch_bytes = block_bytes * count
        namespace = kvstore.Namespace(model="bench", dtype="bfloat16", block_size=64, block_bytes=block_bytes)
        self.client = kvstore.connect(
            endpoint,
            namespace,
            timeout_s=60.0,
            staging_bytes=self.batch_bytes,
            data_connections=connections,
        )
        assert isinstance(self.client.arena, RemoteArena)
        self._room: Bytes = private_memory(self.batch_bytes)
        blocks = np.random.default_rng(3).integers(0, 256, self.batch_bytes, dtype=np.uint8)
        self._blocks = [blocks[start : start + block_bytes] for start in range(0, self.batch_bytes, block_bytes)]
        self._keys = [[b"%d-%d" % (batch, block) for block in range(count)] for batch in range(_BATCHES)]
        for keys in self._keys:
            result = self.client.insert(keys, self._blocks).wait(120.0)
            assert result.stored == count, result
        self._turn = itertools.cycle(self._keys)
        # A bench of wrong bytes is worth nothing.
        with self.client.select(self._keys[0], timeout_s=60.0) as found:
            for view, block in zip(found, self._blocks, strict=True):
                assert np.array_equal(np.frombuffer(view, np.uint8), block)
            del view

    def select(self) -> float:
        """One batch through kvstore. Returns the seconds it took."""
        keys = next(self._turn)
        start = time.perf_counter()
        with self.client.select(keys, timeout_s=60.0) as found:
            assert len(found) == self._count
        return time.perf_counter() - start

    def use_bare(self, port: int) -> None:
        self._bare = socket.create_connection(("127.0.0.1", port))
        self._bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def bare(self) -> float:
        """One batch through a bare pair."""

        def receive() -> None:
            self._bare.sendall(_COUNT.pack(self.batch_bytes))
            room = memoryview(self._room)
            for start in range(0, self.batch_bytes, self._block_bytes):
                got = self._bare.recv_into(room[start : start + self._block_bytes], 0, socket.MSG_WAITALL)
                assert got == self._block_bytes

        return seconds(receive)

    def use_grpc(self, port: int) -> None:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", -1)])
        self._raw: Callable[[bytes], Iterator[bytes]] = channel.unary_stream(f"/{_SERVICE}/raw")
        self._messages: Callable[[bytes], Iterator[bytes]] = channel.unary_stream(
            f"/{_SERVICE}/blocks", response_deserializer=lambda data: BytesValue.FromString(data).value
        )

    def grpc(self) -> float:
        """One batch through gRPC, a message for each block."""
        return self._receive(self._messages, self._block_bytes)

    def grpc_in_pieces(self) -> float:
        """One batch through gRPC, messages of the size that is fastest."""
        return self._receive(self._messages, min(_MESSAGE_BYTES, self._block_bytes))

    def raw_grpc(self) -> float:
        """The same without protobuf."""
        return self._receive(self._raw, min(_MESSAGE_BYTES, self._block_bytes))

    def _receive(self, stream: Callable[[bytes], Iterator[bytes]], message_bytes: int) -> float:
        def receive() -> None:
            at = 0
            for message in stream(_COUNT.pack(message_bytes)):
                self._room[at : at + len(message)] = np.frombuffer(message, np.uint8)
                at += len(message)
            assert at == self.batch_bytes

        return seconds(receive)


def measure(
    block_bytes: int, count: int, rounds: int, connections: int | None, report: Report, *, has_goals: bool
) -> None:
    """One size of block and batch."""
    batch_bytes = block_bytes * count
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    with (
        start_daemon(_BATCHES * batch_bytes * 5 // 4 + (64 << 20), endpoint),
        sender("bare", batch_bytes) as bare,
        sender("grpc", batch_bytes) as streaming,
    ):
        with kvstore.connect(endpoint, timeout_s=60.0) as client:
            wait_populated(client)
        receiver = Receiver(endpoint, block_bytes, count, connections)
        receiver.use_bare(bare)
        receiver.use_grpc(streaming)
        cases = {
            "select": receiver.select,
            "bare": receiver.bare,
            "grpc": receiver.grpc,
            "grpc in pieces": receiver.grpc_in_pieces,
            "raw grpc": receiver.raw_grpc,
        }
        times = in_turn(cases, rounds)
        receiver.client.close()
    rates = {name: f"{batch_bytes / 1e9 / float(np.median(took)):.2f} GB/s" for name, took in times.items()}
    what = f"{count} x {block_bytes >> 10} KiB"
    for against, goal in (("bare", 0.8), ("grpc", 5.0), ("grpc in pieces", 5.0), ("raw grpc", None)):
        ratio = Ratio.of(times[against], times["select"])
        verdict = report.goal(f"{what} / {against}", ratio.median, at_least=goal) if has_goals and goal else ""
        report.rows.append((f"select, {what}, against {against}", rates["select"], rates[against], str(ratio), verdict))
        report.figures[f"select_{count}x{block_bytes >> 10}k_to_{against.replace(' ', '_')}"] = ratio.as_json()


@click.command()
@click.option("--smoke", is_flag=True, help="A few small blocks, to see that the bench works.")
@click.option("--connections", type=int, help="Data connections of the client. Default: what the client takes.")
@click.option("--own-network", "is_own", is_flag=True, help="In a network of its own whose connections all have reno.")
def main(smoke: bool, connections: int | None, is_own: bool) -> None:
    """Remote select against sendfile and gRPC."""
    if is_own:
        own_network("reno")
    with socket.socket() as any_socket:
        network = congestion.current(any_socket)
    report = Report("remote", ("what", "kvstore", "against", "ratio [middle half]", "goal"))
    if smoke:
        measure(1 << 20, 4, 2, connections, report, has_goals=True)
    else:
        measure(8 << 20, 16, 15, connections, report, has_goals=True)
        measure(8 << 20, 1, 41, connections, report, has_goals=False)
        measure(64 << 10, 512, 15, connections, report, has_goals=False)
    report.show({"network": network})


if __name__ == "__main__":
    main()
