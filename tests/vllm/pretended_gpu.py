"""A GPU made of host memory, for the CUDA engine's own order of things: streams do what was queued on them when a test
lets them, one step of any of them at a time, as their events allow. What a real one does at once in the same order by
luck happens here in every order.

Stands in for torch.cuda, the runtime's calls and the Triton kernel; everything else is the engine's own code.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine_plugin.copy import cuda, kernels, lanes
from engine_plugin.copy.cudart import CudaError


class _Mark:
    def __init__(self) -> None:
        self.reached = False


class Stream:
    """What is queued: whether it may run, and what it does."""

    def __init__(self, gpu: PretendedGpu) -> None:
        self.gpu = gpu
        self.queued: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        self.cuda_stream = len(gpu.streams)
        gpu.streams.append(self)

    def put(self, act: Callable[[], None], may: Callable[[], bool] = lambda: True) -> None:
        with self.gpu.lock:
            if self.gpu.at_once:
                act()
            else:
                self.queued.append((may, act))

    def wait_event(self, event: Event) -> None:
        mark = event.mark
        if mark is not None:
            self.put(lambda: None, lambda: mark.reached)

    def query(self) -> bool:
        self.gpu.check()
        return not self.queued


class Event:
    def __init__(self, gpu: PretendedGpu) -> None:
        self.gpu = gpu
        self.mark: _Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.gpu.check()
        mark = self.mark = _Mark()
        (stream or self.gpu.current).put(lambda: setattr(mark, "reached", True))

    def wait(self) -> None:
        self.gpu.current.wait_event(self)

    def query(self) -> bool:
        self.gpu.check()
        return self.mark is None or self.mark.reached

    def synchronize(self) -> None:
        while not self.query():
            assert self.gpu.step(), "this event will never be over"

    def elapsed_time(self, _other: Event) -> float:
        self.gpu.lost |= self.gpu.lost_when_timed
        self.gpu.check()
        return 1.0


class PretendedGpu:
    """Attributes:
    lost: Every call fails from now on.
    lost_when_timed: It is lost right after it has said that all of a job is over.
    calls_left: So many copies may be queued; those after fail. None: all may.
    registered: Host memory that kernels reach, by address.
    """

    def __init__(self, seed: int = 0) -> None:
        self.lock = threading.RLock()
        self.rng = random.Random(seed)
        self.streams: list[Stream] = []
        self.at_once = True
        self.lost = self.lost_when_timed = False
        self.calls_left: int | None = None
        self.registered: dict[int, int] = {}
        self.own: list[tuple[int, int]] = []
        self._by_thread = threading.local()
        self._main = Stream(self)

    @property
    def current(self) -> Stream:
        return getattr(self._by_thread, "stream", self._main)

    def check(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: the GPU is lost")

    def step(self) -> bool:
        """One thing of any stream that may go on; False: none has any."""
        with self.lock:
            ready = [stream for stream in self.streams if stream.queued and stream.queued[0][0]()]
            if ready:
                self.rng.choice(ready).queued.popleft()[1]()
        return bool(ready)

    def run(self) -> None:
        """Everything that is queued."""
        while self.step():
            pass
        assert not any(stream.queued for stream in self.streams), "a stream waits for ever"

    def is_reached(self, address: int, size: int) -> bool:
        """Whether a kernel can address all of it."""
        spans = sorted([*self.own, *((start, start + length) for start, length in self.registered.items())])
        for start, end in spans:
            if start <= address < end:
                size -= min(size, end - address)
                address = end
                if not size:
                    return True
        return False

    # -- torch ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before = self.current
        self._by_thread.stream = stream
        try:
            yield
        finally:
            self._by_thread.stream = before

    def new(self, *shape: Any, **more: Any) -> torch.Tensor:
        """Memory that kernels reach, on the GPU or pinned."""
        more.pop("device", None), more.pop("pin_memory", None)
        return self._noted(torch.empty(*shape, **more))

    def _noted(self, tensor: torch.Tensor) -> torch.Tensor:
        self.own.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        return tensor

    def torch(self) -> Any:
        """In place of torch, where the engine uses it."""
        gpu = self

        class Pinnable:
            def __init__(self, tensor: torch.Tensor) -> None:
                self._tensor = tensor

            def pin_memory(self) -> torch.Tensor:
                return gpu._noted(self._tensor)

        class Torch:
            cuda = SimpleNamespace(
                Event=lambda enable_timing=False: Event(gpu),
                ExternalStream=lambda handle, device: gpu.streams[handle],
                Stream=Stream,
                current_stream=lambda _device=None: gpu.current,
                current_device=lambda: 0,
                set_device=lambda _device: None,
                device=lambda _device: gpu._on(gpu.current),
                stream=gpu._on,
                synchronize=lambda: None,
                _sleep=lambda _cycles: gpu.current.put(lambda: None),
            )
            empty = staticmethod(gpu.new)

            def arange(self, *args: Any, device: Any, **more: Any) -> torch.Tensor:
                return gpu._noted(torch.arange(*args, **more))

            def zeros_like(self, tensor: torch.Tensor) -> torch.Tensor:
                return gpu._noted(torch.zeros_like(tensor))

            def tensor(self, *args: Any, **more: Any) -> Pinnable:
                return Pinnable(torch.tensor(*args, **more))

            def from_numpy(self, array: np.ndarray) -> Pinnable:
                return Pinnable(torch.from_numpy(array))

            def __getattr__(self, name: str) -> Any:
                return getattr(torch, name)

        return Torch()

    # -- the runtime's calls and the kernel ----------------------------------------------------------------------------

    def runtime(self) -> Any:
        gpu = self

        def may_call() -> None:
            gpu.check()
            if gpu.calls_left is not None:
                gpu.calls_left -= 1
                if gpu.calls_left < 0:
                    raise CudaError("cudaMemcpyAsync: invalid argument (1)")

        def put(stream: int, dst: int, src: int, size: int, still: bool) -> None:
            if still and gpu.rng.random() < 0.5:  # its source may be read as soon as it is queued
                data = ctypes.string_at(src, size)
                gpu.streams[stream].put(lambda: ctypes.memmove(dst, data, size) and None)
            else:
                gpu.streams[stream].put(lambda: ctypes.memmove(dst, src, size) and None)

        class Runtime:
            def register(self, address: int, size_bytes: int) -> None:
                gpu.registered[address] = size_bytes

            def unregister(self, address: int) -> None:
                del gpu.registered[address]

            def device_pointer(self, address: int) -> int:
                return address

            def new_stream(self, _priority: int) -> int:
                return Stream(gpu).cuda_stream

            def end_stream(self, handle: int) -> None:
                assert not gpu.streams[handle].queued

            def copy(self, dst: int, src: int, size_bytes: int, stream: int) -> None:
                may_call()
                put(stream, dst, src, size_bytes, still=False)

            def copy_batch(self, dst: Any, src: Any, size: Any, stream: int, *, source_is_still: bool) -> None:
                may_call()
                order = gpu.rng.sample(range(len(size)), len(size))
                for at in order:
                    put(stream, int(dst[at]), int(src[at]), int(size[at]), source_is_still)

        return Runtime()

    def mover(self) -> Any:
        gpu = self

        class Mover:
            def __init__(self, _device: Any, aligned: int, chunk_bytes: int, _warps: int, even: bool) -> None:
                self._aligned, self._chunk_bytes, self._even = aligned, chunk_bytes, even

            def __call__(self, table: torch.Tensor, first: int, end: int, programs: int, stream: int) -> None:
                gpu.check()

                def act() -> None:
                    for dst, src, words in table[:, first:end].T.tolist():
                        size = words * kernels.word_size(self._aligned)
                        assert not (dst | src) % self._aligned and not (self._even and size % self._chunk_bytes)
                        assert gpu.is_reached(dst, size) and gpu.is_reached(src, size), "illegal memory access"
                        ctypes.memmove(dst, src, size)

                gpu.streams[stream].put(act)

        return Mover

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Has the CUDA engine use this GPU."""
        for module in (cuda, lanes):
            monkeypatch.setattr(module, "torch", self.torch())
        monkeypatch.setattr(cuda, "CudaRuntime", self.runtime)
        monkeypatch.setattr(kernels, "Mover", self.mover())
