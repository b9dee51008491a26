"""Real daemons in processes of their own, real clients in this one, and waits that end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import kvstore
from kvstore.admin import AdminClient
from kvstore.errors import KVStoreError

#: Longest that anything here waits. Far beyond what a loaded machine needs: only a failure takes that long.
PATIENCE_S = 60.0
#: Between two looks at another process, which nothing here can be woken by.
_LOOK_S = 0.005


def eventually(holds: Callable[[], Any], what: str = "") -> Any:
    """Waits until something holds, and returns it.

    Raises:
        AssertionError: it does not within PATIENCE_S.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < deadline, f"still not: {what or holds}"
        time.sleep(_LOOK_S)
    return found


def clean_environ(**more: str) -> dict[str, str]:
    """This environment without our variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")} | more


class Daemon:
    """A `kvstore serve` in a process of its own, on a socket in a folder of its own.

    Attributes:
        endpoint: Its Unix socket.
        process: The process of this life; start() makes another.
    """

    def __init__(self, folder: Path, *flags: str, cpu_bytes: str = "64MiB", prefix: Sequence[str] = ()) -> None:
        """`prefix`: in front of its command, such as that of another network namespace."""
        self.folder = folder
        self.socket = folder / "run" / "kv.sock"
        self.endpoint = f"unix:{self.socket}"
        self.log = folder / "log"
        self._arguments = [*prefix, sys.executable, "-m", "kvstore", "serve", "--cpu-bytes", cpu_bytes]
        self._arguments += ["--listen", self.endpoint, *flags]
        self.process: subprocess.Popen[bytes] | None = None

    def spawn(self) -> subprocess.Popen[bytes]:
        """Starts it; it may not be ready when this returns."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._arguments, stderr=log, stdout=log, env=clean_environ())
        return self.process

    def start(self) -> Daemon:
        """Starts it and waits until it answers."""
        process = self.spawn()
        with self.admin() as admin:

            def answers() -> bool:
                assert process.poll() is None, self.log.read_text()
                with contextlib.suppress(KVStoreError):
                    return admin.ping().pid == process.pid
                return False

            eventually(answers, "the daemon answers")
        return self

    def admin(self) -> AdminClient:
        """A client that leaves no session."""
        return AdminClient(self.endpoint, timeout_s=PATIENCE_S)

    def stats(self) -> dict[str, Any]:
        """What `kvstore stats` shows."""
        with self.admin() as admin:
            return admin.stats()

    def connect(self, namespace: kvstore.Namespace | None = None, **options: Any) -> kvstore.Client:
        """A client of it in this process."""
        options.setdefault("timeout_s", PATIENCE_S)
        return kvstore.connect(self.endpoint, namespace, **options)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        """Waits for its end. Its exit code."""
        assert self.process is not None
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        """SIGKILL, and its end."""
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        """SIGTERM, and its end. Its exit code."""
        if self.process is None or self.process.poll() is not None:
            return 0
        self.signal(signal.SIGTERM)
        return self.wait()

    def check_nothing_held(self) -> None:
        """Everything that clients held came back; waits for it.

        Raises:
            AssertionError: something is left.
        """
        figures = ("sessions", "leases", "pins", "reserved_slots", "waiters")
        with self.admin() as admin:
            eventually(
                lambda: not any(map(admin.stats().get, figures)),
                f"nothing is held: { {name: admin.stats()[name] for name in figures} }",
            )

    def open_files(self) -> int:
        """How many descriptors it has open."""
        assert self.process is not None
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def resident_bytes(self) -> int:
        """Memory of it that is not shared with anybody: the pool does not count."""
        assert self.process is not None
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines())
        return int(fields["RssAnon"].split()[0]) << 10


@contextlib.contextmanager
def running_daemon(*flags: str, cpu_bytes: str = "64MiB", prefix: Sequence[str] = ()) -> Iterator[Daemon]:
    """A daemon until the end of the with-block. Its folder has a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        daemon = Daemon(Path(folder), *flags, cpu_bytes=cpu_bytes, prefix=prefix)
        try:
            yield daemon.start()
        finally:
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.kill()


def run_python(script: str, *arguments: str, prefix: Sequence[str] = (), **options: Any) -> subprocess.Popen[str]:
    """Starts a Python process with our packages; its stdout and stdin are pipes of text."""
    root = str(Path(__file__).parents[1])
    options.setdefault("env", clean_environ(PYTHONPATH=root))
    return subprocess.Popen(
        [*prefix, sys.executable, "-u", "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


@contextlib.contextmanager
def child(script: str, *arguments: str, prefix: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """run_python until the end of the with-block; killed if it is still there."""
    process = run_python(script, *arguments, prefix=prefix)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE_S)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that a child writes; empty where it ended."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
