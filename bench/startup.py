"""How long `kvstore serve` takes until it answers a ping, for several sizes of the pool.

Compared with `python -c pass` in the same rounds: what the interpreter alone takes. Compiled modules come from a cache
of this run's own, as an installed package has them; the first round, which fills it, is not counted. Population goes on
after the ping and is cut short by the end of the daemon.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import click

from bench.harness import ROOT, Ratio, Report, in_turn, seconds, start_daemon
from kvstore.admin import AdminClient
from kvstore.machine import read_machine

_GOAL_S: Final = 1.0
_GIVE_UP_S: Final = 30.0
#: What is left of the machine by the largest pool: others are at work on it too.
_LARGEST_SHARE: Final = 0.8


def until_ping(cpu_bytes: int, folder: Path) -> float:
    """Starts a daemon and waits until it has answered a ping. Returns the seconds it took."""
    path = folder / "kvstore.sock"
    begin = time.perf_counter()
    with start_daemon(cpu_bytes, f"unix:{path}") as process:
        # A channel that is opened too early waits before it tries again; a socket tells at once.
        while True:
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(str(path))
                    break
                except OSError:
                    assert process.poll() is None and time.perf_counter() - begin < _GIVE_UP_S, "it does not start"
            time.sleep(0.001)
        with AdminClient(f"unix:{path}", None, _GIVE_UP_S) as client:
            assert client.ping().pid == process.pid
        return time.perf_counter() - begin


def sizes(smoke: bool) -> dict[str, int]:
    """Pools to start, by name."""
    if smoke:
        return {"64 MiB": 64 << 20}
    room = read_machine().pool_bytes_max(hugetlb=False)
    wanted = {"1 GB": 10**9, "8 GB": 8 * 10**9}
    largest = int(room * _LARGEST_SHARE)
    return {name: size for name, size in wanted.items() if size <= largest} | {f"{largest / 1e9:.0f} GB": largest}


@click.command()
@click.option("--smoke", is_flag=True, help="One small pool, one round.")
def main(smoke: bool) -> None:
    """Time to ready."""
    report = Report("startup", ("pool", "ready", "slowest", "times `python -c pass`", "goal"))
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        os.environ["PYTHONPYCACHEPREFIX"] = f"{folder}/pycache"
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

        def bare() -> float:
            return seconds(lambda: subprocess.run([sys.executable, "-c", "pass"], cwd=ROOT, check=True))

        def start(cpu_bytes: int) -> Callable[[], float]:
            return lambda: until_ping(cpu_bytes, Path(folder))

        pools = sizes(smoke)
        times = in_turn({"bare": bare, **{name: start(size) for name, size in pools.items()}}, 1 if smoke else 7)
    for name in pools:
        median = statistics.median(times[name])
        ratio = Ratio.of(times[name], times["bare"])
        goal = report.goal(f"ready with {name}", median, at_most=_GOAL_S)
        report.rows.append((name, f"{median:.2f} s", f"{max(times[name]):.2f} s", str(ratio), goal))
        report.figures[name] = {"ready_s": round(median, 3), "to_bare": ratio.as_json()}
    report.rows.append(("python -c pass", f"{statistics.median(times['bare']):.3f} s", "", "", ""))
    report.show()


if __name__ == "__main__":
    main()
