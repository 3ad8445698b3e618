"""Rotary position embedding on the CPU.

    y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin
    x, y [B, S, H, w] with halves x1, x2; cos, sin [S, w / 2]

Bound by memory: reads and writes every number once; the tables stay in cache.
"""

import numpy as np

from twell_numba.device.jit import jit
from twell_numba.device.threads import run_ranges
from twell_numba.kernels.checks import float_inputs, require_in_place, require_shape
from twell_numba.kernels.rotary.reference import rotary_tables

__all__ = ["rotary", "rotary_backward", "rotary_tables"]

# Fewest numbers worth a thread of their own (100 us of work: waking a thread takes about as long).
GRAIN = 500_000


def rotary(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, out: np.ndarray | None = None
) -> np.ndarray:
    """Turn each head's halves by the angles of its position.

    Parameters
    ----------
    x : ndarray, shape (B, S, H, w)
        float32 or float64, as all arrays here; w even.
    cos, sin : ndarray, shape (S, w / 2)
        From :func:`rotary_tables`.
    out : ndarray, shape (B, S, H, w), optional
        Of x's dtype, C-contiguous. Overwritten and returned; it may be x itself.

    Returns
    -------
    ndarray, shape (B, S, H, w)

    Raises
    ------
    TypeError
        If the dtypes differ or are not float32 or float64.
    ValueError
        If the shapes do not fit together.
    """
    x, cos, sin = float_inputs(x=x, cos=cos, sin=sin)
    return _turn(x, cos, sin, out)


def rotary_backward(
    dy: np.ndarray, cos: np.ndarray, sin: np.ndarray, out: np.ndarray | None = None
) -> np.ndarray:
    """Return the gradient dx of :func:`rotary`: dy turned back.

    Parameters and errors are those of :func:`rotary`.
    """
    dy, cos, sin = float_inputs(dy=dy, cos=cos, sin=sin)
    negative_sin = np.negative(sin)
    negative_sin.flags.writeable = False
    return _turn(dy, cos, negative_sin, out)


def _turn(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    require_shape("x", x, ("B", "S", "H", "w"))
    batch, length, heads, width = x.shape
    if width % 2:
        raise ValueError(f"head width {width} given, an even one wanted: halves are rotated")
    require_shape("cos", cos, (length, width // 2))
    require_shape("sin", sin, (length, width // 2))
    if out is None:
        y = np.empty_like(x)
    else:
        require_in_place("out", out, x.shape, x.dtype)
        y = out
    run_ranges(
        lambda start, stop: _turn_tokens(x, cos, sin, y, start, stop),
        batch * length,
        grain=1 + GRAIN // max(heads * width, 1),
    )
    return y


@jit
def _turn_tokens(x, cos, sin, y, start, stop):
    _, length, heads, width = x.shape
    half = width // 2
    for token in range(start, stop):
        b, s = divmod(token, length)
        for h in range(heads):
            for i in range(half):
                first = x[b, s, h, i]
                second = x[b, s, h, half + i]
                y[b, s, h, i] = first * cos[s, i] - second * sin[s, i]
                y[b, s, h, half + i] = second * cos[s, i] + first * sin[s, i]
