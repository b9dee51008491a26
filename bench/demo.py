"""The main job without engines: a daemon, a prefill process and a decode process hold multi-turn conversations.

For each turn the prefill process loads the longest prefix that is in the pool, computes the rest and stores it; the
decode process loads the whole prompt, and stores what it said. Each byte that is loaded is compared with what it must
be. `make demo` runs this; the sizes are options.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import multiprocessing
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.queues import Queue
from typing import Any, Final

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import kvstore
from bench.conversations import Shape, block_content, chained_keys, script
from kvstore.admin import AdminClient
from kvstore.config import parse_bytes
from kvstore.errors import KVStoreError

BLOCK_SIZE: Final = 64
#: The machine may be busy with anything; what takes longer than this has failed.
PATIENCE_S: Final = 120.0
#: Lines of progress where there is no terminal.
QUIET_LINES: Final = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What every process is told."""

    endpoint: str
    seed: int
    shape: Shape
    block_bytes: int

    @property
    def namespace(self) -> kvstore.Namespace:
        return kvstore.Namespace(
            model="demo", dtype="bfloat16", block_size=BLOCK_SIZE, block_bytes=self.block_bytes, hash_algo="sha256"
        )


@dataclasses.dataclass(slots=True)
class Report:
    """What one process did in one turn, or in all of them.

    Attributes:
        role: prefill or decode.
        asked: Blocks of prompts.
        loaded: Of those, blocks that came from the pool.
        wrong: Of those, blocks with a wrong byte.
        stored: Blocks stored.
        refused: Blocks that the pool did not take.
        load_bytes, load_s: Bytes copied out of the pool, and the time from asking for them to having them.
        store_bytes, store_s: Bytes stored, and the time from handing them over to their being there for others.
        latencies_s: By kind of call, the time of each.
        failure: Why the process gave up; empty if it did not.
    """

    role: str
    asked: int = 0
    loaded: int = 0
    wrong: int = 0
    stored: int = 0
    refused: int = 0
    load_bytes: int = 0
    load_s: float = 0.0
    store_bytes: int = 0
    store_s: float = 0.0
    latencies_s: dict[str, list[float]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    failure: str = ""

    def add(self, other: Report) -> None:
        for field in dataclasses.fields(self):
            if field.name == "latencies_s":
                for kind, values in other.latencies_s.items():
                    self.latencies_s[kind] += values
            elif field.name not in ("role", "failure"):
                setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Engine:
    """What the two processes have in common: a client, and memory of their own that stands for a KV cache."""

    def __init__(self, plan: Plan, role: str) -> None:
        self._plan = plan
        self._role = role
        self.client = kvstore.connect(plan.endpoint, plan.namespace, client_name=f"demo-{role}", timeout_s=PATIENCE_S)
        self._cache = np.zeros((0, plan.block_bytes), dtype=np.uint8)

    def load(self, keys: Sequence[bytes], report: Report, wait_s: float = 0.0) -> int:
        """Loads the longest prefix that is there, checks it, and says how long it is.

        Args:
            wait_s: How long to wait for what has to come up from a tier below the pool.
        """
        self._make_room(len(keys))
        started = time.perf_counter()
        found_there = self.client.lookup(keys)
        looked_up = time.perf_counter()
        with self.client.select(keys[:found_there], timeout_s=wait_s) as found:
            selected = time.perf_counter()
            for index, view in enumerate(found):
                np.copyto(self._cache[index], np.frombuffer(view, dtype=np.uint8))
            loaded = len(found)
        copied = time.perf_counter()
        report.latencies_s["lookup"].append(looked_up - started)
        report.latencies_s["select"].append(selected - looked_up)
        report.asked += len(keys)
        report.loaded += loaded
        report.load_bytes += loaded * self._plan.block_bytes
        report.load_s += copied - looked_up
        for index in range(loaded):
            report.wrong += not np.array_equal(self._cache[index], block_content(keys[index], self._plan.block_bytes))
        return loaded

    def store(self, keys: Sequence[bytes], loaded: int, report: Report) -> None:
        """Computes the KV of the blocks after the first `loaded` ones, and stores it.

        The whole prompt is offered, as engines do: what is there already costs no copy, and the daemon learns which
        block continues which, so that it evicts the ends of prompts before their beginnings.
        """
        self._make_room(len(keys))
        for index in range(loaded, len(keys)):
            self._cache[index] = block_content(keys[index], self._plan.block_bytes)
        started = time.perf_counter()
        result = self.client.insert(keys, list(self._cache[: len(keys)])).wait(PATIENCE_S)
        took_s = time.perf_counter() - started
        report.latencies_s["insert"].append(took_s)
        report.stored += result.stored
        report.refused += sum(result.refused.values())
        report.store_bytes += result.stored * self._plan.block_bytes
        report.store_s += took_s

    def _make_room(self, blocks: int) -> None:
        if len(self._cache) < blocks:
            grown = np.zeros((blocks, self._plan.block_bytes), dtype=np.uint8)
            grown[: len(self._cache)] = self._cache
            self._cache = grown


def prefill(plan: Plan, ready: Queue[int], answered: Queue[int], reports: Queue[Report]) -> None:
    """The prefill process: one turn of a conversation follows when the one before it was answered."""
    with _reported("prefill", reports):
        engine = Engine(plan, "prefill")
        turns_answered = [0] * plan.shape.conversations
        with engine.client:
            for number, turn in enumerate(script(plan.seed, plan.shape)):
                while turns_answered[turn.conversation] < turn.turn:
                    turns_answered[answered.get(timeout=PATIENCE_S)] += 1
                report = Report("prefill")
                keys = chained_keys(turn.prompt, BLOCK_SIZE)
                loaded = engine.load(keys, report)
                engine.store(keys, loaded, report)
                ready.put(number)
                reports.put(report)


def decode(plan: Plan, ready: Queue[int], answered: Queue[int], reports: Queue[Report]) -> None:
    """The decode process: takes each prompt over from the prefill process by way of the pool."""
    with _reported("decode", reports):
        engine = Engine(plan, "decode")
        with engine.client:
            for number, turn in enumerate(script(plan.seed, plan.shape)):
                taken = ready.get(timeout=PATIENCE_S)
                assert taken == number, "the two processes are at different turns"
                report = Report("decode")
                keys = chained_keys(turn.prompt + turn.answer, BLOCK_SIZE)
                prompt_blocks = len(turn.prompt) // BLOCK_SIZE
                loaded = engine.load(keys[:prompt_blocks], report)
                # What was evicted meanwhile is computed again: a miss costs time, nothing else.
                engine.store(keys, loaded, report)
                answered.put(turn.conversation)
                reports.put(report)


@contextlib.contextmanager
def _reported(role: str, reports: Queue[Report]) -> Iterator[None]:
    """Tells the parent why this process gives up, since nobody reads its traceback."""
    try:
        yield
    except KeyboardInterrupt:
        reports.put(Report(role, failure="interrupted"))
    except queue.Empty:
        reports.put(Report(role, failure=f"heard nothing from the other process for {PATIENCE_S:.0f} s"))
    except Exception as error:
        reports.put(Report(role, failure=f"{type(error).__name__}: {error}"))


@contextlib.contextmanager
def daemon(cpu_bytes: int, *flags: str) -> Iterator[str]:
    """A daemon of its own, at a socket in a folder that goes away with it."""
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as folder:
        endpoint = f"unix:{folder}/kvstore.sock"
        command = [sys.executable, "-m", "kvstore", "serve", "--cpu-bytes", str(cpu_bytes), "--listen", endpoint]
        process = subprocess.Popen([*command, "--block-size", str(BLOCK_SIZE), "--log-level", "error", *flags])
        try:
            _wait_until_it_answers(process, endpoint)
            yield endpoint
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if process.returncode != 0:
        raise click.ClickException(f"the daemon ended with {process.returncode}")


def _wait_until_it_answers(process: subprocess.Popen[bytes], endpoint: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while True:
        if process.poll() is not None:
            raise click.ClickException(f"the daemon ended with {process.returncode} before it was ready")
        try:
            with AdminClient(endpoint) as client:
                client.ping()
                return
        except KVStoreError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.02)


def converse(plan: Plan, console: Console) -> dict[str, Report]:
    """Runs the two processes and adds up what they report.

    Raises:
        click.ClickException: one of them gave up.
    """
    context = multiprocessing.get_context("spawn")
    # Bounded: a prompt whose blocks wait too long for the decode process would be evicted by those that follow.
    ready: Queue[int] = context.Queue(maxsize=2)
    answered: Queue[int] = context.Queue()
    reports: Queue[Report] = context.Queue()
    # daemon=True: they end with this process, however it ends.
    processes = [
        context.Process(target=target, args=(plan, ready, answered, reports), daemon=True)
        for target in (prefill, decode)
    ]
    totals = {role: Report(role) for role in ("prefill", "decode")}
    for process in processes:
        process.start()
    try:
        turns = plan.shape.conversations * plan.shape.turns
        for done, report in enumerate(_with_progress(_heard(reports, processes, 2 * turns), 2 * turns, console)):
            if report.failure:
                raise click.ClickException(f"the {report.role} process gave up: {report.failure}")
            totals[report.role].add(report)
            if not console.is_terminal and (done + 1) % (2 * max(1, turns // QUIET_LINES)) == 0:
                wrong = sum(total.wrong for total in totals.values())
                console.print(f"{(done + 1) // 2} of {turns} turns, {wrong} wrong blocks")
        for process in processes:
            process.join(PATIENCE_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return totals


def _heard(reports: Queue[Report], processes: Sequence[Any], count: int) -> Iterator[Report]:
    """Reports as they come; a process that dies without one is noticed."""
    for _ in range(count):
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                yield reports.get(timeout=0.5)
                break
            except queue.Empty:
                dead = [process for process in processes if process.exitcode not in (None, 0)]
                if dead or time.monotonic() > give_up:
                    codes = [process.exitcode for process in processes]
                    raise click.ClickException(f"no report from the two processes; exit codes {codes}") from None


def _with_progress(reports: Iterator[Report], count: int, console: Console) -> Iterator[Report]:
    if not console.is_terminal:
        yield from reports
        return
    columns = (
        TextColumn("turns"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("hit ratio {task.fields[hits]}, loaded {task.fields[read]}"),
        TimeElapsedColumn(),
    )
    asked = loaded = load_bytes = 0
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("turns", total=count // 2, hits="-", read="-")
        for report in reports:
            asked, loaded = asked + report.asked, loaded + report.loaded
            load_bytes += report.load_bytes
            hits = f"{loaded / max(1, asked):.0%}"
            progress.update(task, advance=0.5, hits=hits, read=decimal(load_bytes))
            yield report


def memcpy_bytes_per_s(block_bytes: int) -> float:
    """A plain copy of blocks of this size in this process, for comparison."""
    blocks = max(2, (64 << 20) // block_bytes)
    source: npt.NDArray[np.uint8] = np.ones((blocks, block_bytes), dtype=np.uint8)
    target = np.zeros_like(source)
    best_s = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for index in range(blocks):
            np.copyto(target[index], source[index])
        best_s = min(best_s, time.perf_counter() - started)
    return source.nbytes / best_s


def setting(plan: Plan, stats: dict[str, Any], took_s: float) -> str:
    """What the results were measured with, in one line."""
    tier = stats["tiers"][0]
    return (
        f"{plan.shape.conversations} conversations of {plan.shape.turns} turns in {took_s:.1f} s, blocks of "
        f"{decimal(plan.block_bytes)}, pool of {decimal(tier['capacity_bytes'])} on {tier['backing']['kind']} pages, "
        f"{tier['evictions']} evictions; a plain memcpy of such blocks: "
        f"{memcpy_bytes_per_s(plan.block_bytes) / 1e9:.2f} GB/s"
    )


def results(totals: dict[str, Report]) -> Table:
    """The table at the end."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for role in totals:
        table.add_column(role, justify="right")

    def row(name: str, *values: str) -> None:
        table.add_row(name, *values)

    def rate(size_bytes: int, seconds: float) -> str:
        return f"{size_bytes / seconds / 1e9:.2f} GB/s" if seconds else "-"

    def latency(report: Report, kind: str) -> str:
        values = report.latencies_s.get(kind)
        if not values:
            return "-"
        p50, p99 = np.percentile(values, (50, 99)) * 1000
        return f"{p50:.2f} / {p99:.2f} ms"

    both = list(totals.values())
    row("blocks of prompts", *(str(report.asked) for report in both))
    row("loaded from the pool", *(str(report.loaded) for report in both))
    row("hit ratio", *(f"{report.loaded / max(1, report.asked):.1%}" for report in both))
    row("wrong blocks", *(str(report.wrong) for report in both))
    row("stored", *(f"{report.stored} (refused {report.refused})" for report in both))
    row("load", *(rate(report.load_bytes, report.load_s) for report in both))
    row("store", *(rate(report.store_bytes, report.store_s) for report in both))
    for kind in ("lookup", "select", "insert"):
        row(f"{kind}, p50 / p99", *(latency(report, kind) for report in both))
    return table


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--seed", default=1, help="Of the conversations.")
@click.option("--conversations", default=Shape().conversations, type=click.IntRange(min=1), help="Side by side.")
@click.option("--turns", default=Shape().turns, type=click.IntRange(min=1), help="Of each conversation.")
@click.option("--cpu-bytes", default="800MB", help="Size of the pool.")
@click.option("--block-bytes", default="2MiB", help="Size of a block of 64 tokens.")
def main(seed: int, conversations: int, turns: int, cpu_bytes: str, block_bytes: str) -> None:
    """Run a daemon, a prefill process and a decode process, and check every byte that is loaded."""
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    shape = Shape(conversations=conversations, turns=turns)
    started = time.monotonic()
    with daemon(parse_bytes(cpu_bytes, "--cpu-bytes")) as endpoint:
        console.print(f"the daemon is ready at {endpoint} after {time.monotonic() - started:.1f} s")
        plan = Plan(endpoint, seed, shape, parse_bytes(block_bytes, "--block-bytes"))
        started = time.monotonic()
        totals = converse(plan, console)
        took_s = time.monotonic() - started
        with AdminClient(endpoint) as client:
            stats = client.stats()
    console.print(results(totals))
    console.print(setting(plan, stats, took_s))
    wrong = sum(report.wrong for report in totals.values())
    held = {key: stats[key] for key in ("pins", "leases", "reserved_slots") if stats[key]}
    if wrong or held:
        raise click.ClickException(f"{wrong} wrong blocks; still held after both processes ended: {held or 'nothing'}")
    console.print("every byte that was loaded was right, and nothing is held")
    # Here, since it is made of parts of this module.
    from bench import demo_tiers

    demo_tiers.show(console, seed)


if __name__ == "__main__":
    main()
