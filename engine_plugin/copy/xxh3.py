"""xxh3_64 of blocks that lie in GPU memory, as the CPU computes it, so that what a GPU fetched from a file by itself is
checked by the checksum that was stored with it.

XXH3 goes through its input in rows of 1024 bytes. Within a row everything is a sum, so a first kernel adds up all rows
of all blocks at once, at the speed of GPU memory. From row to row eight accumulators are stirred, one step after
another: a second kernel does that, one program for each block. What remains, a few multiplications, is the host's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl

#: Blocks must be a multiple of this: the rows that XXH3 divides its input into.
ROW_BYTES: Final = 1024
_STRIPES: Final = 16
_LANES: Final = 8
#: Rows that one program of the first kernel adds up at a time.
_ROWS: Final = 8

#: The constants of XXH3 (its specification, "XXH3 algorithm overview").
_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_P32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_P64: Final = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_START: Final = (_P32[2], _P64[0], _P64[1], _P64[2], _P64[3], _P32[1], _P64[4], _P32[0])
_AVALANCHE: Final = 0x165667919E3779F9
_MASK: Final = (1 << 64) - 1


@triton.jit
def _add_rows(data, keys, sums, rows, rows_per_block, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """sums[row, lane] of every row of `data` (int64, 128 a row). keys: [2, 16, 8], for all rows and for the last."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    stripe = tl.arange(0, 16)[None, :, None]
    lane = tl.arange(0, 8)[None, None, :]
    inside = row < rows
    at = row * 128 + stripe * 8
    own = tl.load(data + at + lane, mask=inside, other=0)
    other = tl.load(data + at + (lane ^ 1), mask=inside, other=0)
    last = ((row + 1) % rows_per_block == 0).to(tl.int32)
    mixed = own ^ tl.load(keys + last * 128 + stripe * 8 + lane)
    low = mixed & 0xFFFFFFFF
    high = (mixed >> 32) & 0xFFFFFFFF
    total = tl.sum(low * high + other, axis=1)
    out = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    tl.store(sums + out * 8 + tl.arange(0, 8)[None, :], total, mask=out < rows)


@triton.jit
def _stir(sums, start, stirring, result, rows_per_block, PRIME: tl.constexpr):  # type: ignore[no-untyped-def]
    """result[block, lane]: the accumulators after the last row."""
    lane = tl.arange(0, 8)
    block = tl.program_id(0).to(tl.int64)
    row = sums + block * rows_per_block * 8 + lane
    key = tl.load(stirring + lane)
    value = tl.load(start + lane)
    for number in tl.range(0, rows_per_block - 1, loop_unroll_factor=8):
        value += tl.load(row + number * 8)
        value ^= (value >> 47) & 0x1FFFF
        value ^= key
        value *= PRIME
    value += tl.load(row + (rows_per_block - 1) * 8)
    tl.store(result + block * 8 + lane, value)


def _words(offset: int, count: int) -> list[int]:
    return list(struct.unpack_from(f"<{count}q", _SECRET, offset))


class Digests:
    """The kernels with their constants, on one device. One thread at a time."""

    def __init__(self, device: torch.device) -> None:
        """Compiles nothing; the first call does."""
        keys = [_words(8 * stripe, _LANES) for stripe in range(_STRIPES)]
        last = [*keys[:-1], _words(len(_SECRET) - 64 - 7, _LANES)]
        self._keys = torch.tensor([keys, last], dtype=torch.int64, device=device)
        self._stirring = torch.tensor(_words(len(_SECRET) - 64, _LANES), dtype=torch.int64, device=device)
        signed = [value - (1 << 64) if value >> 63 else value for value in _START]
        self._start = torch.tensor(signed, dtype=torch.int64, device=device)

    def queue(self, blocks: torch.Tensor) -> torch.Tensor:
        """Queues the kernels on the current stream.

        Args:
            blocks: int64 [blocks, words], contiguous; a block is a multiple of ROW_BYTES.

        Returns:
            What `finish` takes, once it was copied to the host: int64 [blocks, 8].
        """
        count, words = blocks.shape
        rows_per_block = words * 8 // ROW_BYTES
        rows = count * rows_per_block
        sums = torch.empty((rows, _LANES), dtype=torch.int64, device=blocks.device)
        result = torch.empty((count, _LANES), dtype=torch.int64, device=blocks.device)
        _add_rows[(triton.cdiv(rows, _ROWS),)](blocks, self._keys, sums, rows, rows_per_block, ROWS=_ROWS)
        _stir[(count,)](sums, self._start, self._stirring, result, rows_per_block, PRIME=_P32[0], num_warps=1)
        return result


def finish(accumulators: Sequence[Sequence[int]], size_bytes: int) -> list[int]:
    """The checksums, from what the kernels left of blocks of this size."""
    keys = _words(11, _LANES)
    digests = []
    for lanes in accumulators:
        value = size_bytes * _P64[0]
        for pair in range(0, _LANES, 2):
            product = ((lanes[pair] ^ keys[pair]) & _MASK) * ((lanes[pair + 1] ^ keys[pair + 1]) & _MASK)
            value += (product & _MASK) ^ (product >> 64)
        value &= _MASK
        value ^= value >> 37
        value = value * _AVALANCHE & _MASK
        digests.append(value ^ value >> 32)
    return digests
