"""Warming up: blocks of the tiers below come into the free part of the pool before anybody asks for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from kvstore.blocks import DIGEST_BYTES
from kvstore.directory import Share
from kvstore.hierarchy import Hierarchy
from kvstore.tier import KEY_PREFIX_BYTES

#: Bytes that are under way at once: enough to keep a disk busy, and little against a pool.
_PREFETCH_BYTES: Final = 64 << 20


async def prefetch(hierarchy: Hierarchy, digest: bytes | None, max_bytes: int) -> AsyncIterator[tuple[int, int]]:
    """Brings blocks of a namespace (None: of all) from the tiers below into the free part of the pool.

    Args:
        max_bytes: Of blocks; 0: as much as is free.

    Yields:
        Blocks and bytes so far.

    Raises:
        UnknownNamespace: it was never opened in this life of the daemon.
    """
    if digest is not None:
        hierarchy.keyspace(digest, 0)
    group = Share("kvstore prefetch", 0)
    blocks = size = 0
    for tier in hierarchy.transfers.tiers:
        for name, block_bytes in tier.scan(digest):
            entry = hierarchy.namespaces.get(name[:DIGEST_BYTES])
            kv_group = int.from_bytes(name[DIGEST_BYTES:KEY_PREFIX_BYTES], "big")
            if entry is None or kv_group >= len(entry.keyspaces):
                continue
            keyspace, key = entry.keyspaces[kv_group], name[KEY_PREFIX_BYTES:]
            if key in keyspace.blocks or key in keyspace.coming:
                continue
            if max_bytes and size + block_bytes > max_bytes:
                return
            while hierarchy.transfers.coming_bytes + keyspace.slot_bytes > _PREFETCH_BYTES:
                await hierarchy.transfers.wait_for_some()
                yield blocks, size
            if hierarchy.pool.free_bytes < keyspace.slot_bytes or hierarchy.draining:
                return
            if await hierarchy.transfers.promote(group, keyspace, [key], None, chained=False):
                blocks, size = blocks + 1, size + block_bytes
    while hierarchy.transfers.coming_bytes:
        await hierarchy.transfers.wait_for_some()
    yield blocks, size
