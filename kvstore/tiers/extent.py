"""How one block lies in its slab: the payload, then a footer in the last bytes of the extent. Pure layout.

::

    | payload, size_bytes | zeros | footer, 256 bytes |
    |<------------ extent_bytes, a multiple of 4096 ------------->|

The footer stands at the end, not in front, so that the payload starts on a 4 KiB boundary and goes straight from and to
the pool, and so that a block whose size is no multiple of 4096 keeps its footer in what would be padding anyway. One
that is pays 4 KiB: 6.3 % at 64 KiB, 0.05 % at 8 MiB.

A footer vouches for its payload (length, xxh3 of the bytes), for the name of the block, for the place where it was
meant to be (a write that went elsewhere is found out) and for itself (its own xxh3). All integers are little-endian.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Final

import xxhash

from kvstore.blocks import KEY_BYTES_MAX
from kvstore.tier import KEY_PREFIX_BYTES

#: What O_DIRECT may ask of offsets and lengths on any device, and the block of every common file system.
ALIGN_BYTES: Final = 4096
FOOTER_BYTES: Final = 256
#: Longest name of a block in a tier.
TIER_KEY_BYTES_MAX: Final = KEY_PREFIX_BYTES + KEY_BYTES_MAX

_MAGIC: Final = b"kvextent"
_VERSION: Final = 1
# magic, version, bytes of the key, size_bytes, sequence, xxh3 of the payload, slab, extent, key, padding
_BODY: Final = struct.Struct(f"<8sHI2xQQQII{TIER_KEY_BYTES_MAX}s54x")
_CHECK: Final = struct.Struct("<Q")
assert _BODY.size + _CHECK.size == FOOTER_BYTES


def extent_bytes_for(size_bytes: int) -> int:
    """Bytes of the extent that holds a block of this size."""
    return -(-(size_bytes + FOOTER_BYTES) // ALIGN_BYTES) * ALIGN_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Footer:
    """What the end of an extent says.

    Attributes:
        key: Full name of the block.
        size_bytes: Length of the payload.
        sequence: Grows with each write of this directory; the higher one of two with the same key is the newer.
        check: xxh3_64 of the payload.
        slab, extent: Where it was meant to be.
    """

    key: bytes
    size_bytes: int
    sequence: int
    check: int
    slab: int
    extent: int


def pack_footer(key: bytes, size_bytes: int, sequence: int, check: int, slab: int, extent: int) -> bytes:
    """The FOOTER_BYTES bytes of a footer."""
    body = _BODY.pack(_MAGIC, _VERSION, len(key), size_bytes, sequence, check, slab, extent, key)
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def parse_footer(data: bytes | memoryview) -> Footer | None:
    """Reads a footer; None where the bytes are none, or not one that was written whole."""
    body = bytes(data[: _BODY.size])
    if body[:8] != _MAGIC or _CHECK.unpack_from(data, _BODY.size)[0] != xxhash.xxh3_64_intdigest(body):
        return None
    _, version, key_bytes, size_bytes, sequence, check, slab, extent, key = _BODY.unpack(body)
    if version != _VERSION or not KEY_PREFIX_BYTES < key_bytes <= TIER_KEY_BYTES_MAX:
        return None
    return Footer(key[:key_bytes], size_bytes, sequence, check, slab, extent)
