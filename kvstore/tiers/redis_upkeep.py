"""What keeps a Redis tier in order beside its calls: the first look at the servers, probes, sweeps, and what is owed to
them (texts of namespaces, the order of use, removals that did not get through). The thread side of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from redis.exceptions import MovedError, ResponseError

from kvstore.blocks import DIGEST_BYTES
from kvstore.tier import TierNamespace
from kvstore.tiers.redis_calls import Answer, Calls, Refused
from kvstore.tiers.redis_health import Fault
from kvstore.tiers.redis_server import NoNode, Servers, fault_of, is_full
from kvstore.tiers.redis_turn import Turn
from kvstore.tiers.redis_url import Kind, RedisAddress
from kvstore.tiers.redis_value import (
    HEADER_BYTES_MAX,
    Names,
    pack_namespace,
    parse_header,
    parse_namespace,
)
from kvstore.tiers.redis_wire import Pipe, pack

T = TypeVar("T")
#: ACLs and UNLINK, and what everybody still runs.
_VERSION_MIN: Final = (6, 0)
#: Keys that the server looks at in one step of a scan.
_SCAN_COUNT: Final = 1000
_SHORT: Final = 512


@dataclasses.dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself. Sizes in bytes; 0: no limit, or not said."""

    version: str = ""
    maxmemory: int = 0
    policy: str = ""
    used: int = 0
    role: str = ""


@dataclasses.dataclass(slots=True)
class Swept:
    """One step of a scan.

    Attributes:
        cursor: Where to go on; 0: it is through.
        blocks: Names and sizes of blocks whose part 0 was seen.
        others: Names of blocks and numbers of their other parts that were seen.
        removed: Blocks that this step has removed.
    """

    cursor: int = 0
    blocks: list[tuple[bytes, int]] = dataclasses.field(default_factory=list)
    others: list[tuple[bytes, int]] = dataclasses.field(default_factory=list)
    removed: int = 0


class Upkeep:
    """See the module. Blocks; for a thread of its own."""

    def __init__(self, address: RedisAddress, servers: Servers, names: Names, calls: Calls, ttl_s: int | None) -> None:
        self._address = address
        self._servers = servers
        self._names = names
        self._calls = calls
        self._ttl_s = ttl_s

    def refresh(self) -> Fault | None:
        """Asks who holds what."""
        try:
            self._servers.refresh()
        except Exception as error:  # redis-py's topology raises what is no RedisError, too
            return fault_of(error, self._address)
        return None

    def probe(self, node: str, until: float) -> Answer[ServerFacts]:
        """Whether a node serves blocks, and what it is."""
        answer = Answer([ServerFacts()])

        def work(pipe: Pipe) -> None:
            pipe.ask(b"PING")
            facts = answer.outcomes[0] = _facts(pipe)
            version = tuple(int(piece) for piece in facts.version.split(".")[:2] if piece.isdigit())
            if version and version < _VERSION_MIN:
                needed = ".".join(str(piece) for piece in _VERSION_MIN)
                answer.fault = Fault("version", f"Redis {facts.version} is too old: {needed} is the least that works")
            elif facts.role == "slave" and self._address.kind is not Kind.CLUSTER:
                answer.fault = Fault("replica", f"{node} is a replica, which takes no writes")
            elif self._address.kind is Kind.CLUSTER:
                info = pipe.ask(b"CLUSTER", b"INFO")
                if b"cluster_state:ok" not in info:
                    answer.fault = Fault("cluster", f"{node} says that the cluster is down")

        return self._calls.on(Turn(), node, until, answer, work, anyway=True)

    # -- namespaces --------------------------------------------------------------------------------------------------

    def read_namespaces(self, until: float) -> Answer[list[TierNamespace]]:
        """Texts that are kept beside the blocks. What is damaged or foreign among them is left out."""
        answer: Answer[list[TierNamespace]] = Answer([[]])

        def work(pipe: Pipe) -> None:
            fields = pipe.ask(b"HGETALL", self._names.namespaces)
            for digest, text in zip(fields[::2], fields[1::2], strict=True):
                if len(digest) == DIGEST_BYTES and (namespace := parse_namespace(digest, text)) is not None:
                    answer.outcomes[0].append(namespace)

        return self._at(self._names.namespaces, until, answer, work)

    def write_namespaces(self, changes: Mapping[bytes, TierNamespace | None], until: float) -> Answer[None]:
        """Keeps texts, or (None) drops them."""
        key = self._names.namespaces
        commands = [
            pack(b"HDEL", key, digest) if namespace is None else pack(b"HSET", key, digest, pack_namespace(namespace))
            for digest, namespace in changes.items()
        ]
        return self._tell(key, commands, until)

    # -- the order of use --------------------------------------------------------------------------------------------

    def write_order(self, digest: bytes, uses: Sequence[tuple[bytes, int | None]], until: float) -> Answer[None]:
        """Writes down when blocks of a namespace were used last; None: they are gone."""
        key = self._names.order(digest)
        commands = [
            pack(b"ZREM", key, name[DIGEST_BYTES:])
            if use is None
            else pack(b"ZADD", key, b"%d" % use, name[DIGEST_BYTES:])
            for name, use in uses
        ]
        return self._tell(key, commands, until)

    def drop_order(self, digest: bytes, until: float) -> Answer[None]:
        """Drops what is written down of a namespace."""
        key = self._names.order(digest)
        return self._tell(key, [pack(b"UNLINK", key)], until, expires=False)

    def read_order(self, digest: bytes, cursor: int, until: float) -> Answer[tuple[int, dict[bytes, float]]]:
        """One step of reading it."""
        answer: Answer[tuple[int, dict[bytes, float]]] = Answer([(0, {})])

        def work(pipe: Pipe) -> None:
            after, found = pipe.ask(b"ZSCAN", self._names.order(digest), b"%d" % cursor, b"COUNT", b"%d" % _SCAN_COUNT)
            answer.outcomes[0] = (
                int(after),
                {digest + name: float(use) for name, use in zip(found[::2], found[1::2], strict=True)},
            )

        return self._at(self._names.order(digest), until, answer, work)

    # -- scans ---------------------------------------------------------------------------------------------------------

    def sweep(self, node: str, cursor: int, until: float) -> Answer[Swept]:
        """One step of looking at all that is there."""
        answer = Answer([Swept(cursor)])

        def work(pipe: Pipe) -> None:
            swept = answer.outcomes[0]
            firsts = []
            after, keys = self._scan(pipe, self._names.pattern, cursor)
            for key in keys:
                parsed = self._names.parse(key)
                if parsed is not None and parsed[1] == 0:
                    firsts.append((key, parsed[0]))
                elif parsed is not None:
                    swept.others.append(parsed)
            for begin in range(0, len(firsts), _SHORT):
                some = firsts[begin : begin + _SHORT]
                replies = pipe.ask_all(
                    [pack(b"GETRANGE", key, b"0", b"%d" % (HEADER_BYTES_MAX - 1)) for key, _ in some]
                )
                for (_, name), reply in zip(some, replies, strict=True):
                    header = None if isinstance(reply, ResponseError) else parse_header(name, reply)
                    if header is not None and header.part == 0:
                        swept.blocks.append((name, header.total_bytes))
            swept.cursor = after

        return self._calls.on(Turn(), node, until, answer, work)

    def flush(self, node: str, digest: bytes | None, cursor: int, until: float) -> Answer[Swept]:
        """One step of removing a namespace (None: all). The server frees the memory beside its work."""
        answer = Answer([Swept(cursor)])

        def work(pipe: Pipe) -> None:
            swept = answer.outcomes[0]
            after, keys = self._scan(pipe, self._names.pattern_of(digest), cursor)
            ours = [
                (key, parsed)
                for key in keys
                if (parsed := self._names.parse(key)) is not None or (digest is None and self._names.is_beside(key))
            ]
            for begin in range(0, len(ours), _SHORT):
                some = ours[begin : begin + _SHORT]
                replies = pipe.ask_all([pack(b"UNLINK", key) for key, _ in some])
                for (_, parsed), reply in zip(some, replies, strict=True):
                    if isinstance(reply, ResponseError):
                        raise Refused from reply
                    swept.removed += reply if parsed is not None and parsed[1] == 0 else 0
            swept.cursor = after

        return self._calls.on(Turn(), node, until, answer, work)

    def remove_parts(self, node: str, blocks: Mapping[bytes, int], until: float) -> Answer[int]:
        """Removes parts of blocks up to a number, unless a part 0 has come meanwhile. Outcome: blocks removed."""
        answer = Answer([0])

        def work(pipe: Pipe) -> None:
            names = list(blocks)
            for begin in range(0, len(names), _SHORT):
                some = names[begin : begin + _SHORT]
                there = pipe.ask_all([pack(b"EXISTS", self._names.part(name, 0)) for name in some])
                gone = [name for name, reply in zip(some, there, strict=True) if reply == 0]
                pipe.ask_all([pack(b"UNLINK", *self._names.parts(name, blocks[name] + 1)) for name in gone])
                answer.outcomes[0] += len(gone)

        return self._calls.on(Turn(), node, until, answer, work)

    @staticmethod
    def _scan(pipe: Pipe, pattern: bytes, cursor: int) -> tuple[int, list[bytes]]:
        after, keys = pipe.ask(b"SCAN", b"%d" % cursor, b"MATCH", pattern, b"COUNT", b"%d" % _SCAN_COUNT)
        return int(after), keys

    # -- one key -------------------------------------------------------------------------------------------------------

    def _tell(self, key: bytes, commands: list[bytes], until: float, *, expires: bool = True) -> Answer[None]:
        answer: Answer[None] = Answer([None])
        if expires and self._ttl_s is not None:
            commands = [*commands, pack(b"EXPIRE", key, b"%d" % self._ttl_s)]

        def work(pipe: Pipe) -> None:
            for begin in range(0, len(commands), _SHORT):
                for reply in pipe.ask_all(commands[begin : begin + _SHORT]):
                    if is_full(reply):
                        answer.full = str(reply)
                    elif isinstance(reply, MovedError):
                        self._servers.moved(reply)
                        answer.elsewhere.append(0)
                    elif isinstance(reply, ResponseError):
                        raise Refused from reply

        return self._at(key, until, answer, work)

    def _at(self, key: bytes, until: float, answer: Answer[T], work: Callable[[Pipe], None]) -> Answer[T]:
        """Work on the node that holds a key."""
        try:
            node = self._servers.node_of(key)
        except NoNode as error:
            answer.fault = fault_of(error, self._address)
            return answer
        return self._calls.on(Turn(), node, until, answer, work)


def _facts(pipe: Pipe) -> ServerFacts:
    try:
        text = pipe.ask(b"INFO").decode("utf-8", "replace")
    except ResponseError:
        return ServerFacts()  # not everybody may ask; it works all the same
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)

    def number(name: str) -> int:
        value = fields.get(name, "")
        return int(value) if value.isdigit() else 0

    return ServerFacts(
        fields.get("redis_version", ""),
        number("maxmemory"),
        fields.get("maxmemory_policy", ""),
        number("used_memory"),
        fields.get("role", ""),
    )
