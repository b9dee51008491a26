"""One daemon for each Unix socket: a lock that the kernel gives back when the process ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvstore.errors import AlreadyRunning, ConfigError

SUFFIX: Final = ".lock"


class SocketLock:
    """Holds `SOCKET.lock` for as long as the process lives or until close(). Makes the folder where there is none
    (0700).

    Raises:
        AlreadyRunning: another process holds it; its pid is named.
        ConfigError: the folder or the file cannot be made.
    """

    def __init__(self, socket_path: str) -> None:
        self.path = Path(socket_path + SUFFIX)
        try:
            if not self.path.parent.exists():
                self.path.parent.mkdir(mode=0o700, parents=True)
            self._fd = self._locked()
        except BlockingIOError:
            raise self._taken(socket_path) from None
        except OSError as error:
            raise ConfigError(
                f"--listen unix:{socket_path}: {self.path}: {error.strerror}; choose a folder that this user can write"
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)

    def _locked(self) -> int:
        """The file, locked.

        Raises:
            BlockingIOError: another process holds it.
        """
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The holder may have removed the file after it was opened here: then others lock another one.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                        return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _taken(self, socket_path: str) -> AlreadyRunning:
        holder: int | None = None
        with contextlib.suppress(ValueError, OSError):
            holder = int(self.path.read_text("ascii"))
        return AlreadyRunning(
            f"another daemon (pid {holder if holder else 'unknown'}) holds unix:{socket_path}: use that one, "
            "stop it, or choose another --listen",
            holder,
        )

    def close(self) -> None:
        """Removes the file and lets go."""
        # While the lock is held, so that nobody who opens it now finds a file that is about to vanish unlocked.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
