"""What is asked of one node, on a thread: a piece of a batch over one connection, pipelined within bounds.

Nothing here raises for a fault of the server: the piece's answer holds it, beside an outcome for each block.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

import xxhash
from redis.exceptions import MovedError, ResponseError
from redis.exceptions import TimeoutError as NoAnswer

from kvstore.tier import ReadOutcome, WriteOutcome
from kvstore.tiers.redis_health import Fault
from kvstore.tiers.redis_server import Servers, fault_of, is_elsewhere, is_full, is_refusal
from kvstore.tiers.redis_turn import Progress, Turn
from kvstore.tiers.redis_url import RedisAddress
from kvstore.tiers.redis_value import (
    HEADER_BYTES_MAX,
    PAYLOAD_BYTES,
    Header,
    Names,
    header_bytes,
    pack_header,
    parse_header,
    part_bytes,
    part_count,
    seal_of,
)
from kvstore.tiers.redis_wire import OutOfTime, Piece, Pipe, pack

T = TypeVar("T")
#: Bytes that a reader has asked for and not got yet, beside one value: enough that the server never waits for us. It
#: keeps a copy of each value until it is taken; when those no longer fit its caches it is half as fast.
_AHEAD_BYTES: Final = 1 << 20
_AHEAD_VALUES: Final = 64
#: Commands with short replies in one go.
_SHORT: Final = 512
#: Bytes that are gathered before they are sent.
_SEND_BYTES: Final = 512 << 10


@dataclasses.dataclass(slots=True)
class Answer(Generic[T]):
    """Of a piece.

    Attributes:
        outcomes: One for each block.
        done: The work was done to its end; otherwise outcomes are what was reached, or what they began as.
        fault: What went wrong with the server, if anything did.
        elsewhere: Places of blocks that another node holds.
        full: What the server said when it had no memory; empty otherwise.
        spoiled: Names of blocks whose values are wrong and could not be removed.
    """

    outcomes: list[T]
    done: bool = False
    fault: Fault | None = None
    elsewhere: list[int] = dataclasses.field(default_factory=list)
    full: str = ""
    spoiled: list[bytes] = dataclasses.field(default_factory=list)


class Refused(Exception):
    """The server answers, but not for us. The connection is in order, and is closed all the same: it may be a server
    that has lost its place.
    """


@dataclasses.dataclass(slots=True)
class _Reading:
    """A block that is being read."""

    name: bytes
    room: memoryview
    size: int
    found: int = 0
    header: Header | None = None  # of part 0
    wrong: bool = False
    error: bool = False
    checks: list[int] = dataclasses.field(default_factory=list)

    def judge(self) -> tuple[ReadOutcome, bool]:
        """What became of it, and whether its values should go."""
        if self.error:
            return ReadOutcome.FAILED, False
        if self.header is not None and self.header.total_bytes != self.size:
            return ReadOutcome.ABSENT, False  # of another size, and in order as far as anybody can tell
        if self.wrong:
            return ReadOutcome.DAMAGED, True
        if self.header is None:
            # Without part 0 there is no block. Other parts may be of one that is being written now.
            return ReadOutcome.ABSENT, False
        if self.found < self.header.parts:
            return ReadOutcome.ABSENT, True
        if self.header.seal != seal_of(self.checks):
            return ReadOutcome.DAMAGED, True
        return ReadOutcome.OK, False


class Calls:
    """See the module. Every method may run on several threads at once.

    Args:
        may_ask: Whether a node may be asked now; read on the threads.
        ttl_s: How long a block is kept at most; None: as long as there is room.
        stall_s: Longest wait for a server to take or give anything.
    """

    def __init__(
        self,
        address: RedisAddress,
        servers: Servers,
        names: Names,
        may_ask: Callable[[str], bool],
        progress: Progress,
        *,
        ttl_s: int | None,
        stall_s: float,
    ) -> None:
        self._address = address
        self._servers = servers
        self._names = names
        self._may_ask = may_ask
        self._progress = progress
        self._expiry: tuple[bytes, ...] = () if ttl_s is None else (b"EX", b"%d" % ttl_s)
        self._stall_s = stall_s

    def on(
        self,
        turn: Turn,
        node: str,
        until: float,
        answer: Answer[T],
        work: Callable[[Pipe], None],
        *,
        anyway: bool = False,
    ) -> Answer[T]:
        """Runs work over a connection to a node. Whatever happens to it is in the answer.

        Args:
            anyway: Also where the node was given up.
        """
        if not anyway and not self._may_ask(node):
            return answer
        begun = time.monotonic()
        try:
            with self._servers.connection(node) as connection:
                pipe = Pipe(connection, until, self._stall_s, self._progress.note)
                if not turn.begin(pipe.socket):
                    return answer
                try:
                    work(pipe)
                    if not pipe.values.drained:
                        raise Refused("the server said more than it was asked for")
                    answer.done = True
                finally:
                    turn.end()
        except OutOfTime:
            pass
        except Exception as error:
            # A socket that was shut down under the thread says nothing about the server, nor does one that was given
            # hardly any time.
            hasty = isinstance(error, NoAnswer | TimeoutError) and time.monotonic() - begun < self._stall_s / 2
            if not turn.abandoned and not hasty:
                cause = error.__cause__ if isinstance(error, Refused) else None
                answer.fault = fault_of(cause or error, self._address)
        return answer

    # -- is it there -------------------------------------------------------------------------------------------------

    def stat(self, turn: Turn, node: str, until: float, names: Sequence[bytes]) -> Answer[int | None]:
        """Sizes of blocks whose parts are all there."""
        answer: Answer[int | None] = Answer([None] * len(names))

        def work(pipe: Pipe) -> None:
            headers, _ = self._look(pipe, names, answer)
            answer.outcomes[:] = [None if header is None else header.total_bytes for header in headers]

        return self.on(turn, node, until, answer, work)

    def _look(
        self, pipe: Pipe, names: Sequence[bytes], answer: Answer[Any]
    ) -> tuple[list[Header | None], list[tuple[bytes, int]]]:
        """Headers of the blocks that are there in all parts; and blocks that have a part 0 and are none all the same,
        with the number of their parts.
        """
        headers: list[Header | None] = [None] * len(names)
        in_the_way: list[tuple[bytes, int]] = []
        for begin in range(0, len(names), _SHORT):
            some = names[begin : begin + _SHORT]
            replies = pipe.ask_all(
                [pack(b"GETRANGE", self._names.part(name, 0), b"0", b"%d" % (header_bytes(name) - 1)) for name in some]
            )
            split: list[tuple[int, Header]] = []
            for place, (name, reply) in enumerate(zip(some, replies, strict=True), begin):
                if isinstance(reply, ResponseError):
                    if self._take_error(answer, place, reply):
                        in_the_way.append((name, 1))
                elif (header := parse_header(name, reply)) is None or header.part != 0:
                    if reply:
                        in_the_way.append((name, 1))
                elif header.parts == 1:
                    headers[place] = header
                else:
                    split.append((place, header))
            replies = pipe.ask_all(
                [pack(b"EXISTS", *self._names.parts(names[place], header.parts)[1:]) for place, header in split]
            )
            for (place, header), reply in zip(split, replies, strict=True):
                if reply == header.parts - 1:
                    headers[place] = header
                else:
                    in_the_way.append((names[place], header.parts))
        return headers, in_the_way

    def _take_error(self, answer: Answer[Any], place: int, reply: ResponseError) -> bool:
        """What an error reply means for a block. Returns whether it says that the key holds something foreign.

        Raises:
            Refused: it is about the server.
        """
        if is_elsewhere(reply):
            answer.elsewhere.append(place)
            if isinstance(reply, MovedError):
                self._servers.moved(reply)
            return False
        if is_refusal(reply):
            raise Refused from reply
        return str(reply).startswith("WRONGTYPE")

    # -- out ---------------------------------------------------------------------------------------------------------

    def read(
        self, turn: Turn, node: str, until: float, blocks: Sequence[tuple[bytes, memoryview]]
    ) -> Answer[ReadOutcome]:
        """Reads blocks into their buffers."""
        answer = Answer([ReadOutcome.FAILED] * len(blocks))
        return self.on(turn, node, until, answer, lambda pipe: self._read(pipe, blocks, answer))

    def _read(self, pipe: Pipe, blocks: Sequence[tuple[bytes, memoryview]], answer: Answer[ReadOutcome]) -> None:
        readings = [_Reading(name, room, room.nbytes) for name, room in blocks]
        asked = [(place, part) for place, each in enumerate(readings) for part in range(part_count(each.size))]
        sizes = [part_bytes(readings[place].size, part) for place, part in asked]
        spoiled: list[int] = []
        sent = ahead = 0
        for number, (place, part) in enumerate(asked):
            ahead -= sizes[number]  # what is asked for behind this one
            if sent < len(asked) and ahead <= _AHEAD_BYTES // 2 and sent - number <= _AHEAD_VALUES // 2:
                commands = []
                while sent < len(asked) and ahead < _AHEAD_BYTES and sent - number < _AHEAD_VALUES:
                    other, other_part = asked[sent]
                    commands.append(pack(b"GET", self._names.part(readings[other].name, other_part)))
                    ahead += sizes[sent]
                    sent += 1
                pipe.send([b"".join(commands)])
            pipe.next_value()
            reading = readings[place]
            self._read_part(pipe, reading, place, part, answer)
            if part == part_count(reading.size) - 1:
                answer.outcomes[place], remove = reading.judge()
                if remove:
                    spoiled.append(place)
        if spoiled:
            answer.spoiled = [readings[place].name for place in spoiled]
            self._remove(pipe, [(readings[place].name, part_count(readings[place].size)) for place in spoiled])
            answer.spoiled = []

    def _read_part(self, pipe: Pipe, reading: _Reading, place: int, part: int, answer: Answer[ReadOutcome]) -> None:
        values = pipe.values
        length = values.bulk_bytes()
        if length is None:
            return
        if not isinstance(length, int):
            if self._take_error(answer, place, length):
                reading.wrong = True
            else:
                reading.error = True
            return
        begin = header_bytes(reading.name)
        if length < begin:
            values.skip(length)
            values.end_bulk()
            reading.wrong = True
            return
        header = parse_header(reading.name, values.take(begin))
        rest = length - begin
        if header is None or header.part != part or header.payload_bytes != rest:
            values.skip(rest)
            values.end_bulk()
            reading.wrong = True
            return
        if part == 0:
            reading.header = header
        if header.total_bytes != reading.size:
            values.skip(rest)
            values.end_bulk()
            reading.wrong = True
            return
        at = part * PAYLOAD_BYTES
        check = values.receive(reading.room[at : at + rest])
        values.end_bulk()
        reading.checks.append(check)
        reading.found += 1
        if check != header.check:
            reading.wrong = True

    # -- in ----------------------------------------------------------------------------------------------------------

    def write(
        self, turn: Turn, node: str, until: float, blocks: Sequence[tuple[bytes, memoryview]]
    ) -> Answer[WriteOutcome]:
        """Stores blocks that are not there yet."""
        answer = Answer([WriteOutcome.FAILED] * len(blocks))
        return self.on(turn, node, until, answer, lambda pipe: self._write(pipe, blocks, answer))

    def _write(self, pipe: Pipe, blocks: Sequence[tuple[bytes, memoryview]], answer: Answer[WriteOutcome]) -> None:
        # Bytes that are there already are not sent again, and what is there only in part makes way.
        headers, in_the_way = self._look(pipe, [name for name, _ in blocks], answer)
        self._remove(pipe, in_the_way)
        places = []
        for place, header in enumerate(headers):
            if header is not None:
                answer.outcomes[place] = WriteOutcome.EXISTS
            elif place not in answer.elsewhere:
                places.append(place)
        # All of it in one go: the answers are a few bytes each and fit the buffers on the way.
        pieces: list[Piece] = []
        gathered = 0
        for place in places:
            for command in self._value_pieces(*blocks[place]):
                pieces += command
                gathered += len(command[1])
                if gathered >= _SEND_BYTES:
                    # Checksums of the next ones are made while the server takes these.
                    pipe.send(pieces)
                    pieces, gathered = [], 0
        if pieces:
            pipe.send(pieces)
        broken: list[tuple[bytes, int]] = []
        for place in places:
            name, data = blocks[place]
            parts = part_count(data.nbytes)
            answer.outcomes[place] = outcome = self._written(answer, place, [pipe.reply() for _ in range(parts)])
            if outcome not in (WriteOutcome.STORED, WriteOutcome.EXISTS):
                broken.append((name, parts))
        # Parts of what was not stored as a whole. Nobody would miss them, but they take room.
        self._remove(pipe, broken)

    def _value_pieces(self, name: bytes, data: memoryview) -> Iterator[tuple[Piece, Piece, Piece]]:
        """Commands that store a block, part 0 last; each with the payload in the middle."""
        size = data.nbytes
        parts = part_count(size)
        checks = [0] * parts
        at = size
        for part in range(parts - 1, -1, -1):
            length = part_bytes(size, part)
            at -= length
            payload = data[at : at + length]
            checks[part] = xxhash.xxh3_64_intdigest(payload)
            header = pack_header(name, size, part, checks[part], seal_of(checks) if part == 0 else 0)
            options = (b"NX", *self._expiry) if part == 0 else self._expiry
            yield (
                b"*%d\r\n$3\r\nSET\r\n%b$%d\r\n%b"
                % (3 + len(options), _bulk(self._names.part(name, part)), len(header) + length, header),
                payload,
                b"\r\n" + b"".join(_bulk(option) for option in options),
            )

    def _written(self, answer: Answer[WriteOutcome], place: int, replies: list[Any]) -> WriteOutcome:
        """What the replies to a block's parts, part 0 last, mean."""
        outcome = WriteOutcome.STORED
        for reply in replies:
            if isinstance(reply, ResponseError):
                if is_full(reply):
                    answer.full = str(reply)
                    return WriteOutcome.NO_ROOM
                if not answer.elsewhere or answer.elsewhere[-1] != place:
                    self._take_error(answer, place, reply)
                return WriteOutcome.FAILED
            if reply is None:
                outcome = WriteOutcome.EXISTS  # another daemon was faster
            elif reply != b"OK":
                outcome = WriteOutcome.FAILED
        return outcome

    # -- away --------------------------------------------------------------------------------------------------------

    def delete(self, turn: Turn, node: str, until: float, names: Sequence[bytes]) -> Answer[bool | None]:
        """Removes blocks. Outcomes: whether it was there; None where nobody knows, and it may still be."""
        answer: Answer[bool | None] = Answer([None] * len(names))

        def work(pipe: Pipe) -> None:
            for begin in range(0, len(names), _SHORT):
                some = names[begin : begin + _SHORT]
                headers = pipe.ask_all(
                    [
                        pack(b"GETRANGE", self._names.part(name, 0), b"0", b"%d" % (HEADER_BYTES_MAX - 1))
                        for name in some
                    ]
                )
                parts = []
                for name, reply in zip(some, headers, strict=True):
                    header = None if isinstance(reply, ResponseError) else parse_header(name, reply)
                    parts.append(1 if header is None else header.parts)
                replies = pipe.ask_all(
                    [pack(b"UNLINK", *self._names.parts(name, count)) for name, count in zip(some, parts, strict=True)]
                )
                for place, reply in enumerate(replies, begin):
                    if isinstance(reply, ResponseError):
                        self._take_error(answer, place, reply)
                    else:
                        answer.outcomes[place] = reply > 0

        return self.on(turn, node, until, answer, work)

    def _remove(self, pipe: Pipe, blocks: Sequence[tuple[bytes, int]]) -> None:
        for begin in range(0, len(blocks), _SHORT):
            pipe.ask_all(
                [pack(b"UNLINK", *self._names.parts(name, parts)) for name, parts in blocks[begin : begin + _SHORT]]
            )


def _bulk(argument: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(argument), argument)
