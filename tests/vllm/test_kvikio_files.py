"""How files are given to kvikio, which is pretended: it needs a GPU."""

from __future__ import annotations

import concurrent.futures
import os
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="comes with vLLM")
import torch

from engine_plugin.copy.gds import FILES_MAX, PIECE_BYTES, GdsUnavailable, KvikioFiles

LIMIT_S = 60


class Pretended:
    """Attributes:
    threads: Do what kvikio's do: one task each.
    open: Files that are.
    fail_at: Offsets in a file of which reading fails.
    go: The other reads wait for this.
    """

    def __init__(self) -> None:
        self.threads = concurrent.futures.ThreadPoolExecutor(4)
        self.open: list[str] = []
        self.fail_at: set[int] = set()
        self.go = threading.Event()
        self.go.set()
        self.nvidia_fs = True

    def read(self, fd: int, buffer: Any, size: int, offset: int) -> int:
        if offset in self.fail_at:
            raise RuntimeError("EIO")
        assert self.go.wait(LIMIT_S)
        return os.preadv(fd, [memoryview(buffer.numpy())[:size]], offset)

    def modules(self) -> dict[str, types.ModuleType]:
        kvikio = self

        class Future:
            def __init__(self, future: concurrent.futures.Future[int]) -> None:
                self._future: concurrent.futures.Future[int] | None = future

            def get(self) -> int:
                future, self._future = self._future, None  # as C++ does it, only once
                assert future is not None
                return future.result(LIMIT_S)

        class CuFile:
            def __init__(self, path: str, flags: str) -> None:
                assert flags == "r"
                self._path, self._fd = path, os.open(path, os.O_RDONLY)
                kvikio.open.append(path)

            def pread(self, buf: Any, size: int, file_offset: int, task_size: int) -> Future:
                assert size == buf.nbytes and task_size >= size, "several tasks"
                return Future(kvikio.threads.submit(kvikio.read, self._fd, buf, size, file_offset))

            def close(self) -> None:
                os.close(self._fd)
                kvikio.open.remove(self._path)

        named = {name: types.ModuleType(name) for name in ("kvikio", "kvikio.buffer", "kvikio.cufile_driver")}
        named["kvikio.defaults"] = types.ModuleType("kvikio.defaults")
        module: Any = named["kvikio"]
        module.CuFile, module.CompatMode = CuFile, types.SimpleNamespace(ON=1, OFF=0)
        for name, part in named.items():
            if name != "kvikio":
                setattr(module, name.removeprefix("kvikio."), part)
        module.cufile_driver.get = lambda _name: kvikio.nvidia_fs
        module.defaults.set = lambda _settings: None
        return named


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    kvikio = Pretended()
    for name, module in kvikio.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield kvikio
    kvikio.go.set()
    kvikio.threads.shutdown()
    assert not kvikio.open


def test_a_block_is_read_in_pieces_and_is_over_when_all_of_them_are(kvikio: Pretended, tmp_path: Path) -> None:
    size = 2 * PIECE_BYTES + 4096
    content = np.random.default_rng(0).integers(0, 256, size + 4096, np.uint8)
    path = tmp_path / "slab"
    path.write_bytes(content.tobytes())
    files = KvikioFiles(compat=False)
    assert files.how == "gds"
    block = torch.zeros(size, dtype=torch.uint8)
    assert files.read(str(path), 4096, size, block).get() == size
    assert np.array_equal(block.numpy(), content[4096:])
    with path.open("r+b") as file:
        file.truncate(size)
    assert files.read(str(path), 4096, size, block).get() == size - 4096
    kvikio.fail_at.add(4096)
    kvikio.go.clear()
    read = files.read(str(path), 4096, size, block)
    over = kvikio.threads.submit(read.get)
    with pytest.raises(TimeoutError):  # the other pieces are still read
        over.result(0.05)
    kvikio.go.set()
    with pytest.raises(RuntimeError):
        over.result(LIMIT_S)
    files.close()


def test_a_file_that_was_replaced_is_opened_anew_and_few_stay_open(kvikio: Pretended, tmp_path: Path) -> None:
    files = KvikioFiles(compat=False)
    block = torch.zeros(4096, dtype=torch.uint8)
    for content in (1, 2, 3):
        (tmp_path / "next").write_bytes(bytes([content]) * 4096)
        (tmp_path / "next").rename(tmp_path / "slab")
        assert files.read(str(tmp_path / "slab"), 0, 4096, block).get() == 4096
        assert block.unique().tolist() == [content]
    for number in range(FILES_MAX + 3):
        (tmp_path / str(number)).write_bytes(bytes(4096))
        files.read(str(tmp_path / str(number)), 0, 4096, block).get()
    files.tidy()
    assert len(kvikio.open) == FILES_MAX
    files.close()
    with pytest.raises(FileNotFoundError):
        files.read(str(tmp_path / "none"), 0, 4096, block)


def test_what_is_missing_is_named(kvikio: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    kvikio.nvidia_fs = False
    assert KvikioFiles(compat=True).how == "gds_compat"
    with pytest.raises(GdsUnavailable) as missing:
        KvikioFiles(compat=False)
    assert missing.value.reason == "no_nvidia_fs"
    monkeypatch.setitem(sys.modules, "kvikio.buffer", None)  # half installed
    with pytest.raises(GdsUnavailable) as missing:
        KvikioFiles(compat=True)
    assert missing.value.reason == "no_kvikio"
