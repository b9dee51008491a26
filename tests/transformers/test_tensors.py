"""torch tensors as bytes, through a pipe and a lookup buffer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvstore.buffer import LookupBuffer, Pipe  # noqa: E402
from kvstore.errors import InvalidRequest  # noqa: E402
from kvstore.tensors import bytes_of, empty, words_of  # noqa: E402
from tests.support import PATIENCE_S, Daemon  # noqa: E402

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]


def made(dtype: Any, *shape: int) -> Any:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same(one: Any, other: Any) -> bool:
    """Every byte, whatever NaN says about itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bytes_of(one)[1].tobytes() == bytes_of(other)[1].tobytes()


def sampled() -> list[Any]:
    tensors = [made(dtype, *shape) for dtype in DTYPES for shape in ((), (0, 3), (5,), (2, 3, 70))]
    return [*tensors, made(torch.bfloat16, 64, 512).T, made(torch.float32, 9, 9)[::2, 1::3], made(torch.int64, 400_000)]


def test_every_dtype_and_shape_survives() -> None:
    for tensor in sampled():
        spec, data = bytes_of(tensor)
        copy, target = empty(spec)
        target[:] = data
        assert same(tensor, copy)


def test_views_that_are_not_what_memory_says() -> None:
    conjugated = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert conjugated.is_conj() and bytes_of(conjugated)[1].tobytes() == conjugated.resolve_conj().numpy().tobytes()
    assert bytes_of(torch.ones(3, requires_grad=True))[0].shape == (3,)
    with pytest.raises(InvalidRequest, match="in place"):
        words_of(conjugated)
    for bad in (torch.eye(3).to_sparse(), torch.empty(2, device="meta")):
        with pytest.raises(InvalidRequest, match="dense"):
            bytes_of(bad)


def test_words_share_memory() -> None:
    tensor = made(torch.bfloat16, 4, 6)[:, ::2]
    words_of(tensor)[:] = 0
    assert not tensor.any()


def test_through_a_pipe(served: Daemon) -> None:
    tensors = sampled()
    with Pipe("torch", served.endpoint) as sender, Pipe("torch", served.endpoint) as receiver:
        for tensor in tensors[:60]:
            sender.send_tensor(tensor)
            assert same(receiver.recv_tensor(PATIENCE_S), tensor)
        out = torch.zeros(400_000, dtype=torch.int64)
        sender.send_tensor(tensors[-1])
        assert receiver.recv_tensor(PATIENCE_S, out=out) is out and same(out, tensors[-1])
        sender.__exit__(KeyboardInterrupt, None, None)


def test_one_library_in_and_another_out(served: Daemon) -> None:
    with (
        LookupBuffer("torch", served.endpoint) as buffer,
        LookupBuffer("torch", served.endpoint, library="numpy") as other,
    ):
        key = made(torch.bfloat16, 2, 40, 64)
        for taker, kind in ((buffer, torch.Tensor), (other, np.ndarray)):
            tokens, roi = torch.arange(40), torch.ones(40, dtype=torch.bool)
            assert buffer.insert(tokens, roi, key.float(), None, None).wait(PATIENCE_S).stored == 1
            entry = taker.drop_select(torch.arange(30), torch.ones(30), PATIENCE_S)
            assert entry is not None and isinstance(entry[2], kind) and entry[3] is None
            assert bytes_of(entry[2])[1].tobytes() == bytes_of(key.float())[1].tobytes()


def test_what_cannot_be_made_here_stays(served: Daemon) -> None:
    tensor = made(torch.float4_e2m1fn_x2, 70_000)  # numpy has no such type, not even with ml_dtypes
    with Pipe("torch", served.endpoint) as sender, Pipe("torch", served.endpoint, library="numpy") as receiver:
        sender.send_tensor(tensor)
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="library='torch'"):
                receiver.recv_tensor(PATIENCE_S)
        receiver.close()
        with Pipe("torch", served.endpoint) as other:
            assert same(other.recv_tensor(PATIENCE_S), tensor)
        sender.__exit__(KeyboardInterrupt, None, None)
