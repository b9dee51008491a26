from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore import cli, errors
from kvstore.admin import AdminClient
from kvstore.cli import ExitCode
from tests.ops.conftest import Daemon, Run, clean_environ, in_process, start_daemon

BLOCK_BYTES = 64 << 10
NAMESPACE = kvstore.Namespace(model="ops-test", dtype="bfloat16", block_size=16, block_bytes=BLOCK_BYTES)
KEYS = [bytes([index]) * 32 for index in range(8)]


@pytest.fixture
def client(daemon: Daemon) -> Iterator[kvstore.Client]:
    """A client with eight blocks stored."""
    with kvstore.connect(daemon.endpoint, namespace=NAMESPACE, client_name="ops-test") as client:
        blocks = [np.full(BLOCK_BYTES, index, dtype=np.uint8) for index in range(len(KEYS))]
        client.insert(KEYS, blocks).wait(30)
        yield client
        client.flush()


def one_line(text: str) -> str:
    assert text.startswith("kvstore: ") and text.count("\n") == 1, text
    return text


@pytest.mark.parametrize("command", ["ping", "stats", "sessions", "ls", "flush", "evict"])
def test_no_daemon(run: Run, socket_folder: Path, command: str) -> None:
    more = {"flush": ["--all", "--yes"], "evict": ["--free", "1MB"]}.get(command, [])
    outcome = run(command, "--endpoint", f"unix:{socket_folder}/none.sock", *more)
    assert outcome.code == ExitCode.NO_DAEMON
    assert f"no daemon answers at unix:{socket_folder}/none.sock" in one_line(outcome.err)
    assert "kvstore serve" in outcome.err
    assert not outcome.out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["stats", "--jsn"], "--json"),
        (["stat"], "stats"),
        (["stats", "--json", "--check"], "choose one"),
        (["stats", "--watch", "1", "--prometheus"], "--watch"),
        (["stats", "--watch", "0"], "--watch"),
        (["stats", "--endpoint", "nonsense"], "unix:/path"),
        (["stats", "--timeout", "0"], "--timeout"),
        (["stats", "--token-file", "/nowhere"], "/nowhere"),
        (["stats", "--watch", "nan"], "nan is not a number of seconds"),
        (["ping", "--timeout", "inf"], "inf is not a number of seconds"),
        (["ls", "--limit", "99999999999"], "10000"),
        (["evict", "--free", "1e30"], "1e30"),
        (["prefetch", "--all", "--max", "1e30"], "1e30"),
        (["serve", "--cpu-bytes", "1GB", "--disk-dir", "/tmp/x", "--disk-bytes", "1e30"], "more than any machine has"),
        (["config", "--cpu-bytes", "1GB", "--redis-url", "http://u:p@h"], "redis://"),
        (["flush"], "--all"),
        (["flush", "ab", "--all"], "--all"),
        (["evict"], "--free"),
        (["evict", "--free", "lots"], "1GiB"),
        (["serve"], "--cpu-bytes"),
        (["serve", "--cpu-bytes", "1"], "16777216"),
        (["serve", "--cpu-byte", "1GB"], "--cpu-bytes"),
        (["serve", "--cpu-bytes", "1GB", "--listen", "0.0.0.0:1"], "--token-file"),
        (["config", "--cpu-bytes", "1GB", "--hugepages", "tph"], "'thp'"),
        (["config", "--cpu-bytes", "1GB", "--config", "/nowhere"], "/nowhere"),
    ],
)
def test_usage_errors_are_one_line_with_what_to_do(run: Run, arguments: list[str], part: str) -> None:
    outcome = run(*arguments)
    assert outcome.code == ExitCode.USAGE
    assert part in one_line(outcome.err)
    assert not outcome.out


def test_help_and_version(run: Run) -> None:
    assert run("--version").out == f"kvstore, version {kvstore.__version__}\n"
    page = run("--help")
    assert page.code == ExitCode.OK
    for command in ("serve", "stats", "ping", "ls", "flush", "evict", "sessions", "config"):
        assert command in page.out


def test_ping(run: Run, daemon: Daemon, admin: AdminClient) -> None:
    outcome = run("ping", "--endpoint", daemon.endpoint)
    assert outcome.code == ExitCode.OK
    assert f"kvstore {kvstore.__version__}, pid {daemon.process.pid}" in outcome.out
    assert admin.ping().generation.hex()[:12] in outcome.out


def test_the_endpoint_may_come_from_the_environment(daemon: Daemon) -> None:
    assert in_process(["ping"], KVSTORE_ENDPOINT=daemon.endpoint).code == ExitCode.OK
    outcome = in_process(["ping"], KVSTORE_ENDPOINT="nonsense")
    assert outcome.code == ExitCode.USAGE and "$KVSTORE_ENDPOINT" in one_line(outcome.err)


def test_stats(run: Run, daemon: Daemon, client: kvstore.Client, admin: AdminClient) -> None:
    page = run("stats", "--endpoint", daemon.endpoint).out
    assert NAMESPACE.digest().hex() in page and "model=ops-test" in page and "ops-test" in page
    tree = json.loads(run("stats", "--endpoint", daemon.endpoint, "--json").out)
    assert tree.keys() == admin.stats().keys() == client.stats().keys()
    assert tree["tiers"][0]["blocks"] == len(KEYS)
    text = run("stats", "--endpoint", daemon.endpoint, "--prometheus").out
    assert f'kvstore_tier_blocks{{tier="cpu"}} {len(KEYS)}.0\n' in text


def test_check_is_ok_while_all_is_well(run: Run, daemon: Daemon) -> None:
    outcome = run("stats", "--endpoint", daemon.endpoint, "--check")
    assert (outcome.code, outcome.out) == (ExitCode.OK, "ok\n")


def test_check_fails_while_the_daemon_drains(run: Run, socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = start_daemon(f"unix:{socket_folder}/kv.sock", "--drain-s", "60")
    try:
        assert run("ping", "--endpoint", daemon.endpoint, "--wait", "30").code == ExitCode.OK
        with kvstore.connect(daemon.endpoint, namespace=NAMESPACE) as client:
            reservation = client.reserve(1, wait_s=30)
            assert len(reservation.offsets) == 1
            daemon.process.terminate()
            with AdminClient(daemon.endpoint) as admin:
                while admin.stats()["state"] != "draining":
                    pass
            outcome = run("stats", "--endpoint", daemon.endpoint, "--check")
            assert outcome.code == ExitCode.DEGRADED
            assert "the daemon is draining" in outcome.out
            client.abort(reservation.generation, reservation.offsets)
    finally:
        code, _ = daemon.stop()
    assert code == 0


@pytest.mark.parametrize("as_json", [False, True])
def test_watch_goes_on_until_it_is_stopped(daemon: Daemon, as_json: bool) -> None:
    arguments = ["stats", "--endpoint", daemon.endpoint, "--watch", "0.1", *(["--json"] if as_json else [])]
    with subprocess.Popen(
        [sys.executable, "-m", "kvstore", *arguments], stdout=subprocess.PIPE, text=True, env=clean_environ()
    ) as watcher:
        assert watcher.stdout is not None
        try:
            if as_json:
                first, second = (json.loads(watcher.stdout.readline()) for _ in range(2))
                assert second["uptime_s"] > first["uptime_s"]
            else:
                assert any(line.startswith("rates") for line in watcher.stdout)
        finally:
            watcher.kill()


def test_a_reader_that_closes_the_pipe_ends_the_watch_without_a_traceback(daemon: Daemon) -> None:
    script = f"{sys.executable} -m kvstore stats --endpoint {daemon.endpoint} --watch 0.1 --json | head -n 1 >/dev/null"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, env=clean_environ())
    assert done.stderr == ""


def test_sessions(run: Run, daemon: Daemon, client: kvstore.Client) -> None:
    assert "ops-test" in run("sessions", "--endpoint", daemon.endpoint).out
    lines = run("sessions", "--endpoint", daemon.endpoint, "--json").out.splitlines()
    # The newest stands last; a client of an earlier test may still be on its way out.
    assert json.loads(lines[-1])["name"] == "ops-test"


def test_ls(run: Run, daemon: Daemon, client: kvstore.Client) -> None:
    page = run("ls", "--endpoint", daemon.endpoint).out
    assert all(key.hex() in page for key in KEYS)
    assert f"{len(KEYS)} of {len(KEYS)} blocks" in page
    prefix = NAMESPACE.digest().hex()[:6]
    lines = run("ls", prefix.upper(), "--endpoint", daemon.endpoint, "--json", "--limit", "3").out.splitlines()
    blocks = [json.loads(line) for line in lines]
    assert len(blocks) == 3
    assert {block["namespace"] for block in blocks} == {NAMESPACE.digest().hex()}
    assert {block["size_bytes"] for block in blocks} == {BLOCK_BYTES}
    assert {bytes.fromhex(block["key"]) for block in blocks} <= set(KEYS)


def test_a_namespace_that_nobody_opened(run: Run, daemon: Daemon) -> None:
    for command in (["ls", "nope"], ["flush", "nope", "--yes"]):
        outcome = run(*command, "--endpoint", daemon.endpoint)
        assert outcome.code == ExitCode.REFUSED
        assert "'nope'" in one_line(outcome.err)


def test_flush(run: Run, daemon: Daemon, client: kvstore.Client) -> None:
    outcome = run("flush", NAMESPACE.digest().hex()[:8], "--yes", "--endpoint", daemon.endpoint)
    assert (outcome.code, outcome.out) == (ExitCode.OK, f"removed {len(KEYS)} blocks\n")
    assert client.lookup(KEYS) == 0
    assert run("flush", "--all", "--yes", "--endpoint", daemon.endpoint).out == "removed 0 blocks\n"


def test_flush_does_not_go_on_where_nobody_can_be_asked(daemon: Daemon, client: kvstore.Client) -> None:
    outcome = in_process(["flush", "--all", "--endpoint", daemon.endpoint])
    assert outcome.code == ExitCode.USAGE and "--yes" in one_line(outcome.err)
    assert client.lookup(KEYS) == len(KEYS)


def test_evict(run: Run, daemon: Daemon, client: kvstore.Client, admin: AdminClient) -> None:
    outcome = run("evict", "--free", "1MiB", "--endpoint", daemon.endpoint)
    assert outcome.code == ExitCode.OK and outcome.out.startswith("evicted 0 blocks")
    everything = admin.stats()["tiers"][0]["capacity_bytes"]
    outcome = run("evict", "--free", str(everything), "--endpoint", daemon.endpoint)
    assert outcome.code == ExitCode.FAILED, "the whole budget can never be free: bookkeeping is part of it"
    assert outcome.out.startswith(f"evicted {len(KEYS)} blocks")
    assert client.lookup(KEYS) == 0


def test_a_second_daemon_is_refused_and_the_first_one_named(daemon: Daemon) -> None:
    second = start_daemon(daemon.endpoint)
    code, log = second.wait()
    assert code == ExitCode.ALREADY_RUNNING
    assert str(daemon.process.pid) in one_line(log)


def test_a_token_is_asked_for_on_tcp_only(run: Run, socket_folder: Path) -> None:
    token, wrong = socket_folder / "token", socket_folder / "wrong"
    token.write_text("0123456789abcdef0123\n")
    wrong.write_text("0123456789abcdef9999\n")
    daemon = start_daemon(f"unix:{socket_folder}/kv.sock", "--listen", "127.0.0.1:0", "--token-file", str(token))
    try:
        assert run("ping", "--endpoint", daemon.endpoint, "--wait", "30").code == ExitCode.OK
        listen = json.loads(run("stats", "--endpoint", daemon.endpoint, "--json").out)["listen"]
        (tcp,) = [endpoint for endpoint in listen if not endpoint.startswith("unix:")]
        assert run("ping", "--endpoint", tcp, "--token-file", str(token)).code == ExitCode.OK
        for arguments in (["ping", "--endpoint", tcp], ["ping", "--endpoint", tcp, "--token-file", str(wrong)]):
            outcome = run(*arguments)
            assert outcome.code == ExitCode.REFUSED
            assert "--token-file" in one_line(outcome.err)
    finally:
        daemon.stop()


def test_config_prints_toml_that_gives_the_same_settings(run: Run, tmp_path: Path) -> None:
    arguments = ["--cpu-bytes", "64MiB", "--listen", "unix:/a", "--listen", "127.0.0.1:7", "--drain-s", "2"]
    first = run("config", *arguments)
    assert first.code == ExitCode.OK
    assert "cpu_bytes = 67108864  # --cpu-bytes" in first.out
    assert 'hugepages = "auto"  # default' in first.out
    path = tmp_path / "kvstore.toml"
    path.write_text(first.out)
    second = run("config", "--config", str(path))

    def values(page: str) -> list[str]:
        return [line.partition("  # ")[0] for line in page.splitlines()]

    assert values(second.out) == values(first.out)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hush@host:1",
        "redis://user:hush@hush@host:1/0",
        "redis+sentinel://:hush@host:1/service?sentinel_password=hush",
        "unix://user:hush@/socket?db=1",
    ],
)
def test_config_keeps_passwords_to_itself(run: Run, url: str) -> None:
    outcome = run("config", "--cpu-bytes", "64MiB", "--redis-url", url)
    assert outcome.code == ExitCode.OK
    assert "redis_url" in outcome.out and "hush" not in outcome.out + outcome.err


@pytest.mark.parametrize("command", ["stats", "sessions", "ls"])
def test_a_daemon_of_another_version_is_named(
    run: Run, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    ours = AdminClient.ping
    monkeypatch.setattr(AdminClient, "stats", lambda self: {"version": "9.0", "tiers": {}})
    arguments = [command, *(["ab"] if command == "ls" else []), "--endpoint", daemon.endpoint]
    with pytest.raises(KeyError):  # of the same version it would be a defect, and no excuse for one
        run(*arguments)
    monkeypatch.setattr(AdminClient, "ping", lambda self: dataclasses.replace(ours(self), version="9.0"))
    outcome = run(*arguments)
    assert outcome.code == ExitCode.FAILED and "is kvstore 9.0" in one_line(outcome.err)


def test_every_error_has_an_exit_code() -> None:
    def leaves(kind: type[errors.KVStoreError]) -> Iterator[type[errors.KVStoreError]]:
        children = kind.__subclasses__()
        if not children:
            yield kind
        for child in children:
            yield from leaves(child)

    codes = {kind: cli.exit_code_of(kind("text")) for kind in leaves(errors.KVStoreError)}
    assert codes[errors.DaemonUnavailable] == codes[errors.DeadlineExceeded] == ExitCode.NO_DAEMON
    assert codes[errors.ConfigError] == ExitCode.USAGE
    assert codes[errors.AlreadyRunning] == ExitCode.ALREADY_RUNNING
    assert codes[errors.AccessDenied] == codes[errors.LimitExceeded] == codes[errors.Draining] == ExitCode.REFUSED
    assert set(cli.EXIT_CODE_HELP) == set(ExitCode)


def test_a_daemon_that_does_not_answer_in_time(run: Run, daemon: Daemon) -> None:
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        outcome = run("stats", "--endpoint", daemon.endpoint, "--timeout", "0.2")
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert outcome.code == ExitCode.NO_DAEMON
    assert daemon.endpoint in one_line(outcome.err)
