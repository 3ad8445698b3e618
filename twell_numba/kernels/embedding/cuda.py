"""Rows of a table by token, on a GPU.

    x_m = table[token_m]            tokens [M], table [V, D], x [M, D]
    dtable[token_m] += dx_m

A token that is out of range, and was on the GPU already so that nobody looked at it, gives a row of
NaN in x; its gradient is added nowhere.

Backward without atomics, so that every sum runs in the order of m: the same bits every run. For
each token, the block of the first m that has it adds the rows of all others. That looks at the M
tokens up to M times, which is little beside reading dx as long as M is in the ten thousands.
"""

import math

import numpy as np

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import (
    cuda,
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
)
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.device_checks import (
    arithmetic_dtype,
    float_array,
    float_arrays,
    index_array,
)

THREADS = 256


def embedding(tokens: DeviceArray | np.ndarray, table: DeviceArray) -> DeviceArray:
    """Return the rows of ``table`` that ``tokens`` name.

    Parameters
    ----------
    tokens : DeviceArray of int32 or int64 or ndarray of integers, shape (M,)
    table : DeviceArray, shape (V, D)

    Returns
    -------
    DeviceArray, shape (M, D)

    Raises
    ------
    TypeError
        If the tokens are not integers or the table is not of floats.
    ValueError
        If a token in the host's memory is not in [0, V), or a shape is wrong.
    """
    float_arrays(table=table)
    require_shape("table", table, ("V", "D"))  # type: ignore[arg-type]
    vocabulary, width = table.shape
    tokens = index_array("tokens", tokens, "M", 0, vocabulary, table.stream)
    rows = tokens.shape[0]
    x = empty((rows, width), table.dtype, table.stream)
    _take(_take.blocks_of_warps(rows), table, tokens, x, rows, vocabulary, width)
    return x


def embedding_backward(
    dx: DeviceArray, tokens: DeviceArray | np.ndarray, dtable: DeviceArray
) -> None:
    """Add the gradient of :func:`embedding` into ``dtable``, in place.

    Parameters
    ----------
    dx : DeviceArray, shape (M, D)
    tokens : DeviceArray of int32 or int64 or ndarray of integers, shape (M,)
    dtable : DeviceArray, shape (V, D)
        Of dx's dtype, or float32 for dx of 16 bits.

    Raises
    ------
    TypeError, ValueError
        As :func:`embedding`.
    """
    float_arrays(dx=dx)
    require_shape("dx", dx, ("M", "D"))  # type: ignore[arg-type]
    rows, width = dx.shape
    sums = arithmetic_dtype(dx.dtype)
    wider = getattr(dtable, "dtype", None) == sums
    float_array("dtable", dtable, sums if wider else dx.dtype, dx)
    require_shape("dtable", dtable, ("V", width))  # type: ignore[arg-type]
    vocabulary = dtable.shape[0]
    tokens = index_array("tokens", tokens, rows, 0, vocabulary, dx.stream)
    _add_rows(rows, dx, tokens, dtable, rows, vocabulary, width)


@kernel()
def _take(table, tokens, x, rows, vocabulary, width):
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        token = types.int64(load(tokens, row))
        in_range = 0 <= token < vocabulary
        d = lane
        while d < width:
            value = number(table, math.nan)
            if in_range:
                value = load(table, token * width + d)
            store(x, row * width + d, value)
            d += 32
        row += grid_threads() // 32


@kernel(threads=THREADS)
def _add_rows(dx, tokens, dtable, rows, vocabulary, width):
    same = cuda.shared.array(THREADS, types.int32)
    thread = types.int64(cuda.threadIdx.x)
    row = types.int64(cuda.blockIdx.x)
    while row < rows:
        token = types.int64(load(tokens, row))
        is_first = 0 <= token < vocabulary
        start = types.int64(0)
        while is_first and start < row:
            earlier = start + thread
            found = earlier < row and types.int64(load(tokens, earlier)) == token
            if cuda.syncthreads_or(types.int32(found)):
                is_first = False
            start += cuda.blockDim.x
        column = thread
        while is_first and column - thread < width:
            total = number(dx, 0)
            if column < width:
                total = number(dx, load(dtable, token * width + column))
            start = row
            while start < rows:
                later = start + thread
                found = later < rows and types.int64(load(tokens, later)) == token
                same[thread] = types.int32(found)
                if cuda.syncthreads_or(types.int32(found)) and column < width:
                    for i in range(cuda.blockDim.x):
                        if same[i]:
                            total += load(dx, (start + i) * width + column)
                cuda.syncthreads()
                start += cuda.blockDim.x
            if column < width:
                store(dtable, token * width + column, total)
            column += cuda.blockDim.x
        row += cuda.gridDim.x
