"""Thresholds on a GPU, and what cuts weights by magnitude there.

    soft:        w <- sign(w) max(|w| - amount, 0)
    soft, block: B <- B max(0, 1 - amount sqrt(size of B) / ||B||_F)
    hard:        w <- 0 where |w| < limit

Bound by memory: each reads and writes every weight once; a warp takes a block of weights. The
limit that leaves a wanted number of weights is found by the bits of their magnitudes, which are in
the same order as these, four in each pass, from the highest: a thread counts 16 digits in its
registers. What a pass needs of the one before stays on the GPU.

NaN stays NaN and infinity stays infinity, so that a diverged weight is never hidden. Sums are over
a number of threads that depends on the sizes alone: the same bits in every run, on every GPU.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from twell_numba.device.gpu import DeviceArray, empty, from_numpy, kernel, require_same_gpu
from twell_numba.device.gpu.language import (
    block_sum,
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
from twell_numba.kernels.cuda_scalars import sum_into
from twell_numba.kernels.cuda_vectors import load_eight, store_eight
from twell_numba.kernels.device_checks import float_arrays
from twell_numba.kernels.twell.cuda_language import block_prefix

# Bits of a magnitude that a pass finds, and how many different digits they make.
DIGIT_BITS = 4
DIGITS = 16
# Blocks that share an array whose digits are counted, at most.
MOST_PARTS = 256


def soft_threshold(value: DeviceArray, amount: float) -> int:
    """Move every entry towards 0 by ``amount``; those that are no larger become exact zeros.

    Parameters
    ----------
    value : DeviceArray of float32 or float64, of any shape
        Changed in place.
    amount : float
        At least 0; rounded to the array's dtype.

    Returns
    -------
    int
        Entries that are not 0; the GPU is waited for.

    Raises
    ------
    TypeError
        If the dtype is another.
    ValueError
        If the amount is not a number of at least 0.
    """
    limit = _checked(value, "amount", amount)
    return int(_thresholds([value], [limit], is_soft=True)[0])


def hard_threshold(value: DeviceArray, limit: float) -> int:
    """Set every entry with |w| < ``limit`` to 0 and leave the others as they are.

    Parameters, result and errors are those of :func:`soft_threshold`.
    """
    rounded = _checked(value, "limit", limit)
    return int(_thresholds([value], [rounded], is_soft=False)[0])


def hard_thresholds(values: Sequence[DeviceArray], limits: Sequence[float]) -> int:
    """Apply :func:`hard_threshold` to several arrays, with a limit each; return the sum."""
    rounded = [_checked(value, "limit", limit) for value, limit in zip(values, limits, strict=True)]
    return int(_thresholds(values, rounded, is_soft=False).sum())


def block_soft_threshold(value: DeviceArray, block_size: int, amount: float) -> int:
    """Shrink every block of a matrix; blocks of which the mean square is small become exact zeros.

    Parameters
    ----------
    value : DeviceArray of float32 or float64, shape (F, D)
        Changed in place. It is cut into blocks from its upper left corner; those at the lower and
        right edge may be smaller, and count by their own size.
    block_size : int
        b, at least 1.
    amount : float
        At least 0.

    Returns
    -------
    int
        Elements of the blocks that are not 0; the GPU is waited for.

    Raises
    ------
    TypeError
        If the dtype is another.
    ValueError
        If the array is no matrix, block_size is less than 1, or the amount not a number of at
        least 0.
    """
    _checked(value, "amount", amount)
    # Not in the array's dtype: where the norm is hardly above the threshold, the factor is a small
    # difference of numbers close to 1, and of a rounded amount it would have few right digits.
    limit = np.float64(amount)
    if value.ndim != 2:
        raise ValueError(f"value of shape {value.shape} given, a matrix (F, D) wanted")
    if block_size < 1:
        raise ValueError(f"block_size {block_size} given, at least 1 wanted")
    blocks = _count_blocks(value, block_size)
    if blocks == 0:
        return 0
    left = empty(blocks, np.float64, value.stream)
    total = empty(1, np.float64, value.stream)
    launched = _soft_blocks.blocks_of_warps(blocks)
    _soft_blocks(launched, value, block_size, limit, left, *value.shape)
    sum_into(left, total)
    return int(total.to_numpy()[0])


def largest_magnitude(values: Sequence[DeviceArray], rank: int) -> float:
    """Return the ``rank``-th largest |w| of several arrays taken together.

    Parameters
    ----------
    values : sequence of DeviceArray of float32 or float64
        Of any shapes, one dtype, and on one GPU.
    rank : int
        From 1, for the largest, to the number of entries.

    Returns
    -------
    float
        NaN is above all others. The GPU is waited for once.

    Raises
    ------
    TypeError
        If a dtype is another, or they differ.
    ValueError
        If there is no such rank, or the arrays are on different GPUs.
    """
    entries = sum(value.size for value in values)
    if not 1 <= rank <= entries:
        raise ValueError(f"rank {rank} given, 1 to {entries} wanted, the number of entries")
    _check_magnitudes(values)
    return float(_select(values, rank)[0])


def largest_magnitudes(values: Sequence[DeviceArray]) -> list[float]:
    """Return the largest |w| of each of several arrays, of which none is empty."""
    _check_magnitudes(values)
    return [float(_select([value], 1)[0]) for value in values]


def cut_alike(values: Sequence[DeviceArray], limits: Sequence[float], excess: int) -> None:
    """Set ``excess`` of those with just the magnitude of a limit to 0, but one of each array.

    Parameters
    ----------
    values : sequence of DeviceArray of float32 or float64
        Changed in place, in order and each from its beginning, until so many are cut.
    limits : sequence of float
        One for each array.
    excess : int
    """
    if excess <= 0:
        return
    stream = values[0].stream
    state = from_numpy(np.array([excess, 0], np.int64), stream)
    for value, limit in zip(values, limits, strict=True):
        rounded = _checked(value, "limit", limit)
        parts, length = _parts_of(value)
        counts = empty(parts, np.int64, stream)
        _count_alike(parts, value, rounded, counts, value.size, length)
        _share_excess(1, counts, state, parts)
        _cut_alike(parts, value, rounded, counts, state, value.size, length)


def count_nonzero(value: DeviceArray) -> int:
    """Return the number of entries that are not 0; the GPU is waited for."""
    return hard_threshold(value, 0.0)


def block_mean_squares(value: DeviceArray, block_size: int) -> np.ndarray:
    """Return the mean of the squares of each block, in the host's memory.

    Parameters
    ----------
    value : DeviceArray of float32 or float64, shape (F, D)
    block_size : int
        b.

    Returns
    -------
    ndarray of float64, shape (ceil(F / b), ceil(D / b))
    """
    _checked(value, "limit", 0.0)
    shape = tuple(-(-size // block_size) for size in value.shape)
    blocks = _count_blocks(value, block_size)
    means = empty(shape, np.float64, value.stream)
    if blocks:
        launched = _mean_squares.blocks_of_warps(blocks)
        _mean_squares(launched, value, block_size, means, *value.shape)
    return means.to_numpy()


def set_blocks_to_zero(value: DeviceArray, block_size: int, blocks: np.ndarray) -> None:
    """Set blocks to zero, given by their numbers: row of blocks by row of blocks, from 0."""
    if blocks.size:
        numbers = from_numpy(np.asarray(blocks, np.int64), value.stream)
        launched = _zero_blocks.blocks_of_warps(blocks.size)
        _zero_blocks(launched, value, block_size, numbers, blocks.size, *value.shape)


def _checked(value: Any, name: str, amount: float) -> np.floating:
    """Check what is changed in place, and return the amount in its dtype."""
    float_arrays(value=value)
    if value.dtype not in (np.float32, np.float64):
        raise TypeError(f"value of dtype {value.dtype} given, float32 or float64 wanted")
    if not (amount >= 0 and math.isfinite(amount)):
        raise ValueError(f"{name} {amount} given, a finite number of at least 0 wanted")
    return value.dtype.type(amount)


def _thresholds(
    values: Sequence[DeviceArray], limits: Sequence[np.floating], *, is_soft: bool
) -> np.ndarray:
    """Return how many entries are left of each array, waiting once."""
    totals = empty(len(values), np.float64, values[0].stream)
    for i, (value, limit) in enumerate(zip(values, limits, strict=True)):
        parts = max(min(_threshold.blocks(-(-value.size // 8)), 2048), 1)
        left = empty(parts, np.float64, value.stream)
        is_aligned = int(value.pointer % 16 == 0)
        _threshold(parts, value, limit, int(is_soft), left, value.size, is_aligned)
        sum_into(left, totals[i : i + 1])
    return totals.to_numpy()


def _check_magnitudes(values: Sequence[DeviceArray]) -> None:
    arrays = {f"values[{i}]": value for i, value in enumerate(values)}
    float_arrays(**arrays)
    for value in values:
        _checked(value, "limit", 0.0)
    require_same_gpu(**arrays)


def _select(values: Sequence[DeviceArray], rank: int) -> np.ndarray:
    """Return the magnitude of a rank, as an array of one number of the arrays' dtype."""
    stream, dtype = values[0].stream, values[0].dtype
    integers = np.dtype(f"i{dtype.itemsize}")
    mask = int(np.iinfo(integers).max)  # all bits but the sign
    bits = [DeviceArray(v.pointer, v.shape, integers, v.stream, v.owner) for v in values]
    parts = [_parts_of(value)[0] for value in values]
    counts = empty((sum(parts), DIGITS), np.int64, stream)
    state = from_numpy(np.array([0, rank], np.int64), stream)
    for shift in range(8 * dtype.itemsize - DIGIT_BITS, -1, -DIGIT_BITS):
        first = 0
        for array, count in zip(bits, parts, strict=True):
            own = counts[first : first + count]
            is_aligned = int(array.pointer % 16 == 0)
            _count_digits(count, array, mask, state, own, array.size, shift, is_aligned)
            first += count
        _choose_digit(1, counts, state, first, shift)
    return state.to_numpy()[:1].astype(integers).view(dtype)


def _parts_of(value: DeviceArray) -> tuple[int, int]:
    """Return in how many parts an array is cut, and their length, a multiple of 8."""
    parts = max(min(_count_digits.blocks(-(-value.size // 8)), MOST_PARTS), 1)
    return parts, -(-value.size // (8 * parts)) * 8


def _count_blocks(value: DeviceArray, block_size: int) -> int:
    rows, columns = value.shape
    return -(-rows // block_size) * -(-columns // block_size)


@device_function
def _moved(w, limit, is_soft):
    if is_soft != 0:
        # What is subtracted is never more than w itself, so that the rest is an exact, positive 0.
        change = w
        if w > limit:
            change = limit
        elif w < -limit:
            change = -limit
        result = w - change
    elif abs(w) < limit:
        result = limit - limit
    else:
        result = w
    return result


@device_function
def _nonzeros(a):
    count = types.int64(0)
    for i in range(8):
        count += types.int64(a[i] != 0)
    return count


@kernel()
def _threshold(value, limit, is_soft, left, size, is_aligned):
    """Write how many entries are left of those that each block has."""
    count = types.int64(0)
    i = global_thread() * 8
    while i < size:
        whole = types.int64(i + 8 <= size) * is_aligned
        w = load_eight(value, 0, i, size, whole)
        w = (
            _moved(w[0], limit, is_soft),
            _moved(w[1], limit, is_soft),
            _moved(w[2], limit, is_soft),
            _moved(w[3], limit, is_soft),
            _moved(w[4], limit, is_soft),
            _moved(w[5], limit, is_soft),
            _moved(w[6], limit, is_soft),
            _moved(w[7], limit, is_soft),
        )
        count += _nonzeros(w)  # what is read past the end is 0, and stays it
        store_eight(value, 0, i, size, w, whole)
        i += grid_threads() * 8
    total = block_sum(count)
    if cuda.threadIdx.x == 0:
        store(left, cuda.blockIdx.x, total)


@device_function
def _warp_squares(value, top, first, height, width, columns):
    """Return the sum of the squares of a block of weights, in float64, to each lane of a warp."""
    squares = types.float64(0)
    for i in range(cuda.threadIdx.x % 32, height * width, 32):
        w = types.float64(load(value, (top + i // width) * columns + first + i % width))
        squares += w * w
    return warp_sum(squares)


@kernel()
def _soft_blocks(value, block_size, amount, left, rows, columns):
    """A warp takes a block of weights."""
    across = (columns + block_size - 1) // block_size
    blocks = (rows + block_size - 1) // block_size * across
    block = global_thread() // 32
    while block < blocks:
        top, first = block // across * block_size, block % across * block_size
        height, width = min(block_size, rows - top), min(block_size, columns - first)
        norm = math.sqrt(_warp_squares(value, top, first, height, width, columns))
        limit = amount * math.sqrt(types.float64(height * width))
        is_zero = norm <= limit
        factor = number(value, 0)
        if not is_zero:
            factor = number(value, 1.0 - limit / norm)
        for i in range(cuda.threadIdx.x % 32, height * width, 32):
            place = (top + i // width) * columns + first + i % width
            w = load(value, place) * factor
            if is_zero:  # not times 0: that would leave -0.0 of a negative weight
                w = factor
            store(value, place, w)
        if cuda.threadIdx.x % 32 == 0:
            store(left, block, types.int64(not is_zero) * height * width)
        block += grid_threads() // 32


@kernel()
def _mean_squares(value, block_size, means, rows, columns):
    """A warp takes a block of weights."""
    across = (columns + block_size - 1) // block_size
    blocks = (rows + block_size - 1) // block_size * across
    block = global_thread() // 32
    while block < blocks:
        top, first = block // across * block_size, block % across * block_size
        height, width = min(block_size, rows - top), min(block_size, columns - first)
        squares = _warp_squares(value, top, first, height, width, columns)
        if cuda.threadIdx.x % 32 == 0:
            store(means, block, squares / types.float64(height * width))
        block += grid_threads() // 32


@kernel()
def _zero_blocks(value, block_size, numbers, count, rows, columns):
    """A warp takes a block of weights."""
    across = (columns + block_size - 1) // block_size
    item = global_thread() // 32
    while item < count:
        block = load(numbers, item)
        top, first = block // across * block_size, block % across * block_size
        height, width = min(block_size, rows - top), min(block_size, columns - first)
        for i in range(cuda.threadIdx.x % 32, height * width, 32):
            store(value, (top + i // width) * columns + first + i % width, 0)
        item += grid_threads() // 32


@kernel()
def _count_digits(bits, mask, state, counts, size, shift, is_aligned):
    """Count the digits at ``shift`` of those magnitudes of which the higher bits are known."""
    digits = cuda.local.array(DIGITS, types.int32)
    for digit in range(DIGITS):
        digits[digit] = 0
    known = (types.int64(load(state, 0)) >> shift) >> DIGIT_BITS
    i = global_thread() * 8
    while i < size:
        whole = types.int64(i + 8 <= size) * is_aligned
        words = load_eight(bits, 0, i, size, whole)
        for n in range(8):
            high = (types.int64(words[n]) & mask) >> shift
            if high >> DIGIT_BITS == known and i + n < size:
                digit = types.int32(high & (DIGITS - 1))
                for other in range(DIGITS):
                    digits[other] += types.int32(digit == other)
        i += grid_threads() * 8
    for digit in range(DIGITS):
        total = block_sum(digits[digit])
        if cuda.threadIdx.x == 0:
            store(counts, cuda.blockIdx.x * DIGITS + digit, total)


@kernel()
def _choose_digit(counts, state, parts, shift):
    """Add the digit of the wanted rank to what is known; the rank is then among its equals."""
    sums = cuda.shared.array(1024, types.int64)
    total = types.int64(0)
    for item in range(cuda.threadIdx.x, parts * DIGITS, cuda.blockDim.x):
        total += load(counts, item)  # a thread's digit is always the same
    sums[cuda.threadIdx.x] = total
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        rank = load(state, 1)
        digit = types.int64(DIGITS)
        count = types.int64(0)
        while digit > 0 and (digit == DIGITS or rank > count):
            if digit < DIGITS:
                rank -= count
            digit -= 1
            count = types.int64(0)
            for thread in range(digit, cuda.blockDim.x, DIGITS):
                count += sums[thread]
        store(state, 0, load(state, 0) | (digit << shift))
        store(state, 1, rank)


@kernel()
def _count_alike(value, limit, counts, size, length):
    """A block counts the entries of just this magnitude in its part."""
    start = cuda.blockIdx.x * length
    count = types.int64(0)
    for i in range(start + cuda.threadIdx.x, min(size, start + length), cuda.blockDim.x):
        count += types.int64(abs(load(value, i)) == limit)
    total = block_sum(count)
    if cuda.threadIdx.x == 0:
        store(counts, cuda.blockIdx.x, total)


@kernel(threads=32)
def _share_excess(counts, state, parts):
    """Replace counts by sums over the parts before; write what may be cut here, and the rest."""
    if cuda.threadIdx.x == 0:
        total = types.int64(0)
        for part in range(parts):
            count = load(counts, part)
            store(counts, part, total)
            total += count
        excess = load(state, 0)
        cut = min(excess, max(total - 1, types.int64(0)))
        store(state, 0, excess - cut)
        store(state, 1, cut)


@kernel()
def _cut_alike(value, limit, counts, state, size, length):
    """Set those to 0, in order, that may be cut; the first of the array stays."""
    start = cuda.blockIdx.x * length
    end = min(size, start + length)
    number_of_first = load(counts, cuda.blockIdx.x)
    cut = load(state, 1)
    while start < end and number_of_first <= cut:
        i = start + cuda.threadIdx.x
        is_alike = types.int64(0)
        if i < end:
            is_alike = types.int64(abs(load(value, i)) == limit)
        before, count = block_prefix(is_alike)
        place = number_of_first + before
        if is_alike != 0 and 1 <= place <= cut:
            store(value, i, 0)
        number_of_first += count
        start += cuda.blockDim.x
