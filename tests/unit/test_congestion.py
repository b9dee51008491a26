"""What a connection sends with, by where its other end is."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore import congestion
from kvstore.errors import ConfigError


@contextlib.contextmanager
def pair(host: str = "127.0.0.1", family: socket.AddressFamily = socket.AF_INET) -> Iterator[list[socket.socket]]:
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"{host} cannot be had here")
    with listener, socket.create_connection(listener.getsockname()[:2]) as one, listener.accept()[0] as other:
        yield [one, other]


class Far:
    """A socket whose ends have these addresses; the rest is a real one's."""

    def __init__(self, real: socket.socket, mine: str, theirs: str) -> None:
        self._real = real
        self._mine, self._theirs = mine, theirs

    def getsockname(self) -> tuple[str, int]:
        return self._mine, 1

    def getpeername(self) -> tuple[str, int]:
        return self._theirs, 2

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_both_ends_on_one_host_go_by_loss(host: str, family: socket.AddressFamily) -> None:
    with pair(host, family) as ends:
        for end in ends:
            assert congestion.choose(end) in congestion.LOSS_BASED
            assert congestion.current(end) in congestion.LOSS_BASED


@pytest.mark.parametrize(
    ("mine", "theirs", "local"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.3.2.1", True),
        ("::ffff:10.0.0.5", "::ffff:127.0.0.1", True),
        ("10.0.0.5", "10.0.0.5", True),  # what calls an address of its own host gets that address
        ("fe80::1%eth0", "fe80::1%eth0", True),
        ("10.0.0.5", "10.0.0.6", False),
        ("fe80::1%eth0", "fe80::2%eth0", False),
        ("::ffff:10.0.0.5", "::ffff:10.0.0.6", False),
    ],
)
def test_what_is_on_one_host(mine: str, theirs: str, local: bool) -> None:
    with pair() as (end, _):
        default = congestion.current(end)
        far: Any = Far(end, mine, theirs)
        assert congestion.is_local(far) is local
        chosen = congestion.choose(far)
        assert chosen in congestion.LOSS_BASED if local else chosen == default


def test_the_systems_own_and_a_name() -> None:
    with pair() as (end, other):
        default = congestion.current(end)
        assert congestion.choose(end, congestion.SYSTEM) == default
        # Reno is in every kernel, and everybody may use it.
        assert congestion.choose(other, congestion.check_choice("reno")) == "reno"


@pytest.mark.parametrize("choice", ["", "cubic reno", "no_such_thing", "x" * 40, "Ünicode"])
def test_what_cannot_be_had_is_refused_with_what_can(choice: str) -> None:
    with pytest.raises(ConfigError, match=r"write auto, system, or one of .*reno"):
        congestion.check_choice(choice)


def test_a_socket_that_is_gone_is_let_be() -> None:
    with pair() as (end, _):
        end.close()
        assert congestion.choose(end) == ""
