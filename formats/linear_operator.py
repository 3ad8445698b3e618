"""A sparse matrix as SciPy's solvers see one."""

import numpy as np
from scipy.sparse.linalg import LinearOperator

from twell_numba.formats.base import SparseMatrix


class MatrixOperator(LinearOperator):
    """A linear operator that multiplies with a matrix and, without building it, its transpose.

    Its dtype is the matrix's, or float32 for those of 16 bits, which SciPy does not know.

    Parameters
    ----------
    matrix : SparseMatrix
        Kept, not copied.
    """

    def __init__(self, matrix: SparseMatrix) -> None:
        dtype = np.dtype(np.float32) if matrix.dtype.itemsize == 2 else matrix.dtype
        super().__init__(dtype, matrix.shape)
        self.matrix = matrix

    def _matmat(self, X: np.ndarray) -> np.ndarray:
        return self.matrix.matmul(self._converted(X))

    def _rmatmat(self, X: np.ndarray) -> np.ndarray:
        return self.matrix.transposed_matmul(self._converted(X))

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        return self._matmat(x.reshape(-1))

    def _rmatvec(self, x: np.ndarray) -> np.ndarray:
        return self._rmatmat(x.reshape(-1))

    def _converted(self, X: np.ndarray) -> np.ndarray:
        """Return whole numbers, which solvers may start with, in the operator's dtype."""
        return X.astype(self.dtype) if X.dtype.kind in "iub" else X
