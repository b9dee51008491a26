"""Media on their bad days: system calls that fail, hang, tear and kill, and helpers around a DiskTier."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.clock import Clock, SystemClock
from kvstore.testing import FakeClock
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.files import Buffer, FileIO

CAPACITY_BYTES = 24 << 20


class PlainIO(FileIO):
    """A file system without O_DIRECT (taken at open, refused at the first transfer) and without fallocate."""

    def __init__(self, *, refuse_at_open: bool = False) -> None:
        self._refuse_at_open = refuse_at_open
        self._direct: set[int] = set()

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_DIRECT and self._refuse_at_open:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        fd = super().open(path, flags)
        self._direct.discard(fd)
        if flags & os.O_DIRECT:
            self._direct.add(fd)
        return fd

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if fd in self._direct:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if fd in self._direct:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return super().pwritev(fd, buffers, offset)

    def allocate(self, fd: int, length: int, *, keep_size: bool = False) -> None:
        raise OSError(errno.EOPNOTSUPP, "no fallocate here")


class StrictIO(FileIO):
    """A device that takes nothing that is not a multiple of 4096: addresses, lengths, offsets."""

    def __init__(self) -> None:
        self.refused = 0
        self._direct: set[int] = set()

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        self._direct.discard(fd)
        if flags & os.O_DIRECT:
            self._direct.add(fd)
        return fd

    def _check(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        import numpy as np

        for buffer in buffers:
            address = np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]
            if fd in self._direct and (address % 4096 or len(buffer) % 4096 or offset % 4096):
                self.refused += 1
                raise OSError(errno.EINVAL, "not aligned")

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._check(fd, buffers, offset)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._check(fd, buffers, offset)
        return super().pwritev(fd, buffers, offset)


class SickIO(FileIO):
    """Fails or hangs as told, from any thread.

    Attributes:
        errors: By call, the errno that it gives, or a function of the calls so far (0: none).
        calls: How often each call was made.
        held: Calls by these names wait for `released`, and set `reached` first.
    """

    def __init__(self) -> None:
        self.errors: dict[str, int | Callable[[], int]] = {}
        self.calls: dict[str, int] = {}
        self.held: set[str] = set()
        self.reached = threading.Event()
        self.released = threading.Event()

    def _enter(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        error = self.errors.get(name, 0)
        code = error() if callable(error) else error
        if code:
            raise OSError(code, os.strerror(code))
        if name in self.held:
            self.reached.set()
            assert self.released.wait(60)

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._enter("preadv")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._enter("pwritev")
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._enter("fdatasync")
        super().fdatasync(fd)

    def allocate(self, fd: int, length: int, *, keep_size: bool = False) -> None:
        self._enter("allocate")
        super().allocate(fd, length, keep_size=keep_size)

    def unlink(self, path: Path) -> None:
        self._enter("unlink")
        super().unlink(path)

    def recover(self) -> None:
        """Everything works again, and what hung goes on."""
        self.errors.clear()
        self.held.clear()
        self.released.set()


@contextlib.asynccontextmanager
async def opened(
    folder: Path, capacity_bytes: int = CAPACITY_BYTES, clock: Clock | None = None, **options: Any
) -> AsyncIterator[DiskTier]:
    """A DiskTier from open() to close(), with its index read."""
    tier = DiskTier(folder, capacity_bytes, clock or SystemClock(), **options)
    await tier.open()
    try:
        if tier.health.fault is None:
            await tier.wait_loaded()
        yield tier
    finally:
        await tier.close()


def _holds(tier: DiskTier) -> bool:
    return isinstance(tier.folder.io, SickIO) and bool(tier.folder.io.held)


async def heal(tier: DiskTier, clock: FakeClock) -> None:
    """Lets the time of the next probe come. A commit that is under way must not look as if it took all that time."""
    while tier.committer is not None and tier.committer.running_since is not None and not _holds(tier):
        await asyncio.sleep(0.001)
    clock.advance(60)
    await tier.tend()


def slab_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("slab-*.kv"))


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
