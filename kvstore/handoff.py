"""Hands the pool's mapping to clients on this host, and learns from the same connection when they end.

gRPC cannot carry a file descriptor, so a second Unix socket stands beside each Unix listener: `SOCKET.map`. A client
connects, sends its session id, and gets one message with the size of the pool and two descriptors (pool, epochs). It
keeps the connection open as long as it may touch the mapping, and makes its calls on it (kvstore/wire/frames.py). The
kernel closes it when the process ends, however it ends, also in another pid namespace; a pidfd says the same where a
forked child still holds the connection open.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

from kvstore.errors import AccessDenied, DaemonUnavailable

SUFFIX: Final = ".map"
#: What comes with the descriptors: magic, version, size of the pool.
REPLY: Final = struct.Struct("<4sIQ")
MAGIC: Final = b"kvm1"
VERSION: Final = 2


class Handoff:
    """What a client gets. The descriptors are the caller's to close; so is the connection, which is the session's life.

    Attributes:
        connection: Close it when nothing touches the mapping any more.
    """

    __slots__ = ("connection", "epochs_fd", "pool_fd", "size_bytes")

    def __init__(self, connection: socket.socket, pool_fd: int, epochs_fd: int, size_bytes: int) -> None:
        self.connection = connection
        self.pool_fd = pool_fd
        self.epochs_fd = epochs_fd
        self.size_bytes = size_bytes


def receive(path: str, session: bytes, timeout_s: float) -> Handoff:
    """Asks for the mapping. Any thread.

    Raises:
        DaemonUnavailable: nobody listens there.
        AccessDenied: the daemon refuses: another user, or a session that it does not know.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
        connection.sendall(session)
        # CLOEXEC comes with the call: Python sets it on every descriptor that it receives.
        data, fds, _, _ = socket.recv_fds(connection, REPLY.size, 2)
    except OSError as error:
        connection.close()
        raise DaemonUnavailable(f"the pool's mapping cannot be had at {path}: {error}") from error
    for fd in fds:
        os.set_inheritable(fd, False)
    if len(data) != REPLY.size or len(fds) != 2:
        for fd in fds:
            os.close(fd)
        connection.close()
        raise AccessDenied(f"{path} refuses to hand out the pool: another user, or a session that has ended")
    magic, version, size_bytes = REPLY.unpack(data)
    if magic != MAGIC or version != VERSION:
        for fd in fds:
            os.close(fd)
        connection.close()
        raise AccessDenied(f"{path} is of another version of kvstore than this client: install the same on both sides")
    return Handoff(connection, fds[0], fds[1], size_bytes)
