"""Pipe: tensors from one process to another, in order.

Keys of a pipe, all in the group of heads, none ever used for two things (each life of a sender is a stream with an id):

    L id        claimed by the sender as long as it lives; gone after it closed
    S id        the stream: what a receiver looks for. Stored after L was claimed, so a stream without has no sender
    H id n      the head of tensor n; stored after its parts
    C id n      the receiver's cursor: n tensors were received. Stored before tensor n - 1 is handed out, and before its
                head is removed, by one receiver only: whoever finds it there already was not the one
    R           claimed by the receiver as long as it lives

The daemon lists these keys in one step (Client.watch), so that what is missing from a list is missing, not late: a head
that is not there while a later one is, or while the sender is gone, was lost.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from kvstore.buffer.receiver import Receiver
from kvstore.buffer.records import Draft, namespace_of
from kvstore.buffer.sender import Sender
from kvstore.client import connect
from kvstore.errors import ClientClosed, InvalidRequest
from kvstore.tensors import Library


class Pipe:
    """A named FIFO for tensors, from one sender to one receiver, in any two processes that reach the daemon.

    A pipe becomes the sending end with the first send_tensor and the receiving end with the first recv_tensor; it
    cannot be both. Use each end from one thread at a time. It does not survive a fork.

    What is promised
        Tensors come out as they went in (dtype, shape, bytes; None too), in order, each at most once. At most
        `max_bytes` of the pool are on their way; then send_tensor waits (each end holds up to 640 KiB of empty slots
        beside that). While the sender lives, what it sent is
        pinned.
    The receiver dies and another one opens the pipe
        It goes on with the first tensor that was not handed out. (A tensor is handed out when recv_tensor returns; a
        receiver that dies within its last millisecond may take one with it, since none is ever handed out twice.)
    The sender closes the pipe
        The receiver gets everything, then EndOfPipe. Another call waits for the next sender.
    The sender dies, or leaves without closing
        The receiver gets what was published, then PipeBroken, since nobody can say whether that was all. Another call
        waits for the next sender. A sender that comes back is a new one: its tensors follow those of the one before.
    Blocks are lost (flushed by an operator, evicted after their sender died, or the daemon restarted)
        PipeBroken at the first tensor that is not there, at both ends; nothing is skipped silently. Reopen both ends.
    """

    def __init__(
        self,
        name: str,
        endpoint: str | None = None,
        *,
        max_bytes: int = 256 << 20,
        library: Library | None = None,
        copy_down: bool = False,
        **options: Any,
    ) -> None:
        """Opens a pipe; nobody need be at its other end.

        Args:
            name: Under which both ends meet.
            endpoint: Of the daemon, as for kvstore.connect.
            max_bytes: Most bytes of the pool on their way; a single larger tensor goes alone. Only the sender's counts.
            library: What received tensors are: "numpy" or "torch"; None: what they were when they were sent.
            copy_down: Whether what passes is copied to the daemon's disk and Redis, as other blocks are. Both ends have
                to agree. Only what outlives its sender can gain by it.
            options: Others of kvstore.connect, such as `token`, `tls` and `timeout_s`.

        Raises:
            DaemonUnavailable, CallerMistake: as kvstore.connect.
        """
        if max_bytes < 1:
            raise InvalidRequest(f"max_bytes is {max_bytes}: it must be at least 1")
        self._client = connect(
            endpoint, namespace_of("pipe", name, copy_down=copy_down), **{"client_name": f"pipe:{name}", **options}
        )
        self._max_bytes = max_bytes
        self._library = library
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._closed = False

    def send_tensor(self, tensor: Any, timeout_s: float | None = None) -> None:
        """Sends a tensor, or None. When this returns it is published, and the tensor may be changed.

        Args:
            tensor: Of numpy or torch, or anything that speaks DLPack or the buffer protocol.
            timeout_s: How long to wait for room, or for the end of another sender; None: as long as it takes.

        Raises:
            DeadlineExceeded: there was no room in time. Nothing was sent; try again.
            PipeBroken: the daemon was restarted, or it is not known whether the tensor went out. Open the pipe anew.
            InvalidRequest: no tensor; or this is the receiving end.
        """
        self._check_open()
        if self._receiver is not None:
            raise InvalidRequest("this is the receiving end of the pipe: open another one to send")
        draft = Draft([tensor], {})
        deadline = _deadline(timeout_s)
        if self._sender is None:
            self._sender = Sender(self._client, self._max_bytes, deadline)
        self._sender.send(draft, deadline)

    def recv_tensor(self, timeout_s: float | None = None, *, out: Any = None) -> Any:
        """Receives the next tensor, or None where None was sent.

        Args:
            timeout_s: How long to wait for it, or for the end of another receiver; None: as long as it takes.
            out: A contiguous tensor in host memory to be filled and returned, of the dtype and shape that comes.

        Raises:
            DeadlineExceeded: nothing came in time; try again.
            EndOfPipe, PipeBroken: see the class. The call after that waits for the next sender.
            InvalidRequest: `out` does not fit, or what comes cannot be made here (its library or dtype is missing): the
                tensor stays and can be asked for again; or this is the sending end.
        """
        self._check_open()
        if self._sender is not None:
            raise InvalidRequest("this is the sending end of the pipe: open another one to receive")
        if self._receiver is None:
            self._receiver = Receiver(self._client, self._library)
        return self._receiver.receive(_deadline(timeout_s), out)

    def close(self, timeout_s: float = 10.0) -> None:
        """Leaves. The sending end tells the receiver that this was all, and waits until it has everything, since
        nothing is pinned after that. May be called twice.

        Raises:
            DeadlineExceeded: the receiver has not got everything in time. It may still; but what the pool needs the
                room of meanwhile is lost, and it is told so.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._sender is not None:
                self._sender.finish(_deadline(timeout_s))
        finally:
            self._leave()

    def _leave(self) -> None:
        for end in (self._sender, self._receiver):
            if end is not None:
                end.leave()
        self._client.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed("this pipe was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the pipe; on an error only leaves it, so that the receiver does not take what it got for all."""
        if kind is None:
            self.close()
        elif not self._closed:
            self._closed = True
            self._leave()


def _deadline(timeout_s: float | None) -> float | None:
    if timeout_s is not None and timeout_s < 0:
        raise InvalidRequest(f"timeout_s is {timeout_s}: give seconds, 0 for now or never, None for no limit")
    return None if timeout_s is None else time.monotonic() + timeout_s
