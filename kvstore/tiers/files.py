"""System calls on the files of a disk tier, behind one seam, and what the file system under them can do.

The seam is where tests inject what a medium does on its bad days; everything that reaches the medium's data goes
through it. What can be done is found out by doing it, since O_DIRECT is taken at open and refused at the first write by
some file systems.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvstore.tiers.extent import ALIGN_BYTES

Buffer = bytes | bytearray | memoryview | mmap.mmap

#: Buffers in one preadv or pwritev (the kernel's IOV_MAX).
IOV_MAX: Final = 1024
_FALLOC_FL_KEEP_SIZE: Final = 1
#: fallocate says one of these where the file system has none of it.
_NO_ALLOCATE: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
#: The first write with O_DIRECT says one of these where it is taken at open only.
_NO_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int


class FileIO:
    """The calls themselves. Any thread; each raises OSError as the kernel does."""

    def open(self, path: Path, flags: int) -> int:
        """Opens a file, 0600 where it is made."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def allocate(self, fd: int, length: int, *, keep_size: bool = False) -> None:
        """Reserves the first `length` bytes of a file. Not os.posix_fallocate: that one fills the file byte by byte
        where the file system cannot.
        """
        while _libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE if keep_size else 0, 0, length) != 0:
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def unlink(self, path: Path) -> None:
        os.unlink(path)


@dataclasses.dataclass(frozen=True, slots=True)
class Medium:
    """What the file system under a directory can do.

    Attributes:
        direct: O_DIRECT works.
        direct_note: Why not; empty where it does.
        memory_align: What O_DIRECT asks of the addresses of buffers, in bytes.
        allocate: fallocate works.
        allocate_note: Why not.
    """

    direct: bool
    direct_note: str
    memory_align: int
    allocate: bool
    allocate_note: str


def aligned_memory(size_bytes: int) -> memoryview:
    """Zeros that start on a page."""
    return memoryview(mmap.mmap(-1, max(size_bytes, ALIGN_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def probe_medium(io: FileIO, probe_file: Path) -> Medium:
    """Finds out by real calls on a file of two pages, which is made where there is none. Any thread.

    Raises:
        OSError: not even ordinary calls work here.
    """
    pages = aligned_memory(4 * ALIGN_BYTES)
    fd = io.open(probe_file, os.O_RDWR | os.O_CREAT)
    try:
        if os.fstat(fd).st_size < 2 * ALIGN_BYTES:
            io.pwritev(fd, [pages[: 2 * ALIGN_BYTES]], 0)
        allocate, allocate_note = True, ""
        try:
            io.allocate(fd, 2 * ALIGN_BYTES)
        except OSError as error:
            if error.errno not in _NO_ALLOCATE:
                raise
            allocate, allocate_note = False, f"fallocate: {error.strerror}"
        io.fdatasync(fd)
    finally:
        os.close(fd)
    try:
        fd = io.open(probe_file, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        return Medium(False, f"open with O_DIRECT: {error.strerror}", 1, allocate, allocate_note)
    try:
        note = ""
        for align in (512, ALIGN_BYTES):
            try:
                for start in (align, ALIGN_BYTES):
                    page = [pages[start : start + ALIGN_BYTES]]
                    io.pwritev(fd, page, ALIGN_BYTES)
                    io.preadv(fd, page, ALIGN_BYTES)
                return Medium(True, "", align, allocate, allocate_note)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
                note = f"O_DIRECT is taken at open and refused at the first transfer: {error.strerror}"
        return Medium(False, note, 1, allocate, allocate_note)
    finally:
        os.close(fd)


def probe_again(io: FileIO, probe_file: Path, direct: bool) -> None:
    """A cheap look whether the medium takes and gives bytes. Any thread.

    Raises:
        OSError: it does not.
    """
    page = aligned_memory(ALIGN_BYTES)
    fd = io.open(probe_file, os.O_RDWR | (os.O_DIRECT if direct else 0))
    try:
        io.pwritev(fd, [page], 0)
        io.fdatasync(fd)
        io.preadv(fd, [page], 0)
    finally:
        os.close(fd)
