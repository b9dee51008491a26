"""Copy planning and registration: all that needs no GPU."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from engine_plugin.copy import paths, runs
from engine_plugin.copy.contract import Fragments
from engine_plugin.copy.registration import Registration


def fragments_of(rows: list[tuple[int, int, int]]) -> Fragments:
    kv, pool, size = (np.array(column, np.uint64) for column in zip(*rows, strict=True))
    return Fragments(kv, pool, size)


def random_fragments(rng: np.random.Generator, count: int, longest: int = 5000) -> Fragments:
    """Fragments in pool order with gaps here and there; KV addresses do not overlap."""
    size = rng.integers(1, longest, count).astype(np.uint64)
    gap = np.where(rng.random(count) < 0.3, rng.integers(1, 9000, count), 0).astype(np.uint64)
    pool = np.uint64(1 << 20) + np.cumsum(gap + size) - size
    order = rng.permutation(count)
    kv = np.empty(count, np.uint64)
    kv[order] = np.uint64(1 << 30) + np.cumsum(size[order]) - size[order]
    return Fragments(kv, pool, size)


def moved(fragments: Fragments) -> set[tuple[int, int]]:
    """Every byte as (address in KV memory, address in the pool)."""
    return {
        (int(kv) + i, int(pool) + i)
        for kv, pool, size in zip(fragments.kv, fragments.pool, fragments.size, strict=True)
        for i in range(int(size))
    }


@pytest.mark.parametrize("seed", range(20))
def test_cutting_and_sorting_move_the_same_bytes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    fragments = random_fragments(rng, int(rng.integers(1, 60)))
    bytes_ = moved(fragments)
    pieces = runs.split(fragments, 700)
    assert int(pieces.size.max()) <= 700
    assert moved(pieces) == bytes_
    step = int(rng.choice([512, 8192]))
    cut = runs.cut_at_borders(fragments, 1 << 20, step)
    assert moved(cut) == bytes_
    start = cut.pool - np.uint64(1 << 20)
    assert (start // step == (start + cut.size - np.uint64(1)) // step).all()
    for mixed in (rng.permutation(len(fragments)), np.roll(np.arange(len(fragments)), int(rng.integers(60)))):
        ordered = runs.in_pool_order(runs.take(fragments, mixed))
        assert np.array_equal(ordered.pool, fragments.pool)
        assert np.array_equal(ordered.kv, fragments.kv)


@pytest.mark.parametrize("seed", range(20))
def test_windows_are_as_long_as_there_is_room(seed: int) -> None:
    rng = np.random.default_rng(seed)
    fragments = random_fragments(rng, int(rng.integers(1, 60)))
    bounds = runs.windows(fragments.size, 12_000)
    assert bounds[0] == 0
    assert bounds[-1] == len(fragments)
    assert (np.diff(bounds) > 0).all()
    for low, high in itertools.pairwise(bounds):
        assert fragments.size[low:high].sum() <= 12_000
        if high < len(fragments):  # no window ends early
            assert fragments.size[low : high + 1].sum() > 12_000


@pytest.mark.parametrize(("count", "room"), [(1, 10), (7, 10), (7, 30), (6, 30), (7, 35), (7, 1000)])
def test_windows_of_pages_of_one_size_are_full(count: int, room: int) -> None:
    bounds = runs.windows(np.full(count, 10, np.uint64), room)
    assert bounds.tolist() == [*range(0, count, room // 10), count]


def test_a_fragment_larger_than_a_window_has_one_to_itself() -> None:
    assert runs.windows(np.array([5, 100, 5], np.uint64), 10).tolist() == [0, 1, 2, 3]


def test_neighbouring_slots_are_one_run() -> None:
    assert runs.breaks_of(fragments_of([(0, 0, 4), (8, 4, 4), (0, 8, 4), (0, 100, 4), (0, 90, 1)])).tolist() == [3, 4]
    for none in (Fragments(*[np.empty(0, np.uint64)] * 3), fragments_of([(0, 7, 4)])):
        assert not len(runs.breaks_of(none))


@pytest.mark.parametrize(("value", "aligned"), [(32, 16), (16, 16), (24, 8), (4, 4), (6, 2), (7, 1)])
def test_words_are_as_wide_as_everything_is_aligned(value: int, aligned: int) -> None:
    assert runs.alignment(np.array([64, 128], np.uint64), np.array([value], np.uint64)) == aligned


@pytest.mark.parametrize(
    ("size", "fragments", "run", "options", "path"),
    [
        (1 << 30, 16_384, 8 << 20, {}, "staged"),
        (1 << 30, 16_384, 64 << 10, {}, "kernel"),
        (1 << 30, 128, 8 << 20, {}, "batch"),
        (8 << 20, 128, 8 << 20, {}, "kernel"),
        (8 << 20, 128, 8 << 20, {"is_load": True}, "staged"),
        (8 << 20, 128, 64 << 10, {"is_load": True}, "kernel"),
        (1 << 30, 16_384, 8 << 20, {"beside_compute": True}, "batch"),
        (1 << 27, 16_384, 8 << 20, {"beside_compute": True}, "staged"),
        (1 << 20, 128, 1 << 20, {"beside_compute": True}, "staged"),
        (1 << 30, 16_384, 64 << 10, {"mapped": False}, "staged"),
        (1 << 30, 16_384, 8 << 20, {"staging": False}, "kernel"),
        (1 << 30, 16_384, 8 << 20, {"staging": False, "mapped": False}, "batch"),
    ],
)
def test_the_path_goes_by_what_is_long(
    size: int, fragments: int, run: int, options: dict[str, bool], path: str
) -> None:
    options = {"staging": True, "mapped": True, "beside_compute": False, "is_load": False, **options}
    assert paths.choose(size, fragments, run, **options) == path


class Pool:
    address = 1 << 40
    size_bytes = 1000
    populated_bytes = 0


class Runtime:
    """Records; fails from the given address on."""

    def __init__(self, bad_from: int = 1 << 60) -> None:
        self.bad_from = bad_from
        self.live: list[tuple[int, int]] = []
        self.did = threading.Semaphore(0)

    def register(self, address: int, size_bytes: int) -> None:
        if address >= self.bad_from:
            raise RuntimeError("cudaHostRegister: out of memory (2)")
        self.live.append((address, size_bytes))
        self.did.release()

    def unregister(self, address: int) -> None:
        self.live = [each for each in self.live if each[0] != address]


def test_registration_follows_population_in_chunks() -> None:
    pool, runtime = Pool(), Runtime()
    registration = Registration(pool, runtime, lambda: None, chunk_bytes=300)
    pool.populated_bytes = 650
    assert all(runtime.did.acquire(timeout=60) for _ in range(2))
    assert not runtime.did.acquire(timeout=0.1)  # the third chunk has no memory yet
    assert registration.under_way
    pool.populated_bytes = 1000
    assert all(runtime.did.acquire(timeout=60) for _ in range(2))
    assert [size for _, size in runtime.live] == [300, 300, 300, 100]
    registration.end()
    registration.join()
    assert not runtime.live
    assert registration.registered_bytes == 0


def test_a_failure_to_register_is_told_and_keeps_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    pool, runtime = Pool(), Runtime(bad_from=Pool.address + 300)
    pool.populated_bytes = 1000
    registration = Registration(pool, runtime, lambda: None, chunk_bytes=300)
    registration.end()
    registration.join()
    assert "out of memory" in registration.error
    assert not registration.under_way
    assert "locked memory" in caplog.text
    assert not runtime.live
