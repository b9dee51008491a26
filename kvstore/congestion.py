"""Which congestion control a connection that carries blocks sends with.

A machine's default may be one that measures the path and paces what it sends (bbr). That is made for long paths;
between two processes of one host it halves the rate, since the path is the two processors and answers come in bursts.
So ends on one host use an algorithm that goes by loss, of which there is none, and all others the system's own.

What is set counts for what this end sends; the other end chooses for itself.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from pathlib import Path
from typing import Final

from kvstore.errors import ConfigError

#: By the path: LOSS_BASED on one host, else the system's.
AUTO: Final = "auto"
#: The system's in any case.
SYSTEM: Final = "system"
#: In the order in which they are preferred. The first one may need rights that an ordinary user does not have
#: (net.ipv4.tcp_allowed_congestion_control); the second one never does.
LOSS_BASED: Final = ("cubic", "reno")
_AVAILABLE: Final = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
#: TCP_CA_NAME_MAX of the kernel, with the zero at its end.
_NAME_BYTES: Final = 16
_NAME: Final = re.compile(rf"[a-z0-9_]{{1,{_NAME_BYTES - 1}}}")


def check_choice(choice: str) -> str:
    """A choice as somebody wrote it: "auto", "system", or the name of an algorithm that this machine may use.

    Raises:
        ConfigError: it may not; the message says which there are.
    """
    if choice in (AUTO, SYSTEM):
        return choice
    refused = ""
    if _NAME.fullmatch(choice):
        with socket.socket() as trial:
            try:
                trial.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, choice.encode())
                return choice
            except OSError as error:
                refused = f" ({error.strerror})"
    raise ConfigError(
        f"congestion control {choice!r} cannot be used here{refused}: write {AUTO}, {SYSTEM}, or one of "
        f"{', '.join(available())}"
    )


def available() -> list[str]:
    """What the kernel has loaded. Not all of it may be allowed to this process."""
    try:
        return sorted(_AVAILABLE.read_text().split())
    except OSError:
        return []


def choose(connected: socket.socket, choice: str = AUTO) -> str:
    """Sets what a connected TCP socket sends with.

    Args:
        choice: As check_choice() lets pass.

    Returns:
        What it sends with now. A connection that cannot be changed goes on with what it has.
    """
    wanted: tuple[str, ...] = ()
    if choice == AUTO:
        wanted = LOSS_BASED if is_local(connected) else ()
    elif choice != SYSTEM:
        wanted = (choice,)
    for name in wanted:
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            break
        except OSError:
            continue  # not loaded, or not allowed to this user
    return current(connected)


def current(connected: socket.socket) -> str:
    """What a TCP socket sends with; empty where the kernel does not say."""
    try:
        found = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    except OSError:
        return ""
    return found.split(b"\0", 1)[0].decode(errors="replace")


def is_local(connected: socket.socket) -> bool:
    """Whether both ends are on this host: the peer has a loopback address, or the very address of this end, which the
    kernel gives who calls an address of its own host.
    """
    try:
        mine, theirs = connected.getsockname()[0], connected.getpeername()[0]
        if mine == theirs:
            return True
        address = ipaddress.ip_address(theirs.split("%", 1)[0])
    except (OSError, IndexError, ValueError):
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback
