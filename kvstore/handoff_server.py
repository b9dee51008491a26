"""The daemon's side of the handoff: Unix sockets that give out the pool's mapping, one connection for each client."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final

from kvstore.blocks import SESSION_ID_BYTES
from kvstore.framed import FramedConnection
from kvstore.handoff import MAGIC, REPLY, VERSION

_PEER: Final = struct.Struct("3i")
#: How long a client that connected may take to say who it is.
_HELLO_S: Final = 5.0
_BACKLOG: Final = 128
#: Of a process's flags, as the kernel counts them: it is ending.
_PF_EXITING: Final = 4


class HandoffServer:
    """Listens beside the Unix listeners. Runs on the daemon's event loop.

    Args:
        pool_fd: Descriptor of the pool.
        epochs_fd: Read-only descriptor of the epoch table.
        opened: Called with the session id of a client before it gets the mapping; False refuses it.
        ended: Called once when that client has ended or closed the connection.
        calls: Makes what answers the calls of one connection.
    """

    def __init__(
        self,
        pool_fd: int,
        epochs_fd: int,
        size_bytes: int,
        opened: Callable[[bytes], bool],
        ended: Callable[[bytes], None],
        calls: Callable[[], FramedConnection],
    ) -> None:
        self._fds = array.array("i", [pool_fd, epochs_fd])
        self._size_bytes = size_bytes
        self._opened = opened
        self._ended = ended
        self._calls = calls
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
        hello: tuple[bytes, int] | None = None
        try:
            hello = await self._greet(connection)
        finally:
            if hello is None:
                connection.close()
        if hello is None:
            return
        session, pid = hello
        calls = self._calls()
        try:
            # The connection is the transport's to close from here on.
            await asyncio.get_running_loop().connect_accepted_socket(lambda: calls, connection)
            await self._until_gone(calls.lost, pid)
        finally:
            calls.close()
            self._ended(session)

    async def _greet(self, connection: socket.socket) -> tuple[bytes, int] | None:
        """Hands out the mapping. Returns the session and the pid behind it (0: not visible); None: refused."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_HELLO_S):
                hello = b""
                while len(hello) < SESSION_ID_BYTES:
                    piece = await loop.sock_recv(connection, SESSION_ID_BYTES - len(hello))
                    if not piece:
                        return None
                    hello += piece
        except (OSError, TimeoutError):
            return None
        pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        # The socket's mode says the same; this holds where a folder was opened up by hand.
        if uid not in (0, os.geteuid()) or not self._opened(hello):
            return None
        try:
            # A fresh connection has room for these few bytes, so this does not block.
            connection.sendmsg(
                [REPLY.pack(MAGIC, VERSION, self._size_bytes)],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, self._fds.tobytes())],
            )
        except OSError:
            self._ended(hello)
            return None
        return hello, pid

    async def _until_gone(self, lost: asyncio.Future[None], pid: int) -> None:
        """Until the connection has ended or the process behind it has. A process that is ending is waited for: its
        descriptors are closed one after the other, and while its GPU's are not, that may still write into the pool.
        """
        loop = asyncio.get_running_loop()
        dead = asyncio.Event()

        def settle() -> None:
            dead.set()
            loop.remove_reader(pidfd)
            if not lost.done():
                lost.set_result(None)

        pidfd = -1
        # 0: a process in a pid namespace that this one cannot see.
        if pid > 0:
            with contextlib.suppress(OSError, AttributeError):
                pidfd = os.pidfd_open(pid)
        try:
            if pidfd >= 0:
                loop.add_reader(pidfd, settle)
            await lost
            if pidfd >= 0 and _is_ending(pid):
                await dead.wait()
        finally:
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


def _is_ending(pid: int) -> bool:
    """Whether a process is on its way out. Not where it is out already, or cannot be seen (hidepid)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    flags = int(stat.rpartition(b")")[2].split()[6])  # the ninth field; the second, a name, may hold anything
    return bool(flags & _PF_EXITING)
