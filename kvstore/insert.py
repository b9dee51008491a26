"""insert(): a thread that copies blocks into the pool while the caller goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.blocks import KEY_BYTES_MAX, Namespace
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NoMapping, SizeMismatch
from kvstore.remote import RemoteArena
from kvstore.threads import started_pool

if TYPE_CHECKING:
    from kvstore.client import Client
    from kvstore.engine_calls import Reservation

#: Bytes in one round of reserve, copy, commit. Rounds overlap, but calls take the interpreter and a core away from the
#: copy: a round is long (10 ms) against a call (0.5 ms).
_ROUND_BYTES: Final = 128 << 20
#: Most blocks in one round, for small blocks.
_ROUND_BLOCKS: Final = 1024
#: From here on two threads copy a round: one does not reach the memory's limit, and the calls around the copy cost a
#: millisecond.
_SHARED_BYTES: Final = 32 << 20
#: Tickets that may wait. The blocks belong to the caller until then, so this bounds what a forgetful caller keeps
#: alive.
_TICKETS_MAX: Final = 1024
#: How long a store waits for a pool that is being populated; after that it is refused.
_POPULATING_S: Final = 5.0

Bytes = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, slots=True)
class InsertResult:
    """What became of the blocks of one insert.

    Attributes:
        stored: How many are in the pool now because of it.
        exists: How many were there already.
        refused: How many were not stored, by reason: `pinned`, `share`, `populating`, `too_large`, `draining`,
            `queue_full`, `closed`, `no_thread`, or the name of an error such as `DaemonUnavailable`. What follows a
            refused block is refused with it, since a block without those before it answers nothing.
    """

    stored: int
    exists: int
    refused: dict[str, int]


class Ticket:
    """An insert under way."""

    def __init__(self) -> None:
        self._future: Future[InsertResult] = Future()

    @property
    def done(self) -> bool:
        """Whether the blocks may be changed again."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> InsertResult:
        """Waits until the insert is over. None: as long as it takes.

        Raises:
            DeadlineExceeded: it is not; it goes on all the same.
        """
        try:
            return self._future.result(timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"the insert is still under way after {timeout_s} s; it goes on") from None

    def settle(self, result: InsertResult) -> None:
        """For whoever made the ticket: the insert is over."""
        self._future.set_result(result)


@dataclasses.dataclass(slots=True)
class _Job:
    keys: Sequence[bytes]
    blocks: Sequence[Bytes]
    namespace: Namespace
    kv_group: int
    ticket: Ticket


class Inserter:
    """The thread behind Client.insert, and where calls go that may not be made where they come up."""

    def __init__(self, client: Client) -> None:
        self._client = client
        # SimpleQueue.put is reentrant: a view may be dropped inside the garbage collector, at any point of any thread.
        self._queue: queue.SimpleQueue[_Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the two below
        self._closed = False
        self._thread: threading.Thread | None = None

    def insert(
        self, keys: Sequence[bytes], blocks: Sequence[Any], namespace: Namespace | None, kv_group: int
    ) -> Ticket:
        """See Client.insert."""
        if namespace is None:
            raise InvalidRequest("this client has no namespace: connect(..., namespace=kvstore.Namespace(...))")
        if not 0 <= kv_group < len(namespace.group_bytes):
            raise InvalidRequest(f"kv_group is {kv_group}: this namespace has {len(namespace.group_bytes)} groups")
        keys = list(keys)
        arrays = self._checked(keys, blocks, namespace.group_bytes[kv_group])
        ticket = Ticket()
        if not keys:
            ticket.settle(InsertResult(0, 0, {}))
        elif self._queue.qsize() >= _TICKETS_MAX:
            ticket.settle(InsertResult(0, 0, {"queue_full": len(keys)}))
        else:
            try:
                if not self._put(_Job(keys, arrays, namespace, kv_group, ticket)):
                    ticket.settle(InsertResult(0, 0, {"closed": len(keys)}))
            except RuntimeError:  # there is no thread to be had for it now
                ticket.settle(InsertResult(0, 0, {"no_thread": len(keys)}))
        return ticket

    def call_soon(self, call: Callable[[], None]) -> None:
        """Makes a call in the thread. What it raises is dropped. After close() nothing is called any more."""
        if self._closed:
            return  # and not kept either: what it refers to may be the last thing that keeps the mapping
        self._queue.put(call)
        # Without the lock, which the thread that got here may hold: a thread that is not there has nothing to release
        # for, but views may come from select alone.
        if self._thread is None:
            threading.Thread(target=self._start, name="kvstore-insert-start", daemon=True).start()

    def close(self, timeout_s: float) -> None:
        """Finishes what is queued, up to timeout_s."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
        self._queue.put(None)
        if thread is not None:
            thread.join(timeout_s)

    def _put(self, job: _Job) -> bool:
        self._start()  # first: without a thread the job would wait for ever, or be done when nobody knows of it
        with self._lock:
            if self._closed:
                return False
            self._queue.put(job)
        return True

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="kvstore-insert", daemon=True)
                thread.start()
                self._thread = thread

    @staticmethod
    def _checked(keys: Sequence[bytes], blocks: Sequence[Any], block_bytes: int) -> list[Bytes]:
        """The blocks as arrays of bytes, without a copy."""
        if len(keys) != len(blocks):
            raise InvalidRequest(f"{len(keys)} keys and {len(blocks)} blocks: each key needs one block")
        for key in keys:
            if not isinstance(key, bytes) or not 1 <= len(key) <= KEY_BYTES_MAX:
                raise InvalidRequest(f"key {key!r:.80}: keys are bytes, 1 to {KEY_BYTES_MAX} of them")
        arrays = []
        for index, block in enumerate(blocks):
            try:
                view = memoryview(block)
                array = np.frombuffer(view, dtype=np.uint8) if view.c_contiguous else None
            except (TypeError, ValueError) as error:
                raise InvalidRequest(f"block {index} is no buffer of plain bytes: {error}") from error
            if "O" in view.format:  # pointers of this process
                raise InvalidRequest(f"block {index} is an array of objects: only plain bytes can be stored")
            if array is None:
                raise InvalidRequest(f"block {index} is not C-contiguous: copy it first")
            if array.nbytes != block_bytes:
                raise SizeMismatch(
                    f"block {index} has {array.nbytes} bytes and blocks of this group have {block_bytes}"
                )
            arrays.append(array)
        return arrays

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # Calls of the next and of the last round overlap with the copying of this one, in which a third may help.
        calls: ThreadPoolExecutor | None = None
        while (job := self._queue.get()) is not None:
            if isinstance(job, _Job):
                try:
                    calls = calls or started_pool(3, "kvstore-insert-call")
                    result = self._insert(job, calls)
                except Exception as error:  # a defect here must not leave every later ticket waiting for ever
                    result = InsertResult(0, 0, {type(error).__name__: len(job.keys)})
                job.ticket.settle(result)
            else:
                with contextlib.suppress(KVStoreError):
                    job()
            del job  # the caller's blocks are not kept until the next one
        if calls is not None:
            calls.shutdown()

    def _insert(self, job: _Job, calls: ThreadPoolExecutor) -> InsertResult:
        counts: Counter[str] = Counter()
        refused: Counter[str] = Counter()
        step = max(1, min(_ROUND_BLOCKS, _ROUND_BYTES // max(1, job.blocks[0].nbytes)))
        starts = range(0, len(job.keys), step)
        commits: deque[Future[None]] = deque()
        coming: Future[Reservation] | None = None
        settled = 0  # keys whose fate is known or in a commit
        try:
            for start in starts:
                keys = job.keys[start : start + step]
                slots = coming.result() if coming is not None else self._reserve(keys, job)
                coming = None
                if start + step < len(job.keys) and slots.shortfall is None:
                    coming = calls.submit(self._reserve, job.keys[start + step : start + 2 * step], job)
                missing = np.flatnonzero(~slots.exists)
                got = len(slots.offsets)
                # What exists after the first block that got no slot cannot be told apart from what got none: stop
                # there.
                end = len(keys) if got == len(missing) else int(missing[got])
                counts["exists"] += int(slots.exists[:end].sum())
                wanted = missing[missing < end]
                self._copy(slots, [job.blocks[start + index] for index in wanted], calls)
                parent = job.keys[start + int(wanted[0]) - 1] if len(wanted) and start + int(wanted[0]) > 0 else None
                committing = (slots, [keys[index] for index in wanted], parent, job.kv_group, counts)
                settled = start + end
                if coming is None:  # nothing is left to copy meanwhile, and handing over to a thread takes time
                    self._commit(*committing)
                else:
                    commits.append(calls.submit(self._commit, *committing))
                if slots.shortfall is not None:
                    refused[slots.shortfall] += len(job.keys) - settled
                    settled = len(job.keys)
                    break
            for commit in commits:
                commit.result()
        except KVStoreError as error:
            if coming is not None:
                with contextlib.suppress(KVStoreError):
                    self._client.give_up(coming.result())
            # Those that are under way still count, and the caller may change its blocks once the ticket is done.
            wait(commits)
            done = counts["stored"] + counts["exists"] + sum(refused.values())
            refused[type(error).__name__] += len(job.keys) - done
        return InsertResult(counts["stored"], counts["exists"], dict(refused))

    def _reserve(self, keys: Sequence[bytes], job: _Job) -> Reservation:
        return self._client.reserve_slots(len(keys), job.kv_group, _POPULATING_S, keys, job.namespace)[0]

    def _copy(self, slots: Reservation, blocks: Sequence[Bytes], calls: ThreadPoolExecutor) -> None:
        arena = self._client.arena
        if isinstance(arena, RemoteArena) and arena.generation == slots.generation:
            # From where the caller has them; no copy is made here.
            try:
                arena.send(slots.offsets, slots.epochs, blocks)
            except KVStoreError:
                self._client.give_up(slots)
                raise
            return
        if arena is None or arena.generation != slots.generation:
            if arena is None and self._client.attached:
                self._client.give_up(slots)
                raise NoMapping(
                    f"{self._client.endpoint} is reached over the network, and this client has no memory for its "
                    "blocks: connect with staging_bytes, or on the daemon's host (unix:PATH)"
                )
            return  # the daemon was restarted: the commit will say so
        pool = arena.as_numpy()
        work = zip(slots.offsets.tolist(), blocks, strict=True)

        def copy() -> None:
            for offset, block in work:  # each pair goes to one thread: an iterator of C is one step
                np.copyto(pool[offset : offset + block.nbytes], block)

        nbytes = sum(block.nbytes for block in blocks)
        helper = calls.submit(copy) if nbytes >= _SHARED_BYTES and len(os.sched_getaffinity(0)) > 1 else None
        try:
            copy()
        finally:
            if helper is not None and not helper.cancel():  # not begun, for calls that are in its way: nothing is left
                helper.result()  # nothing is committed, and no caller may change its blocks, before both are through

    def _commit(
        self, slots: Reservation, keys: Sequence[bytes], parent: bytes | None, kv_group: int, counts: Counter[str]
    ) -> None:
        if not keys:
            return
        try:
            outcomes = self._client.commit_slots(
                slots.generation, slots.offsets, slots.epochs, keys, kv_group, parent
            ).tolist()
        except KVStoreError:
            # They may have been committed all the same, and only the answer was lost.
            self._client.give_up(slots)
            raise
        counts["stored"] += outcomes.count(1)
        counts["exists"] += outcomes.count(2)
        if lost := outcomes.count(3):
            self._client.give_up(slots)  # another namespace was opened meanwhile, or the session ended
            raise KVStoreError(f"the daemon does not know {lost} slots that it gave to this session")
