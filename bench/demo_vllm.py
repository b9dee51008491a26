"""The main job with real engines: a vLLM prefill instance, a vLLM decode instance, and a daemon between them.

A third instance without the plugin gets the same requests and answers them from its own prefix cache; the decode
instance must say the same tokens. (An instance that computes a prompt in one piece adds the same numbers in another
order, and with random weights the best two tokens can be that close.) The time to the first token is set against that
of a cold prompt of the same length. The first two forget their own caches before each turn, as if each turn went to
another instance. The model is a tiny Llama with random weights, made on the spot.

`make demo-vllm` runs this. The engines are those of tests/vllm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from tests.vllm.harness import BLOCK_TOKENS, HERE, Daemon, Engine, wait_until

ANSWER_TOKENS: Final = 16
#: The model has 1,024 tokens, the first two of which are special.
VOCABULARY: Final = range(2, 1000)
#: The engines take 4,608 tokens.
PROMPT_TOKENS_MAX: Final = 4500


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """One turn.

    Attributes:
        prompt_tokens: Length of the prompt.
        loaded_tokens: Part of it that the decode engine took from the daemon.
        cold_s: Time to first token of a prompt of this length that nobody has seen.
        warm_s: Time to first token of the decode engine.
        same: Whether the engine without the plugin said the same tokens.
    """

    prompt_tokens: int
    loaded_tokens: int
    cold_s: float
    warm_s: float
    same: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Trio:
    prefill: Engine
    decode: Engine
    plain: Engine


@contextlib.contextmanager
def running(folder: Path) -> Iterator[tuple[Daemon, Trio]]:
    """A daemon and three engines, ready; they end with the block."""
    subprocess.run(
        [sys.executable, str(HERE / "tiny_llama.py"), str(folder / "model")], check=True, capture_output=True
    )
    with contextlib.ExitStack() as stack:
        daemon = Daemon(folder)
        stack.callback(daemon.stop)
        daemon.start()

        def engine(name: str, extra: dict[str, object] | None, **arguments: object) -> Engine:
            made = Engine(folder / "model", folder, name, extra, **arguments)
            stack.callback(made.stop)
            return made

        # Created first and waited for afterwards, so that they start side by side.
        extra = {"kvstore.endpoint": daemon.endpoint}
        # The third one keeps every conversation in its own cache.
        plain = engine("plain", None, num_gpu_blocks_override=1000)
        trio = Trio(engine("prefill", extra), engine("decode", extra), plain)
        for each in (trio.prefill, trio.decode, trio.plain):
            each.ready()
            each.generate(list(VOCABULARY)[:640])  # the first request of an engine pays for its warm-up
        trio.prefill.wait_storing(daemon)
        trio.decode.wait_storing(daemon)
        yield daemon, trio


def take_turn(daemon: Daemon, trio: Trio, prompt: list[int], unseen: list[int]) -> tuple[Outcome, list[int]]:
    """One turn on all three engines, and the answer of the decode engine. `unseen` is a prompt of the same length."""
    trio.prefill.forget_local()
    trio.decode.forget_local()
    before = daemon.stored_blocks()
    prefilled = trio.prefill.generate(prompt, max_tokens=1)[0]
    new_blocks = len(prompt) // BLOCK_TOKENS - prefilled["cached"] // BLOCK_TOKENS
    # Stores go on behind the answer of the prefill engine.
    wait_until(f"{new_blocks} new blocks are stored", lambda: daemon.stored_blocks() >= before + new_blocks)
    hits = trio.decode.external_hits()
    warm = trio.decode.generate(prompt, max_tokens=ANSWER_TOKENS)[0]
    loaded_tokens = int(trio.decode.external_hits() - hits)

    cold = trio.plain.generate(unseen, max_tokens=1)[0]
    trio.plain.generate(prompt, max_tokens=1)
    expected = trio.plain.generate(prompt, max_tokens=ANSWER_TOKENS)[0]["tokens"]
    outcome = Outcome(len(prompt), loaded_tokens, cold["ttft_s"], warm["ttft_s"], warm["tokens"] == expected)
    return outcome, warm["tokens"]


def converse(daemon: Daemon, trio: Trio, seed: int, conversations: int, turns: int) -> Iterator[Outcome]:
    """The conversations, taking turns. All begin with the same system prompt."""
    source = random.Random(seed)
    system = source.choices(VOCABULARY, k=1500)
    histories = [system for _ in range(conversations)]
    for _ in range(turns):
        for index, history in enumerate(histories):
            prompt = history + source.choices(VOCABULARY, k=source.randint(300, 600))
            if len(prompt) > PROMPT_TOKENS_MAX:
                raise click.UsageError(f"a prompt has {len(prompt)} tokens and the engines take {PROMPT_TOKENS_MAX}")
            unseen = source.choices(VOCABULARY, k=len(prompt))
            outcome, answer = take_turn(daemon, trio, prompt, unseen)
            histories[index] = prompt + answer
            yield outcome


def results(outcomes: list[Outcome]) -> Table:
    """One line a turn."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("turn", "prompt", "loaded", "first token, cold", "first token, loaded", "faster", "same tokens"):
        table.add_column(column, justify="right")
    for number, outcome in enumerate(outcomes, 1):
        table.add_row(
            str(number),
            f"{outcome.prompt_tokens} tokens",
            f"{outcome.loaded_tokens / outcome.prompt_tokens:.0%}",
            f"{outcome.cold_s * 1000:.0f} ms",
            f"{outcome.warm_s * 1000:.0f} ms",
            f"{outcome.cold_s / outcome.warm_s:.1f}x",
            "yes" if outcome.same else "NO",
        )
    return table


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--seed", default=1, help="Of the conversations.")
@click.option("--conversations", default=2, type=click.IntRange(min=1), help="Side by side.")
@click.option("--turns", default=4, type=click.IntRange(min=1), help="Of each conversation.")
def main(seed: int, conversations: int, turns: int) -> None:
    """Run a daemon and three vLLM engines, and compare what they say and how soon."""
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    started = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as folder:
        with console.status("three vLLM engines are starting; this takes a minute"):
            stack = contextlib.ExitStack()
            daemon, trio = stack.enter_context(running(Path(folder)))
        with stack:
            console.print(f"a daemon and three vLLM engines are ready after {time.monotonic() - started:.0f} s")
            total = conversations * turns
            with console.status("conversations") as status:
                for outcome in converse(daemon, trio, seed, conversations, turns):
                    outcomes.append(outcome)
                    status.update(f"turn {len(outcomes)} of {total}: {outcome.cold_s / outcome.warm_s:.1f}x faster")
                    if not console.is_terminal:
                        console.print(f"turn {len(outcomes)} of {total}")
            stats = daemon.stats()
    console.print(results(outcomes))
    tier = stats["tiers"][0]
    console.print(
        f"pool: {tier['blocks']} blocks, {decimal(tier['used_bytes'])} of {decimal(tier['capacity_bytes'])}; "
        f"blocks handed out {stats['hits']}, misses {stats['misses']}, pins now {stats['pins']}"
    )
    different = sum(not outcome.same for outcome in outcomes)
    if different:
        raise click.ClickException(f"{different} answers differ from those of an engine without the plugin")
    console.print("every answer was the same as without the plugin")


if __name__ == "__main__":
    main()
