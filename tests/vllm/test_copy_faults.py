"""The CUDA engine on a simulated GPU, where calls fail half-way through a job, or all of them at once."""

from __future__ import annotations

import concurrent.futures
import random
from typing import Any

import numpy as np
import pytest

from engine_plugin.copy import kernels, paths
from tests.vllm import sim_gpu
from tests.vllm.test_copy_order import BLOCKS, Rig, small_sizes

SHAPE = (512, 4, 3)
LIMIT_S = 60


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return small_sizes(monkeypatch)


class Faulty(Rig):
    """Attributes:
    ended: By end, what it was told, and KV memory and pool at that moment.
    """

    def __init__(self, small: Any, seed: int, path: str, known: float = 1.0) -> None:
        super().__init__(sim_gpu.install(small, seed), seed, path, SHAPE, known)
        self.pool.bytes[:] = self.bits.integers(0, 256, len(self.pool.bytes), np.uint8)
        self.ended: list[tuple[BaseException | None, bytes, bytes]] = []

    def memory(self) -> tuple[bytes, bytes]:
        return b"".join(tensor.tobytes() for tensor in self.kv), self.pool.bytes.tobytes()

    def then(self, seconds: float, error: BaseException | None) -> None:
        self.ended.append((error, *self.memory()))

    def begin(self, blocks: list[int], slots: list[int], is_load: bool) -> Any:
        return (self.engine.load if is_load else self.engine.store)(self.fragments(blocks, slots), self.then)

    def expect(self, slots: list[int]) -> None:
        starts = np.array(slots, np.uint64) * np.uint64(self.slot) + np.uint64(self.pool.address)
        self.engine.expect_load(starts, self.slot)

    def same(self, blocks: list[int], slots: list[int]) -> bool:
        return all(self.block(block) == self.stored(slot) for block, slot in zip(blocks, slots, strict=True))

    def finish(self) -> None:
        """Does everything that is queued."""
        self.device.until(lambda: not any(self.device.streams.values()))


@pytest.mark.parametrize("path", paths.CHOICES)
@pytest.mark.parametrize("is_load", [True, False])
def test_nothing_is_written_after_the_end_of_a_job_that_failed_half_way(small: Any, path: str, is_load: bool) -> None:
    failed = 0
    for calls in (*range(6), 9, 13):
        rig = Faulty(small, calls, path, known=0.7)
        slots = rig.rng.sample(range(1, BLOCKS), BLOCKS - 8)
        rig.device.calls_left = calls
        job = rig.begin(slots[::-1], slots, is_load)
        assert not concurrent.futures.wait(job.futures, LIMIT_S).not_done
        rig.device.calls_left = None
        rig.engine.poll()
        while not job.over:  # as vLLM's steps do
            assert rig.device.step()
            rig.engine.poll()
        ((error, *then),) = rig.ended
        rig.finish()
        assert tuple(then) == rig.memory(), "written after the end"
        assert error is not None or rig.same(slots[::-1], slots)
        failed += rig.engine.stats().jobs_failed
        rig.engine.wait([rig.begin(slots, slots, is_load)])
        assert rig.ended[1][0] is None and rig.same(slots, slots)
        rig.engine.close()
    assert failed >= 1


def test_an_expectation_that_fails_half_way_is_none(small: Any) -> None:
    for calls in range(2):
        rig = Faulty(small, calls, "auto")
        slots = random.Random(calls).sample(range(BLOCKS), 12)
        rig.device.calls_left = calls
        with pytest.raises(RuntimeError):
            rig.expect(slots)
        rig.device.calls_left = None
        rig.engine.use_pool(None)
        buffers = rig.engine._load.stage
        assert buffers is not None
        read = buffers.clone()
        rig.pool.bytes[:] ^= 255
        rig.finish()
        assert bool((buffers == read).all()), "the pool was still read"
        rig.use_pool()
        rig.engine.wait([rig.begin(slots, slots, True)])
        assert rig.same(slots, slots)
        rig.engine.close()


def test_what_is_expected_over_and_over_does_not_pile_up(small: Any) -> None:
    rig = Faulty(small, 0, "auto")
    slots = random.Random(0).sample(range(BLOCKS), 12)
    rig.expect(slots)
    queued = len(rig.engine._runtime.copied)
    assert queued
    rig.expect(slots)
    assert len(rig.engine._runtime.copied) == queued
    rig.engine.wait([rig.begin(slots, slots, True)])
    assert rig.same(slots, slots)
    queued = len(rig.engine._runtime.copied)
    rig.expect(slots)
    assert len(rig.engine._runtime.copied) > queued
    rig.engine.close()


@pytest.mark.parametrize("steps", [0, 5, -1])
def test_jobs_end_where_the_gpu_is_lost(small: Any, steps: int) -> None:
    rig = Faulty(small, 1, "auto")
    jobs = [rig.begin([n, n + 10], [n, n + 20], n % 2 == 0) for n in range(6)]
    for _ in range(steps):
        rig.device.step()
    if steps < 0:
        rig.finish()
    rig.device.lost, rig.device.lost_when_timed = steps >= 0, steps < 0
    rig.engine.wait(jobs)
    assert all(job.over for job in jobs) and len(rig.ended) == len(jobs)
    assert all(error is not None for error, _, _ in rig.ended)
    with pytest.raises(RuntimeError):
        rig.begin([1], [1], True)
    assert len(rig.ended) == len(jobs)


def test_an_engine_without_kernels_copies_by_the_batch_call(small: Any) -> None:
    """Triton wants a compiler for C, which not every container has."""

    def fails(*_args: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    device = sim_gpu.install(small, 0)
    small.setattr(kernels, "Mover", fails)
    small.setattr(sim_gpu, "install", lambda *_args: device)
    rig = Faulty(small, 0, "auto")
    slots = list(range(0, BLOCKS, 3))
    rig.expect(slots)
    others = [slot + 1 for slot in slots]
    rig.engine.wait([rig.begin(slots, slots, True), rig.begin(others, others, False)])
    assert [error for error, _, _ in rig.ended] == [None, None] and rig.same(slots, slots) and rig.same(others, others)
    assert set(rig.engine.stats().bytes_by_path) == {"batch"}
    rig.engine.close()
