"""Real engines and real daemons as processes that tests can kill."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvstore
from kvstore.errors import KVStoreError

HERE = Path(__file__).parent
BLOCK_TOKENS = 64
#: 8 layers, 4 KV heads of 64, keys and values in four bytes each.
BLOCK_BYTES = BLOCK_TOKENS * 8 * 4 * 64 * 2 * 4
OUTPUT_TOKENS = 8
#: The prompt of the main job.
LONG_TOKENS = 4000
LONG_BLOCKS = LONG_TOKENS // BLOCK_TOKENS
#: Everywhere else: 12 full blocks and a tail.
TOKENS = 800
BLOCKS = TOKENS // BLOCK_TOKENS


def prompt(seed: int, tokens: int = TOKENS) -> list[int]:
    """Random tokens: a prompt that shares no block with that of another seed."""
    return random.Random(seed).choices(range(2, 1000), k=tokens)


def wait_until(what: str, holds: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Waits for a condition; a daemon that is away counts as not yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(KVStoreError):
            found = holds()
            if found:
                return found
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


class Daemon:
    """A kvstore daemon on a socket of its own."""

    def __init__(
        self,
        folder: Path,
        cpu_bytes: int = 1_000_000_000,
        disk_bytes: int = 0,
        *,
        flags: tuple[str, ...] = (),
        program: tuple[str, ...] = ("-m", "kvstore"),
    ) -> None:
        self.flags = flags
        self.program = program
        self.endpoint = f"unix:{folder}/kvstore.sock"
        self.cpu_bytes = cpu_bytes
        self.disk = ["--disk-dir", str(folder / "disk"), "--disk-bytes", str(disk_bytes)] if disk_bytes else []
        self.log = folder / "daemon.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, *self.program, "serve", "--cpu-bytes", str(self.cpu_bytes)]
        command += ["--block-size", str(BLOCK_TOKENS), "--listen", self.endpoint, *self.disk, *self.flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        wait_until("the daemon answers", self.stats)

    def kill(self, with_signal: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(with_signal)
        self.process.wait(20)

    def send(self, with_signal: int) -> None:
        assert self.process is not None
        self.process.send_signal(with_signal)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(20)

    def stats(self) -> dict[str, Any]:
        with kvstore.connect(self.endpoint, client_name="test", timeout_s=2) as client:
            return client.stats()

    def sessions_of(self, name: str) -> list[dict[str, Any]]:
        """Those whose name begins so."""
        return [session for session in self.stats()["sessions"] if session["name"].startswith(name)]

    def stored_blocks(self) -> int:
        return int(self.stats()["tiers"][0]["blocks"])

    def wait_stored(self, blocks: int) -> None:
        wait_until(f"{blocks} blocks are stored", lambda: self.stored_blocks() >= blocks)

    def wait_on_disk(self, blocks: int) -> None:
        def are_there() -> bool:
            disk = self.stats()["tiers"][1]
            return bool(disk["blocks"] >= blocks and not disk["uncommitted"])

        wait_until(f"{blocks} blocks are on disk", are_there)


def connector(extra: dict[str, Any], role: str = "kv_both") -> dict[str, Any]:
    """Our part of `kv_transfer_config`."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_role": role,
        "kv_connector_extra_config": {
            "block_size": BLOCK_TOKENS,
            "cpu_bytes_to_use": 600_000_000,
            # A busy machine must not turn a hit into a miss.
            "kvstore.load_policy": "always",
            "kvstore.verdict_deadline_s": 10,
            "kvstore.timeout_s": 10,
            **extra,
        },
    }


def several(*connectors: dict[str, Any]) -> dict[str, Any]:
    """A `kv_transfer_config` of several connectors, in the order in which they are asked."""
    extra = {"connectors": list(connectors)}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def engine_environment() -> dict[str, str]:
    """Variables of every process with an engine: no network, little memory."""
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Threads that spin at barriers make several engines on few cores crawl.
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
    }


class Engine:
    """A vLLM engine in a process of its own. In that process everything runs (or, as usual, in several more)."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        name: str,
        extra: dict[str, Any] | None,
        *,
        role: str = "kv_both",
        processes: bool = False,
        environment: dict[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        settings: dict[str, Any] = {
            "model": str(model),
            "enforce_eager": True,
            # A prompt computed in other steps gives other roundings. In bfloat16 they are large enough to change a
            # token of a random model now and then, with or without a cache; in float32 equal tokens can be asked for.
            "dtype": "float32",
            "max_model_len": 4608,
            "max_num_batched_tokens": 8192,
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": 160,
            "disable_log_stats": False,
            "seed": 0,
            **arguments,
        }
        if extra is not None:
            settings["kv_transfer_config"] = connector(extra, role)
        variables = {
            **os.environ,
            **engine_environment(),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if processes else "0",
            **(environment or {}),
        }
        self.log = folder / f"{name}.log"
        self._log_file = self.log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "driver.py"), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            env=variables,
            text=True,
        )

    def ready(self) -> Engine:
        """Waits for the start; engines that are created first and waited for later start side by side."""
        self._read(240)
        return self

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def ask(self, timeout_s: float = 120.0, **command: Any) -> dict[str, Any]:
        self.send(**command)
        return self._read(timeout_s)

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if readable else ""
        assert line, f"the engine gave no answer; the end of its log:\n{self.log.read_text()[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def generate(
        self, *prompts: list[int], max_tokens: int = OUTPUT_TOKENS, transfer: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Answers of a batch; `transfer` are its `kv_transfer_params`."""
        answer = self.ask(do="generate", prompts=prompts, max_tokens=max_tokens, transfer=transfer)
        outputs: list[dict[str, Any]] = answer["outputs"]
        return outputs

    def metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = self.ask(do="metrics")["metrics"]
        return metrics

    def metric(self, name: str) -> float:
        """A counter, summed over its labels."""
        return sum(value for key, value in self.metrics().items() if key.partition("{")[0] == name)

    def external_hits(self) -> float:
        return self.metric("vllm:external_prefix_cache_hits")

    def wait_storing(self, daemon: Daemon) -> None:
        """Waits until scheduler and worker have both attached, which shows in a block that is stored."""
        before = daemon.stored_blocks()
        seeds = itertools.count(5000)

        def stores() -> bool:
            self.generate(prompt(next(seeds) + self.process.pid * 1000, 2 * BLOCK_TOKENS + 1), max_tokens=2)
            return daemon.stored_blocks() > before

        wait_until("the engine stores", stores, 60)

    def forget_local(self) -> None:
        """Empties the engine's own prefix cache, and leaves the daemon alone."""
        assert self.ask(do="reset", connector=False)["reset"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def stop(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(OSError, AssertionError):
                self.ask(do="stop", timeout_s=20)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
        for pipe in (self.process.stdin, self.process.stdout, self._log_file):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
