"""The worker's copies against KV memory and a pool that the test can look into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from engine_plugin.vllm.layout import DIRECT, SlotFormat, layout_of
from kvstore.direct import DiskExtent
from kvstore.errors import ConfigError
from tests.plugin.host_reads import host_reads

pytestmark = pytest.mark.filterwarnings("ignore")

LAYERS, BLOCKS, PAGE = 3, 12, 32
RANKS, RANK = 2, 1
BLOCKS_PER_SLOT = 2
BLOCK_BYTES = LAYERS * PAGE
RANK_BYTES = BLOCKS_PER_SLOT * BLOCK_BYTES
SLOT_BYTES = RANKS * RANK_BYTES
SLOTS = 6
FORMAT = SlotFormat(DIRECT, RANKS, BLOCK_BYTES, BLOCKS_PER_SLOT)


class Arena:
    def __init__(self) -> None:
        self.memory = np.zeros((SLOTS, SLOT_BYTES), np.uint8)
        self.epochs = np.arange(SLOTS, dtype=np.uint32)
        self.generation = b"now"
        self.size_bytes = self.memory.nbytes
        self.address = self.memory.ctypes.data

    def epochs_of(self, offsets: np.ndarray) -> np.ndarray:
        return self.epochs[(offsets // SLOT_BYTES).astype(np.int64)]


class Session:
    def __init__(self) -> None:
        self.arena: Arena | None = Arena()
        self.attached = True
        self.gds = "on"

    def close(self) -> None:
        self.attached = False


class Rig:
    """A worker of rank 1 of 2, whose KV blocks are half as large as what is stored."""

    def __init__(self) -> None:
        import torch
        from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

        from engine_plugin.copy.cpu import CpuCopyEngine
        from engine_plugin.vllm.direct import Opening
        from engine_plugin.vllm.worker import KVStoreWorker

        torch.manual_seed(0)
        self.layers = [torch.randint(-128, 128, (BLOCKS, PAGE), dtype=torch.int8) for _ in range(LAYERS)]
        self.caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(layer, PAGE) for layer in self.layers],
            [[CanonicalKVCacheRef(index, PAGE) for index in range(LAYERS)]],
        )
        self.session = Session()
        self.worker = KVStoreWorker(
            layout_of(self.caches, FORMAT, RANK, RANKS),
            client=self.session,
            engine=CpuCopyEngine(2),
            rank=RANK,
            direct=Opening(None, lambda _compat: host_reads(SLOT_BYTES)[0]),
        )

    def block(self, block_id: int) -> np.ndarray:
        return np.concatenate([layer[block_id].numpy().view(np.uint8) for layer in self.layers])

    def slots(self, places: list[int], **changes: Any) -> Any:
        from engine_plugin.vllm.messages import SlotSpec

        offsets = np.array(places, np.uint64) * SLOT_BYTES
        fields = {
            "format": FORMAT,
            "generation": b"now",
            "offsets": offsets,
            "epochs": np.array(places, np.uint32),
            **changes,
        }
        return SlotSpec(**fields)

    def blocks(self, ids: list[int], first: int) -> Any:
        from vllm.v1.kv_offload.base import GPULoadStoreSpec

        return GPULoadStoreSpec(ids, group_sizes=[len(ids)], block_indices=[first])

    def finish(self, job_id: int) -> Any:
        self.worker.wait({job_id})
        results = self.worker.get_finished()
        assert [result.job_id for result in results] == [job_id]
        assert results[0].success  # vLLM asserts it
        return self.worker.take_report()

    def store(self, ids: list[int], places: list[int], first: int = 0, **changes: Any) -> Any:
        assert self.worker.submit_store(1, self.blocks(ids, first), self.slots(places, **{"ticket": 7, **changes}))
        return self.finish(1)

    def load(self, ids: list[int], places: list[int], first: int = 0, **changes: Any) -> Any:
        assert self.worker.submit_load(2, self.slots(places, req_id="r", **changes), self.blocks(ids, first))
        return self.finish(2)


@pytest.fixture
def rig() -> Any:
    rig = Rig()
    yield rig
    rig.worker.shutdown()


def test_a_rank_writes_its_own_part_of_each_slot(rig: Rig) -> None:
    report = rig.store([3, 5, 1, 8], [4, 2])
    assert report.stores_done == {7: {RANK}}
    assert not report.stores_failed
    assert rig.session.arena is not None
    memory = rig.session.arena.memory
    assert np.array_equal(memory[4, RANK_BYTES:], np.concatenate([rig.block(3), rig.block(5)]))
    assert np.array_equal(memory[2, RANK_BYTES:], np.concatenate([rig.block(1), rig.block(8)]))
    assert not memory[:, :RANK_BYTES].any()
    assert not memory[[0, 1, 3, 5]].any()


def test_what_was_stored_is_loaded_into_other_blocks(rig: Rig) -> None:
    rig.store([3, 5, 1, 8], [4, 2])
    kept = [rig.block(block) for block in (3, 5, 1, 8)]
    others = {block: rig.block(block) for block in range(BLOCKS) if block not in (10, 2, 11, 7)}
    report = rig.load([10, 2, 11, 7], [4, 2])
    assert not report.loads_failed
    assert not rig.worker.take_failed_loads()
    for block, content in zip((10, 2, 11, 7), kept, strict=True):
        assert np.array_equal(rig.block(block), content)
    for block, content in others.items():
        assert np.array_equal(rig.block(block), content)


def test_a_load_may_begin_and_end_inside_of_a_slot(rig: Rig) -> None:
    rig.store([3, 5, 1, 8], [4, 2])
    kept = [rig.block(block) for block in (5, 1)]
    rig.load([10, 11], [4, 2], first=7)
    assert [np.array_equal(rig.block(10), kept[0]), np.array_equal(rig.block(11), kept[1])] == [True, True]


def test_a_load_that_cannot_be_begun_has_failed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any, **_options: Any) -> Any:
        raise RuntimeError("no more")

    monkeypatch.setattr(rig.worker._engine, "load", broken)
    assert rig.load([10, 2, 11, 7], [4, 2]).loads_failed == {"r": "error"}
    assert rig.worker.take_failed_loads() == {"r"}


def test_a_rank_reads_its_part_of_what_is_on_the_disk(rig: Rig, tmp_path: Path) -> None:
    rig.store([3, 5, 1, 8], [4, 2])
    kept = [rig.block(block) for block in (3, 5, 1, 8)]
    assert rig.session.arena is not None
    content = rig.session.arena.memory[2].tobytes()
    rig.session.arena.memory[2] = 0xEE
    (tmp_path / "slab").write_bytes(bytes(4096) + content)
    extent = DiskExtent(str(tmp_path / "slab"), 4096, SLOT_BYTES, xxhash.xxh3_64_intdigest(content))
    while rig.worker._direct.reads is None:
        rig.worker.take_report()
    report = rig.load([10, 2, 11, 7], [4, 0], extents=(None, extent))
    assert not report.loads_failed and report.copied_bytes == {"cpu": 2 * BLOCK_BYTES, "gds_compat": SLOT_BYTES}
    assert all(np.array_equal(rig.block(block), part) for block, part in zip((10, 2, 11, 7), kept, strict=True))
    # Either part may be what makes it fail.
    rig.session.arena.epochs[4] += 1
    assert rig.load([10, 2, 11, 7], [4, 0], extents=(None, extent)).loads_failed == {"r": "epoch"}
    rig.session.arena.epochs[4] -= 1
    (tmp_path / "slab").write_bytes(bytes(4096 + SLOT_BYTES))
    assert rig.load([10, 2, 11, 7], [4, 0], extents=(None, extent)).loads_failed == {"r": "damaged"}


def test_what_is_read_before_a_load_is_for_the_same_slots_in_the_same_epochs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    engine = rig.worker._engine
    monkeypatch.setattr(engine, "expect_load", lambda starts, size: asked.append((starts.tolist(), size)))
    monkeypatch.setattr(engine, "expect_nothing", lambda: asked.append(None))
    assert rig.session.arena is not None
    first = rig.session.arena.address + RANK_BYTES
    spec = rig.slots([4, 2], req_id="r")
    rig.worker.expect_load(spec)
    assert asked == [None, ([first + 4 * SLOT_BYTES, first + 2 * SLOT_BYTES], RANK_BYTES)]
    rig.worker.submit_load(2, spec, rig.blocks([10, 2, 11, 7], 0))
    assert len(asked) == 2
    rig.finish(2)
    assert asked.pop() is None  # the step is over
    rig.worker.expect_load(spec)
    asked.clear()
    rig.worker.submit_load(3, rig.slots([4], req_id="r"), rig.blocks([10, 2], 0))  # less was found room for
    assert asked == []
    rig.finish(3)
    for slots, changes in (
        ([4, 2], {"epochs": spec.epochs + np.uint32(1)}),
        ([4, 2], {"generation": b"before"}),
        ([2, 4], {}),
    ):
        rig.worker.expect_load(spec)
        asked.clear()
        rig.worker.submit_load(4, rig.slots(slots, req_id="r", **changes), rig.blocks([10, 2, 11, 7], 0))
        assert asked == ([] if "generation" in changes else [None])  # that is no load at all
        rig.finish(4)
    rig.worker.expect_load(spec)
    asked.clear()
    rig.worker.get_finished()
    assert asked == [None]
    for change in ({"generation": b"before"}, {"offsets": np.array([SLOTS * SLOT_BYTES], np.uint64)}):
        rig.worker.expect_load(rig.slots([4, 2], **change))
    assert asked == [None]


def test_loads_that_have_ended_are_left_to_who_asks_between_steps(rig: Rig) -> None:
    worker = rig.worker
    worker.holds_good_loads = True
    worker.submit_load(2, rig.slots([4], req_id="r"), rig.blocks([10, 2], 0))
    worker.submit_load(3, rig.slots([4], req_id="bad", epochs=np.array([99], np.uint32)), rig.blocks([3, 5], 0))
    worker.wait({2, 3})
    assert [result.job_id for result in worker.get_finished()] == [3]
    assert worker.loading and worker.good_load_ended()
    worker.only_good_loads = True
    assert [result.job_id for result in worker.get_finished()] == [2]
    assert list(worker.take_loads_done().loads_done) == ["r"]
    worker.only_good_loads = False
    assert not worker.loading and worker.take_report().loads_failed == {"bad": "epoch"}
    worker.submit_load(4, rig.slots([4], req_id="r"), rig.blocks([10, 2], 0))
    worker.wait({4})
    told = [[result.job_id for result in worker.get_finished()] for _ in range(3)]
    assert told == [[], [], [4]]  # nobody has asked


def test_a_load_of_nothing_is_done_at_once(rig: Rig) -> None:
    assert not rig.load([], []).loads_failed


def test_nothing_is_written_to_the_null_block(rig: Rig) -> None:
    rig.store([3, 5], [4])
    null, kept = rig.block(0), rig.block(5)
    assert not rig.load([0, 9], [4]).loads_failed
    assert np.array_equal(rig.block(0), null)
    assert np.array_equal(rig.block(9), kept)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"epochs": np.array([99], np.uint32)}, "epoch"),
        ({"generation": b"before"}, "generation"),
        ({"generation": b""}, "not_pinned"),
        ({"format": SlotFormat(DIRECT, RANKS, 2 * BLOCK_BYTES, BLOCKS_PER_SLOT)}, "layout"),
        ({"offsets": np.array([SLOTS * SLOT_BYTES], np.uint64)}, "error"),
    ],
)
def test_a_load_that_cannot_be_right_fails(rig: Rig, changes: dict[str, Any], reason: str) -> None:
    before = [rig.block(block) for block in (9, 10)]
    report = rig.load([9, 10], [4], **changes)
    assert report.loads_failed == {"r": reason}
    assert rig.worker.take_failed_loads() == {"r"}
    if reason != "epoch":
        assert all(np.array_equal(rig.block(b), kept) for b, kept in zip((9, 10), before, strict=True))


def test_without_a_mapping_loads_and_stores_fail(rig: Rig) -> None:
    rig.session.arena = None
    assert rig.load([9, 10], [4]).loads_failed == {"r": "worker_detached"}
    assert rig.store([9, 10], [4]).stores_failed == {7}


def test_a_store_with_a_hole_or_too_few_blocks_is_never_published(rig: Rig) -> None:
    assert rig.store([9, 0], [4]).stores_failed == {7}
    assert rig.store([9, 10], [4, 2]).stores_failed == {7}
    assert rig.store([9, 10, 11], [4, 2]).stores_failed == {7}
    assert rig.store([BLOCKS, 10], [4]).stores_failed == {7}
    assert rig.session.arena is not None
    assert not rig.session.arena.memory.any()


def test_a_load_under_way_ends_well_when_the_daemon_dies(rig: Rig) -> None:
    rig.store([3, 5], [4])
    kept = rig.block(3)
    rig.session.attached = False  # the mapping stays
    report = rig.load([9, 10], [4])
    assert not report.loads_failed
    assert np.array_equal(rig.block(9), kept)


def test_attachment_is_reported_when_it_changes(rig: Rig) -> None:
    assert rig.worker.take_report().attached == {RANK: b"now"}
    assert not rig.worker.take_report()
    rig.session.attached = False
    assert rig.worker.take_report().attached == {RANK: b""}


def test_reports_of_ranks_add_up() -> None:
    from engine_plugin.vllm.messages import KVStoreWorkerMetadata, WorkerReport

    one = KVStoreWorkerMetadata({5: 1}, report=WorkerReport({0: b"g"}, {7: {0}}, {7}, {6: {0}, 9: {0}}, {"r": "epoch"}))
    two = KVStoreWorkerMetadata({5: 1}, report=WorkerReport({1: b"g"}, {7: {1}, 8: {1}}, set(), {9: {1}}))
    both = one.aggregate(two)
    assert isinstance(both, KVStoreWorkerMetadata)
    assert both.completed_jobs == {5: 2}
    lost = {6: {0}, 9: {0, 1}}
    assert both.report == WorkerReport({0: b"g", 1: b"g"}, {7: {0, 1}, 8: {1}}, {7}, lost, {"r": "epoch"})


def test_a_store_that_is_asked_about_is_under_way_or_will_never_be_begun(rig: Rig) -> None:
    rig.worker.submit_store(1, rig.blocks([3, 5], 0), rig.slots([4], ticket=7))
    rig.worker.asked_about([7, 8])
    report = rig.worker.take_report()
    assert report.stores_lost == {8: {RANK}}
    assert report.stores_done == {8: {RANK}}
    assert rig.finish(1).stores_done == {7: {RANK}}
    assert rig.session.arena is not None
    before = rig.session.arena.memory.copy()
    late = rig.store([1, 2], [5], ticket=8)
    assert 8 not in late.stores_done
    assert np.array_equal(rig.session.arena.memory, before)
    rig.worker.asked_about(range(100, 10_100))
    assert len(rig.worker._given_up) < 5000


def test_what_cannot_be_closed_keeps_nothing_else_open(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("of a driver that is gone")

    monkeypatch.setattr(rig.worker._direct, "close", fails)
    rig.worker.shutdown()
    assert not rig.session.attached
    assert rig.worker.hook_errors["shutdown"] == 1


def test_another_layout_than_the_schedulers_is_refused(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="this KV cache layout does not work"):
        layout_of(rig.caches, SlotFormat(DIRECT, RANKS, BLOCK_BYTES - 1, BLOCKS_PER_SLOT), RANK, RANKS)
