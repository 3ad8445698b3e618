"""Rotary position embedding (Su et al., 2021) in plain NumPy.

A head of width w is cut into two halves (x1, x2), as in Hugging Face's Llama; pair i of a token at
position p is turned by the angle p * base^(-2 i / w):

    y1 = x1 cos - x2 sin
    y2 = x2 cos + x1 sin

The backward pass turns the gradient back, by minus the angle.
"""

import numpy as np
from numpy.typing import DTypeLike


def rotary_tables(
    positions: np.ndarray,
    head_width: int,
    base: float,
    dtype: DTypeLike = np.float32,
    divisors: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosine and sine of every angle, computed in float64.

    Parameters
    ----------
    positions : ndarray of integers, shape (S,)
    head_width : int
        Even.
    base : float
        Of the angles' geometric series: 10000 in most models.
    dtype : dtype
        Of the result.
    divisors : ndarray, shape (head_width / 2,), optional
        What each frequency is divided by, to stretch positions.

    Returns
    -------
    cos, sin : ndarray, shape (S, head_width / 2)

    Raises
    ------
    ValueError
        If the head width is odd, or the base is not positive.
    """
    if head_width < 2 or head_width % 2:
        raise ValueError(f"head width {head_width} given, an even one wanted: halves are rotated")
    if not base > 0:
        raise ValueError(f"rotary base {base} given, a positive one wanted")
    frequencies = float(base) ** (-np.arange(0, head_width, 2, dtype=np.float64) / head_width)
    if divisors is not None:
        frequencies /= divisors
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def rotary(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Return y (B, S, H, w) for x (B, S, H, w) and tables (S, w / 2)."""
    half = x.shape[3] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, None, :], sin[:, None, :]  # the same for every sequence and head
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=3)


def rotary_backward(dy: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Return dx (B, S, H, w)."""
    return rotary(dy, cos, -sin)
