"""What of the weights is left: counting it, and cutting the smallest off.

They go one by one, or in b x b blocks, cut from the upper left corner; blocks at the lower and
right edge are smaller. A block's magnitude is the root of its mean square. With blocks of other
weights it is compared relative to that of its whole weight. Single weights are compared as they
are: of these, the largest of any weight count, while averages over a block say more about the
weight that it is in than about the block, and would leave some weights with hardly any.
"""

import math
from collections.abc import Sequence

import numpy as np

from twell_numba.kernels.proximal import hard_threshold, largest_magnitude
from twell_numba.layers.ffn import stored_in_blocks


def entries_left(value: np.ndarray, block_size: int) -> int:
    """Return the number of elements that lie in blocks that are not zero.

    Parameters
    ----------
    value : ndarray, shape (F, D)
    block_size : int
        b; 1 for single weights.
    """
    if block_size == 1:
        return int(np.count_nonzero(value))
    return stored_in_blocks(value, block_size)


def magnitudes(value: np.ndarray, block_size: int) -> np.ndarray:
    """Return the magnitude of each block: the root of its mean square.

    Parameters
    ----------
    value : ndarray, shape (F, D)
    block_size : int
        b; 1 for single weights.

    Returns
    -------
    ndarray, shape (ceil(F / b), ceil(D / b))
    """
    if block_size == 1:
        return np.abs(value)
    return np.sqrt(_block_means(np.square(value, dtype=np.float64), block_size))


def cut_below(value: np.ndarray, block_size: int, limit: float) -> int:
    """Set every block of a smaller magnitude than ``limit`` to zero.

    Parameters
    ----------
    value : ndarray, shape (F, D)
        Changed in place. A block with numbers that are not finite stays.
    block_size : int
        b; 1 for single weights.
    limit : float
        At least 0.

    Returns
    -------
    int
        Elements of the blocks that are not zero.
    """
    if block_size == 1:
        return hard_threshold(value, limit)
    of_blocks = magnitudes(value, block_size)
    is_cut = of_blocks < limit
    _set_blocks_to_zero(value, block_size, np.flatnonzero(is_cut & (of_blocks > 0)))
    return int(_block_sizes(value, block_size)[~is_cut & (of_blocks != 0)].sum())


def cut_to_density(values: Sequence[np.ndarray], block_size: int, density: float) -> None:
    """Set the smallest blocks of several weights to zero, until no more than a part is left.

    Weights are compared with one another, so that each keeps what counts most in all of them; but
    the largest block of each is left, as without any a layer would do nothing and learn nothing.

    Parameters
    ----------
    values : sequence of ndarray, shape (F, D)
        Changed in place, where more than that is left; none of them all zeros. Numbers that are not
        finite stay.
    block_size : int
        b; 1 for single weights.
    density : float
        Fraction of the elements of all weights together that may be left, to the next whole
        number; enough for a block of each.
    """
    limit = round(density * sum(value.size for value in values))
    if sum(entries_left(value, block_size) for value in values) <= limit:
        return
    if block_size == 1:
        _cut_weights(values, limit)
    else:
        _cut_blocks(values, block_size, limit)


def _cut_weights(values: Sequence[np.ndarray], count: int) -> None:
    largest = [float(np.abs(value).max()) for value in values]
    rank = count
    while True:
        limit = largest_magnitude(values, rank)
        below = sum(own < limit for own in largest)  # of each of these, the largest is left too
        if rank + below <= count:
            break
        rank = count - below
    if not math.isfinite(limit):
        return
    limits = [min(limit, own) for own in largest]
    left = sum(hard_threshold(value, own) for value, own in zip(values, limits, strict=True))
    _cut_alike(values, limits, left - count)


def _cut_alike(values: Sequence[np.ndarray], limits: Sequence[float], excess: int) -> None:
    """Set as many of those that are just as large as the limit to zero, but one of each weight."""
    for value, limit in zip(values, limits, strict=True):
        if excess > 0:
            alike = np.flatnonzero(np.abs(value) == limit)[1 : 1 + excess]
            value.reshape(-1)[alike] = 0
            excess -= alike.size


def _cut_blocks(values: Sequence[np.ndarray], block_size: int, limit: int) -> None:
    relative = [_relative_magnitudes(value, block_size).ravel() for value in values]
    if not all(np.isfinite(magnitude).all() for magnitude in relative):
        return
    for magnitude in relative:
        magnitude[magnitude.argmax()] = np.inf
    sizes = np.concatenate([_block_sizes(value, block_size).ravel() for value in values])
    order = np.argsort(-np.concatenate(relative), kind="stable")
    is_cut = np.empty(order.size, np.bool_)
    is_cut[order] = np.cumsum(sizes[order]) > limit
    ends = np.cumsum([magnitude.size for magnitude in relative])[:-1]
    for value, cut, magnitude in zip(values, np.split(is_cut, ends), relative, strict=True):
        _set_blocks_to_zero(value, block_size, np.flatnonzero(cut & (magnitude > 0)))


def _set_blocks_to_zero(value: np.ndarray, block_size: int, blocks: np.ndarray) -> None:
    """Set blocks to zero, given by their numbers: row of blocks by row of blocks, from 0."""
    columns_of_blocks = -(-value.shape[1] // block_size)
    for block in blocks:
        top, left = (block_size * number for number in divmod(block, columns_of_blocks))
        value[top : top + block_size, left : left + block_size] = 0


def _relative_magnitudes(value: np.ndarray, block_size: int) -> np.ndarray:
    """Return the magnitude of each block over its weight's, shape (ceil(F / b), ceil(D / b))."""
    squares = np.square(value, dtype=np.float64)
    return np.sqrt(_block_means(squares, block_size) / squares.mean())


def _block_means(squares: np.ndarray, block_size: int) -> np.ndarray:
    """Return the mean of each block, shape (ceil(F / b), ceil(D / b))."""
    rows, columns = (np.arange(0, size, block_size) for size in squares.shape)
    sums = np.add.reduceat(np.add.reduceat(squares, rows, axis=0), columns, axis=1)
    return sums / _block_sizes(squares, block_size)


def _block_sizes(value: np.ndarray, block_size: int) -> np.ndarray:
    """Return the number of elements of each block, shape (ceil(F / b), ceil(D / b))."""
    heights, widths = (
        np.minimum(block_size, size - np.arange(0, size, block_size)) for size in value.shape
    )
    return np.outer(heights, widths)
