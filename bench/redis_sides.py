"""Who moves batches of blocks to and from a Redis server, each with a server of its own: for bench.redis."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench import redis_plain
from bench.harness import ROOT, private_memory, seconds
from kvstore import congestion
from kvstore.clock import SystemClock
from kvstore.tier import ReadOutcome, WriteOutcome, tier_key
from kvstore.tiers.redis import RedisTier

_DEADLINE_S: Final = 30.0
#: The server knows the age of its values in seconds: what is newer than that it may take for old.
_APART_S: Final = 1.1
#: Keys of redis-benchmark that are never the same twice.
_KEYS: Final = 10**11


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """A redis-server.

    Attributes:
        size_bytes: Its maxmemory.
    """

    port: int
    pid: int
    size_bytes: int

    def busy_s(self) -> float:
        """Processor time of the thread that serves, so far."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[0]) / 1e9


@contextlib.contextmanager
def running_server(size_bytes: int) -> Iterator[Server]:
    """A server without persistence, and room for so much."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
        command += ["--appendonly", "no", "--maxmemory", str(size_bytes), "--maxmemory-policy", "allkeys-lru"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + _DEADLINE_S
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                    break
                if time.monotonic() > deadline:
                    raise SystemExit("redis-server does not start")
                time.sleep(0.01)
            yield Server(port, process.pid, size_bytes)
        finally:
            process.kill()
            process.wait()


class Bare:
    """RESP on a socket, and nothing else."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), _DEADLINE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(None)
        congestion.choose(self._socket)

    def close(self) -> None:
        self._socket.close()

    def get(self, keys: list[bytes], rooms: list[memoryview]) -> None:
        """Values, into their places. Their lengths are known, so that only what stands between them is looked at."""
        commands = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys]
        self._socket.sendall(commands[0])
        for number, room in enumerate(rooms):
            if number + 1 < len(commands):
                self._socket.sendall(commands[number + 1])
            head = b"$%d\r\n" % room.nbytes
            assert self._exactly(len(head)) == head
            got = 0
            while got < room.nbytes:
                got += self._socket.recv_into(room[got:])
            assert self._exactly(2) == b"\r\n"

    def set(self, keys: list[bytes], datas: list[memoryview]) -> None:
        """Values, from their places."""
        for key, data in zip(keys, datas, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, data.nbytes)
            views = [memoryview(head), data, memoryview(b"\r\n")]
            while views:
                count = self._socket.sendmsg(views)
                while views and count >= views[0].nbytes:
                    count -= views.pop(0).nbytes
                if count:
                    views[0] = views[0][count:]
        assert self._exactly(5 * len(keys)) == b"+OK\r\n" * len(keys)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += self._socket.recv(size - len(data))
        return data


class Blocks:
    """A batch of blocks: where they are, and where they go.

    Args:
        size_bytes: Of one block.
        count: Blocks of the batch.
    """

    def __init__(self, size_bytes: int, count: int) -> None:
        self.size_bytes = size_bytes
        self.count = count
        memory = memoryview(private_memory(2 * size_bytes * count)).cast("B")
        half = size_bytes * count
        for at in range(0, half, 4096):
            memory[at : at + 8] = (at * 2654435761 + size_bytes).to_bytes(16, "little")[:8]
        self.datas = [memory[at : at + size_bytes] for at in range(0, half, size_bytes)]
        self.rooms = [memory[half + at : half + at + size_bytes] for at in range(0, half, size_bytes)]

    def check(self) -> None:
        """All has come."""
        for data, room in zip(self.datas, self.rooms, strict=True):
            assert room[:4096] == data[:4096] and room[-4096:] == data[-4096:]
            room[:8] = bytes(8)


class Side(abc.ABC):
    """Somebody who moves a batch, and a server that is full of what they have stored before.

    Attributes:
        busy: Seconds of the server's thread for each of the last stores.
    """

    def __init__(self, server: Server, blocks: Blocks) -> None:
        self.server = server
        self.blocks = blocks
        self.busy: list[float] = []
        self._stored = 0
        self._stored_at = 0.0

    def fill(self) -> None:
        """Fills the server."""
        for _ in range(self.batches):
            self._stored += 1
            self._set(self._stored)
        self._stored_at = time.monotonic()

    @property
    def batches(self) -> int:
        """More than the server holds."""
        return self.server.size_bytes // (self.blocks.size_bytes * self.blocks.count) + 1

    def set(self) -> float:
        """Stores a batch under new names; returns the seconds."""
        self._stored += 1
        time.sleep(max(0.0, self._stored_at + _APART_S - time.monotonic()))
        busy = self.server.busy_s()
        taken = self._set(self._stored)
        self._stored_at = time.monotonic()
        self.busy.append(self.server.busy_s() - busy)
        return taken

    def get(self) -> float:
        """Loads what was stored last; returns the seconds."""
        return self._get(self._stored)

    @abc.abstractmethod
    def _set(self, number: int) -> float: ...

    @abc.abstractmethod
    def _get(self, number: int) -> float: ...

    @abc.abstractmethod
    def close(self) -> None:
        """Ends what was begun."""


class Ours(Side):
    """The tier."""

    def __init__(self, server: Server, blocks: Blocks, runner: asyncio.Runner) -> None:
        super().__init__(server, blocks)
        self._runner = runner
        self._tier = RedisTier(f"redis://127.0.0.1:{server.port}", SystemClock(), deadline_s=_DEADLINE_S)
        runner.run(self._tier.open())

    def _keys(self, number: int) -> list[bytes]:
        start = number.to_bytes(8, "big")
        return [tier_key(b"b" * 16, 0, start + at.to_bytes(4, "big")) for at in range(self.blocks.count)]

    def _set(self, number: int) -> float:
        blocks = list(zip(self._keys(number), self.blocks.datas, strict=True))
        outcomes: list[WriteOutcome] = []
        taken = seconds(lambda: outcomes.extend(self._runner.run(self._tier.write(blocks, _DEADLINE_S))))
        assert set(outcomes) == {WriteOutcome.STORED}, outcomes
        return taken

    def _get(self, number: int) -> float:
        blocks = list(zip(self._keys(number), self.blocks.rooms, strict=True))
        outcomes: list[ReadOutcome] = []
        taken = seconds(lambda: outcomes.extend(self._runner.run(self._tier.read(blocks, _DEADLINE_S))))
        assert set(outcomes) == {ReadOutcome.OK}, outcomes
        self.blocks.check()
        return taken

    def close(self) -> None:
        self._runner.run(self._tier.close())


class Plain(Side):
    """redis-py in a process of its own."""

    def __init__(self, server: Server, blocks: Blocks, *, hiredis: bool) -> None:
        super().__init__(server, blocks)
        command = [sys.executable, "-m", "bench.redis_plain", str(server.port)]
        command += [str(blocks.size_bytes), str(blocks.count)] + ([] if hiredis else ["without-hiredis"])
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit("the process with redis-py has ended")
        return line

    def _move(self, verb: str, number: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{verb} {number}\n")
        return float(self._answer())

    def _set(self, number: int) -> float:
        return self._move("set", number)

    def _get(self, number: int) -> float:
        return self._move("get", number)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class BareSide(Side):
    """A bare socket.

    Args:
        cut_bytes: Of one value; None: whole blocks.
    """

    def __init__(self, server: Server, blocks: Blocks, cut_bytes: int | None = None) -> None:
        super().__init__(server, blocks)
        self._bare = Bare(server.port)
        cut = cut_bytes or blocks.size_bytes
        self._datas = [data[at : at + cut] for data in blocks.datas for at in range(0, blocks.size_bytes, cut)]
        self._rooms = [room[at : at + cut] for room in blocks.rooms for at in range(0, blocks.size_bytes, cut)]

    def _set(self, number: int) -> float:
        names = redis_plain.names(number, len(self._datas))
        return seconds(lambda: self._bare.set(names, self._datas))

    def _get(self, number: int) -> float:
        names = redis_plain.names(number, len(self._rooms))
        taken = seconds(lambda: self._bare.get(names, self._rooms))
        self.blocks.check()
        return taken

    def close(self) -> None:
        self._bare.close()


class Benchmark(Side):
    """redis-benchmark.

    Args:
        value_bytes: Of one value.
        connections: With `in_flight` commands on each.
        rounds: Batches of one run.
    """

    def __init__(
        self, server: Server, blocks: Blocks, value_bytes: int, connections: int, in_flight: int, *, rounds: int
    ) -> None:
        super().__init__(server, blocks)
        self._command = ["redis-benchmark", "-p", str(server.port), "-d", str(value_bytes), "--csv"]
        self._command += ["-c", str(connections), "-P", str(in_flight)]
        self._values = blocks.size_bytes * blocks.count // value_bytes
        self._rounds = rounds

    def fill(self) -> None:
        self._run("set", _KEYS, self.batches)

    def _run(self, verb: str, keys: int, rounds: int = 0) -> float:
        command = [*self._command, "-t", verb, "-r", str(keys), "-n", str((rounds or self._rounds) * self._values)]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        return self._values / float(found.split(",")[1].strip('"'))

    def _set(self, number: int) -> float:
        return self._run("set", _KEYS)

    def _get(self, number: int) -> float:
        self._run("set", self._values)
        return self._run("get", self._values)

    def close(self) -> None:
        """See Side. Each run is a process that has ended."""
