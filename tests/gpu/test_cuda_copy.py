"""The CUDA copy engine on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest

POOL_BYTES = 256 << 20
CHUNK_BYTES = 8 << 20


def engine_of(path: str, **options: Any) -> Any:
    from engine_plugin.copy.cuda import CudaCopyEngine

    return CudaCopyEngine("cuda", path, chunk_bytes=CHUNK_BYTES, **options)


@pytest.mark.parametrize("path", ["auto", "staged", "kernel", "batch", "pageable"])
@pytest.mark.parametrize("populated", [1.0, 0.4])
def test_no_byte_is_wrong_in_random_round_trips(path: str, populated: float) -> None:
    from tests.gpu.rig import Pool, round_trips, wait_registered

    pool = Pool(POOL_BYTES, populated)
    # Small buffers, so that a job takes many turns of them.
    engine = engine_of(path, stage_bytes=1 << 20)
    engine.use_pool(pool)
    wait_registered(engine, pool)
    assert round_trips(engine, pool, 100, seed=1) > 0
    stats = engine.stats()
    assert not stats.jobs_failed
    assert stats.registering == (populated < 1)
    if path not in ("auto", "pageable") and populated == 1:
        assert stats.bytes_by_path[path]
    engine.close()
    assert engine.stats().registered_bytes == 0


def test_watched_stores_end_without_a_poll_and_no_byte_is_wrong() -> None:
    import threading

    import numpy as np
    import torch

    from engine_plugin.copy.contract import Fragments
    from engine_plugin.copy.watched import WatchedCopies
    from tests.gpu.rig import Pool, round_trips, wait_registered

    pool = Pool(POOL_BYTES, 1.0)
    inner = engine_of("auto", stage_bytes=1 << 20)
    engine = WatchedCopies(inner, lambda: torch.cuda.set_device(inner.device))
    engine.use_pool(pool)
    wait_registered(engine, pool)
    assert round_trips(engine, pool, 100, seed=3) > 0
    kv = torch.randint(0, 256, (8 << 20,), dtype=torch.uint8, device="cuda")
    told, problems = threading.Event(), []

    def then(_seconds: float, error: BaseException | None) -> None:
        problems.append(error)
        told.set()

    whole = [np.array([value], np.uint64) for value in (kv.data_ptr(), pool.address, kv.numel())]
    engine.store(Fragments(*whole), then)
    assert told.wait(30), "nobody has looked"
    assert problems == [None]
    engine.close()
    assert engine.stats().registered_bytes == 0


def test_copies_before_registration_are_right_and_counted() -> None:
    from tests.gpu.rig import Pool, round_trips

    pool = Pool(POOL_BYTES, 0.0)
    engine = engine_of("auto")
    engine.use_pool(pool)
    round_trips(engine, pool, 20, seed=2)
    assert set(engine.stats().bytes_by_path) == {"pageable"}
    engine.close()


def test_memory_that_cannot_be_registered_costs_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_plugin.copy.cudart import CudaError, CudaRuntime
    from tests.gpu.rig import Pool, round_trips

    def refuse(self: CudaRuntime, address: int, size_bytes: int) -> None:
        raise CudaError("cudaHostRegister: out of memory (2)")

    monkeypatch.setattr(CudaRuntime, "register", refuse)
    pool = Pool(POOL_BYTES)
    engine = engine_of("auto")
    engine.use_pool(pool)
    round_trips(engine, pool, 10, seed=3)
    stats = engine.stats()
    assert "out of memory" in stats.register_error
    assert not stats.registering
    engine.close()


def test_a_new_pool_takes_the_place_of_the_old_one() -> None:
    from tests.gpu.rig import Pool, round_trips, wait_registered

    engine = engine_of("auto")
    for seed in range(4):
        pool = Pool(POOL_BYTES)
        engine.use_pool(pool)
        wait_registered(engine, pool)
        round_trips(engine, pool, 5, seed)
    engine.use_pool(None)
    with pytest.raises(RuntimeError, match="no pool"):
        engine.load(None, None)
    engine.close()


def test_loads_do_not_queue_behind_stores() -> None:
    import torch

    from tests.gpu.rig import KV, Ends, Pool, wait_registered

    pool = Pool(POOL_BYTES)
    engine = engine_of("auto")
    engine.use_pool(pool)
    wait_registered(engine, pool)
    kv = KV("separate", 32, 64, 65_536)
    ends = Ends()
    torch.cuda.synchronize()
    writing = torch.cuda.Stream()
    # The stores wait for a stream that is busy for a second; the load is asked for on one that is idle.
    with torch.cuda.stream(writing):
        torch.cuda._sleep(2_000_000_000)
        stores = [engine.store(kv.fragments([i], pool, [i << 21]), ends) for i in range(1, 9)]
    load = engine.load(kv.fragments([60], pool, [40 << 21]), ends)
    engine.wait([load])
    assert not any(store.over for store in stores)
    engine.wait(stores)
    assert ends.errors == [None] * 9
    engine.close()


def test_stores_do_not_queue_behind_a_long_load() -> None:
    import numpy as np
    import torch

    from tests.gpu.rig import KV, Ends, Pool, wait_registered

    pool = Pool(1 << 30)
    engine = engine_of("staged")
    engine.use_pool(pool)
    wait_registered(engine, pool)
    kv = KV("separate", 32, 512, 65_536)
    few = KV("separate", 32, 16, 65_536)
    ends = Ends()
    torch.cuda.synchronize()
    load = engine.load(kv.fragments(list(range(480)), pool, [i << 21 for i in range(480)]), ends)
    store = engine.store(few.fragments([3, 5, 7], pool, [i << 21 for i in (500, 505, 510)]), ends)
    engine.wait([store])
    assert not load.over
    for block, place in ((3, 500), (5, 505), (7, 510)):
        assert np.array_equal(pool.bytes[place << 21 : (place + 1) << 21], few.block(block))
    engine.wait([load])
    assert ends.errors == [None, None]
    engine.close()
