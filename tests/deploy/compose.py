"""docker-compose.yml without containers: its commands as processes of this machine, on loopback.

A container has its own files and its own address; a process has neither, so these are written differently, and nothing
else of a command is:

=====================================================  ================================================================
in the file                                            here
=====================================================  ================================================================
``/path`` that a volume ``NAME:/path`` is mounted at   a folder ``NAME`` under the test's own
``SERVICE:PORT``                                       ``127.0.0.1`` and a free port, the same for all
``0.0.0.0:PORT`` and ``127.0.0.1:PORT``                that address of the service itself
a port alone, ``0.0.0.0`` alone                        that port of the service itself, ``127.0.0.1``
``kvstore``, ``python`` as the program                 this Python (``-m kvstore``)
=====================================================  ================================================================

``depends_on`` is kept to: a service whose health is asked for must pass its health check first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tests.redis.servers import free_ports
from tests.support import clean_environ

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
#: Far beyond what a loaded machine needs.
PATIENCE_S = 90.0
_VARIABLE = re.compile(r"\$\{\w+:-(.*?)\}")


def services() -> dict[str, dict[str, Any]]:
    """The services of the file, with the defaults of its variables."""
    document = yaml.safe_load(_VARIABLE.sub(r"\1", FILE.read_text()))
    return dict(document["services"])


class Composed:
    """Services as processes.

    Attributes:
        processes: By service.
    """

    def __init__(self, folder: Path) -> None:
        self.services = services()
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._ports: dict[tuple[str, str], int] = {}

    def up(self, *names: str) -> None:
        """Starts services, and before them what they depend on."""
        for name in names:
            if name in self.processes:
                continue
            needed = self.services[name].get("depends_on", {})
            self.up(*needed)
            for other in needed:
                if needed[other]["condition"] == "service_healthy":
                    self._wait_until_healthy(other)
            log = (self.folder / f"{name}.log").open("w")
            with log:
                self.processes[name] = subprocess.Popen(
                    self.command(name), stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, **self._where()
                )

    def finish(self, name: str) -> str:
        """Waits until a service ends by itself. What it wrote.

        Raises:
            AssertionError: it did not end with 0.
        """
        code = self.processes[name].wait(PATIENCE_S)
        text = (self.folder / f"{name}.log").read_text()
        assert code == 0, f"{name} ended with {code}: {text}"
        return text

    def down(self) -> None:
        """Ends all of them."""
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def command(self, name: str) -> list[str]:
        """The command of a service as it runs here."""
        return self._here(name, self.services[name]["command"])

    def port(self, name: str, port: str) -> int:
        """Where a port of a service is here."""
        if (name, port) not in self._ports:
            (self._ports[name, port],) = free_ports(1)
        return self._ports[name, port]

    def _where(self) -> dict[str, Any]:
        return {"cwd": ROOT, "env": clean_environ(PYTHONPATH=str(ROOT), PATH=os.environ["PATH"])}

    def _here(self, name: str, command: list[str]) -> list[str]:
        program, *arguments = command
        if program == "redis-server":
            arguments += ["--dir", str(self.folder)]
        programs = {"kvstore": [sys.executable, "-m", "kvstore"], "python": [sys.executable]}
        return [*programs.get(program, [program]), *(self._argument(name, each) for each in arguments)]

    def _argument(self, name: str, argument: str) -> str:
        for volume in self.services[name].get("volumes", []):
            source, path = volume.split(":")[:2]
            if path in argument:
                (self.folder / source).mkdir(exist_ok=True)
                argument = argument.replace(path, str(self.folder / source))
        hosts = "|".join(map(re.escape, self.services))

        def address(match: re.Match[str]) -> str:
            host = name if match["host"] in ("0.0.0.0", "127.0.0.1") else match["host"]
            return f"127.0.0.1:{self.port(host, match['port'])}"

        argument = re.sub(rf"(?<![\w.])(?P<host>{hosts}|0\.0\.0\.0|127\.0\.0\.1):(?P<port>\d+)", address, argument)
        if argument == "0.0.0.0":
            return "127.0.0.1"
        return str(self.port(name, argument)) if argument.isdigit() else argument

    def _wait_until_healthy(self, name: str) -> None:
        kind, *test = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        deadline = time.monotonic() + PATIENCE_S
        while subprocess.run(self._here(name, test), capture_output=True, check=False, **self._where()).returncode:
            code = self.processes[name].poll()
            log = (self.folder / f"{name}.log").read_text()
            assert code is None, f"{name} ended with {code}: {log}"
            assert time.monotonic() < deadline, f"{name} is not healthy: {log}"
            time.sleep(0.1)
