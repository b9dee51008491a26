"""Layer by layer: the model may read one layer while the next ones are still coming."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


@pytest.mark.parametrize("populated", [1.0, 0.0])
def test_attention_on_the_first_layer_runs_while_the_others_come(populated: float) -> None:
    import torch

    from engine_plugin.copy.contract import Fragments
    from engine_plugin.copy.cuda import CudaCopyEngine
    from tests.gpu.rig import KV, Ends, Pool, wait_registered

    layers, blocks, page = 32, 256, 65_536
    pool = Pool(layers * blocks * page, populated)
    engine = CudaCopyEngine("cuda", chunk_bytes=64 << 20)
    engine.use_pool(pool)
    wait_registered(engine, pool)
    kv = KV("separate", layers, blocks, page)
    ends = Ends()
    rng = np.random.default_rng(0)
    words = pool.bytes.view(np.int64)
    words[:] = rng.integers(-(1 << 62), 1 << 62, len(words))
    whole = kv.fragments(list(range(blocks)), pool, [block * layers * page for block in range(blocks)])
    order = np.arange(len(whole)).reshape(blocks, layers).T.ravel()
    by_layer = Fragments(whole.kv[order], whole.pool[order], whole.size[order])
    compute = torch.cuda.Stream()

    def attend(tensor: Any) -> Any:
        return tensor.view(torch.int64).sum()

    with torch.cuda.stream(compute):
        attend(kv.tensors[0])  # what a first launch takes has nothing to do with it
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the load waits for this, so that everything is queued before it begins
    load = engine.load_by_layer(by_layer, [blocks * (layer + 1) for layer in range(layers)], ends)
    results: list[Any] = []
    first = torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(compute):
        for layer, tensor in enumerate(kv.tensors):
            load.wait_layer(layer)
            results.append(attend(tensor))
            if not layer:
                first.record()
    engine.wait([load])
    assert ends.errors == [None]
    torch.cuda.synchronize()
    (_, ended), *_ = load.parts
    if populated:  # what is not registered makes its caller wait for the copy
        assert first.elapsed_time(ended) > 0, "the first layer was read after the last had come"
    pages = words.reshape(blocks, layers, page // 8)
    for layer, result in enumerate(results):
        assert int(result) == int(pages[:, layer].sum()), f"layer {layer} was read before it was there"
    engine.close()
