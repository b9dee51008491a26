"""A GPU that is simulated: streams whose operations are done in any order that CUDA allows.

Memory is the host's own. What is queued is done later, a piece at a time, by streams picked at random: a copy in
several pieces, the copies of a batch and the fragments of a kernel in any order. So a wait that is missing shows as
wrong bytes within a few tries, where a real GPU would show it once in a while.

It takes the place of torch, of the CUDA runtime and of the Triton kernel inside engine_plugin.copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from engine_plugin.copy import cuda, expected, kernels, lanes, launches
from engine_plugin.copy.cudart import CudaError

#: Work that is done piece by piece.
Steps = Iterator[None]
_PIECES = 3


class Record:
    """One recording of an event: done once the stream has come there."""

    def __init__(self) -> None:
        self.at: int | None = None


class Device:
    """Streams, and who is next. From any thread.

    Attributes:
        lost: Every call fails from now on.
        lost_when_timed: It is lost when somebody asks how long something took.
        calls_left: So many calls that copy work, and those after fail; None: all work.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.streams: dict[int, deque[tuple[Record | None, Steps]]] = {0: deque()}
        self.events: dict[int, Record] = {}
        self.clock = 0
        self.lost = self.lost_when_timed = False
        self.calls_left: int | None = None
        self.numbers = itertools.count(1)
        self._lock = threading.Lock()

    def queue(self, stream: int, steps: Steps, needs: Record | None = None) -> None:
        with self._lock:
            self.streams[stream].append((needs, steps))

    def record(self, event: int, stream: int) -> None:
        self.check()
        record = self.events[event] = Record()

        def done() -> Steps:
            record.at = self.clock
            yield

        self.queue(stream, done())

    def wait(self, stream: int, event: int) -> None:
        """Of a recording that there is now; one that was never recorded is not waited for."""
        self.check()
        if event in self.events:
            self.queue(stream, iter(()), self.events[event])

    def check(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: the GPU is lost")

    def count_copy(self) -> None:
        self.check()
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise CudaError("cudaMemcpyAsync: invalid argument (1)")

    def step(self) -> bool:
        """Does a piece of work of some stream. False: there is none that can be done."""
        with self._lock:
            able = [
                queue
                for queue in self.streams.values()
                if queue and (queue[0][0] is None or queue[0][0].at is not None)
            ]
            if not able:
                return False
            self.clock += 1
            queue = self.rng.choice(able)
            try:
                next(queue[0][1])
            except StopIteration:
                queue.popleft()
            return True

    def some(self) -> None:
        for _ in range(self.rng.randrange(6)):
            self.step()

    def until(self, over: Callable[[], bool]) -> None:
        self.check()
        while not over():
            assert self.step(), "streams wait for each other"


def _move(dst: int, src: int, size: int) -> Steps:
    for piece in range(_PIECES):
        begin, end = size * piece // _PIECES, size * (piece + 1) // _PIECES
        ctypes.memmove(dst + begin, src + begin, end - begin)
        yield


class Event:
    """As torch's."""

    device: Device

    def __init__(self, enable_timing: bool = False) -> None:
        self.cuda_event = next(self.device.numbers)

    def record(self, stream: Stream | None = None) -> None:
        self.device.record(self.cuda_event, stream.cuda_stream if stream is not None else 0)

    def query(self) -> bool:
        self.device.check()
        self.device.some()
        return self._over()

    def synchronize(self) -> None:
        self.device.until(self._over)

    def wait(self) -> None:
        self.device.wait(0, self.cuda_event)

    def elapsed_time(self, other: Event) -> float:
        self.device.lost |= self.device.lost_when_timed
        self.device.check()
        begun, ended = self.device.events[self.cuda_event].at, self.device.events[other.cuda_event].at
        assert begun is not None
        assert ended is not None
        return float(ended - begun)

    def _over(self) -> bool:
        record = self.device.events.get(self.cuda_event)
        return record is None or record.at is not None


class Stream:
    """As torch's."""

    device: Device

    def __init__(self, handle: int = 0, device: object = None) -> None:
        self.cuda_stream = handle

    def wait_event(self, event: Event) -> None:
        self.device.wait(self.cuda_stream, event.cuda_event)

    def query(self) -> bool:
        self.device.check()
        self.device.some()
        return not self.device.streams[self.cuda_stream]

    def synchronize(self) -> None:
        self.device.until(lambda: not self.device.streams[self.cuda_stream])


class Runtime:
    """As engine_plugin.copy.cudart.CudaRuntime. `copied` has every copy: to, from, bytes."""

    device: Device
    version = 13000

    def __init__(self) -> None:
        self.copied: list[tuple[int, int, int]] = []
        self.registered: list[tuple[int, int]] = []

    def register(self, address: int, size_bytes: int) -> None:
        self.registered.append((address, address + size_bytes))

    def unregister(self, address: int) -> None:
        self.registered = [each for each in self.registered if each[0] != address]

    def device_pointer(self, address: int) -> int:
        return address

    def new_stream(self, priority: int) -> int:
        handle = next(self.device.numbers)
        self.device.streams[handle] = deque()
        return handle

    def end_stream(self, handle: int) -> None:
        self.device.until(lambda: not self.device.streams[handle])
        del self.device.streams[handle]

    def new_event(self) -> int:
        return next(self.device.numbers)

    def end_event(self, handle: int) -> None:
        self.device.events.pop(handle, None)

    def record(self, event: int, stream: int) -> None:
        self.device.record(event, stream)

    def wait(self, stream: int, event: int) -> None:
        self.device.wait(stream, event)

    def copy(self, dst: int, src: int, size_bytes: int, stream: int) -> None:
        self.device.count_copy()
        self._check(dst, src, size_bytes)
        self.device.queue(stream, _move(dst, src, size_bytes))

    def copy_batch(self, dst: int, src: int, size: int, count: int, stream: int, *, source_is_still: bool) -> None:
        self.device.count_copy()
        columns = [np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(at)) for at in (dst, src, size)]
        ends = list(zip(*(column.tolist() for column in columns), strict=True))
        for each in ends:
            self._check(*each)

        def steps() -> Steps:
            moves = [_move(*each) for each in ends]
            while moves:
                move = self.device.rng.choice(moves)
                if next(move, 0) == 0:
                    moves.remove(move)
                yield

        self.device.queue(stream, steps())

    def _check(self, dst: int, src: int, size: int) -> None:
        """A copy lies in one registration or in none."""
        self.copied.append((dst, src, size))
        for at in (dst, src):
            for begin, end in list(self.registered):
                assert (begin <= at and at + size <= end) or at + size <= begin or end <= at, "spans a registration"


class Mover:
    """As engine_plugin.copy.kernels.Mover; tables are read when the kernel runs."""

    device: Device

    def __init__(self, _device: object, aligned: int, chunk_bytes: int, warps: int, even: bool) -> None:
        self._aligned, self._chunk, self._even = aligned, chunk_bytes, even

    def __call__(self, table: int, stride: int, first: int, end: int, programs: int, stream: int) -> None:
        self.device.check()
        rows = np.ctypeslib.as_array((ctypes.c_uint64 * (3 * stride)).from_address(table)).reshape(3, stride)
        word = min(self._aligned, 8)

        def steps() -> Steps:
            order = list(range(first, end))
            self.device.rng.shuffle(order)
            for index in order:
                dst, src, words = (int(row[index]) for row in rows)
                assert not (dst | src | words * word) % self._aligned
                assert not self._even or not words * word % self._chunk
                ctypes.memmove(dst, src, words * word)
                if self.device.rng.random() < 0.2:
                    yield

        self.device.queue(stream, steps())


class _Cuda:
    """What the engine takes from torch.cuda."""

    Event, ExternalStream, Stream = Event, Stream, Stream

    def __init__(self, device: Device) -> None:
        self._device = device
        self._current = threading.local()

    def device(self, _device: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None:
        pass

    def synchronize(self) -> None:
        self._device.until(lambda: not any(self._device.streams.values()))

    def current_stream(self) -> Stream:
        return getattr(self._current, "stream", Stream(0))

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def _sleep(self, _cycles: int) -> None:
        self._device.queue(self.current_stream().cuda_stream, iter([None] * self._device.rng.randrange(9)))


class _Torch:
    """What the engine takes from torch."""

    Tensor = torch.Tensor
    OutOfMemoryError = torch.OutOfMemoryError
    int64, uint8 = torch.int64, torch.uint8
    from_numpy = staticmethod(torch.from_numpy)
    device = torch.device

    def __init__(self, device: Device) -> None:
        self.cuda = _Cuda(device)

    def empty(self, *size: Any, dtype: torch.dtype, device: object = None, pin_memory: bool = False) -> torch.Tensor:
        return torch.randint(0, 100, size[0] if isinstance(size[0], tuple) else size, dtype=dtype)


def install(monkeypatch: Any, seed: int) -> Device:
    """Takes the GPU's place in the engine."""
    device = Device(seed)
    for kind in (Event, Stream, Runtime, Mover):
        monkeypatch.setattr(kind, "device", device, raising=False)
    torch_like = _Torch(device)
    for module in (cuda, lanes, launches, expected):
        monkeypatch.setattr(module, "torch", torch_like, raising=False)
    monkeypatch.setattr(cuda, "CudaRuntime", Runtime)
    monkeypatch.setattr(kernels, "Mover", Mover)
    monkeypatch.setattr(launches.Launches, "_can_read_tables", lambda self: True)
    # So that tables are fetched and batches cut at these sizes, too.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    return device
