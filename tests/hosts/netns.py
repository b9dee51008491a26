"""Two hosts on one machine: network namespaces with a link between them that delays and loses packets.

The link is a veth pair with netem; where the kernel has no netem, two tun devices and a process that carries the
packets (see relay).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import PATIENCE_S

#: From the range for tests between networks (RFC 2544): nothing else routes there, and nothing leaves the namespaces.
_ADDRESSES = ("198.18.7.1", "198.18.7.2")


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """A network namespace.

    Attributes:
        address: Where the other host reaches it.
    """

    name: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """In front of a command that is to run there. Files and processes are those of this machine."""
        return ("ip", "netns", "exec", self.name)


@contextlib.contextmanager
def two_hosts(delay_s: float, loss: float) -> Iterator[tuple[Host, Host]]:
    """Two hosts, gone at the end. Skips the test where this machine does not permit them.

    Args:
        delay_s: Time that a packet takes from one to the other.
        loss: Share of packets that are lost on the way.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (apt-get install iproute2)")
    hosts = tuple(Host(f"kv{os.getpid()}{end}", address) for end, address in zip("ab", _ADDRESSES, strict=True))
    one, other = hosts
    with contextlib.ExitStack() as stack:
        for host in hosts:
            stack.callback(subprocess.run, ["ip", "netns", "delete", host.name], capture_output=True, check=False)
        try:
            for host in hosts:
                _run("ip", "netns", "add", host.name)
            if not _join_with_netem(one, other, delay_s, loss):
                stack.enter_context(_joined_by_relay(one, other, delay_s, loss))
            for host in hosts:
                _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "link0")
                for device in ("lo", "link0"):
                    _run("ip", "-n", host.name, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine permits no network namespaces: {error.stderr.strip()}")
        yield one, other


def _join_with_netem(one: Host, other: Host, delay_s: float, loss: float) -> bool:
    """A veth pair. False: this kernel has no netem, and nothing was left."""
    ends = ("netns", one.name, "type", "veth", "peer", "name", "link0", "netns", other.name)
    _run("ip", "link", "add", "link0", *ends)
    try:
        for host in (one, other):
            netem = ("netem", "delay", f"{delay_s * 1000:g}ms", "loss", f"{loss:%}")
            _run("tc", "-n", host.name, "qdisc", "add", "dev", "link0", "root", *netem)
    except subprocess.CalledProcessError:
        _run("ip", "-n", one.name, "link", "delete", "link0")
        return False
    return True


@contextlib.contextmanager
def _joined_by_relay(one: Host, other: Host, delay_s: float, loss: float) -> Iterator[None]:
    command = [sys.executable, str(Path(__file__).with_name("relay.py")), one.name, other.name, str(delay_s), str(loss)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            if process.stdout.readline() != "ready\n":
                pytest.skip(f"this machine has neither netem nor tun devices: {process.stderr.read().strip()}")
            yield
        finally:
            process.kill()
            process.wait(PATIENCE_S)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
