"""What of a load can be moved before it comes: the bytes of its first buffers, whatever they are spread to.

A buffer that was filled beforehand counts only for the next use of the buffers, and only if that would fill it with the
very same stretches of the pool.
"""

from __future__ import annotations

import numpy as np

from engine_plugin.copy import paths, plan, runs
from engine_plugin.copy.contract import Fragments
from engine_plugin.copy.lanes import Expected, Lane
from engine_plugin.copy.registration import Registration


def filling(
    lane: Lane, registration: Registration, starts: np.ndarray, size_bytes: int, chunk_bytes: int
) -> plan.Section | None:
    """Plans what fills the buffers, and notes it in the lane, for the caller to do. None where the load's own windows
    would end elsewhere, where it is of one buffer (which is begun at once anyway), or is not registered.

    Args:
        starts, size_bytes: See CopyEngine.expect_load.
        chunk_bytes: Of a registration, which a copy must not go beyond.
    """
    each = lane.stage_bytes // size_bytes
    if lane.stage is None or each * size_bytes != lane.stage_bytes or size_bytes < paths.STAGED_RUN_BYTES_MIN:
        return None
    if len(starts) <= each:
        return None
    starts = starts[: each * lane.stages]
    pool = registration.pool
    if int(starts.max()) + size_bytes > pool.address + registration.registered_bytes:
        return None
    blocks = Fragments(starts, starts, np.full(len(starts), size_bytes, np.uint64))
    buffers = plan.Buffers(lane.stage_address, lane.stage_bytes, lane.stages, lane.turn)
    section = next(plan.sections(blocks, runs.breaks_of(blocks), buffers, pool.address, chunk_bytes))
    lane.expected = Expected(lane.mark(lane.copies), section)
    return section


def forget(lane: Lane) -> None:
    """Nothing is expected, and once this returns the pool is not read for what was: no job keeps it for that."""
    lane.take_expected()
    if lane.expected_read is not None:
        lane.expected_read.synchronize()
