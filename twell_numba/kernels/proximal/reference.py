"""Thresholds in plain NumPy.

The proximal operator of ``amount * sum |w|`` is the soft threshold, and that of the group lasso
``amount * sum over blocks B of sqrt(size of B) ||B||_F`` (Yuan and Lin, 2006) its form for blocks:

    w <- sign(w) max(|w| - amount, 0)
    B <- B max(0, 1 - amount sqrt(size of B) / ||B||_F)
"""

from collections.abc import Sequence

import numpy as np


def soft_threshold(value: np.ndarray, amount: float) -> int:
    """Move every entry towards 0 by ``amount``, in place; return how many are not 0."""
    amount = value.dtype.type(amount)
    value -= np.clip(value, -amount, amount)
    return int(np.count_nonzero(value))


def block_soft_threshold(value: np.ndarray, block_size: int, amount: float) -> int:
    """Shrink every block, in place; return how many elements lie in blocks that are not 0.

    ``value`` (F, D) is cut into blocks from its upper left corner. Those at the lower and right
    edge may be smaller, and count by their own size.
    """
    left = 0
    for top in range(0, value.shape[0], block_size):
        for first in range(0, value.shape[1], block_size):
            block = value[top : top + block_size, first : first + block_size]
            norm = np.sqrt(np.square(block, dtype=np.float64).sum())
            limit = amount * np.sqrt(block.size)
            if norm <= limit:
                block[...] = 0
            else:
                block *= value.dtype.type(1 - limit / norm)
                left += block.size
    return left


def hard_threshold(value: np.ndarray, limit: float) -> int:
    """Set entries with |w| < ``limit`` to 0, in place; return how many are not 0."""
    value[np.abs(value) < value.dtype.type(limit)] = 0
    return int(np.count_nonzero(value))


def largest_magnitude(values: Sequence[np.ndarray], rank: int) -> float:
    """Return the ``rank``-th largest |w| of several arrays taken together; NaN is above all."""
    magnitudes = np.sort(np.abs(np.concatenate([value.ravel() for value in values])))
    return float(magnitudes[-rank])
