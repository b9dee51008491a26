"""The Triton kernel: moves fragments between any two places that the GPU can address."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch
import triton
import triton.language as tl

#: With less in flight a program would wait more than it moves.
CHUNK_BYTES_MIN: Final = 4096
_WORDS: Final = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@dataclasses.dataclass(frozen=True, slots=True)
class Tuning:
    """How the kernel is launched."""

    programs: int
    chunk_bytes: int
    warps: int


#: GPU memory to GPU memory: short, so it may be wide.
STAGED: Final = Tuning(programs=32, chunk_bytes=32768, warps=8)
#: The same where a request waits for a single buffer: a program for each piece of a block, as nothing hides their time.
ONE_RUN: Final = Tuning(programs=128, chunk_bytes=32768, warps=8)
#: Over the bus, by direction.
TO_HOST: Final = Tuning(programs=16, chunk_bytes=16384, warps=8)
TO_GPU: Final = Tuning(programs=16, chunk_bytes=16384, warps=8)


@triton.jit(do_not_specialize=["stride", "first", "end"])
def _move(  # type: ignore[no-untyped-def]
    table,
    stride,
    first,
    end,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Fragments first..end of a table of int64: row 0 destinations, row 1 sources, row 2 sizes in words.

    ALIGNED: bytes that every address is a multiple of; STEP: words that every size is a multiple of. CHUNK: words that
    a program has in flight. EVEN: every size is a multiple of CHUNK.
    """
    lanes = tl.arange(0, CHUNK)
    fragment = first + tl.program_id(0)
    while fragment < end:
        dst = tl.multiple_of(tl.load(table + fragment).to(tl.pointer_type(WORD)), ALIGNED)
        src = tl.multiple_of(tl.load(table + stride + fragment).to(tl.pointer_type(WORD)), ALIGNED)
        words = tl.multiple_of(tl.load(table + 2 * stride + fragment), STEP)
        if EVEN:
            for start in range(0, words, CHUNK):
                tl.store(dst + start + lanes, tl.load(src + start + lanes))
        else:
            for start in range(0, words, CHUNK):
                inside = start + lanes < words
                tl.store(dst + start + lanes, tl.load(src + start + lanes, mask=inside), mask=inside)
        fragment += tl.num_programs(0)


def word_size(aligned: int) -> int:
    """Bytes of the words that the kernel counts in, for addresses and sizes aligned to so many bytes."""
    return min(aligned, 8)


def chunk_for(common: int, most: int) -> tuple[int, bool]:
    """Bytes that a program should have in flight, and whether that divides every size.

    Args:
        common: A power of two that divides every size.
        most: What the direction does best with.
    """
    return (min(common, most), True) if common >= CHUNK_BYTES_MIN else (most, False)


class Mover:
    """The kernel compiled for one kind of fragments.

    Launching it directly costs a third of what Triton's own call does, which looks its arguments up each time.
    """

    def __init__(self, device: torch.device, aligned: int, chunk_bytes: int, warps: int, even: bool) -> None:
        """Compiles it, or takes it from Triton's cache.

        Args:
            aligned: 16, 8, 4, 2 or 1: bytes that divide every address and size.
            chunk_bytes: What a program has in flight.
            even: Every size is a multiple of chunk_bytes.
        """
        word = word_size(aligned)
        self._constants = (_WORDS[aligned], aligned, aligned // word, chunk_bytes // word, even)
        table = torch.zeros((3, 1), dtype=torch.int64, device=device)
        self._kernel: Any = _move[(1,)](table, table.stride(0), 0, 0, *self._constants, num_warps=warps)
        self._launches: dict[int, Any] = {}  # by programs

    def __call__(self, table: int, stride: int, first: int, end: int, programs: int, stream: int) -> None:
        """Queues fragments first..end.

        Args:
            table: Address of int64 [3, stride] that the GPU can read, a multiple of 16, see the kernel; sizes are in
                words of word_size(aligned) bytes.
            programs: How many programs share the work; each keeps a multiprocessor busy while it runs.
            stream: Handle of a CUDA stream.
        """
        programs = max(1, min(programs, end - first))
        launch = self._launches.get(programs)
        if launch is None:
            launch = self._launches[programs] = self._kernel[programs, 1, 1]
        launch(table, stride, first, end, *self._constants, stream=stream)
