"""Plans a job that goes through buffers on the GPU: what shares one, and what is copied between it and the pool.

A *window* is what one buffer holds at a time: consecutive fragments, one after the other. Windows take the buffers in
turn. They are planned in *sections*: the first is as many as there are buffers, so that the bus is busy with them while
the host plans the next, which is larger by a factor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

import numpy as np

from engine_plugin.copy import runs
from engine_plugin.copy.contract import Fragments

#: Windows of a section to those of the one before it: to plan one takes the host a small part of what the bus needs for
#: it.
_SECTION_FACTOR: Final = 16
#: No program of a kernel moves more than this of one fragment, so that few long fragments are spread as well.
PIECE_BYTES: Final = 64 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class Buffers:
    """Buffers side by side on the GPU.

    Attributes:
        address: Of the first.
        size_bytes: Of each.
        count: How many.
        turn: Number of the one that the next window gets.
    """

    address: int
    size_bytes: int
    count: int
    turn: int


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """Some windows.

    Attributes:
        buffers: By window, the number of its buffer.
        pieces: What a kernel moves; their `pool` is an address in a buffer.
        piece_bounds: Where the pieces of each window begin, and where the last end.
        copies: What the copy engine moves: `kv` is an address in a buffer. None spans two registrations.
        copy_bounds: As piece_bounds.
    """

    buffers: list[int]
    pieces: Fragments
    piece_bounds: list[int]
    copies: Fragments
    copy_bounds: list[int]


def sections(
    fragments: Fragments, breaks: np.ndarray, buffers: Buffers, base: int, chunk_bytes: int
) -> Iterator[Section]:
    """Plans a job, section by section.

    Args:
        fragments: None longer than a buffer.
        breaks: Of these fragments, see runs.breaks_of.
        base, chunk_bytes: Where the first registration begins, and the bytes of each.
    """
    bounds = runs.windows(fragments.size, buffers.size_bytes)
    count, begun, longest = len(bounds) - 1, 0, buffers.count
    while begun < count:
        end = min(count, begun + longest)
        turns = (buffers.turn + np.arange(begun, end)) % buffers.count
        yield _section(fragments, breaks, bounds[begun : end + 1], turns, buffers, base, chunk_bytes)
        begun, longest = end, longest * _SECTION_FACTOR


def _section(
    fragments: Fragments,
    breaks: np.ndarray,
    bounds: np.ndarray,
    turns: np.ndarray,
    buffers: Buffers,
    base: int,
    chunk_bytes: int,
) -> Section:
    start, stop = int(bounds[0]), int(bounds[-1])
    here, within = runs.take(fragments, slice(start, stop)), bounds - start
    in_buffer = runs.before(here.size)
    begins = in_buffer[within[:-1]]
    # Addresses minus what is before the window: below zero for some, which arithmetic modulo 2^64 does not mind.
    shift = turns.astype(np.uint64)
    shift *= np.uint64(buffers.size_bytes)
    shift += np.uint64(buffers.address)
    shift -= begins
    in_buffer += shift.repeat(within[1:] - within[:-1])
    pieces = runs.split(Fragments(here.kv, in_buffer, here.size), PIECE_BYTES)
    piece_bounds = within
    if len(pieces) != len(here):
        ends = np.cumsum((here.size + np.uint64(PIECE_BYTES - 1)) // np.uint64(PIECE_BYTES))
        piece_bounds = np.append(np.uint64(0), ends)[within]
    starts_run = np.zeros(len(here), bool)
    starts_run[within[:-1]] = True
    starts_run[breaks[slice(*breaks.searchsorted((start, stop)))] - start] = True
    first = starts_run.nonzero()[0]
    copies = runs.cut_at_borders(
        Fragments(in_buffer[first], here.pool[first], np.add.reduceat(here.size, first)), base, chunk_bytes
    )
    copy_bounds = [*runs.before(copies.size).searchsorted(begins).tolist(), len(copies)]
    return Section(turns.tolist(), pieces, piece_bounds.tolist(), copies, copy_bounds)
