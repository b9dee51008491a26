"""Copies that are queued in parts: what the runtime's calls need is looked up once, for all parts."""

from __future__ import annotations

from typing import Final, Protocol

from engine_plugin.copy.contract import Fragments

#: Up to so many are queued one by one; a batch costs the host as much as three copies, and the bus is busier between
#: its copies.
SINGLE_MAX: Final = 3


class Runtime(Protocol):
    """What is needed of the CUDA runtime."""

    def copy(self, dst: int, src: int, size_bytes: int, stream: int) -> None: ...

    def copy_batch(self, dst: int, src: int, size: int, count: int, stream: int, *, source_is_still: bool) -> None: ...


class Copies:
    """See the module. Keeps the arrays, which no one may change meanwhile.

    Attributes:
        size: Bytes of each copy.
    """

    __slots__ = ("_dst", "_dst_at", "_runtime", "_size_at", "_source_is_still", "_src", "_src_at", "size")

    def __init__(self, runtime: Runtime, fragments: Fragments, *, is_load: bool) -> None:
        """
        Args:
            fragments: From pool to kv, or from kv to pool; contiguous.
            is_load: Which of it. Nobody writes the pool while a load reads it, so that its order is free.
        """
        self._runtime = runtime
        self._dst, self._src = (fragments.kv, fragments.pool) if is_load else (fragments.pool, fragments.kv)
        self.size = fragments.size
        self._dst_at, self._src_at, self._size_at = (array.ctypes.data for array in (self._dst, self._src, self.size))
        self._source_is_still = is_load

    def __len__(self) -> int:
        return len(self.size)

    def queue(self, begin: int, end: int, stream: int) -> None:
        """Queues copies begin..end, in whatever way is the shortest.

        Args:
            stream: Handle of a CUDA stream.

        Raises:
            CudaError: an address is not what it should be.
        """
        if end - begin > SINGLE_MAX:
            self.queue_batch(begin, end, stream)
            return
        for index in range(begin, end):
            self._runtime.copy(self._dst.item(index), self._src.item(index), self.size.item(index), stream)

    def queue_batch(self, begin: int, end: int, stream: int) -> None:
        """The same in one call, for memory of any kind."""
        at = 8 * begin
        self._runtime.copy_batch(
            self._dst_at + at,
            self._src_at + at,
            self._size_at + at,
            end - begin,
            stream,
            source_is_still=self._source_is_still,
        )
