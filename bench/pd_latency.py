"""What prefill does to the pauses between the tokens of an answer: on instances of their own, and on one for both.

A prefill instance and a decode instance of vLLM, each on a core of its own and tuned for its work, with kvstore between
them; and a mixed instance without the plugin on both cores. Answers are streamed from the decode instance (from the
mixed one), at first while nothing else happens, then while prompts of which no part has been seen are computed one
after the other on the prefill instance (on the mixed one). What counts is how much longer the pause between two tokens
becomes, at the 99th percentile: the median of the rounds' percentiles with prompts over that without. A round has few
hundred pauses, of which the slowest ones decide; so a round that something else has disturbed decides nothing.

The mixed instance computes prompts in small chunks, as one does there to keep the pauses short; the prefill instance
has no answers to look after, and takes a prompt whole.

Needs vLLM and two cores. The model is the tiny Llama of tests/vllm; its servers are those of tests/vllm.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import click

from bench.harness import Ratio, Report
from tests.vllm.harness import HERE, Daemon, wait_until
from tests.vllm.servers import HTTPServer, router, vllm_server

#: The decode instance never computes more at a time than the tail of a prompt that was not stored.
DECODE_CHUNK: Final = 256
PREFILL_CHUNK: Final = 4096
#: The model has 1,024 tokens, the first two of which are special.
VOCABULARY: Final = range(2, 1000)
#: Short: what an answer begins with is no part of what is measured.
_OPENING_TOKENS: Final = 32
#: Longer than anybody watches; the engines take 4,608 tokens.
_ANSWER_TOKENS: Final = 4500
#: Far beyond a step of any of them: here a step takes seconds, and what is asked is how long the copies take to arrive.
_PD_WAIT_S: Final = 60.0
_PERCENTILE: Final = 0.99
_AMID: Final = ", among other prompts"
#: How much longer a pause may be while prompts are computed elsewhere.
GOAL: Final = 1.3


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What one run does.

    Attributes:
        rounds: Rounds of all four cases.
        streams: Answers at a time.
        seconds: How long pauses are watched in each case and round.
        prompt_tokens: Length of the prompts that are computed meanwhile.
        mixed_chunk: Most tokens of a step of the mixed instance.
    """

    rounds: int = 9
    streams: int = 2
    seconds: float = 6.0
    prompt_tokens: int = 2048
    mixed_chunk: int = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Fleet:
    prefill: HTTPServer
    decode: HTTPServer
    mixed: HTTPServer
    router: HTTPServer


@dataclasses.dataclass(slots=True)
class Case:
    """One way to run answers and prompts, and what it came to, by round.

    Attributes:
        answers: Base URL that streams the answers.
        prompts: Base URL that computes prompts meanwhile; None: nothing does.
        p50, p99: Pauses between two tokens, in seconds.
        prompt_s: Times to the first token of those prompts.
    """

    name: str
    answers: str
    prompts: str | None
    p50: list[float] = dataclasses.field(default_factory=list)
    p99: list[float] = dataclasses.field(default_factory=list)
    prompt_s: list[float] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def running(sizes: Sizes, cores: Sequence[int]) -> Iterator[Fleet]:
    """A daemon, the instances and the router, ready; they end with the block."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = folder / "model"
        subprocess.run([sys.executable, str(HERE / "tiny_llama.py"), str(model)], check=True, capture_output=True)
        daemon = Daemon(folder)
        stack.callback(daemon.stop)
        daemon.start()
        extra = {"kvstore.endpoint": daemon.endpoint, "kvstore.pd_wait_s": _PD_WAIT_S}
        steps = ("--max-num-seqs", "32", "--max-num-batched-tokens")
        made = [
            vllm_server(
                model, folder, "prefill", extra, *steps, str(PREFILL_CHUNK), role="kv_producer", cores=cores[:1]
            ),
            vllm_server(
                model, folder, "decode", extra, *steps, str(DECODE_CHUNK), role="kv_consumer", cores=cores[1:2]
            ),
            vllm_server(model, folder, "mixed", None, *steps, str(sizes.mixed_chunk), cores=cores[:2]),
        ]
        for server in made:
            stack.callback(server.stop)
        front = router(folder, made[:1], made[1:2])
        stack.callback(front.stop)
        for server in (*made, front):
            server.ready()
        seeds = iter(range(1 << 20))

        def stores() -> bool:
            body = {"model": "tiny", "prompt": unseen(-1 - next(seeds), 200), "max_tokens": 2, "ignore_eos": True}
            for server in made:  # the first request of an engine pays for its warm-up
                server.post("/v1/completions", body)
            return daemon.stored_blocks() > 0

        wait_until("the prefill instance stores", stores, 120)
        yield Fleet(made[0], made[1], made[2], front)


def unseen(seed: int, tokens: int) -> list[int]:
    """A prompt that shares no block with that of another seed."""
    return random.Random(seed).choices(VOCABULARY, k=tokens)


class Load:
    """Asks the instances. One event loop."""

    def __init__(self, http: aiohttp.ClientSession, sizes: Sizes) -> None:
        self._http = http
        self._sizes = sizes
        self._seed = 0

    def _unseen(self, tokens: int) -> list[int]:
        self._seed += 1
        return unseen(self._seed, tokens)

    async def _tokens(self, url: str, prompt: list[int], count: int, **more: Any) -> AsyncIterator[float]:
        """Times at which the tokens of an answer arrive."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": count, "ignore_eos": True, "stream": True, **more}
        async with self._http.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise click.ClickException(f"{url} answers {answer.status}: {(await answer.text())[:500]}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    if b'"error"' in line:
                        raise click.ClickException(f"{url}: {line.decode()}")
                    yield time.perf_counter()

    async def first_token_s(self, url: str, tokens: int) -> float:
        """Time to the first token of a prompt of which no part has been seen."""
        prompt = self._unseen(tokens)
        began = time.perf_counter()
        times = [at async for at in self._tokens(url, prompt, 1)]
        return times[0] - began

    async def first_token_amid_s(self, url: str, prompts: str) -> float:
        """The same, while an instance computes other prompts one after the other."""
        busy, over = asyncio.Event(), asyncio.Event()

        async def others() -> None:
            while not over.is_set():
                await self.first_token_s(prompts, self._sizes.prompt_tokens)
                busy.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(others())
            await busy.wait()
            took = await self.first_token_s(url, self._sizes.prompt_tokens)
            over.set()
        return took

    async def run(self, case: Case) -> None:
        """One round of a case."""
        sizes = self._sizes
        started = [asyncio.Event() for _ in range(sizes.streams)]
        over = asyncio.Event()
        arrivals: list[list[float]] = [[] for _ in range(sizes.streams)]

        async def answer(index: int) -> None:
            prompt = self._unseen(_OPENING_TOKENS)
            async with contextlib.aclosing(self._tokens(case.answers, prompt, _ANSWER_TOKENS)) as tokens:
                async for at in tokens:
                    arrivals[index].append(at)
                    started[index].set()

        async def prompts(url: str) -> None:
            while not over.is_set():
                case.prompt_s.append(await self.first_token_s(url, sizes.prompt_tokens))

        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(answer(index)) for index in range(sizes.streams)]
            await asyncio.gather(*(event.wait() for event in started))
            begin = time.perf_counter()
            if case.prompts is not None:
                group.create_task(prompts(case.prompts))
            await asyncio.sleep(sizes.seconds)
            over.set()
            for task in answers:  # their connections close, and with them the requests
                task.cancel()
        pauses = sorted(
            later - earlier
            for times in arrivals
            for earlier, later in itertools.pairwise(times)
            if begin <= later  # the first pause with prompts begins before them
        )
        if not pauses:
            raise click.ClickException(f"{case.name}: no second token came within {sizes.seconds:.0f} s")
        case.p50.append(statistics.median(pauses))
        case.p99.append(pauses[min(len(pauses) - 1, int(len(pauses) * _PERCENTILE))])


async def measure(fleet: Fleet, sizes: Sizes) -> tuple[dict[str, Case], dict[str, list[float]]]:
    """All cases, round by round in an order that changes, and times to the first token without any answers."""
    cases = [
        Case("decode, idle", fleet.decode.url, None),
        Case("decode, while prefill works", fleet.decode.url, fleet.prefill.url),
        Case("mixed, idle", fleet.mixed.url, None),
        Case("mixed, while it prefills", fleet.mixed.url, fleet.mixed.url),
    ]
    paths = {"prefill, then decode": (fleet.router.url, fleet.prefill.url), "mixed": (fleet.mixed.url, fleet.mixed.url)}
    first: dict[str, list[float]] = {f"{name}{amid}": [] for name in paths for amid in ("", _AMID)}
    order = random.Random(1)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_read=300)) as http:
        load = Load(http, sizes)
        for number in range(sizes.rounds + 1):
            for case in order.sample(cases, len(cases)):
                await load.run(case)
            for name, (url, prompts) in paths.items():
                first[name].append(await load.first_token_s(url, sizes.prompt_tokens))
                first[f"{name}{_AMID}"].append(await load.first_token_amid_s(url, prompts))
            if number == 0:  # warms what is warmed by running
                for case in cases:
                    case.p50.clear(), case.p99.clear(), case.prompt_s.clear()
                for times in first.values():
                    times.clear()
    return {case.name: case for case in cases}, first


def report_of(cases: dict[str, Case], first: dict[str, list[float]], loaded_tokens: float) -> Report:
    """The table and the figures."""
    report = Report("pd_latency", ("case", "pause p50", "pause p99", "p99 / idle", "goal", "first token of a prompt"))
    for role, goal in (("decode", True), ("mixed", False)):
        idle, busy = (case for name, case in cases.items() if name.startswith(role))
        by_round = Ratio.of(busy.p99, idle.p99)
        middle = statistics.median(busy.p99) / statistics.median(idle.p99)
        ratio = Ratio(middle, min(by_round.low, middle), max(by_round.high, middle))
        for case, shown in ((idle, None), (busy, ratio)):
            verdict = ""
            if shown is not None and goal:
                verdict = report.goal(f"{case.name}: p99 pause over idle", shown.median, at_most=GOAL)
            report.rows.append(
                (
                    case.name,
                    _ms(case.p50),
                    _ms(case.p99),
                    str(shown) if shown is not None else "",
                    verdict,
                    _ms(case.prompt_s) if case.prompt_s else "",
                )
            )
        report.figures[role] = {
            "p50_s": [round(statistics.median(case.p50), 5) for case in (idle, busy)],
            "p99_s": [round(statistics.median(case.p99), 5) for case in (idle, busy)],
            "p99_ratio": ratio.as_json(),
            "prompts": len(busy.prompt_s),
            "prompt_first_token_s": round(statistics.median(busy.prompt_s), 4),
        }
    for name, times in first.items():
        report.rows.append((name, "", "", "", "", _ms(times)))
        report.figures.setdefault("first_token_s", {})[name] = round(statistics.median(times), 4)
    report.figures["loaded_tokens"] = int(loaded_tokens)
    return report


def _ms(times: Sequence[float]) -> str:
    return f"{statistics.median(times) * 1000:.1f} ms"


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=Sizes.__dataclass_fields__["rounds"].default, type=click.IntRange(min=1))
@click.option("--streams", default=Sizes.__dataclass_fields__["streams"].default, type=click.IntRange(min=1))
@click.option(
    "--prompt-tokens", default=Sizes.__dataclass_fields__["prompt_tokens"].default, type=click.IntRange(64, 4500)
)
@click.option("--mixed-chunk", default=Sizes.__dataclass_fields__["mixed_chunk"].default, type=click.IntRange(min=64))
@click.option("--smoke", is_flag=True, help="A small size, to see that it works; goals mean nothing there.")
def main(rounds: int, streams: int, prompt_tokens: int, mixed_chunk: int, smoke: bool) -> None:
    """Measure pauses between tokens, with prefill elsewhere and on the same instance."""
    sizes = Sizes(rounds, streams, prompt_tokens=prompt_tokens, mixed_chunk=mixed_chunk)
    if smoke:
        sizes = Sizes(rounds=1, streams=2, seconds=5, prompt_tokens=512, mixed_chunk=256)
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise click.ClickException("two cores are needed: one for prefill, one for decode")
    with running(sizes, cores) as fleet:
        before = fleet.decode.metric("vllm:external_prefix_cache_hits_total")
        cases, first = asyncio.run(measure(fleet, sizes))
        loaded = fleet.decode.metric("vllm:external_prefix_cache_hits_total") - before
    report = report_of(cases, first, loaded)
    report.notes.append(
        f"{sizes.rounds} rounds of {sizes.seconds:.0f} s with {sizes.streams} answers at a time; prompts of "
        f"{sizes.prompt_tokens} tokens, one after the other."
    )
    report.notes.append(
        f"Prefill on core {cores[0]} in steps of {PREFILL_CHUNK} tokens, decode on core {cores[1]} in steps of "
        f"{DECODE_CHUNK}, one thread each; mixed on both with two threads, in steps of {sizes.mixed_chunk}."
    )
    report.show({"settings": json.dumps(dataclasses.asdict(sizes))})


if __name__ == "__main__":
    main()
