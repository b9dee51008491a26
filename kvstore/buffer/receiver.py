"""The receiving end of a pipe; the protocol is described in pipe.py."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from itertools import takewhile
from typing import Any, Final, NoReturn

from kvstore.buffer.records import HEADS, Head, Lost, Records
from kvstore.buffer.slots import Refused
from kvstore.buffer.stream import PAUSE_S, RECEIVER, Listed, Stream, left_of, streams_of
from kvstore.client import Client
from kvstore.engine_calls import Lease
from kvstore.errors import Damage, DeadlineExceeded, EndOfPipe, KVStoreError, PipeBroken, RetryLater
from kvstore.following import Following
from kvstore.tensors import Library

#: Heads that are read at once, and what was received before its blocks are removed in one go.
_AHEAD_MAX: Final = 32
_DONE_MAX: Final = 32
_DONE_BYTES_MAX: Final = 8 << 20
#: Longest wait for another receiver's end before this one sees to it that there is an end to wait for.
_CLAIM_S: Final = 5.0


class _Leaving(Exception):  # no error: leaves a drop_select so that its block stays, for the next receiver
    pass


class Receiver:
    """Takes one stream after the other. Not safe from several threads."""

    def __init__(self, client: Client, library: Library | None) -> None:
        self._client = client
        self._records = Records(client)
        self._library = library
        self._end = contextlib.ExitStack()  # holds the claim on this end of the pipe
        self._generation: bytes | None = None
        self._stream: Stream | None = None
        self._pins: list[Lease] = []  # on the mark of that stream
        self._next = 0
        self._ahead: deque[Head | None] = deque()  # of the next tensors
        self._done: list[Head] = []  # of those that were received and whose blocks are still there
        self._done_bytes = 0
        self._list = Following()
        self._told = b""  # generation that the list is of

    def receive(self, deadline: float | None, out: Any) -> Any:
        """See Pipe.recv_tensor."""
        self._hold_end(deadline)
        looked = False
        while True:
            # Sessions end only with the daemon or the connection: what was claimed before is not held any more.
            if self._client.generation != self._generation:
                self._restart()
            stream = self._stream or self._begin()
            if stream is not None:
                if stream.head(self._next) in self._listed:
                    return self._take(stream, deadline, out)
                if any(number > self._next for number in stream.heads(self._listed)):
                    self._break(stream, f"tensor {self._next} is gone, and a later one is not")
                if not stream.sender_lives(self._listed):
                    self._break(
                        stream, f"its sender ended without closing it, after {self._next} tensors that are known of"
                    )
            left = left_of(deadline)
            if looked and left <= 0:
                raise DeadlineExceeded("nothing came through the pipe in time")
            self._look(left)
            looked = True

    @property
    def _listed(self) -> Listed:
        return self._list.spots

    def _look(self, wait_s: float) -> None:
        changes = self._client.follow(self._list.seen, wait_s, kinds=b"HSL")
        self._list.take(changes)
        self._told = changes.generation

    def leave(self) -> None:
        """Makes room for another receiver."""
        with contextlib.suppress(KVStoreError):
            self._tidy_up()
        with contextlib.suppress(KVStoreError):
            self._end.__exit__(_Leaving, _Leaving(), None)

    def _hold_end(self, deadline: float | None) -> None:
        while self._generation is None:
            left = left_of(deadline)
            self._client.wait_attached(left)
            generation = self._client.generation
            if RECEIVER not in self._client.watch(0, 0.0)[1]:
                try:
                    self._records.mark(RECEIVER, keep=False)
                except RetryLater as error:
                    if left <= 0 or (isinstance(error, Refused) and not error.passing):
                        raise
            with contextlib.ExitStack() as stack:
                claim = stack.enter_context(self._client.drop_select([RECEIVER], min(left, _CLAIM_S)))
                if len(claim):
                    self._end = stack.pop_all()
                    self._generation = generation
                    self._list = Following()
                    return
            if left_of(deadline) <= 0:
                raise DeadlineExceeded("another receiver is at this end of the pipe")

    def _restart(self) -> NoReturn:
        """The session is gone, and with it the claim on this end; others may be here now."""
        self._done.clear()
        self.leave()
        self._generation = self._stream = None
        raise PipeBroken("the daemon was restarted, or the session with it lost: what was on its way may be lost")

    def _begin(self) -> Stream | None:
        """The first stream that is listed, from where the receiver before this one was."""
        stream = next(iter(streams_of(self._listed)), None)
        if stream is None:
            return None
        if not stream.is_of(self._told):
            self._break(stream, "the daemon was restarted since it was sent")
        count = max(stream.cursors(self._listed), default=None)
        if count is None:
            self._break(stream, "it is not known any more how much of it was received")
        self._stream, self._next = stream, count
        self._ahead.clear()
        self._done.clear()
        self._pins = self._client.pin([(HEADS, [stream.mark])]) or []
        return stream

    def _take(self, stream: Stream, deadline: float | None, out: Any) -> Any:
        head, tensor = self._head(stream), None
        ended = bool(head.notes.get("end"))
        if not ended:
            try:
                (tensor,) = self._records.read(head, self._library, out=out)
            except (Lost, Damage) as error:
                self._break(stream, f"tensor {self._next} is not whole any more: {error}")
        self._advance(stream, deadline)
        self._ahead.popleft()
        self._done.append(head)
        self._done_bytes += head.nbytes
        if ended:
            self._end_stream(stream, keep=stream.cursor(self._next))
            raise EndOfPipe(f"the sender has closed the pipe after {self._next - 1} tensors")
        if len(self._done) >= _DONE_MAX or self._done_bytes >= _DONE_BYTES_MAX:
            self._tidy_up()
        return tensor

    def _head(self, stream: Stream) -> Head:
        """The head of the next tensor; some more are read with it where that takes a call."""
        if not self._ahead:
            spot = self._listed[stream.head(self._next)]
            with contextlib.suppress(Damage):  # to be asked for by its name, and then to be said
                if (head := self._records.head_at(spot, self._told)) is not None:
                    self._ahead.append(head)
        if not self._ahead:
            keys = [stream.head(number) for number in range(self._next, self._next + _AHEAD_MAX)]
            self._ahead.extend(self._records.heads(list(takewhile(self._listed.__contains__, keys))))
        if not self._ahead or (head := self._ahead[0]) is None:
            self._break(stream, f"tensor {self._next} is gone")
        return head

    def _tidy_up(self) -> None:
        """Removes what was received. It is never looked at again: the cursor says that it was."""
        done, stream = self._done, self._stream
        if stream is None or not done:
            return
        self._done, self._done_bytes = [], 0
        numbers = range(self._next - len(done), self._next)
        keys = [key for number in numbers for key in (stream.head(number), stream.cursor(number))]
        with contextlib.suppress(RetryLater):
            self._records.delete_parts(*done)
            self._client.post_delete(keys)

    def _advance(self, stream: Stream, deadline: float | None) -> None:
        """Says that one more was received: the step that only one receiver can make."""
        key = stream.cursor(self._next + 1)
        while True:
            try:
                self._records.mark(key)
                break
            except Refused as refused:
                if not refused.passing:
                    raise
                if left_of(deadline) <= 0:
                    raise DeadlineExceeded(
                        "the pool has no room for a cursor: what is in it is pinned or reserved"
                    ) from None
            except RetryLater as error:
                # Without a claim (the session is gone) another receiver may have been faster; or the answer is lost.
                self._done.clear()
                self.leave()
                self._generation = self._stream = None
                raise PipeBroken(f"tensor {self._next} was perhaps taken by another receiver ({error})") from error
            time.sleep(PAUSE_S)
        self._next += 1

    def _break(self, stream: Stream, why: str) -> NoReturn:
        self._end_stream(stream)
        raise PipeBroken(f"{why}: what follows of this sender is given up")

    def _end_stream(self, stream: Stream, keep: bytes | None = None) -> None:
        """Removes a stream. The last cursor of one that came to its end stays, and tells its sender."""
        self._tidy_up()
        self._stream = None
        self._look(0.0)
        self._client.release(self._pins)
        kept = {keep, stream.life if stream.sender_lives(self._listed) else None}
        self._client.delete([key for key in stream.keys(self._listed) if key not in kept])
        self._look(0.0)
