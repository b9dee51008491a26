"""The tiers below the pool, the second part of `make demo`: disk across a restart, Redis across two daemons.

The pool is smaller than what is stored. The same prompts are loaded from one daemon, from the same one after a restart,
and from a second one that has another disk and shares only Redis with the first. Every byte is compared, and the table
says which tier the blocks came from.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from bench.conversations import Shape
from bench.demo import Plan, Report, daemon
from bench.handover import decode, prefill, wait_for_tiers
from bench.redis_sides import running_server

#: Three prompts of about 30 MiB, and a pool that holds two of them.
_SHAPE: Final = Shape(conversations=3, turns=3)
_BLOCK_BYTES: Final = 1 << 20
_CPU_BYTES: Final = 72 << 20
_DISK_BYTES: Final = 512 << 20
_REDIS_BYTES: Final = 2 << 30


def show(console: Console, seed: int) -> None:
    """Runs it all and prints the table.

    Raises:
        click.ClickException: a wrong byte, or something that should be there is not.
    """
    with contextlib.ExitStack() as stack:
        below = []
        if shutil.which("redis-server") is None:
            console.print("redis-server is not installed: the tiers are shown without Redis")
        else:
            below = [
                "--redis-url",
                f"redis://127.0.0.1:{stack.enter_context(running_server(_REDIS_BYTES)).port}",
                "--redis-deadline-s",
                "30",
            ]
        folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-demo-")) for _ in range(2)]
        disks = [["--disk-dir", folder, "--disk-bytes", str(_DISK_BYTES)] for folder in folders]
        rows: list[tuple[str, Report, dict[str, int]]] = []
        with daemon(_CPU_BYTES, *disks[0], *below) as endpoint:
            stored = prefill(_plan(endpoint, seed)).stored
            rows.append(_load("the daemon that stored them", endpoint, seed))
        with daemon(_CPU_BYTES, *disks[0], *below) as endpoint:
            wait_for_tiers(endpoint)
            rows.append(_load("after its restart", endpoint, seed))
        if below:
            with daemon(_CPU_BYTES, *disks[1], *below) as endpoint:
                rows.append(_load("another daemon, another disk", endpoint, seed))
    console.print(_table(rows, stored))
    lost = [who for who, report, _ in rows if report.wrong or report.loaded != report.asked]
    missing = {"disk", "redis"} - {tier for _, _, hits in rows for tier in hits} - ({"redis"} if not below else set())
    if lost or missing:
        raise click.ClickException(f"wrong or missing blocks: {lost or 'none'}; nothing came from {missing or '-'}")


def _plan(endpoint: str, seed: int) -> Plan:
    return Plan(endpoint, seed, _SHAPE, _BLOCK_BYTES)


def _load(who: str, endpoint: str, seed: int) -> tuple[str, Report, dict[str, int]]:
    before = wait_for_tiers(endpoint)["hits"]
    report = decode(_plan(endpoint, seed))
    after: dict[str, Any] = wait_for_tiers(endpoint)["hits"]
    hits = {tier: count - before.get(tier, 0) for tier, count in after.items() if count > before.get(tier, 0)}
    return who, report, hits


def _table(rows: Sequence[tuple[str, Report, dict[str, int]]], stored: int) -> Table:
    tiers = ("cpu", "disk", "redis")
    table = Table(
        title=f"{stored} blocks of 1 MiB, a pool of {_CPU_BYTES >> 20} MiB",
        box=None,
        pad_edge=False,
        title_justify="left",
    )
    table.add_column("prompts loaded from")
    for column in ("blocks", "wrong", *(f"from {tier}" for tier in tiers), "load"):
        table.add_column(column, justify="right")
    for who, report, hits in rows:
        rate = f"{report.load_bytes / report.load_s / 1e9:.2f} GB/s"
        counts = (report.loaded, report.wrong, *(hits.get(tier, 0) for tier in tiers))
        table.add_row(who, *map(str, counts), rate)
    return table
