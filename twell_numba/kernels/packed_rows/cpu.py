"""Products of a sparse matrix given as the entries of its rows, compiled for the CPU.

    A @ X:    Y[i] = sum over entries (i, j) of A[i, j] X[j]      A (M, K), X (K, N), Y (M, N)
    A.T @ X:  Y[j] = sum over entries (i, j) of A[i, j] X[i]      A (M, K), X (M, N), Y (K, N)
    sampled:  V[i, j] = Y[i] . X[j] at every entry (i, j)         Y (M, D), X (K, D)

Entries lie in *segments*: CSR and hybrid ELL have one a row, TwELL has one a tile. Entries that are
zero contribute nothing, whatever they meet. Each number of a result is added up by one thread in
one order, that of the rows and columns of A: the same bits every run, for any number of threads.

Every entry moves a row of X through the processor for one multiply-add a number, so that the caches
bound the speed: one core of an AMD EPYC (Zen 5) takes in 85 GB/s from the last level, and two cores
hardly more together where rows have few entries. Hence

- a strip of a row of the result stays in registers while entries are added to it: 256 columns of
  float32 in 16 AVX-512 registers (64 in 8 of AVX2), down to 16 columns for what remains;
- the row that the fourth entry from now points at is asked for in time (``AHEAD``);
- where rows have many entries they are taken by blocks of columns of A, so that the rows of X which
  a block points at stay in the second-level cache (``BLOCK_BYTES``);
- A.T @ X is split by columns of A: a thread looks for its columns in every row by bisection and
  writes rows of the result that are nobody else's. No transpose is made, nothing is added up twice.

Versions tried, milliseconds, A 4096 x 4096 and 256 columns of float32, one thread, by density:

============================================  =====  =====  =====
A @ X                                         0.1    0.01   0.001
============================================  =====  =====  =====
SciPy 1.17                                    41     4.2    0.52
this one                                      13.8   1.5    0.20
without blocks of columns                     15.8   1.5    0.20
without blocks, asking 2 ahead                16.4   1.6    0.21
without blocks, asking 8 ahead                14.2   1.5    0.20
without blocks, asking for nothing            19.7   1.9    0.24
============================================  =====  =====  =====

Asking for nothing, strips of 64 columns take 33 to 40% longer than strips of 256, and two entries
at a time gain at most 3%.

On two threads A @ X takes 6.5, 1.1 and 0.3 ms, A.T @ X 9, 2.1 and 0.4 ms, and the sampled product
with D = 256 9.0, 1.4 and 0.4 ms. Without asking ahead the last two take 31 and 8% longer at density
0.1; adding up four vectors of a sampled product together instead of one by one gains at most 5%.
For A @ x, four sums that do not wait for each other were 6 times slower than the plain loop with
unsigned indices, which LLVM vectorizes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from twell_numba.device import run_ranges, thread_count
from twell_numba.device.jit import jit
from twell_numba.device.vectors import (
    MANY_REGISTERS,
    add_products,
    add_scaled,
    lanes_of,
    load,
    prefetch,
    register_lanes,
    store,
    sum_of,
    zeros,
)
from twell_numba.kernels.checks import contiguous

# Bytes of dense rows that a block of columns points at: half of a second-level cache.
BLOCK_BYTES = 512 * 1024
# Entries a row and block that pay for loading and storing what has been added up so far.
BLOCK_ENTRIES = 8
# Fewest multiply-adds worth a thread of their own (100 us of work: waking one takes about as long).
GRAIN = 5_000_000
# What an entry costs at least, in multiply-adds: that of a product with a vector.
LEAST_COLUMNS = 16
# Rows differ in their entries, so threads that finish early take more.
PARTS_PER_THREAD = 4
# What a row costs beside its entries, in entries.
ROW_COST = 4


@dataclass(frozen=True)
class PackedRows:
    """The entries of a sparse matrix by rows.

    Attributes
    ----------
    values : array of float32 or float64, shape (slots,)
    columns : array of integers, shape (slots,)
        Counted from the segment's first column; ascending in a segment.
    starts, ends : array of int64, shape (M, segments)
        The slots of each segment; others may hold anything.
    segment_width : int
        Columns of a segment.
    shape : tuple of int
        (M, K).
    """

    values: np.ndarray
    columns: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    segment_width: int
    shape: tuple[int, int]

    def entries_of_rows(self) -> np.ndarray:
        """Return the number of entries of each row."""
        return (self.ends - self.starts).sum(axis=1)


def multiply(A: PackedRows, X: np.ndarray, out: np.ndarray) -> None:
    """Overwrite ``out`` with ``A @ X``.

    Parameters
    ----------
    A : PackedRows, shape (M, K)
    X : ndarray, shape (K, N)
        C-contiguous, of the dtype of A's values.
    out : ndarray, shape (M, N)
        C-contiguous, of the same dtype.
    """
    if 0 in A.shape or out.size == 0:
        out[...] = 0
        return
    lengths = A.entries_of_rows()
    arrays = _arrays(A)
    if X.shape[1] == 1:
        vector, total = contiguous(X[:, 0], X.dtype), out[:, 0]
        _run_balanced(
            lambda start, stop: _dot_rows(*arrays, vector, total, start, stop),
            lengths,
            LEAST_COLUMNS,
        )
        return

    def multiply_strips(X: np.ndarray, out: np.ndarray) -> None:
        strips = [
            (_GATHER[registers], column, _block(A, lengths, lanes * X.itemsize))
            for registers, column, lanes in _strips(X.shape[1], X.dtype)
        ]

        def task(start: int, stop: int) -> None:
            for gather, column, block in strips:
                gather(*arrays, X, out, column, block, start, stop)

        _run_balanced(task, lengths, X.shape[1])

    _with_enough_columns(multiply_strips, X, out)


def multiply_transposed(A: PackedRows, X: np.ndarray, out: np.ndarray) -> None:
    """Overwrite ``out`` with ``A.T @ X``.

    Parameters
    ----------
    A : PackedRows, shape (M, K)
    X : ndarray, shape (M, N)
        C-contiguous, of the dtype of A's values.
    out : ndarray, shape (K, N)
        C-contiguous, of the same dtype.
    """
    if 0 in A.shape or out.size == 0:
        out[...] = 0
        return
    lengths = A.entries_of_rows()
    arrays = _arrays(A)
    entries = int(lengths.sum()) + ROW_COST * A.starts.size
    work = entries * max(X.shape[1], LEAST_COLUMNS)
    grain = 1 + GRAIN * A.shape[1] // max(work, 1)
    if X.shape[1] == 1:
        vector, total = contiguous(X[:, 0], X.dtype), out[:, 0]
        run_ranges(
            lambda start, stop: _scatter_vector(*arrays, vector, total, start, stop),
            A.shape[1],
            grain=grain,
        )
        return

    def multiply_strips(X: np.ndarray, out: np.ndarray) -> None:
        strips = [
            (_SCATTER[registers], column, _block(A, lengths, lanes * X.itemsize))
            for registers, column, lanes in _strips(X.shape[1], X.dtype)
        ]

        def task(start: int, stop: int) -> None:
            for scatter, column, block in strips:
                scatter(*arrays, X, out, column, block, start, stop)

        run_ranges(task, A.shape[1], grain=grain, parts_per_thread=2)

    _with_enough_columns(multiply_strips, X, out)


def sample(A: PackedRows, Y: np.ndarray, X: np.ndarray, values: np.ndarray) -> None:
    """Overwrite ``values`` with ``Y[i] . X[j]`` in the slot of every entry (i, j) of A.

    Parameters
    ----------
    A : PackedRows, shape (M, K)
        Its values are not looked at.
    Y, X : ndarray, shape (M, D) and (K, D)
        C-contiguous, of one dtype.
    values : ndarray, shape (slots,)
        Of the same dtype. Other slots than those of entries hold nothing of meaning afterwards.
    """
    if 0 in A.shape or values.size == 0:
        return
    if X.shape[1] == 0:
        values[...] = 0
        return
    lengths = A.entries_of_rows()
    one = register_lanes(Y.dtype)
    Y, X = _padded(Y, one), _padded(X, one)
    kernel = _SAMPLE[4] if Y.shape[1] % (4 * one) == 0 else _SAMPLE[1]
    Y, X = contiguous(Y, Y.dtype), contiguous(X, X.dtype)
    pattern = _arrays(A)[1:]
    block = _block(A, lengths, X.shape[1] * X.itemsize)
    _run_balanced(
        lambda start, stop: kernel(*pattern, Y, X, values, block, start, stop),
        lengths,
        X.shape[1],
    )


# ---- How work is divided


def _arrays(A: PackedRows) -> tuple[Any, ...]:
    arrays = (A.values, A.columns, A.starts, A.ends)
    return (*(contiguous(array, array.dtype) for array in arrays), A.segment_width)


def _run_balanced(task: Callable[[int, int], object], lengths: np.ndarray, columns: int) -> None:
    """Run ``task`` on ranges of rows that have about as many entries each."""
    cost = np.cumsum(lengths + ROW_COST)
    parts = min(lengths.size, int(cost[-1]) * columns // GRAIN, PARTS_PER_THREAD * thread_count())
    if parts <= 1:
        task(0, lengths.size)
        return
    shares = int(cost[-1]) * np.arange(1, parts) // parts
    # A row belongs to the part in which its middle lies.
    middles = cost - (lengths + ROW_COST) // 2
    bounds = [0, *np.searchsorted(middles, shares).tolist(), lengths.size]
    run_ranges(
        lambda first, last: task(bounds[first], bounds[last]),
        parts,
        parts_per_thread=PARTS_PER_THREAD,
    )


def _strips(columns: int, dtype: np.dtype) -> list[tuple[int, int, int]]:
    """Cut columns into strips that fill registers: (registers, first column, columns) of each.

    The last strip may overlap the one before; columns they share are computed twice, alike.
    """
    one = register_lanes(dtype)
    widths = [(registers, registers * one) for registers in _REGISTERS]
    strips, start = [], 0
    while start < columns:
        left = columns - start
        covering = [width for width in widths if left <= width[1] <= columns]
        fitting = [width for width in widths if width[1] <= left]
        registers, lanes = covering[-1] if covering else fitting[0]
        strips.append((registers, min(start, columns - lanes), lanes))
        start += lanes
    return strips


def _with_enough_columns(
    product: Callable[[np.ndarray, np.ndarray], None], X: np.ndarray, out: np.ndarray
) -> None:
    """Call ``product(X, out)``, with zero columns added to both where they fill no register."""
    columns, least = X.shape[1], register_lanes(X.dtype)
    if columns >= least:
        product(contiguous(X, X.dtype), out)
        return
    wide = np.empty((out.shape[0], least), out.dtype)
    product(contiguous(_padded(X, least), X.dtype), wide)
    out[...] = wide[:, :columns]


def _padded(X: np.ndarray, multiple: int) -> np.ndarray:
    """Return ``X`` with zero columns added up to a multiple."""
    columns = X.shape[1]
    if columns % multiple == 0:
        return X
    padded = np.zeros((X.shape[0], columns + multiple - columns % multiple), X.dtype)
    padded[:, :columns] = X
    return padded


def _block(A: PackedRows, lengths: np.ndarray, bytes_of_row: int) -> int:
    """Return how many columns of A to take at a time; all of them where rows have few entries."""
    block = max(BLOCK_BYTES // bytes_of_row, 1)
    entries_per_block = int(lengths.sum()) * block / (A.shape[0] * A.shape[1])
    return block if block < A.shape[1] and entries_per_block >= BLOCK_ENTRIES else A.shape[1]


# ---- Compiled code. One version for each number of registers that a strip of columns fills.
#
# Slots are counted without a sign: an index that may be negative is one that Numba checks for
# counting from the end, and the check keeps LLVM from vectorizing (2.6 instead of 0.42 ms for A @ x
# with 1.7 million entries).

ONE, TWO, THREE, FOUR = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
# Entries between the one in work and the one whose row is asked for.
AHEAD = np.uint64(4)
_REGISTERS = (MANY_REGISTERS, MANY_REGISTERS // 4, 1)


@jit
def _first_from(columns, start, end, wanted):
    """Return the first slot of an ascending segment whose column is not below ``wanted``."""
    while start < end:
        middle = (start + end) // 2
        if np.int64(columns[middle]) < wanted:
            start = middle + 1
        else:
            end = middle
    return start


@jit
def _dot_rows(values, columns, starts, ends, segment_width, x, out, first, last):
    """Compute the numbers ``first`` to ``last`` of A @ x."""
    nothing = x.dtype.type(0)
    for row in range(first, last):
        total = nothing
        for segment in range(starts.shape[1]):
            first_column = segment * segment_width
            for k in range(np.uint64(starts[row, segment]), np.uint64(ends[row, segment])):
                value = values[k]
                product = value * x[np.uint64(first_column + np.int64(columns[k]))]
                total += product if value != 0 else nothing
        out[row] = total


@jit
def _scatter_vector(values, columns, starts, ends, segment_width, x, out, first, last):
    """Compute the numbers ``first`` to ``last`` of A.T @ x."""
    out[first:last] = 0
    for row in range(starts.shape[0]):
        for segment in range(starts.shape[1]):
            first_column = segment * segment_width
            if first_column >= last or first_column + segment_width <= first:
                continue
            begin, end = starts[row, segment], ends[row, segment]
            k = np.uint64(_first_from(columns, begin, end, first - first_column))
            while k < np.uint64(end):
                column = first_column + np.int64(columns[k])
                if column >= last:
                    break
                value = values[k]
                if value != 0:
                    out[np.uint64(column)] += value * x[row]
                k += ONE


def _gather_kernel(registers):
    @jit
    def gather(values, columns, starts, ends, segment_width, X, out, column, block, first, last):
        """Compute ``out[first:last]`` for the strip of its columns that begins at ``column``."""
        slots = np.uint64(columns.size)
        next_slots = starts[first:last].copy()
        for limit in range(block, X.shape[0] + block, block):
            for row in range(first, last):
                is_first = limit == block
                total = zeros(X, registers) if is_first else load(out, row, column, registers)
                for segment in range(starts.shape[1]):
                    first_column = segment * segment_width
                    end = np.uint64(ends[row, segment])
                    k = np.uint64(next_slots[row - first, segment])
                    while k < end:
                        j = first_column + np.int64(columns[k])
                        if j >= limit:
                            break
                        value = values[k]
                        if k + AHEAD < slots:
                            coming = first_column + np.int64(columns[k + AHEAD])
                            prefetch(X, coming, column, registers)
                        if value != 0:
                            total = add_scaled(total, value, load(X, j, column, registers))
                        k += ONE
                    next_slots[row - first, segment] = k
                store(out, row, column, total)

    return gather


def _scatter_kernel(registers):
    @jit
    def scatter(values, columns, starts, ends, segment_width, X, out, column, block, first, last):
        """Compute ``out[first:last]`` of A.T @ X for the strip that begins at ``column``."""
        slots = np.uint64(columns.size)
        nothing = zeros(X, registers)
        for j in range(first, last):
            store(out, j, column, nothing)
        next_slots = np.empty(starts.shape, np.int64)
        for row in range(starts.shape[0]):
            for segment in range(starts.shape[1]):
                begin, end = starts[row, segment], ends[row, segment]
                wanted = first - segment * segment_width
                next_slots[row, segment] = (
                    _first_from(columns, begin, end, wanted) if wanted > 0 else begin
                )
        for block_start in range(first, last, block):
            limit = min(block_start + block, last)
            for row in range(starts.shape[0]):
                x = load(X, row, column, registers)
                for segment in range(starts.shape[1]):
                    first_column = segment * segment_width
                    end = np.uint64(ends[row, segment])
                    k = np.uint64(next_slots[row, segment])
                    while k < end:
                        j = first_column + np.int64(columns[k])
                        if j >= limit:
                            break
                        value = values[k]
                        if k + AHEAD < slots:
                            coming = first_column + np.int64(columns[k + AHEAD])
                            prefetch(out, coming, column, registers)
                        if value != 0:
                            total = load(out, j, column, registers)
                            store(out, j, column, add_scaled(total, value, x))
                        k += ONE
                    next_slots[row, segment] = k

    return scatter


def _sample_kernel(registers):
    @jit
    def sample_rows(columns, starts, ends, segment_width, Y, X, out, block, first, last):
        """Compute the values of the entries in rows ``first`` to ``last``."""
        slots = np.uint64(columns.size)
        next_slots = starts[first:last].copy()
        lanes = lanes_of(X, registers)
        for limit in range(block, X.shape[0] + block, block):
            for row in range(first, last):
                for segment in range(starts.shape[1]):
                    first_column = segment * segment_width
                    end = np.uint64(ends[row, segment])
                    k = np.uint64(next_slots[row - first, segment])
                    # Four entries at a time, which share what is read of Y.
                    while k + THREE < end:
                        k1, k2, k3 = k + ONE, k + TWO, k + THREE
                        j3 = first_column + np.int64(columns[k3])
                        if j3 >= limit:
                            break
                        j0 = first_column + np.int64(columns[k])
                        j1 = first_column + np.int64(columns[k1])
                        j2 = first_column + np.int64(columns[k2])
                        coming = k3 + FOUR if k3 + FOUR < slots else k3
                        n0 = first_column + np.int64(columns[coming - THREE])
                        n1 = first_column + np.int64(columns[coming - TWO])
                        n2 = first_column + np.int64(columns[coming - ONE])
                        n3 = first_column + np.int64(columns[coming])
                        total0, total1 = zeros(X, registers), zeros(X, registers)
                        total2, total3 = zeros(X, registers), zeros(X, registers)
                        for d in range(0, X.shape[1], lanes):
                            y = load(Y, row, d, registers)
                            prefetch(X, n0, d, registers)
                            prefetch(X, n1, d, registers)
                            prefetch(X, n2, d, registers)
                            prefetch(X, n3, d, registers)
                            total0 = add_products(total0, y, load(X, j0, d, registers))
                            total1 = add_products(total1, y, load(X, j1, d, registers))
                            total2 = add_products(total2, y, load(X, j2, d, registers))
                            total3 = add_products(total3, y, load(X, j3, d, registers))
                        out[k], out[k1] = sum_of(total0), sum_of(total1)
                        out[k2], out[k3] = sum_of(total2), sum_of(total3)
                        k = k3 + ONE
                    while k < end:
                        j = first_column + np.int64(columns[k])
                        if j >= limit:
                            break
                        total = zeros(X, registers)
                        for d in range(0, X.shape[1], lanes):
                            total = add_products(
                                total, load(Y, row, d, registers), load(X, j, d, registers)
                            )
                        out[k] = sum_of(total)
                        k += ONE
                    next_slots[row - first, segment] = k

    return sample_rows


_GATHER = {registers: _gather_kernel(registers) for registers in _REGISTERS}
_SCATTER = {registers: _scatter_kernel(registers) for registers in _REGISTERS}
_SAMPLE = {registers: _sample_kernel(registers) for registers in (4, 1)}
