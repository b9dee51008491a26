"""LookupBuffer, Pipe and KVTransfer between two hosts: over TCP alone, and between two network namespaces."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.buffer import LookupBuffer, Pipe
from kvstore.engine import KVTensor, KVTransfer
from kvstore.errors import EndOfPipe, PipeBroken
from tests.buffer.samples import same, sample
from tests.remote.conftest import FarDaemon
from tests.support import PATIENCE_S, clean_environ, eventually

ROOT = Path(__file__).parents[2]

SEND = """
import sys
import numpy as np
from kvstore.buffer import LookupBuffer, Pipe
from tests.buffer.samples import sample
options = {"token": sys.argv[2]}
with Pipe("p", sys.argv[1], max_bytes=16 << 20, **options) as pipe:
    for number in range(int(sys.argv[3])):
        pipe.send_tensor(sample(number, bytes_max=70_000))
    pipe.close(60)
with LookupBuffer("b", sys.argv[1], max_bytes=8 << 20, **options) as buffer:
    for number in range(int(sys.argv[3])):
        entry = [np.array([number, 1, 2]), None, sample(number, bytes_max=70_000), None, None]
        while (result := buffer.insert(*entry).wait(60)).refused == {"queue_full": 1}:
            pass
        assert result.stored == 1, result
print("sent", flush=True)
"""

RECEIVE = """
import sys
import numpy as np
from kvstore.buffer import LookupBuffer, Pipe
from kvstore.errors import EndOfPipe
from tests.buffer.samples import same, sample
options = {"token": sys.argv[2]}
with Pipe("p", sys.argv[1], **options) as pipe:
    for number in range(int(sys.argv[3])):
        assert same(pipe.recv_tensor(60), sample(number, bytes_max=70_000)), number
    try:
        pipe.recv_tensor(60)
    except EndOfPipe:
        print("all", flush=True)
with LookupBuffer("b", sys.argv[1], **options) as buffer:
    for number in range(int(sys.argv[3])):
        entry = buffer.drop_select(np.array([number]), None, 60)
        assert same(entry[2], sample(number, bytes_max=70_000)) and entry[0].tolist() == [number, 1, 2], number
print("found", flush=True)
"""


def test_a_pipe_over_tcp_alone(far: FarDaemon) -> None:
    sender, receiver = Pipe("p", far.endpoint, max_bytes=8 << 20), Pipe("p", far.endpoint)
    done = threading.Thread(
        target=lambda: [sender.send_tensor(sample(each)) for each in range(60)] and sender.close(60)
    )
    done.start()
    for number in range(60):
        assert same(receiver.recv_tensor(PATIENCE_S), sample(number)), number
    with pytest.raises(EndOfPipe):
        receiver.recv_tensor(PATIENCE_S)
    done.join(PATIENCE_S)
    receiver.close()


def test_tensors_larger_than_the_memory_of_a_far_client(far: FarDaemon) -> None:
    """32 MiB at a time is what a reader asks for; the rest of a tensor follows."""
    tensor = np.random.default_rng(1).integers(0, 256, 40 << 20, dtype=np.uint8)
    with Pipe("p", far.endpoint) as sender, Pipe("p", far.endpoint, staging_bytes=36 << 20) as receiver:
        sender.send_tensor(tensor)
        assert same(receiver.recv_tensor(PATIENCE_S), tensor)
        closing = threading.Thread(target=sender.close, args=(PATIENCE_S,))
        closing.start()
        with pytest.raises(EndOfPipe):
            receiver.recv_tensor(PATIENCE_S)
        closing.join()


def test_a_far_sender_that_loses_its_session_is_an_error(far: FarDaemon) -> None:
    sender, receiver = Pipe("p", far.endpoint), Pipe("p", far.endpoint)
    sender.send_tensor(np.arange(3))
    assert receiver.recv_tensor(PATIENCE_S).tolist() == [0, 1, 2]
    sender._client._connection._stream.cancel()
    with pytest.raises(PipeBroken, match="without closing"):
        receiver.recv_tensor(PATIENCE_S)
    eventually(lambda: sender._client.attached and sender._client.generation != sender._sender._generation)  # type: ignore[union-attr]
    with pytest.raises(PipeBroken, match="session"):
        sender.send_tensor(None)
    for pipe in (sender, receiver):
        pipe.__exit__(KeyboardInterrupt, None, None)


def test_a_lookup_buffer_over_tcp_alone(far: FarDaemon) -> None:
    with LookupBuffer("b", far.endpoint) as one, LookupBuffer("b", far.endpoint) as other:
        for number in range(20):
            ticket = one.insert(np.array([number, 1]), None, sample(number), np.ones(3 << 20, np.uint8), None)
            assert ticket.wait(PATIENCE_S).stored == 1
            entry = other.drop_select(np.array([number]), None, PATIENCE_S)
            assert entry is not None and same(entry[2], sample(number)) and entry[3].all()
        assert one.drop_select(None, None, 0) is None


def test_a_far_buffer_reads_each_head_once(far: FarDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with LookupBuffer("b", far.endpoint) as one, LookupBuffer("b", far.endpoint) as other:
        for number in range(20):
            assert one.insert(np.array([number]), None, None, None, None).wait(PATIENCE_S).stored == 1
        heads, read = other._records.heads, list[bytes]()
        monkeypatch.setattr(other._records, "heads", lambda keys: read.extend(keys) or heads(keys))
        for number in range(20):
            assert other.drop_select(np.array([number]), None, PATIENCE_S) is not None
        assert len(read) == len(set(read)) == 20


def test_kv_transfer_over_tcp_alone(far: FarDaemon) -> None:
    layers = [[KVTensor("float32", (2, None, 8), 4)] for _ in range(4)]
    computed = [[np.random.default_rng(index).random((2, 100, 8), np.float32)] for index in range(4)]
    options: Any = {"model": "far", "block_tokens": 16, "endpoint": far.endpoint}
    with KVTransfer(layers, **options) as one, KVTransfer(layers, **options) as other:
        assert one.put(range(100), computed).wait(PATIENCE_S).stored == 6
        load = other.get(range(100))
        load.wait(PATIENCE_S)
        assert load.tokens == 96
        assert all(np.array_equal(a[0], b[0][:, :96]) for a, b in zip(load.layers, computed, strict=True))


# -- two hosts ---------------------------------------------------------------------------------------------------------


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces that see each other and nothing else; the first has 10.213.7.1."""
    one, other = f"kvbuf{os.getpid()}a", f"kvbuf{os.getpid()}b"
    with contextlib.ExitStack() as stack:
        try:
            for name in (one, other):
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ip("link", "add", "veth0", "netns", one, "type", "veth", "peer", "name", "veth0", "netns", other)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        for number, name in enumerate((one, other), 1):
            ip("-n", name, "addr", "add", f"10.213.7.{number}/24", "dev", "veth0")
            ip("-n", name, "link", "set", "veth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield one, other


def on(host: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python process on a host."""
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environ(PYTHONPATH=str(ROOT)),
    )


@pytest.mark.parametrize(("far_end", "count"), [("sender", 100), ("receiver", 1000)])
def test_random_tensors_between_two_hosts(hosts: tuple[str, str], tmp_path: Path, far_end: str, count: int) -> None:
    """The daemon's own host uses the mapping, the other one the network."""
    token = tmp_path / "token"
    token.write_text("a-token-of-some-length\n")
    token.chmod(0o600)
    near, far = f"unix:{tmp_path}/s", "10.213.7.1:7070"
    flags = ["--listen", near, "--listen", far, "--data-listen", "10.213.7.1:7071", "--token-file", str(token)]
    daemon = on(hosts[0], "-m", "kvstore", "serve", "--cpu-bytes", "64MiB", *flags)
    processes = [daemon]
    try:
        eventually((tmp_path / "s").exists)
        at = {"sender": near, "receiver": near, far_end: far}
        host = {"sender": hosts[0], "receiver": hosts[0], far_end: hosts[1]}
        sender = on(host["sender"], "-c", SEND, at["sender"], "a-token-of-some-length", str(count))
        receiver = on(host["receiver"], "-c", RECEIVE, at["receiver"], "a-token-of-some-length", str(count))
        processes += [sender, receiver]
        assert receiver.communicate(timeout=110)[0] == "all\nfound\n"
        assert sender.communicate(timeout=PATIENCE_S)[0] == "sent\n"
    finally:
        for process in processes:
            process.kill()
            process.communicate()
