"""The product of a sparse and a dense matrix in plain NumPy: the definition.

``Y[i] = sum over j with A[i, j] != 0 of A[i, j] * X[j]``. Zeros of ``A``, stored or not, contribute
nothing, also where ``X`` is NaN or infinite. Entries are taken in order of their columns.
"""

from typing import Any

import numpy as np

from twell_numba.formats import HybridELLMatrix, SparseMatrix, TwELLMatrix
from twell_numba.kernels.ell_product.operands import product_operands


def twell_matmul(A: TwELLMatrix, X: Any) -> np.ndarray:
    """Return ``A @ X``; as :func:`twell_numba.kernels.ell_product.cpu.twell_matmul`."""
    return _matmul(A, X, TwELLMatrix)


def hybrid_ell_matmul(A: HybridELLMatrix, X: Any) -> np.ndarray:
    """Return ``A @ X``; as :func:`twell_numba.kernels.ell_product.cpu.hybrid_ell_matmul`."""
    return _matmul(A, X, HybridELLMatrix)


def _matmul(A: SparseMatrix, X: Any, wanted: type[SparseMatrix]) -> np.ndarray:
    operands = product_operands(A, X, wanted)
    rows, columns, values = A.coordinates()
    values = values.astype(operands.sum_dtype)
    nonzero = values != 0
    rows, columns, values = rows[nonzero], columns[nonzero], values[nonzero]
    total = np.zeros((A.shape[0], operands.X.shape[1]), operands.sum_dtype)
    # inf * 0 and inf - inf are NaN, as in a dense product: a value, not a mistake.
    with np.errstate(invalid="ignore", over="ignore"):
        np.add.at(total, rows, values[:, np.newaxis] * operands.X[columns])
    return total.astype(operands.result_dtype, copy=False).reshape(operands.result_shape)
