"""Pools whose threads are all there from the beginning.

concurrent.futures starts a thread when there is work for it, after it has queued that work. Where no more threads can
be had (a container's pids limit), submit raises, and the caller takes the work for not begun; it stays queued, and runs
when a later call has got its thread. By then the memory that it reads and writes is somebody else's.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def started_pool(count: int, name: str) -> ThreadPoolExecutor:
    """A pool of so many threads, whose submit fails only after its shutdown, and then queues nothing.

    Raises:
        RuntimeError: there are not as many threads to be had; none is left behind.
    """
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    together = threading.Barrier(count + 1)
    try:
        for _ in range(count):  # each waits for the others, so that none of them does two
            pool.submit(together.wait)
    except BaseException:
        together.abort()
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    together.wait()
    return pool
