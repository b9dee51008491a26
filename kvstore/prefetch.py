"""Warming up: blocks of the tiers below come into the free part of the pool before anybody asks for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Final

from kvstore.blocks import DIGEST_BYTES
from kvstore.directory import Keyspace, Share
from kvstore.hierarchy import Hierarchy
from kvstore.tier import KEY_PREFIX_BYTES

#: Bytes that are under way at once: enough to keep a disk busy, and little against a pool.
_UNDER_WAY_BYTES: Final = 64 << 20
#: The last ones are waited for by name, at most so many.
_UNDER_WAY_MAX: Final = 65_536
#: Blocks that are looked at before others may run.
_STEP_BLOCKS: Final = 256


async def prefetch(hierarchy: Hierarchy, digest: bytes | None, max_bytes: int) -> AsyncIterator[tuple[int, int]]:
    """Brings blocks of a namespace (None: of all) from the tiers below into the free part of the pool.

    Args:
        max_bytes: Of blocks; 0: as much as is free.

    Yields:
        Blocks and bytes so far; the last one when all of them have come.

    Raises:
        UnknownNamespace: it was never opened in this life of the daemon.
    """
    hierarchy.namespaces.adopt()
    if digest is not None:
        hierarchy.namespaces.keyspace(digest, 0)
    share = Share("kvstore prefetch", 0)
    transfers = hierarchy.transfers
    blocks = size = 0
    coming: deque[tuple[Keyspace, bytes]] = deque(maxlen=_UNDER_WAY_MAX)
    for seen, (keyspace, key) in enumerate(_below(hierarchy, digest)):
        if max_bytes and size + keyspace.block_bytes > max_bytes:
            break
        while transfers.coming_bytes and transfers.coming_bytes + keyspace.slot_bytes > _UNDER_WAY_BYTES:
            await transfers.wait_for_some()
            yield blocks, size
        while hierarchy.pool.free_bytes < keyspace.slot_bytes and hierarchy.populating:
            await hierarchy.room_made()
            yield blocks, size
        if hierarchy.pool.free_bytes < keyspace.slot_bytes or hierarchy.draining:
            break
        # The world may have changed while it waited: promote() looks again, and brings nothing that is there.
        await transfers.promote(share, keyspace, [key], None, chained=False)
        if key in keyspace.coming:
            coming.append((keyspace, key))
            blocks, size = blocks + 1, size + keyspace.block_bytes
        if seen % _STEP_BLOCKS == _STEP_BLOCKS - 1:
            await asyncio.sleep(0)  # engines come first
    while any(key in keyspace.coming for keyspace, key in coming):
        await transfers.wait_for_some()
    yield blocks, size


def _below(hierarchy: Hierarchy, digest: bytes | None) -> Iterator[tuple[Keyspace, bytes]]:
    """What the tiers below have and the pool has not."""
    for tier in hierarchy.transfers.tiers:
        for name, _ in tier.scan(digest):
            entry = hierarchy.namespaces.entries.get(name[:DIGEST_BYTES])
            kv_group = int.from_bytes(name[DIGEST_BYTES:KEY_PREFIX_BYTES], "big")
            if entry is not None and kv_group < len(entry.keyspaces):
                keyspace, key = entry.keyspaces[kv_group], name[KEY_PREFIX_BYTES:]
                if key not in keyspace.blocks and key not in keyspace.coming:
                    yield keyspace, key
