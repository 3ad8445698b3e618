"""Transposed copies in plain NumPy: the definition."""

import numpy as np
from numpy.typing import DTypeLike


def transpose(X: np.ndarray) -> np.ndarray:
    """Return a C-contiguous copy of ``X.T``."""
    return np.array(X.T, order="C")


def row_major(X: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Return ``X`` in a dtype, C-contiguous and in native byte order."""
    return np.ascontiguousarray(X, dtype)
