"""Copies between two places in host memory.

The kernel is compiled with numba, which vLLM itself requires, so that no compiler has to be present where the plugin
is installed. It is one loop of `memcpy` calls that runs without the interpreter lock.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

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


class CpuCopier:
    """Runs batches in the background, in the order they were given.

    Threads: `submit` from one thread; the copies run on threads of their own, without the interpreter lock.
    Ownership: the caller keeps the memory behind the addresses alive until the future is done.
    """

    def __init__(self, threads: int) -> None:
        self._threads = max(1, threads)
        # One thread orders the batches; the helpers only take parts of the one it is working on.
        self._order = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="kvstore-copy")
        self._helpers = (
            concurrent.futures.ThreadPoolExecutor(self._threads - 1, thread_name_prefix="kvstore-copy-part")
            if self._threads > 1
            else None
        )

    def submit(
        self, dst: np.ndarray, src: np.ndarray, size: np.ndarray, then: Callable[[], Any]
    ) -> concurrent.futures.Future[Any]:
        """Copies `size[i]` bytes from `src[i]` to `dst[i]` for every i, then calls `then` on the copying thread."""
        return self._order.submit(self._run, dst, src, size, then)

    def close(self) -> None:
        """Waits for what was submitted."""
        self._order.shutdown(wait=True)
        if self._helpers is not None:
            self._helpers.shutdown(wait=True)

    def _run(self, dst: np.ndarray, src: np.ndarray, size: np.ndarray, then: Callable[[], Any]) -> Any:
        if self._helpers is None or int(size.sum()) < SPLIT_BYTES_MIN or len(size) < self._threads:
            copy_fragments(dst, src, size)
            return then()
        ends = np.searchsorted(np.cumsum(size), np.linspace(0, int(size.sum()), self._threads + 1)[1:-1])
        bounds = [0, *ends.tolist(), len(size)]
        parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        others = [self._helpers.submit(copy_fragments, dst[p], src[p], size[p]) for p in parts[1:]]
        copy_fragments(dst[parts[0]], src[parts[0]], size[parts[0]])
        for other in others:
            other.result()
        return then()
