"""Products of a matrix in TwELL or hybrid ELL, compiled for the CPU.

    A @ X,  A.T @ X,  X @ A,  and the values of Y @ X.T at A's entries

Computed by :mod:`twell_numba.kernels.packed_rows.cpu`, which says what bounds the speed. A row of
the tail is one more row there, of as many entries as A has columns; its zeros are left out like all
zeros.
"""

from typing import Any

import numpy as np

from twell_numba.formats import HybridELLMatrix, TwELLMatrix
from twell_numba.formats.ell import ELLMatrix
from twell_numba.kernels.packed_rows import PackedRows, multiply, multiply_transposed, sample
from twell_numba.kernels.sparse_operands import (
    Operands,
    left_product_operands,
    product_operands,
    require_same_pattern,
    sampled_operands,
    transposed_product_operands,
)


def twell_matmul(A: TwELLMatrix, X: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``A @ X`` for a TwELL matrix.

    Zeros of ``A``, stored or not, contribute nothing, also where ``X`` is NaN or infinite.

    Parameters
    ----------
    A : TwELLMatrix, shape (M, F)
    X : array, shape (F,) or (F, N)
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
    return _multiply(A, product_operands(A, X, TwELLMatrix, out))


def twell_transposed_matmul(A: TwELLMatrix, X: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``A.T @ X``, of shape (F,) or (F, N); otherwise as :func:`twell_matmul`."""
    return _multiply_transposed(A, transposed_product_operands(A, X, TwELLMatrix, out))


def twell_left_matmul(X: Any, A: TwELLMatrix, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``X @ A`` for ``X`` (M,) or (N, M); otherwise as :func:`twell_matmul`."""
    return _multiply_transposed(A, left_product_operands(X, A, TwELLMatrix, out))


def twell_sampled_product(
    A: TwELLMatrix, Y: Any, X: Any, out: TwELLMatrix | None = None
) -> TwELLMatrix:
    """Return the values of ``Y @ X.T`` at the entries of ``A``, zeros stored in slots included.

    Parameters
    ----------
    A : TwELLMatrix, shape (M, F)
        Of its values only the zeros of the tail are looked at: they are no entries.
    Y : array, shape (M, D)
    X : array, shape (F, D)
        Both float64, float32, float16 or bfloat16, with any strides and byte order.
    out : TwELLMatrix, optional
        Of A's pattern and the result's dtype; its values are overwritten and it is returned.

    Returns
    -------
    TwELLMatrix
        Of the wider dtype of ``Y`` and ``X``. A new one shares A's columns, counts and tail rows.

    Raises
    ------
    TypeError
        If an operand has the wrong type or dtype.
    ValueError
        If the shapes or patterns do not fit.
    """
    arrays = _sample(A, Y, X, TwELLMatrix, out)
    return out or TwELLMatrix(**arrays, shape=A.shape, tile=A.tile, validate=False)


def hybrid_ell_matmul(A: HybridELLMatrix, X: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``A @ X`` for a hybrid ELL matrix; otherwise as :func:`twell_matmul`."""
    return _multiply(A, product_operands(A, X, HybridELLMatrix, out))


def hybrid_ell_transposed_matmul(
    A: HybridELLMatrix, X: Any, out: np.ndarray | None = None
) -> np.ndarray:
    """Return ``A.T @ X``, of shape (F,) or (F, N); otherwise as :func:`twell_matmul`."""
    return _multiply_transposed(A, transposed_product_operands(A, X, HybridELLMatrix, out))


def hybrid_ell_left_matmul(X: Any, A: HybridELLMatrix, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``X @ A`` for ``X`` (M,) or (N, M); otherwise as :func:`twell_matmul`."""
    return _multiply_transposed(A, left_product_operands(X, A, HybridELLMatrix, out))


def hybrid_ell_sampled_product(
    A: HybridELLMatrix, Y: Any, X: Any, out: HybridELLMatrix | None = None
) -> HybridELLMatrix:
    """Return the values of ``Y @ X.T`` at A's entries; as :func:`twell_sampled_product`."""
    arrays = _sample(A, Y, X, HybridELLMatrix, out)
    return out or HybridELLMatrix(**arrays, shape=A.shape, validate=False)


def _multiply(A: ELLMatrix, operands: Operands) -> np.ndarray:
    X, total = operands.X, operands.total
    multiply(_slots(A, X.dtype), X, total)
    if A.tail_rows.size:
        tail_total = np.empty((A.tail_rows.size, X.shape[1]), X.dtype)
        multiply(_tail(A, X.dtype), X, tail_total)
        total[A.tail_rows] = tail_total
    return operands.result()


def _multiply_transposed(A: ELLMatrix, operands: Operands) -> np.ndarray:
    X, total = operands.X, operands.total
    multiply_transposed(_slots(A, X.dtype), X, total)
    if A.tail_rows.size:
        tail_total = np.empty_like(total)
        multiply_transposed(_tail(A, X.dtype), X[A.tail_rows], tail_total)
        # inf - inf is NaN, as in a dense product: a value, not a mistake.
        with np.errstate(invalid="ignore", over="ignore"):
            total += tail_total
    return operands.result()


def _sample(
    A: ELLMatrix, Y: Any, X: Any, wanted: type[ELLMatrix], out: ELLMatrix | None
) -> dict[str, np.ndarray]:
    """Return the arrays of the sampled product, or write its values to ``out``."""
    Y, X, dtype = sampled_operands(A, Y, X, wanted)
    values = np.zeros(A.values.shape, Y.dtype)
    sample(_slots(A, None), Y, X, values.reshape(-1))
    tail_values = np.zeros(A.tail_values.shape, Y.dtype)
    if A.tail_rows.size:
        sample(_tail(A, None), Y[A.tail_rows], X, tail_values.reshape(-1))
        tail_values[A.tail_values == A.dtype.type(0)] = 0
    arrays = {
        "values": values.astype(dtype, copy=False),
        "columns": A.columns,
        "counts": A.counts,
        "tail_rows": A.tail_rows,
        "tail_values": tail_values.astype(dtype, copy=False),
    }
    if out is not None:
        require_same_pattern(A, out, dtype, ("counts", "tail_rows"))
        given, own = out.columns[out.stored()], A.columns[A.stored()]
        if not np.array_equal(given, own):
            raise ValueError(
                "out: columns that differ from A's given, a matrix of A's pattern wanted"
            )
        out.values[...] = arrays["values"]
        out.tail_values[...] = arrays["tail_values"]
    return arrays


def _slots(A: ELLMatrix, dtype: np.dtype | None) -> PackedRows:
    """Return the entries in slots with values in ``dtype``; as they are for None."""
    slots = A.values.shape[-1]
    values = A.values
    if dtype is not None and dtype != A.dtype:
        values = A.values_as(dtype)  # without padding, which may hold anything
    counts = A.counts.reshape(A.shape[0], A.segments_per_row)
    starts = slots * np.arange(counts.size, dtype=np.int64).reshape(counts.shape)
    return PackedRows(
        values.reshape(-1),
        A.columns.reshape(-1),
        starts,
        starts + counts,
        A.segment_width,
        A.shape,
    )


def _tail(A: ELLMatrix, dtype: np.dtype | None) -> PackedRows:
    """Return the rows of the tail, all their elements being entries."""
    rows, width = A.tail_values.shape
    values = A.tail_values if dtype is None else A.tail_values.astype(dtype, copy=False)
    starts = width * np.arange(rows, dtype=np.int64)[:, np.newaxis]
    columns = np.tile(np.arange(width, dtype=A.columns.dtype), rows)
    return PackedRows(
        values.reshape(-1), columns, starts, starts + width, max(width, 1), (rows, width)
    )
