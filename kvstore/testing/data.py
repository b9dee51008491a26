"""Bytes that tell where they belong."""

from __future__ import annotations

import hashlib
from typing import Final

#: A prime, so that a copy that is off by pages, slots or granules does not fit its pattern.
_TILE_BYTES: Final = 4099


def make_block(key: bytes, size_bytes: int) -> bytes:
    """The bytes of a block, the same for the same key and size in every process and on every machine.

    Different for any two keys from the first byte on, and cheap (a few GB/s): a random tile, repeated.
    """
    seed = size_bytes.to_bytes(8, "little") + key
    tile = hashlib.shake_128(seed).digest(min(_TILE_BYTES, size_bytes))
    return (tile * (size_bytes // len(tile) + 1))[:size_bytes]
