"""KV memory of every shape, a pool, and an oracle that shares nothing with the engine: each block's bytes as numpy."""

from __future__ import annotations

import mmap
import random
from typing import Any

import numpy as np
import torch

from engine_plugin.copy.contract import Fragments
from engine_plugin.copy.cuda import CudaCopyEngine

#: Bytes of pages; one that nothing is aligned to, one of MLA, small and large ones.
PAGES = (64, 200, 1000, 1001, 8192, 18_432, 65_536, 262_144)


class Pool:
    """A shared mapping like the daemon's, populated as far as a test says."""

    def __init__(self, size_bytes: int, populated: float = 1.0) -> None:
        self._map = mmap.mmap(-1, size_bytes)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = self.bytes.ctypes.data
        self.size_bytes = size_bytes
        self.populated_bytes = int(size_bytes * populated)


class KV:
    """Layers of an engine, each int8 [blocks, page], in one of the memory layouts that engines use.

    separate: a tensor for each layer (LBHNC, LBNHC); packed: all layers of a block side by side (BLHNC); padded: pages
    with a gap behind each; one: a single layer, as packed groups show themselves.
    """

    def __init__(self, layout: str, layers: int, blocks: int, page: int) -> None:
        self.layers, self.blocks, self.page = layers, blocks, page
        if layout == "separate":
            self.tensors = [self._new(blocks * page).view(blocks, page) for _ in range(layers)]
        elif layout == "packed":
            whole = self._new(blocks * layers * page).view(blocks, layers, page)
            self.tensors = [whole[:, layer] for layer in range(layers)]
        elif layout == "padded":
            self.tensors = [self._new(blocks * (page + 256)).view(blocks, page + 256)[:, :page] for _ in range(layers)]
        else:
            self.layers = 1
            self.tensors = [self._new(blocks * page).view(blocks, page)]

    @staticmethod
    def _new(size: int) -> torch.Tensor:
        return torch.randint(-128, 128, (size,), dtype=torch.int8, device="cuda")

    @property
    def block_bytes(self) -> int:
        return self.layers * self.page

    def block(self, block_id: int) -> np.ndarray:
        return np.concatenate([tensor[block_id].cpu().numpy().view(np.uint8) for tensor in self.tensors])

    def write(self, block_ids: list[int], seed: int) -> None:
        """Queues new bytes for some blocks on the current stream."""
        rows = torch.tensor(block_ids, device="cuda")
        generator = torch.Generator("cuda").manual_seed(seed)
        for tensor in self.tensors:
            fresh = torch.randint(
                -128, 128, (len(block_ids), self.page), dtype=torch.int8, device="cuda", generator=generator
            )
            tensor[rows] = fresh

    def fragments(self, block_ids: list[int], pool: Pool, offsets: list[int]) -> Fragments:
        base = np.array([tensor.data_ptr() for tensor in self.tensors], np.uint64)
        stride = np.array([tensor.stride(0) for tensor in self.tensors], np.uint64)
        rows = np.array(block_ids, np.uint64)[:, None]
        kv = (base[None] + rows * stride[None]).ravel()
        place = np.arange(self.layers, dtype=np.uint64) * np.uint64(self.page)
        at = (np.uint64(pool.address) + np.array(offsets, np.uint64)[:, None] + place[None]).ravel()
        return Fragments(kv, at, np.full(len(kv), self.page, np.uint64))


class Ends:
    """Collects how jobs ended."""

    def __init__(self) -> None:
        self.errors: list[BaseException | None] = []

    def __call__(self, seconds: float, error: BaseException | None) -> None:
        assert seconds >= 0
        self.errors.append(error)


def round_trips(engine: CudaCopyEngine, pool: Pool, count: int, seed: int) -> int:
    """Random stores and loads, with delays on the writing stream before what they must wait for. Returns the bytes
    that were compared; raises AssertionError at the first wrong one.
    """
    rng = random.Random(seed)
    checked = 0
    kv: KV | None = None
    for trip in range(count):
        if kv is None or trip % 10 == 0:
            page = rng.choice(PAGES)
            layout = rng.choice(["separate", "packed", "padded", "one"])
            kv = KV(layout, rng.randint(1, 40), 48, page)
        chosen = rng.sample(range(48), 2 * rng.randint(1, 12))
        source, target = chosen[::2], chosen[1::2]
        slot = -(-kv.block_bytes // 512) * 512
        slots = rng.sample(range(pool.size_bytes // slot), min(len(source), pool.size_bytes // slot))
        source, target = source[: len(slots)], target[: len(slots)]
        offsets = [index * slot for index in slots]
        if rng.random() < 0.3:  # neighbours make longer runs
            first = rng.randrange(pool.size_bytes // slot - len(slots) + 1)
            offsets = [(first + index) * slot for index in range(len(slots))]
        order = rng.sample(range(len(source) * kv.layers), len(source) * kv.layers)
        ends = Ends()

        def shuffled(fragments: Fragments, order: list[int] = order) -> Fragments:
            return Fragments(fragments.kv[order], fragments.pool[order], fragments.size[order])

        if rng.random() < 0.7:
            torch.cuda._sleep(rng.randint(0, 2_000_000))
        kv.write(source, seed * 100_003 + trip)
        store = engine.store(shuffled(kv.fragments(source, pool, offsets)), ends)
        while not store.over:
            engine.poll()
        engine.poll()  # a thread that has ended it is through with that
        assert ends.errors == [None], ends.errors
        expected = [kv.block(block) for block in source]
        others = {block: kv.block(block) for block in rng.sample(range(48), 3) if block not in target}
        for offset, block in zip(offsets, expected, strict=True):
            assert np.array_equal(pool.bytes[offset : offset + len(block)], block), f"trip {trip}: stored bytes"
        if rng.random() < 0.7:  # what was queued before a load must not overwrite it
            torch.cuda._sleep(rng.randint(0, 2_000_000))
            kv.write(target, rng.randrange(1 << 40))
        fragments = kv.fragments(target, pool, offsets)
        if rng.random() < 0.25 and hasattr(engine, "load_by_layer"):
            by_layer = np.arange(len(fragments)).reshape(len(target), kv.layers).T.ravel()
            fragments = Fragments(fragments.kv[by_layer], fragments.pool[by_layer], fragments.size[by_layer])
            layer_ends = [len(target) * (layer + 1) for layer in range(kv.layers)]
            load = engine.load_by_layer(fragments, layer_ends, ends)
            seen: list[torch.Tensor] = []
            for layer, tensor in enumerate(kv.tensors):
                load.wait_layer(layer)
                seen.append(tensor[torch.tensor(target, device="cuda")].clone())
            for layer, copy in enumerate(seen):
                want = np.stack([block[layer * kv.page : (layer + 1) * kv.page] for block in expected])
                assert np.array_equal(copy.cpu().numpy().view(np.uint8), want), f"trip {trip}: layer {layer}"
        else:
            load = engine.load(shuffled(fragments), ends)
        engine.wait([load])
        assert load.over
        for block_id, block in zip(target, expected, strict=True):
            assert np.array_equal(kv.block(block_id), block), f"trip {trip}: loaded bytes"
            checked += len(block)
        for block_id, block in others.items():
            assert np.array_equal(kv.block(block_id), block), f"trip {trip}: a bystander"
        assert ends.errors == [None, None], ends.errors
    return checked


def wait_registered(engine: CudaCopyEngine, pool: Any) -> None:
    """Until everything that has memory is registered."""
    import time

    while (stats := engine.stats()).registered_bytes < pool.populated_bytes // (8 << 20) * (8 << 20):
        assert not stats.register_error, stats.register_error
        time.sleep(0.001)
