"""RMSNorm on a GPU.

    r_m = 1 / sqrt(mean_d(x_md^2) + eps),  y_md = x_md r_m w_d        x, y [M, D], w [D], r [M]
    dw_d = sum_m dy_md x_md r_m,  dx_md = r_m (dy_md w_d - x_md r_m mean_d(dy_md w_d x_md r_m))

Bound by memory: forward reads x (and an addend) and writes y (and the sum), backward reads dy and x
(and a residual) and writes dx.

Forward a warp takes a row, which it reads twice, the second time from a cache. Few rows do not fill
a GPU so: where they are of 257 to 2048 numbers that fit 16-byte loads, a block takes a row and
keeps it in registers, eight numbers a thread, from the load to the store. Backward a block takes a
chunk of such rows and adds up dw for its columns on the way. Other rows are taken by a warp each,
which reads them twice, and dw is added up in a pass of its own. Over the chunks it is added in
order: the same bits in every run, on every GPU.

M 16384, D 2048, bfloat16, one H200:

| | ms | TB/s |
| --- | --- | --- |
| add_rms_norm, a warp a row | 0.092 | 2.9 |
| the same, a block a row, 8 / 6 / as many blocks as fit | 0.113 / 0.104 / 0.121 | 2.6 |
| rms_norm_backward with a residual, 4 blocks a multiprocessor | 0.117 | 2.3 |
| the same, 3 / 5 / as many as fit | 0.123 / 0.163 / 0.148 | 2.2 |
| the same, the next row loaded ahead | 0.127 | 2.1 |
| the same, a warp a row | 0.168 | 1.6 |
| without a residual | 0.119 | 1.7 |
"""

import math
from typing import Any

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import (
    arithmetic_type,
    cuda,
    device_function,
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
    warp_sum,
)
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.cuda_sums import add_column_sums
from twell_numba.kernels.cuda_vectors import (
    add_scaled,
    eight_zeros,
    load_eight,
    round_like,
    store_eight,
)
from twell_numba.kernels.device_checks import (
    arithmetic_dtype,
    float_array,
    float_arrays,
    rows_are_aligned,
)

# Forward, so many rows and more are a warp's each.
MANY_ROWS = 2048
# Rows of which dweight is summed before it is written: at least, so that the partial sums stay
# small beside x. At most so many chunks, which all fit on an H200 at once.
FEWEST_ROWS = 8
MOST_CHUNKS = 512


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
    _, y, inverse_rms = _normalized(x, None, weight, eps)
    return y, inverse_rms


def add_rms_norm(
    x: DeviceArray, addend: DeviceArray, weight: DeviceArray, eps: float
) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    """Add two arrays and normalize each row of the sum.

    Parameters
    ----------
    x, addend : DeviceArray, shape (M, D)
    weight : DeviceArray, shape (D,)
        Of x's dtype.
    eps : float

    Returns
    -------
    total : DeviceArray, shape (M, D)
        x + addend, rounded to their dtype; the norm is that of the rounded numbers.
    y : DeviceArray, shape (M, D)
    inverse_rms : DeviceArray, shape (M,)

    Raises
    ------
    TypeError, ValueError
        As :func:`rms_norm`.
    """
    float_arrays(x=x, addend=addend, weight=weight)
    return _normalized(x, addend, weight, eps)


def rms_norm_backward(
    dy: DeviceArray,
    x: DeviceArray,
    weight: DeviceArray,
    inverse_rms: DeviceArray,
    weight_grad: DeviceArray,
    residual: DeviceArray | None = None,
) -> DeviceArray:
    """Differentiate :func:`rms_norm`, or :func:`add_rms_norm` with its total as ``x``.

    Parameters
    ----------
    dy, x : DeviceArray, shape (M, D)
    weight : DeviceArray, shape (D,)
    inverse_rms : DeviceArray, shape (M,)
        As returned by the forward pass.
    weight_grad : DeviceArray, shape (D,)
        Of x's dtype, or float32 for x in 16 bits. Changed in place: the gradient of the weight is
        added.
    residual : DeviceArray, shape (M, D), optional
        Added to the result: the gradient that comes to x from elsewhere.

    Returns
    -------
    dx : DeviceArray, shape (M, D)

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
    is_wider = getattr(weight_grad, "dtype", None) == sums
    float_array("weight_grad", weight_grad, sums if is_wider else x.dtype, x)
    require_shape("weight_grad", weight_grad, (width,))  # type: ignore[arg-type]
    if residual is not None:
        float_arrays(x=x, residual=residual)
        require_shape("residual", residual, (rows, width))  # type: ignore[arg-type]
    dx = empty(x.shape, x.dtype, x.stream)
    if x.size == 0:
        return dx
    chunk_rows = max(FEWEST_ROWS, -(-rows // MOST_CHUNKS))
    chunks = -(-rows // chunk_rows)
    partial = empty((chunks, width), sums, x.stream)
    own = x if residual is None else residual  # a pointer is wanted in any case
    arguments = (dy, x, weight, inverse_rms, own, int(residual is not None), dx)
    is_aligned = rows_are_aligned(dy, x, weight, own, dx)
    if _fits_registers(_backward_in_registers, width, is_aligned):
        _backward_in_registers(chunks, *arguments, partial, rows, width, chunk_rows)
    else:
        _backward(_backward.blocks_of_warps(rows), *arguments, rows, width, is_aligned)
        blocks = _sum_chunks.blocks(chunks * width)
        _sum_chunks(blocks, dy, x, inverse_rms, partial, rows, width, chunk_rows)
    add_column_sums(partial, weight_grad)
    return dx


def _normalized(
    x: DeviceArray, addend: DeviceArray | None, weight: DeviceArray, eps: float
) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    require_shape("x", x, ("M", "D"))  # type: ignore[arg-type]
    rows, width = x.shape
    require_shape("weight", weight, (width,))  # type: ignore[arg-type]
    total, other = x, x  # pointers are wanted in any case
    if addend is not None:
        require_shape("addend", addend, (rows, width))  # type: ignore[arg-type]
        total, other = empty(x.shape, x.dtype, x.stream), addend
    y = empty(x.shape, x.dtype, x.stream)
    inverse_rms = empty(rows, arithmetic_dtype(x.dtype), x.stream)
    eps = arithmetic_dtype(x.dtype).type(eps)
    arguments = (x, other, int(addend is not None), weight, eps, total, y, inverse_rms, rows, width)
    is_aligned = rows_are_aligned(x, other, weight, total, y)
    if rows < MANY_ROWS and _fits_registers(_forward_in_registers, width, is_aligned):
        _forward_in_registers(rows, *arguments)
    else:
        _forward(_forward.blocks_of_warps(rows), *arguments, is_aligned)
    return total, y, inverse_rms


def _fits_registers(row_kernel: Any, width: int, is_aligned: int) -> bool:
    """Whether a row is more than a warp and at most a block has at eight numbers a thread."""
    return bool(is_aligned) and width > 256 and row_kernel.blocks(width // 8) == 1


@device_function
def _products(a, b):
    return (
        a[0] * b[0],
        a[1] * b[1],
        a[2] * b[2],
        a[3] * b[3],
        a[4] * b[4],
        a[5] * b[5],
        a[6] * b[6],
        a[7] * b[7],
    )


@device_function
def _sum(a):
    return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]))


@device_function
def _scaled(a, factor):
    return (
        a[0] * factor,
        a[1] * factor,
        a[2] * factor,
        a[3] * factor,
        a[4] * factor,
        a[5] * factor,
        a[6] * factor,
        a[7] * factor,
    )


@device_function
def _rounded_sums(matrix, a, b):
    return (
        round_like(matrix, a[0] + b[0]),
        round_like(matrix, a[1] + b[1]),
        round_like(matrix, a[2] + b[2]),
        round_like(matrix, a[3] + b[3]),
        round_like(matrix, a[4] + b[4]),
        round_like(matrix, a[5] + b[5]),
        round_like(matrix, a[6] + b[6]),
        round_like(matrix, a[7] + b[7]),
    )


@device_function
def _block_total(matrix, value, turn):
    """Return the sum over a block's threads, the same bits in each.

    ``turn`` is 0 and 1 in turns: threads that are late still read the place of the last sum.
    """
    parts = cuda.shared.array(64, arithmetic_type(matrix))
    value = warp_sum(value)
    if cuda.threadIdx.x % 32 == 0:
        parts[turn * 32 + cuda.threadIdx.x // 32] = value
    cuda.syncthreads()
    total = number(matrix, 0)
    for warp in range(cuda.blockDim.x // 32):
        total += parts[turn * 32 + warp]
    return total


@kernel()
def _forward_in_registers(
    x, addend, has_addend, weight, eps, total, y, inverse_rms, rows, width
):  # fmt: skip
    """A block takes a row; it has a thread for each eight columns."""
    column = types.int64(cuda.threadIdx.x) * 8
    row = types.int64(cuda.blockIdx.x)
    turn = types.int64(0)
    weights = load_eight(weight, 0, column, width, 1)
    while row < rows:
        start = row * width
        values = load_eight(x, start, column, width, 1)
        if has_addend != 0:
            values = _rounded_sums(x, values, load_eight(addend, start, column, width, 1))
            store_eight(total, start, column, width, values, 1)
        squares = _block_total(x, _sum(_products(values, values)), turn)
        scale = number(x, 1) / math.sqrt(squares / number(x, width) + eps)
        if column == 0:
            store(inverse_rms, row, scale)
        store_eight(y, start, column, width, _products(_scaled(values, scale), weights), 1)
        row += cuda.gridDim.x
        turn = 1 - turn


@kernel()
def _forward(
    x, addend, has_addend, weight, eps, total, y, inverse_rms, rows, width, is_aligned
):  # fmt: skip
    """A warp takes a row."""
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        start = row * width
        squares = number(x, 0)
        d = lane * 8
        while d < width:
            values = load_eight(x, start, d, width, is_aligned)
            if has_addend != 0:
                values = _rounded_sums(x, values, load_eight(addend, start, d, width, is_aligned))
                store_eight(total, start, d, width, values, is_aligned)
            squares += _sum(_products(values, values))
            d += 256
        squares = warp_sum(squares)
        scale = number(x, 1) / math.sqrt(squares / number(x, width) + eps)
        if lane == 0:
            store(inverse_rms, row, scale)
        d = lane * 8
        while d < width:
            values = _scaled(load_eight(total, start, d, width, is_aligned), scale)
            weights = load_eight(weight, 0, d, width, is_aligned)
            store_eight(y, start, d, width, _products(values, weights), is_aligned)
            d += 256
        row += grid_threads() // 32


@kernel(blocks_per_multiprocessor=4)
def _backward_in_registers(
    dy, x, weight, inverse_rms, residual, has_residual, dx, partial, rows, width, chunk_rows
):  # fmt: skip
    """A block takes a chunk of rows; it has a thread for each eight columns."""
    column = types.int64(cuda.threadIdx.x) * 8
    row = cuda.blockIdx.x * chunk_rows
    end = min(rows, row + chunk_rows)
    turn = types.int64(0)
    weights = load_eight(weight, 0, column, width, 1)
    dweights = eight_zeros(x)
    while row < end:
        start = row * width
        gradients = load_eight(dy, start, column, width, 1)
        values = load_eight(x, start, column, width, 1)
        others = eight_zeros(x)
        if has_residual != 0:
            others = load_eight(residual, start, column, width, 1)
        scale = load(inverse_rms, row)
        dnormalized = _products(gradients, weights)
        total = _block_total(x, _sum(_products(dnormalized, values)), turn)
        # x * mean(dy w x) r^3, with the rest of the row's constants taken together
        projection = total * scale * scale / number(x, width)
        change = add_scaled(dnormalized, -projection, values)
        store_eight(dx, start, column, width, add_scaled(others, scale, change), 1)
        dweights = add_scaled(dweights, scale, _products(gradients, values))
        row += 1
        turn = 1 - turn
    store_eight(partial, cuda.blockIdx.x * width, column, width, dweights, 1)


@kernel()
def _backward(
    dy, x, weight, inverse_rms, residual, has_residual, dx, rows, width, is_aligned
):  # fmt: skip
    """A warp takes a row; the gradient of the weight is left to others."""
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        start = row * width
        total = number(x, 0)
        d = lane * 8
        while d < width:
            gradients = load_eight(dy, start, d, width, is_aligned)
            weights = load_eight(weight, 0, d, width, is_aligned)
            values = load_eight(x, start, d, width, is_aligned)
            total += _sum(_products(_products(gradients, weights), values))
            d += 256
        scale = load(inverse_rms, row)
        projection = warp_sum(total) * scale * scale / number(x, width)
        d = lane * 8
        while d < width:
            gradients = load_eight(dy, start, d, width, is_aligned)
            weights = load_eight(weight, 0, d, width, is_aligned)
            values = load_eight(x, start, d, width, is_aligned)
            others = eight_zeros(x)
            if has_residual != 0:
                others = load_eight(residual, start, d, width, is_aligned)
            change = add_scaled(_products(gradients, weights), -projection, values)
            store_eight(dx, start, d, width, add_scaled(others, scale, change), is_aligned)
            d += 256
        row += grid_threads() // 32


@kernel()
def _sum_chunks(dy, x, inverse_rms, partial, rows, width, chunk_rows):
    """A thread takes a column of a chunk of rows."""
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
