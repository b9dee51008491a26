"""The Redis tier against plain redis-py, a bare socket, and redis-benchmark, in turn against one server of its own.

Large blocks (4 and 8 MiB)
    tier        what the daemon does: RedisTier.read and .write of a batch, checked, in parts
    redis-py    get and set of whole blocks with redis-py, one after another, in a process of its own: as `pip install
                redis` gives it, with a parser in Python, and with hiredis, which it takes where it is installed; what
                was got is copied to its place
    bare        a blocking socket with the congestion control that the tier's has: the same number of bytes as GET and
                SET with recv_into and sendmsg, the next GET sent before the value of the last one has come, nothing
                checked. Once with whole blocks, once cut as the tier cuts them; the faster one counts.
Small blocks (64 KiB)
    redis-benchmark with as many commands in flight, as a process of its own.

Batches are of 32 MiB, as the daemon makes them. Stores go to names that are not there; what was there is removed
outside the time, by every side in the same way, and the server keeps the memory for what comes next, as a full one
does. redis-benchmark stores as many keys again and again.

What the server sends, its system's congestion control decides. The tier and the bare socket choose one for what they
send, redis-py does not. With --own-network all of it runs, where that is permitted, in a network whose connections all
have reno.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import click
from redis import Redis

from bench import redis_plain
from bench.harness import ROOT, Ratio, Report, in_turn, own_network, private_memory, seconds
from kvstore import congestion
from kvstore.clock import SystemClock
from kvstore.tier import ReadOutcome, WriteOutcome, tier_key
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_value import PAYLOAD_BYTES

_BINARIES: Final = ("redis-server", "redis-benchmark")
_DEADLINE_S: Final = 30.0
_SMALL_BYTES: Final = 64 << 10
_IN_FLIGHT: Final = 32
#: Goals.
_OVER_PLAIN: Final = 2.5
_OF_BARE: Final = 0.70
_OF_BENCHMARK: Final = 0.5


@contextlib.contextmanager
def running_server() -> Iterator[int]:
    """A server without persistence; its port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        command += ["--save", "", "--appendonly", "no", "--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + _DEADLINE_S
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                    break
                if time.monotonic() > deadline:
                    raise SystemExit("redis-server does not start")
                time.sleep(0.01)
            yield port
        finally:
            process.terminate()
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


class Plain:
    """redis-py in a process of its own."""

    def __init__(self, port: int, block_bytes: int, count: int, *, hiredis: bool) -> None:
        command = [sys.executable, "-m", "bench.redis_plain", str(port), str(block_bytes), str(count)]
        command += [] if hiredis else ["without-hiredis"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit("the process with redis-py has ended")
        return line

    def move(self, verb: str) -> float:
        """All blocks; returns the seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{verb}\n")
        return float(self._answer())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Sides:
    """A batch of blocks, and everybody who moves it.

    Args:
        size_bytes: Of one block.
        count: Blocks of the batch.
    """

    def __init__(self, runner: asyncio.Runner, tier: RedisTier, port: int, size_bytes: int, count: int) -> None:
        self._runner = runner
        self._tier = tier
        self._admin = Redis(port=port)
        self._plain = Plain(port, size_bytes, count, hiredis=False)
        self._hiredis = Plain(port, size_bytes, count, hiredis=True)
        self._bare = Bare(port)
        self._count = count
        memory = memoryview(private_memory(2 * size_bytes * count)).cast("B")
        half = size_bytes * count
        for at in range(0, half, 4096):
            memory[at : at + 8] = (at * 2654435761 + size_bytes).to_bytes(16, "little")[:8]
        self._datas = [memory[at : at + size_bytes] for at in range(0, half, size_bytes)]
        self._rooms = [memory[half + at : half + at + size_bytes] for at in range(0, half, size_bytes)]
        self._keys = [
            tier_key(b"b" * 16, 0, size_bytes.to_bytes(8, "big") + n.to_bytes(4, "big")) for n in range(count)
        ]
        self._names = redis_plain.names(size_bytes, count)
        cut = [(n, at) for n in range(count) for at in range(0, size_bytes, PAYLOAD_BYTES)]
        self._part_names = [b"part:%d:%d:%d" % (size_bytes, number, at) for number, at in cut]
        self._part_datas = [self._datas[number][at : at + PAYLOAD_BYTES] for number, at in cut]
        self._part_rooms = [self._rooms[number][at : at + PAYLOAD_BYTES] for number, at in cut]

    def close(self) -> None:
        self.forget()
        self._plain.close()
        self._hiredis.close()
        self._admin.close()
        self._bare.close()

    def forget(self) -> None:
        """Removes all that was stored, and waits until its memory is free."""
        self._admin.delete(*self._names, *self._part_names)
        self._runner.run(self._tier.delete(self._keys))
        while self._admin.info("memory")["lazyfree_pending_objects"]:
            time.sleep(0.001)

    def _check(self) -> None:
        for data, room in zip(self._datas, self._rooms, strict=True):
            assert room[:4096] == data[:4096] and room[-4096:] == data[-4096:]
            room[:8] = bytes(8)

    def tier_set(self) -> float:
        self.forget()
        blocks = list(zip(self._keys, self._datas, strict=True))
        outcomes: list[WriteOutcome] = []

        def go() -> None:
            outcomes.extend(self._runner.run(self._tier.write(blocks, _DEADLINE_S)))

        taken = seconds(go)
        assert set(outcomes) == {WriteOutcome.STORED}, outcomes
        return taken

    def tier_get(self) -> float:
        if self._runner.run(self._tier.stat(self._keys)) != [len(self._datas[0])] * self._count:
            self.tier_set()
        blocks = list(zip(self._keys, self._rooms, strict=True))
        outcomes: list[ReadOutcome] = []

        def go() -> None:
            outcomes.extend(self._runner.run(self._tier.read(blocks, _DEADLINE_S)))

        taken = seconds(go)
        assert set(outcomes) == {ReadOutcome.OK}, outcomes
        self._check()
        return taken

    def plain_set(self) -> float:
        self.forget()
        return self._plain.move("set")

    def plain_get(self) -> float:
        self.plain_set()
        return self._plain.move("get")

    def hiredis_set(self) -> float:
        self.forget()
        return self._hiredis.move("set")

    def hiredis_get(self) -> float:
        self.hiredis_set()
        return self._hiredis.move("get")

    def bare_set(self) -> float:
        self.forget()
        return seconds(lambda: self._bare.set(self._names, self._datas))

    def bare_get(self) -> float:
        self.bare_set()
        taken = seconds(lambda: self._bare.get(self._names, self._rooms))
        self._check()
        return taken

    def bare_parts_set(self) -> float:
        self.forget()
        return seconds(lambda: self._bare.set(self._part_names, self._part_datas))

    def bare_parts_get(self) -> float:
        self.bare_parts_set()
        taken = seconds(lambda: self._bare.get(self._part_names, self._part_rooms))
        self._check()
        return taken


def measure_large(sides: Sides, size_bytes: int, count: int, rounds: int, report: Report) -> None:
    """GET and SET of large blocks."""
    for verb in ("get", "set"):
        names = ("tier", "plain", "hiredis", "bare", "bare_parts")
        times = in_turn({name: getattr(sides, f"{name}_{verb}") for name in names}, rounds)
        bare = min(times["bare"], times["bare_parts"], key=statistics.median)
        over_plain, of_bare = Ratio.of(times["plain"], times["tier"]), Ratio.of(bare, times["tier"])
        over_hiredis = Ratio.of(times["hiredis"], times["tier"])
        what = f"{verb.upper()} of {size_bytes >> 20} MiB"
        gigabytes = size_bytes * count / 1e9
        report.rows.append(
            (
                what,
                f"{gigabytes / sorted(times['tier'])[rounds // 2]:.2f}",
                f"{gigabytes / sorted(times['plain'])[rounds // 2]:.2f}",
                f"{gigabytes / sorted(times['hiredis'])[rounds // 2]:.2f}",
                f"{gigabytes / sorted(bare)[rounds // 2]:.2f}",
                str(over_plain),
                report.goal(f"{what} against redis-py", over_plain.median, at_least=_OVER_PLAIN),
                str(over_hiredis),
                str(of_bare),
                report.goal(f"{what} against a bare socket", of_bare.median, at_least=_OF_BARE),
            )
        )
        report.figures[f"{verb}_{size_bytes >> 20}m"] = {
            "over_plain": over_plain.as_json(),
            "over_hiredis": over_hiredis.as_json(),
            "of_bare": of_bare.as_json(),
        }


def benchmark(port: int, verb: str, count: int) -> float:
    """Seconds that redis-benchmark takes for one value, with about as many keys as there are blocks."""
    if verb == "get":
        benchmark(port, "set", count)
    command = ["redis-benchmark", "-p", str(port), "-t", verb, "-d", str(_SMALL_BYTES), "-n", str(8 * count)]
    command += ["-r", str(count), "-P", str(_IN_FLIGHT), "-c", "1", "--csv"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    return 1.0 / float(found.split(",")[1].strip('"'))


def measure_small(sides: Sides, port: int, count: int, rounds: int, report: Report) -> None:
    """Pipelined GET and SET of small blocks."""
    for verb in ("get", "set"):
        tier: Callable[[], float] = getattr(sides, f"tier_{verb}")
        times = in_turn(
            {"tier": lambda tier=tier: tier() / count, "theirs": lambda verb=verb: benchmark(port, verb, count)},  # type: ignore[misc]
            rounds,
        )
        ratio = Ratio.of(times["theirs"], times["tier"])
        what = f"{verb.upper()} of 64 KiB, in flight"
        speeds = [_SMALL_BYTES / 1e9 / sorted(times[side])[rounds // 2] for side in ("tier", "theirs")]
        report.rows.append(
            (
                what,
                f"{speeds[0]:.2f}",
                "",
                "",
                f"{speeds[1]:.2f} (redis-benchmark)",
                "",
                "",
                "",
                str(ratio),
                report.goal(f"{what} against redis-benchmark", ratio.median, at_least=_OF_BENCHMARK),
            )
        )
        report.figures[f"{verb}_64k"] = {"of_redis_benchmark": ratio.as_json()}


@click.command()
@click.option("--smoke", is_flag=True, help="Few blocks and rounds, to see that the bench works.")
@click.option("--rounds", default=15, help="Rounds that count.")
@click.option("--own-network", "own", is_flag=True, help="In a network of its own, where all have the same congestion.")
def main(smoke: bool, rounds: int, own: bool) -> None:
    """The Redis tier against redis-py, a bare socket and redis-benchmark."""
    if missing := [binary for binary in _BINARIES if shutil.which(binary) is None]:
        raise SystemExit(f"{' and '.join(missing)} not installed: nothing to measure")
    rounds = 2 if smoke else rounds
    columns = ("what", "tier GB/s", "redis-py", "with hiredis", "bare", "tier / redis-py", "goal")
    columns += ("tier / hiredis", "tier / bare", "goal")
    report = Report("redis", columns)
    if own:
        own_network("reno")
    with socket.socket() as any_socket:
        network = congestion.current(any_socket)
    with running_server() as port, asyncio.Runner() as runner:
        tier = _open(runner, port)
        try:
            for size_bytes in (4 << 20, 8 << 20):
                count = (16 << 20 if smoke else 32 << 20) // size_bytes
                with contextlib.closing(Sides(runner, tier, port, size_bytes, count)) as sides:
                    measure_large(sides, size_bytes, count, rounds, report)
            count = 64 if smoke else 512
            with contextlib.closing(Sides(runner, tier, port, _SMALL_BYTES, count)) as sides:
                measure_small(sides, port, count, rounds, report)
        finally:
            runner.run(tier.close())
    report.notes.append("Medians of the ratios within the rounds, with the middle half of them; GB/s are medians.")
    report.show({"redis": _version(), "congestion": network})


def _open(runner: asyncio.Runner, port: int) -> RedisTier:
    async def go() -> RedisTier:
        tier = RedisTier(f"redis://127.0.0.1:{port}", SystemClock(), deadline_s=_DEADLINE_S)
        await tier.open()
        return tier

    return runner.run(go())


def _version() -> str:
    text: Any = subprocess.run(["redis-server", "--version"], check=True, capture_output=True, text=True).stdout
    return str(text).split("v=")[1].split()[0]


if __name__ == "__main__":
    main()
