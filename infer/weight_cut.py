"""What of the weights is left: counting it, and cutting the smallest off.

They go one by one, or in b x b blocks, cut from the upper left corner; blocks at the lower and
right edge are smaller. A block's magnitude is the root of its mean square. With blocks of other
weights it is compared relative to that of its whole weight. Single weights are compared as they
are: of these, the largest of any weight count, while averages over a block say more about the
weight that it is in than about the block, and would leave some weights with hardly any.

Weights on a GPU stay there; of theirs, magnitudes of blocks come to the host, and are sorted here.
"""

import math
from collections.abc import Sequence

import numpy as np

from twell_numba.device.arrays import Array, is_on_gpu, to_host
from twell_numba.kernels.proximal import (
    block_mean_squares,
    count_nonzero,
    cut_alike,
    hard_threshold,
    hard_thresholds,
    largest_magnitude,
    largest_magnitudes,
    set_blocks_to_zero,
)
from twell_numba.layers.ffn import stored_in_blocks


def entries_left(value: Array, block_size: int) -> int:
    """Return the number of elements that lie in blocks that are not zero.

    Parameters
    ----------
    value : array, shape (F, D)
    block_size : int
        b; 1 for single weights.
    """
    if block_size == 1:
        return count_nonzero(value)
    if is_on_gpu(value):
        is_left = block_mean_squares(value, block_size) != 0
        return int(_block_sizes(value, block_size)[is_left].sum())
    return stored_in_blocks(value, block_size)


def magnitudes(value: Array, block_size: int) -> np.ndarray:
    """Return the magnitude of each block: the root of its mean square.

    Parameters
    ----------
    value : array, shape (F, D)
    block_size : int
        b; 1 for single weights.

    Returns
    -------
    ndarray, shape (ceil(F / b), ceil(D / b))
    """
    if block_size == 1:
        return np.abs(to_host(value))
    return np.sqrt(block_mean_squares(value, block_size))


def cut_below(value: Array, block_size: int, limit: float) -> int:
    """Set every block of a smaller magnitude than ``limit`` to zero.

    Parameters
    ----------
    value : array, shape (F, D)
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
    set_blocks_to_zero(value, block_size, np.flatnonzero(is_cut & (of_blocks > 0)))
    return int(_block_sizes(value, block_size)[~is_cut & (of_blocks != 0)].sum())


def cut_to_density(values: Sequence[Array], block_size: int, density: float) -> None:
    """Set the smallest blocks of several weights to zero, until no more than a part is left.

    Weights are compared with one another, so that each keeps what counts most in all of them; but
    the largest block of each is left, as without any a layer would do nothing and learn nothing.

    Parameters
    ----------
    values : sequence of array, shape (F, D)
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
        _cut_weights(list(values), limit)
    else:
        _cut_blocks(values, block_size, limit)


def _cut_weights(values: list[Array], count: int) -> None:
    largest = largest_magnitudes(values)
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
    left = hard_thresholds(values, limits)
    cut_alike(values, limits, left - count)


def _cut_blocks(values: Sequence[Array], block_size: int, limit: int) -> None:
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
        set_blocks_to_zero(value, block_size, np.flatnonzero(cut & (magnitude > 0)))


def _relative_magnitudes(value: Array, block_size: int) -> np.ndarray:
    """Return the magnitude of each block over its weight's, shape (ceil(F / b), ceil(D / b))."""
    means = block_mean_squares(value, block_size)
    sizes = _block_sizes(value, block_size)
    return np.sqrt(means / ((means * sizes).sum() / sizes.sum()))


def _block_sizes(value: Array, block_size: int) -> np.ndarray:
    """Return the number of elements of each block, shape (ceil(F / b), ceil(D / b))."""
    heights, widths = (
        np.minimum(block_size, size - np.arange(0, size, block_size)) for size in value.shape
    )
    return np.outer(heights, widths)
