"""The CUDA runtime calls that torch does not offer, through ctypes, which releases the interpreter lock during a call.

The library is the one that torch has loaded already: another copy would have a state of its own.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any, Final

#: cudaMemcpyBatchAsync came with CUDA 12.8 and lost a parameter with 13.0.
_BATCH_SINCE: Final = 12080
_REGISTER_PORTABLE_MAPPED: Final = 1 | 2
#: cudaMemcpySrcAccessOrderStream: the source is read in stream order.
_ORDER_STREAM: Final = 1
#: cudaMemcpySrcAccessOrderAny: the source is not written while the copy is queued.
_ORDER_ANY: Final = 3
_PREFER_OVERLAP: Final = 1


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed; the message names it and says why."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class CudaRuntime:
    """See the module. Safe from any thread; each thread sets its device beforehand, as torch.cuda.set_device does."""

    def __init__(self) -> None:
        """Finds the library.

        Raises:
            CudaError: torch has none loaded, or it is too old.
        """
        maps = Path("/proc/self/maps").read_text()
        found = re.search(r"\s(/\S*libcudart[^/\s]*\.so[^/\s]*)$", maps, re.MULTILINE)
        try:
            library = ctypes.CDLL(found.group(1) if found else "libcudart.so")
        except OSError as error:
            raise CudaError(f"the CUDA runtime library is not there: {error}") from None
        version = ctypes.c_int()
        library.cudaRuntimeGetVersion(ctypes.byref(version))
        self.version = version.value
        if self.version < _BATCH_SINCE:
            raise CudaError(f"CUDA runtime {self.version} is too old: 12.8 or newer is needed")
        library.cudaGetErrorString.restype = ctypes.c_char_p
        library.cudaHostRegister.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        library.cudaHostUnregister.argtypes = [ctypes.c_void_p]
        library.cudaHostGetDevicePointer.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint]
        library.cudaStreamCreateWithPriority.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint, ctypes.c_int]
        library.cudaStreamDestroy.argtypes = [ctypes.c_void_p]
        library.cudaEventCreateWithFlags.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint]
        library.cudaEventDestroy.argtypes = [ctypes.c_void_p]
        library.cudaEventRecord.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        library.cudaStreamWaitEvent.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
        library.cudaMemcpyAsync.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_void_p,
        ]
        tail: list[Any] = [ctypes.c_void_p] if self.version >= 13000 else [ctypes.c_void_p, ctypes.c_void_p]
        library.cudaMemcpyBatchAsync.argtypes = [
            *[ctypes.c_void_p] * 3,
            ctypes.c_size_t,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            *tail,
        ]
        self._library = library
        # What is called for every window of a job.
        self._record, self._wait = library.cudaEventRecord, library.cudaStreamWaitEvent
        self._copy, self._copy_batch = library.cudaMemcpyAsync, library.cudaMemcpyBatchAsync
        self._attributes = {
            still: _Attributes(order=_ORDER_ANY if still else _ORDER_STREAM, flags=_PREFER_OVERLAP)
            for still in (False, True)
        }
        self._first = (ctypes.c_size_t * 1)(0)

    def register(self, address: int, size_bytes: int) -> None:
        """Pins host memory and makes it known to every GPU of this process.

        Raises:
            CudaError: it cannot be pinned; nothing of it is.
        """
        self._check("cudaHostRegister", self._library.cudaHostRegister(address, size_bytes, _REGISTER_PORTABLE_MAPPED))

    def unregister(self, address: int) -> None:
        """Takes a registration back.

        Raises:
            CudaError: it is none.
        """
        self._check("cudaHostUnregister", self._library.cudaHostUnregister(address))

    def device_pointer(self, address: int) -> int:
        """Where the GPU sees registered memory. The same address on every machine with unified addressing.

        Raises:
            CudaError: it is not registered, or the GPU cannot address it.
        """
        pointer = ctypes.c_void_p()
        self._check("cudaHostGetDevicePointer", self._library.cudaHostGetDevicePointer(pointer, address, 0))
        return pointer.value or 0

    def new_stream(self, priority: int) -> int:
        """A stream of our own on the current device. Those that torch hands out come from pools of a few, and two of
        them may share a hardware queue and wait for each other: load and store did, at half the rate.

        Args:
            priority: 0, or less for more.

        Raises:
            CudaError: there is no room for one.
        """
        handle = ctypes.c_void_p()
        non_blocking = 1  # does not wait for the default stream
        code = self._library.cudaStreamCreateWithPriority(ctypes.byref(handle), non_blocking, priority)
        self._check("cudaStreamCreateWithPriority", code)
        return handle.value or 0

    def end_stream(self, handle: int) -> None:
        """Destroys a stream once its work is done.

        Raises:
            CudaError: it is none.
        """
        self._check("cudaStreamDestroy", self._library.cudaStreamDestroy(handle))

    def new_event(self) -> int:
        """An event of our own, for order only: it takes no time down.

        Raises:
            CudaError: there is no room for one.
        """
        handle = ctypes.c_void_p()
        without_timing = 2
        code = self._library.cudaEventCreateWithFlags(ctypes.byref(handle), without_timing)
        self._check("cudaEventCreateWithFlags", code)
        return handle.value or 0

    def end_event(self, handle: int) -> None:
        """Destroys an event.

        Raises:
            CudaError: it is none.
        """
        self._check("cudaEventDestroy", self._library.cudaEventDestroy(handle))

    def record(self, event: int, stream: int) -> None:
        """Has an event say when the stream has come so far.

        Raises:
            CudaError: one of them is none.
        """
        code = self._record(event, stream)
        if code:
            self._check("cudaEventRecord", code)

    def wait(self, stream: int, event: int) -> None:
        """Has a stream wait for an event as it was recorded last, if it was.

        Raises:
            CudaError: one of them is none.
        """
        code = self._wait(stream, event, 0)
        if code:
            self._check("cudaStreamWaitEvent", code)

    def copy(self, dst: int, src: int, size_bytes: int, stream: int) -> None:
        """Queues one copy; the runtime finds the direction.

        Raises:
            CudaError: an address is not what it should be.
        """
        code = self._copy(dst, src, size_bytes, 4, stream)
        if code:
            self._check("cudaMemcpyAsync", code)

    def copy_batch(self, dst: int, src: int, size: int, count: int, stream: int, *, source_is_still: bool) -> None:
        """Queues many copies in one call; they may run in any order.

        Args:
            dst, src, size: Addresses of arrays of `count` uint64; read before the call returns.
            stream: Not the default stream, which the call does not take.
            source_is_still: Nothing writes the source from the call on until the copies are over, so that it need not
                be read in stream order.

        Raises:
            CudaError: an address is not what it should be.
        """
        if not count:
            return
        attributes, first = self._attributes[source_is_still], self._first
        failed = ctypes.c_size_t()
        tail = (stream,) if self.version >= 13000 else (ctypes.addressof(failed), stream)
        code = self._copy_batch(dst, src, size, count, ctypes.addressof(attributes), ctypes.addressof(first), 1, *tail)
        if code:
            self._check("cudaMemcpyBatchAsync", code)

    def _check(self, name: str, code: int) -> None:
        if code:
            self._library.cudaGetLastError()  # or the next call of somebody else would report it
            raise CudaError(f"{name}: {self._library.cudaGetErrorString(code).decode()} ({code})")
