"""The Redis tier against plain redis-py, a bare socket, and redis-benchmark, in turn, each against a server of its own.

Large blocks (4 and 8 MiB)
    tier        what the daemon does: RedisTier.read and .write of a batch, checked, in parts
    redis-py    get and set of whole blocks with redis-py, one after another, in a process of its own: as `pip install
                redis` gives it, with a parser in Python, and with hiredis, which it takes where it is installed. set is
                given a memoryview of the block, which redis-py sends as it is (bytes would have to be copied first);
                what was got is copied to its place. So does the Redis backend of LMCache.
    bare        a blocking socket with the congestion control that the tier's has: the same number of bytes as GET and
                SET with recv_into and sendmsg, the next GET sent before the value of the last one has come, nothing
                checked. Once with whole blocks, once cut as the tier cuts them; the faster one counts.
    the most    the bytes of the tier's SETs by the processor time of the server's thread for them: what a client gets
                that never lets the server wait and takes nothing away from it, however many connections it has
Small blocks (64 KiB)
    redis-benchmark with as many commands in flight, as a process of its own.

Batches are of 32 MiB, as the daemon makes them. Servers are full, as those in use are: each SET is of a new name and
makes the server evict what is oldest, so that its memory is what that leaves. (A server that is filling up gets each
page from the kernel anew, and hardly takes 1 GB/s from anybody.) All have the settings that a server comes with, but
for maxmemory, its policy, and no persistence. Servers, processes and memory are made anew several times in a run, since
where they happen to lie decides on a third of the figures.

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
from collections.abc import Callable
from typing import Any, Final

import click

from bench.harness import Ratio, Report, in_turn, own_network
from bench.redis_sides import BareSide, Benchmark, Blocks, Ours, Plain, Server, Side, running_server
from kvstore import congestion
from kvstore.tiers.redis_value import PAYLOAD_BYTES

_BINARIES: Final = ("redis-server", "redis-benchmark")
_BATCH_BYTES: Final = 32 << 20
_SERVER_BYTES: Final = 256 << 20
_SMALL_BYTES: Final = 64 << 10
_IN_FLIGHT: Final = 32
#: Goals.
_OVER_PLAIN: Final = 2.5
_OF_BARE: Final = 0.70
_OF_BENCHMARK: Final = 0.5

Make = Callable[[contextlib.ExitStack], dict[str, Side]]
Times = dict[str, list[float]]


def measure(make: Make, setups: int, rounds: int) -> dict[str, Times]:
    """Times of all sides for "get" and "set", round by round; beside those for "set", as "busy", the seconds of the
    server's thread for the tier's stores.

    Args:
        make: Makes the sides, with servers of their own.
    """
    times: dict[str, Times] = {"get": {}, "set": {}}
    for _ in range(setups):
        with contextlib.ExitStack() as stack:
            sides = make(stack)
            for side in sides.values():
                side.fill()
            for side in sides.values():
                side.set()  # what get() loads is newer than all else
            for verb, so_far in times.items():
                found = in_turn({name: getattr(side, verb) for name, side in sides.items()}, rounds)
                if verb == "set":
                    found["busy"] = sides["tier"].busy[-rounds:]
                for name, values in found.items():
                    so_far.setdefault(name, []).extend(values)
    return times


def rate(times: list[float], batch_bytes: int) -> str:
    """In GB/s, as it is shown."""
    return f"{batch_bytes / 1e9 / statistics.median(times):.2f}"


class Bench:
    """All of it.

    Args:
        smoke: Little of everything.
    """

    def __init__(self, runner: asyncio.Runner, report: Report, setups: int, rounds: int, *, smoke: bool) -> None:
        self._runner = runner
        self._report = report
        self._setups = setups
        self._rounds = rounds
        self._smoke = smoke
        self._batch_bytes = _BATCH_BYTES // 2 if smoke else _BATCH_BYTES

    def _server(self, stack: contextlib.ExitStack) -> Server:
        return stack.enter_context(running_server(_SERVER_BYTES // 4 if self._smoke else _SERVER_BYTES))

    def _sides(self, stack: contextlib.ExitStack, makers: dict[str, Callable[[Server], Side]]) -> dict[str, Side]:
        sides = {}
        for name, make in makers.items():
            sides[name] = side = make(self._server(stack))
            stack.callback(side.close)
        return sides

    def large(self, size_bytes: int) -> None:
        """GET and SET of large blocks."""

        def make(stack: contextlib.ExitStack) -> dict[str, Side]:
            blocks = Blocks(size_bytes, self._batch_bytes // size_bytes)
            makers: dict[str, Callable[[Server], Side]] = {
                "tier": lambda server: Ours(server, blocks, self._runner),
                "plain": lambda server: Plain(server, blocks, hiredis=False),
                "hiredis": lambda server: Plain(server, blocks, hiredis=True),
                "bare": lambda server: BareSide(server, blocks),
                "bare_parts": lambda server: BareSide(server, blocks, PAYLOAD_BYTES),
            }
            return self._sides(stack, makers)

        for verb, times in measure(make, self._setups, self._rounds).items():
            bare = min(times["bare"], times["bare_parts"], key=statistics.median)
            by_bare = Ratio.of(times["plain"], bare)
            over_plain, of_bare = Ratio.of(times["plain"], times["tier"]), Ratio.of(bare, times["tier"])
            over_hiredis = Ratio.of(times["hiredis"], times["tier"])
            what = f"{verb.upper()} of {size_bytes >> 20} MiB"
            figures = {
                "over_plain": over_plain.as_json(),
                "over_hiredis": over_hiredis.as_json(),
                "of_bare": of_bare.as_json(),
                "bare_over_plain": by_bare.as_json(),
            }
            most = ""
            if verb == "set":
                limit = Ratio.of(times["plain"], times["busy"])
                figures["most_over_plain"] = limit.as_json()
                most = f"{limit.median:.2f}"
            self._report.rows.append(
                (
                    what,
                    *(rate(times[name], self._batch_bytes) for name in ("tier", "plain", "hiredis")),
                    rate(bare, self._batch_bytes),
                    str(over_plain),
                    self._report.goal(f"{what} against redis-py", over_plain.median, at_least=_OVER_PLAIN),
                    f"{by_bare.median:.2f}",
                    most,
                    str(over_hiredis),
                    str(of_bare),
                    self._report.goal(f"{what} against a bare socket", of_bare.median, at_least=_OF_BARE),
                )
            )
            self._report.figures[f"{verb}_{size_bytes >> 20}m"] = figures

    def small(self) -> None:
        """Pipelined GET and SET of small blocks."""

        def make(stack: contextlib.ExitStack) -> dict[str, Side]:
            blocks = Blocks(_SMALL_BYTES, 64 if self._smoke else _BATCH_BYTES // _SMALL_BYTES)
            makers: dict[str, Callable[[Server], Side]] = {
                "tier": lambda server: Ours(server, blocks, self._runner),
                "theirs": lambda server: Benchmark(server, blocks, _SMALL_BYTES, 1, _IN_FLIGHT, rounds=8),
            }
            return self._sides(stack, makers)

        batch_bytes = 64 * _SMALL_BYTES if self._smoke else _BATCH_BYTES
        for verb, times in measure(make, self._setups, self._rounds).items():
            ratio = Ratio.of(times["theirs"], times["tier"])
            what = f"{verb.upper()} of 64 KiB, in flight"
            self._report.rows.append(
                (
                    what,
                    *(rate(times["tier"], batch_bytes), "", ""),
                    f"{rate(times['theirs'], batch_bytes)} (redis-benchmark)",
                    *("", "", "", "", ""),
                    str(ratio),
                    self._report.goal(f"{what} against redis-benchmark", ratio.median, at_least=_OF_BENCHMARK),
                )
            )
            self._report.figures[f"{verb}_64k"] = {"of_redis_benchmark": ratio.as_json()}


@click.command()
@click.option("--smoke", is_flag=True, help="Few blocks and rounds, to see that the bench works.")
@click.option("--setups", default=3, help="How often servers, processes and memory are made anew.")
@click.option("--rounds", default=6, help="Rounds that count, with each of them.")
@click.option("--own-network", "own", is_flag=True, help="In a network of its own, where all have the same congestion.")
def main(smoke: bool, setups: int, rounds: int, own: bool) -> None:
    """The Redis tier against redis-py, a bare socket and redis-benchmark."""
    if missing := [binary for binary in _BINARIES if shutil.which(binary) is None]:
        raise SystemExit(f"{' and '.join(missing)} not installed: nothing to measure")
    columns = ("what", "tier GB/s", "redis-py", "with hiredis", "bare", "tier / redis-py", "goal")
    columns += ("bare / redis-py", "server busy / redis-py", "tier / hiredis", "tier / bare", "goal")
    report = Report("redis", columns)
    if own:
        own_network("reno")
    with socket.socket() as any_socket:
        network = congestion.current(any_socket)
    with asyncio.Runner() as runner:
        bench = Bench(runner, report, 1 if smoke else setups, 1 if smoke else rounds, smoke=smoke)
        bench.large(4 << 20)
        bench.large(8 << 20)
        bench.small()
    report.notes.append("Medians of the ratios within the rounds, with the middle half of them; GB/s are medians.")
    report.notes.append(
        "server busy: the bytes of the tier's SETs by the processor time of the server's thread for them."
    )
    report.show({"redis": _version(), "congestion": network})


def _version() -> str:
    text: Any = subprocess.run(["redis-server", "--version"], check=True, capture_output=True, text=True).stdout
    return str(text).split("v=")[1].split()[0]


if __name__ == "__main__":
    main()
