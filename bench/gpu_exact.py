"""Is the KV that vLLM gets from the pool the KV that it has stored? On one GPU, beside a hit of its own prefix cache.

A tiny model with random weights of the right scale (with dummy weights a token depends on next to nothing). For each
prompt 16 greedy tokens with their logprobs: computed, from the engine's prefix cache, and from the pool after that was
reset. Where as many tokens came from the pool as from the prefix cache, the same is computed on top of them, and tokens
and logprobs have to be equal to the last bit. Prompts end a few tokens behind a block, so that both sources have all
whole blocks; one of which less was loaded, since a lookup is allowed to miss, is counted apart. A control with another
context before the same last tokens has to give other logprobs, or equality would say nothing.
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

from bench.harness import ROOT, Report, start_daemon
from kvstore.admin import AdminClient

#: Tokens of a block, and how far a prompt reaches into the next one.
_BLOCK: Final = 64
_TAIL: Final = 5
_FIRST_BLOCKS: Final = 10
#: Of a control's last tokens, which it has in common with the prompt.
_COMMON: Final = 32
#: Longest wait for a prompt's blocks to be in the pool.
_STORED_S: Final = 10.0

#: Tokens, their logprobs, and how many tokens of the prompt came from a cache.
Answer = tuple[list[int], list[float], int]


class Engine:
    """vLLM with the connector."""

    def __init__(self, model: str, endpoint: str) -> None:
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
            kv_cache_memory_bytes=2 << 30,
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


@click.command()
@click.option("--prompts", default=20, show_default=True, help="How many have to be loaded in full.")
def main(prompts: int) -> None:
    """Tokens and logprobs after a load beside those after a prefix hit."""
    report = Report("gpu_exact", ("prompt", "computed", "GPU hit", "loaded", "as a hit", "as computed", "control"))
    rng = random.Random(7)
    equal = whole = told_apart = 0
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder, contextlib.ExitStack() as stack:
        endpoint, model = f"unix:{folder}/kv.sock", f"{folder}/model"
        write = [sys.executable, str(Path(ROOT, "tests", "vllm", "tiny_llama.py")), model]
        subprocess.run(write, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.enter_context(start_daemon(4 << 30, endpoint, "--block-size", str(_BLOCK)))
        engine = stack.enter_context(contextlib.closing(Engine(model, endpoint)))

        def ids(count: int) -> list[int]:
            return [rng.randrange(10, 1000) for _ in range(count)]

        def settle(blocks: int) -> None:
            """Until the pool has so many blocks; the engine takes note of its copies with each step."""
            until = time.monotonic() + _STORED_S
            while _blocks_stored(endpoint) < blocks and time.monotonic() < until:
                engine.answer(ids(8))
                time.sleep(0.05)

        for warm in (1900, 1900):
            engine.answer(ids(warm))
        for number in range(2 * prompts):
            if whole == prompts:
                break
            prompt = ids(_BLOCK * (_FIRST_BLOCKS + number) + _TAIL)
            before = _blocks_stored(endpoint)
            computed = engine.answer(prompt)
            settle(before + len(prompt) // _BLOCK)
            hit = engine.answer(prompt)
            engine.reset()
            loaded = engine.answer(prompt)
            control = engine.answer(ids(len(prompt) - _COMMON) + prompt[-_COMMON:])
            apart, differs = [_apart(loaded, hit), _apart(loaded, computed)], _apart(control, computed)
            if loaded[2] == hit[2]:
                whole += 1
                equal += loaded[:2] == hit[:2]
                told_apart += differs > 3 * max(apart)
            row = (
                str(len(prompt)),
                str(computed[2]),
                str(hit[2]),
                str(loaded[2]),
                "equal" if loaded[:2] == hit[:2] else f"{apart[0]:.1e}",
                f"{apart[1]:.1e}",
                f"{differs:.1e}",
            )
            report.rows.append(row)
            print(*row, flush=True)
    tried = len(report.rows)
    report.notes.append(f"{tried} prompts, of which {whole} were loaded in full; {told_apart} controls clearly differ")
    report.figures = {"tried": tried, "whole": whole, "equal": equal, "told_apart": told_apart}
    report.goal("prompts loaded in full and equal to a prefix hit", equal, at_least=prompts)
    report.show()


def _apart(one: Answer, other: Answer) -> float:
    """The largest difference of two answers' logprobs."""
    return max(abs(a - b) for a, b in zip(one[1], other[1], strict=True))


if __name__ == "__main__":
    main()
