"""Slots written by ranks and read by others, without vLLM: KV memory and pool are arrays, vLLM's tensors stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine_plugin.vllm.layout import (
    CANONICAL,
    DIRECT,
    SINGLE,
    RankLayout,
    SlotFormat,
    copies_of,
    layout_of,
)
from kvstore.errors import ConfigError

LAYERS, BLOCKS, TOKENS, HEADS, HEAD_BYTES = 3, 10, 4, 4, 8
PER_SLOT = 2
KV_BLOCK_BYTES = LAYERS * HEADS * TOKENS * HEAD_BYTES
SLOT_BYTES = PER_SLOT * KV_BLOCK_BYTES
HOST = SimpleNamespace(type="cpu")
SLOTS = np.array([3, 1, 0], np.uint64) * np.uint64(SLOT_BYTES)


class Rank:
    """One rank's KV memory, by layer [block, head, token, bytes]; with tokens first [block, token, head, bytes]."""

    def __init__(self, rank: int, degree: int, *, tokens_first: bool = False, certified: bool = True) -> None:
        self.rank, self.degree, self.tokens_first, self.certified = rank, degree, tokens_first, certified
        self.heads = max(1, HEADS // degree)
        self.copies = max(1, degree // HEADS)  # ranks that hold the same head
        shape = (TOKENS, self.heads) if tokens_first else (self.heads, TOKENS)
        self.layers = [np.zeros((BLOCKS, *shape, HEAD_BYTES), np.uint8) for _ in range(LAYERS)]

    @property
    def own(self) -> slice:
        first = self.rank // self.copies * self.heads
        return slice(first, first + self.heads)

    def fill(self, whole: np.ndarray) -> None:
        """Takes this rank's heads of [layer, block, head, token, bytes]."""
        for layer, content in zip(self.layers, whole, strict=True):
            mine = content[:, self.own]
            layer[:] = mine.swapaxes(1, 2) if self.tokens_first else mine

    def content(self) -> np.ndarray:
        """What this rank holds, heads first."""
        layers = np.stack(self.layers)
        return layers.swapaxes(2, 3) if self.tokens_first else layers

    def layout(self, kind: str) -> RankLayout:
        parts = self.degree if kind == DIRECT else 1
        slot_format = SlotFormat(kind, parts, KV_BLOCK_BYTES // parts, PER_SLOT)
        return layout_of(self.caches(kind), slot_format, self.rank, self.degree)

    def caches(self, kind: str) -> Any:
        """As vLLM registers them."""
        return SimpleNamespace(
            tensors=[
                SimpleNamespace(
                    tensor=SimpleNamespace(
                        device=HOST,
                        shape=layer.shape,
                        data_ptr=lambda layer=layer: layer.ctypes.data,
                        stride=lambda _axis, layer=layer: layer.strides[0],
                        element_size=lambda: 1,
                    )
                )
                for layer in self.layers
            ],
            group_data_refs=[
                [
                    SimpleNamespace(
                        tensor_idx=index,
                        page_size_bytes=layer[0].nbytes,
                        mapping=self._mapping() if kind == CANONICAL else None,
                    )
                    for index, layer in enumerate(self.layers)
                ]
            ],
        )

    def _mapping(self) -> Any:
        """As vLLM derives it: a rank's heads in a page of all heads."""
        if self.tokens_first:
            size, first = self.heads * HEAD_BYTES, self.own.start * HEAD_BYTES
            run = SimpleNamespace(
                local_offset=0,
                canonical_offset=first,
                fragment_size=size,
                num_fragments=TOKENS,
                local_stride=size,
                canonical_stride=HEADS * HEAD_BYTES,
            )
        else:
            size = self.heads * TOKENS * HEAD_BYTES
            run = SimpleNamespace(
                local_offset=0,
                canonical_offset=self.own.start * TOKENS * HEAD_BYTES,
                fragment_size=size,
                num_fragments=1,
                local_stride=size,
                canonical_stride=size,
            )
        return SimpleNamespace(
            canonical_page_size_bytes=HEADS * TOKENS * HEAD_BYTES,
            runs=(run,),
            num_writers=self.copies,
            writer_index=self.rank % self.copies,
            parallelism_agnostic=self.certified,
        )


def copy(rank: Rank, kind: str, pool: np.ndarray, ids: list[int], *, is_load: bool, first: int = 0) -> int:
    """Moves blocks between a rank and the pool; returns how many bytes."""
    kv, place, size = copies_of(rank.layout(kind), np.array(ids, np.int32), [len(ids)], [first], SLOTS, is_load=is_load)
    for layer in rank.layers:
        memory, start = layer.reshape(-1), layer.ctypes.data
        for address, offset, length in zip(kv.tolist(), place.tolist(), size.tolist(), strict=True):
            if not start <= address < start + layer.nbytes:
                continue
            local = slice(address - start, address - start + length)
            remote = slice(offset, offset + length)
            if is_load:
                memory[local] = pool[remote]
            else:
                assert not pool[remote].any(), "two ranks write the same bytes"
                pool[remote] = memory[local]
    return int(size.sum())


@pytest.fixture
def whole() -> np.ndarray:
    shape = (LAYERS, BLOCKS, HEADS, TOKENS, HEAD_BYTES)
    return np.random.default_rng(0).integers(1, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize(("stored", "loaded"), [(2, 1), (1, 2), (4, 2), (8, 1), (1, 8), (8, 4)])
def test_what_one_degree_stored_another_one_loads(
    whole: np.ndarray, stored: int, loaded: int, tokens_first: bool
) -> None:
    pool = np.zeros(4 * SLOT_BYTES, np.uint8)
    source, target = [3, 5, 1, 8, 7, 2], [9, 4, 6, 2, 1, 3]
    written = 0
    for number in range(stored):
        rank = Rank(number, stored, tokens_first=tokens_first)
        rank.fill(whole)
        written += copy(rank, CANONICAL, pool, source, is_load=False)
    assert written == 3 * SLOT_BYTES  # each byte once, however many ranks hold it
    for number in range(loaded):
        rank = Rank(number, loaded, tokens_first=tokens_first)
        copy(rank, CANONICAL, pool, target, is_load=True)
        for block, to in zip(source, target, strict=True):
            assert np.array_equal(rank.content()[:, to], whole[:, block, rank.own])


def test_heads_outside_of_tokens_are_copied_in_one_piece_for_each_layer() -> None:
    """As vLLM lays them out for its offloading connector: canonical blocks cost no more fragments."""
    for degree in (1, 2, 4):
        canonical, direct = (Rank(0, degree).layout(kind).groups[0] for kind in (CANONICAL, DIRECT))
        assert canonical.size.tolist() == direct.size.tolist()


def test_ranks_side_by_side(whole: np.ndarray) -> None:
    pool = np.zeros(4 * SLOT_BYTES, np.uint8)
    source, target = [3, 5, 1, 8, 7, 2], [9, 4, 6, 2, 1, 3]
    for number in range(2):
        rank = Rank(number, 2)
        rank.fill(whole)
        copy(rank, DIRECT, pool, source, is_load=False)
    rank = Rank(1, 2)
    copy(rank, DIRECT, pool, target[1:], is_load=True, first=1)
    for block, to in zip(source[1:], target[1:], strict=True):
        assert np.array_equal(rank.content()[:, to], whole[:, block, rank.own])
    assert not rank.content()[:, target[0]].any()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_what_all_ranks_hold_has_one_place_and_is_written_once(ranks: int) -> None:
    slot_format = SlotFormat(SINGLE, 1, KV_BLOCK_BYTES, PER_SLOT)
    assert [slot_format.part_of(rank) for rank in range(3)] == [0, 0, 0]
    held = Rank(0, 1)
    layouts = [layout_of(held.caches(SINGLE), slot_format, rank, ranks) for rank in range(ranks)]
    job = np.array([3, 5, 1, 8, 7, 2]), [6], [0], SLOTS
    stores = [list(zip(*copies_of(layout, *job, is_load=False), strict=True)) for layout in layouts]
    loads = [list(zip(*copies_of(layout, *job, is_load=True), strict=True)) for layout in layouts]
    assert len(loads[0]) == 6 * LAYERS
    assert all(load == loads[0] for load in loads)
    together = [fragment for store in stores for fragment in store]
    assert sorted(together) == sorted(loads[0])
    assert sum(map(bool, stores)) == len({block % ranks for block in job[0].tolist()})


def test_a_store_that_would_leave_a_hole_is_an_error() -> None:
    rank = Rank(0, 1)
    for ids in ([3, 5, 1, 8, 7], [3, 0, 1, 8, 7, 2], [3, 5, 1, 8, 7, BLOCKS], [3, 5, 1, 8, 7, 2, 6, 4]):
        with pytest.raises(ValueError, match=r"slots|KV memory"):
            copies_of(rank.layout(DIRECT), np.array(ids), [len(ids)], [0], SLOTS, is_load=False)


def test_pages_that_vllm_cannot_place_are_refused() -> None:
    with pytest.raises(ConfigError, match="remove it"):
        Rank(0, 2, certified=False).layout(CANONICAL)


def test_a_rank_that_holds_more_than_its_part_is_refused() -> None:
    slot_format = SlotFormat(DIRECT, 1, KV_BLOCK_BYTES - 1, 1)
    rank = Rank(0, 1)
    rank.layout(DIRECT)
    with pytest.raises(ConfigError, match="this KV cache layout does not work"):
        layout_of(rank.caches(DIRECT), slot_format, 0, 1)
