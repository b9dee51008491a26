"""Array arithmetic on fragments: all of it vectorised, none of it knows torch or CUDA.

A *run* is a stretch of the pool that is contiguous though it holds several fragments: a block's part of one rank is one
run, however many layers it has, and neighbouring slots make longer ones.
"""

from __future__ import annotations

import numpy as np

from engine_plugin.copy.contract import Fragments


def take(fragments: Fragments, which: np.ndarray | slice) -> Fragments:
    """Those fragments that an index or a mask picks."""
    return Fragments(fragments.kv[which], fragments.pool[which], fragments.size[which])


def in_pool_order(fragments: Fragments) -> Fragments:
    """The same fragments, ascending in the pool."""
    pool, size = fragments.pool, fragments.size
    first = np.flatnonzero(np.append(True, pool[:-1] + size[:-1] != pool[1:]))
    starts = pool[first]
    if len(first) < 2 or bool((starts[1:] > starts[:-1]).all()):
        return fragments
    # Sorting runs instead of fragments: a block's are in order already, and there are a hundred times as many.
    order = np.argsort(starts, kind="stable")
    length = np.diff(np.append(first, len(pool)))[order]
    begin = np.cumsum(length) - length
    return take(fragments, np.arange(len(pool)) + np.repeat(first[order] - begin, length))


def breaks_of(fragments: Fragments) -> np.ndarray:
    """Indices of the fragments that do not follow the one before them in the pool, in the order in which they are
    given: there is one run more.
    """
    pool = fragments.pool
    apart: np.ndarray = pool[1:] - pool[:-1] != fragments.size[:-1]
    return apart.nonzero()[0] + 1


def before(size: np.ndarray) -> np.ndarray:
    """How many bytes those have that come before each of them."""
    if len(size) and bool((size == size[0]).all()):
        # In place: memory for a temporary of this size is taken from the system each time, page by page.
        sums = np.arange(len(size), dtype=np.uint64)
        sums *= size[0]
    else:
        sums = np.cumsum(size)
        sums -= size
    return sums


def windows(size: np.ndarray, room: int) -> np.ndarray:
    """Cuts fragments into consecutive windows of at most `room` bytes each (more only where one fragment is larger).

    Returns:
        Indices at which the windows begin, with the number of fragments at the end.
    """
    count = len(size)
    if count and size[0] <= room and bool((size == size[0]).all()):
        return np.append(np.arange(0, count, room // int(size[0])), count)
    ends = np.cumsum(size).astype(np.int64)  # a search for an int in uint64 would convert all of it each time
    bounds = [0]
    while bounds[-1] < len(size):
        begun = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        bounds.append(max(bounds[-1] + 1, int(np.searchsorted(ends, np.int64(begun + room), side="right"))))
    return np.array(bounds)


def split(fragments: Fragments, longest: int) -> Fragments:
    """Cuts fragments into pieces of at most `longest` bytes, so that no program of a kernel has one to itself."""
    if not len(fragments) or int(fragments.size.max()) <= longest:
        return fragments
    pieces = -(-fragments.size.astype(np.int64) // longest)
    source = np.repeat(np.arange(len(fragments)), pieces)
    within = (np.arange(len(source)) - np.repeat(np.cumsum(pieces) - pieces, pieces)).astype(np.uint64)
    offset = within * np.uint64(longest)
    return Fragments(
        fragments.kv[source] + offset,
        fragments.pool[source] + offset,
        np.minimum(fragments.size[source] - offset, np.uint64(longest)),
    )


def cut_at_borders(fragments: Fragments, base: int, step: int) -> Fragments:
    """Cuts fragments where they cross `base` plus a multiple of `step` in the pool: a copy must not span two
    registrations.
    """
    start = fragments.pool - np.uint64(base)
    stride = np.uint64(step)
    if not np.count_nonzero(start % stride + fragments.size > stride):
        return fragments
    pieces = ((start + fragments.size - np.uint64(1)) // stride - start // stride + np.uint64(1)).astype(np.int64)
    source = np.repeat(np.arange(len(fragments)), pieces)
    within = (np.arange(len(source)) - np.repeat(np.cumsum(pieces) - pieces, pieces)).astype(np.uint64)
    begin = np.where(within == 0, start[source], (start[source] // stride + within) * stride)
    end = np.minimum(start[source] + fragments.size[source], (begin // stride + np.uint64(1)) * stride)
    offset = begin - start[source]
    return Fragments(fragments.kv[source] + offset, fragments.pool[source] + offset, end - begin)


def alignment(*arrays: np.ndarray, most: int = 16) -> int:
    """The largest power of two, `most` at most, that divides every one of these addresses and sizes."""
    bits = most
    for array in arrays:
        bits |= int(np.bitwise_or.reduce(array)) if len(array) else 0
    return bits & -bits
