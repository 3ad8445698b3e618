"""Thresholds on the CPU: each in one pass over memory, which also counts what is left.

    soft:        w <- sign(w) max(|w| - amount, 0)
    soft, block: B <- B max(0, 1 - amount sqrt(size of B) / ||B||_F)
    hard:        w <- 0 where |w| < limit

The limit that leaves a wanted number of weights is found by the bits of their magnitudes, which are
in the same order as these: 16 bits in each pass, counted.

NaN stays NaN and infinity stays infinity, so that a diverged weight is never hidden. No sum goes
across threads but that of counts, so the bits do not depend on their number.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from twell_numba.device.jit import jit
from twell_numba.device.threads import run_ranges
from twell_numba.kernels.checks import common_float_dtype, float_inputs, require_in_place

# Fewest numbers worth a thread of their own.
GRAIN = 500_000
_DIGIT_BITS = 16


def soft_threshold(value: np.ndarray, amount: float) -> int:
    """Move every entry towards 0 by ``amount``; those that are no larger become exact zeros.

    This is the proximal operator of ``amount * sum |w|``.

    Parameters
    ----------
    value : ndarray
        float32 or float64, C-contiguous, of any shape. Changed in place.
    amount : float
        At least 0; rounded to the array's dtype.

    Returns
    -------
    int
        Entries that are not 0.

    Raises
    ------
    TypeError
        If the dtype is another.
    ValueError
        If the array is not C-contiguous and writable, or the amount not a number of at least 0.
    """
    limit = _checked(value, "amount", amount)
    flat = value.reshape(-1)
    return _summed(lambda start, stop: _soft(flat, limit, start, stop), flat.size, GRAIN)


def block_soft_threshold(value: np.ndarray, block_size: int, amount: float) -> int:
    """Shrink every block of a matrix; blocks of which the mean square is small become exact zeros.

    This is the proximal operator of the group lasso (Yuan and Lin, 2006),
    ``amount * sum over blocks B of sqrt(size of B) ||B||_F``. A block becomes 0 if the root of its
    mean square is at most ``amount``.

    Parameters
    ----------
    value : ndarray, shape (F, D)
        float32 or float64, C-contiguous. Changed in place. It is cut into blocks from its upper
        left corner; those at the lower and right edge may be smaller, and count by their own size.
    block_size : int
        b, at least 1.
    amount : float
        At least 0.

    Returns
    -------
    int
        Elements of the blocks that are not 0.

    Raises
    ------
    TypeError
        If the dtype is another.
    ValueError
        If the array is no matrix, or not C-contiguous and writable; if block_size is less than 1,
        or the amount not a number of at least 0.
    """
    _checked(value, "amount", amount)
    # Not in the array's dtype: where the norm is hardly above the threshold, the factor is a small
    # difference of numbers close to 1, and of a rounded amount it would have few right digits.
    limit = np.float64(amount)
    if value.ndim != 2:
        raise ValueError(f"value of shape {value.shape} given, a matrix (F, D) wanted")
    if block_size < 1:
        raise ValueError(f"block_size {block_size} given, at least 1 wanted")
    rows_of_blocks = -(-value.shape[0] // block_size)
    return _summed(
        lambda start, stop: _soft_blocks(value, block_size, limit, start, stop),
        rows_of_blocks,
        1 + GRAIN // (1 + block_size * value.shape[1]),
    )


def hard_threshold(value: np.ndarray, limit: float) -> int:
    """Set every entry with |w| < ``limit`` to 0 and leave the others as they are.

    Parameters
    ----------
    value : ndarray
        float32 or float64, C-contiguous, of any shape. Changed in place.
    limit : float
        At least 0; rounded to the array's dtype.

    Returns
    -------
    int
        Entries that are not 0.

    Raises
    ------
    TypeError, ValueError
        As :func:`soft_threshold`.
    """
    rounded = _checked(value, "limit", limit)
    flat = value.reshape(-1)
    return _summed(lambda start, stop: _hard(flat, rounded, start, stop), flat.size, GRAIN)


def largest_magnitude(values: Sequence[np.ndarray], rank: int) -> float:
    """Return the ``rank``-th largest |w| of several arrays taken together.

    Parameters
    ----------
    values : sequence of ndarray
        float32 or float64, of any shapes and one dtype.
    rank : int
        From 1, for the largest, to the number of entries.

    Returns
    -------
    float
        NaN is above all others.

    Raises
    ------
    TypeError
        If a dtype is another, or they differ.
    ValueError
        If there is no such rank.
    """
    entries = sum(value.size for value in values)
    if not 1 <= rank <= entries:
        raise ValueError(f"rank {rank} given, 1 to {entries} wanted, the number of entries")
    arrays = float_inputs(**{f"values[{i}]": value for i, value in enumerate(values)})
    unsigned = np.dtype(f"u{arrays[0].itemsize}").type
    flats = [array.reshape(-1).view(unsigned) for array in arrays]
    bits = 8 * arrays[0].itemsize
    found = 0  # the higher bits of the magnitude
    counts = np.empty(1 << _DIGIT_BITS, np.int64)
    for shift in range(bits - _DIGIT_BITS, -1, -_DIGIT_BITS):
        # All bits above the digit but the sign.
        known = (1 << (bits - 1)) - (1 << min(shift + _DIGIT_BITS, bits - 1))
        counts[:] = 0
        for flat in flats:
            _count_digits(flat, unsigned(known), unsigned(found), unsigned(shift), counts)
        above = np.cumsum(counts[::-1])  # entries of this digit or a larger one, from the largest
        place = int(np.searchsorted(above, rank))
        rank -= int(above[place - 1]) if place else 0
        found |= (counts.size - 1 - place) << shift
    return float(unsigned(found).view(arrays[0].dtype))


def hard_thresholds(values: Sequence[np.ndarray], limits: Sequence[float]) -> int:
    """Apply :func:`hard_threshold` to several arrays, with a limit each; return the sum."""
    return sum(hard_threshold(value, limit) for value, limit in zip(values, limits, strict=True))


def largest_magnitudes(values: Sequence[np.ndarray]) -> list[float]:
    """Return the largest |w| of each of several arrays, of which none is empty."""
    return [float(np.abs(value).max()) for value in values]


def cut_alike(values: Sequence[np.ndarray], limits: Sequence[float], excess: int) -> None:
    """Set ``excess`` of those with just the magnitude of a limit to 0, but one of each array.

    Parameters
    ----------
    values : sequence of ndarray
        Changed in place, in order and each from its beginning, until so many are cut.
    limits : sequence of float
        One for each array.
    excess : int
    """
    for value, limit in zip(values, limits, strict=True):
        if excess > 0:
            alike = np.flatnonzero(np.abs(value) == limit)[1 : 1 + excess]
            value.reshape(-1)[alike] = 0
            excess -= alike.size


def count_nonzero(value: np.ndarray) -> int:
    """Return the number of entries that are not 0."""
    return int(np.count_nonzero(value))


def block_mean_squares(value: np.ndarray, block_size: int) -> np.ndarray:
    """Return the mean of the squares of each block.

    Parameters
    ----------
    value : ndarray of float32 or float64, shape (F, D)
    block_size : int
        b.

    Returns
    -------
    ndarray of float64, shape (ceil(F / b), ceil(D / b))
    """
    squares = np.square(value, dtype=np.float64)
    rows, columns = (np.arange(0, size, block_size) for size in squares.shape)
    sums = np.add.reduceat(np.add.reduceat(squares, rows, axis=0), columns, axis=1)
    heights, widths = (
        np.minimum(block_size, size - np.arange(0, size, block_size)) for size in value.shape
    )
    return sums / np.outer(heights, widths)


def set_blocks_to_zero(value: np.ndarray, block_size: int, blocks: np.ndarray) -> None:
    """Set blocks to zero, given by their numbers: row of blocks by row of blocks, from 0."""
    columns_of_blocks = -(-value.shape[1] // block_size)
    for block in blocks:
        top, left = (block_size * number for number in divmod(block, columns_of_blocks))
        value[top : top + block_size, left : left + block_size] = 0


def _checked(value: np.ndarray, name: str, amount: float) -> np.floating:
    """Check what is changed in place, and return the amount in its dtype."""
    dtype = common_float_dtype(value=value)
    require_in_place("value", value, value.shape, dtype)
    if not (amount >= 0 and math.isfinite(amount)):
        raise ValueError(f"{name} {amount} given, a finite number of at least 0 wanted")
    return dtype.type(amount)


def _summed(task: Callable[[int, int], int], count: int, grain: int) -> int:
    counts: list[int] = []
    run_ranges(lambda start, stop: counts.append(task(start, stop)), count, grain=grain)
    return sum(counts)


@jit
def _soft(flat, amount, start, stop):
    left = 0
    part = flat[start:stop]  # a loop from 0 is vectorized
    for i in range(part.size):
        # What is subtracted is never more than w itself, so that the rest is an exact, positive 0.
        shrunk = part[i] - min(max(part[i], -amount), amount)
        part[i] = shrunk
        left += shrunk != 0
    return left


@jit
def _soft_blocks(value, block_size, amount, first, last):
    rows, columns = value.shape
    left = 0
    for block_row in range(first, last):
        part = value[block_row * block_size : min(rows, (block_row + 1) * block_size)]
        for start in range(0, columns, block_size):
            stop = min(columns, start + block_size)
            squares = 0.0
            for row in range(part.shape[0]):
                line = part[row, start:stop]
                for i in range(line.size):
                    number = np.float64(line[i])
                    squares += number * number
            size = part.shape[0] * (stop - start)
            norm = np.sqrt(squares)
            limit = amount * np.sqrt(np.float64(size))
            is_zero = norm <= limit
            factor = value.dtype.type(0.0 if is_zero else 1.0 - limit / norm)
            for row in range(part.shape[0]):
                line = part[row, start:stop]
                for i in range(line.size):
                    # Not times 0: that would leave -0.0 of a negative weight.
                    line[i] = value.dtype.type(0.0) if is_zero else line[i] * factor
            if not is_zero:
                left += size
    return left


@jit
def _hard(flat, limit, start, stop):
    left = 0
    part = flat[start:stop]
    for i in range(part.size):
        kept = flat.dtype.type(0.0) if abs(part[i]) < limit else part[i]
        part[i] = kept
        left += kept != 0
    return left


@jit
def _count_digits(flat, known, found, shift, counts):
    sign = flat.dtype.type(1) << flat.dtype.type(8 * flat.itemsize - 1)
    for i in range(flat.size):
        magnitude = flat[i] & ~sign
        if magnitude & known == found:
            counts[np.int64((magnitude >> shift) & flat.dtype.type(0xFFFF))] += 1
