"""Products of a matrix in TwELL or hybrid ELL in plain NumPy.

See :mod:`twell_numba.kernels.sparse_reference`, the definition for every format.
"""

from typing import Any, TypeVar

import numpy as np

from twell_numba.formats import HybridELLMatrix, TwELLMatrix
from twell_numba.formats.ell import ELLMatrix
from twell_numba.kernels import sparse_reference as definition

Matrix = TypeVar("Matrix", bound=ELLMatrix)


def twell_matmul(A: TwELLMatrix, X: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``A @ X``; as :func:`twell_numba.kernels.ell_product.cpu.twell_matmul`."""
    return definition.matmul(A, X, TwELLMatrix, out)


def twell_transposed_matmul(A: TwELLMatrix, X: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``A.T @ X``."""
    return definition.transposed_matmul(A, X, TwELLMatrix, out)


def twell_left_matmul(X: Any, A: TwELLMatrix, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``X @ A``."""
    return definition.left_matmul(X, A, TwELLMatrix, out)


def twell_sampled_product(
    A: TwELLMatrix, Y: Any, X: Any, out: TwELLMatrix | None = None
) -> TwELLMatrix:
    """Return the values of ``Y @ X.T`` at A's entries."""
    return _sampled_product(A, Y, X, TwELLMatrix, out)


def hybrid_ell_matmul(A: HybridELLMatrix, X: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``A @ X``; as :func:`twell_numba.kernels.ell_product.cpu.hybrid_ell_matmul`."""
    return definition.matmul(A, X, HybridELLMatrix, out)


def hybrid_ell_transposed_matmul(
    A: HybridELLMatrix, X: Any, out: np.ndarray | None = None
) -> np.ndarray:
    """Return ``A.T @ X``."""
    return definition.transposed_matmul(A, X, HybridELLMatrix, out)


def hybrid_ell_left_matmul(X: Any, A: HybridELLMatrix, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``X @ A``."""
    return definition.left_matmul(X, A, HybridELLMatrix, out)


def hybrid_ell_sampled_product(
    A: HybridELLMatrix, Y: Any, X: Any, out: HybridELLMatrix | None = None
) -> HybridELLMatrix:
    """Return the values of ``Y @ X.T`` at A's entries."""
    return _sampled_product(A, Y, X, HybridELLMatrix, out)


def _sampled_product(
    A: Matrix, Y: Any, X: Any, wanted: type[ELLMatrix], out: Matrix | None
) -> Matrix:
    values, dtype = definition.sampled_values(A, Y, X, wanted)
    rows = A.coordinates()[0]
    in_tail = np.isin(rows, A.tail_rows)
    if out is None:
        out = A.copy()
        out.values = np.zeros(A.values.shape, dtype)
        out.tail_values = np.zeros(A.tail_values.shape, dtype)
    definition.require_same_pattern(A, out, dtype, ("counts", "tail_rows"))
    out.values[A.stored()] = values[~in_tail].astype(dtype)
    out.tail_values[A.tail_values != A.dtype.type(0)] = values[in_tail].astype(dtype)
    return out
