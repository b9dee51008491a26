"""Tiers to test with: one that is a dict, and one that does to another tier's answers what media do on bad days."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from kvstore.policy import LruPolicy
from kvstore.tier import ReadOutcome, Tier, TierNamespace, TierState, WriteOutcome

Operation = Literal["read", "write", "delete"]
#: What late bytes of a hung read look like.
LATE_BYTE = 0xEE


class _Kept:
    """One block of a DictTier."""

    __slots__ = ("data", "key", "tick")

    def __init__(self, key: bytes, data: bytes) -> None:
        self.tick = 0
        self.key = key
        self.data = data


class DictTier(Tier):
    """Keeps copies in a dict, with a byte budget and eviction. Forgets everything when it is dropped, not when it is
    closed: it can be opened again.
    """

    def __init__(self, capacity_bytes: int = 1 << 30, name: str = "dict") -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._blocks: dict[bytes, _Kept] = {}
        self._policy: LruPolicy[_Kept] = LruPolicy()
        self._namespaces: dict[bytes, TierNamespace] = {}
        self._used_bytes = 0
        self._evicted = 0

    @property
    def state(self) -> TierState:
        return TierState.OK

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def remember(self, namespace: TierNamespace) -> None:
        self._namespaces[namespace.digest] = namespace

    def namespaces(self) -> list[TierNamespace]:
        return list(self._namespaces.values())

    async def stat(self, keys: Sequence[bytes]) -> list[int | None]:
        return [None if (kept := self._blocks.get(key)) is None else len(kept.data) for key in keys]

    async def read(self, blocks: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[ReadOutcome]:
        outcomes = []
        for key, buffer in blocks:
            kept = self._blocks.get(key)
            if kept is None or len(kept.data) != buffer.nbytes:
                outcomes.append(ReadOutcome.ABSENT)
            else:
                buffer.cast("B")[:] = kept.data
                outcomes.append(ReadOutcome.OK)
        return outcomes

    async def write(self, blocks: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[WriteOutcome]:
        outcomes = []
        fresh: list[_Kept] = []
        for key, buffer in blocks:
            if key in self._blocks:
                outcomes.append(WriteOutcome.EXISTS)
            elif not self._make_room(buffer.nbytes):
                outcomes.append(WriteOutcome.NO_ROOM)
            else:
                kept = self._blocks[key] = _Kept(key, bytes(buffer))
                self._used_bytes += buffer.nbytes
                fresh.append(kept)
                outcomes.append(WriteOutcome.STORED)
        self._policy.touch(fresh)
        return outcomes

    def _make_room(self, size_bytes: int) -> bool:
        if size_bytes > self.capacity_bytes:
            return False
        while self._used_bytes + size_bytes > self.capacity_bytes:
            kept = self._policy.pop()
            if kept is None:
                return False
            self._forget(kept)
            self._evicted += 1
        return True

    def _forget(self, kept: _Kept) -> None:
        del self._blocks[kept.key]
        self._policy.forget(kept)
        self._used_bytes -= len(kept.data)

    async def delete(self, keys: Sequence[bytes]) -> int:
        found = [kept for key in dict.fromkeys(keys) if (kept := self._blocks.get(key)) is not None]
        for kept in found:
            self._forget(kept)
        return len(found)

    async def delete_namespace(self, digest: bytes | None) -> int:
        for known in [digest] if digest is not None else list(self._namespaces):
            self._namespaces.pop(known, None)
        return await self.delete([key for key, _ in self.scan(digest)])

    def touch(self, keys: Sequence[bytes]) -> None:
        self._policy.touch([kept for key in keys if (kept := self._blocks.get(key)) is not None])

    def scan(self, digest: bytes | None = None) -> Iterator[tuple[bytes, int]]:
        return iter(
            [(key, len(kept.data)) for key, kept in self._blocks.items() if digest is None or key.startswith(digest)]
        )

    def stats(self) -> Mapping[str, Any]:
        return {
            "name": self.name,
            "state": self.state.value,
            "capacity_bytes": self.capacity_bytes,
            "used_bytes": self._used_bytes,
            "blocks": len(self._blocks),
            "evictions": self._evicted,
        }


class Fault(enum.Enum):
    """What can be done to one block of a batch."""

    ERROR = "error"  # FAILED, nothing was moved
    DAMAGED = "damaged"  # of a read: the medium changed the bytes; the block is gone
    THROTTLED = "throttled"  # of a write
    NO_ROOM = "no_room"  # of a write
    TORN = "torn"  # of a write: STORED, but the next read finds it DAMAGED
    LOST = "lost"  # of a write: STORED, but it never got there
    HUNG = "hung"  # no answer before the deadline, then BUFFER_LOST; the tier is FAILED until release_hung()


@dataclasses.dataclass(slots=True)
class _Injected:
    operation: Operation
    fault: Fault
    keys: frozenset[bytes] | None
    left: int | None


class Gate:
    """Holds calls of one operation.

    Attributes:
        reached: Set when a call waits at the gate.
        opened: Set it to let calls through.
    """

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def wait(self) -> None:
        self.reached.set()
        await self.opened.wait()


class FaultyTier(Tier):
    """Passes everything on to another tier but for what was injected.

    Attributes:
        inner: The tier behind; what it holds can be looked at past all faults.
        calls: How often each method was called.
    """

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.calls: collections.Counter[str] = collections.Counter()
        self._injected: list[_Injected] = []
        self._gates: dict[Operation, Gate] = {}
        self._torn: set[bytes] = set()
        self._forced: TierState | None = None
        self._lost_reads: list[memoryview] = []
        self._released = asyncio.Event()

    # -- what tests do -----------------------------------------------------------------------------------------------

    def inject(
        self, operation: Operation, fault: Fault, *, keys: Collection[bytes] | None = None, count: int | None = None
    ) -> None:
        """From now on.

        Args:
            keys: Only these blocks; None: all.
            count: Only so many blocks; None: until clear().
        """
        self._injected.append(_Injected(operation, fault, None if keys is None else frozenset(keys), count))

    def clear(self) -> None:
        """No more faults, but for what they have done already."""
        self._injected.clear()

    @contextlib.contextmanager
    def gate(self, operation: Operation) -> Iterator[Gate]:
        """Calls of an operation wait at the gate before anything happens. Open at the end."""
        gate = self._gates[operation] = Gate()
        try:
            yield gate
        finally:
            del self._gates[operation]
            gate.opened.set()

    def force_state(self, state: TierState | None) -> None:
        """Says that it is in a state, and behaves so; None: what the inner tier says."""
        self._forced = state

    def release_hung(self) -> None:
        """The medium answers at last: late bytes go into the buffers of the reads that were given up."""
        for buffer in self._lost_reads:
            buffer.cast("B")[:] = bytes([LATE_BYTE]) * buffer.nbytes
        self._lost_reads.clear()
        self._forced = None
        self._released.set()
        self._released = asyncio.Event()

    # -- the tier ----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> TierState:
        return self._forced or self.inner.state

    def _fault_of(self, operation: Operation, key: bytes) -> Fault | None:
        for injected in self._injected:
            if injected.operation == operation and (injected.keys is None or key in injected.keys):
                if injected.left is None:
                    return injected.fault
                if injected.left > 0:
                    injected.left -= 1
                    return injected.fault
        return None

    async def _enter(self, operation: Operation) -> None:
        self.calls[operation] += 1
        gate = self._gates.get(operation)
        if gate is not None:
            await gate.wait()

    async def _hang(self, deadline_s: float) -> bool:
        """Whether the medium answered before the deadline."""
        try:
            await asyncio.wait_for(self._released.wait(), deadline_s)
        except TimeoutError:
            self._forced = TierState.FAILED
            return False
        return True

    async def open(self) -> None:
        await self.inner.open()

    async def close(self) -> None:
        await self.inner.close()

    def remember(self, namespace: TierNamespace) -> None:
        self.inner.remember(namespace)

    def namespaces(self) -> list[TierNamespace]:
        return self.inner.namespaces()

    async def stat(self, keys: Sequence[bytes]) -> list[int | None]:
        self.calls["stat"] += 1
        if self.state is TierState.FAILED:
            return [None] * len(keys)
        return await self.inner.stat(keys)

    async def read(self, blocks: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[ReadOutcome]:
        await self._enter("read")
        if self.state is TierState.FAILED:
            return [ReadOutcome.ABSENT] * len(blocks)
        faults = [self._fault_of("read", key) for key, _ in blocks]
        if Fault.HUNG in faults and not await self._hang(deadline_s):
            self._lost_reads += [buffer for _, buffer in blocks]
            return [ReadOutcome.BUFFER_LOST] * len(blocks)
        outcomes = await self.inner.read(blocks, deadline_s)
        damaged = []
        for place, ((key, buffer), fault) in enumerate(zip(blocks, faults, strict=True)):
            if outcomes[place] is not ReadOutcome.OK:
                continue
            if fault is Fault.ERROR:
                outcomes[place] = ReadOutcome.FAILED
            elif fault is Fault.DAMAGED or key in self._torn:
                outcomes[place] = ReadOutcome.DAMAGED
                self._torn.discard(key)
                damaged.append(key)
            else:
                continue
            buffer.cast("B")[:] = bytes(buffer.nbytes)  # whoever uses it all the same is found out
        await self.inner.delete(damaged)
        return outcomes

    async def write(self, blocks: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[WriteOutcome]:
        await self._enter("write")
        if self.state is not TierState.OK:
            failed = WriteOutcome.THROTTLED if self.state is TierState.LOADING else WriteOutcome.FAILED
            return [failed] * len(blocks)
        faults = [self._fault_of("write", key) for key, _ in blocks]
        if Fault.HUNG in faults and not await self._hang(deadline_s):
            return [WriteOutcome.BUFFER_LOST] * len(blocks)
        instead = {
            Fault.ERROR: WriteOutcome.FAILED,
            Fault.THROTTLED: WriteOutcome.THROTTLED,
            Fault.NO_ROOM: WriteOutcome.NO_ROOM,
            Fault.LOST: WriteOutcome.STORED,
        }
        through = [block for block, fault in zip(blocks, faults, strict=True) if fault not in instead]
        done = iter(await self.inner.write(through, deadline_s))
        outcomes = []
        for (key, _), fault in zip(blocks, faults, strict=True):
            if fault in instead:
                outcomes.append(instead[fault])
                continue
            outcomes.append(next(done))
            if fault is Fault.TORN and outcomes[-1] is WriteOutcome.STORED:
                self._torn.add(key)
        return outcomes

    async def delete(self, keys: Sequence[bytes]) -> int:
        await self._enter("delete")
        self._torn.difference_update(keys)
        return await self.inner.delete(keys)

    async def delete_namespace(self, digest: bytes | None) -> int:
        self.calls["delete_namespace"] += 1
        return await self.inner.delete_namespace(digest)

    def touch(self, keys: Sequence[bytes]) -> None:
        self.calls["touch"] += 1
        self.inner.touch(keys)

    def scan(self, digest: bytes | None = None) -> Iterator[tuple[bytes, int]]:
        return iter(()) if self.state is TierState.FAILED else self.inner.scan(digest)

    def stats(self) -> Mapping[str, Any]:
        return {**self.inner.stats(), "state": self.state.value}
