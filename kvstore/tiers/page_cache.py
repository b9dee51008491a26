"""Has pages of a file in memory before they are read through a map.

What the device cannot read is an error of pread() and, through a map, the end of the process (SIGBUS). So whoever
leaves a file to code that maps it reads with pread() first what the kernel has dropped from its cache.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import Final

import numpy as np

#: Bytes of one read.
_READ_BYTES: Final = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.mincore.restype = ctypes.c_int


def bring_in(path: Path, size_bytes: int) -> int:
    """Reads those of the first `size_bytes` bytes that are not in memory; how many. Any thread.

    The kernel may drop them again. It drops last what was read last, so that takes a machine without any memory left.

    Raises:
        OSError: some of it cannot be read; the file may also end before.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size < size_bytes:
            raise OSError(errno.EIO, f"{path}: it ends before {size_bytes}")
        with mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapping:
            pages = np.zeros(-(-size_bytes // mmap.PAGESIZE), dtype=np.uint8)
            view = np.frombuffer(mapping, dtype=np.uint8)
            code = _libc.mincore(view.__array_interface__["data"][0], size_bytes, pages.ctypes.data)
            del view  # or the map cannot be closed
            if code:
                raise OSError(ctypes.get_errno(), "mincore")
        missing = np.flatnonzero(pages & 1 == 0)
        for row in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1) if missing.size else ():
            start = int(row[0]) * mmap.PAGESIZE
            end = min((int(row[-1]) + 1) * mmap.PAGESIZE, size_bytes)
            for at in range(start, end, _READ_BYTES):
                wanted = min(_READ_BYTES, end - at)
                if len(os.pread(fd, wanted, at)) != wanted:
                    raise OSError(errno.EIO, f"{path}: it ends before {at + wanted}")
        return int(missing.size) * mmap.PAGESIZE
    finally:
        os.close(fd)
