"""Moves blocks between buffers and extents, several in one system call where extents are neighbours. Runs on I/O
threads.

A run is a row of neighbouring extents of one slab, and one preadv or pwritev: for each block the aligned part of its
buffer, straight, and then a scratch page or two with what does not fill a page and the footer. Where a buffer does not
lie as O_DIRECT asks, the whole block goes through a scratch copy (counted as bounced).
"""

from __future__ import annotations

import dataclasses
import errno
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
import xxhash

from kvstore.tiers.extent import ALIGN_BYTES, FOOTER_BYTES, pack_footer, parse_footer
from kvstore.tiers.files import IOV_MAX, FileIO, aligned_memory

#: Blocks in one run: each is two buffers of one system call.
RUN_BLOCKS_MAX: Final = 64
#: Bytes after which a run is not extended. Enough that the call itself costs nothing beside the transfer.
RUN_BYTES_MAX: Final = 4 << 20
#: Scratch for the end of one extent: the rest of the payload and the footer.
_TAIL_BYTES: Final = 2 * ALIGN_BYTES
assert 2 * RUN_BLOCKS_MAX <= IOV_MAX

#: Results of one block; anything above zero is an errno.
MOVED: Final = 0
MISMATCH: Final = -1  # the bytes are not those that were written
SHORT: Final = -2  # the file ends before the extent does


@dataclasses.dataclass(slots=True)
class Piece:
    """One block of a run.

    Attributes:
        key: Full name.
        buffer: The caller's memory, of the block's size exactly.
        slab, extent: Where the block lies; the file's name and the index in it.
        sequence: Of the write; reads take any.
        place: The caller's number for the block.
    """

    key: bytes
    buffer: memoryview
    slab: int
    extent: int
    sequence: int
    place: int


@dataclasses.dataclass(slots=True)
class Run:
    """Neighbouring extents of one slab."""

    fd: int
    extent_bytes: int
    pieces: list[Piece]

    @property
    def size_bytes(self) -> int:
        return self.extent_bytes * len(self.pieces)


class Scratch:
    """Aligned memory of one thread."""

    def __init__(self) -> None:
        memory = aligned_memory(RUN_BLOCKS_MAX * _TAIL_BYTES)
        self.tails = [memory[at : at + _TAIL_BYTES] for at in range(0, len(memory), _TAIL_BYTES)]
        self._bounce = aligned_memory(0)

    def bounce(self, size_bytes: int) -> memoryview:
        """Room for blocks that cannot go straight. Valid until the next call. A large one is not kept."""
        if size_bytes > len(self._bounce):
            memory = aligned_memory(size_bytes)
            if size_bytes > 2 * RUN_BYTES_MAX:
                return memory
            self._bounce = memory
        return self._bounce


_local = threading.local()


def _scratch() -> Scratch:
    scratch: Scratch | None = getattr(_local, "scratch", None)
    if scratch is None:
        scratch = _local.scratch = Scratch()
    return scratch


def address_of(buffer: memoryview) -> int:
    """Where a buffer starts in this process, writable or not."""
    address: int = np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]
    return address


def plan_runs(fds: Sequence[int], extent_bytes: Sequence[int], pieces: Sequence[Piece]) -> list[Run]:
    """Cuts pieces into runs. Pieces that are neighbours in the sequence and on the medium share one."""
    runs: list[Run] = []
    last: Piece | None = None
    room = 0
    for fd, stride, piece in zip(fds, extent_bytes, pieces, strict=True):
        if (
            last is not None
            and room > 0
            and piece.slab == last.slab
            and piece.extent == last.extent + 1
            and len(runs[-1].pieces) < RUN_BLOCKS_MAX
        ):
            runs[-1].pieces.append(piece)
        else:
            runs.append(Run(fd, stride, [piece]))
            room = RUN_BYTES_MAX
        room -= stride
        last = piece
    return runs


def deal_runs(runs: Sequence[Run], threads: int, job_bytes_min: int, job_bytes_max: int) -> list[list[Run]]:
    """Deals runs into jobs so that all threads have some and none has crumbs."""
    total = sum(run.size_bytes for run in runs)
    target = min(max(total // threads, job_bytes_min), job_bytes_max)
    jobs: list[list[Run]] = []
    room = 0
    for run in runs:
        if room <= 0:
            jobs.append([])
            room = target
        jobs[-1].append(run)
        room -= run.size_bytes
    return jobs


class Mover:
    """What the threads do with runs. One for a tier; its counters are written by several threads, each under the GIL's
    cover of one statement, and read for stats only.

    Attributes:
        memory_align: What addresses of buffers must be a multiple of; 1 where I/O is buffered.
    """

    def __init__(self, io: FileIO, memory_align: int) -> None:
        self._io = io
        self.memory_align = memory_align
        self.bounced = 0
        self.reread = 0

    def write(self, runs: Sequence[Run]) -> list[tuple[int, int]]:
        """Writes runs; (place, result) of each block."""
        results: list[tuple[int, int]] = []
        for run in runs:
            code = self._write_run(run)
            results.extend((piece.place, code) for piece in run.pieces)
        return results

    def read(self, runs: Sequence[Run]) -> list[tuple[int, int]]:
        """Reads runs; (place, result) of each block. What fails is tried a second time by itself, never a third."""
        results: list[tuple[int, int]] = []
        for run in runs:
            codes = self._read_run(run)
            for piece, first in zip(run.pieces, codes, strict=True):
                code = first
                if code != MOVED:
                    self.reread += 1
                    (code,) = self._read_run(Run(run.fd, run.extent_bytes, [piece]))
                results.append((piece.place, code))
        return results

    def _write_run(self, run: Run) -> int:
        scratch = _scratch()
        views: list[memoryview] = []
        for piece, tail, body in self._bodies(run, scratch):
            buffer = piece.buffer
            size_bytes = len(buffer)
            straight = size_bytes // ALIGN_BYTES * ALIGN_BYTES
            tail_bytes = run.extent_bytes - straight
            rest = size_bytes - straight
            if body is not None:
                body[:] = buffer[:straight]
            elif straight:
                body = buffer if not rest else buffer[:straight]
            if body is not None:
                views.append(body)
            tail[:rest] = buffer[straight:]
            tail[rest : tail_bytes - FOOTER_BYTES] = bytes(tail_bytes - FOOTER_BYTES - rest)
            check = xxhash.xxh3_64_intdigest(buffer)
            tail[tail_bytes - FOOTER_BYTES : tail_bytes] = pack_footer(
                piece.key, size_bytes, piece.sequence, check, piece.slab, piece.extent
            )
            views.append(tail[:tail_bytes])
        try:
            left = transfer(self._io.pwritev, run.fd, views, run.pieces[0].extent * run.extent_bytes)
        except OSError as error:
            return error.errno or errno.EIO
        return errno.ENOSPC if left else MOVED

    def _read_run(self, run: Run) -> list[int]:
        scratch = _scratch()
        views: list[memoryview] = []
        bounced: list[tuple[memoryview, memoryview]] = []
        for piece, tail, body in self._bodies(run, scratch):
            buffer = piece.buffer
            straight = len(buffer) // ALIGN_BYTES * ALIGN_BYTES
            if body is not None:
                bounced.append((buffer[:straight], body))
            elif straight:
                body = buffer if straight == len(buffer) else buffer[:straight]
            if body is not None:
                views.append(body)
            views.append(tail[: run.extent_bytes - straight])
        try:
            left = transfer(self._io.preadv, run.fd, views, run.pieces[0].extent * run.extent_bytes)
        except OSError as error:
            return [error.errno or errno.EIO] * len(run.pieces)
        for target, source in bounced:
            target[:] = source
        codes = []
        end = run.size_bytes - left
        for index, (piece, tail) in enumerate(zip(run.pieces, scratch.tails, strict=False)):
            if (index + 1) * run.extent_bytes > end:
                codes.append(SHORT)
                continue
            buffer = piece.buffer
            straight = len(buffer) // ALIGN_BYTES * ALIGN_BYTES
            tail_bytes = run.extent_bytes - straight
            if straight < len(buffer):
                buffer[straight:] = tail[: len(buffer) - straight]
            footer = parse_footer(tail[tail_bytes - FOOTER_BYTES : tail_bytes])
            right = (
                footer is not None
                and footer.key == piece.key
                and footer.size_bytes == len(buffer)
                and footer.check == xxhash.xxh3_64_intdigest(buffer)
            )
            codes.append(MOVED if right else MISMATCH)
        return codes

    def _bodies(self, run: Run, scratch: Scratch) -> list[tuple[Piece, memoryview, memoryview | None]]:
        """Each block with its scratch tail and, where it cannot go straight, room for its aligned part."""
        align = self.memory_align
        crooked = [
            align > 1 and len(piece.buffer) >= ALIGN_BYTES and address_of(piece.buffer) % align != 0
            for piece in run.pieces
        ]
        room, at = memoryview(b""), 0
        if any(crooked):
            self.bounced += sum(crooked)
            room = scratch.bounce(run.extent_bytes * sum(crooked))
        bodies: list[tuple[Piece, memoryview, memoryview | None]] = []
        for piece, tail, through_scratch in zip(run.pieces, scratch.tails, crooked, strict=False):
            body = None
            if through_scratch:
                straight = len(piece.buffer) // ALIGN_BYTES * ALIGN_BYTES
                body = room[at : at + straight]
                at += straight
            bodies.append((piece, tail, body))
        return bodies


def transfer(call: object, fd: int, views: list[memoryview], offset: int) -> int:
    """Repeats preadv or pwritev until all views are through. Bytes that are left: the file ended, or nothing more is
    taken.

    Raises:
        OSError: as the call does.
    """
    assert callable(call)
    left = sum(map(len, views))
    while left:
        moved: int = call(fd, views, offset)
        if moved == 0:
            break
        left -= moved
        if left:
            offset += moved
            while moved >= len(views[0]):
                moved -= len(views.pop(0))
            if moved:
                views[0] = views[0][moved:]
    return left
