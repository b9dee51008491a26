"""Workers' word that their copies of a store are over, outside of the engine's steps.

vLLM carries what workers report with its steps, so that a busy engine would publish a prompt's last blocks at the end
of its next step. A worker therefore also sends a datagram as soon as a copy has ended, and when all of a store's have
come, it is published. They are hints: one that does not arrive costs the rest of a step, with which the report comes.

The decision stays here, where the books are: a store that the engine has reset, or distrusts, is withdrawn before
its last datagram can count, and what was published a moment earlier goes with the flush that follows.

The socket has no name in the file system; who wants to send needs the secret that travels with each store. Knows
nothing of vLLM.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import logging
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Collection
from typing import Final

from engine_plugin.vllm.guard import limited_log
from engine_plugin.vllm.link import Commit

_SECRET_BYTES: Final = 16
#: A scheduler that takes nothing for so long hears of the copy in the step's report.
_SEND_S: Final = 1.0
#: Words that wait to be sent; those beyond them are not. Far more than a worker has stores under way.
_WORDS_MAX: Final = 1024
_MESSAGE: Final = struct.Struct(f"<{_SECRET_BYTES}sQI?")  # secret, ticket, rank, whether the copy is good


@dataclasses.dataclass(frozen=True, slots=True)
class AckAddress:
    """Where workers send their word to; travels with each store.

    Attributes:
        name: Of the socket, in Linux' abstract namespace.
        secret: What a datagram begins with.
    """

    name: bytes
    secret: bytes


@dataclasses.dataclass(slots=True)
class _Expected:
    ranks: set[int]  # that have not sent their word
    commits: Callable[[], list[Commit]]


class Acks:
    """The scheduler's side.

    Threads: `heard` is for the socket's thread, the rest for the scheduler's.

    Args:
        publish: Takes the commits of a store of which every worker has said that its copy is good.
        listen: False: there is no socket, and `heard` is called by a test.
    """

    def __init__(self, publish: Callable[[Commit], None], *, listen: bool = True) -> None:
        self._publish = publish
        self._lock = threading.Lock()
        self._expected: dict[int, _Expected] = {}
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._socket = _listener() if listen else None
        self.address = AckAddress(self._socket.getsockname(), self._secret) if self._socket is not None else None
        self._closed = False
        if self._socket is not None:
            threading.Thread(target=self._listen, args=(self._socket,), name="kvstore-acks", daemon=True).start()

    def expect(self, ticket: int, ranks: Collection[int], commits: Callable[[], list[Commit]]) -> None:
        """A store has been given to the workers; `commits` is called once, on the socket's thread."""
        with self._lock:
            self._expected[ticket] = _Expected(set(ranks), commits)

    def withdraw(self, ticket: int) -> bool:
        """Nothing is published for this store from now on. Returns whether it has been before."""
        with self._lock:
            return self._expected.pop(ticket, None) is None

    def heard(self, ticket: int, rank: int, good: bool) -> None:
        """A worker's copy is over."""
        with self._lock:
            expected = self._expected.get(ticket)
            if expected is None or not good:
                return  # a bad one stays expected: the report that comes with the step says what becomes of it
            expected.ranks.discard(rank)
            if not expected.ranks:
                # With the lock: who withdraws the next moment finds it published, which is in order after that.
                del self._expected[ticket]
                for commit in expected.commits():
                    self._publish(commit)

    def close(self) -> None:
        """Publishes nothing more."""
        with self._lock:
            self._expected.clear()
        self._closed = True
        if self._socket is not None and self.address is not None:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as waker:
                waker.sendto(b"", self.address.name)  # ends the thread, which closes the socket

    def _listen(self, listener: socket.socket) -> None:
        with listener:
            while not self._closed:
                try:
                    message = listener.recv(_MESSAGE.size + 1)
                    if len(message) != _MESSAGE.size:
                        continue
                    secret, ticket, rank, good = _MESSAGE.unpack(message)
                    if hmac.compare_digest(secret, self._secret):
                        self.heard(ticket, rank, good)
                except Exception:  # the thread's end would cost every later store its time
                    limited_log("acks", logging.ERROR, "kvstore: a worker's word was not taken", exc_info=True)


class AckSender:
    """A worker's side: any thread sends, and never waits. A thread of its own does, since the kernel queues only a few
    datagrams for a socket (ten, as a rule), and the ranks' copies end together.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(_SEND_S)
        self._words: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="kvstore-ack", daemon=True).start()

    def send(self, address: AckAddress, ticket: int, rank: int, good: bool) -> None:
        """Tells the scheduler that a copy is over. Lost where it is in another network namespace, does not listen, or
        takes nothing for long.
        """
        if self._words.qsize() < _WORDS_MAX:
            self._words.put((_MESSAGE.pack(address.secret, ticket, rank, good), address.name))

    def close(self) -> None:
        """Sends what is waiting, and no more; does not wait for that."""
        self._words.put(None)

    def _run(self) -> None:
        with self._socket:
            while (word := self._words.get()) is not None:
                with contextlib.suppress(OSError):
                    self._socket.sendto(*word)


def _listener() -> socket.socket | None:
    """A socket under a name that the kernel chooses; None where that is not possible."""
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listener.bind("")
    except OSError as error:
        limited_log("acks", logging.WARNING, "kvstore: no socket for workers (%s); stores are published later", error)
        return None
    return listener
