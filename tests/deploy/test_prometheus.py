"""What the monitoring profile gives Prometheus and Grafana, under a real Prometheus that scrapes real daemons."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.compose import PATIENCE_S, ROOT, Composed
from tests.redis.servers import free_ports, needs_redis

CONFIG = ROOT / "deploy" / "prometheus.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "kvstore.json"
#: What Grafana puts in place of its variables.
VARIABLES = {"$daemon": ".*", "$__rate_interval": "1m"}

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="prometheus is not installed"
)


class Prometheus:
    """A server in this file's own folder."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def ready(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/-/ready", timeout=5):
            return True
        return False

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression gives now. What is no expression is an HTTP error."""
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self._url}/api/v1/query?{query}", timeout=30) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        return list(answer["data"]["result"])


@contextlib.contextmanager
def prometheus(folder: Path, composed: Composed) -> Iterator[Prometheus]:
    """One with the file's own configuration, but for the addresses and the pace."""
    config = yaml.safe_load(CONFIG.read_text())
    config["global"]["scrape_interval"] = "500ms"
    for job in config["scrape_configs"]:
        for group in job["static_configs"]:
            parted = [target.split(":") for target in group["targets"]]
            group["targets"] = [f"127.0.0.1:{composed.port(name, port)}" for name, port in parted]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    command = ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        server = Prometheus(port)
        eventually(server.ready, folder / "log")
        yield server
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def eventually(holds: Any, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@needs_prometheus
def test_promtool_accepts_the_file() -> None:
    done = subprocess.run(["promtool", "check", "config", str(CONFIG)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout


@needs_prometheus
@needs_redis
def test_prometheus_scrapes_the_daemons_and_answers_the_dashboard(composed: Composed, tmp_path: Path) -> None:
    composed.up("daemon-a", "daemon-b")
    with prometheus(tmp_path, composed) as server:
        eventually(lambda: [each["value"][1] for each in server.ask("up")] == ["1", "1"], tmp_path / "log")
        states = {(each["metric"]["tier"], each["metric"]["instance"]) for each in server.ask("kvstore_tier_state")}
        assert {tier for tier, _ in states} == {"cpu", "disk", "redis"} and len(states) == 6
        panels = json.loads(DASHBOARD.read_text())["panels"]
        for expression in (target["expr"] for panel in panels for target in panel["targets"]):
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            series = server.ask(expression)
            # What was not seen yet, or is a rate over one sample so far, has no series.
            assert series or "rate(" in expression or "sessions" in expression, expression
