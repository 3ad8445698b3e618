"""Rows of a table by token, on a GPU.

    x_m = table[token_m]            tokens [M], table [V, D], x [M, D]
    dtable[token_m] += dx_m

A token that is out of range, and was on the GPU already so that nobody looked at it, gives a row of
NaN in x; its gradient is added nowhere.

Bound by memory: every number of x or dx is moved once, the rows of dtable that get something are
read and written once.

Backward without atomics, so that every sum runs in the order of m: the same bits every run. First
the m are sorted by token: each block looks at all tokens, a warp of it at a share of them. First it
counts those of its own range of SPAN tokens, each by itself, and those before the range; then it
knows where each belongs, and looks a second time. Then a warp adds up the rows of dx of CHUNK
entries of that list, 256 columns of them. Runs of one token inside a chunk are added to dtable
right away; sums of parts of longer runs are put aside, and added in order by the warp of the chunk
where the run began.
"""

import math

import numpy as np

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import (
    cuda,
    device_function,
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
)
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.cuda_vectors import (
    add_eight,
    add_scaled,
    eight_zeros,
    load_eight,
    store_eight,
)
from twell_numba.kernels.device_checks import (
    arithmetic_dtype,
    float_array,
    float_arrays,
    index_array,
    rows_are_aligned,
)
from twell_numba.kernels.twell.cuda_language import ballot, bits_below, block_prefix, count_bits

# Tokens of a block that sorts: their number, a power of two, and its bits.
SPAN = 256
SPAN_BITS = 8
SORT_THREADS = 1024
COUNTERS = SORT_THREADS // 32 * SPAN
# Entries of the list of which one warp adds the rows.
CHUNK = 32


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
    blocks, is_aligned = _take.blocks_of_warps(rows), rows_are_aligned(table, x)
    _take(blocks, table, tokens, x, rows, vocabulary, width, is_aligned)
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
    if dx.size == 0 or vocabulary == 0:
        return
    keys, entries = (empty(rows, np.int32, dx.stream) for _ in range(2))
    _sort(-(-(vocabulary + 1) // SPAN), tokens, keys, entries, rows, vocabulary)
    chunks = -(-rows // CHUNK)
    groups = -(-width // 256)
    partial = empty((chunks, 2, width), sums, dx.stream)
    is_aligned = rows_are_aligned(dx, dtable)
    blocks = _add_runs.blocks_of_warps(chunks * groups)
    sizes = (rows, vocabulary, width, is_aligned)
    _add_runs(blocks, dx, keys, entries, dtable, partial, *sizes)
    _add_long_runs(blocks, keys, partial, dtable, *sizes)


@kernel()
def _take(table, tokens, x, rows, vocabulary, width, is_aligned):
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        token = types.int64(load(tokens, row))
        d = lane * 8
        while d < width:
            numbers = _eight_of_nothing(table)
            if 0 <= token < vocabulary:
                numbers = load_eight(table, token * width, d, width, is_aligned)
            store_eight(x, row * width, d, width, numbers, is_aligned)
            d += 256
        row += grid_threads() // 32


@device_function
def _eight_of_nothing(matrix):
    nan = number(matrix, math.nan)
    return (nan, nan, nan, nan, nan, nan, nan, nan)


@device_function
def _key(tokens, row, rows, vocabulary):
    """Return a row's token; V for one out of range, V + 1 past the last row."""
    key = types.int64(vocabulary + 1)
    if row < rows:
        key = types.int64(load(tokens, row))
        if key < 0 or key >= vocabulary:
            key = types.int64(vocabulary)
    return key


@device_function
def _lanes_alike(digit, is_own):
    """Return which of the lanes with ``is_own`` have this lane's digit, as bits of a word."""
    alike = types.int64(ballot(types.int32(is_own)))
    for bit in range(SPAN_BITS):
        is_set = (digit >> bit) & 1
        lanes = types.int64(ballot(types.int32(is_set)))
        alike &= lanes if is_set != 0 else ~lanes
    return alike


@kernel(threads=SORT_THREADS)
def _sort(tokens, keys, entries, rows, vocabulary):
    """Write the rows' numbers to ``entries``, sorted by key, then by number; and their keys.

    A block takes the SPAN keys of its range, a warp of it a share of the rows.
    """
    places = cuda.shared.array(COUNTERS, types.int32)  # by warp and key; first, how many there are
    before_counts = cuda.shared.array(32, types.int64)
    low = cuda.blockIdx.x * types.int64(SPAN)
    thread = types.int64(cuda.threadIdx.x)
    lane, warp = thread % 32, thread // 32
    warps = types.int64(cuda.blockDim.x // 32)
    share = (rows + 32 * warps - 1) // (32 * warps) * 32
    first = min(rows, warp * share)
    end = min(rows, first + share)
    for i in range(thread, warps * SPAN, cuda.blockDim.x):
        places[i] = 0
    cuda.syncthreads()
    before = types.int64(0)
    row = first + lane
    while row - lane < end:
        key = _key(tokens, row, end, vocabulary)
        before += count_bits(ballot(types.int32(key < low)))
        is_own = low <= key < low + SPAN and row < end
        if ballot(types.int32(is_own)) != 0:
            alike = _lanes_alike(key - low, is_own)
            if is_own and alike & bits_below(lane) == 0:
                places[warp * SPAN + key - low] += count_bits(alike)
            cuda.syncwarp()
        row += 32
    if lane == 0:
        before_counts[warp] = before
    cuda.syncthreads()
    start = types.int64(0)
    for other in range(warps):
        start += before_counts[other]
    # A thread takes a key: of the numbers of its rows, warp by warp, it makes places.
    key_share = (SPAN + cuda.blockDim.x - 1) // cuda.blockDim.x
    first_digit = min(types.int64(SPAN), thread * key_share)
    end_digit = min(types.int64(SPAN), first_digit + key_share)
    own = types.int64(0)
    for digit in range(first_digit, end_digit):
        for other in range(warps):
            own += places[other * SPAN + digit]
    place = start + block_prefix(own)[0]
    for digit in range(first_digit, end_digit):
        for other in range(warps):
            count = types.int64(places[other * SPAN + digit])
            places[other * SPAN + digit] = place
            place += count
    cuda.syncthreads()
    row = first + lane
    while row - lane < end:
        key = _key(tokens, row, end, vocabulary)
        is_own = low <= key < low + SPAN and row < end
        if ballot(types.int32(is_own)) != 0:
            alike = _lanes_alike(key - low, is_own)
            earlier = alike & bits_below(lane)
            if is_own:
                place = types.int64(places[warp * SPAN + key - low]) + count_bits(earlier)
                store(entries, place, row)
                store(keys, place, key)
            cuda.syncwarp()
            if is_own and earlier == 0:
                places[warp * SPAN + key - low] += count_bits(alike)
            cuda.syncwarp()
        row += 32


@kernel()
def _add_runs(dx, keys, entries, dtable, partial, rows, vocabulary, width, is_aligned):
    """A warp takes 256 columns of the rows of a chunk of the list."""
    groups = (width + 255) // 256
    item = global_thread() // 32
    first = item // groups * CHUNK
    d = item % groups * 256 + global_thread() % 32 * 8
    if first < rows:
        end = min(rows, first + CHUNK)
        before = types.int64(-1)
        if first > 0:
            before = types.int64(load(keys, first - 1))
        key = types.int64(load(keys, first))
        is_new = key != before
        sums = eight_zeros(partial)
        for i in range(first, end):
            row = types.int64(load(entries, i))
            following = types.int64(-1)
            if i + 1 < rows:
                following = types.int64(load(keys, i + 1))
            numbers = load_eight(dx, row * width, d, width, is_aligned)
            sums = add_scaled(sums, number(partial, 1), numbers)
            if following != key or i + 1 == end:
                if is_new and following != key:
                    if key < vocabulary:
                        add_eight(dtable, key * width, d, width, sums, is_aligned)
                else:
                    place = first // CHUNK * 2 + types.int64(is_new)
                    store_eight(partial, place * width, d, width, sums, is_aligned)
                sums = eight_zeros(partial)
                is_new = True
                key = following


@kernel()
def _add_long_runs(keys, partial, dtable, rows, vocabulary, width, is_aligned):
    """A warp takes 256 columns of the run that begins in a chunk and goes on after it."""
    groups = (width + 255) // 256
    item = global_thread() // 32
    first = item // groups * CHUNK
    d = item % groups * 256 + global_thread() % 32 * 8
    end = first + CHUNK
    if end < rows:
        key = types.int64(load(keys, end - 1))
        begins_here = first == 0 or types.int64(load(keys, first - 1)) != key
        if begins_here and key < vocabulary and types.int64(load(keys, end)) == key:
            place = (first // CHUNK * 2 + 1) * width
            sums = load_eight(partial, place, d, width, is_aligned)
            while end < rows and types.int64(load(keys, end)) == key:
                place = end // CHUNK * 2 * width
                numbers = load_eight(partial, place, d, width, is_aligned)
                sums = add_scaled(sums, number(partial, 1), numbers)
                end += CHUNK
            add_eight(dtable, key * width, d, width, sums, is_aligned)
