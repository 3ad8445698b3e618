"""The types of tensors in GGUF files, and how their numbers are packed.

The common ones are unpacked by :mod:`twell_numba.kernels.dequantize`; others by the ``gguf``
package, an optional one, which is imported here and in the writer and nowhere else.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from twell_numba.errors import TwellError
from twell_numba.kernels.dequantize import BLOCKS, dequantize

EXTRA = "pip install 'twell_numba[gguf]'"


@dataclass(frozen=True)
class TensorType:
    """How numbers are packed: ``block_size`` of them in ``block_nbytes`` bytes."""

    number: int
    name: str
    block_size: int
    block_nbytes: int


_PLAIN = {0: ("F32", "<f4"), 1: ("F16", "<f2"), 28: ("F64", "<f8"), 30: ("BF16", "<u2")}
# Of the types that the kernels unpack.
_NUMBERS = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}
_KNOWN = {
    number: TensorType(number, name, 1, np.dtype(code).itemsize)
    for number, (name, code) in _PLAIN.items()
} | {number: TensorType(number, name, *BLOCKS[name]) for name, number in _NUMBERS.items()}


def tensor_type(number: int) -> TensorType | None:
    """Return the type of a number in a file; None if it is not known, or holds no weights.

    Raises
    ------
    TwellError
        If only the ``gguf`` package knows it, which is not installed.
    """
    if number in _KNOWN:
        return _KNOWN[number]
    gguf = import_gguf(f"tensors of type {number}")
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        return None
    if kind not in gguf.GGML_QUANT_SIZES:
        return None
    return TensorType(number, kind.name, *gguf.GGML_QUANT_SIZES[kind])


def unpack(packed: np.ndarray, kind: TensorType, out: np.ndarray) -> None:
    """Write the numbers of packed rows to ``out``.

    Parameters
    ----------
    packed : ndarray of uint8, shape (rows, row bytes)
        C-contiguous.
    kind : TensorType
    out : ndarray of float32, shape (rows, columns)
        C-contiguous; overwritten.

    Raises
    ------
    TwellError
        If the numbers of this type cannot be unpacked.
    """
    if kind.name == "BF16":
        # the upper half of a float32
        np.left_shift(packed.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)
    elif kind.number in _PLAIN:
        with np.errstate(over="ignore"):
            out[...] = packed.view(_PLAIN[kind.number][1])
    elif kind.name in BLOCKS:
        dequantize(
            packed.reshape(-1, kind.block_nbytes), kind.name, out.reshape(-1, kind.block_size)
        )
    else:
        out[...] = _unpacked_by_package(packed, kind)


def import_gguf(what: str) -> Any:
    """Return the ``gguf`` package.

    Raises
    ------
    TwellError
        If it is not installed, saying what it is needed for.
    """
    try:
        import gguf
    except ImportError as error:
        raise TwellError(
            f"{what} need the package gguf, which is not installed ({error}); install it with: "
            f"{EXTRA}"
        ) from error
    return gguf


def _unpacked_by_package(packed: np.ndarray, kind: TensorType) -> np.ndarray:
    gguf = import_gguf(f"tensors of type {kind.name}")
    try:
        with np.errstate(all="ignore"):
            return gguf.dequantize(packed, gguf.GGMLQuantizationType(kind.number))
    except NotImplementedError as error:
        raise TwellError(
            f"tensors of type {kind.name} cannot be unpacked: fetch the model in another type, "
            f"Q8_0 for example"
        ) from error
