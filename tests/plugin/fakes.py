"""A daemon in memory behind the engine-level calls of `kvstore.Client`, that can die, come back and fall silent.

The real client and daemon are tested elsewhere; here the order of events is what matters, so they happen when told.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from kvstore.direct import DiskExtent
from kvstore.errors import DaemonUnavailable, DeadlineExceeded, StaleGeneration

SLOT_BYTES = 64


@dataclasses.dataclass(frozen=True)
class FakeLease:
    id: int
    generation: bytes
    offsets: np.ndarray
    epochs: np.ndarray
    pending: int = 0
    pending_from: str = ""
    extents: tuple[DiskExtent, ...] = ()
    below_s: float = 0.0
    token_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class FakeReservation:
    generation: bytes
    offsets: np.ndarray
    epochs: np.ndarray
    shortfall: str | None


class FakeArena:
    """The mapping of one life of the daemon. Stays readable after the daemon has died."""

    def __init__(self, generation: bytes, slots: int) -> None:
        self.generation = generation
        self.memory = np.zeros((slots, SLOT_BYTES), np.uint8)
        self.epochs = np.zeros(slots, np.uint32)
        self.size_bytes = self.memory.nbytes
        self.address = self.memory.ctypes.data

    def epochs_of(self, offsets: np.ndarray) -> np.ndarray:
        return self.epochs[(offsets // SLOT_BYTES).astype(np.int64)]

    def slot(self, offset: int) -> np.ndarray:
        return self.memory[int(offset) // SLOT_BYTES]


class FakeDaemon:
    """Attributes:
    up: There is a daemon.
    silent: It takes calls and does not answer.
    disk: Copies below the pool, by key. They survive the daemon.
    coming: Slots that are being filled from there, by key.
    coming_max: Most of them at a time.
    dropped: Keys that were removed by who had claimed them.
    leased: Keys that are leased on the disk, by lease.
    gds: What is told to clients.
    block_s: How long a block takes to come up, as it says; 0: it does not know.
    token_s: What a client has told last.
    folder: Where blocks on the disk lie in files, if any client shall read them there.
    """

    _generations = itertools.count(1)

    def __init__(self, slots: int = 64) -> None:
        self.slots = slots
        self.coming_max = slots
        self.disk: dict[bytes, np.ndarray] = {}
        self.dropped: list[bytes] = []
        self.up = False
        self.silent = False
        self.gds = "off"
        self.block_s = self.token_s = 0.0
        self.folder: Path | None = None
        self.start()

    def start(self) -> None:
        self.up = True
        self.arena = FakeArena(f"generation {next(self._generations)}".encode(), self.slots)
        self.free = set(range(self.slots))
        self.reserved: set[int] = set()
        self.blocks: dict[bytes, int] = {}
        self.coming: dict[bytes, int] = {}
        self.leases: dict[int, list[int]] = {}
        self.leased: dict[int, list[bytes]] = {}
        self.gone: set[int] = set()  # removed, and still pinned by somebody
        self.claims: dict[int, list[bytes]] = {}
        self.calls: list[str] = []
        self._lease_ids = itertools.count(1)

    def die(self) -> None:
        self.up = False

    def pins(self, slot: int) -> int:
        return sum(slots.count(slot) for slots in self.leases.values())

    def evict(self, key: bytes) -> None:
        """Removes a block if nobody has pinned it."""
        slot = self.blocks[key]
        if not self.pins(slot):
            del self.blocks[key]
            self._to_free(slot)

    def trample(self, key: bytes) -> None:
        """Takes a block away under its readers, which the real daemon never does: they tell by the slot's epoch."""
        slot = self.blocks.pop(key)
        self.arena.epochs[slot] += 1
        self.arena.memory[slot] = 0xEE
        if self.pins(slot):
            self.gone.add(slot)
        else:
            self._to_free(slot)

    def copy_down(self, key: bytes) -> None:
        """Copies a block to disk."""
        self.disk[key] = self.arena.memory[self.blocks[key]].copy()
        if self.folder is not None:
            (self.folder / key.hex()).write_bytes(self.disk[key].tobytes())

    def extent_of(self, key: bytes) -> DiskExtent:
        """Where a block lies on the disk."""
        path = (self.folder or Path("nowhere")) / key.hex()
        return DiskExtent(str(path), 0, SLOT_BYTES, xxhash.xxh3_64_intdigest(self.disk[key].tobytes()))

    def promote(self, keys: Sequence[bytes]) -> int:
        """Begins to bring keys up. Returns how many of them, from the first on, are on their way or there."""
        run = 0
        for key in keys:
            if key not in self.blocks and key not in self.coming:
                if key not in self.disk or not self.free or len(self.coming) >= self.coming_max:
                    break
                self.coming[key] = self.free.pop()
            run += 1
        return run

    def come_up(self, key: bytes) -> None:
        """One of them has come up, or its copy was lost meanwhile."""
        slot = self.coming.pop(key)
        if key in self.disk and key not in self.blocks:
            self.arena.memory[slot] = self.disk[key]
            self.blocks[key] = slot
        else:
            self._to_free(slot)

    def _to_free(self, slot: int) -> None:
        self.arena.epochs[slot] += 1
        self.arena.memory[slot] = 0
        self.free.add(slot)

    def check(self) -> None:
        """Every slot is in exactly one place."""
        places = sorted([*self.free, *self.reserved, *self.blocks.values(), *self.coming.values(), *self.gone])
        assert places == list(range(self.slots))


class FakeClient:
    """One session. Attaches again as soon as the daemon is back and `attach` is called."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon = daemon
        self.arena: FakeArena | None = None
        self.closed = False
        self.draining = False
        self.reserved: dict[bytes, set[int]] = {}  # by generation
        self.attach()

    def attach(self) -> None:
        self.arena = self.daemon.arena if self.daemon.up else None

    @property
    def attached(self) -> bool:
        return self.arena is not None and self.daemon.up and not self.closed

    @property
    def gds(self) -> str | None:
        return self.daemon.gds if self.attached else None

    @property
    def generation(self) -> bytes | None:
        return self.arena.generation if self.arena is not None and self.daemon.up else None

    def _call(self, name: str) -> FakeDaemon:
        if not self.daemon.up or self.arena is None or self.closed:
            raise DaemonUnavailable("no daemon")
        if self.daemon.silent:
            raise DeadlineExceeded("no answer")
        if self.arena is not self.daemon.arena:
            raise StaleGeneration("another life")
        self.daemon.calls.append(name)
        return self.daemon

    def reserve(self, count: int) -> FakeReservation:
        daemon = self._call("reserve")
        taken = sorted(daemon.free)[:count]
        daemon.free -= set(taken)
        daemon.reserved |= set(taken)
        self.reserved.setdefault(daemon.arena.generation, set()).update(taken)
        slots = np.array(taken, np.int64)
        return FakeReservation(
            daemon.arena.generation,
            (slots * SLOT_BYTES).astype(np.uint64),
            daemon.arena.epochs[slots],
            "pinned" if len(taken) < count else None,
        )

    def commit(
        self,
        generation: bytes,
        offsets: np.ndarray,
        keys: Sequence[bytes],
        *,
        kv_group: int = 0,
        parent: bytes | None = None,
        epochs: np.ndarray | None = None,
    ) -> np.ndarray:
        daemon = self._call("commit")
        if generation != daemon.arena.generation:
            raise StaleGeneration("another life")
        outcomes = []
        fresh = self._fresh(offsets, epochs)
        for offset, key in zip(offsets.tolist(), keys, strict=True):
            slot = int(offset) // SLOT_BYTES
            if slot not in fresh:
                outcomes.append(3)
                continue
            daemon.reserved.remove(slot)
            self.reserved[generation].discard(slot)
            if key in daemon.blocks:
                daemon._to_free(slot)
                outcomes.append(2)
            else:
                daemon.blocks[key] = slot
                outcomes.append(1)
        return np.array(outcomes, np.uint8)

    def _fresh(self, offsets: np.ndarray, epochs: np.ndarray | None) -> set[int]:
        """Slots that are reserved, and were not handed out anew since these epochs."""
        assert epochs is not None, "a late call could hit slots that were handed out anew"
        slots = [int(offset) // SLOT_BYTES for offset in offsets.tolist()]
        now = self.daemon.arena.epochs[slots].tolist()
        pairs = zip(slots, epochs.tolist(), now, strict=True)
        return {slot for slot, then, current in pairs if then == current} & self.daemon.reserved

    def abort(self, generation: bytes, offsets: np.ndarray, epochs: np.ndarray | None = None) -> int:
        daemon = self._call("abort")
        slots = self._fresh(offsets, epochs)
        if generation != daemon.arena.generation:
            return 0
        daemon.reserved -= slots
        self.reserved.setdefault(generation, set()).difference_update(slots)
        for slot in slots:
            daemon._to_free(slot)
        return len(slots)

    def acquire(
        self,
        queries: Sequence[tuple[int, Sequence[bytes]]],
        *,
        extents_min: Sequence[int] = (),
        token_s: float = 0.0,
    ) -> list[FakeLease]:
        daemon = self._call("acquire")
        daemon.token_s = token_s or daemon.token_s
        leases = []
        for (_group, keys), least in zip(queries, extents_min or [0] * len(queries), strict=True):
            run = list(itertools.takewhile(lambda key: key in daemon.blocks, keys))
            slots = np.array([daemon.blocks[key] for key in run], np.int64)
            lease_id = next(daemon._lease_ids) if run else 0
            if run:
                daemon.leases[lease_id] = slots.tolist()
            below = list(itertools.takewhile(lambda key: key in daemon.disk, keys[len(run) :]))
            if 0 < least <= len(below):
                lease_id = lease_id or next(daemon._lease_ids)
                daemon.leases.setdefault(lease_id, [])
                extents = tuple(map(daemon.extent_of, below))
                daemon.leased[lease_id] = below
            else:
                extents = ()
            pending = 0 if extents else daemon.promote(keys[len(run) :])
            leases.append(
                FakeLease(
                    lease_id,
                    daemon.arena.generation,
                    (slots * SLOT_BYTES).astype(np.uint64),
                    daemon.arena.epochs[slots],
                    pending,
                    "disk",
                    extents,
                    daemon.block_s * (pending or len(extents)),
                    daemon.token_s,
                )
            )
        return leases

    def claim(self, keys: Sequence[bytes], *, kv_group: int = 0) -> FakeLease:
        daemon = self._call("claim")
        claimed = {key for others in daemon.claims.values() for key in others}
        run = list(itertools.takewhile(lambda key: key in daemon.blocks and key not in claimed, keys))
        slots = np.array([daemon.blocks[key] for key in run], np.int64)
        lease_id = next(daemon._lease_ids) if run else 0
        if run:
            daemon.leases[lease_id] = slots.tolist()
            daemon.claims[lease_id] = run
        return FakeLease(
            lease_id, daemon.arena.generation, (slots * SLOT_BYTES).astype(np.uint64), daemon.arena.epochs[slots]
        )

    def lookup(self, keys: Sequence[bytes]) -> int:
        daemon = self._call("lookup")
        return len(list(itertools.takewhile(lambda key: key in daemon.blocks or key in daemon.disk, keys)))

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        daemon = self._call("present")
        return [key in daemon.blocks or key in daemon.disk for key in keys]

    def release(self, leases: Iterable[FakeLease], *, remove: bool = False) -> int:
        daemon = self._call("release")
        mine = [lease for lease in leases if lease.generation == daemon.arena.generation]
        released = 0
        for lease in mine:
            released += daemon.leases.pop(lease.id, None) is not None
            daemon.leased.pop(lease.id, None)
            keys = daemon.claims.pop(lease.id, None)
            assert not remove or keys is not None or lease.id not in daemon.leases, "only claims may remove"
            for key in keys or () if remove else ():
                daemon.disk.pop(key, None)
                daemon.dropped.append(key)
                if key in daemon.blocks:
                    daemon.gone.add(daemon.blocks.pop(key))
        for slot in [slot for slot in daemon.gone if not daemon.pins(slot)]:
            daemon.gone.remove(slot)
            daemon._to_free(slot)
        return released

    def flush(self) -> int:
        daemon = self._call("flush")
        daemon.disk.clear()
        keys = [key for key in daemon.blocks if not daemon.pins(daemon.blocks[key])]
        for key in keys:
            daemon.evict(key)
        return len(keys)

    def close(self) -> None:
        """Ends the session: what it held goes back."""
        self.closed = True
        daemon = self.daemon
        for slot in self.reserved.pop(daemon.arena.generation, set()) & daemon.reserved:
            daemon.reserved.remove(slot)
            daemon._to_free(slot)
