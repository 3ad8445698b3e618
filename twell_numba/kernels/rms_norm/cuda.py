"""RMSNorm on a GPU.

    r_m = 1 / sqrt(mean_d(x_md^2) + eps),  y_md = x_md r_m w_d        x, y [M, D], w [D], r [M]
    dw_d = sum_m dy_md x_md r_m,  dx_md = r_m (dy_md w_d - x_md r_m mean_d(dy_md w_d x_md r_m))

A warp takes a row at a time. dweight is summed over chunks of rows, then over the chunks in order,
by a thread a column: the same bits in every run, on every GPU.
"""

import math

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import (
    global_thread,
    grid_threads,
    load,
    number,
    store,
    warp_sum,
)
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.device_checks import arithmetic_dtype, float_array, float_arrays

# Rows of which dweight is summed before it is written: at least, so that the partial sums stay
# small beside x, and at most so many chunks, of which one thread sums a column.
FEWEST_ROWS = 32
MOST_CHUNKS = 256


def rms_norm(x: DeviceArray, weight: DeviceArray, eps: float) -> tuple[DeviceArray, DeviceArray]:
    """Normalize each row by its root mean square.

    Parameters
    ----------
    x : DeviceArray, shape (M, D)
    weight : DeviceArray, shape (D,)
        Of x's dtype.
    eps : float

    Returns
    -------
    y : DeviceArray, shape (M, D)
    inverse_rms : DeviceArray, shape (M,)
        Wanted by the backward pass; float32, or float64 for float64 input.

    Raises
    ------
    TypeError
        If the dtypes differ or are not floats.
    ValueError
        If the shapes do not fit together, or the arrays are on different GPUs.
    """
    float_arrays(x=x, weight=weight)
    require_shape("x", x, ("M", "D"))  # type: ignore[arg-type]
    rows, width = x.shape
    require_shape("weight", weight, (width,))  # type: ignore[arg-type]
    y = empty(x.shape, x.dtype, x.stream)
    inverse_rms = empty(rows, arithmetic_dtype(x.dtype), x.stream)
    eps = arithmetic_dtype(x.dtype).type(eps)
    _forward(_forward.blocks_of_warps(rows), x, weight, eps, y, inverse_rms, rows, width)
    return y, inverse_rms


def rms_norm_backward(
    dy: DeviceArray, x: DeviceArray, weight: DeviceArray, inverse_rms: DeviceArray
) -> tuple[DeviceArray, DeviceArray]:
    """Return the gradients of :func:`rms_norm`.

    Parameters
    ----------
    dy, x : DeviceArray, shape (M, D)
    weight : DeviceArray, shape (D,)
    inverse_rms : DeviceArray, shape (M,)
        As returned by the forward pass.

    Returns
    -------
    dx : DeviceArray, shape (M, D)
    dweight : DeviceArray, shape (D,)

    Raises
    ------
    TypeError, ValueError
        As :func:`rms_norm`.
    """
    float_arrays(dy=dy, x=x, weight=weight)
    require_shape("x", x, ("M", "D"))  # type: ignore[arg-type]
    rows, width = x.shape
    require_shape("dy", dy, (rows, width))  # type: ignore[arg-type]
    require_shape("weight", weight, (width,))  # type: ignore[arg-type]
    sums = arithmetic_dtype(x.dtype)
    float_array("inverse_rms", inverse_rms, sums, x)
    require_shape("inverse_rms", inverse_rms, (rows,))  # type: ignore[arg-type]
    dx = empty(x.shape, x.dtype, x.stream)
    _backward(_backward.blocks_of_warps(rows), dy, x, weight, inverse_rms, dx, rows, width)
    chunk_rows = max(FEWEST_ROWS, -(-rows // MOST_CHUNKS))
    chunks = -(-rows // chunk_rows)
    partial = empty((chunks, width), sums, x.stream)
    _sum_chunks(
        _sum_chunks.blocks(chunks * width), dy, x, inverse_rms, partial, rows, width, chunk_rows
    )
    dweight = empty(width, weight.dtype, x.stream)
    _sum_partial(_sum_partial.blocks(width), partial, dweight, chunks, width)
    return dx, dweight


@kernel()
def _forward(x, weight, eps, y, inverse_rms, rows, width):
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        start = row * width
        total = number(x, 0)
        d = lane
        while d < width:
            value = load(x, start + d)
            total += value * value
            d += 32
        total = warp_sum(total)
        scale = number(x, 1) / math.sqrt(total / number(x, width) + eps)
        if lane == 0:
            store(inverse_rms, row, scale)
        d = lane
        while d < width:
            store(y, start + d, load(x, start + d) * scale * load(weight, d))
            d += 32
        row += grid_threads() // 32


@kernel()
def _backward(dy, x, weight, inverse_rms, dx, rows, width):
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        start = row * width
        total = number(x, 0)
        d = lane
        while d < width:
            total += load(dy, start + d) * load(weight, d) * load(x, start + d)
            d += 32
        scale = load(inverse_rms, row)
        # x * mean(dy w x) r^3, with the rest of the row's constants taken together
        projection = warp_sum(total) * scale * scale / number(x, width)
        d = lane
        while d < width:
            dnormalized = load(dy, start + d) * load(weight, d)
            store(dx, start + d, scale * (dnormalized - load(x, start + d) * projection))
            d += 32
        row += grid_threads() // 32


@kernel()
def _sum_chunks(dy, x, inverse_rms, partial, rows, width, chunk_rows):
    item = global_thread()
    chunks = (rows + chunk_rows - 1) // chunk_rows
    while item < chunks * width:
        column = item % width
        row = item // width * chunk_rows
        end = min(rows, row + chunk_rows)
        total = number(x, 0)
        while row < end:
            place = row * width + column
            total += load(dy, place) * load(x, place) * load(inverse_rms, row)
            row += 1
        store(partial, item, total)
        item += grid_threads()


@kernel()
def _sum_partial(partial, dweight, chunks, width):
    column = global_thread()
    while column < width:
        total = number(partial, 0)
        for chunk in range(chunks):
            total += load(partial, chunk * width + column)
        store(dweight, column, total)
        column += grid_threads()
