"""Tensors of any library as plain bytes, and back.

A tensor is told by its dtype's name, its shape and the library it came from; its bytes are those of a C-contiguous,
little-endian copy (the tensor itself where it is one already). Nothing here needs torch: it is used where somebody
gives a torch tensor, and imported where somebody asks for one.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import sys
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest

Bytes: TypeAlias = npt.NDArray[np.uint8]
Library = Literal["numpy", "torch"]

#: Dimensions of a tensor: numpy's own limit.
_DIMENSIONS_MAX: Final = 64
#: Unsigned integers by their size, to look at elements whose type numpy does not know.
_WORDS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is, without its bytes.

    Attributes:
        dtype: Name such as ``bfloat16``, the same in every library.
        shape: Length of each axis; empty for a scalar.
        item_bytes: Bytes of one element.
        library: Where it came from, and what it comes back as unless asked otherwise.
    """

    dtype: str
    shape: tuple[int, ...]
    item_bytes: int
    library: Library

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.item_bytes

    def as_json(self) -> list[Any]:
        """For a header; see of_json."""
        return [self.dtype, list(self.shape), self.item_bytes, self.library]

    @classmethod
    def of_json(cls, value: Any) -> TensorSpec:
        """Reads as_json back.

        Raises:
            InvalidRequest: it is something else.
        """
        match value:
            case [str(dtype), list(shape), int(item_bytes), "numpy" | "torch" as library] if (
                len(shape) <= _DIMENSIONS_MAX
                and item_bytes > 0
                and all(isinstance(length, int) and length >= 0 for length in shape)
            ):
                return cls(dtype, tuple(shape), item_bytes, library)
        raise InvalidRequest(f"not the description of a tensor: {value!r:.200}")


def bytes_of(tensor: Any) -> tuple[TensorSpec, Bytes]:
    """What a tensor is, and its bytes: a view of it where it is contiguous, little-endian and in host memory, else a
    copy.

    Args:
        tensor: A numpy array or scalar, a torch tensor, or anything that speaks DLPack, the array interface or the
            buffer protocol.

    Raises:
        InvalidRequest: it is none of these, or its elements are no plain numbers.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        spec = _torch_spec(torch, tensor)
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        return spec, plain.contiguous().reshape(-1).view(torch.uint8).numpy()
    array = _plain_numpy(tensor)
    spec = TensorSpec(_name_of(array.dtype), array.shape, array.dtype.itemsize, "numpy")
    return spec, np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def spec_of(tensor: Any) -> TensorSpec:
    """What a tensor is, wherever its bytes are.

    Raises:
        InvalidRequest: as bytes_of.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _torch_spec(torch, tensor)
    array = _plain_numpy(tensor)
    return TensorSpec(_name_of(array.dtype), array.shape, array.dtype.itemsize, "numpy")


def words_of(tensor: Any) -> npt.NDArray[Any]:
    """A tensor as an array of unsigned integers of the same size, shape and strides, over the same memory: what is
    written to one is seen in the other.

    Raises:
        InvalidRequest: it is not in host memory, or its elements have another size than 1, 2, 4 or 8 bytes.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise InvalidRequest(f"a tensor on {tensor.device}: only dense tensors in host memory can be read in place")
        # The integers of torch that torch.Tensor.numpy() knows, and of the same sizes.
        dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size())
        array = None if dtype is None else tensor.detach().view(dtype).numpy()
    else:
        array = tensor if isinstance(tensor, np.ndarray) and not tensor.dtype.hasobject else None
    if array is None or array.dtype.itemsize not in _WORDS:
        raise InvalidRequest(
            f"a {type(tensor).__name__}: only numpy arrays and torch tensors of plain numbers are known"
        )
    words: npt.NDArray[Any] = array.view(_WORDS[array.dtype.itemsize])
    return words


def empty(spec: TensorSpec, library: Library | None = None) -> tuple[Any, Bytes]:
    """A new tensor, and its bytes to be filled.

    Args:
        library: What the tensor should be of; None: as `spec` says.

    Raises:
        InvalidRequest: that library is not installed or has no such dtype.
    """
    library = library or spec.library
    if library == "torch":
        torch = _imported("torch", spec)
        dtype = getattr(torch, spec.dtype, None)
        if not isinstance(dtype, torch.dtype) or dtype.itemsize != spec.item_bytes:
            raise InvalidRequest(f"this torch has no dtype {spec.dtype} of {spec.item_bytes} bytes")
        flat = torch.empty(spec.nbytes, dtype=torch.uint8)
        return flat.view(dtype).reshape(spec.shape), flat.numpy()
    buffer = np.empty(spec.nbytes, dtype=np.uint8)
    return buffer.view(_numpy_dtype(spec)).reshape(spec.shape), buffer


def bytes_to_fill(tensor: Any, spec: TensorSpec) -> Bytes:
    """The bytes of a caller's tensor, to be filled with one of this description.

    Raises:
        InvalidRequest: it has another dtype or shape, is not contiguous, or may not be written.
    """
    have, view = bytes_of(tensor)
    if (have.dtype, have.shape) != (spec.dtype, spec.shape):
        raise InvalidRequest(f"out has {have.dtype}{list(have.shape)} and the tensor {spec.dtype}{list(spec.shape)}")
    probe = words_of(tensor) if have.item_bytes in _WORDS else tensor
    if not view.flags.writeable or (view.nbytes and not np.shares_memory(view, probe)):
        raise InvalidRequest("out is not contiguous or may not be written: give a contiguous tensor in host memory")
    return view


# -- numpy -------------------------------------------------------------------------------------------------------------


def _plain_numpy(tensor: Any) -> npt.NDArray[Any]:
    try:
        if isinstance(tensor, (np.ndarray, np.generic)) or hasattr(tensor, "__array_interface__"):
            array = np.asarray(tensor)
        elif hasattr(tensor, "__dlpack__"):
            array = np.from_dlpack(tensor)
        else:
            array = np.asarray(memoryview(tensor))
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise InvalidRequest(f"a {type(tensor).__name__} is no tensor in host memory: {error}") from error
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    return array


def _name_of(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "biufc":
        return dtype.name
    if dtype.kind in "Mm":
        return dtype.str
    # What ml_dtypes registers: bfloat16, float8_e4m3fn and the like are of numpy's kind "V", without fields.
    plain = dtype.kind == "V" and dtype.names is None and dtype.subdtype is None
    if plain and dtype.name.isidentifier() and not dtype.name.startswith("void"):
        return dtype.name
    raise InvalidRequest(f"an array of {dtype}: only arrays of numbers can be sent")


def _numpy_dtype(spec: TensorSpec) -> np.dtype[Any]:
    for attempt in ("plain", "extended"):
        if attempt == "extended":  # importing it registers the names of its types
            try:
                importlib.import_module("ml_dtypes")
            except ImportError:
                break
        try:
            dtype = np.dtype(spec.dtype)
        except TypeError:
            continue
        if dtype.itemsize == spec.item_bytes and not dtype.hasobject:
            return dtype
    raise InvalidRequest(
        f"numpy has no dtype {spec.dtype} of {spec.item_bytes} bytes: install ml_dtypes, or ask for library='torch'"
    )


# -- torch -------------------------------------------------------------------------------------------------------------


def _imported(library: str, spec: TensorSpec) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise InvalidRequest(
            f"a {library} tensor ({spec.dtype}{list(spec.shape)}) and no {library} here: install it, or ask for "
            "library='numpy'"
        ) from error


def _torch_spec(torch: Any, tensor: Any) -> TensorSpec:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise InvalidRequest(
            f"a torch tensor of layout {tensor.layout}, dtype {tensor.dtype} on {tensor.device}: only dense tensors "
            "with bytes can be sent"
        )
    name = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, tuple(tensor.shape), tensor.element_size(), "torch")
