"""Where the bytes of a block lie: in KV memory, and in its slot of the pool.

A slot holds one block: the same tokens of one KV-cache group, all ranks. In it lie the engine's KV blocks one after the
other (a block may be larger than what the engine calls one). There are three formats:

    direct      rank by rank; in a rank's part the pages of its layers in order, as the rank holds them. Any engine, but
                only engines of the same parallel shape understand each other.
    single      one part, which every rank holds alike (MLA: one latent per token, not divided over heads). Each rank
                writes a share of the engine's KV blocks, all of them read everything.
    canonical   layer by layer, each page as a rank would hold it that had all heads. A rank writes and reads its heads
                at their place in it, so that engines of any tensor-parallel degree that divides the heads understand
                each other. Where ranks hold the same heads, they take turns writing.

Scheduler and workers compute the same `SlotFormat`, each from its own configuration; a worker that finds its tensors to
be otherwise refuses to start.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches

DIRECT: Final = "direct"
SINGLE: Final = "single"
CANONICAL: Final = "canonical"


@dataclasses.dataclass(frozen=True, slots=True)
class SlotFormat:
    """How a slot is divided.

    Attributes:
        kind: DIRECT, SINGLE or CANONICAL.
        parts: Parts side by side: the number of ranks, or 1.
        kv_block_bytes: Bytes of one of the engine's KV blocks in one part. The largest of all ranks and groups counts.
        blocks_per_slot: KV blocks of the engine in one slot.
    """

    kind: str
    parts: int
    kv_block_bytes: int
    blocks_per_slot: int

    @property
    def part_bytes(self) -> int:
        """Bytes of one part."""
        return self.kv_block_bytes * self.blocks_per_slot

    @property
    def slot_bytes(self) -> int:
        """Bytes of a block."""
        return self.part_bytes * self.parts

    def part_of(self, rank: int) -> int:
        """Bytes from the start of a slot to the part that a rank copies."""
        return rank * self.part_bytes if self.kind == DIRECT else 0


@dataclasses.dataclass(frozen=True, slots=True)
class GroupPages:
    """The fragments of one KV block of one group, as this rank holds them: arrays of one length.

    Attributes:
        base: Address of each in KV block 0.
        stride: Bytes from one KV block to the next in the tensor that it lies in.
        size: Bytes.
        place: Bytes from the start of the KV block in its part of the slot.
        writers: Ranks that hold the same bytes.
        turn: This rank's number among those.
    """

    base: np.ndarray
    stride: np.ndarray
    size: np.ndarray
    place: np.ndarray
    writers: np.ndarray
    turn: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class RankLayout:
    """Where this rank's bytes lie.

    Attributes:
        format: What scheduler and ranks have in common.
        part: Bytes from the start of a slot to this rank's part.
        groups: Fragments by KV-cache group.
        blocks: Number of KV blocks that the engine has.
        device: Where KV memory lies, as torch names it.
    """

    format: SlotFormat
    part: int
    groups: tuple[GroupPages, ...]
    blocks: int
    device: str


def layout_of(kv_caches: CanonicalKVCaches, slot_format: SlotFormat, rank: int, ranks: int) -> RankLayout:
    """Reads the engine's KV memory.

    Args:
        ranks: How many there are.

    Raises:
        ConfigError: it lies on several devices or on one that is neither the host nor a CUDA GPU, or it is not as the
            format needs it.
    """
    devices = {str(entry.tensor.device) for entry in kv_caches.tensors}
    if len(devices) != 1 or kv_caches.tensors[0].tensor.device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"kvstore: the KV cache lies on {', '.join(sorted(devices))}: host memory or one CUDA GPU works"
        )
    groups = []
    writer = (ranks, rank) if slot_format.kind == SINGLE else (1, 0)
    for refs in kv_caches.group_data_refs:
        pages, end = _pages_of(kv_caches, refs, writer if slot_format.kind != CANONICAL else None)
        if end > slot_format.kv_block_bytes:
            raise ConfigError(
                f"kvstore: rank {rank} holds {end} bytes of a KV block and the scheduler counts "
                f"{slot_format.kv_block_bytes}: this KV cache layout does not work so far"
            )
        groups.append(pages)
    return RankLayout(
        format=slot_format,
        part=slot_format.part_of(rank),
        groups=tuple(groups),
        blocks=min(int(entry.tensor.shape[0]) for entry in kv_caches.tensors),
        device=devices.pop(),
    )


def _pages_of(
    kv_caches: CanonicalKVCaches, refs: list[CanonicalKVCacheRef], writer: tuple[int, int] | None
) -> tuple[GroupPages, int]:
    """Fragments of a group, layer after layer, and how many bytes of a part they reach over.

    Args:
        writer: How many ranks hold the same pages, and this one's number among them; None: vLLM knows, fragment by
            fragment, and where they lie in the canonical page.
    """
    columns: list[tuple[int, int, int, int, int, int]] = []
    end = 0
    for ref in refs:
        tensor = kv_caches.tensors[ref.tensor_idx].tensor
        base, stride = tensor.data_ptr(), tensor.stride(0) * tensor.element_size()
        if writer is not None:
            columns.append((base, stride, ref.page_size_bytes, end, *writer))
            end += ref.page_size_bytes
            continue
        mapping = ref.mapping
        if mapping is None or not mapping.parallelism_agnostic:
            raise ConfigError(
                "kvstore: 'canonical_layout' does not work for this KV cache (vLLM cannot say where its heads lie): "
                "remove it from kv_connector_extra_config"
            )
        for run in mapping.runs:
            columns += [
                (
                    base + run.local_offset + i * run.local_stride,
                    stride,
                    run.fragment_size,
                    end + run.canonical_offset + i * run.canonical_stride,
                    mapping.num_writers,
                    mapping.writer_index,
                )
                for i in range(run.num_fragments)
            ]
        end += mapping.canonical_page_size_bytes
    arrays: list[Any] = [np.array(column, np.uint64) for column in zip(*columns, strict=True)]
    return GroupPages(*arrays), end


def copies_of(
    layout: RankLayout,
    block_ids: np.ndarray,
    group_sizes: list[int],
    first_blocks: list[int],
    slots: np.ndarray,
    *,
    is_load: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every fragment of a job: address in KV memory, bytes from the start of the pool, and size.

    Args:
        block_ids: KV blocks, group after group.
        group_sizes: How many of them are of each group.
        first_blocks: By group, its first one's number in the request's sequence: a load may begin inside a slot.
        slots: Offsets of the slots, group after group.
        is_load: Loads skip vLLM's null block, and read what every rank holds; stores take turns.

    Raises:
        ValueError: blocks and slots do not fit each other, or a store would leave a part of a slot unwritten.
    """
    per_slot = layout.format.blocks_per_slot
    if len(block_ids) and (int(block_ids.min()) < 0 or int(block_ids.max()) >= layout.blocks):
        raise ValueError("a KV block lies outside of the engine's KV memory")
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    block = slot = 0
    for pages, count, first in zip(layout.groups, group_sizes, first_blocks, strict=True):
        if not count:
            continue
        ids = block_ids[block : block + count].astype(np.uint64)
        place = first % per_slot + np.arange(count)
        block, began, slot = block + count, slot, slot + int(place[-1]) // per_slot + 1
        if slot > len(slots):
            break
        real = ids != 0  # block 0 is vLLM's null block: nothing is written to it
        if not is_load and (not real.all() or count != (slot - began) * per_slot):
            raise ValueError("a store does not fill its slots")
        start = slots[began + place // per_slot] + (place % per_slot).astype(np.uint64) * np.uint64(
            layout.format.kv_block_bytes
        )
        rows = ids[real][:, None]
        kv = pages.base[None, :] + rows * pages.stride[None, :]
        pool = start[real][:, None] + (np.uint64(layout.part) + pages.place)[None, :]
        size = np.broadcast_to(pages.size, kv.shape)
        if not is_load and pages.writers.max() > 1:
            mine = rows % pages.writers[None, :] == pages.turn[None, :]
            found.append((kv[mine], pool[mine], size[mine]))
        else:
            found.append((kv.ravel(), pool.ravel(), size.ravel()))
    if block != len(block_ids) or slot != len(slots):
        raise ValueError(f"{len(block_ids)} KV blocks do not fill {len(slots)} slots")
    if not found:
        return (np.empty(0, np.uint64),) * 3
    kv, pool, size = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return kv, pool, size
