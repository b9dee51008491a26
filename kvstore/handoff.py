"""Hands the pool's mapping to clients on this host, and learns from the same connection when they end.

gRPC cannot carry a file descriptor, so a second Unix socket stands beside each Unix listener: `SOCKET.map`. A client
connects, sends its session id, and gets one message with the size of the pool and two descriptors (pool, epochs). It
keeps the connection open as long as it may touch the mapping. The kernel closes it when the process ends, however it
ends, also in another pid namespace; a pidfd says the same where a forked child still holds the connection open.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Final

from kvstore.blocks import SESSION_ID_BYTES
from kvstore.errors import AccessDenied, DaemonUnavailable

SUFFIX: Final = ".map"
#: Magic, version, size of the pool.
_REPLY: Final = struct.Struct("<4sIQ")
_MAGIC: Final = b"kvm1"
_PEER: Final = struct.Struct("3i")
#: How long a client that connected may take to say who it is.
_HELLO_S: Final = 5.0
_BACKLOG: Final = 128


class HandoffServer:
    """Listens beside the Unix listeners. Runs on the daemon's event loop.

    Args:
        pool_fd: Descriptor of the pool.
        epochs_fd: Read-only descriptor of the epoch table.
        opened: Called with the session id of a client before it gets the mapping; False refuses it.
        ended: Called once when that client has ended or closed the connection.
    """

    def __init__(
        self,
        pool_fd: int,
        epochs_fd: int,
        size_bytes: int,
        opened: Callable[[bytes], bool],
        ended: Callable[[bytes], None],
    ) -> None:
        self._fds = array.array("i", [pool_fd, epochs_fd])
        self._size_bytes = size_bytes
        self._opened = opened
        self._ended = ended
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, path: str) -> None:
        """Listens at a path; what is there is replaced (the caller holds the lock on the endpoint)."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(_BACKLOG)
        self._listeners.append(listener)
        self._spawn(self._accept(listener))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:
                # Out of descriptors, most likely: the client tries again, and so does this loop, once others have
                # ended.
                await asyncio.sleep(0.1)
                continue
            connection.setblocking(False)
            self._spawn(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.closing(connection):
            try:
                async with asyncio.timeout(_HELLO_S):
                    hello = b""
                    while len(hello) < SESSION_ID_BYTES:
                        piece = await loop.sock_recv(connection, SESSION_ID_BYTES - len(hello))
                        if not piece:
                            return
                        hello += piece
            except (OSError, TimeoutError):
                return
            pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            # The socket's mode says the same; this holds where a folder was opened up by hand.
            if uid not in (0, os.geteuid()) or not self._opened(hello):
                return
            try:
                reply = _REPLY.pack(_MAGIC, 1, self._size_bytes)
                # A fresh connection has room for these few bytes, so this does not block.
                connection.sendmsg([reply], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, self._fds.tobytes())])
                await self._until_gone(connection, pid)
            except OSError:
                pass
            finally:
                self._ended(hello)

    async def _until_gone(self, connection: socket.socket, pid: int) -> None:
        """Until the connection closes or the process behind it has ended."""
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not gone.done():
                gone.set_result(None)

        pidfd = -1
        # 0: a process in a pid namespace that this one cannot see.
        if pid > 0:
            with contextlib.suppress(OSError, AttributeError):
                pidfd = os.pidfd_open(pid)
        try:
            if pidfd >= 0:
                loop.add_reader(pidfd, settle)
            loop.add_reader(connection.fileno(), settle)  # nothing is ever sent here, so readable means closed
            await gone
        finally:
            loop.remove_reader(connection.fileno())
            if pidfd >= 0:
                loop.remove_reader(pidfd)
                os.close(pidfd)

    async def close(self) -> None:
        """Stops listening and closes every connection."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            path = listener.getsockname()
            listener.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


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
        data, fds, _, _ = socket.recv_fds(connection, _REPLY.size, 2)
    except OSError as error:
        connection.close()
        raise DaemonUnavailable(f"the pool's mapping cannot be had at {path}: {error}") from error
    for fd in fds:
        os.set_inheritable(fd, False)
    if len(data) != _REPLY.size or len(fds) != 2:
        for fd in fds:
            os.close(fd)
        connection.close()
        raise AccessDenied(f"{path} refuses to hand out the pool: another user, or a session that has ended")
    magic, version, size_bytes = _REPLY.unpack(data)
    if magic != _MAGIC or version != 1:
        for fd in fds:
            os.close(fd)
        connection.close()
        raise AccessDenied(f"{path} speaks another version of the handoff: client and daemon do not match")
    return Handoff(connection, fds[0], fds[1], size_bytes)
