"""The bias of a linear layer, on a GPU.

    y += b,   db += the sum of dy over its rows            y, dy (M, K), b (K,)

Bound by memory: a thread has eight neighbouring numbers of a row at a time. db is summed over
chunks of rows, and then over the chunks in order: the same bits in every run, on every GPU.
"""

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import global_thread, grid_threads, number
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.cuda_sums import add_column_sums
from twell_numba.kernels.cuda_vectors import add_scaled, eight_zeros, load_eight, store_eight
from twell_numba.kernels.device_checks import (
    arithmetic_dtype,
    float_array,
    float_arrays,
    rows_are_aligned,
)

# Rows of a column that one thread sums: at least, and at most so many chunks of them.
FEWEST_ROWS = 32
MOST_CHUNKS = 128


def add_bias(y: DeviceArray, bias: DeviceArray) -> None:
    """Add a bias to each row.

    Parameters
    ----------
    y : DeviceArray of floats, shape (M, K)
        Changed in place.
    bias : DeviceArray, shape (K,)
        Of y's dtype.

    Raises
    ------
    TypeError
        If the dtypes differ or are not floats.
    ValueError
        If the shapes do not fit together, or the arrays are on different GPUs.
    """
    float_arrays(y=y, bias=bias)
    require_shape("y", y, ("M", "K"))  # type: ignore[arg-type]
    rows, width = y.shape
    require_shape("bias", bias, (width,))  # type: ignore[arg-type]
    blocks = _add_to_rows.blocks(rows * -(-width // 8))
    _add_to_rows(blocks, y, bias, rows, width, rows_are_aligned(y, bias))


def bias_backward(dy: DeviceArray, bias_grad: DeviceArray) -> None:
    """Differentiate :func:`add_bias`; the gradient of what it was added to is dy itself.

    Parameters
    ----------
    dy : DeviceArray of floats, shape (M, K)
    bias_grad : DeviceArray, shape (K,)
        Of dy's dtype, or float32 for dy in 16 bits. Changed in place: the gradient of the bias is
        added.

    Raises
    ------
    TypeError, ValueError
        As :func:`add_bias`.
    """
    float_arrays(dy=dy)
    require_shape("dy", dy, ("M", "K"))  # type: ignore[arg-type]
    rows, width = dy.shape
    sums = arithmetic_dtype(dy.dtype)
    is_wider = getattr(bias_grad, "dtype", None) == sums
    float_array("bias_grad", bias_grad, sums if is_wider else dy.dtype, dy)
    require_shape("bias_grad", bias_grad, (width,))  # type: ignore[arg-type]
    if dy.size == 0:
        return
    chunk_rows = max(FEWEST_ROWS, -(-rows // MOST_CHUNKS))
    chunks = -(-rows // chunk_rows)
    partial = empty((chunks, width), sums, dy.stream)
    blocks = _sum_chunks.blocks(chunks * -(-width // 8))
    _sum_chunks(blocks, dy, partial, rows, width, chunk_rows, rows_are_aligned(dy, partial))
    add_column_sums(partial, bias_grad)


@kernel()
def _add_to_rows(y, bias, rows, width, is_aligned):
    """A thread takes eight columns of a row."""
    item = global_thread()
    groups = (width + 7) // 8
    while item < rows * groups:
        column = item % groups * 8
        start = item // groups * width
        values = load_eight(y, start, column, width, is_aligned)
        added = load_eight(bias, 0, column, width, is_aligned)
        sums = add_scaled(values, number(y, 1), added)
        store_eight(y, start, column, width, sums, is_aligned)
        item += grid_threads()


@kernel()
def _sum_chunks(dy, partial, rows, width, chunk_rows, is_aligned):
    """A thread takes eight columns of a chunk of rows."""
    item = global_thread()
    groups = (width + 7) // 8
    chunks = (rows + chunk_rows - 1) // chunk_rows
    while item < chunks * groups:
        column = item % groups * 8
        chunk = item // groups
        sums = eight_zeros(dy)
        for row in range(chunk * chunk_rows, min(rows, (chunk + 1) * chunk_rows)):
            values = load_eight(dy, row * width, column, width, is_aligned)
            sums = add_scaled(sums, number(dy, 1), values)
        store_eight(partial, chunk * width, column, width, sums, is_aligned)
        item += grid_threads()
