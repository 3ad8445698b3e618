"""The forward pass of activation-sparse layers on a GPU, after packing.

    u_i = x . Wu[j_i],  h_i = values_i u_i (values_i without a gate),  y = sum_i h_i Wd[j_i]

for the entries i of a row of x, of neurons j_i.
"""

from twell_numba.device.gpu import kernel
from twell_numba.device.gpu.language import (
    block_sum,
    cuda,
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
from twell_numba.kernels.twell.cuda_language import MOST_THREADS


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


@kernel(threads=MOST_THREADS)
def forward_tail(
    x, up_weight, down_weight, tail_values, tail_rows, tail_count, hidden_of_block, y, nonzeros,
    absolute_sums, fired, neurons, width, is_compact, gated, is_aligned,
):  # fmt: skip
    """Compute y of rows in the tail, a block each; h goes to a row of ``hidden_of_block``."""
    thread = types.int64(cuda.threadIdx.x)
    warps = types.int64(cuda.blockDim.x) // 32
    hidden_start = types.int64(cuda.blockIdx.x) * neurons
    i = types.int64(cuda.blockIdx.x)
    while i < load(tail_count, 0):
        row = types.int64(load(tail_rows, i))
        start = row * neurons
        if is_compact != 0:
            start = i * neurons
        count = 0
        total = number(x, 0)
        neuron = thread // 32
        while neuron < neurons:
            hidden = load(tail_values, start + neuron)
            if hidden <= 0:
                hidden = number(x, 0)
            elif gated != 0:
                hidden *= warp_dot(x, x, row * width, up_weight, neuron * width, width, is_aligned)
            if thread % 32 == 0:
                store(hidden_of_block, hidden_start + neuron, hidden)
                total += abs(hidden)
                if hidden != 0:
                    count += 1
                    store(fired, neuron, 1)
            neuron += warps
        count_of_row = block_sum(count)
        total_of_row = block_sum(total)
        if gated != 0 and thread == 0:
            store(nonzeros, row, count_of_row)
            store(absolute_sums, row, total_of_row)
        cuda.syncthreads()  # all of h is there
        d = thread
        while d < width:
            sum_of_column = number(x, 0)
            for neuron in range(neurons):
                hidden = load(hidden_of_block, hidden_start + neuron)
                if hidden != 0:
                    sum_of_column += hidden * load(down_weight, neuron * width + d)
            store(y, row * width + d, sum_of_column)
            d += cuda.blockDim.x
        cuda.syncthreads()  # the next row's h goes to the same place
        i += cuda.gridDim.x
