"""What travels between the scheduler process and the workers, pickled by vLLM with each step."""

from __future__ import annotations

import dataclasses

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_offload.base import LoadStoreSpec

from engine_plugin.vllm.acks import AckAddress
from engine_plugin.vllm.layout import SlotFormat
from kvstore.direct import DiskExtent


@dataclasses.dataclass(slots=True)
class SlotSpec(LoadStoreSpec):
    """Slots of the pool, in the order of the keys of a load or a store.

    Attributes:
        generation: Life of the pool that the slots belong to; empty: nothing to copy, fail the load.
        offsets: Bytes from the start of the mapping, uint64.
        epochs: Epochs of the slots when they were pinned, uint32. A load compares them after its copy.
        ticket: Names a store towards the scheduler; 0 for a load.
        req_id: Request that a load belongs to; empty for a store.
        format: How the scheduler divides a slot. A worker that divides it otherwise must not touch it.
        acks: Where the worker says that its copy of a store is over; None: in its report only.
        extents: For each key its place on the disk, which is leased, or None: it is in the slot. Empty: all are.
    """

    generation: bytes
    offsets: np.ndarray
    epochs: np.ndarray
    ticket: int = 0
    req_id: str = ""
    format: SlotFormat | None = None
    acks: AckAddress | None = None
    extents: tuple[DiskExtent | None, ...] = ()


def no_slots(req_id: str = "") -> SlotSpec:
    """A spec that copies nothing; a load with it fails and is computed again."""
    return SlotSpec(b"", np.empty(0, np.uint64), np.empty(0, np.uint32), req_id=req_id)


@dataclasses.dataclass(slots=True)
class WorkerReport:
    """What workers tell the scheduler beyond what vLLM's own metadata carries. Reports of several workers add up.

    Attributes:
        attached: Rank -> generation of the pool it has mapped (empty: none).
        stores_done: Ticket -> ranks whose copy is over, well or badly.
        stores_failed: Tickets of which a worker could not copy its part.
        stores_lost: Ticket that the scheduler has asked about -> ranks that know nothing of it.
        loads_done: Request -> seconds that the copies of its load took on the slowest worker.
        loads_failed: Request -> reason.
        hook_errors: Hook -> exceptions swallowed.
        copied_bytes: Way of a copy -> bytes moved.
        registered: Rank -> bytes of the pool that are registered with its GPU, and what failed (empty: nothing).
        gds: Rank -> what was asked for (auto, on, off), and how it reads files past the pool, or why it does not.
        loading: Loads are under way or were over when this was said. Of an only worker.
        idle: With `loading`: the step had nothing to compute.
    """

    attached: dict[int, bytes] = dataclasses.field(default_factory=dict)
    stores_done: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    stores_failed: set[int] = dataclasses.field(default_factory=set)
    stores_lost: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    loads_failed: dict[str, str] = dataclasses.field(default_factory=dict)
    loads_done: dict[str, float] = dataclasses.field(default_factory=dict)
    hook_errors: dict[str, int] = dataclasses.field(default_factory=dict)
    copied_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    registered: dict[int, tuple[int, str]] = dataclasses.field(default_factory=dict)
    gds: dict[int, tuple[str, str]] = dataclasses.field(default_factory=dict)
    loading: bool = False
    idle: bool = False

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in dataclasses.fields(self))

    def add(self, other: WorkerReport) -> None:
        """Takes another worker's report, or a later one, into this one."""
        self.attached.update(other.attached)
        for mine, others in ((self.stores_done, other.stores_done), (self.stores_lost, other.stores_lost)):
            for ticket, ranks in others.items():
                mine.setdefault(ticket, set()).update(ranks)
        self.stores_failed |= other.stores_failed
        self.loads_failed.update(other.loads_failed)
        for req_id, seconds in other.loads_done.items():
            self.loads_done[req_id] = max(seconds, self.loads_done.get(req_id, 0.0))
        for hook, count in other.hook_errors.items():
            self.hook_errors[hook] = self.hook_errors.get(hook, 0) + count
        for path, size in other.copied_bytes.items():
            self.copied_bytes[path] = self.copied_bytes.get(path, 0) + size
        self.registered.update(other.registered)
        self.gds.update(other.gds)
        self.loading |= other.loading
        self.idle |= other.idle


@dataclasses.dataclass
class KVStoreWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's completions of a step with our report beside them."""

    report: WorkerReport = dataclasses.field(default_factory=WorkerReport)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Adds up two workers of one step."""
        merged = super().aggregate(other)
        assert isinstance(merged, OffloadingWorkerMetadata)
        report = WorkerReport()
        report.add(self.report)
        if isinstance(other, KVStoreWorkerMetadata):
            report.add(other.report)
        return KVStoreWorkerMetadata(merged.completed_jobs, merged.transfer_stats, report)
