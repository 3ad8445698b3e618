"""What strips of tokens of every weight-sparse family go through between two sparse products.

A strip holds tokens side by side, [rows, tokens]: g, u, h of one neuron or of a block of them.
"""

import numpy as np

from twell_numba.device.jit import jit
from twell_numba.kernels.transpose.cpu import copy_transposed


@jit(forceinline=True)
def load_strip(x, start, tokens, strip):
    """Fill ``strip`` (D, width) with tokens of x, and with zeros after them."""
    copy_transposed(x[start : start + tokens], strip, 0, x.shape[1])
    if tokens < strip.shape[1]:
        strip[:, tokens:] = 0


@jit(forceinline=True)
def any_fires(g, rows):
    """Return whether a number of the first rows is above 0, or NaN."""
    zero = g.dtype.type(0)
    fires = False
    for i in range(rows):
        for m in range(g.shape[1]):
            fires |= not (g[i, m] <= zero)
    return fires


@jit(forceinline=True)
def gated_relu(g, u, h, row):
    """Write a row of relu(g) * u to ``h``, another array; return its nonzeros and sum of |h|."""
    zero = g.dtype.type(0)
    count, total = 0, zero
    for m in range(g.shape[1]):
        hidden = zero if g[row, m] <= zero else g[row, m] * u[row, m]
        h[row, m] = hidden
        count += hidden != zero
        total += abs(hidden)
    return count, np.float64(total)


@jit(forceinline=True)
def relu(g, h, row):
    """Write a row of relu(g) to ``h``, another array; return its nonzeros and their sum."""
    zero = g.dtype.type(0)
    count, total = 0, zero
    for m in range(g.shape[1]):
        hidden = zero if g[row, m] <= zero else g[row, m]
        h[row, m] = hidden
        count += hidden != zero
        total += hidden
    return count, np.float64(total)


@jit(forceinline=True)
def gated_relu_backward(dh, g, u, h, row, l1_scale):
    """Overwrite a row of g with dg and of u with du."""
    zero = g.dtype.type(0)
    for m in range(g.shape[1]):
        d = dh[row, m] + l1_scale * np.sign(h[row, m])
        fires = not (g[row, m] <= zero)
        d_gate = d * u[row, m] if fires else zero
        u[row, m] = d * g[row, m] if fires else zero
        g[row, m] = d_gate


@jit(forceinline=True)
def relu_backward(dh, g, row, l1_scale):
    """Overwrite a row of g with dg."""
    zero = g.dtype.type(0)
    for m in range(g.shape[1]):
        g[row, m] = zero if g[row, m] <= zero else dh[row, m] + l1_scale
