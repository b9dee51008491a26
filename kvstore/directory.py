"""What the daemon knows of each block: the entries of the directory. Owned by the hierarchy's thread."""

from __future__ import annotations

import asyncio
import enum
import secrets
from typing import Any

from kvstore.arena import Segment, slot_bytes_for
from kvstore.journal import Journal
from kvstore.policy import LruPolicy, Ticker
from kvstore.tier import tier_key


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
        below: Whether the pool may let go of it without loss: a tier below has a copy, or its namespace wants none.
        claim: Id of the drop_select lease that may take it away; 0 where there is none.
        tick: Mark of the eviction policy; 0 while the policy does not know it (pinned when its turn came).
        parent: The block before it in its chain, as far as known and while this one answers. Never a younger one.
        children: How many blocks that answer name it as their parent: it leaves after them.
        share: What it is counted in.
        home: The policy that orders it.
    """

    __slots__ = (
        "below",
        "children",
        "claim",
        "home",
        "key",
        "keyspace",
        "offset",
        "parent",
        "pins",
        "segment",
        "share",
        "state",
        "tick",
    )

    def __init__(
        self, key: bytes, keyspace: Keyspace, offset: int, parent: Block | None, share: Share, home: Home
    ) -> None:
        self.key = key
        self.keyspace = keyspace
        self.offset = offset
        self.segment: Segment | None = None
        self.pins = 0
        self.below = keyspace.namespace.pool_only
        self.claim = 0
        self.state = BlockState.READY
        self.tick = 0
        self.parent = parent
        self.children = 0
        self.share = share
        self.home = home

    @property
    def name(self) -> bytes:
        """What the tiers call it."""
        return self.keyspace.prefix + self.key


class Share:
    """Whose blocks are counted together, and how much of the pool they may take.

    Attributes:
        name: For people.
        share_bytes: Most slot bytes that may be stored or reserved; 0: no limit but the pool.
        used_bytes: Slot bytes that are stored or reserved now.
    """

    __slots__ = ("name", "share_bytes", "used_bytes")

    def __init__(self, name: str, share_bytes: int) -> None:
        self.name = name
        self.share_bytes = share_bytes
        self.used_bytes = 0


class Home:
    """The unit in which recency is kept: the blocks of one slot size that one limited share has, or all others.

    Attributes:
        share: The share, where it has a limit: its own coldest blocks leave when it is at it. None: everybody else's.
        blocks: How many rest in the pool, pinned and doomed ones included.
        passed: Blocks whose turn to leave came while others continued them. They leave right after those; a use puts
            them back into the order (they may stay here then, and are skipped).
        next: Of those, the ones that nothing continues any more, to leave from the end.
    """

    __slots__ = ("blocks", "next", "passed", "policy", "share", "slot_bytes")

    def __init__(self, share: Share | None, slot_bytes: int, ticker: Ticker) -> None:
        self.share = share
        self.slot_bytes = slot_bytes
        self.policy: LruPolicy[Block] = LruPolicy(ticker)
        self.passed: dict[Block, None] = {}
        self.next: list[Block] = []
        self.blocks = 0


class Keyspace:
    """The blocks of one group of one namespace.

    Attributes:
        blocks: Directory: what may be answered, by key.
        prefix: What the names of its blocks begin with in the tiers.
        coming: Keys on their way up from a tier.
        fresh: Keys that came up from a tier and were not handed out yet, with the name of the tier.
        waiters: Futures of those who wait for a key to come (or for the claim on it to go).
        changes: Grows with everything that Watch reports; where it starts is random, so that the number of another life
            of the daemon is told apart.
        watcher: Future of those who wait for that, if anybody does.
        journal: What changed, where somebody follows the changes.
        kept: Blocks that stay in the pool until they are removed or the session ends that stored them, each with one
            pin; and where that session counts them.
    """

    __slots__ = (
        "block_bytes",
        "blocks",
        "changes",
        "coming",
        "fresh",
        "journal",
        "kept",
        "kv_group",
        "namespace",
        "prefix",
        "slot_bytes",
        "waiters",
        "watcher",
    )

    def __init__(self, namespace: NamespaceEntry, kv_group: int, block_bytes: int) -> None:
        self.namespace = namespace
        self.kv_group = kv_group
        self.block_bytes = block_bytes
        self.slot_bytes = slot_bytes_for(block_bytes)
        self.prefix = tier_key(namespace.digest, kv_group, b"")
        self.blocks: dict[bytes, Block] = {}
        self.coming: dict[bytes, Promotion] = {}
        self.fresh: dict[bytes, str] = {}
        self.waiters: dict[bytes, list[asyncio.Future[None]]] = {}
        self.changes = secrets.randbits(62) + 1
        self.watcher: asyncio.Future[None] | None = None
        self.journal: Journal | None = None
        self.kept: dict[Block, dict[Block, None]] = {}


class Promotion:
    """A key on its way up.

    Attributes:
        source: Name of the tier that it comes from.
        cancelled: Whether the key was removed meanwhile: what comes up is thrown away.
    """

    __slots__ = ("cancelled", "group", "key", "keyspace", "offset", "parent", "source")

    def __init__(
        self, key: bytes, keyspace: Keyspace, offset: int, parent: bytes | None, group: Share, source: str
    ) -> None:
        self.key = key
        self.keyspace = keyspace
        self.offset = offset
        self.parent = parent
        self.group = group
        self.source = source
        self.cancelled = False


class NamespaceEntry:
    """A namespace that was opened in this life of the daemon.

    Attributes:
        identity: Its canonical text.
        fields: The same, parsed; for people.
        pool_only: Whether its blocks are in the pool only: nothing is copied down, and no tier is asked.
        adopted: Whether only a tier spoke of it so far, and nobody opened it.
        token_s: How long a token of a prompt takes an engine to compute, as one has told last; 0: none has.
    """

    __slots__ = ("adopted", "digest", "fields", "group_bytes", "identity", "keyspaces", "pool_only", "token_s")

    def __init__(self, digest: bytes, identity: str, fields: dict[str, Any], group_bytes: tuple[int, ...]) -> None:
        self.pool_only = False
        self.adopted = False
        self.token_s = 0.0
        self.digest = digest
        self.identity = identity
        self.fields = fields
        self.group_bytes = group_bytes
        self.keyspaces = tuple(Keyspace(self, index, size) for index, size in enumerate(group_bytes))
