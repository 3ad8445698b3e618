"""Operands and results of products with a sparse matrix, the same for every format and machine.

Checks shapes and dtypes, chooses the dtype of sums and results, and sees to ``out``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from twell_numba.formats import SparseMatrix
from twell_numba.formats.arrays import value_array
from twell_numba.kernels.transpose import row_major, transpose


@dataclass(frozen=True)
class Operands:
    """What a product works on.

    Attributes
    ----------
    X : array, shape (K, N)
        The dense operand in ``total``'s dtype, C-contiguous; a vector became a single column, the
        operand of ``X @ A`` was transposed.
    total : array, shape (M, N)
        What the product has to fill, C-contiguous: float64 if an operand is, otherwise float32.
    """

    X: np.ndarray
    total: np.ndarray
    _result: Callable[[], np.ndarray]

    def result(self) -> np.ndarray:
        """Return what the user gets, once ``total`` is filled."""
        return self._result()


def product_operands(
    A: SparseMatrix, X: Any, wanted: type[SparseMatrix], out: Any = None
) -> Operands:
    """Check the operands of ``A @ X``.

    Parameters
    ----------
    A : matrix of the ``wanted`` format, shape (M, K)
    X : array, shape (K,) or (K, N)
        float64, float32, float16 or bfloat16, with any strides and byte order.
    out : array, shape (M,) or (M, N), optional
        Of the result's dtype, with any strides; it is overwritten and returned.

    Raises
    ------
    TypeError
        If an operand or ``out`` has the wrong type or dtype.
    ValueError
        If the shapes do not fit.
    """
    _require_format(A, wanted)
    return _operands(A, X, A.shape[1], A.shape[0], out, "A @ X", transposed=False)


def transposed_product_operands(
    A: SparseMatrix, X: Any, wanted: type[SparseMatrix], out: Any = None
) -> Operands:
    """Check the operands of ``A.T @ X``; as :func:`product_operands`."""
    _require_format(A, wanted)
    return _operands(A, X, A.shape[0], A.shape[1], out, "A.T @ X", transposed=False)


def left_product_operands(
    X: Any, A: SparseMatrix, wanted: type[SparseMatrix], out: Any = None
) -> Operands:
    """Check the operands of ``X @ A``, to be computed as the transpose of ``A.T @ X.T``.

    ``X`` and ``out`` have the shapes (K,) or (N, K); otherwise as :func:`product_operands`.
    """
    _require_format(A, wanted)
    return _operands(A, X, A.shape[0], A.shape[1], out, "X @ A", transposed=True)


def sampled_operands(
    A: SparseMatrix, Y: Any, X: Any, wanted: type[SparseMatrix]
) -> tuple[np.ndarray, np.ndarray, np.dtype]:
    """Check the operands of the values of ``Y @ X.T`` at the places of A's entries.

    Parameters
    ----------
    A : matrix of the ``wanted`` format, shape (M, K)
    Y : array, shape (M, D)
    X : array, shape (K, D)

    Returns
    -------
    Y, X : arrays
        In the dtype of the sums, C-contiguous.
    dtype : dtype
        Of the result.

    Raises
    ------
    TypeError, ValueError
        As :func:`product_operands`.
    """
    _require_format(A, wanted)
    left, right = _dense(Y, "sampled product: Y"), _dense(X, "sampled product: X")
    rows, columns = A.shape
    fits = left.ndim == right.ndim == 2 and left.shape[1] == right.shape[1]
    if not fits or (left.shape[0], right.shape[0]) != (rows, columns):
        raise ValueError(
            f"sampled product: Y of shape {left.shape} and X of shape {right.shape} given, "
            f"({rows}, D) and ({columns}, D) wanted for a matrix of shape {A.shape}"
        )
    result_dtype = _result_dtype(left.dtype, right.dtype)
    sum_dtype = _sum_dtype(result_dtype)
    return row_major(left, sum_dtype), row_major(right, sum_dtype), result_dtype


def require_same_pattern(
    A: SparseMatrix, out: Any, dtype: np.dtype, pattern: tuple[str, ...]
) -> None:
    """Check the matrix that a sampled product is to overwrite.

    Raises
    ------
    TypeError
        If it has another format or dtype.
    ValueError
        If one of the arrays named in ``pattern`` differs from A's.
    """
    if type(out) is not type(A):
        raise TypeError(f"out of type {type(out).__name__} given, {type(A).__name__} wanted")
    if out.dtype != dtype:
        raise TypeError(f"out of dtype {out.dtype} given, {dtype} wanted")
    if out.shape != A.shape:
        raise ValueError(f"out of shape {out.shape} given, {A.shape} wanted")
    for name in pattern:
        given, wanted = getattr(out, name), getattr(A, name)
        if given is not wanted and not np.array_equal(given, wanted):
            raise ValueError(
                f"out: {name} that differ from A's given, a matrix of A's pattern wanted"
            )


def _require_format(A: SparseMatrix, wanted: type[SparseMatrix]) -> None:
    if not isinstance(A, wanted):
        raise TypeError(f"A of type {type(A).__name__} given, {wanted.__name__} wanted")


def _dense(X: Any, name: str) -> np.ndarray:
    if isinstance(X, SparseMatrix):
        raise TypeError(f"{name} of type {type(X).__name__} given, dense wanted; use to_dense()")
    return value_array(X, name)


def _operands(
    A: SparseMatrix, X: Any, inner: int, outer: int, out: Any, formula: str, *, transposed: bool
) -> Operands:
    dense = _dense(X, f"{formula}: X")
    if dense.ndim not in (1, 2) or dense.shape[-1 if transposed else 0] != inner:
        wanted = f"(N, {inner})" if transposed else f"({inner}, N)"
        raise ValueError(
            f"{formula}: X of shape {dense.shape} given, ({inner},) or {wanted} wanted "
            f"for A of shape {A.shape}"
        )
    result_dtype = _result_dtype(A.dtype, dense.dtype)
    sum_dtype = _sum_dtype(result_dtype)
    # As a product with a matrix of columns: a vector is one column, and X @ A is (A.T @ X.T).T.
    transposed = transposed and dense.ndim == 2
    matrix = dense[:, np.newaxis] if dense.ndim == 1 else dense.T if transposed else dense
    columns = matrix.shape[1]
    result_shape = (
        (outer,) if dense.ndim == 1 else (columns, outer) if transposed else (outer, columns)
    )
    if out is not None:
        _require_out(out, result_shape, result_dtype)
    arrays = [getattr(A, name) for name in A.array_names]
    direct = (
        out is not None
        and not transposed
        and out.dtype == sum_dtype
        and out.flags.c_contiguous
        and out.flags.aligned
        # The kernel may write before it has read all: then it must not write where it reads.
        and not any(np.may_share_memory(out, array) for array in [dense, *arrays])
    )
    total = out.reshape(outer, columns) if direct else np.empty((outer, columns), sum_dtype)

    def result() -> np.ndarray:
        if direct:
            return out
        if out is not None:
            out[...] = total.T if transposed else total.reshape(result_shape)
            return out
        filled = transpose(total) if transposed else total.reshape(result_shape)
        return filled.astype(result_dtype, copy=False)

    return Operands(row_major(matrix, sum_dtype), total, result)


def _require_out(out: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out of type {type(out).__name__} given, a NumPy array wanted")
    if out.dtype != dtype:  # also another byte order
        raise TypeError(f"out of dtype {out.dtype} given, {dtype} wanted")
    if out.shape != shape:
        raise ValueError(f"out of shape {out.shape} given, {shape} wanted")
    if not out.flags.writeable:
        raise ValueError("out is read-only, a writable array wanted")


def _sum_dtype(result_dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float64 if result_dtype == np.float64 else np.float32)


def _result_dtype(first: np.dtype, second: np.dtype) -> np.dtype:
    if first == second:
        return first
    # Different dtypes: NumPy has no common one for float16 and bfloat16, but float32 holds both.
    return np.dtype(np.float64 if np.float64 in (first, second) else np.float32)
