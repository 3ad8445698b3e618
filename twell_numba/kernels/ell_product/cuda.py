"""Products of a matrix in TwELL or hybrid ELL on a GPU.

    A @ X,  A.T @ X,  X @ A,  and the values of Y @ X.T at A's entries          A (M, F)

``A @ X`` reads A as it is, and waits for nothing: a warp takes a row and a strip of 256 columns of
X, a block a row of the tail. Rows of X are read once for each entry, which bounds the speed.

The others are the products of the same entries as CSR (:mod:`twell_numba.kernels.csr.cuda`), with
all elements of a row of the tail for entries: kernels leave zeros out in any case. Where each entry
stands in A's arrays is found once for a pattern, which waits for the GPU (so the first of them
cannot be recorded in a graph); after that, each costs one gathering of the values more than CSR's.
The arrays ``columns``, ``counts`` and ``tail_rows`` must not be changed after it; values may be.

Every number is summed in a fixed order: the same bits in every run.
"""

from typing import TypeVar

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import (
    arithmetic_type,
    block_sum,
    cuda,
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
    warp_sum,
)
from twell_numba.formats import CSRMatrix, HybridELLMatrix, TwELLMatrix
from twell_numba.formats.ell import ELLMatrix
from twell_numba.kernels.conversion.cuda import pattern_of_segments, put_segments, take_segments
from twell_numba.kernels.csr.cuda import (
    csr_left_matmul,
    csr_sampled_product,
    csr_transposed_matmul,
)
from twell_numba.kernels.cuda_vectors import (
    add_unless_zero,
    eight_zeros,
    load_eight,
    store_column,
    store_eight,
)
from twell_numba.kernels.device_products import (
    ProductResult,
    common_dtype,
    once_for_pattern,
    require_product_operands,
    require_sampled_operands,
)

Matrix = TypeVar("Matrix", bound=ELLMatrix)

# From so many columns of X on, a warp's threads take eight columns each; with fewer they share the
# entries.
WIDE = 16
# Columns of a strip, and the most partial sums of the warps of a block for it.
STRIP = 256
PARTS = 8 * STRIP


def twell_matmul(A: TwELLMatrix, X: DeviceArray, out: DeviceArray | None = None) -> DeviceArray:
    """Return ``A @ X`` for a TwELL matrix.

    Zeros of ``A``, stored or not, contribute nothing, also where ``X`` is NaN or infinite.

    Parameters
    ----------
    A : TwELLMatrix on a GPU, shape (M, F)
    X : DeviceArray, shape (F,) or (F, N)
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
    require_product_operands("A @ X", A, TwELLMatrix, "values", X)
    return _multiply(A, X, out)


def twell_transposed_matmul(
    A: TwELLMatrix, X: DeviceArray, out: DeviceArray | None = None
) -> DeviceArray:
    """Return ``A.T @ X``, of shape (F,) or (F, N); otherwise as :func:`twell_matmul`."""
    require_product_operands("A.T @ X", A, TwELLMatrix, "values", X)
    return csr_transposed_matmul(_as_csr(A), X, out)


def twell_left_matmul(
    X: DeviceArray, A: TwELLMatrix, out: DeviceArray | None = None
) -> DeviceArray:
    """Return ``X @ A`` for ``X`` (M,) or (N, M); otherwise as :func:`twell_matmul`."""
    require_product_operands("X @ A", A, TwELLMatrix, "values", X)
    return csr_left_matmul(X, _as_csr(A), out)


def twell_sampled_product(
    A: TwELLMatrix, Y: DeviceArray, X: DeviceArray, out: TwELLMatrix | None = None
) -> TwELLMatrix:
    """Return the values of ``Y @ X.T`` at the entries of ``A``, zeros stored in slots included.

    Parameters
    ----------
    A : TwELLMatrix on a GPU, shape (M, F)
        Of its values only the zeros of the tail are looked at: they are no entries.
    Y : DeviceArray, shape (M, D)
    X : DeviceArray, shape (F, D)
    out : TwELLMatrix, optional
        With A's columns, counts and tail rows and of the result's dtype; its values are overwritten
        and it is returned.

    Returns
    -------
    TwELLMatrix
        Of the dtype of ``Y`` and ``X``; where they differ, float32, or float64 if one is. A new one
        shares A's columns, counts and tail rows.

    Raises
    ------
    TypeError, ValueError
        As :func:`twell_matmul`.
    """
    return _sample(A, Y, X, TwELLMatrix, out)


def hybrid_ell_matmul(
    A: HybridELLMatrix, X: DeviceArray, out: DeviceArray | None = None
) -> DeviceArray:
    """Return ``A @ X`` for a hybrid ELL matrix; otherwise as :func:`twell_matmul`."""
    require_product_operands("A @ X", A, HybridELLMatrix, "values", X)
    return _multiply(A, X, out)


def hybrid_ell_transposed_matmul(
    A: HybridELLMatrix, X: DeviceArray, out: DeviceArray | None = None
) -> DeviceArray:
    """Return ``A.T @ X``, of shape (F,) or (F, N); otherwise as :func:`twell_matmul`."""
    require_product_operands("A.T @ X", A, HybridELLMatrix, "values", X)
    return csr_transposed_matmul(_as_csr(A), X, out)


def hybrid_ell_left_matmul(
    X: DeviceArray, A: HybridELLMatrix, out: DeviceArray | None = None
) -> DeviceArray:
    """Return ``X @ A`` for ``X`` (M,) or (N, M); otherwise as :func:`twell_matmul`."""
    require_product_operands("X @ A", A, HybridELLMatrix, "values", X)
    return csr_left_matmul(X, _as_csr(A), out)


def hybrid_ell_sampled_product(
    A: HybridELLMatrix, Y: DeviceArray, X: DeviceArray, out: HybridELLMatrix | None = None
) -> HybridELLMatrix:
    """Return the values of ``Y @ X.T`` at A's entries; as :func:`twell_sampled_product`."""
    return _sample(A, Y, X, HybridELLMatrix, out)


def _multiply(A: ELLMatrix, X: DeviceArray, out: DeviceArray | None) -> DeviceArray:
    rows, inner = A.shape
    result = ProductResult((rows, *X.shape[1:]), common_dtype(A.dtype, X.dtype), X, out)
    columns = X.shape[1] if X.ndim == 2 else 1
    total, tail = result.array, A.tail_rows.size
    arguments = (
        A.values, A.columns, A.counts, X, total, rows, A.segments_per_row, A.segment_width,
        A.values.shape[-1], columns,
    )  # fmt: skip
    # Rows of the tail are 0 after the first kernel, and overwritten by the second.
    if columns < WIDE:
        _multiply_narrow(_multiply_narrow.blocks_of_warps(rows * columns), *arguments)
        _multiply_tail_narrow(
            tail * columns, A.tail_values, A.tail_rows, X, total, tail, inner, columns
        )
    else:
        strips = -(-columns // STRIP)
        is_aligned = int(columns % 8 == 0 and X.pointer % 16 == total.pointer % 16 == 0)
        _multiply_wide(_multiply_wide.blocks_of_warps(rows * strips), *arguments, is_aligned)
        _multiply_tail_wide(
            tail * strips, A.tail_values, A.tail_rows, X, total, tail, inner, columns, is_aligned
        )
    return result.finish()


def _pattern(A: ELLMatrix) -> tuple[DeviceArray, CSRMatrix]:
    """Return where A's entries stand in its arrays, and a CSR matrix of them without values."""

    def make() -> tuple[DeviceArray, CSRMatrix]:
        origins, indices, indptr = pattern_of_segments(A)
        nothing = empty(0, A.dtype, A.values.stream)
        return origins, CSRMatrix(nothing, indices, indptr, A.shape, validate=False)

    if A.values.stream.capture is not None and "rows" not in A.derived:
        raise RuntimeError(
            f"the first product of a {type(A).__name__} given while a graph is recorded, one "
            "product before it wanted: it waits for the GPU"
        )
    return once_for_pattern(A, "rows", make)


def _as_csr(A: ELLMatrix) -> CSRMatrix:
    origins, pattern = _pattern(A)
    matrix = CSRMatrix(
        take_segments(A, origins), pattern.indices, pattern.indptr, A.shape, validate=False
    )
    matrix.derived = pattern.derived
    return matrix


def _sample(
    A: Matrix, Y: DeviceArray, X: DeviceArray, wanted: type[Matrix], out: Matrix | None
) -> Matrix:
    dtype = require_sampled_operands(A, wanted, "values", Y, X, out)
    pattern = ("columns", "counts", "tail_rows")
    if out is None:
        out = A._of_same_pattern(
            values=empty(A.values.shape, dtype, A.values.stream),
            tail_values=empty(A.tail_values.shape, dtype, A.values.stream),
        )
    elif any(getattr(out, name).pointer != getattr(A, name).pointer for name in pattern):
        raise ValueError(
            "out: a matrix with other columns, counts or tail rows given, one with A's wanted"
        )
    origins, _ = _pattern(A)
    put_segments(csr_sampled_product(_as_csr(A), Y, X).data, origins, A, out)
    return out


@kernel()
def _multiply_wide(
    values, offsets, counts, X, out, rows, segments, width, slots, columns, is_aligned
):  # fmt: skip
    lane = global_thread() % 32
    item = global_thread() // 32
    while item < rows * ((columns + STRIP - 1) // STRIP):
        row = item % rows
        d = item // rows * STRIP + lane * 8
        sums = eight_zeros(out)
        for segment in range(segments):
            start = (row * segments + segment) * slots
            for i in range(start, start + types.int64(load(counts, row * segments + segment))):
                k = segment * width + types.int64(load(offsets, i))
                numbers = load_eight(X, k * columns, d, columns, is_aligned)
                sums = add_unless_zero(sums, load(values, i), numbers)
        store_eight(out, row * columns, d, columns, sums, is_aligned)
        item += grid_threads() // 32


@kernel()
def _multiply_narrow(values, offsets, counts, X, out, rows, segments, width, slots, columns):
    lane = global_thread() % 32
    item = global_thread() // 32
    while item < rows * columns:
        row = item // columns
        total = number(out, 0)
        place = lane  # in the row's segments, one after the other
        while place < segments * slots:
            segment = place // slots
            if place % slots < types.int64(load(counts, row * segments + segment)):
                value = load(values, row * segments * slots + place)
                k = segment * width + types.int64(load(offsets, row * segments * slots + place))
                if value != 0:
                    total += value * load(X, k * columns + item % columns)
            place += 32
        total = warp_sum(total)
        if lane == 0:
            store(out, item, total)
        item += grid_threads() // 32


@kernel()
def _multiply_tail_wide(
    tail_values, tail_rows, X, out, tail, row_columns, columns, is_aligned
):  # fmt: skip
    parts = cuda.shared.array(PARTS, arithmetic_type(out))
    lane = types.int64(cuda.threadIdx.x % 32)
    warp = types.int64(cuda.threadIdx.x // 32)
    warps = types.int64(cuda.blockDim.x // 32)
    strips = (columns + STRIP - 1) // STRIP
    item = types.int64(cuda.blockIdx.x)
    while item < tail * strips:
        place = item // strips
        first = item % strips * STRIP
        sums = eight_zeros(out)
        k = warp
        while k < row_columns:
            numbers = load_eight(X, k * columns, first + lane * 8, columns, is_aligned)
            sums = add_unless_zero(sums, load(tail_values, place * row_columns + k), numbers)
            k += warps
        for i in range(8):
            parts[warp * STRIP + lane * 8 + i] = sums[i]
        cuda.syncthreads()
        start = load(tail_rows, place) * columns
        column = types.int64(cuda.threadIdx.x)
        while column < STRIP:
            total = number(out, 0)
            for part in range(warps):
                total += parts[part * STRIP + column]
            store_column(out, start, first + column, columns, total)
            column += cuda.blockDim.x
        cuda.syncthreads()  # the next sums are written to the same place
        item += cuda.gridDim.x


@kernel()
def _multiply_tail_narrow(tail_values, tail_rows, X, out, tail, row_columns, columns):
    item = types.int64(cuda.blockIdx.x)
    while item < tail * columns:
        place = item // columns
        total = number(out, 0)
        k = types.int64(cuda.threadIdx.x)
        while k < row_columns:
            value = load(tail_values, place * row_columns + k)
            if value != 0:
                total += value * load(X, k * columns + item % columns)
            k += cuda.blockDim.x
        total = block_sum(total)
        if cuda.threadIdx.x == 0:
            store(out, load(tail_rows, place) * columns + item % columns, total)
        item += cuda.gridDim.x
