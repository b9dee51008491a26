"""Files into KV memory on a GPU with kvikio (through the host where the driver has no nvidia-fs)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

pytest.importorskip("kvikio")

BLOCKS, LAYERS = 24, 8
PAGES = (512, 8192, 65_536)


class Files:
    """Blocks in two slabs, each with room behind it as for a footer."""

    def __init__(self, folder: Path, block_bytes: int, blocks: int) -> None:
        from kvstore.direct import DiskExtent

        chance = np.random.default_rng(block_bytes)
        self.content = chance.integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
        self.extents = []
        for number, content in enumerate(self.content):
            path = folder / f"slab {number % 2}"
            offset = number // 2 * (block_bytes + 4096)
            with path.open("ab") as file:
                file.write(content.tobytes() + bytes(4096))
            self.extents.append(DiskExtent(str(path), offset, block_bytes, xxhash.xxh3_64_intdigest(content)))


def load(reads: Any, files: Files, kv: Any, ids: list[int]) -> BaseException | None:
    from tests.gpu.rig import Ends, Pool

    pool = Pool(4096)
    pool.address = 0
    ends = Ends()
    offsets = [index * kv.block_bytes for index in range(len(ids))]
    reads.wait([reads.begin(files.extents, kv.fragments(ids, pool, offsets), ends)])
    (error,) = ends.errors
    return error


@pytest.mark.parametrize("size", [1024, 3072, 65_536, 1 << 20, 8 << 20])
def test_the_gpu_computes_the_checksum_that_was_stored(size: int) -> None:
    import torch

    from engine_plugin.copy.xxh3 import Digests, finish

    for kind in (torch.randint(-(1 << 62), 1 << 62, (3, size // 8)), torch.zeros((1, size // 8), dtype=torch.int64)):
        wanted = [xxhash.xxh3_64_intdigest(row.numpy().tobytes()) for row in kind]
        assert finish(Digests(torch.device("cuda")).queue(kind.cuda()).tolist(), size) == wanted


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("layout", ["separate", "packed", "padded"])
def test_blocks_come_to_their_pages(tmp_path: Path, page: int, layout: str) -> None:
    import torch

    from engine_plugin.copy.gds import open_reads
    from kvstore.errors import Damage
    from tests.gpu.rig import KV

    kv = KV(layout, LAYERS, 2 * BLOCKS, page)
    files = Files(tmp_path, kv.block_bytes, BLOCKS)
    chosen = torch.randperm(2 * BLOCKS).tolist()
    ids, others = chosen[:BLOCKS], chosen[BLOCKS:]
    before = [kv.block(other) for other in others]
    reads = open_reads("cuda", kv.block_bytes, compat=True)
    print(reads.how)
    try:
        assert load(reads, files, kv, ids) is None
        for block_id, content in zip(ids, files.content, strict=True):
            assert np.array_equal(kv.block(block_id), content)
        for other, content in zip(others, before, strict=True):
            assert np.array_equal(kv.block(other), content)
        assert reads.read_bytes == files.content.nbytes

        bad = files.extents[BLOCKS // 2]
        with open(bad.path, "r+b") as file:
            file.seek(bad.offset + kv.block_bytes // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        assert isinstance(load(reads, files, kv, ids), Damage)
        with open(files.extents[-1].path, "r+b") as file:
            file.truncate(files.extents[-1].offset + 4096)
        assert load(reads, files, kv, ids) is not None
        Path(files.extents[0].path).unlink()
        assert isinstance(load(reads, files, kv, ids), OSError)
    finally:
        reads.close()


def test_what_the_model_writes_before_the_load_is_written_before_it(tmp_path: Path) -> None:
    """The pages are still being written by what was queued before: the load comes after that."""
    import torch

    from engine_plugin.copy.gds import open_reads
    from tests.gpu.rig import KV

    kv = KV("separate", LAYERS, BLOCKS, 8192)
    files = Files(tmp_path, kv.block_bytes, BLOCKS)
    ids = list(range(BLOCKS))
    reads = open_reads("cuda", kv.block_bytes, compat=True)
    torch.cuda._sleep(200_000_000)
    kv.write(ids, 1)
    assert load(reads, files, kv, ids) is None
    torch.cuda.synchronize()
    assert all(np.array_equal(kv.block(block_id), files.content[block_id]) for block_id in ids)
    reads.close()


def test_blocks_that_are_no_multiple_of_a_page_are_refused() -> None:
    from engine_plugin.copy.gds import GdsUnavailable, open_reads

    with pytest.raises(GdsUnavailable) as caught:
        open_reads("cuda", 4096 + 512, compat=True)
    assert caught.value.reason == "block_size"
