"""Is the KV that vLLM gets from the pool the KV that it has stored? On one GPU, beside a hit of its own prefix cache.

A tiny model with random weights of the right scale (with dummy weights a token depends on next to nothing). For each
prompt 16 greedy tokens with their logprobs: computed, from the engine's prefix cache, and from the pool after that was
reset. Where as many tokens came from the pool as from the prefix cache, the same is computed on top of them, and tokens
and logprobs have to be equal to the last bit. Prompts end a few tokens behind a block, so that both sources have all
whole blocks; one of which less was loaded, since a lookup is allowed to miss, is counted apart. A control with another
context before the same last tokens has to give other logprobs, or equality would say nothing.

Each prompt is printed when it is through, with how many were equal so far; after --limit-s those until then count.
About two minutes, most of them the engine's start. --smoke is a dry run for any vLLM, also of the CPU build.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import click

from bench.harness import ROOT, Report, start_daemon, time_limit
from kvstore.admin import AdminClient

#: Tokens of a block, and how far a prompt reaches into the next one.
_BLOCK: Final = 64
_TAIL: Final = 5
_FIRST_BLOCKS: Final = 10
#: Of a control's last tokens, which it has in common with the prompt.
_COMMON: Final = 32
#: Longest wait for a prompt's blocks to be in the pool.
_STORED_S: Final = 3.0

#: Tokens, their logprobs, and how many tokens of the prompt came from a cache.
Answer = tuple[list[int], list[float], int]


class Engine:
    """vLLM with the connector."""

    def __init__(self, model: str, endpoint: str, settings: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        extra = {"block_size": _BLOCK, "kvstore.endpoint": endpoint, "kvstore.load_policy": "always"}
        self._llm: Any = LLM(
            model=model,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVStoreConnector", kv_role="kv_both", kv_connector_extra_config=extra
            ),
            enforce_eager=True,
            max_model_len=4096,
            max_num_batched_tokens=4096,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            seed=0,
            **settings,
        )
        self._params = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True, logprobs=1)

    def answer(self, prompt: list[int]) -> Answer:
        """What a prompt is answered."""
        output = self._llm.generate([{"prompt_token_ids": prompt}], self._params, use_tqdm=False)[0]
        first = output.outputs[0]
        chosen = [each[token].logprob for token, each in zip(first.token_ids, first.logprobs, strict=True)]
        return list(first.token_ids), chosen, output.num_cached_tokens

    def reset(self) -> None:
        """Forgets the prefix cache."""
        self._llm.reset_prefix_cache()

    def close(self) -> None:
        """Ends it, before its daemon goes: that one would wait for what the engine holds."""
        self._llm.llm_engine.engine_core.shutdown()


def _blocks_stored(endpoint: str) -> int:
    """Blocks in the pool."""
    with contextlib.closing(AdminClient(endpoint)) as admin:
        return next(int(tier["blocks"]) for tier in admin.stats()["tiers"] if tier["name"] == "cpu")


class Run:
    """Prompts one after the other."""

    def __init__(self, endpoint: str, engine: Engine) -> None:
        self._endpoint, self._engine = endpoint, engine
        self._rng = random.Random(7)
        self._stored = 0  # blocks that the pool has when all copies are through
        self.rows: list[tuple[str, ...]] = []
        self.whole = self.equal = self.told_apart = 0

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(10, 1000) for _ in range(count)]

    def _answer_new(self, prompt: list[int]) -> Answer:
        answer = self._engine.answer(prompt)
        self._stored += len(prompt) // _BLOCK
        return answer

    def _settle(self) -> bool:
        """Until the pool has all blocks; the engine takes note of its copies with each step. Gives whether it has."""
        until = time.monotonic() + _STORED_S
        while (there := _blocks_stored(self._endpoint)) < self._stored and time.monotonic() < until:
            self._engine.answer(self._ids(8))
            time.sleep(0.02)
        complete, self._stored = there >= self._stored, there  # what is missing by then never comes
        return complete

    def warm(self) -> None:
        """Shapes, and copies in one direction, once the workers have found the pool."""
        for _ in range(5):
            self._answer_new(self._ids(1900))
            if self._settle():
                break

    def prompt(self, blocks: int) -> None:
        """One prompt of so many blocks and a few tokens."""
        engine, prompt = self._engine, self._ids(_BLOCK * blocks + _TAIL)
        computed = self._answer_new(prompt)
        self._settle()
        hit = engine.answer(prompt)
        engine.reset()
        loaded = engine.answer(prompt)
        control = self._answer_new(self._ids(len(prompt) - _COMMON) + prompt[-_COMMON:])
        apart, differs = [_apart(loaded, hit), _apart(loaded, computed)], _apart(control, computed)
        same = loaded[:2] == hit[:2]
        if loaded[2] == hit[2] > 0:
            self.whole += 1
            self.equal += same
            self.told_apart += differs > 3 * max(apart)
        row = [str(len(prompt)), str(computed[2]), str(hit[2]), str(loaded[2])]
        row += ["equal" if same else f"{apart[0]:.1e}", f"{apart[1]:.1e}", f"{differs:.1e}"]
        self.rows.append(tuple(row))
        print(*row, f"| {self.equal} of {self.whole} equal", flush=True)


@click.command()
@click.option("--prompts", default=20, show_default=True, help="How many have to be loaded in full.")
@click.option("--limit-s", default=240.0, show_default=True, help="After that it tells what it has.")
@click.option("--smoke", is_flag=True, help="Two short prompts, to see that it runs; without a GPU too.")
def main(prompts: int, limit_s: float, smoke: bool) -> None:
    """Tokens and logprobs after a load beside those after a prefix hit."""
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 2 << 30}
    pool, blocks = 4 << 30, _FIRST_BLOCKS
    if smoke:
        prompts, pool, blocks = 2, 512 << 20, 3
        settings = {"block_size": _BLOCK, "num_gpu_blocks_override": 80}
    started = time.monotonic()
    report = Report("gpu_exact", ("prompt", "computed", "GPU hit", "loaded", "as a hit", "as computed", "control"))
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder, contextlib.ExitStack() as stack:
        stack.enter_context(time_limit(limit_s))
        endpoint, model = f"unix:{folder}/kv.sock", f"{folder}/model"
        write = [sys.executable, str(Path(ROOT, "tests", "vllm", "tiny_llama.py")), model]
        subprocess.run(write, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.enter_context(start_daemon(pool, endpoint, "--block-size", str(_BLOCK)))
        engine = stack.enter_context(contextlib.closing(Engine(model, endpoint, settings)))
        print(f"the engine is ready after {time.monotonic() - started:.0f} s", flush=True)
        run = Run(endpoint, engine)
        stack.callback(_show, report, run, prompts)  # before anything is ended
        run.warm()
        while run.whole < prompts and len(run.rows) < 2 * prompts:
            run.prompt(blocks + len(run.rows))


def _show(report: Report, run: Run, prompts: int) -> None:
    report.rows = run.rows
    report.notes.append(
        f"{len(run.rows)} prompts, of which {run.whole} were loaded in full and {run.equal} of those equal; "
        f"{run.told_apart} controls clearly differ"
    )
    report.figures = {
        "tried": len(run.rows),
        "whole": run.whole,
        "equal": run.equal,
        "told_apart": run.told_apart,
    }
    report.goal("prompts loaded in full and equal to a prefix hit", run.equal, at_least=prompts)
    report.show()


def _apart(one: Answer, other: Answer) -> float:
    """The largest difference of two answers' logprobs."""
    return max(abs(a - b) for a, b in zip(one[1], other[1], strict=True))


if __name__ == "__main__":
    main()
