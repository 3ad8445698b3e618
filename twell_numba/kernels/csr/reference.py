"""Products of a CSR matrix in plain NumPy: see :mod:`twell_numba.kernels.sparse_reference`."""

from typing import Any

import numpy as np

from twell_numba.formats import CSRMatrix
from twell_numba.kernels import sparse_reference as definition


def csr_matmul(A: CSRMatrix, X: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``A @ X``; as :func:`twell_numba.kernels.csr.cpu.csr_matmul`."""
    return definition.matmul(A, X, CSRMatrix, out)


def csr_transposed_matmul(A: CSRMatrix, X: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``A.T @ X``; as :func:`twell_numba.kernels.csr.cpu.csr_transposed_matmul`."""
    return definition.transposed_matmul(A, X, CSRMatrix, out)


def csr_left_matmul(X: Any, A: CSRMatrix, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``X @ A``; as :func:`twell_numba.kernels.csr.cpu.csr_left_matmul`."""
    return definition.left_matmul(X, A, CSRMatrix, out)


def csr_sampled_product(A: CSRMatrix, Y: Any, X: Any, out: CSRMatrix | None = None) -> CSRMatrix:
    """Return ``Y @ X.T`` at A's entries; as :func:`..cpu.csr_sampled_product`."""
    values, dtype = definition.sampled_values(A, Y, X, CSRMatrix)
    data = values.astype(dtype)
    if out is None:
        return CSRMatrix(data, A.indices, A.indptr, A.shape, validate=False)
    definition.require_same_pattern(A, out, dtype, ("indptr", "indices"))
    out.data[...] = data
    return out
