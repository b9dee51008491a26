"""LookupBuffer: insert KV caches under their tokens, take one out by a prefix."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from kvstore.buffer.prefix import Answer, Prefixes, is_prefix, selected
from kvstore.buffer.records import Draft, Head, Lost, Records, namespace_of
from kvstore.buffer.slots import Refused
from kvstore.client import connect
from kvstore.errors import ClientClosed, Damage, InvalidRequest, KVStoreError, LimitExceeded, RetryLater
from kvstore.following import Following, Spot
from kvstore.insert import InsertResult, Ticket
from kvstore.tensors import Library

#: Longest single wait at the daemon; a call that waits longer asks again. Far below the daemon's own limit.
_WAIT_S: Final = 60.0
#: Between two attempts to store in a pool that is full.
_PAUSE_S: Final = 0.05
#: Longest single wait for room; between two of them it is seen whether the buffer was closed.
_ROOM_S: Final = 1.0
#: How long an entry that could not be brought up is left alone; the daemon tries no sooner (RETRY_S in transfers).
#: Nothing tells when a disk or Redis is well again, so who waits looks again after this long.
_ABSENT_S: Final = 5.0
#: Between two looks at a daemon that stops, which lets nobody wait.
_DRAINING_S: Final = 0.1
#: How old the list may be that an entry is taken from.
#: Within that time one that was given back may be passed over for a younger one.
_FRESH_S: Final = 0.01
#: Entries and bytes that are stored in one go.
_BATCH_MAX: Final = 64
_BATCH_BYTES: Final = 64 << 20
_KEY_BYTES: Final = 16
_TOKENS, _ROI = 0, 1

Entry = list[Any]


@dataclasses.dataclass(slots=True)
class _Job:
    draft: Draft
    ticket: Ticket


class _Draining:
    """The daemon is stopping, and waits for slots that are held."""


class _Listed(NamedTuple):
    """What nobody had claimed, at one moment.

    Attributes:
        generation: A place means something else in another life of the pool.
        seen: Number of the last change that is in it.
        spots: In the order in which they came.
    """

    generation: bytes
    seen: int
    spots: list[tuple[bytes, Spot]]


class LookupBuffer:
    """A named buffer of KV caches, shared by all processes that open it under its name.

    What vLLM's lookup buffer of old promised, over the daemon:

    * ``insert(input_tokens, roi, key, value, hidden)`` puts an entry in and does not block.
    * ``drop_select(input_tokens, roi)`` waits for an entry that matches, takes it out and returns it.
    * `roi` is a mask that selects tokens; None selects all. An entry matches a query if, of their selected tokens, one
      is a prefix of the other and at least one token is shared: so the query may be longer or shorter than what was
      stored. Of several that match, the one that was inserted first is taken. A query without tokens
      (``drop_select(None, None)``) takes whatever is there; an entry without tokens answers only such a query.
    * Many may wait for one entry, and exactly one gets it. If that one dies, or fails, before it has all bytes, the
      entry stays and the next one gets it. An entry that leaves was copied whole before: half of one is never seen.

    Entries are cached, not kept: where the pool needs the room for others, the coldest leave. What the daemon's disk or
    Redis has is found there, after a restart of the daemon on its disk; who waits for what is nowhere goes on waiting.
    Entries outlive the process that inserted them.

    Tensors may be of numpy or torch, of any dtype and shape, or None. They come back as what they were (torch tensors
    in host memory), or as `library` says.

    Safe from any thread. It does not survive a fork.
    """

    def __init__(
        self,
        name: str,
        endpoint: str | None = None,
        *,
        max_bytes: int = 1 << 30,
        library: Library | None = None,
        copy_down: bool = True,
        **options: Any,
    ) -> None:
        """Opens a buffer; it need not exist.

        Args:
            name: Under which processes meet.
            endpoint: Of the daemon, as for kvstore.connect.
            max_bytes: Most bytes of the pool that what this object inserted may take until it is taken out. More waits
                in the background, and as much as that again may wait.
            library: What tensors come back as: "numpy" or "torch"; None: as they were inserted.
            copy_down: Whether entries are copied to the daemon's disk and Redis, and found there when they have left
                the pool. All who open the buffer have to agree.
            options: Others of kvstore.connect, such as `token`, `tls` and `timeout_s`.

        Raises:
            DaemonUnavailable, CallerMistake: as kvstore.connect.
        """
        if max_bytes < 1:
            raise InvalidRequest(f"max_bytes is {max_bytes}: it must be at least 1")
        self._client = connect(
            endpoint, namespace_of("buffer", name, copy_down=copy_down), **{"client_name": f"buffer:{name}", **options}
        )
        self._records = Records(self._client)
        self._library = library
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards the five below
        self._list = Following()
        self._told = b""  # generation that the list is of
        self._looked = float("-inf")  # when it was brought up to date
        self._heads: dict[bytes, Head] = {}  # of entries in the list
        self._absent: dict[bytes, float] = {}  # entries in the list that could not be had, and until when
        #: What the thread is to store; _Draining: the daemon stops; None: this was all.
        self._jobs: queue.SimpleQueue[_Job | _Draining | None] = queue.SimpleQueue()
        self._client.when_draining(functools.partial(self._jobs.put, _Draining()))
        self._waiting_bytes = 0  # guarded by the lock
        # Of the thread below:
        self._stored: dict[bytes, int] = {}  # bytes of what this object inserted, by key
        self._stored_bytes = 0
        self._room_seen = 0
        self._together = _BATCH_MAX  # most entries that are stored at once now
        self._closing = False  # guarded by the lock
        self._hurry = threading.Event()  # closing takes too long: leave what is left
        self._thread = threading.Thread(target=self._run, name="kvstore-buffer", daemon=True)
        self._thread.start()

    # -- inserting -------------------------------------------------------------------------------------------------

    def insert(self, input_tokens: Any, roi: Any, key: Any, value: Any, hidden: Any) -> Ticket:
        """Puts an entry in. Returns at once; a thread of the buffer copies it.

        Args:
            input_tokens: Integers, one axis; None: only queries without tokens find it.
            roi: Mask over the tokens: booleans, or numbers above 0.5; None: all of them.
            key, value, hidden: Tensors or None. They are read until the ticket is done: do not change them before.
                (Those that are not contiguous, or not in host memory, are copied here and now.)

        Returns:
            A ticket; its result has ``stored == 1``, or the reason in ``refused`` (`queue_full`: as much as max_bytes
            waits already).

        Raises:
            InvalidRequest: tokens or mask of another shape or type, or something that is no tensor.
            LimitExceeded: the entry alone is larger than max_bytes.
            ClientClosed: the buffer was closed.
        """
        tokens = selected(input_tokens, roi)
        notes = {} if tokens is None else Prefixes(tokens).notes()
        job = _Job(Draft([input_tokens, roi, key, value, hidden], notes), Ticket())
        need = job.draft.nbytes
        if need > self._max_bytes:
            raise LimitExceeded(f"an entry of {need} bytes in a buffer of {self._max_bytes} (max_bytes)")
        with self._lock:
            if self._closing:
                raise ClientClosed("this buffer was closed")
            if self._waiting_bytes + need > self._max_bytes:
                job.ticket.settle(InsertResult(0, 0, {"queue_full": 1}))
            else:
                self._waiting_bytes += need
                self._jobs.put(job)
        return job.ticket

    def _run(self) -> None:
        batch: deque[_Job] = deque()
        ended = False
        while batch or not ended:
            # What came meanwhile goes along: calls cost the same for one entry and for many.
            while not ended and (not batch or not self._jobs.empty()):
                job = self._jobs.get()
                ended = job is None
                if isinstance(job, _Draining):
                    self._records.give_stock_back()
                elif job is not None:
                    batch.append(job)
            if not batch:
                continue
            try:
                done, result = self._store(batch)
            except Exception as error:  # a defect here must not leave every later ticket waiting for ever
                done, result = len(batch), InsertResult(0, 0, {type(error).__name__: 1})
            for _ in range(done):
                job = batch.popleft()
                with self._lock:
                    self._waiting_bytes -= job.draft.nbytes
                job.ticket.settle(result)
                del job  # the caller's tensors are not kept until the next one

    def _store(self, batch: Sequence[_Job]) -> tuple[int, InsertResult]:
        """Stores entries of the front, as many as go together. Returns how many, and what became of each; or none, and
        it has waited for a change.
        """
        if self._hurry.is_set():
            return len(batch), InsertResult(0, 0, {"closed": 1})
        fitting: list[_Job] = []
        size = 0
        for job in batch:
            size += job.draft.nbytes
            if self._stored_bytes + size > self._max_bytes or (fitting and size > _BATCH_BYTES):
                break
            fitting.append(job)
            if len(fitting) == self._together:
                break
        if not fitting:
            self._await_room()
            return 0, InsertResult(0, 0, {})
        # In order of time, so that also what is found below the pool after a restart is found in that order.
        keys = [time.time_ns().to_bytes(8, "big") + secrets.token_bytes(_KEY_BYTES - 8) for _ in fitting]
        try:
            self._records.store(*((key, job.draft) for key, job in zip(keys, fitting, strict=True)), wait=True)
        except Refused as refused:
            if not refused.passing:
                return 1, InsertResult(0, 0, dict.fromkeys(refused.reasons, 1))
            if len(fitting) == 1:
                self._hurry.wait(_PAUSE_S)
            self._together = max(1, len(fitting) // 2)
            return 0, InsertResult(0, 0, {})
        except KVStoreError as error:
            return len(fitting), InsertResult(0, 0, {type(error).__name__: 1})
        self._together = _BATCH_MAX
        for key, job in zip(keys, fitting, strict=True):
            self._stored[key] = job.draft.nbytes
            self._stored_bytes += job.draft.nbytes
        return len(fitting), InsertResult(1, 0, {})

    def _await_room(self) -> None:
        """Takes note of what was taken out; waits for it, the second time."""
        try:
            changes = self._client.follow(self._room_seen, _ROOM_S, wanted="going")
        except RetryLater:
            self._hurry.wait(_PAUSE_S)
            return
        self._room_seen = changes.changes
        gone = [key for key in self._stored if key not in changes.spots] if changes.whole else changes.gone
        for key in gone:
            self._stored_bytes -= self._stored.pop(key, 0)

    # -- taking out ------------------------------------------------------------------------------------------------

    def drop_select(self, input_tokens: Any = None, roi: Any = None, timeout_s: float | None = None) -> Entry | None:
        """Waits for an entry that matches, takes it out of the buffer, and returns it.

        Args:
            input_tokens, roi: See the class. Both None: any entry.
            timeout_s: How long to wait; 0: only what is there now; None: as long as it takes.

        Returns:
            ``[input_tokens, roi, key, value, hidden]`` as they were inserted, copied; None where nothing matched in
            time.

        Raises:
            InvalidRequest: tokens or mask of another shape or type; or a tensor that cannot be made here (its library
                or dtype is missing): the entry stays.
            RetryLater: the daemon is away. Where it went away at the very end, the entry may be gone.
        """
        if timeout_s is not None and timeout_s < 0:
            raise InvalidRequest(f"timeout_s is {timeout_s}: give seconds, 0 for what is there now, None for no limit")
        tokens = selected(input_tokens, roi)
        query = None if tokens is None else Prefixes(tokens)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        listed = self._recent()  # no call is needed where something matches that was listed just now
        looked = not listed.spots
        if looked:
            listed = self._look(0.0, listed)
        while True:
            for key, spot, head in self._known(listed):
                if self._answers(head, query) and (entry := self._take(key, spot, head, query)) is not None:
                    return entry
            wait_s = _WAIT_S if deadline is None else min(_WAIT_S, deadline - time.monotonic())
            if not looked:
                wait_s, looked = 0.0, True
            elif wait_s <= 0:
                return None
            if self._left_alone(listed):
                wait_s = min(wait_s, _ABSENT_S)
            if self._client.draining:
                time.sleep(min(wait_s, _DRAINING_S))
            listed = self._look(wait_s, listed)

    def _left_alone(self, listed: _Listed) -> bool:
        """Whether entries are among these that could not be had."""
        with self._lock:
            return any(key in self._absent for key, _ in listed.spots)

    def _recent(self) -> _Listed:
        """What nobody had claimed a moment ago."""
        with self._lock:
            if time.monotonic() - self._looked > _FRESH_S:
                return _Listed(self._told, self._list.seen, [])
            return self._unclaimed()

    def _unclaimed(self) -> _Listed:
        spots = [item for item in self._list.spots.items() if not item[1].claimed]
        return _Listed(self._told, self._list.seen, spots)

    def _look(self, wait_s: float, known: _Listed) -> _Listed:
        """What nobody has claimed; waits until that may be more than what the caller knows."""
        with self._lock:
            seen = self._list.seen
            if wait_s > 0 and (self._told, seen) != known[:2]:
                return self._unclaimed()  # another thread was told of it: nobody will be told again
        changes = self._client.follow(seen, wait_s, wanted="coming")
        with self._lock:
            if changes.generation != self._told or changes.changes > self._list.seen:  # another thread may be ahead
                self._told = changes.generation
                self._list.take(changes)
                for key in changes.gone if not changes.whole else self._heads.keys() - self._list.spots.keys():
                    self._heads.pop(key, None)
            self._looked = time.monotonic()
            return self._unclaimed()

    def _known(self, listed: _Listed) -> Iterator[tuple[bytes, Spot, Head]]:
        """The heads of entries, read where they are new. Those that have left the pool come up again, all at once."""
        brought: dict[bytes, Head] | None = None
        for place, (key, spot) in enumerate(listed.spots):
            with self._lock:
                head = self._heads.get(key)
            if head is None:
                with contextlib.suppress(Damage):
                    head = self._records.head_at(spot, listed.generation)
            if head is None:
                if brought is None:
                    brought = self._brought([key for key, _ in listed.spots[place:]])
                head = brought.get(key)
            if head is not None:
                with self._lock:
                    if key in self._list.spots:
                        self._heads[key] = head
                yield key, spot, head

    def _brought(self, keys: list[bytes]) -> dict[bytes, Head]:
        """Heads by their names, out of whichever tier they rest in. What cannot be had is not asked for again soon."""
        now = time.monotonic()
        with self._lock:
            known = self._heads.keys() | {key for key, until in self._absent.items() if until > now}
        keys = [key for key in keys if key not in known]
        present = self._client.present(keys)
        left = [key for key, there in zip(keys, present, strict=True) if there]
        heads: dict[bytes, Head] = {}
        while left:
            found = self._records.heads(left)
            heads.update((key, head) for key, head in zip(left, found, strict=False) if head is not None)
            del left[: len(found) + 1]  # the run ends at one that was taken out meanwhile
        with self._lock:
            self._absent = {key: until for key, until in self._absent.items() if until > now}
            self._absent.update((key, now + _ABSENT_S) for key in keys if key not in heads)
            # All of them, for whoever asks next: the caller may stop at the first that answers.
            self._heads.update((key, head) for key, head in heads.items() if key in self._list.spots)
        return heads

    def _answers(self, head: Head, query: Prefixes | None) -> bool:
        if query is None:
            return True
        if not head.notes:
            return False
        answer = query.answered_by(head.notes)
        if answer is Answer.READ:
            with contextlib.suppress(Lost):
                stored = selected(*self._records.read(head, "numpy", only=[_TOKENS, _ROI]))
                return stored is not None and is_prefix(stored, query.tokens)
            return True  # to be taken and thrown away
        return answer is Answer.YES

    def _take(self, key: bytes, spot: Spot, head: Head, query: Prefixes | None) -> Entry | None:
        """One attempt to be the winner; None where somebody else was, or the entry is not whole any more."""
        if spot.resting and not self._records.heads([key]):  # brings it up
            with self._lock:
                self._absent[key] = time.monotonic() + _ABSENT_S
            return None
        lease = self._client.claim([key])
        # What others do to it later is told by the next look.
        with self._lock:
            if lease.id:
                self._list.spots.pop(key, None)
            elif self._list.spots.get(key) is spot:  # else: there is later news of it, that it was given back say
                self._list.spots[key] = spot._replace(claimed=True)
        if not lease.id:
            return None
        entry: Entry | None = None
        try:
            entry = self._records.read(head, self._library)
            stored = selected(entry[_TOKENS], entry[_ROI])
            if query is not None and (stored is None or not is_prefix(stored, query.tokens)):
                self._client.release([lease])
                return None
        except Lost:
            entry = None  # what is left of it is removed, and nobody finds it again
        except BaseException:
            with contextlib.suppress(RetryLater):
                self._client.release([lease])
            raise
        if not self._client.release([lease], remove=True):
            raise RetryLater(
                "the daemon went away before it confirmed that the entry was taken out: ask again, it may be there"
            )
        self._records.delete_parts(head)
        return entry

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float = 10.0) -> None:
        """Finishes what insert() was given, up to timeout_s, and leaves. The entries stay. May be called twice."""
        with self._lock:
            self._closing = True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        self._hurry.set()
        self._thread.join()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
