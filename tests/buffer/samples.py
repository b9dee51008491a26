"""Random tensors that two processes can make from the same seed, each told apart from every other."""

from __future__ import annotations

import random
from typing import Any

import ml_dtypes
import numpy as np

from kvstore.client import Client

DTYPES: tuple[Any, ...] = (
    np.bool_,
    np.uint8,
    np.int16,
    np.int64,
    np.float16,
    np.float32,
    np.float64,
    np.complex64,
    np.complex128,
    np.dtype("<M8[ns]"),
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
)
#: Sizes around the borders of heads and parts.
SIZES = (0, 1, 100, 3000, 4096, 5000, 64 << 10, (64 << 10) + 1, 200_000, 2 << 20, (2 << 20) + 70_000)


def sample(seed: int, *, bytes_max: int = SIZES[-1], none: bool = True) -> Any:
    """Tensor number `seed`; None now and then."""
    choose = random.Random(seed)
    if none and choose.random() < 0.05:
        return None
    dtype = np.dtype(choose.choice(DTYPES))
    items = choose.choice([size for size in SIZES if size <= bytes_max]) // dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 256, items * dtype.itemsize, dtype=np.uint8)
    if dtype == np.bool_:
        data &= 1
    array = data.view(dtype)
    if items == 1:
        return array.reshape(())
    for _ in range(choose.randint(0, 4)):
        array = array.reshape(1, *array.shape)
    if items % 4 == 0 and items and choose.random() < 0.5:
        array = array.reshape(4, -1).T if choose.random() < 0.5 else array.reshape(2, 2, -1)
    return array


def same(one: Any, other: Any) -> bool:
    """Whether two tensors are the same in dtype, shape and every byte."""
    if one is None or other is None:
        return one is other
    return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())


def lose(client: Client, key: bytes, kv_group: int) -> None:
    """Removes a block and has its slot handed to somebody else, as an eviction does."""
    (lease,) = client.acquire([(kv_group, [key])])
    offset = int(lease.offsets[0])
    client.release([lease])
    assert client.delete([key], kv_group=kv_group) == 1
    taken: list[int] = []
    while offset not in taken:
        taken += client.reserve(1, kv_group=kv_group).offsets.tolist()
