"""The contract of a resting place below the pool.

A tier keeps copies of blocks by name and may forget any of them at any moment: it is a cache. What it does hand out is
right, or it is not handed out. It owns its space, its index, its eviction and its failures; the hierarchy decides what
goes in and what comes back, and no tier knows of another.

Names
    A block is named by ``digest (16 bytes) + group (2 bytes, big-endian) + block hash``, so that the blocks of a
    namespace share a prefix (see tier_key).
Buffers
    Buffers are borrowed for the time of the call, also when it is cancelled or its deadline is over: the coroutine does
    not return before nothing touches them any more, or says so by BUFFER_LOST, and then the caller must never reuse
    that buffer's memory for anything else.
Order
    Each write is idempotent and all-or-nothing: a reader finds the whole block or none. Blocks of one batch are in
    prefix order, and eviction takes suffixes first.
Threads
    Every method runs on the hierarchy's event loop and does not block it; executors of the tier's own move the bytes.
    Loads go before stores in every queue.
Faults
    Nothing here raises for a fault of the medium. Each block of a batch has its own answer, and the tier's state says
    what is wrong. One bad block never costs its neighbours. A tier that fails degrades alone and comes back alone.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

#: Bytes of digest and group in front of the block hash.
KEY_PREFIX_BYTES: Final = 18


def tier_key(digest: bytes, kv_group: int, key: bytes) -> bytes:
    """Name of a block in every tier."""
    return digest + kv_group.to_bytes(2, "big") + key


class TierState(enum.Enum):
    """How a tier is."""

    OK = "ok"
    LOADING = "loading"  # its index is being read; what is not read yet answers as absent
    DEGRADED = "degraded"  # it reads but does not write (full, read-only, breaker half open)
    FAILED = "failed"  # it answers everything as absent until it is back


class ReadOutcome(enum.Enum):
    """What became of one block of a read."""

    OK = "ok"  # the buffer holds the block, and its checksum was right
    ABSENT = "absent"
    DAMAGED = "damaged"  # it was there and is wrong; it is not promised again until it is written anew
    FAILED = "failed"  # an error or the deadline; it may be there the next time
    BUFFER_LOST = "buffer_lost"  # the medium hangs and may still write into the buffer


class WriteOutcome(enum.Enum):
    """What became of one block of a write."""

    STORED = "stored"
    EXISTS = "exists"
    NO_ROOM = "no_room"  # nothing could be evicted for it, or it can never fit
    THROTTLED = "throttled"  # too much is queued; stores are dropped before loads have to wait
    FAILED = "failed"
    BUFFER_LOST = "buffer_lost"  # the medium hangs and may still read the buffer


@dataclasses.dataclass(frozen=True, slots=True)
class TierNamespace:
    """A namespace that a tier has blocks of, as it was opened.

    Attributes:
        digest: Its name.
        identity: Its canonical text.
        group_bytes: Bytes of one block, by group.
    """

    digest: bytes
    identity: str
    group_bytes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Where a block lies on a medium that its reader can open by itself. Nothing else is written there until let_go().

    Attributes:
        path: The file.
        offset: Where the block starts in it; a multiple of 4096.
        size_bytes: Its length.
        check: xxh3_64 of its bytes. Readers compare: the medium is not above suspicion.
        hold: The tier's own.
    """

    path: str
    offset: int
    size_bytes: int
    check: int
    hold: Any


class Tier(abc.ABC):
    """See the module. Keys are made by tier_key; buffers are C-contiguous and of the block's size exactly.

    Attributes:
        name: What stats, metrics and settings call it.
        asks_others: Whether it only looks at what other daemons have: nothing is copied down to it, and it is not asked
            on behalf of another daemon, so that two that name each other do not go round in circles.
        shared: Whether other daemons may put blocks there too.
    """

    name: str
    asks_others: bool = False
    shared: bool = False

    @property
    @abc.abstractmethod
    def state(self) -> TierState:
        """How it is now."""

    @abc.abstractmethod
    async def open(self) -> None:
        """Takes hold of the medium. Returns soon: a large index is read afterwards (LOADING).

        Raises:
            ConfigError: it can never work as configured (a directory of a newer format, another daemon's directory).
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Finishes or drops what is under way, makes durable what was acknowledged, lets go of the medium."""

    @abc.abstractmethod
    def remember(self, namespace: TierNamespace) -> None:
        """Keeps the text of a namespace beside its blocks, so that it can be shown and checked after a restart."""

    @abc.abstractmethod
    def namespaces(self) -> list[TierNamespace]:
        """The namespaces that were remembered."""

    @abc.abstractmethod
    async def stat(self, keys: Sequence[bytes]) -> list[int | None]:
        """Size in bytes of each block, None where it is absent. A hint: the read decides."""

    @abc.abstractmethod
    async def read(self, blocks: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[ReadOutcome]:
        """Reads blocks into writable buffers. A buffer whose outcome is not OK holds anything."""

    @abc.abstractmethod
    async def write(self, blocks: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[WriteOutcome]:
        """Stores blocks; those that are there already are left alone. STORED: a read finds it from now on."""

    @abc.abstractmethod
    async def delete(self, keys: Sequence[bytes]) -> int:
        """Forgets blocks. Returns how many were there. They do not come back after a restart."""

    @abc.abstractmethod
    async def delete_namespace(self, digest: bytes | None) -> int:
        """Forgets every block of a namespace (None: of all). Returns how many were there."""

    @abc.abstractmethod
    def touch(self, keys: Sequence[bytes]) -> None:
        """Notes a use of blocks, in prefix order. Unknown ones are ignored."""

    @abc.abstractmethod
    def scan(self, digest: bytes | None = None) -> Iterator[tuple[bytes, int]]:
        """Keys and sizes of what is there, in no order; of one namespace where a digest is given.

        It may be read while blocks come and go; those that do may be in it or not.
        """

    @abc.abstractmethod
    def stats(self) -> Mapping[str, Any]:
        """`name`, `state`, `capacity_bytes`, `used_bytes`, `blocks`, and whatever else an operator of this tier
        wants.
        """

    async def hold(self, keys: Sequence[bytes], deadline_s: float) -> list[Held | None]:
        """Pins blocks where they lie, for readers that fetch the bytes themselves. None: absent, or the medium is not
        one to be read by others, which is what a tier says that does not know better.
        """
        return [None] * len(keys)

    def let_go(self, held: Held) -> None:
        """Ends what hold() began."""
        raise NotImplementedError("nothing was held")
