"""Entries by column instead of by row, on a GPU: a stable radix sort without atomics.

A pass sorts by ``BITS`` bits of the column. A thread takes ``CHUNK`` adjacent entries: it counts
them by digit; sums over digits and threads make places of the counts; the same thread puts its
entries there, in their order. So the order is the same in every run, and entries of a column keep
the order of their rows. Each pass reads and writes all entries twice; nothing waits for the GPU.
"""

import numpy as np

from twell_numba.device.gpu import DeviceArray, empty, kernel, zeros
from twell_numba.device.gpu.language import cuda, global_thread, grid_threads, load, store, types
from twell_numba.formats.index_width import index_dtype
from twell_numba.kernels.conversion.cuda_prefix import prefix_sums

BITS = 4
DIGITS = 2**BITS
CHUNK = 32


def by_column(
    indices: DeviceArray, indptr: DeviceArray, columns: int
) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    """Return the entries of a CSR matrix in the order of its transpose.

    Parameters
    ----------
    indices, indptr
        As :class:`~twell_numba.formats.CSRMatrix`.
    columns : int
        Number of columns of the matrix.

    Returns
    -------
    order : DeviceArray, shape (nnz,)
        The number of each entry; by column, then by row.
    rows : DeviceArray, shape (nnz,)
        The row of each: the transpose's ``indices``.
    starts : DeviceArray, shape (columns + 1,)
        Where each column begins: the transpose's ``indptr``.
    """
    nnz, row_count = indices.size, indptr.size - 1
    order, starts = sorted_order(indices, columns)
    rows = empty(nnz, index_dtype(row_count), indices.stream)
    find_rows(find_rows.blocks(nnz), order, indptr, rows, nnz, row_count)
    return order, rows, starts


def sorted_order(keys: DeviceArray, bound: int) -> tuple[DeviceArray, DeviceArray]:
    """Return the places of keys when these are sorted, equal ones in the order they have.

    Parameters
    ----------
    keys : DeviceArray of int32 or int64, shape (n,)
        From 0 to ``bound - 1``; -1 stands for no key.

    Returns
    -------
    order : DeviceArray, shape (n,)
        Those without a key come last.
    starts : DeviceArray, shape (bound + 1,)
        Where each key begins in ``order``, and where the last one ends.
    """
    count, stream = keys.size, keys.stream
    dtype = index_dtype(count)
    if count == 0:
        return empty(0, dtype, stream), zeros(bound + 1, dtype, stream)
    chunks = -(-count // CHUNK)
    order = empty(count, dtype, stream)
    for shift in range(0, max(bound.bit_length(), 1), BITS):
        digits = empty(DIGITS * chunks, np.int32, stream)
        arguments = (chunks, count, shift, bound, int(shift == 0))
        count_digits(count_digits.blocks(chunks), keys, digits, *arguments)
        places, _ = prefix_sums(digits, dtype)
        new_keys, new_order = empty(count, keys.dtype, stream), empty(count, dtype, stream)
        place_digits(
            place_digits.blocks(chunks), keys, order, places, new_keys, new_order, *arguments
        )
        keys, order = new_keys, new_order
    starts = empty(bound + 1, dtype, stream)
    find_starts(find_starts.blocks(bound + 1), keys, starts, count, bound)
    return order, starts


@kernel(threads=128)
def count_digits(keys, digits, chunks, count, shift, bound, is_first):
    """Count the keys of each chunk by digit."""
    counters = cuda.local.array(DIGITS, types.int32)
    chunk = global_thread()
    while chunk < chunks:
        for digit in range(DIGITS):
            counters[digit] = 0
        for i in range(chunk * CHUNK, min(count, (chunk + 1) * CHUNK)):
            key = types.int64(load(keys, i))
            if key < 0:
                key = bound
            counters[(key >> shift) % DIGITS] += 1
        for digit in range(DIGITS):
            store(digits, digit * chunks + chunk, counters[digit])
        chunk += grid_threads()


@kernel(threads=128)
def place_digits(
    keys, order, places, new_keys, new_order, chunks, count, shift, bound, is_first
):  # fmt: skip
    """Put the keys of each chunk, and where they came from, in the places of their digits."""
    next_places = cuda.local.array(DIGITS, types.int64)
    chunk = global_thread()
    while chunk < chunks:
        for digit in range(DIGITS):
            next_places[digit] = load(places, digit * chunks + chunk)
        for i in range(chunk * CHUNK, min(count, (chunk + 1) * CHUNK)):
            key = types.int64(load(keys, i))
            if key < 0:
                key = bound
            digit = (key >> shift) % DIGITS
            place = next_places[digit]
            next_places[digit] = place + 1
            origin = i
            if is_first == 0:
                origin = types.int64(load(order, i))
            store(new_keys, place, key)
            store(new_order, place, origin)
        chunk += grid_threads()


@kernel()
def find_starts(keys, starts, count, bound):
    """Write where each key begins in sorted keys, by bisection."""
    key = global_thread()
    while key <= bound:
        first = types.int64(0)
        end = count
        while first < end:
            middle = (first + end) // 2
            if types.int64(load(keys, middle)) < key:
                first = middle + 1
            else:
                end = middle
        store(starts, key, first)
        key += grid_threads()


@kernel()
def find_rows(order, indptr, rows, count, row_count):
    """Write the row of each entry: the last that begins at or before it, by bisection."""
    i = global_thread()
    while i < count:
        entry = types.int64(load(order, i))
        row = types.int64(0)
        end = row_count
        while end - row > 1:
            middle = (row + end) // 2
            if types.int64(load(indptr, middle)) <= entry:
                row = middle
            else:
                end = middle
        store(rows, i, row)
        i += grid_threads()
