"""Blocks on the daemon's disk, read past the daemon: for workers whose GPU can fetch them from a file by itself.

::

    with client.lease_extents(keys) as extents:
        for key, extent in extents.items():
            kvikio.CuFile(extent.path, "r").pread(gpu_buffer, extent.size_bytes, extent.offset)
            if not extent.matches(copy_of(gpu_buffer)): ...   # a miss

Only on the daemon's host, by the daemon's user, and where the client sees the directory by the same path. Places stay
as they are until the with-block ends, also when the blocks are deleted or evicted meanwhile; a session that ends gives
them up.
"""

from __future__ import annotations

import dataclasses
import os

import xxhash

from kvstore.errors import Damage


@dataclasses.dataclass(frozen=True, slots=True)
class DiskExtent:
    """Where one block lies.

    Attributes:
        path: The file. It is opened for reading only; O_DIRECT may be asked for.
        offset: Where the block starts; a multiple of 4096.
        size_bytes: Its length.
        check: xxh3_64 of its bytes.
    """

    path: str
    offset: int
    size_bytes: int
    check: int

    def matches(self, data: bytes | memoryview) -> bool:
        """Whether these are the bytes that were stored. What does not match is a miss."""
        return len(data) == self.size_bytes and xxhash.xxh3_64_intdigest(data) == self.check

    def read_into(self, buffer: memoryview) -> None:
        """Reads the block with the CPU, through the page cache, and checks it.

        Args:
            buffer: Writable bytes, of the block's size.

        Raises:
            Damage: it is not what was stored; the buffer holds anything.
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(buffer) and (read := os.preadv(fd, [buffer[done:]], self.offset + done)):
                done += read
        finally:
            os.close(fd)
        if done != len(buffer) or not self.matches(buffer):
            raise Damage(f"the block at {self.offset} in {self.path} is not what was stored")
