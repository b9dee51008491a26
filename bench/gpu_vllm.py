"""vLLM on one GPU: time to first token computed, from its own cache, from the pool, and with vLLM's own offloading.

Every row is an engine process of its own, all in one run, with the shape of Llama-3-8B and dummy weights (the time to
first token does not depend on their values). Time to first token is the wall time of `generate` with one token, one
request at a time, the engine otherwise idle, prompts of random token ids that no engine has seen before:

    computed     nobody has it
    GPU hit      again, from the engine's own prefix cache
    loaded       again after the prefix cache was reset: from the connector
    restart      by a new engine process, from what an earlier one has stored
    second       by another engine on the same GPU, while the first one lives
    from disk    after the pool was emptied; the plugin loads from disk only where that is faster than computing
    first disk   the same the first time, when nobody has loaded from this disk yet

Each says what has happened: loaded, computed, or how much of it was loaded where it was a part.

A load of B bytes should take no longer than the GPU hit and 1.1 times B over the bus limit, which is measured in the
same run. Needs a CUDA GPU and vLLM; about eight minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click

from bench.harness import ROOT, Report, start_daemon
from kvstore.admin import AdminClient

_SHAPE: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
#: Of a stored block. The last one of a prompt that it fills is not looked up whole: one token is always computed.
_BLOCK_TOKENS: Final = 64
_KV_BYTES_PER_TOKEN: Final = 2 * 32 * 8 * 128 * 2
_TIER_BYTES: Final = 20_000_000_000
#: Of vLLM's memory tier above its files: what two of the longest prompts fill.
_SMALL_TIER_BYTES: Final = 6_000_000_000
_LOAD_FACTOR: Final = 1.1
_COMPUTED_FACTOR: Final = 1.02
_START_S: Final = 5.0


# -- the engine's process ----------------------------------------------------------------------------------------------


def engine_process(model: str, connector: str, lens: list[int]) -> None:
    """Reads one JSON command per line, answers with one per line."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    transfer = KVTransferConfig(**json.loads(connector)) if connector else None
    llm = LLM(
        model=model,
        kv_transfer_config=transfer,
        load_format="dummy",
        enforce_eager=True,
        max_model_len=max(lens) + 256,
        dtype="bfloat16",
        max_num_batched_tokens=8192,
        disable_log_stats=False,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_num_seqs=64,
        seed=0,
        kv_cache_memory_bytes=24 << 30,
        gpu_memory_utilization=0.4,  # only looked at, so that a second engine may start beside the first
    )
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)

    def first_token(seed: int, tokens: int) -> dict[str, Any]:
        rng = random.Random(seed)
        prompt = [rng.randrange(10, 128_000) for _ in range(tokens)]
        started = time.perf_counter()
        output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
        took = time.perf_counter() - started
        return {"s": took, "cached": output.num_cached_tokens, "token": output.outputs[0].token_ids[0]}

    def counters() -> dict[str, float]:
        from prometheus_client import REGISTRY

        found: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                if "kv_offload" in sample.name or "kvstore" in sample.name:
                    labels = [v for k, v in sample.labels.items() if k not in ("model_name", "engine", "le")]
                    if not sample.name.endswith(("_bucket", "_created")):
                        name = "|".join([sample.name, *labels])
                        found[name] = found.get(name, 0.0) + sample.value
        return found

    def tell(answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    tell("ready")
    for line in sys.stdin:
        command, *rest = json.loads(line)
        if command == "first_token":
            tell(first_token(*rest))
        elif command == "settle":  # a step after the copies are over makes the engine take note of them
            time.sleep(rest[0])
            first_token(random.getrandbits(60), 32)
            time.sleep(0.2)
            tell("settled")
        elif command == "reset":
            tell(llm.reset_prefix_cache())
        else:
            tell(counters())


class Engine:
    """A vLLM engine in a process of its own."""

    def __init__(self, name: str, model: Path, connector: dict[str, Any] | None, lens: list[int], logs: Path) -> None:
        self.name = name
        self.has_connector = connector is not None
        command = [sys.executable, "-m", "bench.gpu_vllm", "--engine", str(model)]
        command += ["--connector", json.dumps(connector) if connector else "", "--lens", ",".join(map(str, lens))]
        started = time.perf_counter()
        self._log = (logs / f"{name}.log").open("w")
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._answer()
        self.start_s = time.perf_counter() - started

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"engine {self.name} ended; see its log")
        return json.loads(line)

    def ask(self, *command: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def first_token(self, seed: int, tokens: int) -> tuple[float, int]:
        answer = self.ask("first_token", seed, tokens)
        return answer["s"] * 1e3, answer["cached"]

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


@contextlib.contextmanager
def engine(name: str, model: Path, connector: dict[str, Any] | None, lens: list[int], logs: Path) -> Iterator[Engine]:
    made = Engine(name, model, connector, lens, logs)
    try:
        yield made
    finally:
        made.stop()


# -- what is measured --------------------------------------------------------------------------------------------------


class Run:
    """All rows of a run."""

    def __init__(self, lens: list[int], reps: int, logs: Path) -> None:
        self.lens, self.reps, self.logs = lens, reps, logs
        self.seed = random.SystemRandom().getrandbits(40)
        self.ms: dict[tuple[str, int, str], list[float]] = {}
        self.cached: dict[tuple[str, int, str], set[int]] = {}
        self.start_s: dict[str, float] = {}
        self.stored: dict[int, list[int]] = {n: [] for n in lens}  # seeds of prompts that the pool has
        self.counters: dict[str, dict[str, float]] = {}
        self.disk_bytes_per_s = 0  # as the daemon has measured it

    def new_seed(self) -> int:
        self.seed += 1
        return self.seed

    def note(self, engine: Engine, what: str, seed: int, tokens: int) -> None:
        took, cached = engine.first_token(seed, tokens)
        self.ms.setdefault((engine.name, tokens, what), []).append(took)
        self.cached.setdefault((engine.name, tokens, what), set()).add(cached)
        print(f"{engine.name:12s} {tokens:6d} {what:10s} {took:8.1f} ms, {cached} tokens cached", flush=True)

    def warm(self, engine: Engine, settle_s: float) -> None:
        """Shapes, allocators and copies in both directions."""
        self.start_s[engine.name] = engine.start_s
        print(f"{engine.name:12s} ready after {engine.start_s:.1f} s", flush=True)
        for tokens in self.lens:
            seed = self.new_seed()
            engine.first_token(seed, tokens)
            engine.ask("settle", settle_s)
            engine.first_token(seed, tokens)
            if engine.has_connector:
                engine.ask("reset")
                engine.first_token(seed, tokens)
                engine.ask("settle", 0.3)

    def whole(self, engine: Engine, settle_s: float = 0.7) -> None:
        """Computed, GPU hit, and loaded where there is a connector."""
        self.warm(engine, settle_s)
        for _ in range(self.reps):
            for tokens in self.lens:
                seed = self.new_seed()
                self.note(engine, "computed", seed, tokens)
                engine.ask("settle", settle_s)
                self.note(engine, "GPU hit", seed, tokens)
                if engine.has_connector:
                    engine.ask("reset")
                    self.note(engine, "loaded", seed, tokens)
                    engine.ask("settle", 0.3)
                    self.stored[tokens].append(seed)
        self.counters[engine.name] = engine.ask("counters")

    def again(self, engine: Engine, what: str, seeds: dict[int, list[int]]) -> None:
        """Prompts that another engine has stored."""
        self.warm(engine, 0.7)
        for tokens, each in seeds.items():
            for seed in each[-2:]:
                self.note(engine, what, seed, tokens)
                engine.ask("settle", 0.3)
        self.counters[engine.name] = engine.ask("counters")

    def outcome(self, name: str, tokens: int, what: str) -> str:
        """Where the prompt's KV came from."""
        cached = self.cached.get((name, tokens, what), {0})
        if min(cached) >= tokens - _BLOCK_TOKENS:
            return "loaded"
        return "computed" if not max(cached) else f"loaded {min(cached)} to {max(cached)} tokens"

    def median(self, name: str, tokens: int, what: str) -> float | None:
        found = self.ms.get((name, tokens, what))
        return statistics.median(found) if found else None

    def quartile(self, name: str, tokens: int, what: str) -> float:
        """What a quarter of the prompts was faster than. The host launches a step of one token in 15 to 28 ms, at
        random and for every engine, and a median of few prompts goes by that.
        """
        found = sorted(self.ms[name, tokens, what])
        return found[len(found) // 4]


def _kvstore(endpoint: str) -> dict[str, Any]:
    extra = {"block_size": 64, "kvstore.endpoint": endpoint}
    return {"kv_connector": "KVStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _vllm(**extra: Any) -> dict[str, Any]:
    extra = {"block_size": 64, "cpu_bytes_to_use": _TIER_BYTES, **extra}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _from_disk(run: Run, model: Path, folder: str) -> None:
    """A daemon with a disk, whose pool is emptied between storing and asking again."""
    endpoint = f"unix:{folder}/disk.sock"
    flags = ("--block-size", "64", "--disk-dir", f"{folder}/disk", "--disk-bytes", "24GiB")
    cli = [sys.executable, "-m", "kvstore"]
    with (
        start_daemon(12 << 30, endpoint, *flags),
        engine("disk", model, _kvstore(endpoint), run.lens, run.logs) as made,
    ):
        run.warm(made, 2.0)
        evict = [*cli, "evict", "--free", "100GB", "--endpoint", endpoint]
        for attempt in range(run.reps + 1):
            for tokens in run.lens if attempt else run.lens[:1]:
                seed = run.new_seed()
                run.note(made, "computed", seed, tokens)
                made.ask("settle", 4.0 if tokens > 16_384 else 1.5)
                subprocess.run(evict, cwd=ROOT, capture_output=True, check=False)
                made.ask("reset")
                run.note(made, "from disk" if attempt else "first disk", seed, tokens)
        with contextlib.closing(AdminClient(endpoint)) as admin:
            run.disk_bytes_per_s = admin.stats()["speeds"].get("disk", 0)
        run.counters["disk"] = made.ask("counters")


def _bus_limit() -> float:
    """Bytes a second of one large copy to the GPU, in a process of its own."""
    code = (
        "import torch\n"
        "h = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True); g = h.cuda()\n"
        "a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2)); t = []\n"
        "for _ in range(7):\n"
        "    a.record(); g.copy_(h, non_blocking=True); b.record(); b.synchronize(); t.append(a.elapsed_time(b))\n"
        "print((1 << 30) / sorted(t)[3] * 1e3)\n"
    )
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def _report(run: Run, bus: float) -> Report:
    whats = ("computed", "GPU hit", "loaded", "restart", "second", "first disk", "from disk")
    report = Report("gpu_vllm", ("engine", "tokens", "start s", *(f"{what} ms" for what in whats)))
    names = list(dict.fromkeys(name for name, _, _ in run.ms))
    for name in names:
        for tokens in run.lens:
            cells = []
            for what in whats:
                each = run.ms.get((name, tokens, what), [])
                cell = f"{statistics.median(each):.0f} ({min(each):.0f}-{max(each):.0f})" if each else ""
                if each and what in ("first disk", "from disk"):
                    cell += f" {run.outcome(name, tokens, what)}"
                cells.append(cell)
            report.rows.append((name, str(tokens), f"{run.start_s[name]:.1f}", *cells))
    for tokens in run.lens:
        copy_ms = tokens * _KV_BYTES_PER_TOKEN / bus * 1e3
        hit, loaded = run.median("kvstore", tokens, "GPU hit"), run.median("kvstore", tokens, "loaded")
        if hit is not None and loaded is not None:
            most = hit + _LOAD_FACTOR * copy_ms
            goal = report.goal(f"{tokens} tokens loaded, ms", loaded, at_most=round(most, 1))
            quick_hit, quick = (run.quartile("kvstore", tokens, what) for what in ("GPU hit", "loaded"))
            report.notes.append(
                f"{tokens} tokens: loaded in {loaded:.1f} ms, GPU hit {hit:.1f} + copy {copy_ms:.1f}: {goal}; "
                f"lower quartiles: loaded {quick:.1f}, GPU hit {quick_hit:.1f}, the rest "
                f"{quick - quick_hit - copy_ms:.1f}"
            )
            own = [run.median(name, tokens, "loaded") for name in ("offloading", "tiering")]
            for theirs in own:
                if theirs is not None:
                    report.goal(f"{tokens} tokens loaded, beside vLLM's own", loaded, at_most=round(theirs, 1))
        plain, computed = run.median("none", tokens, "computed"), run.median("kvstore", tokens, "computed")
        if plain is not None and computed is not None:
            report.goal(f"{tokens} tokens computed", round(computed / plain, 4), at_most=_COMPUTED_FACTOR)
        disk, again = run.median("disk", tokens, "from disk"), run.median("disk", tokens, "computed")
        if disk is not None and again is not None:
            report.goal(f"{tokens} tokens from disk beside computed", round(disk / again, 3), at_most=1.05)
        first = run.median("disk", tokens, "first disk")
        if first is not None and again is not None:
            report.goal(f"{tokens} tokens from disk the first time", round(first / again, 3), at_most=1.05)
    if {"kvstore", "offloading"} <= run.start_s.keys():
        sooner = run.start_s["offloading"] - run.start_s["kvstore"]
        report.goal("engine start, s sooner than vLLM's tier", round(sooner, 1), at_least=_START_S)
    report.figures = {
        "bus_GB_s": bus / 1e9,
        "disk_GB_s": run.disk_bytes_per_s / 1e9,
        "ms": {f"{name} {tokens} {what}": each for (name, tokens, what), each in run.ms.items()},
        "outcome": {
            f"{name} {tokens} {what}": run.outcome(name, tokens, what)
            for name, tokens, what in run.ms
            if "disk" in what
        },
        "cached": {f"{name} {tokens} {what}": sorted(each) for (name, tokens, what), each in run.cached.items()},
        "start_s": run.start_s,
        "counters": run.counters,
    }
    return report


@click.command()
@click.option("--engine", "model_dir", hidden=True)
@click.option("--connector", default="", hidden=True)
@click.option("--lens", default="8192,32768", show_default=True, help="Prompt lengths in tokens.")
@click.option("--reps", default=3, show_default=True, help="Prompts of each length.")
@click.option("--rows", default="none,kvstore,restart,second,offloading,disk,tiering", show_default=True)
@click.option("--logs", default="", help="Folder for the engines' logs; a temporary one by default.")
@click.option("--scratch", default=None, help="Folder with room for the disk tiers.")
def main(
    model_dir: str | None, connector: str, lens: str, reps: int, rows: str, logs: str, scratch: str | None
) -> None:
    """vLLM on one GPU."""
    tokens = [int(each) for each in lens.split(",")]
    if model_dir:
        engine_process(model_dir, connector, tokens)
        return
    wanted = rows.split(",")
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=scratch) as folder:
        model = Path(folder, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(_SHAPE))
        log_folder = Path(logs or folder)
        run = Run(tokens, reps, log_folder)
        bus = _bus_limit()
        print(f"bus limit {bus / 1e9:.1f} GB/s", flush=True)
        try:
            _rows(run, wanted, model, folder)
        finally:
            report = _report(run, bus)
            report.show({"gpu": "see nvidia-smi"})


def _rows(run: Run, wanted: list[str], model: Path, folder: str) -> None:
    def plain(name: str, connector: dict[str, Any] | None, settle_s: float = 0.7) -> None:
        with engine(name, model, connector, run.lens, run.logs) as made:
            run.whole(made, settle_s)

    if "none" in wanted:
        plain("none", None)
    if "kvstore" in wanted:
        endpoint = f"unix:{folder}/kv.sock"
        with start_daemon(_TIER_BYTES, endpoint, "--block-size", "64"):
            plain("kvstore", _kvstore(endpoint))
            stored = {n: list(seeds) for n, seeds in run.stored.items()}
            if "restart" in wanted:
                with engine("restarted", model, _kvstore(endpoint), run.lens, run.logs) as first:
                    run.again(first, "restart", stored)
                    if "second" in wanted:
                        with engine("second", model, _kvstore(endpoint), run.lens, run.logs) as other:
                            run.again(other, "second", stored)
    if "offloading" in wanted:
        plain("offloading", _vllm())
    if "disk" in wanted:
        _from_disk(run, model, folder)
    if "tiering" in wanted:
        tier = {"type": "fs", "root_dir": f"{folder}/fs"}
        spec = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": _SMALL_TIER_BYTES, "secondary_tiers": [tier]}
        with engine("tiering", model, _vllm(**spec), run.lens, run.logs) as made:
            run.whole(made, 3.0)
            for tokens in run.lens:
                for _ in range(2):  # other prompts push this one out of the memory tier
                    made.first_token(run.new_seed(), max(run.lens))
                    made.ask("settle", 3.0)
                made.ask("reset")
                run.note(made, "from disk", run.stored[tokens][-1], tokens)
                made.ask("settle", 0.5)


if __name__ == "__main__":
    main()
