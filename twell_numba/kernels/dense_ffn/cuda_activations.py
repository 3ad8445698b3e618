"""What lies between the products of a dense feedforward layer on a GPU.

    gated:       h = f(g) * u,   dg = dh * u * f'(g),   du = dh * f(g)
    two-matrix:  h = f(u),       du = dh * f'(u)

where dh has grown by ``l1_scale * sign(h)``. Bound by memory; a thread has eight numbers of each
array. An activation is given by its number, which is the same for all threads.
"""

import math

from twell_numba.device.gpu import kernel
from twell_numba.device.gpu.language import (
    device_function,
    global_thread,
    grid_threads,
    load,
    number,
    types,
)
from twell_numba.kernels.activation_functions import RELU2, SILU
from twell_numba.kernels.cuda_vectors import load_eight, store_eight


@device_function
def _evaluate(activation, one, x):
    """Return f(x) and f'(x), where f does not cut off."""
    value, slope = x, one
    if activation == SILU:
        # By the exponential of -|x|, which cannot overflow, s = 1 / (1 + exp(-x)) and 1 - s.
        e = math.exp(-abs(x))
        larger = one / (one + e)
        smaller = e * larger
        s, rest = larger, smaller
        if x < 0:
            s, rest = smaller, larger
        value, slope = x * s, s * (one + x * rest)
    elif activation == RELU2:
        value, slope = x * x, x + x
    return value, slope


@device_function
def _cuts_off(activation, x):
    """Return whether f is 0 here and nothing of the neuron counts; a NaN is not cut off."""
    return activation != SILU and x <= 0


@device_function
def _with_l1(gradient, hidden, scale):
    """Return ``gradient + scale * sign(hidden)``; the sign of NaN is NaN."""
    if scale != 0:
        sign = hidden  # of 0 and NaN
        if hidden > 0:
            sign = scale
        elif hidden < 0:
            sign = -scale
        gradient += sign
    return gradient


@device_function
def _gated(activation, zero, one, g, u):
    value, _ = _evaluate(activation, one, g)
    return zero if _cuts_off(activation, g) else value * u


@device_function
def _gated_backward(activation, zero, one, g, u, d, scale):
    """Return dg and du."""
    value, slope = _evaluate(activation, one, g)
    d = _with_l1(d, value * u, scale)
    of_gate, of_up = d * u * slope, d * value
    if _cuts_off(activation, g):
        of_gate, of_up = zero, zero
    return of_gate, of_up


@device_function
def _plain(activation, zero, one, u):
    value, _ = _evaluate(activation, one, u)
    return zero if _cuts_off(activation, u) else value


@device_function
def _plain_backward(activation, zero, one, u, d, scale):
    value, slope = _evaluate(activation, one, u)
    d = _with_l1(d, value, scale) * slope
    return zero if _cuts_off(activation, u) else d


@kernel()
def activate_gated(activation, gate, up, hidden, size, is_aligned):
    """h = f(g) * u."""
    zero, one = number(gate, 0), number(gate, 1)
    i = global_thread() * 8
    while i < size:
        whole = types.int64(i + 8 <= size) * is_aligned
        g = load_eight(gate, 0, i, size, whole)
        u = load_eight(up, 0, i, size, whole)
        h = (
            _gated(activation, zero, one, g[0], u[0]),
            _gated(activation, zero, one, g[1], u[1]),
            _gated(activation, zero, one, g[2], u[2]),
            _gated(activation, zero, one, g[3], u[3]),
            _gated(activation, zero, one, g[4], u[4]),
            _gated(activation, zero, one, g[5], u[5]),
            _gated(activation, zero, one, g[6], u[6]),
            _gated(activation, zero, one, g[7], u[7]),
        )
        store_eight(hidden, 0, i, size, h, whole)
        i += grid_threads() * 8


@kernel()
def activate_gated_backward(activation, d_hidden, gate, up, l1_scale, d_gate, size, is_aligned):
    """Write d_gate, and overwrite d_hidden with d_up.

    h is computed again, for its sign: reading it would take a sixth more time.
    """
    zero, one = number(gate, 0), number(gate, 1)
    scale = number(gate, load(l1_scale, 0))
    i = global_thread() * 8
    while i < size:
        whole = types.int64(i + 8 <= size) * is_aligned
        g = load_eight(gate, 0, i, size, whole)
        u = load_eight(up, 0, i, size, whole)
        d = load_eight(d_hidden, 0, i, size, whole)
        d0 = _gated_backward(activation, zero, one, g[0], u[0], d[0], scale)
        d1 = _gated_backward(activation, zero, one, g[1], u[1], d[1], scale)
        d2 = _gated_backward(activation, zero, one, g[2], u[2], d[2], scale)
        d3 = _gated_backward(activation, zero, one, g[3], u[3], d[3], scale)
        d4 = _gated_backward(activation, zero, one, g[4], u[4], d[4], scale)
        d5 = _gated_backward(activation, zero, one, g[5], u[5], d[5], scale)
        d6 = _gated_backward(activation, zero, one, g[6], u[6], d[6], scale)
        d7 = _gated_backward(activation, zero, one, g[7], u[7], d[7], scale)
        of_gate = (d0[0], d1[0], d2[0], d3[0], d4[0], d5[0], d6[0], d7[0])
        of_up = (d0[1], d1[1], d2[1], d3[1], d4[1], d5[1], d6[1], d7[1])
        store_eight(d_gate, 0, i, size, of_gate, whole)
        store_eight(d_hidden, 0, i, size, of_up, whole)
        i += grid_threads() * 8


@kernel()
def activate(activation, up, hidden, size, is_aligned):
    """h = f(u)."""
    zero, one = number(up, 0), number(up, 1)
    i = global_thread() * 8
    while i < size:
        whole = types.int64(i + 8 <= size) * is_aligned
        u = load_eight(up, 0, i, size, whole)
        h = (
            _plain(activation, zero, one, u[0]),
            _plain(activation, zero, one, u[1]),
            _plain(activation, zero, one, u[2]),
            _plain(activation, zero, one, u[3]),
            _plain(activation, zero, one, u[4]),
            _plain(activation, zero, one, u[5]),
            _plain(activation, zero, one, u[6]),
            _plain(activation, zero, one, u[7]),
        )
        store_eight(hidden, 0, i, size, h, whole)
        i += grid_threads() * 8


@kernel()
def activate_backward(activation, d_hidden, up, l1_scale, size, is_aligned):
    """Overwrite d_hidden with d_up."""
    zero, one = number(up, 0), number(up, 1)
    scale = number(up, load(l1_scale, 0))
    i = global_thread() * 8
    while i < size:
        whole = types.int64(i + 8 <= size) * is_aligned
        u = load_eight(up, 0, i, size, whole)
        d = load_eight(d_hidden, 0, i, size, whole)
        of_up = (
            _plain_backward(activation, zero, one, u[0], d[0], scale),
            _plain_backward(activation, zero, one, u[1], d[1], scale),
            _plain_backward(activation, zero, one, u[2], d[2], scale),
            _plain_backward(activation, zero, one, u[3], d[3], scale),
            _plain_backward(activation, zero, one, u[4], d[4], scale),
            _plain_backward(activation, zero, one, u[5], d[5], scale),
            _plain_backward(activation, zero, one, u[6], d[6], scale),
            _plain_backward(activation, zero, one, u[7], d[7], scale),
        )
        store_eight(d_hidden, 0, i, size, of_up, whole)
        i += grid_threads() * 8
