"""Which blocks are where, for `kvstore ls`. On the hierarchy's thread."""

from __future__ import annotations

import dataclasses

from kvstore.blocks import DIGEST_BYTES
from kvstore.hierarchy import Hierarchy
from kvstore.tier import KEY_PREFIX_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Listed:
    """One block.

    Attributes:
        digest, kv_group, key: Its name.
        size_bytes: Bytes of the block.
        pins: Leases that hold it now, and a copy under way.
        tiers: Names of the tiers that have a copy. Of tiers below the pool only the fastest one is named.
    """

    digest: bytes
    kv_group: int
    key: bytes
    size_bytes: int
    pins: int
    tiers: tuple[str, ...]


def list_blocks(hierarchy: Hierarchy, digest: bytes | None, limit: int) -> tuple[list[Listed], int]:
    """Up to `limit` blocks of a namespace (None: of all), those in the pool first.

    Returns:
        The blocks, and how many there are: in the pool, and below it as far as was looked for the list.

    Raises:
        UnknownNamespace: it was never opened in this life of the daemon.
    """
    hierarchy.namespaces.adopt()
    if digest is not None:
        hierarchy.namespaces.keyspace(digest, 0)
    listed: list[Listed] = []
    total = 0
    below = tuple(tier.name for tier in hierarchy.transfers.tiers[:1])
    entries = hierarchy.namespaces.entries.values() if digest is None else [hierarchy.namespaces.entries[digest]]
    for entry in entries:
        for keyspace in entry.keyspaces:
            total += len(keyspace.blocks)
            for block in keyspace.blocks.values():
                if len(listed) == limit:
                    break
                tiers = ("cpu", *below) if block.below and not entry.pool_only else ("cpu",)
                listed.append(
                    Listed(entry.digest, keyspace.kv_group, block.key, keyspace.block_bytes, block.pins, tiers)
                )
    for tier in hierarchy.transfers.tiers:
        for name, size_bytes in tier.scan(digest):
            if len(listed) >= limit:
                return listed, total
            name_digest, key = name[:DIGEST_BYTES], name[KEY_PREFIX_BYTES:]
            kv_group = int.from_bytes(name[DIGEST_BYTES:KEY_PREFIX_BYTES], "big")
            known = hierarchy.namespaces.entries.get(name_digest)
            if known is not None and kv_group < len(known.keyspaces) and key in known.keyspaces[kv_group].blocks:
                continue
            total += 1
            listed.append(Listed(name_digest, kv_group, key, size_bytes, 0, (tier.name,)))
    return listed, total
