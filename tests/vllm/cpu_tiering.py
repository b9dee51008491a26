"""vLLM's TieringOffloadingSpec on its CPU build: scheduler, CPU tier and secondary tiers are vLLM's; only the copies
between KV memory and the CPU tier, for which vLLM wants a GPU, are made here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from engine_plugin.copy.cpu import copy_fragments
from engine_plugin.vllm.layout import DIRECT, SlotFormat, copies_of, layout_of


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        config = self.config
        slot = SlotFormat(
            DIRECT, config.parallel.world_size, config.worker_kv_bytes_per_block, config.cache.blocks_per_chunk
        )
        region = SharedOffloadRegion(
            engine_id=config.engine_id,
            num_chunks=self.num_chunks,
            rank=config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        layout = layout_of(kv_caches, slot, config.parallel.rank, config.parallel.world_size)
        return _Worker(layout, region, self.kv_bytes_per_chunk)


class _Worker(OffloadingWorker):
    def __init__(self, layout: Any, region: SharedOffloadRegion, row_bytes: int) -> None:
        self._layout, self._region, self._row_bytes = layout, region, row_bytes
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        kv, row, size = self._fragments(src_spec, dst_spec, is_load=False)
        return self._copy(job_id, row, kv, size)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        kv, row, size = self._fragments(dst_spec, src_spec, is_load=True)
        return self._copy(job_id, kv, row, size)

    def _fragments(self, kv: GPULoadStoreSpec, rows: LoadStoreSpec, *, is_load: bool) -> tuple[np.ndarray, ...]:
        assert isinstance(rows, CPULoadStoreSpec)
        offsets = rows.chunk_ids.astype(np.uint64) * np.uint64(self._row_bytes)
        sizes, first = list(kv.group_sizes), list(kv.block_indices)
        found = copies_of(self._layout, kv.block_ids, sizes, first, offsets, is_load=is_load)
        assert self._region._base is not None
        return found[0], found[1] + np.uint64(self._region._base.data_ptr()), found[2]

    def _copy(self, job_id: int, dst: np.ndarray, src: np.ndarray, size: np.ndarray) -> bool:
        copy_fragments(*(np.ascontiguousarray(array) for array in (dst, src, size)))
        self._finished.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Copies are over when they have been submitted."""

    def shutdown(self) -> None:
        self._region.cleanup()
