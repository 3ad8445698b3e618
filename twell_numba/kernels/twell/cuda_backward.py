"""The backward pass of activation-sparse layers on a GPU, over the stored entries.

    dh = dy . Wd[j] + l1 sign(h),  du = dh relu(g),  dg = dh u
    dx = sum of dg Wg[j] + du Wu[j],  dWd[j] += h dy,  dWu[j] += du x,  dWg[j] += dg x

Without a gate Wu decides which neurons fire and stands in for Wg, with u = 1. First by row, which
leaves h, dg and du in lists by neuron (:mod:`entry_transpose`); then by neuron, so that one warp
writes a part of a gradient's row.

Of rows that cannot be read eight numbers at a time (otherwise :mod:`strip_rows` is faster); bound
by the latency of reading them one after the other. On an H200, M = 2048, D = 128, F = 512,
bfloat16, 50 entries a row, a pass takes 0.319 ms, by strips 0.109.
"""

from twell_numba.device.gpu import kernel
from twell_numba.device.gpu.language import (
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
)
from twell_numba.kernels.cuda_vectors import (
    add_eight,
    add_scaled,
    eight_zeros,
    load_eight,
    store_eight,
    warp_dot,
)
from twell_numba.kernels.twell.cuda_language import sign


@kernel()
def backward_rows(
    dy, pattern_weight, up_weight, down_weight, values, columns, counts, up_values, l1_scale,
    entry_places, list_hidden, list_pattern, list_up, dx, rows, width, tile, tiles, slots, gated,
    is_aligned,
):  # fmt: skip
    """List h, dg and du of every entry, and compute dx of rows not in the tail (of others, 0)."""
    l1 = number(dy, load(l1_scale, 0))
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        for t in range(tiles):
            start = (row * tiles + t) * slots
            for place in range(start, start + load(counts, row * tiles + t)):
                weights = (t * tile + types.int64(load(columns, place))) * width
                value = load(values, place)
                up = number(dy, 1)
                if gated != 0:
                    up = load(up_values, place)
                d_hidden = warp_dot(dy, dy, row * width, down_weight, weights, width, is_aligned)
                d_hidden += l1 * sign(value * up, number(dy, 1))
                # every lane stores it: each reads below what it wrote itself
                entry = load(entry_places, place)
                store(list_hidden, entry, value * up)
                store(list_pattern, entry, d_hidden * up)
                if gated != 0:
                    store(list_up, entry, d_hidden * value)
        d = lane * 8
        while d - lane * 8 < width:
            sums = eight_zeros(dy)
            for t in range(tiles):
                start = (row * tiles + t) * slots
                for place in range(start, start + load(counts, row * tiles + t)):
                    weights = (t * tile + types.int64(load(columns, place))) * width
                    entry = load(entry_places, place)
                    if gated != 0:
                        numbers = load_eight(up_weight, weights, d, width, is_aligned)
                        sums = add_scaled(sums, load(list_up, entry), numbers)
                    numbers = load_eight(pattern_weight, weights, d, width, is_aligned)
                    sums = add_scaled(sums, load(list_pattern, entry), numbers)
            store_eight(dx, row * width, d, width, sums, is_aligned)
            d += 256
        row += grid_threads() // 32


@kernel()
def add_gradients(
    dy, x, neuron_starts, entry_rows, list_hidden, list_pattern, list_up, pattern_grad, up_grad,
    down_grad, neurons, width, gated, is_aligned,
):  # fmt: skip
    """Add what rows that are not in the tail give; a warp takes 256 columns of a neuron."""
    lane = global_thread() % 32
    item = global_thread() // 32
    parts = (width + 255) // 256
    while item < neurons * parts:
        neuron = item // parts
        d = item % parts * 256 + lane * 8
        first = types.int64(load(neuron_starts, neuron))
        end = types.int64(load(neuron_starts, neuron + 1))
        pattern_sums = eight_zeros(x)
        up_sums = eight_zeros(x)
        down_sums = eight_zeros(x)
        for entry in range(first, end):
            row = types.int64(load(entry_rows, entry))
            numbers = load_eight(x, row * width, d, width, is_aligned)
            pattern_sums = add_scaled(pattern_sums, load(list_pattern, entry), numbers)
            if gated != 0:
                up_sums = add_scaled(up_sums, load(list_up, entry), numbers)
            numbers = load_eight(dy, row * width, d, width, is_aligned)
            down_sums = add_scaled(down_sums, load(list_hidden, entry), numbers)
        if first < end:
            start = neuron * width
            add_eight(pattern_grad, start, d, width, pattern_sums, is_aligned)
            add_eight(down_grad, start, d, width, down_sums, is_aligned)
            if gated != 0:
                add_eight(up_grad, start, d, width, up_sums, is_aligned)
        item += grid_threads() // 32
