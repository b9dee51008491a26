"""What of a load can be moved before it comes: the bytes of its first buffers, whatever they are spread to.

A buffer that was filled beforehand counts only for the next use of the buffers, and only if that would fill it with the
very same stretches of the pool.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine_plugin.copy import paths, runs
from engine_plugin.copy.contract import Fragments
from engine_plugin.copy.lanes import STAGES, Expected, Lane, mark
from engine_plugin.copy.registration import Registration


def filling(
    lane: Lane, registration: Registration, starts: np.ndarray, size_bytes: int, chunk_bytes: int
) -> Iterator[tuple[int, Fragments]]:
    """The copies that fill the buffers, and notes them in the lane once they are queued.

    Args:
        starts, size_bytes: See CopyEngine.expect_load.
        chunk_bytes: Of a registration, which a copy must not go beyond.

    Yields:
        A buffer, and the copies into it: their `kv` are addresses in the buffer. Nothing where the load's own windows
        would end elsewhere, where it is of one buffer (which is begun at once anyway), or is not registered.
    """
    each = lane.stage_bytes // size_bytes
    if lane.stage is None or each * size_bytes != lane.stage_bytes or size_bytes < paths.STAGED_RUN_BYTES_MIN:
        return
    if len(starts) <= each:
        return
    starts = starts[: each * STAGES]
    pool = registration.pool
    if int(starts.max()) + size_bytes > pool.address + registration.registered_bytes:
        return
    windows: list[tuple[np.ndarray, np.ndarray]] = []
    lane.expected = Expected(mark(lane.copies), windows)
    for begin in range(0, len(starts), each):
        buffer = (lane.turn + len(windows)) % STAGES
        here = starts[begin : begin + each]
        blocks = Fragments(here, here, np.full(len(here), size_bytes, np.uint64))
        first = np.append(0, runs.breaks_of(blocks))
        run_bytes = np.add.reduceat(blocks.size, first)
        at = runs.before(run_bytes) + np.uint64(lane.stage_address + buffer * lane.stage_bytes)
        copies = runs.cut_at_borders(Fragments(at, here[first], run_bytes), pool.address, chunk_bytes)
        yield buffer, copies
        windows.append((copies.pool, copies.size))
    lane.expected_read = mark(lane.copies)


def forget(lane: Lane) -> None:
    """Nothing is expected, and once this returns the pool is not read for what was: no job keeps it for that."""
    lane.take_expected()
    if lane.expected_read is not None:
        lane.expected_read.synchronize()
