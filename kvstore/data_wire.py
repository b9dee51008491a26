"""The data port's language: how block bytes travel between hosts, beside gRPC, which carries control.

Frames, little-endian
    hello     from the daemon, first of all: magic, version, and a nonce of this connection.
    request   operation, session, generation, which bytes of which slots (offsets and epochs, as they were handed out
              before), and a tag. READ: send me these. WRITE: I want to send these. CHECK: which epochs do these slots
              have now. SELECT names keys in place of slots: pin the leading run of them that is in the pool now, say
              where it is, and send me the first so many of its blocks. The pins end with the next CHECK or SELECT on
              the connection, or with the connection.
    reply     status; with READ the bytes follow, with CHECK the epochs, with SELECT the slots and then the bytes. After
              a WRITE it says GO, then the bytes travel, then comes a second reply.
Who may
    The tag is an HMAC-SHA256 over the nonce, the request's number on its connection and all of the request, with a
    secret that the session got over gRPC. So a request cannot be guessed, changed, or played again; the bytes
    themselves are protected by TLS or not at all. The slots must be held by the session's group: pinned to be read,
    reserved to be written. Keys may be asked for as over gRPC: by every session.
What a reader may trust
    The daemon hands pages to the network card without a copy, so what travels may change until it has arrived. A reader
    therefore asks with CHECK after the last byte: a slot that still has the epoch it was granted with held that very
    block all along. Anything else is thrown away.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import hashlib
import hmac
import itertools
import os
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.blocks import DIGEST_BYTES, KEY_BYTES_MAX
from kvstore.errors import DeadlineExceeded

MAGIC: Final = b"kvd2"
SECRET_BYTES: Final = 32
NONCE_BYTES: Final = 16
#: Slots or keys in one request.
SLOTS_MAX: Final = 4096
#: What follows the head of a request: read before anybody has shown who he is.
BODY_BYTES_MAX: Final = 64 << 10
#: Bytes in one request of our own client. Long against a round trip, short enough for a change of mind.
REQUEST_BYTES: Final = 32 << 20
_TAG_BYTES: Final = 32
#: A slot in a body: offset and epoch.
_SLOT_BYTES: Final = 12
#: Views in one system call, for blocks smaller than this many bytes.
_GATHER: Final = 64
_GATHER_BELOW_BYTES: Final = 256 << 10

#: Magic, nonce.
HELLO: Final = struct.Struct(f"<4s{NONCE_BYTES}s")
#: Magic, operation, count, bytes of the body, session, generation, first byte, bytes of each block.
_REQUEST: Final = struct.Struct("<4sB3xII16s16sQQ")
REQUEST_HEAD_BYTES: Final = _REQUEST.size + _TAG_BYTES
#: Of a body with keys: namespace, group, blocks to send, whether all keys must be there. The length of each key
#: follows, a byte each, and then the keys.
_QUERY: Final = struct.Struct(f"<{DIGEST_BYTES}sIIB3x")
#: Magic, status, bytes of text.
_REPLY: Final = struct.Struct("<4sBxH")
_NUMBER: Final = struct.Struct("<Q")
_COUNT: Final = struct.Struct("<I")
_TEXT_BYTES_MAX: Final = 1024


class Operation(enum.IntEnum):
    READ = 1
    WRITE = 2
    CHECK = 3
    SELECT = 4


class Status(enum.IntEnum):
    """How a request went."""

    OK = 0
    GO = 1  # to WRITE: send
    STALE = 2  # session, generation or a slot is not the caller's (any more), or the tag is wrong
    REFUSED = 3  # the caller's mistake


class Garbage(Exception):
    """What came is not of this language: the connection ends."""


class Lost(Exception):
    """The other side has gone, or closed the connection."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One request about slots.

    Attributes:
        first: First byte of each block that is meant.
        length: How many bytes of each.
    """

    operation: Operation
    session: bytes
    generation: bytes
    first: int
    length: int
    offsets: Sequence[int]
    epochs: Sequence[int]

    @property
    def end(self) -> int:
        """The byte behind the last one."""
        return self.first + self.length

    def pack(self, secret: bytes, nonce: bytes, number: int) -> bytes:
        """Its bytes, sealed for one place on one connection."""
        body = np.array(self.offsets, dtype="<u8").tobytes() + np.array(self.epochs, dtype="<u4").tobytes()
        head = _REQUEST.pack(
            MAGIC, self.operation, len(self.offsets), len(body), self.session, self.generation, self.first, self.length
        )
        return head + _tag(secret, nonce, number, head, body) + body


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """Keys of one group of a namespace, in prefix order.

    Attributes:
        namespace: Its digest.
        length: Bytes of each block.
        whole: Nothing is pinned, nor sent, where not all of them are there.
    """

    namespace: bytes
    group: int
    length: int
    keys: Sequence[bytes]
    whole: bool

    @property
    def fits(self) -> bool:
        """Whether one request can ask for all of it."""
        lengths = list(map(len, self.keys))
        size = _QUERY.size + len(lengths) + sum(lengths)
        return 1 <= len(lengths) <= SLOTS_MAX and size <= BODY_BYTES_MAX and _are_keys(lengths)


@dataclasses.dataclass(frozen=True, slots=True)
class SelectRequest:
    """A request about keys.

    Attributes:
        room: How many blocks of the run are to be sent.
    """

    session: bytes
    generation: bytes
    query: Query
    room: int
    operation: Operation = Operation.SELECT

    def pack(self, secret: bytes, nonce: bytes, number: int) -> bytes:
        """Its bytes, sealed for one place on one connection. The query must fit."""
        query = self.query
        body = b"".join(
            (
                _QUERY.pack(query.namespace, query.group, self.room, query.whole),
                bytes(map(len, query.keys)),
                *query.keys,
            )
        )
        head = _REQUEST.pack(
            MAGIC, self.operation, len(query.keys), len(body), self.session, self.generation, 0, query.length
        )
        return head + _tag(secret, nonce, number, head, body) + body


@dataclasses.dataclass(frozen=True, slots=True)
class Sealed:
    """A request as it came: well formed, and from whoever has the secret."""

    request: Request | SelectRequest
    _head: bytes
    _body: bytes
    _sent_tag: bytes

    def is_from(self, secret: bytes, nonce: bytes, number: int) -> bool:
        """Whether it was made with this secret, for this place. Takes the same time whatever the tag is."""
        return hmac.compare_digest(_tag(secret, nonce, number, self._head, self._body), self._sent_tag)


def body_bytes(head: bytes) -> int:
    """How many bytes follow the head of a request.

    Raises:
        Garbage: it is not the head of one.
    """
    magic, _, count, size, *_ = _REQUEST.unpack_from(head)
    if magic != MAGIC or not 1 <= count <= SLOTS_MAX or size > BODY_BYTES_MAX:
        raise Garbage("not a request")
    return int(size)


def parse_request(head: bytes, body: bytes) -> Sealed:
    """Reads a request.

    Raises:
        Garbage: it is none.
    """
    _, operation, count, _, session, generation, first, length = _REQUEST.unpack_from(head)
    try:
        kind = Operation(operation)
    except ValueError:
        raise Garbage(f"operation {operation}") from None
    request: Request | SelectRequest
    if kind is Operation.SELECT:
        request = _parse_select(session, generation, length, count, body)
    elif len(body) != _SLOT_BYTES * count:
        raise Garbage("slots that are cut off")
    else:
        request = Request(
            kind,
            session,
            generation,
            first,
            length,
            np.frombuffer(body, "<u8", count).tolist(),
            np.frombuffer(body, "<u4", count, offset=8 * count).tolist(),
        )
    return Sealed(request, head[: _REQUEST.size], body, head[_REQUEST.size :])


def _parse_select(session: bytes, generation: bytes, length: int, count: int, body: bytes) -> SelectRequest:
    if len(body) < _QUERY.size + count:
        raise Garbage("keys that are cut off")
    namespace, group, room, whole = _QUERY.unpack_from(body)
    at = _QUERY.size + count
    lengths = body[_QUERY.size : at]
    if not _are_keys(lengths) or at + sum(lengths) != len(body):
        raise Garbage("keys that are none")
    ends = list(itertools.accumulate(lengths, initial=at))
    keys = [body[start:end] for start, end in itertools.pairwise(ends)]
    return SelectRequest(session, generation, Query(namespace, group, length, keys, bool(whole)), room)


def _are_keys(lengths: Sequence[int]) -> bool:
    return min(lengths) >= 1 and max(lengths) <= KEY_BYTES_MAX


def _tag(secret: bytes, nonce: bytes, number: int, head: bytes, body: bytes) -> bytes:
    return hmac.digest(secret, nonce + _NUMBER.pack(number) + head + hashlib.sha256(body).digest(), "sha256")


def pack_reply(status: Status, text: str = "") -> bytes:
    """A reply; what follows it is not in it."""
    encoded = text.encode()[:_TEXT_BYTES_MAX]
    return _REPLY.pack(MAGIC, status, len(encoded)) + encoded


def pack_slots(offsets: npt.NDArray[np.uint64], epochs: npt.NDArray[np.uint32]) -> bytes:
    """What says where a run is."""
    return _COUNT.pack(len(offsets)) + offsets.astype("<u8").tobytes() + epochs.astype("<u4").tobytes()


class Stream:
    """A connected socket that moves all of what it is given, or raises. One thread at a time, but for abandon().

    Args:
        connected: The socket; owned from here on.
        stall_s: Longest time without a single byte.
    """

    def __init__(self, connected: socket.socket, stall_s: float) -> None:
        self.socket = connected
        self._stall_s = stall_s
        self._until = float("inf")
        self._is_plain = not isinstance(connected, ssl.SSLSocket)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._is_plain:
            connected.setblocking(True)
        self._armed_s = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}

    def limit(self, until: float = float("inf"), stall_s: float | None = None) -> None:
        """Sets the latest end of all that follows, by time.monotonic, and the longest time without a byte."""
        self._until = until
        if stall_s is not None:
            self._stall_s = stall_s

    def _before(self, option: int) -> None:
        """Limits the next system call, which receives (SO_RCVTIMEO) or sends (SO_SNDTIMEO). A plain socket blocks in
        the kernel, which takes whole blocks in one call; Python's own time limits would have it wait for every piece.
        """
        left = self._until - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the bytes of blocks did not travel in time")
        seconds = max(0.001, min(self._stall_s, left))
        if not self._is_plain:
            option = socket.SO_RCVTIMEO  # there is one limit for both
        # What is left shrinks from call to call: a limit that is longer by a tenth is near enough.
        if seconds <= self._armed_s[option] <= seconds * 1.1:
            return
        self._armed_s[option] = seconds
        if self._is_plain:
            self.socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))
        else:
            self.socket.settimeout(seconds)

    def receive_into(self, room: memoryview) -> None:
        """Fills a buffer.

        Raises:
            Lost, DeadlineExceeded: it cannot be filled.
        """
        at = 0
        while at < len(room):
            self._before(socket.SO_RCVTIMEO)
            with _faults():
                # TLS hands out a record at a time, and knows no flags.
                got = self.socket.recv_into(room[at:], 0, socket.MSG_WAITALL if self._is_plain else 0)
            if not got:
                raise Lost("the other side closed the data connection")
            at += got

    def receive_some(self, room: memoryview) -> int:
        """Waits for bytes, and takes those that are there into a buffer. Returns how many.

        Raises:
            Lost, DeadlineExceeded: none came.
        """
        self._before(socket.SO_RCVTIMEO)
        with _faults():
            got = self.socket.recv_into(room)
        if not got:
            raise Lost("the other side closed the data connection")
        return got

    def receive(self, size: int) -> bytes:
        """The next bytes."""
        room = bytearray(size)
        self.receive_into(memoryview(room))
        return bytes(room)

    def receive_blocks(self, rooms: Sequence[memoryview]) -> None:
        """Fills buffers one after another."""
        if not self._is_plain or not rooms or len(rooms[0]) >= _GATHER_BELOW_BYTES:
            for room in rooms:
                self.receive_into(room)
            return
        for start in range(0, len(rooms), _GATHER):
            self._gather(list(rooms[start : start + _GATHER]))

    def _gather(self, rooms: list[memoryview]) -> None:
        while rooms:
            self._before(socket.SO_RCVTIMEO)
            with _faults():
                got, _, _, _ = self.socket.recvmsg_into(rooms, 0, socket.MSG_WAITALL)
            if not got:
                raise Lost("the other side closed the data connection")
            _advance(rooms, got)

    def send(self, data: bytes | memoryview, *, more: bool = False) -> None:
        """Sends all of it.

        Args:
            more: More follows at once, so that the other side need not be woken for this alone.
        """
        view = memoryview(data)
        flags = socket.MSG_MORE if more and self._is_plain else 0
        while len(view):
            self._before(socket.SO_SNDTIMEO)
            with _faults():
                view = view[self.socket.send(view, flags) :]

    def send_blocks(self, blocks: Sequence[memoryview]) -> None:
        """Sends buffers one after another."""
        if not self._is_plain or not blocks or len(blocks[0]) >= _GATHER_BELOW_BYTES:
            for block in blocks:
                self.send(block)
            return
        for start in range(0, len(blocks), _GATHER):
            several = list(blocks[start : start + _GATHER])
            while several:
                self._before(socket.SO_SNDTIMEO)
                with _faults():
                    sent = self.socket.sendmsg(several)
                _advance(several, sent)

    @property
    def takes_files(self) -> bool:
        """Whether send_file works: TLS has to see the bytes."""
        return self._is_plain

    def send_file(self, fd: int, offset: int, length: int) -> None:
        """Sends a part of a file without a copy.

        Raises:
            OSError: EINVAL: such a file cannot be sent (hugetlb pages, on most kernels); nothing was sent.
        """
        begin, end = offset, offset + length
        while offset < end:
            self._before(socket.SO_SNDTIMEO)
            try:
                sent = os.sendfile(self.socket.fileno(), fd, offset, end - offset)
            except OSError as error:
                if error.errno == errno.EINVAL and offset == begin:
                    raise
                raise _meaning(error) from error
            if not sent:
                raise Lost("the other side closed the data connection")
            offset += sent

    def receive_reply(self) -> tuple[Status, str]:
        """The next reply.

        Raises:
            Lost: what came is none.
        """
        magic, status, text_bytes = _REPLY.unpack(self.receive(_REPLY.size))
        if magic != MAGIC or text_bytes > _TEXT_BYTES_MAX or status not in Status._value2member_map_:
            raise Lost("what answers on the data port is not a kvstore daemon of this version")
        return Status(status), self.receive(text_bytes).decode(errors="replace")

    def receive_slots(self, most: int) -> tuple[list[int], list[int]]:
        """Where a run of at most so many blocks is: offsets and epochs.

        Raises:
            Lost: what came is no such thing.
        """
        (count,) = _COUNT.unpack(self.receive(_COUNT.size))
        if count > most:
            raise Lost("what answers on the data port sends more than it was asked for")
        data = self.receive(_SLOT_BYTES * count)
        return np.frombuffer(data, "<u8", count).tolist(), np.frombuffer(data, "<u4", count, 8 * count).tolist()

    def abandon(self) -> None:
        """Wakes whoever is in a call, with Lost. Any thread."""
        try:
            # Past ssl's own method, which would drop its state under the thread that reads.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)
        except OSError:
            pass  # it was lost already, so nobody sleeps there

    def close(self) -> None:
        """Ends the connection."""
        self.socket.close()


class _faults:
    """Turns what a socket raises into errors of ours."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise _meaning(error) from error


def _meaning(error: OSError) -> Exception:
    if isinstance(error, BlockingIOError | TimeoutError):
        return DeadlineExceeded("nothing moved on the data connection for too long")
    return Lost(f"the data connection broke: {error}")


def _advance(views: list[memoryview], count: int) -> None:
    """Drops the first `count` bytes of buffers."""
    while views and count >= len(views[0]):
        count -= len(views.pop(0))
    if count:
        views[0] = views[0][count:]
