"""Transposed copies of dense matrices, compiled for the CPU.

    Y[j, i] = X[i, j],    X (M, N),  Y (N, M)

Bound by memory. A square tile as wide as a vector register is loaded by rows, transposed by
interleaving registers, and stored by rows, so that whole cache lines move: 0.26 ms for 4096 x 256
float32 on one core of an AMD EPYC (Zen 5), where number by number takes 0.5 ms in tiles of 16 x 8
and ``np.ascontiguousarray(X.T)`` 1.6 ms; 1.6 and 25 ms for 4096 x 1024.
"""

import numpy as np
from numpy.typing import DTypeLike

from twell_numba.device import run_ranges
from twell_numba.device.jit import jit
from twell_numba.device.vectors import lanes_of, transpose_tile
from twell_numba.kernels.checks import FLOAT_DTYPES, contiguous

# Fewest numbers worth a thread of their own.
GRAIN = 100_000


def transpose(X: np.ndarray) -> np.ndarray:
    """Return a C-contiguous copy of ``X.T``.

    Parameters
    ----------
    X : ndarray of float32 or float64, shape (M, N)
        C-contiguous.
    """
    Y = np.empty(X.shape[::-1], X.dtype)
    if Y.size:
        read_only = contiguous(X, X.dtype)
        run_ranges(
            lambda start, stop: copy_transposed(read_only, Y, start, stop),
            Y.shape[0],
            grain=1 + GRAIN // Y.shape[1],
        )
    return Y


def row_major(X: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Return ``X`` in a dtype, C-contiguous and in native byte order: itself where it is so.

    Parameters
    ----------
    X : ndarray, shape (M, N)
        With any strides and byte order.
    """
    converted = X.astype(dtype, copy=False)
    if _is_row_major(converted):
        return converted
    if _is_row_major(converted.T) and converted.dtype in FLOAT_DTYPES:
        return transpose(converted.T)
    return np.require(converted, requirements=["C", "A"])


def _is_row_major(X: np.ndarray) -> bool:
    return X.flags.c_contiguous and X.flags.aligned


@jit
def copy_transposed(X, Y, start, stop):
    """Fill rows ``start`` to ``stop`` of ``Y`` (N, M) with those of ``X.T``, for X (M, N)."""
    n = lanes_of(X, 1)
    whole_rows = start + (stop - start) // n * n
    whole_columns = X.shape[0] // n * n
    for j in range(start, whole_rows, n):
        for i in range(0, whole_columns, n):
            transpose_tile(X, i, j, Y, j, i)
    for j in range(start, stop):
        for i in range(whole_columns if j < whole_rows else 0, X.shape[0]):
            Y[j, i] = X[i, j]
