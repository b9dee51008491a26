"""Empty slots of a buffer or pipe, some of them in stock, so that a small record costs no call that waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstore.arena import Epochs, Offsets
from kvstore.client import Client
from kvstore.errors import KVStoreError, NoMapping, RetryLater, StaleGeneration
from kvstore.remote import RemoteArena
from kvstore.tensors import Bytes

#: Reasons for a refused store that pass by themselves.
PASSING: Final = frozenset({"pinned", "share", "populating", "copying", "queue_full"})
#: Slots that are reserved at once where fewer are needed, by group: heads, small and large parts. In all 640 KiB.
_STOCK: Final = (32, 8, 0)
#: How long a store waits for a pool that is being populated.
_POPULATING_S: Final = 5.0


class Refused(RetryLater):
    """The pool did not take a record; nothing of it is left there.

    Attributes:
        reasons: Words of InsertResult.refused.
    """

    def __init__(self, *reasons: str) -> None:
        super().__init__(f"the pool took no record: {', '.join(sorted(reasons))}")
        self.reasons = frozenset(reasons)

    @property
    def passing(self) -> bool:
        """Whether it may work a little later."""
        return self.reasons <= PASSING


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """Slots that are to be filled."""

    generation: bytes
    offsets: Offsets
    epochs: Epochs


class Slots:
    """See the module. For one thread at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._generation = b""
        self._offsets: list[list[int]] = [[] for _ in _STOCK]
        self._epochs: list[list[int]] = [[] for _ in _STOCK]

    def take(self, kv_group: int, count: int) -> Taken:
        """Takes slots, from the stock as far as it goes.

        Raises:
            Refused: the pool has no room for all of them.
            RetryLater: the daemon has gone.
        """
        if self._client.generation != self._generation:
            self._forget()
        offsets, epochs = self._offsets[kv_group], self._epochs[kv_group]
        if len(offsets) < count:
            wanted = max(count - len(offsets), _STOCK[kv_group])
            more, _ = self._client.reserve_slots(wanted, kv_group, _POPULATING_S, (), None)
            if more.generation != self._generation:
                self._forget()
                self._generation = more.generation
            offsets += more.offsets.tolist()
            epochs += more.epochs.tolist()
            if len(offsets) < count:
                # Not kept until there is room for all: two who wait for each other's would wait for ever.
                self.give_back(kv_group, self._cut(kv_group, len(offsets)))
                raise Refused(more.shortfall or "pinned")
        return self._cut(kv_group, count)

    def give_stock_back(self) -> None:
        """Returns what is in stock. For a daemon that stops, which waits for it and gives no more.

        A pipe keeps its own: its ends hold claims that the daemon waits for anyway, and what is on its way can be
        received for as long as there are slots for cursors.
        """
        for kv_group in range(len(_STOCK)):
            if self._offsets[kv_group]:
                self.give_back(kv_group, self._cut(kv_group, len(self._offsets[kv_group])))

    def give_back(self, kv_group: int, taken: Taken) -> None:
        """Returns slots to the pool."""
        try:
            self._client.abort_slots(taken.generation, taken.offsets, taken.epochs)
        except KVStoreError:
            self._forget()  # the session has gone, and all slots with it

    def fill(self, taken: Taken, blocks: Sequence[Bytes]) -> None:
        """Brings blocks into slots.

        Raises:
            StaleGeneration, RetryLater: the session has gone, or the bytes did not arrive.
        """
        arena = self._client.arena
        if arena is None and self._client.attached:
            raise NoMapping(
                f"{self._client.endpoint} is reached over the network, and this client has no memory for its blocks: "
                "connect with staging_bytes, or on the daemon's host (unix:PATH)"
            )
        if arena is None or arena.generation != taken.generation:
            raise StaleGeneration("the daemon was restarted while blocks were stored")
        if isinstance(arena, RemoteArena):
            arena.send(taken.offsets, taken.epochs, blocks)  # from where the caller has them
            return
        pool = arena.as_numpy()
        for offset, block in zip(taken.offsets.tolist(), blocks, strict=True):
            np.copyto(pool[offset : offset + block.nbytes], block)

    def publish(self, commits: Sequence[tuple[int, Taken, Sequence[bytes]]], *, keep: bool, wait: bool) -> None:
        """Commits filled slots under keys that nobody else uses, one group after the other.

        Args:
            commits: The group, its slots, and their keys.
            wait: For the last answer. Without, it is known beforehand: where calls are ordered (on the daemon's host)
                nothing but the end of the session can come between. On another host it is waited for in any case.

        Raises:
            StaleGeneration, RetryLater: the session has gone, or a key is there.
        """
        remote = isinstance(self._client.arena, RemoteArena)
        waited = commits if remote else commits[-1:] if wait else []
        if posted := commits[: len(commits) - len(waited)]:
            self._client.post_commits(
                posted[0][1].generation,
                [(kv_group, taken.offsets, taken.epochs, keys) for kv_group, taken, keys in posted],
                keep=keep,
            )
        for kv_group, taken, keys in waited:
            outcomes = self._client.commit_slots(
                taken.generation, taken.offsets, taken.epochs, keys, kv_group, None, keep=keep
            )
            if (outcomes == 3).any():
                raise StaleGeneration("the daemon does not know slots that it gave to this session")
            if (outcomes != 1).any():
                raise RetryLater("somebody else has stored under such a key")

    def _cut(self, kv_group: int, count: int) -> Taken:
        offsets, epochs = self._offsets[kv_group], self._epochs[kv_group]
        taken = Taken(self._generation, np.array(offsets[:count], np.uint64), np.array(epochs[:count], np.uint32))
        del offsets[:count], epochs[:count]
        return taken

    def _forget(self) -> None:
        self._generation = self._client.generation or b""
        for numbers in (*self._offsets, *self._epochs):
            numbers.clear()
