"""Copies between two places in host memory.

The kernel is compiled with numba, which vLLM itself requires, so that no compiler has to be present where the plugin
is installed. It is one loop of `memcpy` calls that runs without the interpreter lock.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine_plugin.copy.contract import CopyEngine, CopyStats, Fragments, Pool, Then
from kvstore.threads import started_pool

#: Below this many bytes a batch is not worth splitting over threads.
SPLIT_BYTES_MIN: Final = 8 << 20


@intrinsic  # type: ignore[untyped-decorator]
def _memcpy(_typing_context: Any, dst: Any, src: Any, size: Any) -> Any:
    """`memcpy(dst, src, size)` on addresses held as integers."""
    signature = types.void(types.uint64, types.uint64, types.uint64)

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        target, source = (builder.inttoptr(arg, pointer) for arg in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return None

    return signature, build


def _kernel(dst: Any, src: Any, size: Any) -> None:
    for i in range(dst.shape[0]):
        _memcpy(dst[i], src[i], size[i])


def _compile() -> Callable[[Any, Any, Any], None]:
    signature = "void(uint64[::1], uint64[::1], uint64[::1])"
    # The compiled kernel is kept beside this file or in the user's cache folder; where neither is writable it is
    # compiled again (about half a second) in each process.
    with contextlib.suppress(RuntimeError, OSError):
        return njit(signature, nogil=True, cache=True)(_kernel)  # type: ignore[no-any-return]
    return njit(signature, nogil=True)(_kernel)  # type: ignore[no-any-return]


copy_fragments = _compile()


class _Job:
    __slots__ = ("future", "over")

    def __init__(self) -> None:
        self.over = False
        self.future: concurrent.futures.Future[None] | None = None


class CpuCopyEngine(CopyEngine):
    """Runs jobs on threads of its own, without the interpreter lock: one order for loads, one for stores.

    `then` is called on those threads. A store begins at once: host memory has no stream, and vLLM's CPU build has
    written a block when it asks for its store.
    """

    def __init__(self, threads: int) -> None:
        self._threads = max(1, threads)
        # One thread orders the jobs of a direction; the helpers only take parts of the one it is working on.
        self._stores = started_pool(1, "kvstore-store")
        self._loads = started_pool(1, "kvstore-load")
        self._helpers = started_pool(self._threads - 1, "kvstore-copy-part") if self._threads > 1 else None
        self._lock = threading.Lock()  # guards the two below
        self._bytes = 0
        self._failed = 0
        self._pool: Pool | None = None

    def use_pool(self, pool: Pool | None) -> None:
        self._pool = pool

    def store(self, fragments: Fragments, then: Then, *, beside_compute: bool = False) -> _Job:
        return self._begin(self._stores, fragments.pool, fragments.kv, fragments, then)

    def load(self, fragments: Fragments, then: Then, *, beside_compute: bool = False) -> _Job:
        return self._begin(self._loads, fragments.kv, fragments.pool, fragments, then)

    def poll(self) -> None:
        """Nothing to do: jobs end by themselves."""

    def wait(self, copies: Collection[_Job]) -> None:
        concurrent.futures.wait([copy.future for copy in copies if copy.future is not None])

    def stats(self) -> CopyStats:
        pool = self._pool
        with self._lock:
            return CopyStats({"cpu": self._bytes}, self._failed, pool_bytes=pool.size_bytes if pool else 0)

    def close(self) -> None:
        for executor in (self._stores, self._loads, self._helpers):
            if executor is not None:
                executor.shutdown(wait=True)
        self._pool = None

    def _begin(
        self,
        executor: concurrent.futures.ThreadPoolExecutor,
        dst: np.ndarray,
        src: np.ndarray,
        fragments: Fragments,
        then: Then,
    ) -> _Job:
        job = _Job()

        def run() -> None:
            started, error = time.monotonic(), None
            try:
                self._copy(dst, src, fragments.size)
            except BaseException as problem:
                error = problem
            with self._lock:
                if error is None:
                    self._bytes += fragments.size_bytes
                else:
                    self._failed += 1
            job.over = True
            then(time.monotonic() - started, error)

        job.future = executor.submit(run)
        return job

    def _copy(self, dst: np.ndarray, src: np.ndarray, size: np.ndarray) -> None:
        total = int(size.sum())
        if self._helpers is None or total < SPLIT_BYTES_MIN or len(size) < self._threads:
            copy_fragments(dst, src, size)
            return
        ends = np.searchsorted(np.cumsum(size), np.linspace(0, total, self._threads + 1)[1:-1])
        bounds = [0, *ends.tolist(), len(size)]
        parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        others: list[concurrent.futures.Future[None]] = []
        try:
            for part in parts[1:]:
                others.append(self._helpers.submit(copy_fragments, dst[part], src[part], size[part]))
            copy_fragments(dst[parts[0]], src[parts[0]], size[parts[0]])
        finally:
            concurrent.futures.wait(others)  # whatever happens here, none of them writes when the job is over
        for other in others:
            other.result()
