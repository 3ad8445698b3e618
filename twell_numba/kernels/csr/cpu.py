"""Products of a CSR matrix, compiled for the CPU: see :mod:`twell_numba.kernels.packed_rows.cpu`.

    A @ X,  A.T @ X,  X @ A,  and the values of Y @ X.T at A's entries

with A (M, K) of which each row is one segment of entries.
"""

from typing import Any

import numpy as np

from twell_numba.formats import CSRMatrix
from twell_numba.kernels.packed_rows import PackedRows, multiply, multiply_transposed, sample
from twell_numba.kernels.sparse_operands import (
    left_product_operands,
    product_operands,
    require_same_pattern,
    sampled_operands,
    transposed_product_operands,
)


def csr_matmul(A: CSRMatrix, X: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``A @ X``.

    Zeros of ``A``, stored or not, contribute nothing, also where ``X`` is NaN or infinite.

    Parameters
    ----------
    A : CSRMatrix, shape (M, K)
    X : array, shape (K,) or (K, N)
        float64, float32, float16 or bfloat16, with any strides and byte order.
    out : array, shape (M,) or (M, N), optional
        Of the result's dtype, with any strides; it is overwritten and returned. It may share memory
        with ``X``.

    Returns
    -------
    array, shape (M,) or (M, N)
        Of the wider of the two dtypes (float32 for float16 with bfloat16), added up in float32 or
        wider. A sum too large for float16 becomes infinite with NumPy's ``RuntimeWarning``.

    Raises
    ------
    TypeError
        If an operand has the wrong type or dtype.
    ValueError
        If the shapes do not fit.
    """
    operands = product_operands(A, X, CSRMatrix, out)
    multiply(_packed_rows(A, operands.X.dtype), operands.X, operands.total)
    return operands.result()


def csr_transposed_matmul(A: CSRMatrix, X: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``A.T @ X``, of shape (K,) or (K, N); otherwise as :func:`csr_matmul`."""
    operands = transposed_product_operands(A, X, CSRMatrix, out)
    multiply_transposed(_packed_rows(A, operands.X.dtype), operands.X, operands.total)
    return operands.result()


def csr_left_matmul(X: Any, A: CSRMatrix, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``X @ A`` for ``X`` (M,) or (N, M); otherwise as :func:`csr_matmul`."""
    operands = left_product_operands(X, A, CSRMatrix, out)
    multiply_transposed(_packed_rows(A, operands.X.dtype), operands.X, operands.total)
    return operands.result()


def csr_sampled_product(A: CSRMatrix, Y: Any, X: Any, out: CSRMatrix | None = None) -> CSRMatrix:
    """Return the values of ``Y @ X.T`` at the entries of ``A``, stored zeros included.

    Parameters
    ----------
    A : CSRMatrix, shape (M, K)
        Its values are not looked at.
    Y : array, shape (M, D)
    X : array, shape (K, D)
        Both float64, float32, float16 or bfloat16, with any strides and byte order.
    out : CSRMatrix, optional
        Of A's pattern and the result's dtype; its values are overwritten and it is returned.

    Returns
    -------
    CSRMatrix
        Of the wider dtype of ``Y`` and ``X``. A new one shares A's index arrays.

    Raises
    ------
    TypeError
        If an operand has the wrong type or dtype.
    ValueError
        If the shapes or patterns do not fit.
    """
    Y, X, dtype = sampled_operands(A, Y, X, CSRMatrix)
    if out is not None:
        require_same_pattern(A, out, dtype, ("indptr", "indices"))
    values = np.empty(A.data.shape, Y.dtype)
    sample(_packed_rows(A, None), Y, X, values)
    data = values.astype(dtype, copy=False)
    if out is None:
        return CSRMatrix(data, A.indices, A.indptr, A.shape, validate=False)
    out.data[...] = data
    return out


def _packed_rows(A: CSRMatrix, dtype: np.dtype | None) -> PackedRows:
    """Return the entries with values in ``dtype``; as they are for None."""
    pointers = A.indptr.astype(np.int64, copy=False)[:, np.newaxis]
    values = A.data if dtype is None else A.data.astype(dtype, copy=False)
    return PackedRows(values, A.indices, pointers[:-1], pointers[1:], max(A.shape[1], 1), A.shape)
