"""How blocks lie in Redis: names of keys, and values that say what they are. Pure.

Key
    ``prefix{name}:part``, the tier's name of the block in hex: readable, matched by a pattern without surprises, and,
    since the braces are a hash tag, all parts of a block lie on one node of a cluster.
Value
    A header, the name, a checksum of both, then the bytes of this part (the rest of the value)::

        magic 8 | version 2 | name bytes 2 | part 4 | parts 4 | total bytes 8 | payload bytes 8 |
        xxh3 of the payload 8 | seal 8 | name | xxh3 of all before 8

Parts
    A value fills at most PART_BYTES_MAX. The server copies a value into its answer: with values of 2 MiB that copy is
    still in its caches when it is sent, with 4 MiB it takes more than twice the processor time (measured with one
    value asked ahead), and beyond about 7 MiB its allocator becomes several times slower. Just above a power of two it
    wastes a fifth of the memory. Part 0 is written last and names the seal of the block, the xxh3 of the
    checksums of all parts in order: parts that different writers left do not pass for one block.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Final

import xxhash

from kvstore.tier import KEY_PREFIX_BYTES, TierNamespace

_MAGIC: Final = b"kvsblock"
_TEXT_MAGIC: Final = b"kvstext\x01"
_VERSION: Final = 2
_HEAD: Final = struct.Struct("<8sHHIIQQQQ")
_CHECK: Final = struct.Struct("<Q")
#: Longest value, with its header. The server adds a few bytes of its own, and all together should stay at 2 MiB.
PART_BYTES_MAX: Final = (2 << 20) - 64
#: Room for the longest header, so that the size of a part does not depend on the length of the name.
_HEADER_ROOM: Final = 960
#: Bytes of a block in one part; the last part has the rest.
PAYLOAD_BYTES: Final = PART_BYTES_MAX - _HEADER_ROOM
#: Longest name: header, name and checksum fit their room.
NAME_BYTES_MAX: Final = 512
#: What no header is longer than.
HEADER_BYTES_MAX: Final = _HEAD.size + NAME_BYTES_MAX + _CHECK.size


def part_count(size_bytes: int) -> int:
    """Parts of a block."""
    return max(1, -(-size_bytes // PAYLOAD_BYTES))


def part_bytes(size_bytes: int, part: int) -> int:
    """Bytes of a block in one of its parts."""
    return min(PAYLOAD_BYTES, size_bytes - part * PAYLOAD_BYTES)


def header_bytes(name: bytes) -> int:
    """Bytes in front of the payload."""
    return _HEAD.size + len(name) + _CHECK.size


def seal_of(checks: list[int]) -> int:
    """What part 0 says of all parts."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(checks)}Q", *checks))


def pack_header(name: bytes, size_bytes: int, part: int, check: int, seal: int) -> bytes:
    """The header of a part. seal: 0 but for part 0."""
    parts, payload = part_count(size_bytes), part_bytes(size_bytes, part)
    head = _HEAD.pack(_MAGIC, _VERSION, len(name), part, parts, size_bytes, payload, check, seal) + name
    return head + _CHECK.pack(xxhash.xxh3_64_intdigest(head))


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """What a part says of itself.

    Attributes:
        total_bytes: Of the block.
        payload_bytes: Of this part.
        check: xxh3 of the payload.
        seal: See seal_of; 0 but for part 0.
    """

    part: int
    parts: int
    total_bytes: int
    payload_bytes: int
    check: int
    seal: int


def parse_header(name: bytes, data: bytes | bytearray | memoryview) -> Header | None:
    """The header at the beginning of a value; None where this is no whole part of this block in this format."""
    end = _HEAD.size + len(name)
    if len(data) < end + _CHECK.size:
        return None
    magic, version, name_bytes, part, parts, total, payload, check, seal = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION or name_bytes != len(name) or data[_HEAD.size : end] != name:
        return None
    if _CHECK.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(data[:end]):
        return None
    # A checksum keeps accidents out, not a value that somebody made: what is derived from it must add up as well.
    if not total or parts != part_count(total) or part >= parts or payload != part_bytes(total, part):
        return None
    return Header(part, parts, total, payload, check, seal)


class Names:
    """Keys under one prefix.

    Args:
        prefix: Printable ASCII without braces.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        #: All namespaces, by digest.
        self.namespaces = self._prefix + b"namespaces"
        #: Matches every part of every block.
        self.pattern = self._escaped() + b"{*"

    def _escaped(self) -> bytes:
        return b"".join(b"\\" + bytes([byte]) if byte in b"*?[]\\^-" else bytes([byte]) for byte in self._prefix)

    def tag(self, name: bytes) -> bytes:
        """What decides on which node of a cluster a block lies."""
        return name.hex().encode()

    def part(self, name: bytes, part: int) -> bytes:
        """Key of a part."""
        return b"%b{%b}:%d" % (self._prefix, name.hex().encode(), part)

    def parts(self, name: bytes, parts: int) -> list[bytes]:
        """Keys of all parts."""
        stem = b"%b{%b}:" % (self._prefix, name.hex().encode())
        return [stem + b"%d" % part for part in range(parts)]

    def order(self, digest: bytes) -> bytes:
        """A sorted set: when each block of a namespace was used last."""
        return self._prefix + b"order:" + digest.hex().encode()

    def pattern_of(self, digest: bytes | None) -> bytes:
        """Matches every part of a namespace's blocks; None: every key of ours."""
        return self._escaped() + b"*" if digest is None else self.pattern[:-1] + digest.hex().encode() + b"*"

    def is_beside(self, key: bytes) -> bool:
        """Whether a key is ours and no part of a block."""
        return key == self.namespaces or key.startswith(self._prefix + b"order:")

    def parse(self, key: bytes) -> tuple[bytes, int] | None:
        """Block and part that a key is of; None where it is not one of ours."""
        begin, tag, part = key[: len(self._prefix) + 1], *key[len(self._prefix) + 1 :].partition(b"}:")[::2]
        if begin != self._prefix + b"{" or not part.isdigit() or len(part) > 9:
            return None
        try:
            name = bytes.fromhex(tag.decode("ascii"))
        except ValueError:
            return None
        return (name, int(part)) if len(name) >= KEY_PREFIX_BYTES else None


def pack_namespace(namespace: TierNamespace) -> bytes:
    """A namespace as a value that says what it is."""
    text = json.dumps({"identity": namespace.identity, "group_bytes": namespace.group_bytes}).encode()
    body = _TEXT_MAGIC + namespace.digest + text
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def parse_namespace(digest: bytes, data: bytes) -> TierNamespace | None:
    """The namespace in a value; None where it is damaged or somebody else's."""
    body, check = data[: -_CHECK.size], data[-_CHECK.size :]
    begin = _TEXT_MAGIC + digest
    if not body.startswith(begin) or check != _CHECK.pack(xxhash.xxh3_64_intdigest(body)):
        return None
    try:
        fields = json.loads(body[len(begin) :])
        identity, group_bytes = fields["identity"], tuple(fields["group_bytes"])
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(identity, str) or not all(type(size) is int and size >= 0 for size in group_bytes):
        return None
    return TierNamespace(digest, identity, group_bytes)
