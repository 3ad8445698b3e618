"""The forward pass of activation-sparse layers on a GPU, after packing.

    u_i = x . Wu[j_i],  h_i = values_i u_i (values_i without a gate),  y = sum_i h_i Wd[j_i]

for the entries i of a row of x, of neurons j_i: of rows that cannot be read eight numbers at a time
(otherwise :mod:`strip_rows` is faster). A warp takes a row of x, and reads a row of the weights
after the other: bound by their latency. On an H200, M = 2048, D = 128, F = 512, bfloat16, 50
entries a row, a pass takes 0.116 ms, by strips 0.036.
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
    add_scaled,
    eight_zeros,
    load_eight,
    store_eight,
    warp_dot,
)


@kernel()
def forward_rows(
    x, up_weight, down_weight, values, columns, counts, up_values, y, nonzeros, absolute_sums,
    fired, rows, width, tile, tiles, slots, gated, is_aligned,
):  # fmt: skip
    """Compute u and y of rows that are not in the tail (y of others becomes 0)."""
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        if gated != 0:
            count = 0
            total = number(x, 0)
            for t in range(tiles):
                start = (row * tiles + t) * slots
                for place in range(start, start + load(counts, row * tiles + t)):
                    neuron = t * tile + types.int64(load(columns, place))
                    up = warp_dot(x, x, row * width, up_weight, neuron * width, width, is_aligned)
                    # every lane stores it: each reads below what it wrote itself, rounded
                    store(up_values, place, up)
                    hidden = load(values, place) * load(up_values, place)
                    total += abs(hidden)
                    if hidden != 0:
                        count += 1
                        if lane == 0:
                            store(fired, neuron, 1)
            if lane == 0:
                store(nonzeros, row, count)
                store(absolute_sums, row, total)
        d = lane * 8
        while d - lane * 8 < width:
            sums = eight_zeros(x)
            for t in range(tiles):
                start = (row * tiles + t) * slots
                for place in range(start, start + load(counts, row * tiles + t)):
                    hidden = load(values, place)
                    if gated != 0:
                        hidden *= load(up_values, place)
                    weights = (t * tile + types.int64(load(columns, place))) * width
                    numbers = load_eight(down_weight, weights, d, width, is_aligned)
                    sums = add_scaled(sums, hidden, numbers)
            store_eight(y, row * width, d, width, sums, is_aligned)
            d += 256
        row += grid_threads() // 32
