"""Operands and results of products with a sparse matrix on a GPU, the same for every format."""

from typing import Any

import numpy as np

from twell_numba.device.gpu import DeviceArray, empty, require_same_gpu
from twell_numba.kernels.device_checks import FLOAT_DTYPES


class ProductResult:
    """Where a product is written: to ``out``, or beside it where that shares memory with X.

    Parameters
    ----------
    shape, dtype
        Of the result.
    X : DeviceArray
        The dense operand.
    out : DeviceArray, optional
        What the caller wants overwritten.

    Raises
    ------
    TypeError, ValueError
        If ``out`` does not fit.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, X: DeviceArray, out: DeviceArray | None
    ) -> None:
        self._out = out
        is_apart = False
        if out is not None:
            if not isinstance(out, DeviceArray):
                raise TypeError(f"out of type {type(out).__name__} given, a DeviceArray wanted")
            if out.dtype != dtype:
                raise TypeError(f"out of dtype {out.dtype} given, {dtype} wanted")
            if out.shape != shape:
                raise ValueError(f"out of shape {out.shape} given, {shape} wanted")
            require_same_gpu(X=X, out=out)
            is_apart = out.pointer + out.nbytes <= X.pointer or X.pointer + X.nbytes <= out.pointer
        self.array = out if is_apart and out is not None else empty(shape, dtype, X.stream)

    def finish(self) -> DeviceArray:
        """Return what the caller gets, once ``array`` is filled."""
        if self._out is not None and self._out is not self.array:
            self._out.copy_from(self.array)
            return self._out
        return self.array


def require_operands(
    formula: str, A: Any, wanted: type[Any], values: str, **arrays: DeviceArray
) -> None:
    """Check the types and dtypes of a product's operands, and that they are on one GPU.

    Parameters
    ----------
    formula : str
        For the messages, ``A @ X`` for instance.
    wanted : type
        That A must have.
    values : str
        The name of A's array of values.
    """
    if not isinstance(A, wanted):
        raise TypeError(f"{formula}: A of type {type(A).__name__} given, {wanted.__name__} wanted")
    for name, array in {f"A.{values}": getattr(A, values), **arrays}.items():
        if not isinstance(array, DeviceArray):
            raise TypeError(
                f"{formula}: {name} of type {type(array).__name__} given, a DeviceArray wanted"
            )
        if array.dtype not in FLOAT_DTYPES:
            names = ", ".join(dtype.name for dtype in FLOAT_DTYPES)
            raise TypeError(
                f"{formula}: {name} of dtype {array.dtype} given, one of {names} wanted"
            )
    require_same_gpu(A=getattr(A, values), **arrays)


def common_dtype(first: np.dtype, second: np.dtype) -> np.dtype:
    """Return the dtype of a product: the operands', or float32 or float64 where they differ."""
    if first == second:
        return first
    return np.dtype(np.float64 if np.float64 in (first, second) else np.float32)
