"""What the daemon knows of each block: the entries of the directory. Owned by the hierarchy's thread."""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING, Any

from kvstore.arena import Segment, slot_bytes_for
from kvstore.policy import LruPolicy, Ticker

if TYPE_CHECKING:
    from kvstore.leases import Group


class BlockState(enum.Enum):
    """Where a block is in its life."""

    READY = "ready"  # in the directory; may be leased, may be evicted while nobody holds it
    DOOMED = "doomed"  # out of the directory; its slot goes back with the last pin


class Block:
    """One block that rests in the pool.

    Attributes:
        key: As the caller spelled it.
        offset: Its slot.
        pins: How many leases hold it. A pinned block keeps its slot and its bytes.
        claim: Id of the drop_select lease that may take it away; 0 where there is none.
        tick: Mark of the eviction policy; 0 while the policy does not know it (pinned when its turn came).
        parent: The block before it in its chain, as far as known. Never a younger one, so chains end.
        home: The policy that orders it, and the share it is counted in.
    """

    __slots__ = ("claim", "home", "key", "keyspace", "offset", "parent", "pins", "segment", "state", "tick")

    def __init__(self, key: bytes, keyspace: Keyspace, offset: int, parent: Block | None, home: Home) -> None:
        self.key = key
        self.keyspace = keyspace
        self.offset = offset
        self.segment: Segment | None = None
        self.pins = 0
        self.claim = 0
        self.state = BlockState.READY
        self.tick = 0
        self.parent = parent
        self.home = home


class Home:
    """The blocks of one slot size that one group stored: the unit in which recency is kept.

    Attributes:
        blocks: How many rest in the pool, pinned and doomed ones included.
    """

    __slots__ = ("blocks", "group", "policy", "slot_bytes")

    def __init__(self, group: Group, slot_bytes: int, ticker: Ticker) -> None:
        self.group = group
        self.slot_bytes = slot_bytes
        self.policy: LruPolicy[Block] = LruPolicy(ticker)
        self.blocks = 0


class Keyspace:
    """The blocks of one group of one namespace.

    Attributes:
        blocks: Directory: what may be answered, by key.
        waiters: Futures of those who wait for a key to come (or for the claim on it to go).
    """

    __slots__ = ("block_bytes", "blocks", "kv_group", "namespace", "slot_bytes", "waiters")

    def __init__(self, namespace: NamespaceEntry, kv_group: int, block_bytes: int) -> None:
        self.namespace = namespace
        self.kv_group = kv_group
        self.block_bytes = block_bytes
        self.slot_bytes = slot_bytes_for(block_bytes)
        self.blocks: dict[bytes, Block] = {}
        self.waiters: dict[bytes, list[asyncio.Future[None]]] = {}


class NamespaceEntry:
    """A namespace that was opened in this life of the daemon.

    Attributes:
        identity: Its canonical text.
        fields: The same, parsed; for people.
    """

    __slots__ = ("digest", "fields", "group_bytes", "identity", "keyspaces")

    def __init__(self, digest: bytes, identity: str, fields: dict[str, Any], group_bytes: tuple[int, ...]) -> None:
        self.digest = digest
        self.identity = identity
        self.fields = fields
        self.group_bytes = group_bytes
        self.keyspaces = tuple(Keyspace(self, index, size) for index, size in enumerate(group_bytes))
