"""Feedforward layers with CSR weights, compiled: one strip of tokens through all neurons.

Gated:       g = x Wg^T,  u = x Wu^T,  h = relu(g) * u,  y = h Wd
Two-matrix:  h = relu(x Wu^T),  y = h Wd

with x, y (M, D) and sparse weights (F, D). A strip of tokens is transposed, [D, tokens], so that
an entry (j, d) of a weight multiplies a row of it: the strip's tokens lie side by side in vector
registers. A neuron's g, u and h stay in registers and the first-level cache, and h is added to the
rows of y's strip at once. Nothing of size M x F exists.

Bound by the second-level cache: an entry moves a strip's row (512 bytes of float32) in for one
multiply-add a number, and out again where it is added to. Milliseconds for M 1024, D 512, F 2048,
float32, gated, half of the neurons firing, on 2 cores of an AMD EPYC (Zen 5), by the vector
registers that a strip of tokens fills and the weights stored. Dense layers take 28 forward, 83 with
backward (AVX2 BLAS).

=========  ===========  ============  ============  =============
registers  forward, 1%  backward, 1%  forward, 10%  backward, 10%
=========  ===========  ============  ============  =============
1          1.5          3.4           9.5           22.7
2          2.0          3.3           6.1           15.6
4          1.3          2.2           6.4           13.0
8 (taken)  0.85         1.8           4.9           11.8
16         0.88         2.2           5.4           13.0
=========  ===========  ============  ============  =============

Where a neuron fires for few tokens of a strip, the registers of 16 tokens in which it does not are
skipped: at 1% of the weights and 1.6% of h, 0.60 and 1.3 ms. (Keeping g and u for the backward pass
instead of computing them again would write and read 16 MB.)

One token alone is a vector, which entries pick numbers from, about 1.5 cycles an entry. Tried, in
microseconds for one of three matrices at 1%, 10,400 entries: row by row 4.4; two entries at a time
3.6 (taken); rows sorted by length 6.0; 16 rows at a time, sorted and padded 4.4; all products by
gathering 16 numbers, then sums of rows 6.8.
"""

import numpy as np

from twell_numba.device.jit import jit, literally
from twell_numba.device.vectors import (
    add_products,
    add_scaled,
    any_positive,
    lanes_of,
    load,
    store,
    sum_of,
    zeros,
)
from twell_numba.kernels.sparse_ffn.rows import (
    gated_relu,
    gated_relu_backward,
    load_strip,
    relu,
    relu_backward,
)
from twell_numba.kernels.transpose.cpu import copy_transposed

ONE, TWO = np.uint64(1), np.uint64(2)
# One token: skip neurons that do not fire where at most one in so many does.
FEW = 8


def forward_kernel(registers, gated):
    """Return the compiled forward pass over strips of as many tokens as so many registers hold."""

    @jit
    def forward_strips(x, gate, up, down, y, nonzeros, absolute_sum, fired, width, first, last):
        """Compute the rows of y that belong to strips ``first`` to ``last`` of ``width`` tokens."""
        D = x.shape[1]
        x_strip, y_strip = np.empty((D, width), x.dtype), np.empty((D, width), x.dtype)
        g, u = np.empty((1, width), x.dtype), np.empty((1, width), x.dtype)
        h = np.empty((1, width), x.dtype)
        live = np.empty(registers, np.int64)
        for strip in range(first, last):
            start = strip * width
            tokens = min(width, x.shape[0] - start)
            load_strip(x, start, tokens, x_strip)
            y_strip[:] = 0
            count, total = 0, 0.0
            for j in range(fired.size):
                row_product(gate, j, x_strip, g, 0, registers)
                if tokens < width:  # 0 * inf is NaN, and would fire where there is no token
                    g[0, tokens:] = 0
                live_count = find_live(g, live)
                if live_count == 0:
                    continue
                few = 2 * live_count <= registers
                if gated:
                    if few:
                        for i in range(live_count):
                            row_product(up, j, x_strip, u, live[i], 1)
                    else:
                        row_product(up, j, x_strip, u, 0, registers)
                    row_count, row_total = gated_relu(g, u, h, 0)
                else:
                    row_count, row_total = relu(g, h, 0)
                fired[j] |= row_count > 0
                count += row_count
                total += row_total
                if few:
                    for i in range(live_count):
                        add_row(down, j, h, y_strip, live[i], 1)
                else:
                    add_row(down, j, h, y_strip, 0, registers)
            nonzeros[strip] = count
            absolute_sum[strip] = total
            copy_transposed(y_strip[:, :tokens], y[start : start + tokens], 0, tokens)

    return forward_strips


def backward_kernel(registers, gated):
    """Return the compiled backward pass over strips of as many tokens as so many registers hold."""

    @jit
    def backward_strips(
        dy,
        x,
        gate,
        up,
        down,
        neuron_count,
        l1_scale,
        dx,
        gate_grad,
        up_grad,
        down_grad,
        width,
        first,
        last,
    ):
        """Compute rows of dx, and add what the tokens of these strips give to the gradients."""
        D = x.shape[1]
        x_strip, dx_strip = np.empty((D, width), x.dtype), np.empty((D, width), x.dtype)
        dy_strip = np.empty((D, width), x.dtype)
        g, u = np.empty((1, width), x.dtype), np.empty((1, width), x.dtype)
        h, dh = np.empty((1, width), x.dtype), np.empty((1, width), x.dtype)
        live = np.empty(registers, np.int64)
        for strip in range(first, last):
            start = strip * width
            tokens = min(width, x.shape[0] - start)
            load_strip(x, start, tokens, x_strip)
            load_strip(dy, start, tokens, dy_strip)
            dx_strip[:] = 0
            for j in range(neuron_count):
                row_product(gate, j, x_strip, g, 0, registers)
                if tokens < width:  # 0 * inf is NaN, and would fire where there is no token
                    g[0, tokens:] = 0
                live_count = find_live(g, live)
                if live_count == 0:
                    continue
                few = 2 * live_count <= registers
                if gated:
                    if few:
                        for i in range(live_count):
                            row_product(up, j, x_strip, u, live[i], 1)
                    else:
                        row_product(up, j, x_strip, u, 0, registers)
                    gated_relu(g, u, h, 0)
                else:
                    relu(g, h, 0)
                if few:
                    for i in range(live_count):
                        back_through_down(down, j, h, dy_strip, dh, down_grad, live[i], 1)
                else:
                    back_through_down(down, j, h, dy_strip, dh, down_grad, 0, registers)
                if gated:
                    gated_relu_backward(dh, g, u, h, 0, l1_scale)
                else:
                    relu_backward(dh, g, 0, l1_scale)
                if few:
                    for i in range(live_count):
                        m = live[i]
                        if gated:
                            back_through_row(up, j, u, x_strip, dx_strip, up_grad, m, 1)
                        back_through_row(gate, j, g, x_strip, dx_strip, gate_grad, m, 1)
                else:
                    if gated:
                        back_through_row(up, j, u, x_strip, dx_strip, up_grad, 0, registers)
                    back_through_row(gate, j, g, x_strip, dx_strip, gate_grad, 0, registers)
            copy_transposed(dx_strip[:, :tokens], dx[start : start + tokens], 0, tokens)

    return backward_strips


@jit(forceinline=True)
def find_live(g, live):
    """Write the first tokens of registers with a number above 0, or NaN; return how many."""
    lanes = lanes_of(g, 1)
    count = 0
    for register in range(live.size):
        live[count] = register * lanes
        count += any_positive(load(g, 0, register * lanes, 1))
    return count


# What is done with a row of a weight, for the tokens from ``m`` on that so many registers hold.


@jit(forceinline=True)
def row_product(weight, j, strip, out, m, registers):
    """Write W[j] @ strip to ``out``."""
    literally(registers)
    values, columns, pointers = weight
    total = zeros(strip, registers)
    for k in range(np.uint64(pointers[j]), np.uint64(pointers[j + 1])):
        value = values[k]
        if value != 0:
            total = add_scaled(total, value, load(strip, np.int64(columns[k]), m, registers))
    store(out, 0, m, total)


@jit(forceinline=True)
def add_row(weight, j, h, out, m, registers):
    """Add W[j, d] h to row d of ``out``."""
    literally(registers)
    values, columns, pointers = weight
    hidden = load(h, 0, m, registers)
    for k in range(np.uint64(pointers[j]), np.uint64(pointers[j + 1])):
        value = values[k]
        if value != 0:
            d = np.int64(columns[k])
            store(out, d, m, add_scaled(load(out, d, m, registers), value, hidden))


@jit(forceinline=True)
def back_through_row(weight, j, d_row, x_strip, dx_strip, gradient, m, registers):
    """Add W[j, d] d_row to row d of dx, and d_row . x[d] to the gradient of each entry."""
    literally(registers)
    values, columns, pointers = weight
    d_vector = load(d_row, 0, m, registers)
    nothing = zeros(d_row, registers)
    for k in range(np.uint64(pointers[j]), np.uint64(pointers[j + 1])):
        d = np.int64(columns[k])
        value = values[k]
        if value != 0:
            store(dx_strip, d, m, add_scaled(load(dx_strip, d, m, registers), value, d_vector))
        gradient[k] += sum_of(add_products(nothing, d_vector, load(x_strip, d, m, registers)))


@jit(forceinline=True)
def back_through_down(weight, j, h, dy_strip, dh, gradient, m, registers):
    """Write W[j] @ dy to ``dh``, and add h . dy[d] to the gradient of each entry (j, d)."""
    literally(registers)
    values, columns, pointers = weight
    hidden, total = load(h, 0, m, registers), zeros(h, registers)
    nothing = total
    for k in range(np.uint64(pointers[j]), np.uint64(pointers[j + 1])):
        row = load(dy_strip, np.int64(columns[k]), m, registers)
        value = values[k]
        if value != 0:
            total = add_scaled(total, value, row)
        gradient[k] += sum_of(add_products(nothing, hidden, row))
    store(dh, 0, m, total)


@jit
def one_token(x, gate, up, down, y, fired, gated):
    """Compute y (1, D) for x (1, D), and return nonzeros of h and their absolute sum.

    Stored zeros are multiplied like all others: where the sum is not finite, an infinity may have
    made NaN of one, and the caller has to take the strips. Skipping single neurons is worth a
    mispredicted branch each (12 cycles) only where few fire; otherwise all rows are computed, of
    which the lengths alone have to be predicted.
    """
    zero = x.dtype.type(0)
    h, u = np.empty(fired.size, x.dtype), np.empty(fired.size, x.dtype)
    row_dots(gate, x[0], h)
    firing = np.empty(fired.size, np.int64)
    count = 0
    for j in range(fired.size):
        fires = not (h[j] <= zero)
        h[j] = h[j] if fires else zero
        firing[count] = j
        count += fires
    firing = firing[:count]
    few = FEW * count < fired.size
    if gated and few:
        chosen_row_dots(up, firing, x[0], u)
    elif gated:
        row_dots(up, x[0], u)
    nonzeros, absolute_sum = 0, zero
    for j in range(fired.size):
        if gated:
            h[j] = h[j] * u[j] if h[j] != zero else zero
        fired[j] = h[j] != zero
        nonzeros += h[j] != zero
        absolute_sum += abs(h[j])
    y[:] = 0
    if few:
        add_chosen_rows(down, firing, h, y[0])
    else:
        add_rows(down, h, y[0])
    return nonzeros, np.float64(absolute_sum)


# Loops over rows, not functions of one row: at each call Numba would count references to arrays.


@jit
def row_dots(weight, x, out):
    """Write W[j] @ x to ``out[j]``; two entries at a time take a third less time than one."""
    values, columns, pointers = weight
    k = np.uint64(0)
    for j in range(out.size):
        first, second = x.dtype.type(0), x.dtype.type(0)
        end = np.uint64(pointers[j + 1])
        while k + ONE < end:
            first += values[k] * x[np.uint64(columns[k])]
            second += values[k + ONE] * x[np.uint64(columns[k + ONE])]
            k += TWO
        if k < end:
            first += values[k] * x[np.uint64(columns[k])]
            k += ONE
        out[j] = first + second


@jit
def chosen_row_dots(weight, rows, x, out):
    """Write W[j] @ x to ``out[j]`` for some rows j."""
    values, columns, pointers = weight
    for r in range(rows.size):
        j = np.uint64(rows[r])
        total = x.dtype.type(0)
        for k in range(np.uint64(pointers[j]), np.uint64(pointers[j + ONE])):
            total += values[k] * x[np.uint64(columns[k])]
        out[j] = total


@jit
def add_rows(weight, factors, out):
    """Add ``factors[j] * W[j]`` to ``out`` for all rows j."""
    values, columns, pointers = weight
    for j in range(factors.size):
        factor = factors[j]
        for k in range(np.uint64(pointers[j]), np.uint64(pointers[j + 1])):
            out[np.uint64(columns[k])] += values[k] * factor


@jit
def add_chosen_rows(weight, rows, factors, out):
    """Add ``factors[j] * W[j]`` to ``out`` for some rows j."""
    values, columns, pointers = weight
    for r in range(rows.size):
        j = np.uint64(rows[r])
        factor = factors[j]
        for k in range(np.uint64(pointers[j]), np.uint64(pointers[j + ONE])):
            out[np.uint64(columns[k])] += values[k] * factor
