"""Loads past the pool: blocks are read from files into a buffer beside KV memory, checked there, and copied to their
places. Knows neither how files are read nor where the memory is (gds.py and stage.py do).

The buffer has two halves: while one is filled from the files, the other is checked and emptied. Nothing is written to
KV memory that did not have the checksum that was stored with it.

Threads: `begin` and `wait` are for the worker's thread. One thread goes through the jobs, in their order, and calls
`then`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Collection, Sequence
from typing import Any, Final, Protocol

import numpy as np

from engine_plugin.copy import runs
from engine_plugin.copy.contract import Fragments, Then
from kvstore.direct import DiskExtent
from kvstore.errors import Damage
from kvstore.threads import started_pool

#: Of the whole buffer, where blocks are not larger than half of it: enough reads at once to keep fast drives busy.
STAGE_BYTES: Final = 128 << 20
HALVES: Final = 2


class Read(Protocol):
    """A read under way."""

    def get(self) -> int:
        """Waits. Returns the bytes read; raises what went wrong."""


class Files(Protocol):
    """Reads files into the memory of a stage. From one thread."""

    #: How, as the counts name it.
    how: str

    def read(self, path: str, offset: int, size_bytes: int, into: Any) -> Read:
        """Begins to read. `into` is a place that the stage gave, and is written until the read is over."""

    def tidy(self) -> None:
        """Closes what was not read for long. No read is under way."""

    def close(self) -> None:
        """Closes what is open. No read is under way."""


class Stage(Protocol):
    """The buffer. `mark` is called by the worker's thread, all else by that of the jobs.

    Attributes:
        rows: Blocks in one half.
    """

    rows: int

    def mark(self) -> Any:
        """Names what was queued for KV memory so far."""

    def place(self, half: int, row: int) -> Any:
        """Where one block is read to."""

    def checks(self, half: int, count: int) -> list[int]:
        """xxh3_64 of the first blocks of a half, once they have been read."""

    def scatter(self, half: int, fragments: Fragments, after: Any) -> None:
        """Queues copies to KV memory, behind what `after` names. `pool` is counted from the start of the half."""

    def settle(self, half: int) -> None:
        """Returns once the copies out of a half are over."""

    def close(self) -> None:
        """Gives memory back."""


class DirectRead:
    """A job under way: over once its `then` was called."""

    __slots__ = ("future", "over")

    def __init__(self) -> None:
        self.over = False
        self.future: concurrent.futures.Future[None] | None = None


class DirectReads:
    """See the module. Owns and closes `files` and `stage`.

    Args:
        block_bytes: Of every block.
    """

    def __init__(self, files: Files, stage: Stage, block_bytes: int) -> None:
        self._files = files
        self._stage = stage
        self._block_bytes = block_bytes
        self._thread = started_pool(1, "kvstore-gds")
        #: Bytes read and checked so far; written by the thread.
        self.read_bytes = 0

    @property
    def how(self) -> str:
        """As `Files.how`."""
        return self._files.how

    def begin(self, extents: Sequence[DiskExtent], fragments: Fragments, then: Then) -> DirectRead:
        """Loads blocks.

        Args:
            extents: Where they lie. They stay leased until `then` was called.
            fragments: As for CopyEngine.load; `pool` is counted in the blocks, one after the other.
            then: As CopyEngine's; called on a thread of this object. kvstore.errors.Damage: what was read is not what
                was stored.

        Raises:
            RuntimeError: this is closed; `then` will not be called.
        """
        job = DirectRead()
        mark = self._stage.mark()

        def run() -> None:
            began, error = time.monotonic(), None
            try:
                self._load(extents, fragments, mark)
            except BaseException as problem:
                error = problem
            job.over = True
            then(time.monotonic() - began, error)

        job.future = self._thread.submit(run)
        return job

    def wait(self, jobs: Collection[DirectRead]) -> None:
        """Returns once these jobs are over."""
        concurrent.futures.wait([job.future for job in jobs if job.future is not None])

    def close(self) -> None:
        """Ends every job, well or badly."""
        self._thread.shutdown(wait=True)
        self._files.close()
        self._stage.close()

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _load(self, extents: Sequence[DiskExtent], fragments: Fragments, mark: Any) -> None:
        if any(extent.size_bytes != self._block_bytes for extent in extents):
            raise Damage(f"a block on the disk does not have {self._block_bytes} bytes")
        order = np.argsort(fragments.pool, kind="stable")
        fragments = runs.take(fragments, order)
        block = fragments.pool // np.uint64(self._block_bytes)
        stage, rows = self._stage, self._stage.rows
        reads: list[list[Read]] = [[] for _ in range(HALVES)]
        firsts = list(range(0, len(extents), rows))
        try:
            for number, first in enumerate([*firsts, None]):
                half = number % HALVES
                if first is not None:
                    stage.settle(half)
                    for row, extent in enumerate(extents[first : first + rows]):
                        place = stage.place(half, row)
                        reads[half].append(self._files.read(extent.path, extent.offset, extent.size_bytes, place))
                if number:
                    before = firsts[number - 1]
                    part = runs.take(fragments, slice(*np.searchsorted(block, [before, before + rows])))
                    start = np.uint64(before * self._block_bytes)
                    part = Fragments(part.kv, part.pool - start, part.size)
                    self._finish((number - 1) % HALVES, extents[before : before + rows], reads, part, mark)
        finally:
            for read in [read for several in reads for read in several]:
                with contextlib.suppress(Exception):  # it is the end that matters: its bytes are of no use
                    read.get()
            for half in range(HALVES):
                stage.settle(half)
            self._files.tidy()

    def _finish(
        self, half: int, extents: Sequence[DiskExtent], reads: list[list[Read]], fragments: Fragments, mark: Any
    ) -> None:
        """Waits for the reads of a half, checks it and empties it."""
        while reads[half]:
            if reads[half][-1].get() != self._block_bytes:
                raise Damage("a file on the disk is shorter than the blocks in it")
            reads[half].pop()
        for extent, check in zip(extents, self._stage.checks(half, len(extents)), strict=True):
            if check != extent.check:
                raise Damage(f"the block at {extent.offset} in {extent.path} is not what was stored")
        self._stage.scatter(half, fragments, mark)
        self.read_bytes += len(extents) * self._block_bytes
