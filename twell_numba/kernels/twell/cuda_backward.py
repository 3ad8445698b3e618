"""The backward pass of activation-sparse layers on a GPU, over the stored entries.

    dh = dy . Wd[j] + l1 sign(h),  du = dh relu(g),  dg = dh u
    dx = sum of dg Wg[j] + du Wu[j],  dWd[j] += h dy,  dWu[j] += du x,  dWg[j] += dg x

Without a gate Wu decides which neurons fire and stands in for Wg, with u = 1. First by row, which
leaves dh of every entry; then by neuron, so that one warp writes a part of a gradient's row.

Of rows of any width, aligned or not, that a block does not hold in its registers
(:mod:`cuda_rows`); bound by the latency of reading them one after the other. On an H200, M = 2048,
D = 128, F = 512, bfloat16, 50 entries a row, a pass takes 0.319 ms, with rows in registers 0.104.
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
    d_hidden, dx, rows, width, tile, tiles, slots, gated, is_aligned,
):  # fmt: skip
    """Compute dh of every entry, and dx of rows that are not in the tail (of others, 0)."""
    l1 = number(dy, load(l1_scale, 0))
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        for t in range(tiles):
            start = (row * tiles + t) * slots
            for place in range(start, start + load(counts, row * tiles + t)):
                weights = (t * tile + types.int64(load(columns, place))) * width
                hidden = load(values, place)
                if gated != 0:
                    hidden *= load(up_values, place)
                gradient = warp_dot(dy, dy, row * width, down_weight, weights, width, is_aligned)
                # every lane stores it: each reads below what it wrote itself
                store(d_hidden, place, gradient + l1 * sign(hidden, number(dy, 1)))
        d = lane * 8
        while d - lane * 8 < width:
            sums = eight_zeros(dy)
            for t in range(tiles):
                start = (row * tiles + t) * slots
                for place in range(start, start + load(counts, row * tiles + t)):
                    weights = (t * tile + types.int64(load(columns, place))) * width
                    d_pattern = load(d_hidden, place)
                    if gated != 0:
                        d_up = d_pattern * load(values, place)
                        d_pattern *= load(up_values, place)
                        numbers = load_eight(up_weight, weights, d, width, is_aligned)
                        sums = add_scaled(sums, d_up, numbers)
                    numbers = load_eight(pattern_weight, weights, d, width, is_aligned)
                    sums = add_scaled(sums, d_pattern, numbers)
            store_eight(dx, row * width, d, width, sums, is_aligned)
            d += 256
        row += grid_threads() // 32


@kernel()
def add_gradients(
    dy, x, values, up_values, d_hidden, neuron_starts, entry_rows, entry_slots, pattern_grad,
    up_grad, down_grad, neurons, width, row_slots, gated, is_aligned,
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
            place = row * row_slots + types.int64(load(entry_slots, entry))
            d_pattern = load(d_hidden, place)
            hidden = load(values, place)
            numbers = load_eight(x, row * width, d, width, is_aligned)
            if gated != 0:
                up = load(up_values, place)
                up_sums = add_scaled(up_sums, d_pattern * hidden, numbers)
                d_pattern *= up
                hidden *= up
            pattern_sums = add_scaled(pattern_sums, d_pattern, numbers)
            numbers = load_eight(dy, row * width, d, width, is_aligned)
            down_sums = add_scaled(down_sums, hidden, numbers)
        if first < end:
            start = neuron * width
            add_eight(pattern_grad, start, d, width, pattern_sums, is_aligned)
            add_eight(down_grad, start, d, width, down_sums, is_aligned)
            if gated != 0:
                add_eight(up_grad, start, d, width, up_sums, is_aligned)
        item += grid_threads() // 32
