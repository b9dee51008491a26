"""The CPU engine of copies. Its kernel is compiled with numba, which comes with vLLM."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import pytest

from engine_plugin.copy.contract import Fragments

pytest.importorskip("numba", reason="comes with vLLM")
from engine_plugin.copy.cpu import SPLIT_BYTES_MIN, CpuCopyEngine

Bytes = npt.NDArray[np.uint8]


def fragments_of(kv: Bytes, pool: Bytes, rows: list[tuple[int, int, int]]) -> Fragments:
    """Rows: first byte in KV memory, first byte in the pool, bytes."""
    at, to, size = (np.array(column, np.uint64) for column in zip(*rows, strict=True))
    return Fragments(np.uint64(kv.ctypes.data) + at, np.uint64(pool.ctypes.data) + to, size)


def test_it_keeps_the_contract() -> None:
    engine = CpuCopyEngine(2)
    kv = np.arange(64, dtype=np.uint8)
    pool = np.zeros(64, np.uint8)
    ends: list[tuple[float, BaseException | None]] = []
    fragments = fragments_of(kv, pool, [(8, 32, 8), (0, 0, 4)])
    copy = engine.store(fragments, lambda *end: ends.append(end))
    engine.wait([copy])
    assert copy.over
    assert ends[0][1] is None
    assert pool[32:40].tolist() == list(range(8, 16))
    assert pool[:4].tolist() == [0, 1, 2, 3]
    kv[:] = 0
    engine.wait([engine.load(fragments, lambda *end: ends.append(end))])
    assert kv[8:16].tolist() == list(range(8, 16))
    assert kv[16:].sum() == 0
    assert engine.stats().bytes_by_path == {"cpu": 24}
    engine.close()
    assert len(ends) == 2


def test_it_copies_where_no_more_threads_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a job is told to have failed, and is done later all the same, when its memory is somebody else's."""
    engine = CpuCopyEngine(3)

    def none(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    count, size = 64, SPLIT_BYTES_MIN // 32
    source = np.random.default_rng(0).integers(0, 256, (count, size), np.uint8)
    target = np.zeros_like(source)
    fragments = fragments_of(source.reshape(-1), target.reshape(-1), [(size * n, size * n, size) for n in range(count)])
    errors: list[BaseException | None] = []
    engine.wait([engine.store(fragments, lambda _seconds, error: errors.append(error))])
    assert errors == [None] and np.array_equal(source, target)
    engine.close()
