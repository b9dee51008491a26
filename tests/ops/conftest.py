"""A real daemon in a process of its own, and the command line as a function."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvstore import cli
from kvstore.admin import AdminClient

STOP_S = 60
READY_S = 30


@dataclasses.dataclass
class Daemon:
    """A `kvstore serve` that was started by a test."""

    process: subprocess.Popen[str]
    endpoint: str

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Ends it and waits. Its exit code and what it wrote to stderr."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """Waits until it ends by itself. Its exit code and what it wrote to stderr."""
        _, log = self.process.communicate(timeout=STOP_S)
        return self.process.returncode, log


def clean_environ() -> dict[str, str]:
    """This environment without our variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}


def start_daemon(endpoint: str, *flags: str) -> Daemon:
    """Starts a daemon; it may not be ready when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore", "serve", "--cpu-bytes", "64MiB", "--listen", endpoint, *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environ(),
    )
    return Daemon(process, endpoint)


@pytest.fixture(autouse=True)
def _no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(clean_environ()):
        monkeypatch.delenv(name)


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket, which pytest's own is not always."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One daemon for the tests of a module that leave it as they found it."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        daemon = start_daemon(f"unix:{folder}/run/kv.sock", "--listen", "127.0.0.1:0")
        try:
            assert cli.main(["ping", "--endpoint", daemon.endpoint, "--wait", str(READY_S)]) == cli.ExitCode.OK
            yield daemon
        finally:
            daemon.stop()


@pytest.fixture
def admin(daemon: Daemon) -> Iterator[AdminClient]:
    with AdminClient(daemon.endpoint) as client:
        yield client


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs one command line in this process."""

    def call(*arguments: str) -> Outcome:
        capsys.readouterr()
        try:
            code = cli.main(list(arguments))
        except SystemExit as end:
            assert isinstance(end.code, int)
            code = int(end.code)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


def in_process(arguments: Sequence[str], **environ: str) -> Outcome:
    """Runs one command line in a process of its own, with pipes."""
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", *arguments],
        capture_output=True,
        text=True,
        timeout=STOP_S,
        stdin=subprocess.DEVNULL,
        env={**clean_environ(), **environ},
    )
    return Outcome(done.returncode, done.stdout, done.stderr)
