"""The CUDA engine on a GPU that is pretended: right bytes in every order of its streams, and faults half-way."""

from __future__ import annotations

import concurrent.futures
import mmap
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine_plugin.copy.contract import Fragments

pytest.importorskip("triton", reason="comes with vLLM")
from engine_plugin.copy import cuda, paths
from engine_plugin.copy.cuda import CudaCopyEngine
from tests.vllm.pretended_gpu import PretendedGpu

KIB = 1 << 10
SLOT, LAYERS, SLOTS = 64 * KIB, 8, 48
PAGE = SLOT // LAYERS
CHUNK = 11 * SLOT // 2  # slots lie across the borders of registrations
LIMIT_S = 60


class Pool:
    def __init__(self, populated: int = SLOTS * SLOT) -> None:
        self._map = mmap.mmap(-1, SLOTS * SLOT)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address, self.size_bytes, self.populated_bytes = self.bytes.ctypes.data, SLOTS * SLOT, populated


class Rig:
    """An engine with buffers of four slots, a pool, and KV memory with as many blocks as the pool has slots.

    Attributes:
        ends: By job, what its `then` was told, and KV memory and pool at that moment.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int = 0, path: str = "auto", pool: Pool | None = None):
        # What is small here stands for what is a hundred times as large.
        monkeypatch.setattr(paths, "STAGED_RUN_BYTES_MIN", SLOT)
        monkeypatch.setattr(paths, "STAGED_STORE_BYTES_MIN", 4 * SLOT)
        monkeypatch.setattr(cuda, "_BATCH_PART", 32)
        self.gpu = PretendedGpu(seed)
        self.gpu.install(monkeypatch)
        self.engine = CudaCopyEngine("cuda", path, stage_bytes=4 * SLOT, chunk_bytes=CHUNK)
        self.gpu.at_once = False
        self.pool = pool or Pool()
        self.chance = np.random.default_rng(seed)
        self.pool.bytes[:] = self.chance.integers(0, 256, SLOTS * SLOT, np.uint8)
        self.kv = np.zeros((LAYERS, SLOTS, PAGE), np.uint8)
        self.gpu.own.append((self.kv.ctypes.data, self.kv.ctypes.data + self.kv.nbytes))
        self.ends: dict[int, tuple[BaseException | None, np.ndarray, np.ndarray]] = {}
        self.use(self.pool)

    def use(self, pool: Pool) -> None:
        self.engine.use_pool(pool)
        until = time.monotonic() + LIMIT_S
        while self.engine.stats().registered_bytes < pool.populated_bytes // CHUNK * CHUNK:
            assert time.monotonic() < until
            time.sleep(0.001)

    def fragments(self, blocks: list[int], slots: list[int]) -> Fragments:
        layer = np.arange(LAYERS, dtype=np.uint64)[None]
        kv = np.uint64(self.kv.ctypes.data) + (layer * SLOTS + np.array(blocks, np.uint64)[:, None]) * np.uint64(PAGE)
        pool = np.uint64(self.pool.address) + np.array(slots, np.uint64)[:, None] * SLOT + layer * PAGE
        return Fragments(kv.ravel(), pool.ravel(), np.full(kv.size, PAGE, np.uint64))

    def then(self, number: int) -> Callable[[float, BaseException | None], None]:
        def then(_seconds: float, error: BaseException | None) -> None:
            assert number not in self.ends, "ended twice"
            self.ends[number] = (error, self.kv.copy(), self.pool.bytes.copy())

        return then

    def begin(self, number: int, blocks: list[int], slots: list[int], *, is_load: bool = True) -> Any:
        begin = self.engine.load if is_load else self.engine.store
        return begin(self.fragments(blocks, slots), self.then(number), beside_compute=self.gpu.rng.random() < 0.2)

    def slot(self, number: int) -> np.ndarray:
        return self.pool.bytes[number * SLOT : (number + 1) * SLOT]

    def block(self, number: int) -> np.ndarray:
        return self.kv[:, number].ravel()

    def nothing_more_is_written(self) -> None:
        """Since the last end."""
        _, kv, pool = list(self.ends.values())[-1]
        self.gpu.run()
        assert np.array_equal(self.kv, kv) and np.array_equal(self.pool.bytes, pool), "written after the end"


@pytest.mark.parametrize("path", paths.CHOICES)
@pytest.mark.parametrize("populated", [1.0, 0.4, 0.0])
def test_every_order_gives_the_right_bytes(monkeypatch: pytest.MonkeyPatch, path: str, populated: float) -> None:
    rig = Rig(monkeypatch, 1, path, Pool(int(populated * SLOTS * SLOT)))
    rng = random.Random(2)
    for trip in range(0, 40, 2):
        used = rng.sample(range(SLOTS), rng.randint(2, SLOTS))  # no slot is read and written at a time
        cut = rng.randint(1, len(used) - 1)
        loaded, stored = used[:cut], used[cut:]
        if rng.random() < 0.5:
            loaded.sort()
        expects = rng.random() < 0.5
        if expects:
            starts = np.uint64(rig.pool.address) + np.array(loaded, np.uint64) * np.uint64(SLOT)
            rig.engine.expect_load(starts, SLOT)
            if rng.random() < 0.3:  # something else comes
                rig.engine.expect_nothing()
            elif rng.random() < 0.3:
                rng.shuffle(loaded)
        rig.gpu.current.put(lambda: None)  # the model is still at it
        blocks = rng.sample(range(SLOTS), len(used))
        into, out_of = blocks[:cut], blocks[cut:]
        jobs = [rig.begin(trip, into, loaded), rig.begin(trip + 1, out_of, stored, is_load=False)]
        for _ in range(rng.randint(0, 200)):
            rig.gpu.step()
        rig.engine.poll()
        rig.engine.wait(jobs)
        assert rig.ends[trip][0] is None and rig.ends[trip + 1][0] is None
        assert all(np.array_equal(rig.block(b), rig.slot(s)) for b, s in zip(blocks, [*loaded, *stored], strict=True))
        rig.nothing_more_is_written()
        for number in used:
            rig.slot(number)[:] = rig.chance.integers(0, 256, SLOT, np.uint8)
    rig.engine.close()
    assert not rig.gpu.registered


@pytest.mark.parametrize("path", paths.CHOICES)
@pytest.mark.parametrize("is_load", [True, False])
def test_nothing_is_written_after_the_end_of_a_job_that_failed_half_way(
    monkeypatch: pytest.MonkeyPatch, path: str, is_load: bool
) -> None:
    for calls in (*range(6), 9, 13):
        rig = Rig(monkeypatch, calls, path, Pool(int(0.7 * SLOTS * SLOT)))
        rig.gpu.calls_left = calls
        slots = random.Random(calls).sample(range(SLOTS), SLOTS - 5)
        job = rig.begin(0, slots[::-1], slots, is_load=is_load)
        assert not concurrent.futures.wait(job.futures, LIMIT_S).not_done
        rig.gpu.calls_left = None
        rig.engine.poll()
        while not job.over:  # as vLLM's steps do
            assert rig.gpu.step()
            rig.engine.poll()
        rig.nothing_more_is_written()
        if rig.ends[0][0] is None:
            pairs = zip(slots[::-1], slots, strict=True)
            assert all(np.array_equal(rig.block(block), rig.slot(slot)) for block, slot in pairs)
        else:
            assert rig.engine.stats().jobs_failed == 1
        rig.engine.wait([rig.begin(1, slots, slots, is_load=is_load)])
        assert rig.ends[1][0] is None
        assert all(np.array_equal(rig.block(slot), rig.slot(slot)) for slot in slots)
        rig.engine.close()


def test_an_expectation_that_fails_half_way_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for calls in range(2):
        rig = Rig(monkeypatch, calls)
        slots = random.Random(calls).sample(range(SLOTS), 12)
        rig.gpu.calls_left = calls
        with pytest.raises(RuntimeError):
            rig.engine.expect_load(np.uint64(rig.pool.address) + np.array(slots, np.uint64) * np.uint64(SLOT), SLOT)
        rig.gpu.calls_left = None
        other = Pool()
        rig.use(other)  # waits until the pool of before is not read any more
        assert not any(stream.queued for stream in rig.gpu.streams)
        rig.use(rig.pool)
        rig.engine.wait([rig.begin(0, slots, slots)])
        assert all(np.array_equal(rig.block(slot), rig.slot(slot)) for slot in slots)
        rig.engine.close()


@pytest.mark.parametrize("steps", [0, 5, -1])
def test_jobs_end_where_the_gpu_is_lost(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    rig = Rig(monkeypatch)
    jobs = [rig.begin(n, [n, n + 10], [n, n + 20], is_load=n % 2 == 0) for n in range(6)]
    for _ in range(steps):
        rig.gpu.step()
    if steps < 0:
        rig.gpu.run()
    rig.gpu.lost, rig.gpu.lost_when_timed = steps >= 0, steps < 0
    rig.engine.wait(jobs)
    assert all(job.over for job in jobs) and sorted(rig.ends) == list(range(6))
    assert all(error is not None for error, _, _ in rig.ends.values())
    with pytest.raises(RuntimeError):
        rig.begin(7, [1], [1])
    assert 7 not in rig.ends


def test_an_engine_without_kernels_copies_by_the_batch_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton wants a compiler for C, which not every container has."""

    class None_:
        def __init__(self, *_args: Any) -> None:
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(PretendedGpu, "mover", lambda _gpu: None_)
    rig = Rig(monkeypatch)
    slots = list(range(0, SLOTS, 3))
    jobs = [rig.begin(0, slots, slots), rig.begin(1, [s + 1 for s in slots], [s + 1 for s in slots], is_load=False)]
    rig.engine.wait(jobs)
    assert rig.ends[0][0] is None and rig.ends[1][0] is None
    assert all(np.array_equal(rig.block(s), rig.slot(s)) for slot in slots for s in (slot, slot + 1))
    assert set(rig.engine.stats().bytes_by_path) == {"batch"}
    rig.engine.close()
