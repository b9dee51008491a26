"""Bulk values on redis-py's connections: received straight into given buffers, sent straight from them.

redis-py connects, logs in, keeps and replaces connections. In between, while a connection is checked out of its pool, a
Pipe has its socket: what is sent goes out with sendmsg from the pieces as they are, and replies to GET are read by the
parser, which redis-py lets its users supply, into the room that the caller gives.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import xxhash
from redis.connection import DefaultParser
from redis.exceptions import ConnectionError as LostConnection
from redis.exceptions import InvalidResponse, ResponseError

from kvstore import congestion

#: Read ahead: what of a bulk value lies here is copied once more, so it is little beside a part.
_AHEAD_BYTES: Final = 16 << 10
#: Bytes that are hashed at once, while they are still in the processor's cache.
_HASH_BYTES: Final = 256 << 10
#: What may be under way to a server on this host. With the kernel's own choice (4 MiB) a server that comes late finds
#: so much of the next command that it moves it about once more; measured in turn with 256 KiB to 2 MiB.
_LOCAL_SEND_BYTES: Final = 512 << 10
#: A TLS record; smaller pieces are joined for it.
_RECORD_BYTES: Final = 16 << 10
_IOV_MAX: Final = 512
#: Small replies between two looks at the clock.
_REPLIES: Final = 64
#: The server's own limit of a value. A longer one is not read to its end.
_BULK_BYTES_MAX: Final = 512 << 20


class OutOfTime(Exception):
    """The caller's time is over; that says nothing about the server."""


Piece = bytes | memoryview
_Parser: Any = DefaultParser


def pack(*arguments: bytes) -> bytes:
    """A command as the server reads it."""
    return b"*%d\r\n" % len(arguments) + b"".join(b"$%d\r\n%b\r\n" % (len(each), each) for each in arguments)


class BulkParser(_Parser):  # type: ignore[misc]  # hiredis where it is installed
    """redis-py's parser, and beside it one that puts bulk values where they belong.

    The two take turns: each leaves nothing behind when the replies it was to read are read.
    """

    def on_connect(self, connection: Any, **more: Any) -> None:
        super().on_connect(connection, **more)
        self._socket: socket.socket = connection._sock
        congestion.choose(self._socket)
        if congestion.is_local(self._socket):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SEND_BYTES)
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._begin = self._end = 0

    @property
    def drained(self) -> bool:
        """Whether nothing was read that nobody has asked for."""
        return self._begin == self._end

    def bulk_bytes(self) -> int | ResponseError | None:
        """Begins to read one reply to GET.

        Returns:
            Length of the value, which must then be read to its end; None where there is no value; the server's error.

        Raises:
            LostConnection, OSError: the connection can't be used any more.
            InvalidResponse: this is no such reply, or none of a sane length.
        """
        line = self._line()
        kind, text = line[:1], line[1:]
        if kind == b"$":
            length = int(text) if text.lstrip(b"-").isdigit() else -2
            if length == -1:
                return None
            if not 0 <= length <= _BULK_BYTES_MAX:
                raise InvalidResponse(f"bulk value of length {text[:20]!r}")
            return length
        if kind == b"-":
            return self._error(text)
        raise InvalidResponse(f"not a reply to GET: {line[:20]!r}")

    def _error(self, text: bytes) -> ResponseError:
        error = self.parse_error(text.decode("utf-8", "replace"))
        if isinstance(error, LostConnection):
            raise error
        assert isinstance(error, ResponseError)
        return error

    def usual(self, reply: bytes, most: int) -> int:
        """Takes replies as long as they are exactly this one. Returns how many there were, at most as many as given.

        Raises:
            LostConnection, OSError: the connection can't be used any more.
        """
        size, found = len(reply), 0
        while found < most:
            there = bytes(self._ahead[self._begin : min(self._end, self._begin + size * (most - found))])
            whole = len(there) // size
            if there[: whole * size] != reply * whole:
                whole = next(at for at in range(whole) if there[at * size : (at + 1) * size] != reply)
                self._begin += whole * size
                return found + whole
            self._begin += whole * size
            found += whole
            if found < most:
                if not reply.startswith(there[whole * size :]):
                    break
                self._fill()
        return found

    def short(self) -> bytes | int | ResponseError | None:
        """One reply of a single line: a status, a number, nothing, or the server's error.

        Raises:
            LostConnection, OSError: the connection can't be used any more.
            InvalidResponse: this is no such reply.
        """
        line = self._line()
        kind, text = line[:1], line[1:]
        if kind == b"+":
            return text
        if kind == b":" and text.lstrip(b"-").isdigit():
            return int(text)
        if kind == b"-":
            return self._error(text)
        if line == b"$-1":
            return None
        raise InvalidResponse(f"not a reply of one line: {line[:20]!r}")

    def take(self, size: int) -> bytes:
        """The next bytes of a value; few."""
        while self._end - self._begin < size:
            self._fill()
        self._begin += size
        return bytes(self._ahead[self._begin - size : self._begin])

    def receive(self, room: memoryview) -> int:
        """The next bytes of a value, into a buffer; returns their xxh3."""
        digest = xxhash.xxh3_64()
        size = room.nbytes
        got = min(self._end - self._begin, size)
        room[:got] = self._ahead[self._begin : self._begin + got]
        self._begin += got
        hashed = 0
        receive_into = self._socket.recv_into
        while got < size:
            count = receive_into(room[got:])
            if not count:
                raise LostConnection("the server closed the connection")
            got += count
            if got - hashed >= _HASH_BYTES:
                digest.update(room[hashed:got])
                hashed = got
        digest.update(room[hashed:got])
        return digest.intdigest()

    def skip(self, size: int) -> None:
        """Drops the next bytes of a value."""
        while size:
            if self._begin == self._end:
                self._fill()
            step = min(size, self._end - self._begin)
            self._begin += step
            size -= step

    def end_bulk(self) -> None:
        """Reads what stands behind a value."""
        if self.take(2) != b"\r\n":
            raise InvalidResponse("a bulk value does not end where it should")

    def _line(self) -> bytes:
        searched = self._begin
        while True:
            at = bytes(self._ahead[searched : self._end]).find(b"\r\n")
            if at >= 0:
                line = bytes(self._ahead[self._begin : searched + at])
                self._begin = searched + at + 2
                return line
            behind = self._end - self._begin
            if behind >= 4096:
                raise InvalidResponse("a line without an end")
            self._fill()
            searched = max(self._begin, self._begin + behind - 1)

    def _fill(self) -> None:
        if self._end == len(self._ahead) or self._begin == self._end:
            rest = bytes(self._ahead[self._begin : self._end])
            self._ahead[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        count = self._socket.recv_into(self._ahead[self._end :])
        if not count:
            raise LostConnection("the server closed the connection")
        self._end += count


class Pipe:
    """Commands and replies on one connection, for as long as it is checked out of its pool.

    Whatever it raises, the connection must be closed then: nobody knows where in the stream it stands.

    Args:
        until: When to have finished, by time.monotonic.
        stall_s: Longest wait for the server to take or give anything.
        progress: Called when the server has done something.
    """

    def __init__(self, connection: Any, until: float, stall_s: float, progress: Callable[[], None]) -> None:
        self._connection = connection
        self._parser: BulkParser = connection._parser
        self._socket: socket.socket = connection._sock
        self._until = until
        self._stall_s = stall_s
        self.progress = progress
        self._wait()

    def _wait(self) -> None:
        """Raises: OutOfTime: the time is over."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise OutOfTime
        self._socket.settimeout(min(left, self._stall_s))

    def send(self, pieces: Sequence[Piece]) -> None:
        """Sends all of it, without copies of its own."""
        self._wait()
        if isinstance(self._socket, ssl.SSLSocket):
            self._send_encrypted(pieces)
            return
        left, at = list(pieces), 0
        while at < len(left):
            count = self._socket.sendmsg(left[at : at + _IOV_MAX])
            while at < len(left) and count >= len(left[at]):
                count -= len(left[at])
                at += 1
            if count:
                left[at] = memoryview(left[at])[count:]
                self.progress()
                self._wait()

    def _send_encrypted(self, pieces: Sequence[Piece]) -> None:
        joined = bytearray()
        for piece in pieces:
            if len(piece) < _RECORD_BYTES:
                joined += piece
            if joined and (len(piece) >= _RECORD_BYTES or len(joined) >= _RECORD_BYTES):
                self._socket.sendall(joined)
                joined = bytearray()
            if len(piece) >= _RECORD_BYTES:
                self._wait()
                self._socket.sendall(piece)
                self.progress()
        if joined:
            self._socket.sendall(joined)

    def reply(self) -> Any:
        """One reply of any kind but a long value; an error reply is returned.

        Raises:
            RedisError, OSError: the connection can't be used any more.
        """
        try:
            answer = self._connection.read_response(disable_decoding=True, disconnect_on_error=False)
        except ResponseError as error:
            answer = error
        self.progress()
        return answer

    def ask(self, *arguments: bytes) -> Any:
        """One command and its reply.

        Raises:
            ResponseError: that was the reply.
        """
        self.send([pack(*arguments)])
        reply = self.reply()
        if isinstance(reply, ResponseError):
            raise reply
        return reply

    def ask_all(self, commands: Sequence[bytes]) -> list[Any]:
        """Packed commands, and their replies; few enough to fit the server's buffers. Error replies are returned."""
        if not commands:
            return []
        self.send([b"".join(commands)])
        replies = []
        for number in range(len(commands)):
            if number % _REPLIES == 0:
                self._wait()
            replies.append(self.reply())
        return replies

    def unusual(self, usual: bytes, count: int) -> dict[int, Any]:
        """Reads replies of one line each, nearly all of which are the usual one. Returns the others by their place;
        error replies are returned.
        """
        others: dict[int, Any] = {}
        at = 0
        while at < count:
            self._wait()
            some = min(count - at, _REPLIES)
            found = self._parser.usual(usual, some)
            at += found
            if found < some:
                others[at] = self._parser.short()
                at += 1
            self.progress()
        return others

    @property
    def socket(self) -> socket.socket:
        """What to shut down to wake a thread that waits for the server."""
        return self._socket

    @property
    def values(self) -> BulkParser:
        """Where replies to GET are read."""
        return self._parser

    def next_value(self) -> None:
        """Before each reply to GET: keeps to the deadline."""
        self.progress()
        self._wait()
