"""Tensors as bytes and back; which tokens answer which query. No daemon."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.buffer.prefix import Answer, Prefixes, is_prefix, selected
from kvstore.buffer.records import HEAD_BYTES, Draft, Head
from kvstore.errors import Damage, InvalidRequest, LimitExceeded
from kvstore.tensors import TensorSpec, bytes_of, bytes_to_fill, empty, words_of
from tests.buffer.samples import DTYPES, same, sample


@pytest.mark.parametrize("seed", range(200))
def test_a_tensor_survives_being_bytes(seed: int) -> None:
    tensor = sample(seed, none=False)
    spec, data = bytes_of(tensor)
    spec = TensorSpec.of_json(json.loads(json.dumps(spec.as_json())))
    made, target = empty(spec)
    assert target.nbytes == data.nbytes == spec.nbytes
    target[:] = data
    assert same(tensor, made)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contiguous_tensors_are_not_copied(dtype: Any) -> None:
    array = np.zeros((3, 4), dtype=dtype)
    assert np.shares_memory(bytes_of(array)[1], array.view(np.uint8))


def test_what_is_no_array_of_numbers_is_refused() -> None:
    for thing in ([1, 2], "text", object(), np.array([object()]), np.zeros(2, "S3"), np.zeros(2, [("a", "f4")])):
        with pytest.raises(InvalidRequest):
            bytes_of(thing)


def test_other_byte_orders_and_buffers() -> None:
    assert bytes_of(np.array([1, 2], dtype=">u2"))[1].tolist() == [1, 0, 2, 0]
    assert bytes_of(b"abc")[0] == TensorSpec("uint8", (3,), 1, "numpy")
    assert bytes_of(bytearray(b"abc"))[1].tobytes() == b"abc"


@pytest.mark.parametrize(
    "value", [None, [], ["f4", [1], 4], ["f4", [-1], 4, "numpy"], ["f4", "x", 4, "numpy"], ["f4", [1], 0, "numpy"]]
)
def test_a_damaged_description_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest):
        TensorSpec.of_json(value)


def test_unknown_dtypes_and_libraries_are_named() -> None:
    with pytest.raises(InvalidRequest, match="float8_nonsense"):
        empty(TensorSpec("float8_nonsense", (1,), 1, "numpy"))
    with pytest.raises(InvalidRequest, match="float32 of 2"):
        empty(TensorSpec("float32", (1,), 2, "numpy"))


def test_out_must_fit() -> None:
    spec = TensorSpec("float32", (2, 3), 4, "numpy")
    assert bytes_to_fill(np.zeros((2, 3), np.float32), spec).nbytes == 24
    for wrong in (np.zeros((3, 2), np.float32), np.zeros((2, 3), np.int32), np.zeros((3, 2), np.float32).T, b"x" * 24):
        with pytest.raises(InvalidRequest, match="out"):
            bytes_to_fill(wrong, spec)


def test_words_are_the_same_memory_with_its_strides() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2]
    words = words_of(array)
    assert words.dtype == np.uint32 and words.strides == array.strides
    words[1, 1] = 0
    assert array[1, 1] == 0
    with pytest.raises(InvalidRequest):
        words_of(np.zeros(1, np.complex128))


def test_nothing_here_imports_torch() -> None:
    code = "import sys, kvstore.buffer, kvstore.tensors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# -- heads -------------------------------------------------------------------------------------------------------------


def test_a_head_tells_what_its_draft_said() -> None:
    tensors = [np.arange(3), None, np.zeros((5 << 20) + 1, np.uint8), np.zeros(70_000, np.uint8)]
    draft = Draft(tensors, {"a": 1})
    head = Head.parse(draft.head_block({}))
    assert head.notes == {"a": 1} and head.counts == (0, 19, 2) and len(draft.head_block({})) == HEAD_BYTES
    assert [len(blocks) for blocks in draft.blocks] == list(head.counts)
    assert draft.nbytes == HEAD_BYTES + 19 * (64 << 10) + 2 * (2 << 20)


def test_a_damaged_head_is_noticed() -> None:
    good = Draft([np.arange(3), np.zeros(70_000, np.uint8)], {}).head_block({}).tobytes()
    for bad in (bytes(HEAD_BYTES), b"KVR1\xff\xff\xff\xff" + good[8:], good[:8] + b"{}" + good[10:], good[:100]):
        with pytest.raises(Damage):
            Head.parse(bad.ljust(HEAD_BYTES, b"\0"))
    fewer = good.replace(b'"counts":[0,2,0]', b'"counts":[0,1,0]')
    with pytest.raises(Damage, match="parts"):
        Head.parse(fewer)


def test_too_much_to_describe_is_refused() -> None:
    with pytest.raises(LimitExceeded, match="4096"):
        Draft([np.zeros(0)] * 200, {})


# -- prefixes ----------------------------------------------------------------------------------------------------------

_tokens = st.tuples(st.integers(0, 3), st.integers(0, 400), st.integers(0, 400))


def _made(shape: tuple[int, int, int]) -> np.ndarray[Any, Any]:
    """Tokens that agree with each other up to some place: a chain, and where it leaves the chain."""
    branch, length, fork = shape
    tokens = np.arange(length) % 50
    tokens[fork:] += branch
    return tokens


@given(_tokens, _tokens)
def test_notes_decide_as_the_tokens_do(stored: tuple[int, int, int], asked: tuple[int, int, int]) -> None:
    one, other = _made(stored), _made(asked)
    answer = Prefixes(other).answered_by(json.loads(json.dumps(Prefixes(one).notes())))
    if answer is Answer.READ:
        assert len(other) < len(one) and len(other) % 64
    else:
        assert (answer is Answer.YES) == is_prefix(one, other)


def test_notes_of_a_million_tokens_fit_a_head() -> None:
    tokens = np.arange(1 << 20)
    draft = Draft([tokens, None, None, None, None], Prefixes(tokens).notes())
    assert len(draft.head_block({})) == HEAD_BYTES


def test_masks() -> None:
    tokens = np.array([5, 6, 7], dtype=np.int32)
    assert selected(None, None) is None
    assert selected(tokens, None).tolist() == [5, 6, 7]  # type: ignore[union-attr]
    for roi in (np.array([1, 0, 1], bool), np.array([0.9, 0.5, 0.6]), np.array([1, 0, 1])):
        assert selected(tokens, roi).tolist() == [5, 7]  # type: ignore[union-attr]
    for bad in (np.zeros((1, 3), int), np.zeros(3), b""):
        with pytest.raises(InvalidRequest, match=r"tokens|buffer"):
            selected(bad, np.ones(5))
    with pytest.raises(InvalidRequest, match="roi"):
        selected(tokens, np.ones(2))
