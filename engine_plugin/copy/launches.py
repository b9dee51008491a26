"""The kernel as jobs use it: compiled for what they have, and given its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
import torch

from engine_plugin.copy import kernels, runs
from engine_plugin.copy.contract import Fragments
from engine_plugin.copy.cudart import CudaError, CudaRuntime
from engine_plugin.copy.kernels import ONE_RUN, STAGED, TO_GPU, TO_HOST, Tuning
from engine_plugin.copy.lanes import Job, Lane

#: Queues the kernel for a range of a table.
Launch = Callable[[int, int], None]
#: Fragments of a table that a kernel reads where it is, which takes a program two microseconds for each.
_TABLE_READ_MAX: Final = 512
#: Tables that every lane has from the beginning, by their columns. A job is planned in a few sections, each of which
#: has a table of its own, the first one a short one.
_TABLES: Final = tuple(1 << bits for bits in range(9, 17) for _ in range(4 if bits < 11 else 2))


class Launches:
    """See the module. Of the current device."""

    def __init__(self, device: torch.device, runtime: CudaRuntime) -> None:
        self._device = device
        self._runtime = runtime
        self._movers: dict[tuple[int, int, int, bool], kernels.Mover] = {}
        self._reads_tables = False

    def prepare(self, lanes: Iterable[Lane]) -> None:
        """Makes what most jobs need, so that the first of them does not wait for a compiler or for memory.

        Raises:
            Exception: whatever Triton raises where it cannot compile.
        """
        for tuning in {STAGED, ONE_RUN, TO_HOST, TO_GPU}:
            for common in (tuning.chunk_bytes, 16384, 8192, 4096, 16):
                self._mover(16, common, tuning)
        for lane in lanes:
            lane.give_tables([lane.take_table(columns) for columns in _TABLES])
        torch.cuda.synchronize()
        self._reads_tables = self._can_read_tables()

    def of(self, lane: Lane, job: Job, pieces: Fragments, is_load: bool, tuning: Tuning) -> Launch:
        """Writes the table of a kernel, and fetches it where it is long, on the lane's stream; launches of it then name
        a range of it.
        """
        count, stream = len(pieces), lane.kernels.cuda_stream
        common = runs.alignment(pieces.size, most=tuning.chunk_bytes)
        aligned = min(common, runs.alignment(pieces.kv, pieces.pool))
        table = lane.take_table(count)
        job.tables.append(table)
        rows = table.rows
        rows[0, :count], rows[1, :count] = (pieces.kv, pieces.pool) if is_load else (pieces.pool, pieces.kv)
        np.right_shift(pieces.size, np.uint64(kernels.word_size(aligned).bit_length() - 1), out=rows[2, :count])
        read, columns = table.here.data_ptr(), table.columns
        if not self._reads_tables:
            with torch.cuda.stream(lane.kernels):
                table.there.copy_(table.here, non_blocking=True)
            read = table.there.data_ptr()
        elif count > _TABLE_READ_MAX or tuning is ONE_RUN:  # of which the bus hides the fetching
            fetch = self._mover(16, table.piece_bytes, STAGED)
            fetch(table.itself.data_ptr(), table.pieces, 0, table.pieces, STAGED.programs, stream)
            read = table.there.data_ptr()
        mover = self._mover(aligned, common, tuning)
        return lambda first, end: mover(read, columns, first, end, tuning.programs, stream)

    def _can_read_tables(self) -> bool:
        """Tries a kernel whose table is in pinned host memory."""
        source = torch.arange(16, dtype=torch.uint8, device=self._device)
        copied = torch.zeros_like(source)
        table = torch.tensor([[copied.data_ptr()], [source.data_ptr()], [2]], dtype=torch.int64).pin_memory()
        try:
            if self._runtime.device_pointer(table.data_ptr()) != table.data_ptr():
                return False
        except CudaError:  # the GPU has no address for it
            return False
        self._mover(16, 16, STAGED)(table.data_ptr(), 1, 0, 1, STAGED.programs, torch.cuda.current_stream().cuda_stream)
        return bool((copied == source).all())

    def _mover(self, aligned: int, common: int, tuning: Tuning) -> kernels.Mover:
        """The kernel for fragments that are aligned so, and whose sizes a power of two divides."""
        chunk_bytes, even = kernels.chunk_for(common, tuning.chunk_bytes)
        key = (aligned, chunk_bytes, tuning.warps, even)
        if key not in self._movers:
            self._movers[key] = kernels.Mover(self._device, *key)
        return self._movers[key]
