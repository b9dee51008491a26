"""How the tensors of an engine's layers lie in a block: layer after layer, so that one layer of many blocks can be
copied before the next.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.arena import Offsets
from kvstore.errors import InvalidRequest
from kvstore.tensors import Bytes, Library, TensorSpec, empty, spec_of, words_of

#: Where the bytes of a tensor begin within a block: at a cache line, which suits every dtype.
_ALIGNMENT: Final = 64

#: Most bytes that one thread copies before it looks what is next.
_PIECE_BYTES: Final = 1 << 20

#: Tensors by layer.
Layers: TypeAlias = Sequence[Sequence[Any]]
#: The same as unsigned integers over the same memory.
Words: TypeAlias = list[list[npt.NDArray[Any]]]
#: Where to and where from: arrays of one shape.
Piece: TypeAlias = tuple[npt.NDArray[Any], npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class KVTensor:
    """One tensor of a layer's KV, such as its keys.

    Attributes:
        dtype: Name such as ``bfloat16``.
        shape: Length of each axis; None, exactly once, for the axis of tokens.
        item_bytes: Bytes of one element.
    """

    dtype: str
    shape: tuple[int | None, ...]
    item_bytes: int

    def __post_init__(self) -> None:
        if self.shape.count(None) != 1 or any(length is not None and length < 1 for length in self.shape):
            raise InvalidRequest(f"KVTensor.shape is {self.shape}: give lengths, and None once, for the tokens")
        if self.item_bytes not in (1, 2, 4, 8):
            raise InvalidRequest(f"KVTensor.item_bytes is {self.item_bytes}: it must be 1, 2, 4 or 8")

    @property
    def axis(self) -> int:
        """Which axis the tokens are on."""
        return self.shape.index(None)

    def shape_of(self, tokens: int) -> tuple[int, ...]:
        """The shape for so many tokens."""
        return tuple(tokens if length is None else length for length in self.shape)

    def bytes_of(self, tokens: int) -> int:
        """Bytes of so many tokens."""
        return math.prod(self.shape_of(tokens)) * self.item_bytes

    def cut(self, tensor: Any, tokens: int) -> Any:
        """The first tokens of a tensor; a view."""
        return tensor[(slice(None),) * self.axis + (slice(tokens),)]

    def check(self, tensor: Any) -> int:
        """Whether a tensor is such a one. Returns its tokens.

        Raises:
            InvalidRequest: it is not.
        """
        spec = spec_of(tensor)
        tokens = spec.shape[self.axis] if len(spec.shape) == len(self.shape) else 0
        if (spec.dtype, spec.shape, spec.item_bytes) != (self.dtype, self.shape_of(tokens), self.item_bytes):
            raise InvalidRequest(f"{spec.dtype}{list(spec.shape)} for {self.dtype}{list(self.shape)}")
        return tokens


class Layout:
    """The layers of an engine, and where their tensors are in a block of `block_tokens`.

    Raises:
        InvalidRequest: no layers, a layer without tensors, or no tokens.
    """

    def __init__(self, layers: Sequence[Sequence[KVTensor]], block_tokens: int) -> None:
        if not layers or not all(layers):
            raise InvalidRequest("layers: give at least one layer, and one tensor in each")
        if block_tokens < 1:
            raise InvalidRequest(f"block_tokens is {block_tokens}: it must be at least 1")
        self.layers = [list(layer) for layer in layers]
        self.block_tokens = block_tokens
        self._places: list[list[int]] = []
        self.block_bytes = 0
        for layer in self.layers:
            self._places.append([])
            for tensor in layer:
                self._places[-1].append(self.block_bytes)
                self.block_bytes += -(-tensor.bytes_of(block_tokens) // _ALIGNMENT) * _ALIGNMENT

    def check(self, layers: Layers) -> int:
        """Whether tensors are those of the layers. Returns for how many tokens all of them have room.

        Raises:
            InvalidRequest: they are not.
        """
        if len(layers) != len(self.layers):
            raise InvalidRequest(f"{len(layers)} layers are given, and there are {len(self.layers)}")
        room = []
        for index, (given, wanted) in enumerate(zip(layers, self.layers, strict=True)):
            if len(given) != len(wanted):
                raise InvalidRequest(f"{len(given)} tensors are given for layer {index}, which has {len(wanted)}")
            try:
                room += [tensor.check(each) for each, tensor in zip(given, wanted, strict=True)]
            except InvalidRequest as error:
                raise InvalidRequest(f"layer {index} is given {error}") from None
        return min(room)

    def cut(self, layers: Layers, tokens: int) -> list[list[Any]]:
        """The first tokens of all tensors; views."""
        return [
            [tensor.cut(each, tokens) for each, tensor in zip(given, wanted, strict=True)]
            for given, wanted in zip(layers, self.layers, strict=True)
        ]

    def empty(self, tokens: int, library: Library) -> list[list[Any]]:
        """New tensors for so many tokens."""
        return [
            [empty(TensorSpec(each.dtype, each.shape_of(tokens), each.item_bytes, library))[0] for each in layer]
            for layer in self.layers
        ]

    def words(self, layers: Layers) -> Words:
        """Tensors as words, to be copied whatever their dtype.

        Raises:
            InvalidRequest: one is not in host memory.
        """
        return [[words_of(each) for each in layer] for layer in layers]

    def load_pieces(self, layer: int, targets: Words, first: int, pool: Bytes, offsets: Offsets) -> Iterator[Piece]:
        """What is to be copied of a layer out of blocks; the first of them holds block `first` of the targets."""
        for target, view, tensor, blocks in self._pieces(layer, targets, pool, offsets):
            outside = self._blocks_of(target, tensor, first + blocks.start, first + blocks.stop)
            step = max(1, _PIECE_BYTES // tensor.bytes_of(self.block_tokens))
            for start in range(0, len(view), step):
                yield outside[start : start + step], view[start : start + step]

    def store_layer(self, layer: int, sources: Words, numbers: Sequence[int], pool: Bytes, offsets: Offsets) -> None:
        """Copies a layer into slots; slot i is for block `numbers[i]` of the sources."""
        for source, view, tensor, blocks in self._pieces(layer, sources, pool, offsets):
            start, stop = numbers[blocks.start], numbers[blocks.stop - 1] + 1
            if stop - start == len(blocks):
                np.copyto(view, self._blocks_of(source, tensor, start, stop))
                continue
            for index, number in enumerate(numbers[blocks.start : blocks.stop]):
                np.copyto(view[index], self._blocks_of(source, tensor, number, number + 1)[0])

    def _pieces(
        self, layer: int, words: Words, pool: Bytes, offsets: Offsets
    ) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any], KVTensor, range]]:
        """A tensor of the engine, the same of some blocks in the pool (with an axis of blocks before its own), what it
        is, and which blocks these are.
        """
        runs = list(_runs(offsets.astype(np.int64)))
        for outside, place, tensor in zip(words[layer], self._places[layer], self.layers[layer], strict=True):
            shape, size = tensor.shape_of(self.block_tokens), tensor.bytes_of(self.block_tokens)
            for blocks, start, stride in runs:
                one = pool[start + place : start + place + size].view(f"u{tensor.item_bytes}").reshape(shape)
                view = np.lib.stride_tricks.as_strided(one, (len(blocks), *shape), (stride, *one.strides))
                yield outside, view, tensor, blocks

    def _blocks_of(self, words: npt.NDArray[Any], tensor: KVTensor, start: int, stop: int) -> npt.NDArray[Any]:
        """Some blocks of a tensor of the engine, with an axis of blocks before its own; a view."""
        axis, step = tensor.axis, self.block_tokens
        part = words[(slice(None),) * axis + (slice(start * step, stop * step),)]
        shape = (*part.shape[:axis], stop - start, step, *part.shape[axis + 1 :])
        strides = (*part.strides[:axis], part.strides[axis] * step, *part.strides[axis:])
        return np.moveaxis(np.lib.stride_tricks.as_strided(part, shape, strides), axis, 0)


def _runs(positions: npt.NDArray[np.int64]) -> Iterator[tuple[range, int, int]]:
    """Slots at equal distances, as they mostly are: which, where the first one is, and their distance. So one copy
    moves a tensor of all of them.
    """
    steps = np.diff(positions)
    start = 0
    while start < len(positions):
        stop, stride = start + 1, 0
        if start < len(steps) and steps[start] > 0:
            stride = int(steps[start])
            other = np.flatnonzero(steps[start:] != stride)
            stop = start + 1 + (int(other[0]) if len(other) else len(steps) - start)
        yield range(start, stop), int(positions[start]), stride
        start = stop
