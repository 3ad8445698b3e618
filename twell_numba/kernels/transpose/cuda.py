"""The transpose of a matrix on a GPU.

A block reads a square of 32 x 32 numbers row by row and writes it column by column, through shared
memory, so that neighbouring threads read and write neighbouring numbers.
"""

import numpy as np

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import cuda, load, number, store, types
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.device_checks import float_arrays

SIDE = 32
# One number more a row: a column's numbers then lie in different banks.
SQUARE = SIDE * (SIDE + 1)


def transpose(X: DeviceArray, dtype: np.dtype | None = None) -> DeviceArray:
    """Return the transpose of a matrix, as a copy.

    Parameters
    ----------
    X : DeviceArray of floats, shape (M, N)
    dtype : dtype, optional
        Of the result; otherwise that of ``X``.

    Returns
    -------
    DeviceArray, shape (N, M)

    Raises
    ------
    TypeError, ValueError
        If ``X`` is no DeviceArray of floats, or no matrix.
    """
    float_arrays(X=X)
    require_shape("X", X, ("M", "N"))  # type: ignore[arg-type]
    rows, columns = X.shape
    result = empty((columns, rows), X.dtype if dtype is None else dtype, X.stream)
    squares = -(-rows // SIDE) * -(-columns // SIDE)
    _transpose(squares, X, result, rows, columns)
    return result


@kernel()
def _transpose(X, result, rows, columns):
    square = cuda.shared.array(SQUARE, types.float64)
    thread = types.int64(cuda.threadIdx.x)
    threads = types.int64(cuda.blockDim.x)
    across = (columns + SIDE - 1) // SIDE
    first_row = types.int64(cuda.blockIdx.x) // across * SIDE
    first_column = types.int64(cuda.blockIdx.x) % across * SIDE
    i = thread
    while i < SIDE * SIDE:
        row = first_row + i // SIDE
        column = first_column + i % SIDE
        if row < rows and column < columns:
            square[i // SIDE * (SIDE + 1) + i % SIDE] = load(X, row * columns + column)
        i += threads
    cuda.syncthreads()
    i = thread
    while i < SIDE * SIDE:
        row = first_row + i % SIDE
        column = first_column + i // SIDE
        if row < rows and column < columns:
            value = square[i % SIDE * (SIDE + 1) + i // SIDE]
            store(result, column * rows + row, number(result, value))
        i += threads
