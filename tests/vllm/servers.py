"""vLLM's OpenAI-compatible servers and the router in front of them, as processes that tests can kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from tests.vllm.harness import BLOCK_TOKENS, connector, engine_environment, wait_until

#: Several processes start side by side on few cores.
START_S = 240.0
ANSWER_S = 120.0
#: What a prompt looks like, and something else: a server that has the latter and answers rightly has not used it.
TEMPLATE = "{% for message in messages %}<s>{{ message.role }}: {{ message.content }} {% endfor %}assistant: "
OTHER_TEMPLATE = "nothing of what was asked"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class HTTPServer:
    """A process that serves HTTP on a free port of this machine."""

    def __init__(
        self,
        command: list[str],
        log: Path,
        environment: dict[str, str] | None = None,
        cores: Collection[int] | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        with log.open("ab") as file, _running_on(cores):
            self.process = subprocess.Popen(
                [part.format(port=self.port) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # its own processes end with it, also by SIGKILL
            )

    def ready(self) -> HTTPServer:
        def well() -> bool:
            assert self.process.poll() is None, f"it ended; the end of its log:\n{self.log.read_text()[-4000:]}"
            with contextlib.suppress(OSError):
                return self.get("/health")[0] == 200
            return False

        wait_until(f"{self.log.name} serves", well, START_S)
        return self

    def get(self, path: str) -> tuple[int, str]:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=ANSWER_S) as answer:
            return answer.status, answer.read().decode()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON."""
        try:
            with urllib.request.urlopen(self._request(path, body), timeout=ANSWER_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"null")

    def stream(self, path: str, body: Any) -> Iterator[tuple[float, dict[str, Any]]]:
        """The events of a stream, each with the seconds since the request."""
        began = time.monotonic()
        with urllib.request.urlopen(self._request(path, {**body, "stream": True}), timeout=ANSWER_S) as answer:
            for line in answer:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    yield time.monotonic() - began, json.loads(line[6:])

    def _request(self, path: str, body: Any) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        return urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers)

    def metrics(self) -> dict[str, float]:
        """Samples by name and labels, without those that say which engine it is."""
        found: dict[str, float] = {}
        for line in self.get("/metrics")[1].splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                base, brace, labels = name.partition("{")
                kept = [
                    each for each in labels.rstrip("}").split(",") if not each.startswith(("engine=", "model_name="))
                ]
                found[base + (f"{{{','.join(kept)}}}" if brace and any(kept) else "")] = float(value)
        return found

    def metric(self, name: str) -> float:
        """A figure, summed over its labels."""
        return sum(value for key, value in self.metrics().items() if key.partition("{")[0] == name)

    def cpu_seconds(self) -> float:
        """Processor time that its processes have taken so far."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()  # from the third field on
                if int(fields[3]) == self.process.pid:  # its session
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        self.kill()


@contextlib.contextmanager
def _running_on(cores: Collection[int] | None) -> Iterator[None]:
    """Processes that are started meanwhile run on these cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before if cores is None else cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def vllm_server(
    model: Path,
    folder: Path,
    name: str,
    extra: dict[str, Any] | None,
    *arguments: str,
    role: str = "kv_both",
    template: str = TEMPLATE,
    cores: Collection[int] | None = None,
) -> HTTPServer:
    """A server with the test model; `extra` is None for one without the plugin. On `cores` it has a thread for each."""
    chat = folder / f"{name}.jinja"
    chat.write_text(template)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", "{port}", "--chat-template", str(chat)]
    command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "4608", "--block-size", str(BLOCK_TOKENS)]
    command += ["--num-gpu-blocks-override", "160", "--seed", "0", "--disable-uvicorn-access-log", *arguments]
    if extra is not None:
        # Doubled braces: the port is filled in.
        transfer = json.dumps(connector(extra, role)).replace("{", "{{").replace("}", "}}")
        command += ["--kv-transfer-config", transfer]
    environment = engine_environment()
    if cores is not None:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(cores)))
    return HTTPServer(command, folder / f"{name}.log", environment, cores)


def router(folder: Path, prefill: list[HTTPServer], decode: list[HTTPServer], *flags: str) -> HTTPServer:
    """`kvstore pd-router` in front of them."""
    command = [sys.executable, "-m", "kvstore", "pd-router", "--listen", "127.0.0.1:{port}", *flags]
    for flag, servers in (("--prefill", prefill), ("--decode", decode)):
        command += [part for server in servers for part in (flag, server.url)]
    return HTTPServer(command, folder / "router.log")
