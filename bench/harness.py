"""What the benches share: a daemon of their own, touched memory, interleaved rounds, and a plain report.

Times on a shared machine say little; a ratio says something if both sides ran in turn within one run. So every bench
runs its cases round by round, in an order that changes, and reports the median of the ratios within the rounds.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import faulthandler
import fcntl
import json
import mmap
import os
import platform
import random
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

import kvstore
from kvstore.arena import ArenaView

ROOT: Final = Path(__file__).resolve().parent.parent
_START_S: Final = 60.0
_POPULATE_S: Final = 300.0
#: After a time limit: longest time to tell what there is and to end what was started.
_END_S: Final = 60.0
_MADV_HUGEPAGE: Final = 14
# linux/sched.h, linux/sockios.h, linux/if.h
_CLONE_NEWNET: Final = 0x40000000
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 0x1
_IFF_RUNNING: Final = 0x40

Bytes = npt.NDArray[np.uint8]


# -- a daemon ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon in a folder of its own."""

    endpoint: str
    pid: int

    def heap_bytes(self) -> int:
        """Private memory of its process: what its books take, without the pool."""
        return heap_bytes(self.pid)


@contextlib.contextmanager
def running_daemon(cpu_bytes: int, *flags: str) -> Iterator[Daemon]:
    """Starts `kvstore serve` and waits until it answers and its pool is populated; stops it at the end."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        endpoint = f"unix:{folder}/kvstore.sock"
        with start_daemon(cpu_bytes, endpoint, *flags) as process:
            with kvstore.connect(endpoint, timeout_s=_START_S, prefault=False) as client:
                wait_populated(client)
            yield Daemon(endpoint, process.pid)


@contextlib.contextmanager
def start_daemon(cpu_bytes: int, endpoint: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts `kvstore serve` and returns at once; stops it at the end."""
    command = [sys.executable, "-m", "kvstore", "serve", "--cpu-bytes", str(cpu_bytes), "--listen", endpoint, *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_populated(client: kvstore.Client) -> dict[str, Any]:
    """Waits until the pool has all its memory. Returns the figures of the cpu tier."""
    deadline = time.monotonic() + _POPULATE_S
    while (tier := client.stats()["tiers"][0])["state"] == "populating":
        if time.monotonic() > deadline:
            raise SystemExit(f"the pool is not populated after {_POPULATE_S:.0f} s")
        time.sleep(0.05)
    return dict(tier)


def heap_bytes(pid: int | str = "self") -> int:
    """Anonymous resident memory of a process."""
    return _status_bytes(pid, "RssAnon")


def peak_bytes(pid: int | str = "self") -> int:
    """The most memory that a process ever had resident."""
    return _status_bytes(pid, "VmHWM")


def _status_bytes(pid: int | str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) << 10


# -- network -----------------------------------------------------------------------------------------------------------


def own_network(algorithm: str) -> None:
    """Moves this process, and what it starts from now on, to a network of its own with loopback alone, whose TCP
    connections all have one congestion control. Call it before there are threads. Where that is not permitted (it takes
    root) everything stays as it is.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(OSError):
        if libc.unshare(_CLONE_NEWNET) == 0:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _IFF_UP | _IFF_RUNNING))
            # Others than reno may be for the machine's own network alone.
            Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(algorithm)


# -- memory ------------------------------------------------------------------------------------------------------------


def private_memory(size_bytes: int) -> Bytes:
    """Private memory of this process, on huge pages where the kernel gives some, all of it touched."""
    map_ = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        map_.madvise(_MADV_HUGEPAGE)
    memory = np.frombuffer(map_, dtype=np.uint8)
    memory[:: mmap.PAGESIZE] = 1
    return memory


def prefault(arena: ArenaView) -> None:
    """Makes all page-table entries of the pool in this process; the client does the same in the background."""
    arena.prefault(0, arena.size_bytes)


def huge_share(address: int) -> float:
    """How much of the mapping at an address this process sees through huge pages, 0 to 1."""
    text = Path("/proc/self/smaps").read_text()
    for area in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        first, last = (int(part, 16) for part in area.split(" ", 1)[0].split("-"))
        if not first <= address < last:
            continue
        sizes = {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB", area, re.MULTILINE)}
        if sizes.get("KernelPageSize", 4) > 4:
            return 1.0
        huge = sizes.get("ShmemPmdMapped", 0) + sizes.get("AnonHugePages", 0) + sizes.get("FilePmdMapped", 0)
        return huge / max(1, sizes.get("Rss", 0))
    raise LookupError(f"nothing is mapped at {address:#x}")


# -- rounds ------------------------------------------------------------------------------------------------------------


def in_turn(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Runs every case once per round, in an order that changes; what each returns, by case and round.

    A first round that is not kept warms caches, connections and the clock of the processor.
    """
    order = random.Random(1)
    names = list(cases)
    results: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds + 1):
        order.shuffle(names)
        for name in names:
            value = cases[name]()
            if index:
                results[name].append(value)
    return results


@dataclasses.dataclass(frozen=True, slots=True)
class Ratio:
    """Median of the ratios within the rounds, and the middle half of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, upper: Sequence[float], lower: Sequence[float]) -> Ratio:
        """The ratio upper / lower, round by round."""
        ratios = sorted(a / b for a, b in zip(upper, lower, strict=True))
        return cls(statistics.median(ratios), ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4])

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}..{self.high:.2f}]"

    def as_json(self) -> list[float]:
        """Median and middle half, rounded."""
        return [round(value, 3) for value in (self.median, self.low, self.high)]


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class _TimeOver(Exception):
    """Raised by time_limit, and caught there."""


@contextlib.contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Breaks the block off after so many seconds and says so; what was measured until then can be told. The whole
    process ends a minute later, with the stacks of its threads, where a call that nothing interrupts keeps it. For the
    main thread, once at a time.
    """

    def over(_number: int, _frame: object) -> None:
        raise _TimeOver

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    faulthandler.dump_traceback_later(limit_s + _END_S, exit=True)
    try:
        yield
    except _TimeOver:
        print(f"broken off: not through after {limit_s:.0f} s", flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


# -- reporting ---------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What was measured on, with the load that others made at that time."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu.group(1) if cpu else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


@dataclasses.dataclass(slots=True)
class Report:
    """Rows for people and figures for machines.

    Attributes:
        figures: What the line of JSON holds beside the machine.
        misses: Goals that were not met, in words.
    """

    bench: str
    columns: Sequence[str]
    rows: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    misses: list[str] = dataclasses.field(default_factory=list)

    def goal(self, name: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> str:
        """Compares a figure with its goal; says it in a word for the table."""
        met = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
        wanted = f">= {at_least}" if at_least is not None else f"<= {at_most}"
        if not met:
            self.misses.append(f"{name}: {value:.3g}, goal {wanted}")
        return f"{wanted} {'met' if met else 'MISSED'}"

    def show(self, facts: Mapping[str, Any] | None = None) -> None:
        """Prints the table, then everything as one line of JSON."""
        where = {**machine(), **(facts or {})}
        table = Table(title=f"bench.{self.bench}", caption="; ".join(f"{key} {value}" for key, value in where.items()))
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        console = Console(width=None if sys.stdout.isatty() else 140)
        console.print(table)
        for note in self.notes:
            console.print(note, markup=False)
        line = {"bench": self.bench, "machine": where, "figures": self.figures, "misses": self.misses}
        print(json.dumps(line), flush=True)
