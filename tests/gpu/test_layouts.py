"""Blocks from and to KV memory on a GPU in every layout of slots, planned as the worker plans them, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

LAYERS, BLOCKS, HEADS, TOKENS = 4, 24, 4, 16
HEAD_BYTES = 64
PAGE = HEADS * TOKENS * HEAD_BYTES
POOL_BYTES = 32 << 20


def caches_of(tensors: list[Any], page: int, mappings: list[Any] | None = None) -> Any:
    """What vLLM hands to a worker."""
    return SimpleNamespace(
        tensors=[SimpleNamespace(tensor=tensor, page_size_bytes=tensor.shape[1]) for tensor in tensors],
        group_data_refs=[
            [
                SimpleNamespace(tensor_idx=index, page_size_bytes=page, mapping=mappings[index] if mappings else None)
                for index in range(len(tensors))
            ]
        ],
    )


def kv_of(layout: str, page: int) -> list[Any]:
    import torch

    def new(*shape: int) -> Any:
        return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda")

    if layout == "LBHNC":  # layer by layer
        return [new(BLOCKS, page) for _ in range(LAYERS)]
    if layout == "LBNHC":  # the same, all layers in one allocation, as vLLM makes it
        return list(new(LAYERS, BLOCKS, page))
    if layout == "BLHNC":  # all layers of a block side by side, as strided views
        whole = new(BLOCKS, LAYERS, page)
        return [whole[:, layer] for layer in range(LAYERS)]
    if layout == "packed":  # the same as vLLM hands it over for packed models: one page
        return [new(BLOCKS, LAYERS * page)]
    return [new(BLOCKS, page + 512)[:, :page] for _ in range(LAYERS)]  # padded


@pytest.fixture
def engine() -> Any:
    from engine_plugin.copy.cuda import CudaCopyEngine
    from tests.gpu.rig import Pool, wait_registered

    engine = CudaCopyEngine("cuda", chunk_bytes=8 << 20)
    engine.pool = Pool(POOL_BYTES)
    engine.use_pool(engine.pool)
    wait_registered(engine, engine.pool)
    yield engine
    engine.close()


def run(engine: Any, layout: Any, blocks: list[int], slots: list[int], *, is_load: bool) -> int:
    """One job of a rank. Returns its bytes."""
    from engine_plugin.copy.contract import Fragments
    from engine_plugin.vllm.layout import copies_of
    from tests.gpu.rig import Ends

    offsets = np.array(slots, np.uint64) * np.uint64(layout.format.slot_bytes)
    kv, pool, size = copies_of(layout, np.array(blocks), [len(blocks)], [0], offsets, is_load=is_load)
    fragments = Fragments(
        *(np.ascontiguousarray(each, np.uint64) for each in (kv, pool + np.uint64(engine.pool.address), size))
    )
    ends = Ends()
    if len(fragments):
        engine.wait([(engine.load if is_load else engine.store)(fragments, ends)])
        assert ends.errors == [None]
    return fragments.size_bytes


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "packed", "padded"])
@pytest.mark.parametrize("page", [PAGE, 576 * 2 * TOKENS, 1000])
def test_what_a_rank_stored_it_loads_into_other_blocks(engine: Any, layout: str, page: int) -> None:
    from engine_plugin.vllm.layout import DIRECT, SlotFormat, layout_of

    kv = kv_of(layout, page)
    held = kv[0].shape[1] if layout == "packed" else page
    slot = SlotFormat(DIRECT, 2, LAYERS * page, 2)
    rank = layout_of(caches_of(kv, held), slot, 1, 2)
    assert rank.device.startswith("cuda")
    before = [tensor[[3, 9, 4, 7]].clone() for tensor in kv]
    others = [tensor[[1, 2, 8]].clone() for tensor in kv]
    assert run(engine, rank, [3, 9, 4, 7], [5, 2], is_load=False) == 4 * LAYERS * page
    assert not engine.pool.bytes[2 * slot.slot_bytes : 2 * slot.slot_bytes + slot.part_bytes].any()  # the other rank's
    run(engine, rank, [11, 12, 13, 14], [5, 2], is_load=True)
    for tensor, old, rest in zip(kv, before, others, strict=True):
        assert bool((tensor[[11, 12, 13, 14]] == old).all())
        assert bool((tensor[[1, 2, 8]] == rest).all())


def test_ranks_that_hold_the_same_take_turns_and_each_loads_all(engine: Any) -> None:
    """MLA in the canonical format: one copy in the slot, of which each rank stores every other block."""
    from engine_plugin.vllm.layout import CANONICAL, SlotFormat, layout_of

    page = 576 * 2 * TOKENS
    first = kv_of("LBHNC", page)
    ranks = [first, [tensor.clone() for tensor in first]]
    slot = SlotFormat(CANONICAL, 1, LAYERS * page, 2)
    layouts = []
    for index, kv in enumerate(ranks):
        one = SimpleNamespace(
            local_offset=0, canonical_offset=0, fragment_size=page, num_fragments=1, local_stride=0, canonical_stride=0
        )
        mapping = SimpleNamespace(
            parallelism_agnostic=True, runs=(one,), num_writers=2, writer_index=index, canonical_page_size_bytes=page
        )
        layouts.append(layout_of(caches_of(kv, page, [mapping] * LAYERS), slot, index, 2))
    stored = [run(engine, layout, [3, 9, 4, 7], [1, 6], is_load=False) for layout in layouts]
    assert sum(stored) == 4 * LAYERS * page
    assert all(stored)
    for kv, layout in zip(ranks, layouts, strict=True):
        run(engine, layout, [11, 12, 13, 14], [1, 6], is_load=True)
        assert all(bool((tensor[[11, 12, 13, 14]] == tensor[[3, 9, 4, 7]]).all()) for tensor in kv)


@pytest.mark.parametrize("page", ["NHC", "HNC"])
@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "padded"])
def test_heads_of_two_ranks_make_the_page_of_one(engine: Any, layout: str, page: str) -> None:
    from engine_plugin.vllm.layout import CANONICAL, SlotFormat, layout_of

    whole = kv_of(layout, PAGE)
    slot = SlotFormat(CANONICAL, 1, LAYERS * PAGE, 2)
    # Where tokens come first, a rank's heads lie in a page once for every token.
    times = TOKENS if page == "NHC" else 1

    def planned(kv: list[Any], index: int, share: int) -> Any:
        part = PAGE // share
        heads = SimpleNamespace(
            local_offset=0,
            canonical_offset=index * part // times,
            fragment_size=part // times,
            num_fragments=times,
            local_stride=part // times,
            canonical_stride=PAGE // times,
        )
        mapping = SimpleNamespace(
            parallelism_agnostic=True, runs=(heads,), num_writers=1, writer_index=0, canonical_page_size_bytes=PAGE
        )
        return layout_of(caches_of(kv, part, [mapping] * LAYERS), slot, index, 2)

    halves = [
        [tensor.reshape(BLOCKS, times, 2, -1)[:, :, index].reshape(BLOCKS, -1).contiguous() for tensor in whole]
        for index in range(2)
    ]
    for index, kv in enumerate(halves):
        run(engine, planned(kv, index, 2), [3, 9, 4, 7], [1, 6], is_load=False)
    run(engine, planned(whole, 0, 1), [11, 12, 13, 14], [1, 6], is_load=True)
    assert all(bool((tensor[[11, 12, 13, 14]] == tensor[[3, 9, 4, 7]]).all()) for tensor in whole)
