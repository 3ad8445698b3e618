"""Operands and results of products with a sparse matrix on a GPU, the same for every format."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from twell_numba.device.gpu import DeviceArray, empty, require_same_gpu
from twell_numba.formats import SparseMatrix
from twell_numba.kernels.device_checks import FLOAT_DTYPES

Made = TypeVar("Made")


def once_for_pattern(A: SparseMatrix, name: str, make: Callable[[], Made]) -> Made:
    """Return what ``make`` makes of A's pattern; kept for A and all that share the pattern.

    Not while a graph is being recorded: that would keep arrays which only a replay fills.
    """
    made: Made | None = A.derived.get(name)
    if made is None:
        made = make()
        if getattr(A, A.array_names[0]).stream.capture is None:
            A.derived[name] = made
    return made


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
    if not A.is_on_gpu:
        raise TypeError(
            f"{formula}: A in the host's memory given beside arrays on a GPU, all on one GPU "
            "wanted; use A.to('cuda')"
        )
    for name, array in {f"A.{values}": getattr(A, values), **arrays}.items():
        if not isinstance(array, DeviceArray):
            raise TypeError(
                f"{formula}: {name} of type {type(array).__name__} given, a DeviceArray wanted "
                f"beside A on {A.device}; use from_numpy() or from_external()"
            )
        if array.dtype not in FLOAT_DTYPES:
            names = ", ".join(dtype.name for dtype in FLOAT_DTYPES)
            raise TypeError(
                f"{formula}: {name} of dtype {array.dtype} given, one of {names} wanted"
            )
    require_same_gpu(A=getattr(A, values), **arrays)


def require_product_operands(
    formula: str, A: Any, wanted: type[Any], values: str, X: DeviceArray
) -> None:
    """Check the operands of a product of A with a dense vector or matrix.

    Parameters
    ----------
    formula : {"A @ X", "A.T @ X", "X @ A"}
    wanted, values
        As for :func:`require_operands`.
    X : DeviceArray
    """
    require_operands(formula, A, wanted, values, X=X)
    inner = A.shape[1 if formula == "A @ X" else 0]
    is_left = formula == "X @ A"
    if X.ndim not in (1, 2) or X.shape[-1 if is_left else 0] != inner:
        matrices = f"(N, {inner})" if is_left else f"({inner}, N)"
        raise ValueError(
            f"{formula}: X of shape {X.shape} given, ({inner},) or {matrices} wanted for A of "
            f"shape {A.shape}"
        )


def require_sampled_operands(
    A: Any, wanted: type[Any], values: str, Y: DeviceArray, X: DeviceArray, out: Any
) -> np.dtype:
    """Check the operands of a sampled product, and return the dtype of its result."""
    require_operands("sampled product", A, wanted, values, Y=Y, X=X)
    rows, columns = A.shape
    fits = Y.ndim == X.ndim == 2 and Y.shape[1] == X.shape[1]
    if not fits or (Y.shape[0], X.shape[0]) != (rows, columns):
        raise ValueError(
            f"sampled product: Y of shape {Y.shape} and X of shape {X.shape} given, "
            f"({rows}, D) and ({columns}, D) wanted for a matrix of shape {A.shape}"
        )
    dtype = common_dtype(Y.dtype, X.dtype)
    if out is not None:
        if not isinstance(out, wanted):
            raise TypeError(f"out of type {type(out).__name__} given, {wanted.__name__} wanted")
        if not out.is_on_gpu:
            raise TypeError("out in the host's memory given, a matrix on the GPU wanted")
        if getattr(out, values).dtype != dtype:
            raise TypeError(f"out of dtype {getattr(out, values).dtype} given, {dtype} wanted")
    return dtype


def common_dtype(first: np.dtype, second: np.dtype) -> np.dtype:
    """Return the dtype of a product: the operands', or float32 or float64 where they differ."""
    if first == second:
        return first
    return np.dtype(np.float64 if np.float64 in (first, second) else np.float32)
