"""Products with a sparse matrix of any format in plain NumPy: the definition.

    A @ X:    Y[i] = sum over j with A[i, j] != 0 of A[i, j] X[j]
    A.T @ X:  Y[j] = sum over i with A[i, j] != 0 of A[i, j] X[i]
    X @ A:    the transpose of A.T @ X.T
    sampled:  V[i, j] = Y[i] . X[j] at every entry (i, j) of A, stored zeros included

Zeros of A, stored or not, contribute nothing, also where X is NaN or infinite. Terms are taken in
the order of A's rows and columns.
"""

from typing import Any

import numpy as np

from twell_numba.formats import SparseMatrix
from twell_numba.kernels.sparse_operands import (
    Operands,
    left_product_operands,
    product_operands,
    require_same_pattern,
    sampled_operands,
    transposed_product_operands,
)

__all__ = [
    "left_matmul",
    "matmul",
    "require_same_pattern",
    "sampled_values",
    "transposed_matmul",
]


def matmul(
    A: SparseMatrix, X: Any, wanted: type[SparseMatrix], out: np.ndarray | None = None
) -> np.ndarray:
    """Return ``A @ X``; ``wanted`` is the format that ``A`` must have."""
    operands = product_operands(A, X, wanted, out)
    rows, columns, values = _nonzeros(A)
    return _add_up(operands, rows, columns, values)


def transposed_matmul(
    A: SparseMatrix, X: Any, wanted: type[SparseMatrix], out: np.ndarray | None = None
) -> np.ndarray:
    """Return ``A.T @ X``."""
    operands = transposed_product_operands(A, X, wanted, out)
    rows, columns, values = _nonzeros(A)
    return _add_up(operands, columns, rows, values)


def left_matmul(
    X: Any, A: SparseMatrix, wanted: type[SparseMatrix], out: np.ndarray | None = None
) -> np.ndarray:
    """Return ``X @ A``."""
    operands = left_product_operands(X, A, wanted, out)
    rows, columns, values = _nonzeros(A)
    return _add_up(operands, columns, rows, values)


def sampled_values(
    A: SparseMatrix, Y: Any, X: Any, wanted: type[SparseMatrix]
) -> tuple[np.ndarray, np.dtype]:
    """Return the sampled product's values in the order of ``A.coordinates()``, and their dtype.

    The values are in the dtype of the sums.
    """
    Y, X, dtype = sampled_operands(A, Y, X, wanted)
    rows, columns, _ = A.coordinates()
    with np.errstate(invalid="ignore", over="ignore"):
        return (Y[rows] * X[columns]).sum(axis=1), dtype


def _nonzeros(A: SparseMatrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, columns, values = A.coordinates()
    nonzero = values != values.dtype.type(0)
    return rows[nonzero], columns[nonzero], values[nonzero]


def _add_up(
    operands: Operands, targets: np.ndarray, sources: np.ndarray, values: np.ndarray
) -> np.ndarray:
    total = operands.total
    total[...] = 0
    values = values.astype(total.dtype)
    # inf * 0 and inf - inf are NaN, as in a dense product: a value, not a mistake.
    with np.errstate(invalid="ignore", over="ignore"):
        np.add.at(total, targets, values[:, np.newaxis] * operands.X[sources])
    return operands.result()
