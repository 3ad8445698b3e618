"""Conversions compiled for the CPU.

Each thread takes a range of rows. Values are handled as the unsigned integers that their bits are,
so that dtypes of one size share a kernel (Numba has no bfloat16) and NaN is copied bit by bit; a
value is zero if all its bits but the sign are. Rows are counted before they are packed:
counting is vectorized, and with the count known, packing needs no branch that the processor would
have to guess.
"""

from collections.abc import Callable

import numpy as np

from twell_numba.device import run_ranges
from twell_numba.device.jit import jit
from twell_numba.formats.arrays import kernel_array
from twell_numba.formats.block_ell import NO_BLOCK, enough_blocks_per_row
from twell_numba.formats.index_width import index_dtype
from twell_numba.kernels.checks import contiguous

# Fewest elements worth a thread of their own.
GRAIN = 65536
# Rows differ in their entries, so threads that finish early take more.
PARTS_PER_THREAD = 4


def dense_to_csr(dense: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the arrays of a :class:`~twell_numba.formats.CSRMatrix` with the entries of ``dense``.

    Parameters
    ----------
    dense : array, shape (M, F)
        Of an accepted dtype, with any strides (any but C order costs a copy). Not changed.

    Returns
    -------
    data : array, shape (nnz,)
    indices : array, shape (nnz,)
        int32, or int64 for more than 2^31 - 1 columns.
    indptr : array, shape (M + 1,)
        int32, or int64 for more than 2^31 - 1 entries.
    """
    bits, magnitude = _bits(dense)
    rows, columns = dense.shape
    lengths = np.empty(rows, np.int64)
    _run_rows(lambda start, stop: _count_rows(bits, magnitude, lengths, start, stop), dense)
    indptr = np.zeros(rows + 1, np.int64)
    np.cumsum(lengths, out=indptr[1:])
    nnz = int(indptr[-1])
    data = np.empty(nnz, bits.dtype)
    indices = np.empty(nnz, index_dtype(columns))
    _run_rows(
        lambda start, stop: _pack_rows(bits, magnitude, indptr, data, indices, start, stop), dense
    )
    return data.view(dense.dtype), indices, indptr.astype(index_dtype(nnz), copy=False)


def dense_to_segments(
    dense: np.ndarray,
    *,
    segments_per_row: int,
    segment_width: int,
    slots: int,
    column_dtype: np.dtype,
) -> dict[str, np.ndarray]:
    """Return the arrays of an ELL matrix with the entries of ``dense``.

    Parameters
    ----------
    dense : array, shape (M, F)
        Of an accepted dtype, with any strides (any but C order costs a copy). Not changed.
    segments_per_row, segment_width, slots, column_dtype
        As :func:`twell_numba.formats.ell.pack_segments`.

    Returns
    -------
    dict of arrays
        As :func:`twell_numba.formats.ell.pack_segments`.
    """
    bits, magnitude = _bits(dense)
    rows, columns = dense.shape
    values = np.zeros((rows, segments_per_row, slots), bits.dtype)
    offsets = np.zeros((rows, segments_per_row, slots), column_dtype)
    counts = np.zeros((rows, segments_per_row), np.int32)
    in_tail = np.zeros(rows, np.bool_)
    _run_rows(
        lambda start, stop: _pack_segments(
            bits, magnitude, segment_width, values, offsets, counts, in_tail, start, stop
        ),
        dense,
    )
    tail_rows = np.flatnonzero(in_tail)
    tail_values = np.empty((tail_rows.size, columns), bits.dtype)
    run_ranges(
        lambda start, stop: _copy_rows(bits, magnitude, tail_rows, tail_values, start, stop),
        tail_rows.size,
        grain=max(GRAIN // max(columns, 1), 1),
    )
    return {
        "values": values.view(dense.dtype),
        "columns": offsets,
        "counts": counts,
        "tail_rows": tail_rows,
        "tail_values": tail_values.view(dense.dtype),
    }


def dense_to_block_ell(
    dense: np.ndarray, block_size: int, blocks_per_row: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays of a :class:`~twell_numba.formats.BlockELLMatrix`: ``dense`` in blocks.

    Parameters
    ----------
    dense : array, shape (M, F)
        Of an accepted dtype, with any strides (any but C order costs a copy). Not changed.
    block_size : int
        b, at least 1.
    blocks_per_row : int, optional
        Default: as many as the fullest row of blocks holds.

    Returns
    -------
    values : array, shape (ceil(M / b), blocks_per_row, b, b)
        Padding is zero.
    block_columns : array, shape (ceil(M / b), blocks_per_row)

    Raises
    ------
    ValueError
        If a row of blocks holds more than ``blocks_per_row``.
    """
    bits, magnitude = _bits(dense)
    rows, columns = dense.shape
    block_rows, block_columns = -(-rows // block_size), -(-columns // block_size)
    used = np.zeros((block_rows, block_columns), np.bool_)
    counts = np.zeros(block_rows, np.int64)
    grain = max(GRAIN // max(block_size * columns, 1), 1)
    run_ranges(
        lambda start, stop: _find_blocks(bits, magnitude, block_size, used, counts, start, stop),
        block_rows,
        grain=grain,
        parts_per_thread=PARTS_PER_THREAD,
    )
    blocks_per_row = enough_blocks_per_row(counts, blocks_per_row)
    placed = np.full((block_rows, blocks_per_row), NO_BLOCK, index_dtype(block_columns))
    values = np.zeros((block_rows, blocks_per_row, block_size, block_size), bits.dtype)
    run_ranges(
        lambda start, stop: _copy_blocks(bits, magnitude, used, placed, values, start, stop),
        block_rows,
        grain=grain,
        parts_per_thread=PARTS_PER_THREAD,
    )
    return values.view(dense.dtype), placed


def transpose_csr(
    data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the arrays of the transpose of a CSR matrix, in O(nnz + columns).

    Parameters
    ----------
    data, indices, indptr
        As :class:`~twell_numba.formats.CSRMatrix`; valid. Not changed.
    columns : int
        Number of columns of the matrix.

    Returns
    -------
    data, indices, indptr
        Of the transpose; stored zeros stay stored.
    """
    rows, nnz = indptr.size - 1, data.size
    ends = np.zeros(columns + 1, np.int64)
    new_bits = np.empty(nnz, _bits_dtype(data))
    new_indices = np.empty(nnz, index_dtype(rows))
    _transpose(
        contiguous(data.view(new_bits.dtype), new_bits.dtype),
        contiguous(indices, indices.dtype),
        contiguous(indptr, indptr.dtype),
        ends,
        new_bits,
        new_indices,
    )
    return new_bits.view(data.dtype), new_indices, ends.astype(index_dtype(nnz), copy=False)


def _bits_dtype(array: np.ndarray) -> np.dtype:
    return np.dtype(f"u{array.dtype.itemsize}")


def _bits(dense: np.ndarray) -> tuple[np.ndarray, np.unsignedinteger]:
    """Return values as unsigned integers, and the mask of all bits but the sign."""
    dtype = _bits_dtype(dense)
    bits = contiguous(kernel_array(dense).view(dtype), dtype)
    return bits, dtype.type(np.iinfo(dtype).max >> 1)


def _run_rows(task: Callable[[int, int], object], dense: np.ndarray) -> None:
    run_ranges(
        task,
        dense.shape[0],
        grain=max(GRAIN // max(dense.shape[1], 1), 1),
        parts_per_thread=PARTS_PER_THREAD,
    )


# In the kernels, rows and parts of rows are sliced once, and counters that index them are unsigned
# where the compiler could not see that they never count from the end: otherwise it would look at
# every index for a minus sign, which took four times as long.


@jit
def _count(part, magnitude):
    count = 0
    for place in range(part.size):
        count += (part[place] & magnitude) != 0
    return count


@jit
def _pack(part, magnitude, values, columns):
    """Fill ``values`` and ``columns`` with the first nonzero elements and their places."""
    one = np.uintp(1)
    zero = np.uintp(0)
    filled = zero
    column = zero
    # Written whether it is an entry or not; only an entry moves the place on.
    while filled < np.uintp(values.size):
        value = part[column]
        values[filled] = value
        columns[filled] = column
        filled += one if (value & magnitude) != 0 else zero
        column += one


@jit
def _count_rows(bits, magnitude, lengths, start, stop):
    """Count the values of rows ``start`` to ``stop`` that are not zero."""
    for row in range(start, stop):
        lengths[row] = _count(bits[row], magnitude)


@jit
def _pack_rows(bits, magnitude, indptr, data, indices, start, stop):
    """Pack rows ``start`` to ``stop`` between their pointers."""
    for row in range(start, stop):
        begin, end = indptr[row], indptr[row + 1]
        _pack(bits[row], magnitude, data[begin:end], indices[begin:end])


@jit
def _pack_segments(bits, magnitude, segment_width, values, offsets, counts, in_tail, start, stop):
    """Pack rows ``start`` to ``stop`` into slots, or mark them for the tail."""
    slots = values.shape[2]
    for row in range(start, stop):
        fits = True
        for segment in range(counts.shape[1]):
            first = segment * segment_width
            count = _count(bits[row, first : first + segment_width], magnitude)
            counts[row, segment] = count
            fits &= count <= slots
        if not fits:
            in_tail[row] = True
            counts[row] = 0
            continue
        for segment in range(counts.shape[1]):
            first = segment * segment_width
            count = counts[row, segment]
            _pack(
                bits[row, first : first + segment_width],
                magnitude,
                values[row, segment, :count],
                offsets[row, segment, :count],
            )


@jit
def _copy_rows(bits, magnitude, rows, copies, start, stop):
    """Copy rows, -0.0 as 0.0."""
    zero = bits.dtype.type(0)
    for place in range(start, stop):
        given, copy = bits[rows[place]], copies[place]
        for column in range(given.size):
            value = given[column]
            copy[column] = value if (value & magnitude) != 0 else zero


@jit
def _find_blocks(bits, magnitude, block_size, used, counts, start, stop):
    """Mark and count the blocks of rows of blocks ``start`` to ``stop`` that hold an entry."""
    rows, columns = bits.shape
    any_row = np.empty(columns, bits.dtype)
    for block_row in range(start, stop):
        first_row = block_row * block_size
        any_row[:] = bits[first_row]
        for row in range(first_row + 1, min(first_row + block_size, rows)):
            values = bits[row]
            for column in range(columns):
                any_row[column] |= values[column]
        for block_column in range(used.shape[1]):
            first = block_column * block_size
            found = _count(any_row[first : first + block_size], magnitude) != 0
            used[block_row, block_column] = found
            counts[block_row] += found


@jit
def _copy_blocks(bits, magnitude, used, placed, values, start, stop):
    """Copy the marked blocks of rows of blocks ``start`` to ``stop``, -0.0 as 0.0."""
    block_size = values.shape[2]
    zero = bits.dtype.type(0)
    for block_row in range(start, stop):
        first_row = block_row * block_size
        height = min(block_size, bits.shape[0] - first_row)
        slot = 0
        for block_column in range(used.shape[1]):
            if not used[block_row, block_column]:
                continue
            placed[block_row, slot] = block_column
            first = block_column * block_size
            for i in range(height):
                given = bits[first_row + i, first : first + block_size]
                copy = values[block_row, slot, i]
                for j in range(given.size):
                    value = given[j]
                    copy[j] = value if (value & magnitude) != 0 else zero
            slot += 1


@jit
def _transpose(bits, indices, indptr, ends, new_bits, new_indices):
    """Sort entries by column, keeping the order of rows, by counting."""
    # ends[column + 1] counts the column's entries, then says where they begin, and at last, moved
    # on by each entry placed, where they end.
    columns = ends.size - 1
    for entry in range(indices.size):
        ends[np.int64(indices[entry]) + 1] += 1
    begin = np.int64(0)
    for column in range(columns):
        count = ends[column + 1]
        ends[column + 1] = begin
        begin += count
    for row in range(indptr.size - 1):
        for entry in range(np.int64(indptr[row]), np.int64(indptr[row + 1])):
            new_row = np.int64(indices[entry])
            place = ends[new_row + 1]
            new_bits[place] = bits[entry]
            new_indices[place] = row
            ends[new_row + 1] = place + 1
