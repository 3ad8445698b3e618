"""Conversions of sparse matrices on a GPU; definitions in the reference and in the formats.

Everything goes over the entries by row, as CSR has them: a format is read into that form, and
packed from it. Of the matrix itself nothing passes through the host; sizes that decide an
allocation are read back (the number of entries, of rows in a tail, of blocks a row), each of which
waits for the GPU once.

Values are copied as the integers that their bits are: a NaN keeps its payload, and kernels are
compiled for 2, 4 and 8 bytes alone. A value is zero if all its bits but the sign are. Reading a
format counts and then fills, with one kernel: the format is read twice, which bounds the speed.
A warp takes a row; a prefix sum over its lanes keeps entries in order, so there are no atomics and
results are the same in every run.
"""

from typing import Any

import numpy as np

from twell_numba.device.gpu import DeviceArray, Kernel, empty, kernel, zeros
from twell_numba.device.gpu.cast import cast
from twell_numba.device.gpu.language import (
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
from twell_numba.formats import BlockELLMatrix, CSRMatrix
from twell_numba.formats.block_ell import enough_blocks_per_row
from twell_numba.formats.ell import ELLMatrix
from twell_numba.formats.index_width import index_dtype
from twell_numba.kernels.conversion.cuda_order import by_column, sorted_order
from twell_numba.kernels.conversion.cuda_order import count_digits as count_digits
from twell_numba.kernels.conversion.cuda_order import find_rows as find_rows
from twell_numba.kernels.conversion.cuda_order import find_starts as find_starts
from twell_numba.kernels.conversion.cuda_order import place_digits as place_digits
from twell_numba.kernels.conversion.cuda_prefix import prefix_sums
from twell_numba.kernels.conversion.cuda_prefix import scan_parts as scan_parts
from twell_numba.kernels.conversion.cuda_prefix import scan_sums as scan_sums
from twell_numba.kernels.conversion.cuda_prefix import sum_parts as sum_parts
from twell_numba.kernels.twell.cuda_language import ballot, bits_below, count_bits

Rows = tuple[DeviceArray, DeviceArray, DeviceArray]
"""The data, indices and indptr of a CSR matrix."""

_BITS: dict[int, np.dtype] = {2: np.dtype(np.uint16), 4: np.dtype(np.int32), 8: np.dtype(np.int64)}


# ---- Dense to sparse, as the CPU has it


def dense_to_csr(dense: DeviceArray) -> Rows:
    """As :func:`twell_numba.kernels.conversion.cpu.dense_to_csr`; waits for the GPU once."""
    rows, columns = dense.shape
    source = (_bits(dense), _magnitude(dense))
    return _count_and_fill(_rows_of_dense, source, (columns,), dense.dtype, (rows, columns))


def dense_to_segments(
    dense: DeviceArray,
    *,
    segments_per_row: int,
    segment_width: int,
    slots: int,
    column_dtype: np.dtype,
) -> dict[str, DeviceArray]:
    """As :func:`twell_numba.kernels.conversion.cpu.dense_to_segments`; waits twice."""
    return segments_of_rows(
        _csr(dense),
        segments_per_row=segments_per_row,
        segment_width=segment_width,
        slots=slots,
        column_dtype=column_dtype,
    )


def dense_to_block_ell(
    dense: DeviceArray, block_size: int, blocks_per_row: int | None = None
) -> tuple[DeviceArray, DeviceArray]:
    """As :func:`twell_numba.kernels.conversion.cpu.dense_to_block_ell`; waits twice."""
    return blocks_of_rows(_csr(dense), block_size, blocks_per_row)


def transpose_csr(
    data: DeviceArray, indices: DeviceArray, indptr: DeviceArray, columns: int
) -> Rows:
    """As :func:`twell_numba.kernels.conversion.cpu.transpose_csr`; waits for nothing."""
    order, rows, starts = by_column(indices, indptr, columns)
    return take(data, order), rows, starts


# ---- Sparse to rows


def rows_of_csr(A: CSRMatrix, *, with_zeros: bool) -> Rows:
    """Return the entries of a CSR matrix without stored zeros, or a copy of all."""
    if with_zeros:
        return A.data.copy(), A.indices.copy(), A.indptr.copy()
    source = (_bits(A.data), A.indices, A.indptr, _magnitude(A.data))
    return _count_and_fill(_rows_of_csr, source, (), A.dtype, A.shape)


def rows_of_segments(A: ELLMatrix, *, with_zeros: bool) -> Rows:
    """Return the entries of a TwELL or hybrid ELL matrix by row.

    Parameters
    ----------
    with_zeros : bool
        Whether zeros stored in slots are among them; those of the tail never are.
    """
    origins, indices, indptr = _origins_of_segments(A, with_zeros, with_tail_zeros=False)
    return take_segments(A, origins), indices, indptr


def pattern_of_segments(A: ELLMatrix) -> Rows:
    """Return all places of a TwELL or hybrid ELL matrix by row, zeros of the tail too.

    Returns
    -------
    origins : DeviceArray, shape (places,)
        Where each stands in ``values``, or, counted on from its end, in ``tail_values``.
    indices, indptr
        As :class:`~twell_numba.formats.CSRMatrix`.
    """
    return _origins_of_segments(A, with_zeros=True, with_tail_zeros=True)


def take_segments(A: ELLMatrix, origins: DeviceArray) -> DeviceArray:
    """Return the values at the places that :func:`pattern_of_segments` numbers."""
    data = empty(origins.shape, A.dtype, A.values.stream)
    _take_either(
        _take_either.blocks(data.size),
        _bits(A.values), _bits(A.tail_values), origins, _bits(data), A.values.size, data.size,
    )  # fmt: skip
    return data


def put_segments(data: DeviceArray, origins: DeviceArray, A: ELLMatrix, out: ELLMatrix) -> None:
    """Write values to the places of ``out`` that have the numbers ``origins``.

    The zeros of A's tail are no entries: those places of ``out`` get 0.
    """
    out.values.fill_with_zeros()
    _put_either(
        _put_either.blocks(data.size),
        _bits(data), origins, _bits(A.tail_values), _magnitude(A.values), _bits(out.values),
        _bits(out.tail_values), out.values.size, data.size,
    )  # fmt: skip


def rows_of_blocks(A: BlockELLMatrix, *, with_zeros: bool) -> Rows:
    """Return the entries of a block-ELL matrix by row."""
    source = (_bits(A.values), A.block_columns, _magnitude(A.values))
    layout = (A.shape[1], A.blocks_per_row, A.block_size, int(with_zeros))
    return _count_and_fill(_rows_of_blocks, source, layout, A.dtype, A.shape)


# ---- Rows to sparse


def segments_of_rows(
    A: CSRMatrix,
    *,
    segments_per_row: int,
    segment_width: int,
    slots: int,
    column_dtype: np.dtype,
) -> dict[str, DeviceArray]:
    """Lay all entries of a CSR matrix out as :func:`twell_numba.formats.ell.pack_segments` does.

    Waits for the GPU once, for the length of the tail.
    """
    rows, columns = A.shape
    stream = A.data.stream
    places = (rows, segments_per_row, slots)
    values, offsets = zeros(places, A.dtype, stream), zeros(places, column_dtype, stream)
    counts = empty((rows, segments_per_row), np.int32, stream)
    overflows = empty(rows, np.int32, stream)
    layout = (rows, segments_per_row, segment_width, slots)
    pattern = (A.indices, A.indptr)
    _count_segments(_count_segments.blocks(counts.size), *pattern, counts, *layout)
    _mark_overflows(_mark_overflows.blocks(rows), counts, overflows, rows, segments_per_row, slots)
    tail_starts, tail = prefix_sums(overflows)
    tail_rows = empty(tail, np.int64, stream)
    tail_values = zeros((tail, columns), A.dtype, stream)
    data = _bits(A.data)
    _fill_segments(
        _fill_segments.blocks_of_warps(counts.size),
        data, *pattern, counts, _bits(values), offsets, *layout,
    )  # fmt: skip
    if tail:
        _fill_tail(
            _fill_tail.blocks_of_warps(rows),
            data, *pattern, tail_starts, tail_rows, _bits(tail_values), rows, columns,
        )  # fmt: skip
    return {
        "values": values,
        "columns": offsets,
        "counts": counts,
        "tail_rows": tail_rows,
        "tail_values": tail_values,
    }


def blocks_of_rows(
    A: CSRMatrix, block_size: int, blocks_per_row: int | None
) -> tuple[DeviceArray, DeviceArray]:
    """Lay all entries of a CSR matrix out in blocks.

    Waits for the GPU once, for the number of blocks of each row.

    Raises
    ------
    ValueError
        If a row of blocks holds more than ``blocks_per_row``.
    """
    (rows, columns), stream = A.shape, A.data.stream
    block_rows, block_columns = -(-rows // block_size), -(-columns // block_size)
    # which blocks are there; then the slot of each, from 1 on
    blocks = zeros((block_rows, block_columns), np.int32, stream)
    counts = zeros(block_rows, np.int32, stream)
    layout = (rows, block_columns, block_size)
    _mark_blocks(_mark_blocks.blocks_of_warps(rows), A.indices, A.indptr, blocks, *layout)
    _number_blocks(
        _number_blocks.blocks_of_warps(block_rows), blocks, counts, block_rows, block_columns
    )
    slots = enough_blocks_per_row(counts.to_numpy(), blocks_per_row)
    placed = empty((block_rows, slots), index_dtype(block_columns), stream)
    values = zeros((block_rows, slots, block_size, block_size), A.dtype, stream)
    if slots:
        _place_blocks(
            _place_blocks.blocks_of_warps(block_rows),
            blocks, counts, placed, block_rows, block_columns, slots,
        )  # fmt: skip
        _fill_blocks(
            _fill_blocks.blocks_of_warps(rows),
            _bits(A.data), A.indices, A.indptr, blocks, _bits(values), *layout, slots,
        )  # fmt: skip
    return values, placed


# ---- Sparse to dense


def dense_of_csr(A: CSRMatrix) -> DeviceArray:
    """Return the dense array of a CSR matrix."""
    dense = zeros(A.shape, A.dtype, A.data.stream)
    _scatter_csr(
        _scatter_csr.blocks_of_warps(A.shape[0]),
        _bits(A.data), A.indices, A.indptr, _bits(dense), *A.shape,
    )  # fmt: skip
    return dense


def dense_of_segments(A: ELLMatrix) -> DeviceArray:
    """Return the dense array of a TwELL or hybrid ELL matrix."""
    dense = zeros(A.shape, A.dtype, A.values.stream)
    bits, columns = _bits(dense), A.shape[1]
    _scatter_segments(
        _scatter_segments.blocks_of_warps(A.counts.size),
        _bits(A.values), A.columns, A.counts, bits, A.counts.size, columns, A.segments_per_row,
        A.segment_width, A.values.shape[-1],
    )  # fmt: skip
    _scatter_tail(
        _scatter_tail.blocks(A.tail_values.size),
        _bits(A.tail_values), A.tail_rows, _magnitude(A.values), bits, A.tail_values.size, columns,
    )  # fmt: skip
    return dense


def dense_of_blocks(A: BlockELLMatrix) -> DeviceArray:
    """Return the dense array of a block-ELL matrix."""
    dense = zeros(A.shape, A.dtype, A.values.stream)
    _scatter_blocks(
        _scatter_blocks.blocks(A.values.size),
        _bits(A.values), A.block_columns, _bits(dense), A.values.size, *A.shape, A.blocks_per_row,
        A.block_size,
    )  # fmt: skip
    return dense


# ---- Others


def transposed_blocks(A: BlockELLMatrix) -> tuple[DeviceArray, DeviceArray]:
    """Return the values and block columns of the transpose; waits for the GPU once."""
    b, stream = A.block_size, A.values.stream
    new_rows = -(-A.shape[1] // b)
    starts, blocks = blocks_by_column(A)
    counts = np.diff(starts.to_numpy())
    slots = int(counts.max(initial=0))
    values = empty((new_rows, slots, b, b), A.dtype, stream)
    placed = empty((new_rows, slots), index_dtype(A.block_rows), stream)
    _transpose_blocks(
        _transpose_blocks.blocks(values.size),
        _bits(A.values), starts, blocks, _bits(values), placed, values.size, slots, b,
        A.blocks_per_row,
    )  # fmt: skip
    return values, placed


def blocks_by_column(A: BlockELLMatrix) -> tuple[DeviceArray, DeviceArray]:
    """Return the blocks of each column of blocks, rows ascending; waits for nothing.

    Returns
    -------
    starts : DeviceArray, shape (columns of blocks + 1,)
    blocks : DeviceArray, shape (block_rows * blocks_per_row,)
        Each as its row of blocks times ``blocks_per_row``, plus its slot; as many as ``starts``
        says.
    """
    columns = -(-A.shape[1] // A.block_size)
    blocks, starts = sorted_order(A.block_columns.reshape(-1), columns)
    return starts, blocks


def take(data: DeviceArray, order: DeviceArray) -> DeviceArray:
    """Return ``data[order]``, of as many numbers as ``order`` has."""
    result = empty(order.shape, data.dtype, data.stream)
    _take(_take.blocks(result.size), _bits(data), order, _bits(result), result.size)
    return result


def converted(array: DeviceArray, dtype: np.dtype) -> DeviceArray:
    """Return a copy in another dtype of floats."""
    return array.copy() if array.dtype == dtype else cast(array, dtype)


def _csr(dense: DeviceArray) -> CSRMatrix:
    rows, columns = dense.shape
    return CSRMatrix(*dense_to_csr(dense), (rows, columns), validate=False)


def _origins_of_segments(A: ELLMatrix, with_zeros: bool, *, with_tail_zeros: bool) -> Rows:
    rows, columns = A.shape
    stream = A.values.stream
    tails = zeros(rows, np.int64, stream)  # which row of the tail is a row's, from 1 on
    tail = A.tail_rows.size
    _number_tail(_number_tail.blocks(tail), A.tail_rows, tails, tail)
    arrays = (_bits(A.values), A.columns, A.counts, _bits(A.tail_values), tails)
    layout = (
        columns, A.segments_per_row, A.segment_width, A.values.shape[-1], A.values.size,
        int(with_zeros), int(with_tail_zeros),
    )  # fmt: skip
    dtype = index_dtype(A.values.size + A.tail_values.size)
    source = (*arrays, _magnitude(A.values))
    return _count_and_fill(_rows_of_segments, source, layout, dtype, A.shape)


def _count_and_fill(
    read: Kernel,
    source: tuple[Any, ...],
    layout: tuple[int, ...],
    dtype: np.dtype,
    shape: tuple[int, int],
) -> Rows:
    """Let a kernel count the entries of each row and, once there is room for them, list them."""
    rows, stream = shape[0], source[0].stream
    nothing, no_index = empty(0, dtype, stream), empty(0, index_dtype(shape[1]), stream)
    blocks = read.blocks_of_warps(rows)
    lengths = empty(rows, np.int64, stream)
    read(blocks, *source, lengths, _whole(nothing), no_index, rows, *layout, 0)
    indptr, nnz = prefix_sums(lengths)
    data, indices = empty(nnz, dtype, stream), empty(nnz, no_index.dtype, stream)
    starts = prefix_sums(lengths, np.dtype(np.int64))[0]
    read(blocks, *source, starts, _whole(data), indices, rows, *layout, 1)
    return data, indices, indptr


def _whole(array: DeviceArray) -> DeviceArray:
    """Return an array as kernels fill it: indices as they are, values by their bits."""
    return array if array.dtype.kind == "i" else _bits(array)


def _bits(array: DeviceArray) -> DeviceArray:
    """Return a view of floats as the integers that their bits are."""
    dtype = _BITS[array.dtype.itemsize]
    return DeviceArray(array.pointer, array.shape, dtype, array.stream, array.owner)


def _magnitude(array: DeviceArray) -> int:
    """Return the mask of all bits of a float but the sign."""
    return 2 ** (8 * array.dtype.itemsize - 1) - 1


# ---- Kernels


@device_function
def lanes_before(found):
    """Return for how many lanes before this one ``found`` is 1, not 0, and for how many at all."""
    lanes = ballot(found)
    before = count_bits(lanes & bits_below(cuda.threadIdx.x % 32))
    return types.int64(before), types.int64(count_bits(lanes))


@device_function
def put_entry(data, indices, place, value, column):
    """Write an entry of a row."""
    store(data, place, value)
    store(indices, place, column)


@device_function
def first_at(indices, begin, end, column):
    """Return the first of the entries from ``begin`` on whose column is not before ``column``."""
    while begin < end:
        middle = (begin + end) // 2
        if types.int64(load(indices, middle)) < column:
            begin = middle + 1
        else:
            end = middle
    return begin


@kernel()
def _rows_of_dense(dense, magnitude, places, data, indices, rows, columns, is_filling):
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        count = types.int64(0)
        if is_filling != 0:
            count = load(places, row)
        first = types.int64(0)
        while first < columns:
            column = first + lane
            value = number(dense, 0)
            if column < columns:
                value = load(dense, row * columns + column)
            found = 0
            if (value & magnitude) != 0:
                found = 1
            if is_filling != 0:
                before, total = lanes_before(found)
                if found != 0:
                    put_entry(data, indices, count + before, value, column)
                count += total
            else:
                count += found
            first += 32
        if is_filling == 0:
            count = warp_sum(count)
            if lane == 0:
                store(places, row, count)
        row += grid_threads() // 32


@kernel()
def _rows_of_csr(
    old_data, old_indices, indptr, magnitude, places, data, indices, rows, is_filling
):  # fmt: skip
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        count = types.int64(0)
        if is_filling != 0:
            count = load(places, row)
        first = types.int64(load(indptr, row))
        end = types.int64(load(indptr, row + 1))
        while first < end:
            k = first + lane
            value = number(old_data, 0)
            if k < end:
                value = load(old_data, k)
            found = 0
            if (value & magnitude) != 0:
                found = 1
            if is_filling != 0:
                before, total = lanes_before(found)
                if found != 0:
                    put_entry(data, indices, count + before, value, load(old_indices, k))
                count += total
            else:
                count += found
            first += 32
        if is_filling == 0:
            count = warp_sum(count)
            if lane == 0:
                store(places, row, count)
        row += grid_threads() // 32


@kernel()
def _rows_of_segments(
    values, columns, counts, tail_values, tails, magnitude, places, origins, indices, rows,
    row_columns, segments, width, slots, size, with_zeros, with_tail_zeros, is_filling,
):  # fmt: skip
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        count = types.int64(0)
        if is_filling != 0:
            count = load(places, row)
        tail = types.int64(load(tails, row)) - 1
        # a row of the tail is one segment without column numbers
        pieces = segments
        if tail >= 0:
            pieces = types.int64(1)
        for piece in range(pieces):
            start = (row * segments + piece) * slots
            length = row_columns
            if tail >= 0:
                start = tail * row_columns
            else:
                length = types.int64(load(counts, row * segments + piece))
            first = types.int64(0)
            while first < length:
                i = first + lane
                found = 0
                column = i
                origin = start + i
                if i < length:
                    found = 1
                    if tail >= 0:
                        if with_tail_zeros == 0 and (load(tail_values, origin) & magnitude) == 0:
                            found = 0
                        origin += size
                    else:
                        if with_zeros == 0 and (load(values, origin) & magnitude) == 0:
                            found = 0
                        column = piece * width + types.int64(load(columns, origin))
                if is_filling != 0:
                    before, total = lanes_before(found)
                    if found != 0:
                        put_entry(origins, indices, count + before, origin, column)
                    count += total
                else:
                    count += found
                first += 32
        if is_filling == 0:
            count = warp_sum(count)
            if lane == 0:
                store(places, row, count)
        row += grid_threads() // 32


@kernel()
def _rows_of_blocks(
    values, block_columns, magnitude, places, data, indices, rows, columns, slots, b, with_zeros,
    is_filling,
):  # fmt: skip
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        count = types.int64(0)
        if is_filling != 0:
            count = load(places, row)
        for block in range(row // b * slots, (row // b + 1) * slots):
            first_column = types.int64(load(block_columns, block)) * b
            width = types.int64(0)
            if first_column >= 0:
                width = min(b, columns - first_column)
            first = types.int64(0)
            while first < width:
                j = first + lane
                found = 0
                value = number(values, 0)
                if j < width:
                    value = load(values, (block * b + row % b) * b + j)
                    if with_zeros != 0 or (value & magnitude) != 0:
                        found = 1
                if is_filling != 0:
                    before, total = lanes_before(found)
                    if found != 0:
                        put_entry(data, indices, count + before, value, first_column + j)
                    count += total
                else:
                    count += found
                first += 32
        if is_filling == 0:
            count = warp_sum(count)
            if lane == 0:
                store(places, row, count)
        row += grid_threads() // 32


@kernel()
def _number_tail(tail_rows, tails, count):
    i = global_thread()
    while i < count:
        store(tails, load(tail_rows, i), i + 1)
        i += grid_threads()


@kernel()
def _count_segments(indices, indptr, counts, rows, segments, width, slots):
    item = global_thread()
    while item < rows * segments:
        row = item // segments
        begin = types.int64(load(indptr, row))
        end = types.int64(load(indptr, row + 1))
        first = item % segments * width
        begin = first_at(indices, begin, end, first)
        # more than a 32-bit count holds is more than fits
        store(counts, item, min(first_at(indices, begin, end, first + width) - begin, slots + 1))
        item += grid_threads()


@kernel()
def _mark_overflows(counts, overflows, rows, segments, slots):
    row = global_thread()
    while row < rows:
        is_full = 0
        for item in range(row * segments, (row + 1) * segments):
            if load(counts, item) > slots:
                is_full = 1
        if is_full != 0:
            for item in range(row * segments, (row + 1) * segments):
                store(counts, item, 0)
        store(overflows, row, is_full)
        row += grid_threads()


@kernel()
def _fill_segments(data, indices, indptr, counts, values, columns, rows, segments, width, slots):
    lane = global_thread() % 32
    item = global_thread() // 32
    while item < rows * segments:
        count = types.int64(load(counts, item))  # 0 in the tail
        if count > 0:
            row = item // segments
            begin = types.int64(load(indptr, row))
            end = types.int64(load(indptr, row + 1))
            first = item % segments * width
            begin = first_at(indices, begin, end, first)
            i = lane
            while i < count:
                store(values, item * slots + i, load(data, begin + i))
                store(columns, item * slots + i, types.int64(load(indices, begin + i)) - first)
                i += 32
        item += grid_threads() // 32


@kernel()
def _fill_tail(data, indices, indptr, tail_starts, tail_rows, tail_values, rows, columns):
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        tail = types.int64(load(tail_starts, row))
        if types.int64(load(tail_starts, row + 1)) > tail:
            if lane == 0:
                store(tail_rows, tail, row)
            k = types.int64(load(indptr, row)) + lane
            end = types.int64(load(indptr, row + 1))
            while k < end:
                place = tail * columns + types.int64(load(indices, k))
                store(tail_values, place, load(data, k))
                k += 32
        row += grid_threads() // 32


@kernel()
def _mark_blocks(indices, indptr, blocks, rows, block_columns, b):
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        start = row // b * block_columns
        k = types.int64(load(indptr, row)) + lane
        end = types.int64(load(indptr, row + 1))
        while k < end:
            # several threads may write here, all the same
            store(blocks, start + types.int64(load(indices, k)) // b, 1)
            k += 32
        row += grid_threads() // 32


@kernel()
def _number_blocks(blocks, counts, block_rows, block_columns):
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < block_rows:
        count = types.int64(0)
        first = types.int64(0)
        while first < block_columns:
            column = first + lane
            found = 0
            if column < block_columns:
                found = load(blocks, row * block_columns + column)
            before, total = lanes_before(found)
            if found != 0:
                store(blocks, row * block_columns + column, count + before + 1)
            count += total
            first += 32
        if lane == 0:
            store(counts, row, count)
        row += grid_threads() // 32


@kernel()
def _place_blocks(blocks, counts, placed, block_rows, block_columns, slots):
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < block_rows:
        column = lane
        while column < block_columns:
            slot = types.int64(load(blocks, row * block_columns + column)) - 1
            if slot >= 0:
                store(placed, row * slots + slot, column)
            column += 32
        slot = types.int64(load(counts, row)) + lane
        while slot < slots:
            store(placed, row * slots + slot, -1)
            slot += 32
        row += grid_threads() // 32


@kernel()
def _fill_blocks(data, indices, indptr, blocks, values, rows, block_columns, b, slots):
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        k = types.int64(load(indptr, row)) + lane
        end = types.int64(load(indptr, row + 1))
        while k < end:
            column = types.int64(load(indices, k))
            slot = types.int64(load(blocks, row // b * block_columns + column // b)) - 1
            block = row // b * slots + slot
            store(values, (block * b + row % b) * b + column % b, load(data, k))
            k += 32
        row += grid_threads() // 32


@kernel()
def _scatter_csr(data, indices, indptr, dense, rows, columns):
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        k = types.int64(load(indptr, row)) + lane
        end = types.int64(load(indptr, row + 1))
        while k < end:
            store(dense, row * columns + types.int64(load(indices, k)), load(data, k))
            k += 32
        row += grid_threads() // 32


@kernel()
def _scatter_segments(
    values, columns, counts, dense, items, row_columns, segments, width, slots
):  # fmt: skip
    lane = global_thread() % 32
    item = global_thread() // 32
    while item < items:
        start = item // segments * row_columns + item % segments * width
        i = item * slots + lane
        end = item * slots + types.int64(load(counts, item))
        while i < end:
            store(dense, start + types.int64(load(columns, i)), load(values, i))
            i += 32
        item += grid_threads() // 32


@kernel()
def _scatter_tail(tail_values, tail_rows, magnitude, dense, size, columns):
    item = global_thread()
    while item < size:
        value = load(tail_values, item)
        if (value & magnitude) != 0:
            row = types.int64(load(tail_rows, item // columns))
            store(dense, row * columns + item % columns, value)
        item += grid_threads()


@kernel()
def _scatter_blocks(values, block_columns, dense, size, rows, columns, slots, b):
    item = global_thread()
    while item < size:
        block = item // (b * b)
        block_column = types.int64(load(block_columns, block))
        row = block // slots * b + item // b % b
        column = block_column * b + item % b
        if block_column >= 0 and row < rows and column < columns:
            store(dense, row * columns + column, load(values, item))
        item += grid_threads()


@kernel()
def _transpose_blocks(
    values, starts, blocks, new_values, placed, size, slots, b, old_slots
):  # fmt: skip
    item = global_thread()
    while item < size:
        new_block = item // (b * b)
        place = types.int64(load(starts, new_block // slots)) + new_block % slots
        value = number(values, 0)
        column = types.int64(-1)
        if place < types.int64(load(starts, new_block // slots + 1)):
            block = types.int64(load(blocks, place))
            column = block // old_slots
            value = load(values, (block * b + item % b) * b + item // b % b)
        store(new_values, item, value)
        if item % (b * b) == 0:
            store(placed, new_block, column)
        item += grid_threads()


@kernel()
def _take(data, order, result, size):
    i = global_thread()
    while i < size:
        store(result, i, load(data, load(order, i)))
        i += grid_threads()


@kernel()
def _take_either(values, tail_values, origins, data, split, size):
    i = global_thread()
    while i < size:
        origin = types.int64(load(origins, i))
        if origin < split:
            store(data, i, load(values, origin))
        else:
            store(data, i, load(tail_values, origin - split))
        i += grid_threads()


@kernel()
def _put_either(data, origins, old_tail, magnitude, values, tail_values, split, size):
    i = global_thread()
    while i < size:
        origin = types.int64(load(origins, i))
        if origin < split:
            store(values, origin, load(data, i))
        else:
            value = number(data, 0)
            if (load(old_tail, origin - split) & magnitude) != 0:
                value = load(data, i)
            store(tail_values, origin - split, value)
        i += grid_threads()
