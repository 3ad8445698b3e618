"""Products of a block-ELL matrix on a GPU, and feedforward layers of which it is the weights.

    A @ X,  A.T @ X,  X @ A,  and the values of Y @ X.T in A's blocks          A (M, K)

Every number of a result is summed by one warp or thread in the order of A's rows and columns: no
atomics, the same bits in every run. Products with the transpose go over A's blocks by column; that
order is made once for a pattern of blocks. Edge padding, and slots without a
block, are never read.

For the layers see :mod:`twell_numba.kernels.sparse_ffn.cuda`.
"""

from twell_numba.device.gpu import DeviceArray, kernel, zeros
from twell_numba.device.gpu.language import (
    device_function,
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
    warp_sum,
)
from twell_numba.formats import BlockELLMatrix
from twell_numba.kernels.block_ell import cuda_layers
from twell_numba.kernels.block_ell.cuda_arrays import by_column
from twell_numba.kernels.cuda_vectors import (
    add_unless_zero,
    eight_zeros,
    load_eight,
    store_eight,
)
from twell_numba.kernels.device_checks import rows_are_aligned
from twell_numba.kernels.device_products import (
    ProductResult,
    common_dtype,
    require_product_operands,
    require_sampled_operands,
)
from twell_numba.kernels.sparse_ffn import cuda as layers
from twell_numba.kernels.sparse_ffn.cuda import DeviceSparseActivations
from twell_numba.kernels.sparse_ffn.cuda import activation_statistics as activation_statistics
from twell_numba.kernels.sparse_ffn.cuda import (
    activation_statistics_on_gpu as activation_statistics_on_gpu,
)

# From so many columns on, a warp's threads take a column each; with fewer they share the entries.
WIDE = 16


def block_ell_matmul(
    A: BlockELLMatrix, X: DeviceArray, out: DeviceArray | None = None
) -> DeviceArray:
    """Return ``A @ X``.

    Zeros of ``A``, stored or not, contribute nothing, also where ``X`` is NaN or infinite.

    Parameters
    ----------
    A : BlockELLMatrix on a GPU, shape (M, K)
    X : DeviceArray, shape (K,) or (K, N)
    out : DeviceArray, shape (M,) or (M, N), optional
        Of the result's dtype; it is overwritten and returned. It may share memory with ``X``.

    Returns
    -------
    DeviceArray, shape (M,) or (M, N)
        Of the operands' dtype; where they differ, float32, or float64 if one is. Added up in
        float32 or wider.

    Raises
    ------
    TypeError
        If an operand has the wrong type or dtype.
    ValueError
        If the shapes do not fit, or the arrays are on different GPUs.
    """
    require_product_operands("A @ X", A, BlockELLMatrix, "values", X)
    result = ProductResult((A.shape[0], *X.shape[1:]), common_dtype(A.dtype, X.dtype), X, out)
    _multiply(A, X, result.array)
    return result.finish()


def block_ell_transposed_matmul(
    A: BlockELLMatrix, X: DeviceArray, out: DeviceArray | None = None
) -> DeviceArray:
    """Return ``A.T @ X``, of shape (K,) or (K, N); otherwise as :func:`block_ell_matmul`."""
    require_product_operands("A.T @ X", A, BlockELLMatrix, "values", X)
    result = ProductResult((A.shape[1], *X.shape[1:]), common_dtype(A.dtype, X.dtype), X, out)
    _multiply_transposed(A, X, result.array)
    return result.finish()


def block_ell_left_matmul(
    X: DeviceArray, A: BlockELLMatrix, out: DeviceArray | None = None
) -> DeviceArray:
    """Return ``X @ A`` for ``X`` (M,) or (N, M); otherwise as :func:`block_ell_matmul`."""
    require_product_operands("X @ A", A, BlockELLMatrix, "values", X)
    inner, columns = A.shape
    shape = (*X.shape[:-1], columns)
    result = ProductResult(shape, common_dtype(A.dtype, X.dtype), X, out)
    rows = X.shape[0] if X.ndim == 2 else 1
    _left(
        _left.blocks(rows * columns),
        X, A.values, *by_column(A), result.array, rows, inner, columns, A.block_size,
        max(A.blocks_per_row, 1),
    )  # fmt: skip
    return result.finish()


def block_ell_sampled_product(
    A: BlockELLMatrix, Y: DeviceArray, X: DeviceArray, out: BlockELLMatrix | None = None
) -> BlockELLMatrix:
    """Return the values of ``Y @ X.T`` at all elements of A's blocks, zeros included.

    Parameters
    ----------
    A : BlockELLMatrix on a GPU, shape (M, K)
        Its values are not looked at.
    Y : DeviceArray, shape (M, D)
    X : DeviceArray, shape (K, D)
    out : BlockELLMatrix, optional
        With A's ``block_columns`` and of the result's dtype; its values are overwritten and it is
        returned.

    Returns
    -------
    BlockELLMatrix
        Of the dtype of ``Y`` and ``X``; where they differ, float32, or float64 if one is. A new one
        shares ``block_columns`` with A, and holds 0 where there is no entry.

    Raises
    ------
    TypeError, ValueError
        As :func:`block_ell_matmul`.
    """
    dtype = require_sampled_operands(A, BlockELLMatrix, "values", Y, X, out)
    if out is None:
        out = A.with_values(zeros(A.values.shape, dtype, A.values.stream))
    elif out.shape != A.shape or out.block_columns.pointer != A.block_columns.pointer:
        raise ValueError("out: a matrix with other block columns given, one with A's wanted")
    _sample_into(out.values, A, Y, X, is_added=False)
    return out


def gated_ffn_forward(
    x: DeviceArray, gate: BlockELLMatrix, up: BlockELLMatrix, down: BlockELLMatrix
) -> tuple[DeviceArray, DeviceSparseActivations]:
    """Compute y = (relu(x Wg^T) * (x Wu^T)) Wd with sparse weights.

    Weights that are zero contribute nothing, whatever they meet; but for zeros inside of stored
    blocks on tensor cores (16 bits, blocks of a multiple of 32), where 0 times NaN is NaN. NaN is
    kept by relu.

    Parameters
    ----------
    x : DeviceArray, shape (M, D)
        float32, bfloat16, float16 or float64; sums are in float32 or wider.
    gate, up, down : BlockELLMatrix on a GPU, shape (F, D)
        Neuron-major, down too: row j belongs to neuron j. Of x's dtype.

    Returns
    -------
    y : DeviceArray, shape (M, D)
    activations : DeviceSparseActivations
        What was counted in h; :func:`gated_ffn_backward` wants it.

    Raises
    ------
    TypeError, ValueError
        If formats, dtypes or shapes do not fit, or arrays are on different GPUs.
    """
    return layers.gated_ffn_forward(x, gate, up, down, _PRODUCTS)


def gated_ffn_backward(
    dy: DeviceArray,
    x: DeviceArray,
    gate: BlockELLMatrix,
    up: BlockELLMatrix,
    down: BlockELLMatrix,
    activations: DeviceSparseActivations,
    l1_scale: float | DeviceArray,
    gate_grad: DeviceArray,
    up_grad: DeviceArray,
    down_grad: DeviceArray,
) -> DeviceArray:
    """Differentiate :func:`gated_ffn_forward`, for the weights at their stored entries alone.

    Parameters
    ----------
    dy : DeviceArray, shape (M, D)
    x, gate, up, down
        As given to the forward pass.
    activations : DeviceSparseActivations
        From the forward pass.
    l1_scale : float, or DeviceArray of float32, shape (1,)
        dh grows by ``l1_scale * sign(h)``; lambda / (L M) for the L1 term of the loss.
    gate_grad, up_grad, down_grad : DeviceArray
        Of the shape of each weight's ``values``, all of x's dtype, or all of float32 for x in 16
        bits; changed in place: the gradients are added. A stored zero has one as any other entry;
        places of ``values`` that hold no entry get nothing.

    Returns
    -------
    dx : DeviceArray, shape (M, D)

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit the others.
    """
    return layers.gated_ffn_backward(
        dy, x, gate, up, down, activations, l1_scale, gate_grad, up_grad, down_grad, _PRODUCTS
    )


def ffn_forward(
    x: DeviceArray, up: BlockELLMatrix, down: BlockELLMatrix
) -> tuple[DeviceArray, DeviceSparseActivations]:
    """Compute y = relu(x Wu^T) Wd; parameters and returns as :func:`gated_ffn_forward`."""
    return layers.ffn_forward(x, up, down, _PRODUCTS)


def ffn_backward(
    dy: DeviceArray,
    x: DeviceArray,
    up: BlockELLMatrix,
    down: BlockELLMatrix,
    activations: DeviceSparseActivations,
    l1_scale: float | DeviceArray,
    up_grad: DeviceArray,
    down_grad: DeviceArray,
) -> DeviceArray:
    """Differentiate :func:`ffn_forward`; parameters and returns as :func:`gated_ffn_backward`."""
    return layers.ffn_backward(
        dy, x, up, down, activations, l1_scale, up_grad, down_grad, _PRODUCTS
    )


def _add_sampled(
    weight: BlockELLMatrix, left: DeviceArray, right: DeviceArray, gradient: DeviceArray
) -> None:
    """Add ``left[j] . right[d]`` at each entry (j, d) of the blocks."""
    _sample_into(gradient, weight, left, right, is_added=True)


def _multiply(A: BlockELLMatrix, X: DeviceArray, out: DeviceArray) -> None:
    """Overwrite ``out`` with A @ X."""
    rows, inner = A.shape
    columns = X.shape[1] if X.ndim == 2 else 1
    arguments = (A.values, A.block_columns, X, out, rows, inner, columns)
    if columns < WIDE:
        blocks = _rows_narrow.blocks_of_warps(rows * columns)
        _rows_narrow(blocks, *arguments, A.block_size, A.blocks_per_row)
    else:
        blocks = _rows_wide.blocks_of_warps(_items(rows, columns, A.block_size))
        _rows_wide(blocks, *arguments, A.block_size, A.blocks_per_row, rows_are_aligned(X, out))


def _multiply_transposed(A: BlockELLMatrix, X: DeviceArray, out: DeviceArray) -> None:
    """Overwrite ``out`` with A.T @ X."""
    inner, rows = A.shape
    columns = X.shape[1] if X.ndim == 2 else 1
    arguments = (A.values, *by_column(A), X, out, rows, inner, columns)
    slots = max(A.blocks_per_row, 1)
    if columns < WIDE:
        blocks = _columns_narrow.blocks_of_warps(rows * columns)
        _columns_narrow(blocks, *arguments, A.block_size, slots)
    else:
        blocks = _columns_wide.blocks_of_warps(_items(rows, columns, A.block_size))
        _columns_wide(blocks, *arguments, A.block_size, slots, rows_are_aligned(X, out))


_PRODUCTS = layers.Products(
    wanted=BlockELLMatrix,
    values=lambda weight: weight.values,
    multiply=_multiply,
    multiply_transposed=_multiply_transposed,
    add_sampled=_add_sampled,
    whole_layers=layers.WholeLayers(
        cuda_layers.fit_tensor_cores, cuda_layers.forward, cuda_layers.backward
    ),
)


def _sample_into(
    values: DeviceArray, A: BlockELLMatrix, Y: DeviceArray, X: DeviceArray, *, is_added: bool
) -> None:
    count = A.block_columns.size
    groups = -(-A.block_size // ROWS)
    _sample(
        _sample.blocks_of_warps(count * groups * groups),
        values, A.block_columns, Y, X, *A.shape, count, Y.shape[1], A.block_size, A.blocks_per_row,
        int(is_added),
    )  # fmt: skip


def _items(rows: int, columns: int, b: int) -> int:
    """Return how many parts of a result warps compute: ``ROWS`` rows and 256 columns each."""
    return -(-rows // b) * -(-b // ROWS) * -(-columns // 256)


# Rows, or columns, of a block that a warp computes together, of what it reads of X once.
ROWS = 4


@device_function
def four_zeros(matrix):
    """Return four sums of nothing, of the type in which numbers of ``matrix`` are added."""
    return (number(matrix, 0), number(matrix, 0), number(matrix, 0), number(matrix, 0))


@device_function
def add_to_four(sums, factor, numbers):
    """Return four sums, each grown by ``factor`` times a number."""
    return (
        sums[0] + factor * numbers[0],
        sums[1] + factor * numbers[1],
        sums[2] + factor * numbers[2],
        sums[3] + factor * numbers[3],
    )


@device_function
def put_four(values, place, sums, across, is_added, lane):
    """Store, or add, the warp's sums of up to four adjacent places."""
    for q in range(4):
        total = warp_sum(sums[q])
        if lane == 0 and q < across:
            if is_added != 0:
                total += load(values, place + q)
            store(values, place + q, total)


@kernel()
def _rows_wide(values, block_columns, X, out, rows, inner, columns, b, slots, is_aligned):
    lane = global_thread() % 32
    item = global_thread() // 32
    groups = (b + ROWS - 1) // ROWS
    strips = (rows + b - 1) // b * groups
    while item < strips * ((columns + 255) // 256):
        d = item // strips * 256 + lane * 8
        block_row = item % strips // groups
        i = item % groups * ROWS
        height = min(b, rows - block_row * b) - i
        sums0 = eight_zeros(out)
        sums1 = eight_zeros(out)
        sums2 = eight_zeros(out)
        sums3 = eight_zeros(out)
        for block in range(block_row * slots, (block_row + 1) * slots):
            first = types.int64(load(block_columns, block)) * b
            if first >= 0 and height > 0:
                start = (block * b + i) * b
                for k in range(start, start + min(b, inner - first)):
                    row = (first + k - start) * columns
                    numbers = load_eight(X, row, d, columns, is_aligned)
                    sums0 = add_unless_zero(sums0, load(values, k), numbers)
                    if height > 1:
                        sums1 = add_unless_zero(sums1, load(values, k + b), numbers)
                    if height > 2:
                        sums2 = add_unless_zero(sums2, load(values, k + 2 * b), numbers)
                    if height > 3:
                        sums3 = add_unless_zero(sums3, load(values, k + 3 * b), numbers)
        start = (block_row * b + i) * columns
        if height > 0:
            store_eight(out, start, d, columns, sums0, is_aligned)
        if height > 1:
            store_eight(out, start + columns, d, columns, sums1, is_aligned)
        if height > 2:
            store_eight(out, start + 2 * columns, d, columns, sums2, is_aligned)
        if height > 3:
            store_eight(out, start + 3 * columns, d, columns, sums3, is_aligned)
        item += grid_threads() // 32


@kernel()
def _rows_narrow(values, block_columns, X, out, rows, inner, columns, b, slots):
    lane = global_thread() % 32
    item = global_thread() // 32
    while item < rows * columns:
        row = item // columns
        column = item % columns
        total = number(out, 0)
        place = lane  # of an element in the row's blocks, one block after the other
        while place < slots * b:
            block = row // b * slots + place // b
            block_column = types.int64(load(block_columns, block))
            k = block_column * b + place % b
            if block_column >= 0 and k < inner:
                value = load(values, (block * b + row % b) * b + place % b)
                if value != 0:
                    total += value * load(X, k * columns + column)
            place += 32
        total = warp_sum(total)
        if lane == 0:
            store(out, item, total)
        item += grid_threads() // 32


@kernel()
def _columns_wide(values, starts, blocks, X, out, rows, inner, columns, b, slots, is_aligned):
    lane = global_thread() % 32
    item = global_thread() // 32
    groups = (b + ROWS - 1) // ROWS
    strips = (rows + b - 1) // b * groups
    while item < strips * ((columns + 255) // 256):
        d = item // strips * 256 + lane * 8
        block_column = item % strips // groups
        j = item % groups * ROWS
        width = min(b, rows - block_column * b) - j
        sums0 = eight_zeros(out)
        sums1 = eight_zeros(out)
        sums2 = eight_zeros(out)
        sums3 = eight_zeros(out)
        for i in range(load(starts, block_column), load(starts, block_column + 1)):
            block = load(blocks, i)
            first = block // slots * b
            if width > 0:
                for k in range(min(b, inner - first)):
                    place = (block * b + k) * b + j
                    numbers = load_eight(X, (first + k) * columns, d, columns, is_aligned)
                    sums0 = add_unless_zero(sums0, load(values, place), numbers)
                    if width > 1:
                        sums1 = add_unless_zero(sums1, load(values, place + 1), numbers)
                    if width > 2:
                        sums2 = add_unless_zero(sums2, load(values, place + 2), numbers)
                    if width > 3:
                        sums3 = add_unless_zero(sums3, load(values, place + 3), numbers)
        start = (block_column * b + j) * columns
        if width > 0:
            store_eight(out, start, d, columns, sums0, is_aligned)
        if width > 1:
            store_eight(out, start + columns, d, columns, sums1, is_aligned)
        if width > 2:
            store_eight(out, start + 2 * columns, d, columns, sums2, is_aligned)
        if width > 3:
            store_eight(out, start + 3 * columns, d, columns, sums3, is_aligned)
        item += grid_threads() // 32


@kernel()
def _columns_narrow(values, starts, blocks, X, out, rows, inner, columns, b, slots):
    lane = global_thread() % 32
    item = global_thread() // 32
    while item < rows * columns:
        row = item // columns
        column = item % columns
        first = load(starts, row // b)
        size = (load(starts, row // b + 1) - first) * b
        total = number(out, 0)
        place = lane  # of an element in the column's blocks, one block after the other
        while place < size:
            block = load(blocks, first + place // b)
            k = block // slots * b + place % b
            if k < inner:
                value = load(values, (block * b + place % b) * b + row % b)
                if value != 0:
                    total += value * load(X, k * columns + column)
            place += 32
        total = warp_sum(total)
        if lane == 0:
            store(out, item, total)
        item += grid_threads() // 32


@kernel()
def _left(X, values, starts, blocks, out, rows, inner, columns, b, slots):
    item = global_thread()
    while item < rows * columns:
        row = item // columns
        column = item % columns
        total = number(out, 0)
        for i in range(load(starts, column // b), load(starts, column // b + 1)):
            block = load(blocks, i)
            first = block // slots * b
            for k in range(min(b, inner - first)):
                value = load(values, (block * b + k) * b + column % b)
                if value != 0:
                    total += value * load(X, row * inner + first + k)
        store(out, item, total)
        item += grid_threads()


@kernel()
def _sample(values, block_columns, Y, X, rows, columns, count, width, b, slots, is_added):
    lane = global_thread() % 32
    item = global_thread() // 32
    groups = (b + ROWS - 1) // ROWS
    while item < count * groups * groups:
        block = item // (groups * groups)
        block_column = types.int64(load(block_columns, block))
        i = item // groups % groups * ROWS
        j = item % groups * ROWS
        row = block // slots * b + i
        column = block_column * b + j
        height = min(b - i, rows - row)
        across = min(b - j, columns - column)
        if block_column >= 0 and height > 0 and across > 0:
            sums0 = four_zeros(values)
            sums1 = four_zeros(values)
            sums2 = four_zeros(values)
            sums3 = four_zeros(values)
            d = lane
            while d < width:
                # past the matrix's edge the last row is read again, and nothing stored
                numbers = (
                    load(X, column * width + d),
                    load(X, (column + min(1, across - 1)) * width + d),
                    load(X, (column + min(2, across - 1)) * width + d),
                    load(X, (column + min(3, across - 1)) * width + d),
                )
                sums0 = add_to_four(sums0, load(Y, row * width + d), numbers)
                place = (row + min(1, height - 1)) * width + d
                sums1 = add_to_four(sums1, load(Y, place), numbers)
                place = (row + min(2, height - 1)) * width + d
                sums2 = add_to_four(sums2, load(Y, place), numbers)
                place = (row + min(3, height - 1)) * width + d
                sums3 = add_to_four(sums3, load(Y, place), numbers)
                d += 32
            place = (block * b + i) * b + j
            put_four(values, place, sums0, across, is_added, lane)
            if height > 1:
                put_four(values, place + b, sums1, across, is_added, lane)
            if height > 2:
                put_four(values, place + 2 * b, sums2, across, is_added, lane)
            if height > 3:
                put_four(values, place + 3 * b, sums3, across, is_added, lane)
        item += grid_threads() // 32
