"""Checks of the operands and choice of dtypes, the same for every implementation of the product."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from twell_numba.formats import SparseMatrix
from twell_numba.formats.arrays import value_array


@dataclass(frozen=True)
class Operands:
    """What a product works on.

    Attributes
    ----------
    X : array, shape (F, N)
        Of ``sum_dtype``; a vector became a single column.
    sum_dtype : dtype
        In which products are computed and added up: float64 if an operand is, otherwise float32.
    result_dtype : dtype
        The wider of the operands' dtypes; float32 for float16 with bfloat16.
    result_shape : tuple of int
        (M,) or (M, N).
    """

    X: np.ndarray
    sum_dtype: np.dtype
    result_dtype: np.dtype
    result_shape: tuple[int, ...]


def product_operands(A: SparseMatrix, X: Any, wanted: type[SparseMatrix]) -> Operands:
    """Check the operands of ``A @ X``.

    Raises
    ------
    TypeError
        If ``A`` is not a matrix of the wanted format, or ``X`` not an array of float64, float32,
        float16 or bfloat16.
    ValueError
        If the shapes do not fit.
    """
    if not isinstance(A, wanted):
        raise TypeError(f"A of type {type(A).__name__} given, {wanted.__name__} wanted")
    dense = value_array(X, "A @ X: X")
    if dense.ndim not in (1, 2) or dense.shape[0] != A.shape[1]:
        raise ValueError(
            f"A @ X: X of shape {dense.shape} given, "
            f"({A.shape[1]},) or ({A.shape[1]}, N) wanted for A of shape {A.shape}"
        )
    result_dtype = _result_dtype(A.dtype, dense.dtype)
    sum_dtype = np.dtype(np.float64 if result_dtype == np.float64 else np.float32)
    columns = dense if dense.ndim == 2 else dense[:, np.newaxis]
    return Operands(
        columns.astype(sum_dtype, copy=False),
        sum_dtype,
        result_dtype,
        (A.shape[0], *dense.shape[1:]),
    )


def _result_dtype(first: np.dtype, second: np.dtype) -> np.dtype:
    if first == second:
        return first
    # Different dtypes: NumPy has no common one for float16 and bfloat16, but float32 holds both.
    return np.dtype(np.float64 if np.float64 in (first, second) else np.float32)
