"""Start, drain, stop, kill, and start again; and who may come in."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.admin import AdminClient
from kvstore.errors import AccessDenied, DaemonUnavailable, NoMapping, RetryLater, StaleGeneration
from kvstore.handoff import SUFFIX
from kvstore.testing import make_block
from tests.support import PATIENCE_S, Daemon, child, clean_environ, eventually, line_of, running_daemon
from tests.wire.conftest import NAMESPACE

SIZE = NAMESPACE.block_bytes
#: The client's promise: back within 2 s of the daemon's return.
BACK_S = 2.0


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


def put(client: kvstore.Client, *names: bytes) -> None:
    result = client.insert(names, [make_block(name, SIZE) for name in names]).wait(PATIENCE_S)
    assert result.stored == len(names), result


# -- start ---------------------------------------------------------------------------------------------------------


def test_memory_that_a_client_may_have_pinned_is_not_the_pools_again_before_it_ends(daemon: Daemon) -> None:
    """A GPU that has registered the pool copies from and to the pages that it found, whatever has become of them."""
    eventually(lambda: daemon.stats()["tiers"][0]["state"] == "ok")
    small, large = (dataclasses.replace(NAMESPACE, model=str(size), block_bytes=size) for size in (4096, 2 << 20))

    def most(client: kvstore.Client) -> int:
        """How many slots can be had."""
        taken = []
        while len(slots := client.reserve(4096).offsets):
            taken.append(slots)
        for slots in taken:
            client.abort(client.generation, slots)
        return sum(map(len, taken))

    with daemon.connect(large) as early:
        before = most(early)
    with daemon.connect(small) as client:
        assert most(client) > before  # and what that takes in bookkeeping, the machine has got back
        with daemon.connect(large) as late:
            assert 0 < most(late) < before
    with daemon.connect(large) as late:
        eventually(lambda: most(late) == before)


#: Its first thread has ended, as in a process that is ending; another one ends the connection when it is told to.
ENDING = """
import contextlib, ctypes, os, socket, sys, threading
import kvstore
client = kvstore.connect(sys.argv[1], kvstore.Namespace(model="ending", dtype="x", block_size=1, block_bytes=65536))
print(len(client.reserve(3).offsets))
def rest():
    sys.stdin.readline()
    for fd in map(int, os.listdir("/proc/thread-self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            if connection.getpeername() == sys.argv[2]:
                connection.shutdown(socket.SHUT_RDWR)
    print("closed")
    sys.stdin.readline()
threading.Thread(target=rest).start()
ctypes.CDLL(None).syscall(60, 0)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of a system call")
def test_a_process_that_is_ending_keeps_its_slots_until_it_has_ended(daemon: Daemon) -> None:
    """Descriptors are closed one by one, and its GPU writes into the pool until the driver's is closed."""
    with child(ENDING, daemon.endpoint, f"{daemon.socket}{SUFFIX}") as process:
        assert line_of(process) == "3"
        (session,) = daemon.stats()["sessions"]
        assert session["reserved_slots"] == 3
        assert process.stdin is not None
        process.stdin.write("close\n")
        process.stdin.flush()
        assert line_of(process) == "closed"

        def of(client: str) -> dict[str, int]:
            sessions = daemon.stats()["sessions"]
            return {each["id"]: each["reserved_slots"] for each in sessions if each["name"] == client}

        with daemon.connect(NAMESPACE, client_name="later"):
            assert of("later")
        eventually(lambda: not of("later"))  # so the end of the other connection was seen before
        assert of(session["name"])[session["id"]] == 3
        process.kill()
        eventually(lambda: not daemon.stats()["sessions"])


def test_it_serves_before_its_pool_is_populated() -> None:
    """An order, not a time: whatever the size, it is ready first and populated later; slots come as memory does."""
    with running_daemon("--populate-threads", "1", "--hugepages", "off", cpu_bytes="512MiB") as daemon:
        with daemon.connect(NAMESPACE) as client:
            put(client, b"a")
            assert client.lookup([b"a"]) == 1
        eventually(lambda: daemon.stats()["tiers"][0]["state"] == "ok")
        tier = daemon.stats()["tiers"][0]
        assert tier["populated_bytes"] == tier["pool_bytes"] and tier["committed_bytes"] <= tier["capacity_bytes"]
        eventually(lambda: '"populated"' in daemon.log.read_text())
        events = [json.loads(line)["event"] for line in daemon.log.read_text().splitlines()]
        assert events.index("ready") < events.index("populated")


def test_only_its_user_gets_in(daemon: Daemon) -> None:
    assert stat.S_IMODE(daemon.socket.parent.stat().st_mode) == 0o700
    for suffix in ("", ".map"):
        mode = Path(f"{daemon.socket}{suffix}").stat().st_mode
        assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600


def test_a_second_daemon_on_the_same_socket_ends_and_names_the_first(daemon: Daemon) -> None:
    assert daemon.process is not None
    second = subprocess.run(
        [sys.executable, "-m", "kvstore", "serve", "--cpu-bytes", "64MiB", "--listen", daemon.endpoint],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=clean_environ(),
    )
    assert second.returncode == 6 and f"pid {daemon.process.pid}" in second.stderr
    with daemon.connect(NAMESPACE) as client:
        put(client, b"a")


def test_a_second_daemon_on_the_same_port_ends_and_names_the_first() -> None:
    with running_daemon("--listen", "127.0.0.1:0") as daemon, tempfile.TemporaryDirectory(prefix="kv") as folder:
        assert daemon.process is not None
        tcp = daemon.stats()["listen"][1]
        other = Daemon(Path(folder), "--listen", tcp)
        other.spawn()
        assert other.wait() == 6 and f"pid {daemon.process.pid}" in other.log.read_text()


@pytest.mark.parametrize("flags", [["--metrics-listen"], ["--listen"], ["--listen", "127.0.0.1:0", "--data-listen"]])
def test_a_port_that_is_taken_ends_the_start_in_one_line_and_leaves_nothing(flags: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, tempfile.TemporaryDirectory(prefix="kv") as folder:
        disk = ["--disk-dir", f"{folder}/disk", "--disk-bytes", "16MiB"]
        daemon = Daemon(Path(folder), *disk, *flags, f"127.0.0.1:{taken.getsockname()[1]}")
        daemon.spawn()
        assert daemon.wait() == 2
        log = daemon.log.read_text()
        assert "Traceback" not in log and f"kvstore: {flags[-1]} 127.0.0.1:" in log.splitlines()[-1], log
        assert list(daemon.socket.parent.iterdir()) == []


def test_it_may_open_as_many_files_as_its_sessions_need() -> None:
    """The usual limit of a shell or a service, which is far below what sessions_max promises."""
    with running_daemon(prefix=["bash", "-c", 'ulimit -S -n 256 && exec "$@"', "-"]) as daemon:
        assert daemon.process is not None
        limits = Path(f"/proc/{daemon.process.pid}/limits").read_text()
        (soft, hard) = next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3:5]
        assert hard == "unlimited" or int(soft) == min(int(hard), 4 * 4096 + 2048)


# -- stop ----------------------------------------------------------------------------------------------------------


def test_a_stop_leaves_nothing_behind(daemon: Daemon) -> None:
    assert daemon.stop() == 0
    assert list(daemon.socket.parent.iterdir()) == []


@pytest.mark.parametrize("what", ["lease", "reservation"])
def test_a_stop_waits_for_what_is_held(daemon: Daemon, what: str) -> None:
    with daemon.connect(NAMESPACE) as client:
        put(client, b"a")
        if what == "lease":
            (lease,) = client.acquire([(0, [b"a"])])
        else:
            slots = client.reserve(1)
        daemon.signal(signal.SIGTERM)
        eventually(lambda: client.stats()["state"] == "draining")
        # It takes no new work, but gives what it has.
        assert client.insert([b"b"], [bytes(SIZE)]).wait(PATIENCE_S).refused == {"draining": 1}
        assert client.reserve(1).shortfall == "draining"
        with client.select([b"a", b"never"], timeout_s=30) as found:
            assert len(found) == 1, "select does not wait for a daemon that stops"
        del found
        assert daemon.process is not None and daemon.process.poll() is None
        if what == "lease":
            client.release([lease])
        else:
            assert client.commit(slots.generation, slots.offsets, [b"c"]).tolist() == [1]
        assert daemon.wait() == 0


def test_a_stop_does_not_wait_longer_than_it_was_told() -> None:
    with running_daemon("--drain-s", "0.5") as daemon, daemon.connect(NAMESPACE) as client:
        put(client, b"a")
        client.acquire([(0, [b"a"])])
        assert daemon.stop() == 0
        assert "stopping although something is held" in daemon.log.read_text()


def test_a_second_signal_ends_the_waiting() -> None:
    with running_daemon("--drain-s", "3600") as daemon, daemon.connect(NAMESPACE) as client:
        put(client, b"a")
        client.acquire([(0, [b"a"])])
        daemon.signal(signal.SIGTERM)
        eventually(lambda: client.stats()["state"] == "draining")
        assert daemon.stop() == 0


def test_signals_that_come_too_late_change_nothing(daemon: Daemon) -> None:
    daemon.signal(signal.SIGTERM)
    assert daemon.process is not None
    while daemon.process.poll() is None:
        daemon.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.process.wait(0.01)
    assert daemon.wait() == 0


def test_a_stop_copies_down_while_it_waits_for_what_is_held() -> None:
    """Whoever stops it may give it less time than an engine that holds something."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        flags = ["--disk-dir", f"{folder}/disk", "--disk-bytes", "32MiB", "--disk-write-policy", "back"]
        with running_daemon(*flags, "--drain-s", "3600") as daemon, daemon.connect(NAMESPACE) as client:
            put(client, b"a")
            client.reserve(1)
            assert daemon.stats()["tiers"][1]["blocks"] == 0
            daemon.signal(signal.SIGTERM)
            eventually(lambda: daemon.stats()["tiers"][1]["blocks"] == 1, "the block is on disk")
            assert daemon.stats()["reserved_slots"] == 1
            assert daemon.stop() == 0


# -- restart -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_client_is_back_by_itself_after_a_restart(daemon: Daemon, end: str) -> None:
    with daemon.connect(NAMESPACE, wait=False) as client:
        eventually(lambda: client.attached)
        put(client, b"a")
        old = client.generation
        slots = client.reserve(1)
        (lease,) = client.acquire([(0, [b"a"])])
        arena = client.arena
        assert arena is not None and old is not None
        if end == "kill":
            daemon.kill()
        else:
            client.abort(old, slots.offsets)
            client.release([lease])
            daemon.stop()
        eventually(lambda: not client.attached, "the client notices")
        with pytest.raises(DaemonUnavailable, match=str(daemon.socket)):
            client.lookup([b"a"])
        # What was mapped stays mapped: a copy under way ends with the bytes that it began with.
        offset = int(lease.offsets[0])
        assert arena.as_numpy()[offset : offset + SIZE].tobytes() == make_block(b"a", SIZE)
        daemon.start()
        back = threading.Event()
        threading.Thread(target=lambda: (eventually(lambda: client.attached), back.set())).start()
        assert back.wait(BACK_S), "not back within 2 s of the daemon's return"
        assert client.generation != old and client.lookup([b"a"]) == 0
        with pytest.raises(StaleGeneration):
            client.commit(old, slots.offsets, [b"b"])
        assert client.abort(old, slots.offsets) == 0 and client.release([lease]) == 0
        put(client, b"a")
        assert client.lookup([b"a"]) == 1


def test_a_client_is_back_though_it_had_no_threads_for_a_while(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's pids limit. Those that ask for a thread in vain ask again."""
    with daemon.connect(NAMESPACE) as client:
        start, refused = threading.Thread.start, threading.Event()

        def no_timers(thread: threading.Thread) -> None:
            if isinstance(thread, threading.Timer):
                refused.set()
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as context:
            context.setattr(threading.Thread, "start", no_timers)
            daemon.kill()
            daemon.start()
            assert refused.wait(PATIENCE_S)
        eventually(lambda: client.attached)
        put(client, b"a")


def test_an_insert_that_gets_no_thread_is_refused_and_the_next_one_is_not(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon.connect(NAMESPACE) as client:
        with monkeypatch.context() as context:
            context.setattr(threading.Thread, "start", _no_thread)
            ticket = client.insert([b"a"], [make_block(b"a", SIZE)])
            assert ticket.wait(PATIENCE_S).refused == {"no_thread": 1}
        put(client, b"b")
        assert client.lookup([b"a"]) == 0, "nobody knows of it any more"


def test_what_a_call_took_is_given_back_though_there_was_no_thread_for_that(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon.connect(NAMESPACE) as client:
        for reserved in (1, 2):
            client.reserve(1)
            attached = client._connection.attached
            assert attached is not None
            with monkeypatch.context() as context:
                if reserved == 1:
                    context.setattr(threading.Thread, "start", _no_thread)
                client._connection.forget(client._connection.next_request_id() - 1, attached)
        eventually(lambda: daemon.stats()["reserved_slots"] == 0, "the second one tells of both")


def _no_thread(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_patient_client_waits_for_the_daemons_return(daemon: Daemon) -> None:
    with daemon.connect(NAMESPACE) as client:
        put(client, b"a")
        daemon.kill()
        answers: list[int] = []
        thread = threading.Thread(target=lambda: answers.append(client.lookup([b"a"])))
        thread.start()
        daemon.start()
        thread.join(PATIENCE_S)
        assert answers == [0]


@pytest.mark.parametrize("drop", [False, True])
def test_a_select_says_in_its_own_time_that_the_daemon_has_gone(daemon: Daemon, drop: bool) -> None:
    """And not after the time that calls wait for it, which is beyond this test's own limit here."""
    with daemon.connect(NAMESPACE, timeout_s=600) as client:
        put(client, b"a")
        daemon.kill()
        for timeout_s in (0, 0.2):  # the first one finds out, the second one knows
            with pytest.raises(DaemonUnavailable):
                with (client.drop_select if drop else client.select)([b"a"], timeout_s=timeout_s):
                    pass
        daemon.start()
        put(client, b"a")  # other calls wait
        with (client.drop_select if drop else client.select)([b"a"], timeout_s=0) as found:
            assert len(found) == 1


def test_a_select_that_waits_outlives_a_restart(daemon: Daemon) -> None:
    lengths: list[int] = []
    with daemon.connect(NAMESPACE) as client:

        def wait() -> None:
            with client.select([b"a"], timeout_s=PATIENCE_S) as found:
                lengths.append(len(found))

        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: daemon.stats()["waiters"] == 1)
        daemon.kill()
        daemon.start()
        eventually(lambda: daemon.stats()["waiters"] == 1, "it waits again")
        put(client, b"a")
        thread.join(PATIENCE_S)
        assert lengths == [1]
    daemon.check_nothing_held()


def test_a_restart_inside_a_with_block_harms_nobody(daemon: Daemon) -> None:
    with daemon.connect(NAMESPACE) as client:
        put(client, b"a", b"b")
        with client.select([b"a"], timeout_s=0) as found:
            daemon.kill()
            assert bytes(found[0]) == make_block(b"a", SIZE)
        daemon.start()
        put(client, b"a")
        with pytest.raises(RetryLater), client.drop_select([b"a"], timeout_s=5) as found:
            assert bytes(found[0]) == make_block(b"a", SIZE)
            daemon.kill()
            daemon.start()
        del found
    daemon.check_nothing_held()


def test_after_a_kill_the_next_start_works_at_once(daemon: Daemon) -> None:
    for _ in range(3):
        daemon.kill()
        assert daemon.socket.exists()
        daemon.start()
    with daemon.connect(NAMESPACE) as client:
        put(client, b"a")


def test_without_a_daemon_a_client_that_does_not_wait_says_so_at_once() -> None:
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        where = f"unix:{folder}/kv.sock"
        with pytest.raises(DaemonUnavailable, match="kvstore serve"):
            kvstore.connect(where, NAMESPACE, timeout_s=0.2)
        with kvstore.connect(where, NAMESPACE, wait=False) as client:
            assert not client.attached and client.arena is None and client.generation is None
            for call in (lambda: client.lookup([b"a"]), lambda: client.reserve(1), client.stats):
                with pytest.raises(DaemonUnavailable):
                    call()
            assert client.insert([b"a"], [bytes(SIZE)]).wait(PATIENCE_S).refused == {"DaemonUnavailable": 1}
            with pytest.raises(kvstore.errors.SizeMismatch):
                client.insert([b"a"], [bytes(SIZE + 1)])
            assert client.release([]) == 0


def test_a_call_that_was_not_answered_in_time_leaves_nothing_taken(daemon: Daemon) -> None:
    """The daemon stands still; the client gives up; when the daemon goes on, it does what nobody waits for any more."""
    with daemon.connect(NAMESPACE, timeout_s=1.0, wait=False) as client:
        eventually(lambda: client.attached)
        put(client, b"a")
        daemon.signal(signal.SIGSTOP)
        try:
            for call in (lambda: client.acquire([(0, [b"a"])]), lambda: client.reserve(3)):
                with pytest.raises(kvstore.errors.DeadlineExceeded):
                    call()
        finally:
            daemon.signal(signal.SIGCONT)
        # Both are given up, whether the daemon ever looked at them or not; one call may name the two.
        eventually(lambda: daemon.stats()["calls"].get("Release", 0), "the client tells what it gave up")
        eventually(lambda: not any(thread.name == "kvstore-forget" for thread in threading.enumerate()))
        tree = daemon.stats()
        assert not tree["pins"] and not tree["reserved_slots"]
        put(client, b"b")


def test_calls_that_a_hanging_daemon_leaves_unanswered_cost_one_thread(daemon: Daemon) -> None:
    """However long it hangs: each call is given up, and all of them by the same thread."""
    with daemon.connect(NAMESPACE, wait=False) as client:
        eventually(lambda: client.attached)
        put(client, b"a")
        keys = [b"%0128d" % index for index in range(2000)]  # more than a socket holds after a few calls
        daemon.signal(signal.SIGSTOP)
        client._connection.timeout_s = 0.1  # it will not answer, however long one waits
        try:
            for _ in range(6):
                with pytest.raises(kvstore.errors.DeadlineExceeded):
                    client.acquire([(0, [b"a", *keys])])
            assert sum(thread.name == "kvstore-forget" for thread in threading.enumerate()) == 1
        finally:
            client._connection.timeout_s = PATIENCE_S
            daemon.signal(signal.SIGCONT)
        eventually(lambda: not any(thread.name == "kvstore-forget" for thread in threading.enumerate()))
        assert not daemon.stats()["pins"]
        put(client, b"b")


# -- fork ----------------------------------------------------------------------------------------------------------


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")
import kvstore
ns = kvstore.Namespace(model="wire", dtype="bfloat16", block_size=64, block_bytes=65536)
client = kvstore.connect(sys.argv[1], ns)
client.insert([b"a"], [bytes(65536)]).wait(30)
# Another thread may be anywhere at that moment, and its locks stay as they are in the child.
client._connection._changed.acquire(), client._inserter._lock.acquire()
pid = os.fork()
if pid:
    client._connection._changed.release(), client._inserter._lock.release()
else:
    code = 1
    try:
        for call in (lambda: client.lookup([b"a"]), lambda: client.insert([b"b"], [bytes(65536)]), client.stats,
                     lambda: client.reserve(1), client.flush, lambda: client.select([b"a"], 1).__enter__()):
            try:
                call()
            except kvstore.errors.ForkedClient as error:
                assert "Connect in the child" in str(error)
            else:
                raise AssertionError("a forked client answered")
        client.close()
        code = 0
    finally:
        os._exit(code)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), client.lookup([b"a"]), flush=True)
client.close()
"""


def test_a_client_does_not_survive_a_fork_and_says_so(served: Daemon) -> None:
    with child(FORK, served.endpoint) as process:
        assert line_of(process) == "0 1", "the child was refused, and the parent goes on"
        assert process.wait(PATIENCE_S) == 0


# -- TCP -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tcp_daemon() -> Iterator[tuple[Daemon, str, str]]:
    """A daemon that listens on a port as well, with a token."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        token_file = Path(folder) / "token"
        token_file.touch(mode=0o600)
        token_file.write_text("a-token-of-many-letters-0123456789\n")
        with running_daemon("--listen", "127.0.0.1:0", "--token-file", str(token_file)) as daemon:
            yield daemon, daemon.stats()["listen"][1], token_file.read_text().strip()


@pytest.mark.parametrize("token", [None, "wrong", "a-token-of-many-letters-012345678"])
def test_a_port_asks_for_the_token(tcp_daemon: tuple[Daemon, str, str], token: str | None) -> None:
    daemon, address, _ = tcp_daemon
    with pytest.raises(AccessDenied, match="token"):
        kvstore.connect(address, NAMESPACE, token=token, timeout_s=PATIENCE_S)
    with AdminClient(address, token, PATIENCE_S) as admin:
        for call in (admin.ping, admin.stats, lambda: admin.flush(None), lambda: admin.evict(1), admin.list_blocks):
            with pytest.raises(AccessDenied):
                call()
    daemon.check_nothing_held()
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines() if "token" in line]
    assert len(lines) < daemon.stats()["errors"]["AccessDenied"], "a log is no place to flood"
    assert {line["peer"] for line in lines} == {"ipv4:127.0.0.1"}
    assert token is None or token not in daemon.log.read_text()


def test_a_unix_socket_asks_for_none(tcp_daemon: tuple[Daemon, str, str]) -> None:
    daemon, _, _ = tcp_daemon
    with daemon.connect(NAMESPACE) as client:
        assert client.attached


def test_a_client_on_the_loopback_maps_the_pool(tcp_daemon: tuple[Daemon, str, str]) -> None:
    daemon, address, token = tcp_daemon
    with kvstore.connect(address, NAMESPACE, token=token, timeout_s=PATIENCE_S) as client:
        assert client.arena is not None
        put(client, b"tcp")
        with client.select([b"tcp"], timeout_s=0) as found:
            assert bytes(found[0]) == make_block(b"tcp", SIZE)
            view = np.frombuffer(found[0], dtype=np.uint8)
        del found
        client.close()
        assert view[:4].tobytes() == make_block(b"tcp", SIZE)[:4]
        del view
    daemon.check_nothing_held()


def test_a_client_that_cannot_map_the_pool_says_so_and_holds_nothing(
    tcp_daemon: tuple[Daemon, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from another host, where the path of the handoff leads nowhere."""
    daemon, address, token = tcp_daemon
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    with kvstore.connect(address, NAMESPACE, token=token, timeout_s=PATIENCE_S, staging_bytes=0) as client:
        assert client.arena is None and client.attached
        assert client.insert([b"far"], [bytes(SIZE)]).wait(PATIENCE_S).refused == {"NoMapping": 1}
        with daemon.connect(NAMESPACE) as near:
            put(near, b"near")
        assert client.lookup([b"near"]) == 1
        with pytest.raises(NoMapping, match=r"another host|network"), client.select([b"near"], timeout_s=0):
            pass
        tree = client.stats()
        assert not tree["pins"] and not tree["reserved_slots"]
    daemon.check_nothing_held()
