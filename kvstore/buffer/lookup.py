"""LookupBuffer: insert KV caches under their tokens, take one out by a prefix."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import secrets
import threading
import time
from types import TracebackType
from typing import Any, Final, Self

from kvstore.buffer.prefix import Answer, Prefixes, Tokens, is_prefix, selected
from kvstore.buffer.records import Draft, Head, Lost, Records, Refused, namespace_of
from kvstore.client import connect
from kvstore.errors import ClientClosed, InvalidRequest, KVStoreError, LimitExceeded
from kvstore.insert import InsertResult, Ticket
from kvstore.tensors import Library

#: Longest single wait at the daemon; a call that waits longer asks again. Far below the daemon's own limit.
_WAIT_S: Final = 60.0
#: Between two attempts to store in a pool that is full.
_PAUSE_S: Final = 0.05
_KEY_BYTES: Final = 16
_TOKENS, _ROI = 0, 1

Entry = list[Any]


@dataclasses.dataclass(slots=True)
class _Job:
    draft: Draft
    ticket: Ticket


class _GiveBack(Exception):  # no error: leaves the with-block of a drop_select so that the entry stays
    pass


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

    Entries are cached, not kept: where the pool needs the room for others, the coldest leave, and whoever waits for
    them goes on waiting. They outlive the process that inserted them.

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
        **options: Any,
    ) -> None:
        """Opens a buffer; it need not exist.

        Args:
            name: Under which processes meet.
            endpoint: Of the daemon, as for kvstore.connect.
            max_bytes: Most bytes of the pool that what this object inserted may take until it is taken out. More waits
                in the background, and as much as that again may wait.
            library: What tensors come back as: "numpy" or "torch"; None: as they were inserted.
            options: Others of kvstore.connect, such as `token`, `tls` and `timeout_s`.

        Raises:
            DaemonUnavailable, CallerMistake: as kvstore.connect.
        """
        if max_bytes < 1:
            raise InvalidRequest(f"max_bytes is {max_bytes}: it must be at least 1")
        self._client = connect(endpoint, namespace_of("buffer", name), **{"client_name": f"buffer:{name}", **options})
        self._records = Records(self._client)
        self._library = library
        self._max_bytes = max_bytes
        self._heads: dict[bytes, Head] = {}  # of the entries that were listed last; guarded by the lock below
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._waiting_bytes = 0  # guarded by the lock
        self._stored: dict[bytes, int] = {}  # bytes of what this object inserted, by key; of the thread below
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
        while (job := self._jobs.get()) is not None:
            try:
                result = self._store(job.draft)
            except KVStoreError as error:
                result = InsertResult(0, 0, {type(error).__name__: 1})
            with self._lock:
                self._waiting_bytes -= job.draft.nbytes
            job.ticket.settle(result)
            del job  # the caller's tensors are not kept until the next one

    def _store(self, draft: Draft) -> InsertResult:
        key = secrets.token_bytes(_KEY_BYTES)
        seen = 0
        while True:
            # The first look answers at once, later ones when something was taken out (or came).
            if self._hurry.is_set():
                return InsertResult(0, 0, {"closed": 1})
            if sum(self._stored.values()) + draft.nbytes > self._max_bytes:
                seen, listed = self._client.watch(seen, min(_WAIT_S, 1.0))
                self._stored = {each: size for each, size in self._stored.items() if each in listed}
                continue
            try:
                self._records.store_parts(draft)
            except Refused as refused:
                if not refused.passing:
                    return InsertResult(0, 0, dict.fromkeys(refused.reasons, 1))
                self._hurry.wait(_PAUSE_S)
                continue
            result = self._records.show(key, draft)
            if not result.stored:
                self._records.delete_parts(draft.head)
                return result
            self._stored[key] = draft.nbytes
            return result

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
        seen, wait_s = 0, 0.0  # the first look does not wait
        while True:
            seen, listed = self._client.watch(seen, wait_s)
            for key, head in self._known(listed):
                if not listed[key] and self._answers(head, query):
                    entry = self._take(key, head, query)
                    if entry is not None:
                        return entry
            wait_s = _WAIT_S if deadline is None else min(_WAIT_S, deadline - time.monotonic())
            if wait_s <= 0:
                return None

    def _known(self, listed: dict[bytes, bool]) -> list[tuple[bytes, Head]]:
        """The heads of the entries that are listed, read where they are new; in the order of the list."""
        with self._lock:
            heads = {key: self._heads[key] for key in listed if key in self._heads}
        new = [key for key in listed if key not in heads]
        while new:
            found = self._records.heads(new)
            heads.update((key, head) for key, head in zip(new, found, strict=False) if head is not None)
            del new[: len(found) + 1]  # the run ends at one that was taken out meanwhile
        with self._lock:
            self._heads = heads
        return [(key, heads[key]) for key in listed if key in heads]

    def _answers(self, head: Head, query: Prefixes | None) -> bool:
        if query is None:
            return True
        if not head.notes:
            return False
        answer = query.answered_by(head.notes)
        if answer is Answer.READ:
            with contextlib.suppress(Lost):
                stored = self._tokens_of(head)
                return stored is not None and is_prefix(stored, query.tokens)
            return True  # to be taken and thrown away
        return answer is Answer.YES

    def _tokens_of(self, head: Head) -> Tokens | None:
        return selected(*self._records.read(head, "numpy", only=[_TOKENS, _ROI]))

    def _take(self, key: bytes, head: Head, query: Prefixes | None) -> Entry | None:
        """One attempt to be the winner; None where somebody else was, or the entry is not whole any more."""
        entry: Entry | None = None
        try:
            with self._client.drop_select([key], 0.0) as found:
                if not len(found):
                    return None
                try:
                    entry = self._records.read(head, self._library)
                    if query is not None:
                        stored = self._tokens_of(head)
                        if stored is None or not is_prefix(stored, query.tokens):
                            raise _GiveBack
                except Lost:
                    entry = None  # what is left of it is removed, and nobody finds it again
        except _GiveBack:
            return None
        with self._lock:
            self._heads.pop(key, None)
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
