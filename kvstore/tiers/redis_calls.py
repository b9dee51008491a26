"""What is asked of one node, on a thread: a piece of a batch over one connection, pipelined within bounds.

Nothing here raises for a fault of the server: the piece's answer holds it, beside an outcome for each block.
"""

from __future__ import annotations

import collections
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
#: Blocks that are asked about at once before they are stored: few, so that the server has the ones before them to store
#: meanwhile, and enough that asking costs little.
_GROUP: Final = 64
#: What nearly all answer while blocks are stored: there is no such key; it was stored.
_NO: Final = b":0\r\n"
_OK: Final = b"+OK\r\n"


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
        expiry = () if ttl_s is None else (b"EX", b"%d" % ttl_s)
        #: Of SET: how many arguments it has, what stands behind the value, and what does behind that of part 0.
        self._arguments = 3 + len(expiry)
        self._end = b"\r\n" + b"".join(map(_bulk, expiry))
        self._end_of_first = self._end + _bulk(b"NX")
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
            headers, _ = self._look(pipe, names, answer, range(len(names)))
            answer.outcomes[:] = [None if header is None else header.total_bytes for header in headers]

        return self.on(turn, node, until, answer, work)

    def _look(
        self, pipe: Pipe, names: Sequence[bytes], answer: Answer[Any], places: Sequence[int]
    ) -> tuple[list[Header | None], list[tuple[bytes, int]]]:
        """Headers of the blocks that are there in all parts; and blocks that have a part 0 and are none all the same,
        with the number of their parts.

        Args:
            places: Of the names, in the answer.
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
                    if self._take_error(answer, places[place], reply):
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
        taken, broken = self._store(pipe, blocks, range(len(blocks)), answer, ask=True)
        if taken:
            headers, in_the_way = self._look(pipe, [blocks[place][0] for place in taken], answer, taken)
            self._remove(pipe, in_the_way)
            elsewhere = set(answer.elsewhere)
            left = []
            for place, header in zip(taken, headers, strict=True):
                if header is not None:
                    answer.outcomes[place] = WriteOutcome.EXISTS
                elif place not in elsewhere:
                    left.append(place)
            broken += self._store(pipe, blocks, left, answer, ask=False)[1]
        # Parts of what was not stored as a whole. Nobody would miss them, but they take room.
        self._remove(pipe, [(blocks[place][0], part_count(blocks[place][1].nbytes)) for place in broken])

    def _store(
        self,
        pipe: Pipe,
        blocks: Sequence[tuple[bytes, memoryview]],
        places: Sequence[int],
        answer: Answer[WriteOutcome],
        *,
        ask: bool,
    ) -> tuple[list[int], list[int]]:
        """Sends blocks, group by group.

        Args:
            ask: Each group is asked about first, while the one before it is under way.

        Returns:
            Places of blocks that were not sent, since there is something under their name or nobody knows; and of those
            that were not stored as a whole.
        """
        groups = [places[begin : begin + _GROUP] for begin in range(0, len(places), _GROUP)]
        taken: list[int] = []
        broken: list[int] = []
        #: Groups whose answers are still to come. All answers come in the order in which the server was asked.
        sent: collections.deque[Sequence[int]] = collections.deque()
        if ask:
            pipe.send([self._questions(blocks, groups[0])])
        for number, group in enumerate(groups):
            behind = b""
            if ask:
                if number > 1:
                    broken += self._answered(pipe, blocks, sent.popleft(), answer)
                if there := pipe.unusual(_NO, len(group)):
                    taken += [group[at] for at in there]
                    group = [place for at, place in enumerate(group) if at not in there]
                if number + 1 < len(groups):
                    behind = self._questions(blocks, groups[number + 1])
            self._send_blocks(pipe, behind, [blocks[place] for place in group])
            sent.append(group)
        for group in sent:
            broken += self._answered(pipe, blocks, group, answer)
        return taken, broken

    def _questions(self, blocks: Sequence[tuple[bytes, memoryview]], places: Sequence[int]) -> bytes:
        return b"".join([pack(b"EXISTS", self._names.part(blocks[place][0], 0)) for place in places])

    def _send_blocks(self, pipe: Pipe, before: bytes, blocks: Sequence[tuple[bytes, memoryview]]) -> None:
        """Sends the commands that store blocks. Their answers are a few bytes each and fit the buffers on the way.

        Args:
            before: What goes in front of them.
        """
        pieces: list[Piece] = []
        gathered = 0
        for name, data in blocks:
            for head, payload, end in self._value_pieces(name, data):
                pieces += (before + head, payload)
                before = end
                gathered += len(payload)
                if gathered >= _SEND_BYTES:
                    # Checksums of the next ones are made while the server takes these.
                    pipe.send(pieces)
                    pieces, gathered = [], 0
        if before:
            pieces.append(before)
        if pieces:
            pipe.send(pieces)

    def _value_pieces(self, name: bytes, data: memoryview) -> Iterator[tuple[bytes, memoryview, bytes]]:
        """Commands that store a block, part 0 last: what stands before the payload, the payload, what stands behind."""
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
            key = self._names.part(name, part)
            yield (
                b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b"
                % (self._arguments + (part == 0), len(key), key, len(header) + length, header),
                payload,
                self._end if part else self._end_of_first,
            )

    def _answered(
        self,
        pipe: Pipe,
        blocks: Sequence[tuple[bytes, memoryview]],
        places: Sequence[int],
        answer: Answer[WriteOutcome],
    ) -> list[int]:
        """Reads the answers to what was sent of blocks. Returns places of those that were not stored as a whole."""
        owners = [place for place in places for _ in range(part_count(blocks[place][1].nbytes))]
        others = pipe.unusual(_OK, len(owners))
        # What a refusal leaves behind is FAILED, as all was in the beginning.
        outcomes = dict.fromkeys(places, WriteOutcome.STORED)
        broken = set()
        for at, reply in others.items():
            place = owners[at]
            if outcomes[place] is not WriteOutcome.STORED:
                continue  # the first thing that went wrong counts
            if reply is None:
                outcomes[place] = WriteOutcome.EXISTS  # another daemon was faster
                continue
            broken.add(place)
            outcomes[place] = WriteOutcome.FAILED
            if is_full(reply):
                answer.full = str(reply)
                outcomes[place] = WriteOutcome.NO_ROOM
            elif isinstance(reply, ResponseError):
                self._take_error(answer, place, reply)
        for place, outcome in outcomes.items():
            answer.outcomes[place] = outcome
        return sorted(broken)

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
