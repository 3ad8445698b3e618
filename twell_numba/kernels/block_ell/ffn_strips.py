"""Feedforward layers with block-ELL weights, compiled: strips of tokens through all neurons.

Gated:       g = x Wg^T,  u = x Wu^T,  h = relu(g) * u,  y = h Wd
Two-matrix:  h = relu(x Wu^T),  y = h Wd

with x, y (M, D) and block-sparse weights (F, D). A strip of tokens is transposed, [D, tokens], and
taken through one row of blocks of all weights after the other, so that g, u and h of its b neurons
never leave the first-level cache; nothing of size M x F exists.

Bound by arithmetic. Three products make it up, each with eight rows of a result in registers:

- g = W[r] x: eight neurons by a panel of tokens, over all blocks of the row;
- y[c] += W[r, c].T h: eight columns of a block by a panel of tokens, over the block's neurons;
- dW[r, c] += h x[c].T: eight neurons by the columns of a block, over the strip's tokens. Here x is
  read as it came, by tokens, so that no vector has to be added up to one number.

Milliseconds for M 1024, D 512, F 2048, float32, gated, on 2 cores of an AMD EPYC (Zen 5), with 10%
of the blocks, forward and backward; dense layers take 28 and 83 (AVX2 BLAS), 16 and 47 (AVX-512):

====================  =======  ========
b = 8                 2.3      10.8
b = 16, strips of 32  2.5      9.1
64 tokens             2.2      8.5
128 (taken)           2.1      8.3
256                   2.1      7.0
b = 32                1.9      7.8
b = 64                2.0      8.3
====================  =======  ========

(256 tokens gain by fewer partial sums of gradients, of which large ones now have four in any case.)
Multiplying rows of a transposed strip for the gradients, with a sum across a vector for each
element, took 4 times as long as reading x by tokens.

Other rows and columns (b below 8, edges) are computed one at a time. Zeros inside blocks are
multiplied like all others, so that an infinity makes NaN of them: the caller looks for such results
and computes them again by the definition.
"""

import numpy as np

from twell_numba.device.jit import jit, literally
from twell_numba.device.vectors import (
    MANY_REGISTERS,
    add_scaled,
    lanes_of,
    load,
    load_of,
    store,
    zeros,
    zeros_of,
)
from twell_numba.kernels.sparse_ffn.rows import (
    any_fires,
    gated_relu,
    gated_relu_backward,
    load_strip,
    relu,
    relu_backward,
)
from twell_numba.kernels.transpose.cpu import copy_transposed

# Rows of a result that are kept in registers, each in so many.
ROWS = 8
REGISTERS = MANY_REGISTERS // ROWS


def forward_kernel(gated):
    """Return the compiled forward pass."""

    @jit
    def forward_strips(x, gate, up, down, y, nonzeros, absolute_sum, fired, width, first, last):
        """Compute the rows of y that belong to strips ``first`` to ``last`` of ``width`` tokens."""
        D, b = x.shape[1], gate[0].shape[2]
        x_strip, y_strip = np.empty((D, width), x.dtype), np.empty((D, width), x.dtype)
        g, u = np.empty((b, width), x.dtype), np.empty((b, width), x.dtype)
        h = np.empty((b, width), x.dtype)
        for strip in range(first, last):
            start = strip * width
            tokens = min(width, x.shape[0] - start)
            load_strip(x, start, tokens, x_strip)
            y_strip[:] = 0
            count, total = 0, 0.0
            for block_row in range(gate[1].shape[0]):
                first_neuron = block_row * b
                neurons = min(b, fired.size - first_neuron)
                row_product(gate, block_row, neurons, x_strip, g)
                if not any_fires(g, neurons):
                    continue
                if gated:
                    row_product(up, block_row, neurons, x_strip, u)
                for i in range(neurons):
                    if gated:
                        row_count, row_total = gated_relu(g, u, h, i)
                    else:
                        row_count, row_total = relu(g, h, i)
                    if row_count > 0:
                        fired[first_neuron + i] = True
                    count += row_count
                    total += row_total
                add_transposed_product(down, block_row, neurons, h, y_strip)
            nonzeros[strip] = count
            absolute_sum[strip] = total
            copy_transposed(y_strip[:, :tokens], y[start : start + tokens], 0, tokens)

    return forward_strips


def backward_kernel(gated, lanes):
    """Return the compiled backward pass; ``lanes`` numbers of a block's row fill one vector."""

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
        D, b = x.shape[1], gate[0].shape[2]
        x_strip, dx_strip = np.empty((D, width), x.dtype), np.empty((D, width), x.dtype)
        dy_strip = np.empty((D, width), x.dtype)
        g, u = np.empty((b, width), x.dtype), np.empty((b, width), x.dtype)
        h, dh = np.empty((b, width), x.dtype), np.empty((b, width), x.dtype)
        for strip in range(first, last):
            start = strip * width
            tokens = min(width, x.shape[0] - start)
            load_strip(x, start, tokens, x_strip)
            load_strip(dy, start, tokens, dy_strip)
            dx_strip[:] = 0
            x_rows, dy_rows = x[start : start + tokens], dy[start : start + tokens]
            for block_row in range(gate[1].shape[0]):
                neurons = min(b, neuron_count - block_row * b)
                row_product(gate, block_row, neurons, x_strip, g)
                if not any_fires(g, neurons):
                    continue
                if gated:
                    row_product(up, block_row, neurons, x_strip, u)
                    for i in range(neurons):
                        gated_relu(g, u, h, i)
                else:
                    for i in range(neurons):
                        relu(g, h, i)
                row_product(down, block_row, neurons, dy_strip, dh)
                add_outer_product(down, block_row, neurons, h, dy_rows, dy_strip, down_grad, lanes)
                for i in range(neurons):
                    if gated:
                        gated_relu_backward(dh, g, u, h, i, l1_scale)
                    else:
                        relu_backward(dh, g, i, l1_scale)
                if gated:
                    add_transposed_product(up, block_row, neurons, u, dx_strip)
                    add_outer_product(up, block_row, neurons, u, x_rows, x_strip, up_grad, lanes)
                add_transposed_product(gate, block_row, neurons, g, dx_strip)
                add_outer_product(gate, block_row, neurons, g, x_rows, x_strip, gate_grad, lanes)
            copy_transposed(dx_strip[:, :tokens], dx[start : start + tokens], 0, tokens)

    return backward_strips


@jit
def row_product(weight, block_row, height, strip, out):
    """Write the first ``height`` rows of W[block_row] @ strip to ``out``."""
    values, block_columns = weight
    columns, blocks = block_columns[block_row], values[block_row]
    for m in range(0, strip.shape[1], lanes_of(strip, REGISTERS)):
        if height >= ROWS:
            for group in range(0, height, ROWS):
                # The last group may overlap the one before: computed twice, alike.
                eight_rows(blocks, columns, min(group, height - ROWS), strip, m, out)
        else:
            for i in range(height):
                one_row(blocks, columns, i, strip, m, out)


@jit(forceinline=True)
def eight_rows(blocks, columns, i, strip, m, out):
    b = blocks.shape[1]
    t0, t1 = zeros(strip, REGISTERS), zeros(strip, REGISTERS)
    t2, t3, t4, t5, t6, t7 = t0, t0, t0, t0, t0, t0
    for slot in range(columns.size):
        if columns[slot] < 0:
            break
        first = np.int64(columns[slot]) * b
        block = blocks[slot]
        r0, r1, r2, r3 = block[i], block[i + 1], block[i + 2], block[i + 3]
        r4, r5, r6, r7 = block[i + 4], block[i + 5], block[i + 6], block[i + 7]
        for k in range(min(b, strip.shape[0] - first)):
            x = load(strip, first + k, m, REGISTERS)
            t0, t1 = add_scaled(t0, r0[k], x), add_scaled(t1, r1[k], x)
            t2, t3 = add_scaled(t2, r2[k], x), add_scaled(t3, r3[k], x)
            t4, t5 = add_scaled(t4, r4[k], x), add_scaled(t5, r5[k], x)
            t6, t7 = add_scaled(t6, r6[k], x), add_scaled(t7, r7[k], x)
    store(out, i, m, t0)
    store(out, i + 1, m, t1)
    store(out, i + 2, m, t2)
    store(out, i + 3, m, t3)
    store(out, i + 4, m, t4)
    store(out, i + 5, m, t5)
    store(out, i + 6, m, t6)
    store(out, i + 7, m, t7)


@jit
def one_row(blocks, columns, i, strip, m, out):
    b = blocks.shape[1]
    total = zeros(strip, REGISTERS)
    for slot in range(columns.size):
        if columns[slot] < 0:
            break
        first = np.int64(columns[slot]) * b
        for k in range(min(b, strip.shape[0] - first)):
            total = add_scaled(total, blocks[slot, i, k], load(strip, first + k, m, REGISTERS))
    store(out, i, m, total)


@jit
def add_transposed_product(weight, block_row, height, h, out):
    """Add W[block_row].T @ h to ``out``, where h has ``height`` rows."""
    values, block_columns = weight
    b = values.shape[2]
    for slot in range(block_columns.shape[1]):
        if block_columns[block_row, slot] < 0:
            break
        first = np.int64(block_columns[block_row, slot]) * b
        block = values[block_row, slot]
        width = min(b, out.shape[0] - first)
        whole = width // ROWS * ROWS
        for m in range(0, h.shape[1], lanes_of(h, REGISTERS)):
            for j in range(0, whole, ROWS):
                eight_columns(block, j, height, h, m, out, first + j)
            for j in range(whole, width):
                one_column(block, j, height, h, m, out, first + j)


@jit(forceinline=True)
def eight_columns(block, j, height, h, m, out, row):
    t0, t1 = load(out, row, m, REGISTERS), load(out, row + 1, m, REGISTERS)
    t2, t3 = load(out, row + 2, m, REGISTERS), load(out, row + 3, m, REGISTERS)
    t4, t5 = load(out, row + 4, m, REGISTERS), load(out, row + 5, m, REGISTERS)
    t6, t7 = load(out, row + 6, m, REGISTERS), load(out, row + 7, m, REGISTERS)
    for i in range(height):
        x = load(h, i, m, REGISTERS)
        numbers = block[i, j : j + ROWS]
        t0, t1 = add_scaled(t0, numbers[0], x), add_scaled(t1, numbers[1], x)
        t2, t3 = add_scaled(t2, numbers[2], x), add_scaled(t3, numbers[3], x)
        t4, t5 = add_scaled(t4, numbers[4], x), add_scaled(t5, numbers[5], x)
        t6, t7 = add_scaled(t6, numbers[6], x), add_scaled(t7, numbers[7], x)
    store(out, row, m, t0)
    store(out, row + 1, m, t1)
    store(out, row + 2, m, t2)
    store(out, row + 3, m, t3)
    store(out, row + 4, m, t4)
    store(out, row + 5, m, t5)
    store(out, row + 6, m, t6)
    store(out, row + 7, m, t7)


@jit
def one_column(block, j, height, h, m, out, row):
    total = load(out, row, m, REGISTERS)
    for i in range(height):
        total = add_scaled(total, block[i, j], load(h, i, m, REGISTERS))
    store(out, row, m, total)


@jit
def add_outer_product(weight, block_row, height, h, x, strip, gradient, lanes):
    """Add h @ x at the stored blocks of a row of blocks to the gradient.

    h (b, width); x (tokens, D), and the same in ``strip`` (D, width). ``lanes`` numbers of a
    block's row fill a vector.
    """
    literally(lanes)
    block_columns = weight[1]
    b = gradient.shape[2]
    for slot in range(block_columns.shape[1]):
        if block_columns[block_row, slot] < 0:
            break
        first = np.int64(block_columns[block_row, slot]) * b
        block = gradient[block_row, slot]
        width = min(b, x.shape[1] - first)
        whole_rows, whole_columns = height // ROWS * ROWS, width // lanes * lanes
        for j in range(0, whole_columns, lanes):
            for i in range(0, whole_rows, ROWS):
                eight_rows_of_outer_product(h, i, x, first + j, block, j, lanes)
        for i in range(height):
            for j in range(whole_columns if i < whole_rows else 0, width):
                block[i, j] += dot(h[i], strip[first + j])


@jit(forceinline=True)
def eight_rows_of_outer_product(h, i, x, column, block, j, lanes):
    literally(lanes)
    t0, t1 = zeros_of(x, lanes), zeros_of(x, lanes)
    t2, t3, t4, t5, t6, t7 = t0, t0, t0, t0, t0, t0
    h0, h1, h2, h3 = h[i], h[i + 1], h[i + 2], h[i + 3]
    h4, h5, h6, h7 = h[i + 4], h[i + 5], h[i + 6], h[i + 7]
    for m in range(x.shape[0]):
        row = load_of(x, m, column, lanes)
        t0, t1 = add_scaled(t0, h0[m], row), add_scaled(t1, h1[m], row)
        t2, t3 = add_scaled(t2, h2[m], row), add_scaled(t3, h3[m], row)
        t4, t5 = add_scaled(t4, h4[m], row), add_scaled(t5, h5[m], row)
        t6, t7 = add_scaled(t6, h6[m], row), add_scaled(t7, h7[m], row)
    add_to(block, i, j, t0, lanes)
    add_to(block, i + 1, j, t1, lanes)
    add_to(block, i + 2, j, t2, lanes)
    add_to(block, i + 3, j, t3, lanes)
    add_to(block, i + 4, j, t4, lanes)
    add_to(block, i + 5, j, t5, lanes)
    add_to(block, i + 6, j, t6, lanes)
    add_to(block, i + 7, j, t7, lanes)


@jit
def dot(first, second):
    total = first.dtype.type(0)
    for m in range(first.size):
        total += first[m] * second[m]
    return total


@jit(forceinline=True)
def add_to(block, i, j, vector, lanes):
    literally(lanes)
    one = block.dtype.type(1)
    store(block, i, j, add_scaled(load_of(block, i, j, lanes), one, vector))


@jit
def one_token(x, gate, up, down, y, fired, gated):
    """Compute y (1, D) for x (1, D), and return nonzeros of h and their absolute sum."""
    b = down[0].shape[2]
    zero = x.dtype.type(0)
    g, u = np.empty(b, x.dtype), np.empty(b, x.dtype)
    y[:] = 0
    nonzeros, absolute_sum = 0, zero
    for block_row in range(down[1].shape[0]):
        neurons = min(b, fired.size - block_row * b)
        row_of_dots(gate, block_row, neurons, x[0], g)
        firing = 0
        for i in range(neurons):
            fires = not (g[i] <= zero)
            g[i] = g[i] if fires else zero
            firing += fires
        if firing == 0:
            continue
        if gated:
            row_of_dots(up, block_row, neurons, x[0], u)
            for i in range(neurons):
                g[i] = g[i] * u[i] if g[i] != zero else zero
        for i in range(neurons):
            fired[block_row * b + i] = g[i] != zero
            nonzeros += g[i] != zero
            absolute_sum += abs(g[i])
        add_row_of_blocks(down, block_row, neurons, g, y[0])
    return nonzeros, np.float64(absolute_sum)


@jit(forceinline=True)
def row_of_dots(weight, block_row, neurons, x, out):
    """Write the first ``neurons`` numbers of W[block_row] @ x to ``out``."""
    values, block_columns = weight
    b = values.shape[2]
    out[:] = 0
    for slot in range(block_columns.shape[1]):
        if block_columns[block_row, slot] < 0:
            break
        first = np.int64(block_columns[block_row, slot]) * b
        part = x[first : first + b]
        for i in range(neurons):
            row = values[block_row, slot, i]
            total = out[i]
            for k in range(part.size):
                total += row[k] * part[k]
            out[i] = total


@jit(forceinline=True)
def add_row_of_blocks(weight, block_row, neurons, h, out):
    """Add W[block_row].T @ h to ``out``."""
    values, block_columns = weight
    b = values.shape[2]
    for slot in range(block_columns.shape[1]):
        if block_columns[block_row, slot] < 0:
            break
        first = np.int64(block_columns[block_row, slot]) * b
        part = out[first : first + b]
        for i in range(neurons):
            row = values[block_row, slot, i]
            for k in range(part.size):
                part[k] += row[k] * h[i]
