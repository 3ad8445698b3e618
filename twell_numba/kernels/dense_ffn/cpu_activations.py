"""What lies between the products of a dense feedforward layer, compiled.

    gated:       h = f(g) * u,   dg = dh * u * f'(g),   du = dh * f(g)
    two-matrix:  h = f(u),       du = dh * f'(u)

where dh has grown by ``l1_scale * sign(h)``. Arrays are (M, F), of which the forward functions take
the columns ``start`` to ``stop``; an activation is given by its number. Each loop is one that LLVM
vectorizes: it must run from 0, since an index that could be negative counts from the end.
"""

import numpy as np

from twell_numba.device.exponential import exponential
from twell_numba.device.jit import jit
from twell_numba.kernels.activation_functions import RELU, RELU2


@jit
def activate_gated(activation, gate, up, hidden, start, stop):
    """h = f(g) * u."""
    zero = gate.dtype.type(0)
    for m in range(gate.shape[0]):
        g, u, h = gate[m, start:stop], up[m, start:stop], hidden[m, start:stop]
        if activation == RELU:
            for j in range(h.shape[0]):
                h[j] = zero if g[j] <= zero else g[j] * u[j]
        elif activation == RELU2:
            for j in range(h.shape[0]):
                h[j] = zero if g[j] <= zero else g[j] * g[j] * u[j]
        else:
            for j in range(h.shape[0]):
                value, _ = _silu(g[j])
                h[j] = value * u[j]


@jit
def activate_gated_backward(activation, d_hidden, gate, up, hidden, l1_scale, d_gate):
    """Write d_gate, and overwrite d_hidden with d_up."""
    zero = gate.dtype.type(0)
    for m in range(gate.shape[0]):
        if activation == RELU:
            for j in range(gate.shape[1]):
                g = gate[m, j]
                d = d_hidden[m, j] + l1_scale * np.sign(hidden[m, j])
                d_gate[m, j] = zero if g <= zero else d * up[m, j]
                d_hidden[m, j] = zero if g <= zero else d * g
        elif activation == RELU2:
            for j in range(gate.shape[1]):
                g = gate[m, j]
                d = d_hidden[m, j] + l1_scale * np.sign(hidden[m, j])
                d_gate[m, j] = zero if g <= zero else d * up[m, j] * (g + g)
                d_hidden[m, j] = zero if g <= zero else d * (g * g)
        else:
            for j in range(gate.shape[1]):
                value, slope = _silu(gate[m, j])
                d = d_hidden[m, j] + l1_scale * np.sign(hidden[m, j])
                d_gate[m, j] = d * up[m, j] * slope
                d_hidden[m, j] = d * value


@jit
def activate(activation, up, hidden, start, stop):
    """h = f(u)."""
    zero = up.dtype.type(0)
    for m in range(up.shape[0]):
        u, h = up[m, start:stop], hidden[m, start:stop]
        if activation == RELU:
            for j in range(h.shape[0]):
                h[j] = zero if u[j] <= zero else u[j]
        elif activation == RELU2:
            for j in range(h.shape[0]):
                h[j] = zero if u[j] <= zero else u[j] * u[j]
        else:
            for j in range(h.shape[0]):
                value, _ = _silu(u[j])
                h[j] = value


@jit
def activate_backward(activation, d_hidden, up, hidden, l1_scale):
    """Overwrite d_hidden with d_up."""
    zero = up.dtype.type(0)
    for m in range(up.shape[0]):
        if activation == RELU:
            for j in range(up.shape[1]):
                d = d_hidden[m, j] + l1_scale * np.sign(hidden[m, j])
                d_hidden[m, j] = zero if up[m, j] <= zero else d
        elif activation == RELU2:
            for j in range(up.shape[1]):
                u = up[m, j]
                d = d_hidden[m, j] + l1_scale * np.sign(hidden[m, j])
                d_hidden[m, j] = zero if u <= zero else d * (u + u)
        else:
            for j in range(up.shape[1]):
                _, slope = _silu(up[m, j])
                d = d_hidden[m, j] + l1_scale * np.sign(hidden[m, j])
                d_hidden[m, j] = d * slope


@jit
def _silu(x):
    """Return x s and its derivative, s + x s (1 - s), for s = 1 / (1 + exp(-x)).

    With the exponential of -|x|, which cannot overflow, neither s nor 1 - s is a difference of
    numbers close to each other.
    """
    one = type(x)(1)
    e = exponential(-abs(x))
    larger = one / (one + e)
    smaller = e * larger
    s = larger if x >= 0 else smaller
    rest = smaller if x >= 0 else larger
    return x * s, s * (one + x * rest)
