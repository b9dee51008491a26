"""The sending end of a pipe; the protocol is described in pipe.py."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import Final

from kvstore.buffer.records import HEADS, Draft, Records
from kvstore.buffer.slots import Refused
from kvstore.buffer.stream import PAUSE_S, Listed, Stream, left_of, strays_of, streams_of
from kvstore.client import Client
from kvstore.engine_calls import Lease
from kvstore.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    KVStoreError,
    PipeBroken,
    RetryLater,
    StaleGeneration,
)
from kvstore.following import Following

#: Most tensors on their way at once, so that the list of a pipe's keys stays short.
_TENSORS_MAX: Final = 256
#: Tensors between two looks at what was received, while there is room.
_LOOK_EVERY: Final = 16
_LOST: Final = "the daemon was restarted, or the session with it lost"


class Sender:
    """One stream, from its beginning to its end. Not safe from several threads."""

    def __init__(self, client: Client, max_bytes: int, deadline: float | None) -> None:
        """Begins the stream, once no other sender lives.

        Raises:
            DeadlineExceeded: another one still does.
            Refused: the pool has no room for its first blocks.
        """
        self._client = client
        self._records = Records(client)
        self._list = Following()
        self._max_bytes = max_bytes
        self._next = 0
        self._received = 0
        self._in_flight: deque[int] = deque()  # bytes of each tensor that was not received as far as is known, in order
        self._waiting_bytes = 0  # the sum of them
        self._unlooked = 0  # tensors that were sent since it was last looked what was received
        self._cursor_pins: list[Lease] = []
        self._broken: str | None = None
        self._held = contextlib.ExitStack()
        try:
            while (stream := self._begin(deadline)) is None:
                self._held.close()
        except BaseException:
            self._held.close()
            raise
        self._stream = stream

    def _begin(self, deadline: float | None) -> Stream | None:
        """One attempt; None where another sender was a little earlier."""
        listed = self._listed(0.0)
        self._generation = self._client.generation
        while any(other.sender_lives(listed) for other in streams_of(listed)):
            if (left := left_of(deadline)) <= 0:
                raise DeadlineExceeded("another sender is at this end of the pipe")
            listed = self._listed(left)
        if strays := strays_of(listed):
            self._client.delete(strays)
        stream = Stream.begun_in(self._generation or b"")
        self._mark(stream.life, deadline)
        claim = self._held.enter_context(self._client.drop_select([stream.life], 0.0))
        self._mark(stream.cursor(0), deadline)
        self._mark(stream.mark, deadline)
        listed = self._listed(0.0)
        if not len(claim) or stream.mark not in listed:
            raise PipeBroken("the daemon has lost the first blocks of a pipe")
        for other in streams_of(listed):
            if other == stream:
                return stream
            if other.sender_lives(listed):  # two began at once, and that one was listed before
                break
        self._client.delete([stream.mark, stream.cursor(0)])
        return None

    def _listed(self, wait_s: float, kinds: bytes = b"") -> Listed:
        self._list.take(self._client.follow(self._list.seen, wait_s, kinds=kinds))
        return self._list.spots

    def _mark(self, key: bytes, deadline: float | None) -> None:
        """Stores a block that says everything by its name."""
        while True:
            try:
                return self._records.mark(key)
            except Refused as refused:
                if not refused.passing or left_of(deadline) <= 0:
                    raise
            time.sleep(PAUSE_S)

    def send(self, draft: Draft, deadline: float | None) -> None:
        """See Pipe.send_tensor."""
        self._check()
        while not self._has_room(draft.nbytes):
            self._wait_for_receiver(deadline, "to make room")
        self._publish(draft, deadline)
        if self._waiting_bytes > self._max_bytes // 2 and self._unlooked >= min(_LOOK_EVERY, len(self._in_flight) // 2):
            self._look(0.0)  # before it is too late, so that a receiver that keeps up does not make this end wait

    def _publish(self, draft: Draft, deadline: float | None) -> None:
        key = self._stream.head(self._next)
        while True:
            try:
                self._records.store((key, draft), keep=True)
                break
            except Refused as refused:
                if not refused.passing:
                    raise
            except (DaemonUnavailable, StaleGeneration):
                self._broken = _LOST
            except RetryLater as error:  # nobody can say what is in the pipe
                self._broken = f"tensor {self._next} may or may not have been sent ({error})"
            self._check()
            self._pause(deadline)
        self._in_flight.append(draft.nbytes)
        self._waiting_bytes += draft.nbytes
        self._unlooked += 1
        self._next += 1
        self._check()

    def _pause(self, deadline: float | None) -> None:
        """Before the next attempt to store in a full pool; what was received meanwhile makes room."""
        if left_of(deadline) <= 0:
            raise DeadlineExceeded("the pool has no room for this tensor: what is in it is pinned or reserved")
        if self._in_flight:
            self._look(0.0)
        time.sleep(PAUSE_S)

    def finish(self, deadline: float | None) -> None:
        """Says that this was all, and waits until it was received.

        Raises:
            DeadlineExceeded: it was not.
            PipeBroken: as send.
        """
        self._check()
        self._publish(Draft([], {"end": True}), deadline)
        while self._in_flight:
            self._wait_for_receiver(deadline, "to get everything that was sent")
        self._client.delete([self._stream.cursor(self._next)])

    def leave(self) -> None:
        """Ends the stream's life. What is kept in the pool is let go of with the session."""
        with contextlib.suppress(KVStoreError):
            self._held.close()

    # -- what the receiver did -------------------------------------------------------------------------------------

    def _has_room(self, size: int) -> bool:
        if not self._in_flight:
            return True
        return self._waiting_bytes + size <= self._max_bytes and len(self._in_flight) < _TENSORS_MAX

    def _wait_for_receiver(self, deadline: float | None, what: str) -> None:
        if (left := left_of(deadline)) <= 0:
            raise DeadlineExceeded(
                f"waited for the receiver of the pipe {what}; {len(self._in_flight)} tensors are left"
            )
        self._look(left)

    def _look(self, wait_s: float) -> None:
        """Takes note of what was received meanwhile; waits for the next change if asked to."""
        listed = self._listed(wait_s, kinds=b"CS")
        self._unlooked = 0
        self._check()
        # A cursor may have been evicted while nobody held it; the next one will tell the same and more.
        received = max(self._stream.cursors(listed), default=self._received)
        if self._stream.mark not in listed and received < self._next:
            self._broken = "the receiver has given it up, or an operator has removed its blocks"
            self._check()
        if received == self._received:
            return
        # The receiver keeps it as long as it lives; from here on it outlives it.
        pins, self._cursor_pins = (
            self._cursor_pins,
            (self._client.pin([(HEADS, [self._stream.cursor(received)])]) or []),
        )
        if pins:
            self._client.release(pins)
        while self._received < received:
            self._waiting_bytes -= self._in_flight.popleft()
            self._received += 1

    def _check(self) -> None:
        if self._broken is None and self._client.generation != self._generation:
            self._broken = _LOST
        if self._broken is not None:
            raise PipeBroken(f"{self._broken}: open the pipe anew")
