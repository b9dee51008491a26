"""`kvstore` as usual, on a disk of which so many bytes a second can be read: slow_disk.py BYTES_PER_S serve ..."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

from kvstore.cli import main
from kvstore.tiers.files import Buffer, FileIO

rate = float(sys.argv.pop(1))
one_at_a_time = threading.Lock()
read = FileIO.preadv


def slowly(self: FileIO, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    with one_at_a_time:
        time.sleep(sum(map(len, buffers)) / rate)
    return read(self, fd, buffers, offset)


FileIO.preadv = slowly  # type: ignore[method-assign]
main()
