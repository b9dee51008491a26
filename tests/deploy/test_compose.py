"""docker-compose.yml: it is one, its demo finishes, and what is shown of metrics exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request

import pytest
import yaml

from kvstore.cli import kvstore as commands
from kvstore.metrics import FAMILIES
from tests.deploy.compose import FILE, ROOT, Composed, services
from tests.redis.servers import needs_redis

DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "kvstore.json"


def _compose() -> list[str] | None:
    """Docker Compose, as a program of its own or as a part of docker."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker") and not subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        return ["docker", "compose"]
    return None


@pytest.mark.parametrize("profiles", [[], ["vllm", "monitoring"]])
def test_docker_compose_accepts_the_file(profiles: list[str]) -> None:
    compose = _compose()
    if compose is None:
        pytest.skip("docker-compose is not installed")
    flags = [flag for profile in profiles for flag in ("--profile", profile)]
    done = subprocess.run([*compose, "-f", str(FILE), *flags, "config"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "daemon-b" in done.stdout


@needs_redis
def test_the_demo_finishes(composed: Composed) -> None:
    """Redis, two daemons with disks of their own, prefill at the one and decode at the other; every byte is checked."""
    composed.up("prefill", "decode")
    stored = composed.finish("prefill")
    loaded = composed.finish("decode")
    assert re.search(r"prefill: [1-9]\d* blocks stored", stored), stored
    assert re.search(r"decode: 0 blocks stored, ([1-9]\d*) of \1 loaded, 0 wrong; .*[1-9]\d* from redis", loaded), (
        loaded
    )
    # And what Prometheus is told to fetch is there.
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    for target in job["static_configs"][0]["targets"]:
        name, port = target.split(":")
        with urllib.request.urlopen(f"http://127.0.0.1:{composed.port(name, port)}/metrics", timeout=30) as page:
            assert 'kvstore_tier_state{state="ok",tier="redis"} 1.0' in page.read().decode()


def test_to_run_decode_is_to_run_all_of_the_demo() -> None:
    """docker compose run --rm decode: its exit code is the demo's, and nothing of the demo ends with prefill."""
    needed, new = set(), {"decode"}
    while new:
        needed |= new
        new = {other for name in new for other in services()[name].get("depends_on", {})} - needed
    assert needed == {name for name, service in services().items() if "profiles" not in service}


def test_two_hosts_have_nothing_but_redis_in_common() -> None:
    volumes = {name: {each.split(":")[0] for each in one.get("volumes", [])} for name, one in services().items()}
    assert not volumes["daemon-a"] & volumes["daemon-b"]
    for client, daemon in (("prefill", "daemon-a"), ("decode", "daemon-b"), ("vllm-prefill", "daemon-a")):
        assert volumes[client] & volumes[daemon]
    assert not volumes["decode"] & volumes["daemon-a"]


def test_commands_that_are_not_run_here_name_flags_that_exist() -> None:
    router = services()["router"]["command"]
    assert router[:2] == ["kvstore", "pd-router"]
    known = {flag for parameter in commands.get_command(None, "pd-router").params for flag in parameter.opts}  # type: ignore[arg-type,union-attr]
    assert {each.partition("=")[0] for each in router[2:]} <= known
    for name in ("vllm-prefill", "vllm-decode"):
        (config,) = (each for each in services()[name]["command"] if each.startswith("--kv-transfer-config="))
        assert json.loads(config.partition("=")[2])["kv_connector"] == "KVStoreConnector"


def test_every_path_of_the_file_is_there() -> None:
    for service in services().values():
        for volume in service.get("volumes", []):
            if volume.startswith("./"):
                assert (ROOT / volume.split(":")[0]).exists(), volume
        if build := service.get("build"):
            assert (ROOT / build["dockerfile"]).exists()
            assert build.get("target", "base") in re.findall(r" AS (\w+)", (ROOT / build["dockerfile"]).read_text())


def test_images_run_as_a_user_who_owns_what_volumes_are_mounted_over() -> None:
    """A fresh named volume gets the owner of that directory in the image, and root's where there is none."""
    stages: dict[str, list[str]] = {}
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text())
    for line in text.splitlines():
        if begun := re.match(r"FROM (\S+)(?: AS (\w+))?$", line):
            lines = stages[begun[2] or "last"] = list(stages.get(begun[1], []))
        elif line and not line.startswith("#"):
            lines.append(line)
    assert stages.keys() == {"base", "vllm", "last"} and stages["last"] == stages["base"]
    owned = {}
    for name, lines in stages.items():
        *_, user = (line.split()[1] for line in lines if line.startswith("USER "))
        assert f"useradd --uid 10001 --create-home {user}" in "".join(lines)
        made = re.findall(
            rf"install --directory --owner={user} --group={user}(?: --mode=0700)?((?: /\S+)+)", "\n".join(lines)
        )
        owned[name] = {folder for folders in made for folder in folders.split()}
    targets = {"kvstore": "base", "kvstore-vllm": "vllm"}
    mounted = {
        (targets[service["image"]], volume.split(":")[1])
        for service in services().values()
        for volume in service.get("volumes", [])
        if service["image"] in targets
    }
    assert {target for target, _ in mounted} == {"base", "vllm"}
    assert all(folder in owned[target] for target, folder in mounted), mounted


def test_every_metric_of_the_dashboard_exists() -> None:
    labels = {family.shown_name: set(family.labels) for family in FAMILIES}
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [variable["definition"] for variable in dashboard["templating"]["list"]]
    seen = set()
    for expression in expressions:
        names = re.findall(r"\bkvstore_\w+", expression)
        assert names, expression
        seen |= set(names)
        for name in names:
            assert name in labels, f"{name} in {expression}"
        for group in re.findall(r"by \(([^)]*)\)", expression):
            for label in group.split(", "):
                assert label == "instance" or all(label in labels[name] for name in names), expression
    assert {"kvstore_hits_total", "kvstore_misses_total", "kvstore_tier_state"} <= seen
