"""The buffer on a GPU that blocks are read into, checked in, and copied out of to their places in KV memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine_plugin.copy.contract import Fragments
from engine_plugin.copy.copies import Copies
from engine_plugin.copy.cudart import CudaRuntime
from engine_plugin.copy.reads import HALVES
from engine_plugin.copy.xxh3 import Digests, finish


class GpuStage:
    """See the module and reads.Stage. Its stream goes before the model's kernels: what it does is short.

    Args:
        block_bytes: Of each block; a multiple of 4096.
        rows: Blocks in each half.
        before_end: Called with the memory before it is given back.

    Raises:
        torch.OutOfMemoryError: there is no room for it.
    """

    def __init__(
        self, device: torch.device, block_bytes: int, rows: int, before_end: Callable[[torch.Tensor], None]
    ) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self.rows = rows
        self._block_bytes = block_bytes
        self._before_end = before_end
        self.memory = torch.empty((HALVES, rows, block_bytes), dtype=torch.uint8, device=self._device)
        self._words = self.memory.view(torch.int64)
        self._runtime = CudaRuntime()
        with torch.cuda.device(self._device):
            self._handle = self._runtime.new_stream(-1)
            self._stream = torch.cuda.ExternalStream(self._handle, device=self._device)
            self._emptied = [torch.cuda.Event() for _ in range(HALVES)]
            with torch.cuda.stream(self._stream):
                self._digests = Digests(self._device)
                # So that the first load does not wait for a compiler.
                finish(self._digests.queue(self._words[0, :1]).tolist(), block_bytes)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def place(self, half: int, row: int) -> torch.Tensor:
        return self.memory[half, row]

    def checks(self, half: int, count: int) -> list[int]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            return finish(self._digests.queue(self._words[half, :count]).tolist(), self._block_bytes)

    def scatter(self, half: int, fragments: Fragments, after: torch.cuda.Event) -> None:
        src = fragments.pool + np.uint64(self.memory[half].data_ptr())
        kv, size = np.ascontiguousarray(fragments.kv), np.ascontiguousarray(fragments.size)
        copies = Copies(self._runtime, Fragments(kv, src, size), is_load=True)
        with torch.cuda.device(self._device):
            self._stream.wait_event(after)
            try:
                copies.queue_batch(0, len(copies), self._handle)
            finally:  # what was queued before a failure is waited for as well
                self._emptied[half].record(self._stream)

    def settle(self, half: int) -> None:
        self._emptied[half].synchronize()

    def close(self) -> None:
        self._before_end(self.memory)
        self._runtime.end_stream(self._handle)
