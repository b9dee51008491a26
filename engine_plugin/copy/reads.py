"""Loads past the pool: blocks are read from files into a buffer beside KV memory, checked there, and copied to their
places. Knows neither how files are read nor where the memory is (gds.py and stage.py do).

The buffer has two halves: while one is filled from the files, the other is checked and emptied. Nothing is written to
KV memory that did not have the checksum that was stored with it.

A medium may hang. What is read goes into the buffer and nowhere else, so nobody has to wait for that: its job ends, as
do those behind it, and the buffer is not used for anything until the reads have come back.

Threads: all methods are for the worker's thread. One thread goes through the jobs, in their order, and calls `then`;
where it hangs, `poll` and `wait` do.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np

from engine_plugin.copy import runs
from engine_plugin.copy.contract import Fragments, Then
from kvstore.direct import DiskExtent
from kvstore.errors import Damage

#: Of the whole buffer, where blocks are not larger than half of it: enough reads at once to keep fast drives busy.
STAGE_BYTES: Final = 128 << 20
HALVES: Final = 2
#: A medium of which nothing has come for so long hangs.
HANGS_S: Final = 10.0
#: Pause between two looks of `wait`.
_LOOK_S: Final = 0.02


class Read(Protocol):
    """A read under way."""

    def get(self) -> int:
        """Waits until nothing more is written. Returns the bytes read; raises what went wrong. To be called once."""


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

    __slots__ = ("ended", "then")

    def __init__(self, then: Then) -> None:
        self.then = then
        self.ended = threading.Event()

    @property
    def over(self) -> bool:
        return self.ended.is_set()

    def end(self, seconds: float, error: BaseException | None) -> None:
        """Calls `then`."""
        try:
            self.then(seconds, error)
        finally:
            self.ended.set()


class _Hangs(Exception):
    """The jobs were given up while a medium was waited for."""


class DirectReads:
    """See the module. Owns and closes `files` and `stage`.

    Args:
        block_bytes: Of every block.

    Raises:
        RuntimeError: there is no thread to be had.
    """

    def __init__(self, files: Files, stage: Stage, block_bytes: int, now: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._stage = stage
        self._block_bytes = block_bytes
        self._now = now
        self._lock = threading.Lock()  # guards the four below
        self._jobs: list[DirectRead] = []  # that are not over
        self._waits_since: float | None = None  # the thread, for the medium
        self._given_up = False
        self._closed = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Not one that the process waits for when it ends: a read may hang for ever.
        self._thread = threading.Thread(target=self._run, name="kvstore-gds", daemon=True)
        self._thread.start()
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
            RuntimeError: this is closed or hangs; `then` will not be called.
        """
        job = DirectRead(then)
        mark = self._stage.mark()

        def work() -> None:
            began, error = self._now(), None
            try:
                self._load(extents, fragments, mark)
            except BaseException as problem:
                error = problem
            with self._lock:
                if job not in self._jobs:
                    return  # its end was told
                self._jobs.remove(job)
            job.end(max(0.0, self._now() - began), error)

        with self._lock:
            if self._closed or self._given_up:
                raise RuntimeError("blocks are not read past the pool any more")
            self._jobs.append(job)
            self._work.put(work)
        return job

    def poll(self) -> bool:
        """Whether the medium hangs. Then every job is over, badly, and there will be no others."""
        since = self._waits_since
        if since is None or self._now() - since < HANGS_S:
            return self._given_up
        with self._lock:
            if self._given_up or self._waits_since is None or self._now() - self._waits_since < HANGS_S:
                return self._given_up
            self._given_up = True
            jobs, self._jobs = self._jobs, []
        with contextlib.suppress(Exception):  # the GPU is lost
            for half in range(HALVES):
                self._stage.settle(half)  # what was right before is on its way into KV memory
        for job in jobs:
            job.end(0.0, TimeoutError(f"nothing has been read for {HANGS_S:.0f} s: the medium hangs"))
        return True

    @property
    def hangs(self) -> bool:
        """Whether it was given up, and reads are still under way."""
        return self._given_up and self._thread.is_alive()

    def wait(self, jobs: Collection[DirectRead]) -> None:
        """Returns once these jobs are over."""
        for job in jobs:
            while not job.ended.wait(_LOOK_S):
                self.poll()

    def close(self) -> None:
        """Ends every job, well or badly. Where reads hang, what they use stays."""
        with self._lock:
            self._closed = True
            jobs = list(self._jobs)
        self.wait(jobs)
        self._work.put(None)
        if self.hangs:
            return
        self._thread.join()
        self._files.close()
        self._stage.close()

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._given_up and (work := self._work.get()) is not None:
            with contextlib.suppress(Exception):  # of a `then`; those behind it do not wait for ever
                work()

    @contextlib.contextmanager
    def _medium(self) -> Iterator[None]:
        """While something is waited for that only the medium can give.

        Raises:
            _Hangs: it was given up meanwhile.
        """
        self._waits_since = self._now()
        try:
            yield
        finally:
            with self._lock:
                self._waits_since = None
        if self._given_up:
            raise _Hangs

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
                        with self._medium():
                            reads[half].append(self._files.read(extent.path, extent.offset, extent.size_bytes, place))
                if number:
                    before = firsts[number - 1]
                    part = runs.take(fragments, slice(*np.searchsorted(block, [before, before + rows])))
                    start = np.uint64(before * self._block_bytes)
                    part = Fragments(part.kv, part.pool - start, part.size)
                    self._finish((number - 1) % HALVES, extents[before : before + rows], reads, part, mark)
        finally:
            for read in [read for several in reads for read in several]:
                with contextlib.suppress(Exception), self._medium():  # its end matters, its bytes are of no use
                    read.get()
            for half in range(HALVES):
                stage.settle(half)
            self._files.tidy()

    def _finish(
        self, half: int, extents: Sequence[DiskExtent], reads: list[list[Read]], fragments: Fragments, mark: Any
    ) -> None:
        """Waits for the reads of a half, checks it and empties it."""
        while reads[half]:
            with self._medium():
                size_bytes = reads[half].pop(0).get()
            if size_bytes != self._block_bytes:
                raise Damage("a file on the disk is shorter than the blocks in it")
        for extent, check in zip(extents, self._stage.checks(half, len(extents)), strict=True):
            if check != extent.check:
                raise Damage(f"the block at {extent.offset} in {extent.path} is not what was stored")
        self._stage.scatter(half, fragments, mark)
        self.read_bytes += len(extents) * self._block_bytes
