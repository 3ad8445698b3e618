"""The backward pass of activation-sparse layers on a GPU, over the stored entries.

    dh = dy . Wd[j] + l1 sign(h),  du = dh relu(g),  dg = dh u
    dx = sum of dg Wg[j] + du Wu[j],  dWd[j] += h dy,  dWu[j] += du x,  dWg[j] += dg x

Without a gate Wu decides which neurons fire and stands in for Wg, with u = 1. First by row, which
leaves dh of every entry; then by neuron, so that one warp writes a part of a gradient's row. Rows
in the tail follow, with dh and u computed again where they are wanted: nothing of M x F is kept.
"""

from twell_numba.device.gpu import kernel
from twell_numba.device.gpu.language import (
    cuda,
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
from twell_numba.kernels.twell.cuda_language import MOST_THREADS, add, sign

# Rows of the tail whose coefficients a block holds at a time.
BATCH = 32


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


@kernel(threads=MOST_THREADS)
def backward_tail(
    dy, x, pattern_weight, up_weight, down_weight, tail_values, tail_rows, tail_count, l1_scale,
    coefficients, dx, neurons, width, is_compact, gated, is_aligned,
):  # fmt: skip
    """Compute dx of rows in the tail, a block each; dg and du go to rows of ``coefficients``."""
    l1 = number(dy, load(l1_scale, 0))
    thread = types.int64(cuda.threadIdx.x)
    warps = types.int64(cuda.blockDim.x) // 32
    pattern_start = types.int64(cuda.blockIdx.x) * 2 * neurons
    up_start = pattern_start + neurons
    i = types.int64(cuda.blockIdx.x)
    while i < load(tail_count, 0):
        row = types.int64(load(tail_rows, i))
        start = row * neurons
        if is_compact != 0:
            start = i * neurons
        neuron = thread // 32
        while neuron < neurons:
            weights = neuron * width
            value = load(tail_values, start + neuron)
            d_pattern = number(dy, 0)
            d_up = number(dy, 0)
            if not value <= 0:
                up = number(dy, 1)
                if gated != 0:
                    up = warp_dot(x, x, row * width, up_weight, weights, width, is_aligned)
                d_pattern = warp_dot(dy, dy, row * width, down_weight, weights, width, is_aligned)
                d_pattern += l1 * sign(value * up, number(dy, 1))
                d_up = d_pattern * value
                d_pattern *= up
            if thread % 32 == 0:
                store(coefficients, pattern_start + neuron, d_pattern)
                store(coefficients, up_start + neuron, d_up)
            neuron += warps
        cuda.syncthreads()  # all coefficients are there
        d = thread
        while d < width:
            total = number(dy, 0)
            for neuron in range(neurons):
                # that of a neuron which does not fire is 0, and so may one be that fires
                d_pattern = load(coefficients, pattern_start + neuron)
                if d_pattern != 0:
                    total += d_pattern * load(pattern_weight, neuron * width + d)
                if gated != 0:
                    d_up = load(coefficients, up_start + neuron)
                    if d_up != 0:
                        total += d_up * load(up_weight, neuron * width + d)
            store(dx, row * width + d, total)
            d += cuda.blockDim.x
        cuda.syncthreads()  # the next row's coefficients go to the same place
        i += cuda.gridDim.x


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


@kernel(threads=MOST_THREADS)
def add_tail_gradients(
    dy, x, up_weight, down_weight, tail_values, tail_rows, tail_count, l1_scale, sums,
    pattern_grad, up_grad, down_grad, neurons, width, is_compact, gated, is_aligned,
):  # fmt: skip
    """Add what rows in the tail give, a block a neuron; ``sums`` has 3 rows for each block.

    A batch of rows at a time, of which first the coefficients h, du and dg are computed. Columns
    are added up in ``sums``, each by one thread, until the last batch.
    """
    hidden_of = cuda.shared.array(BATCH, types.float64)
    d_up_of = cuda.shared.array(BATCH, types.float64)
    d_pattern_of = cuda.shared.array(BATCH, types.float64)
    l1 = number(x, load(l1_scale, 0))
    thread = types.int64(cuda.threadIdx.x)
    warps = types.int64(cuda.blockDim.x) // 32
    count = types.int64(load(tail_count, 0))
    sums_start = types.int64(cuda.blockIdx.x) * 3 * width
    neuron = types.int64(cuda.blockIdx.x)
    while count > 0 and neuron < neurons:
        weights = neuron * width
        first = types.int64(0)
        while first < count:
            batch = min(count - first, BATCH)
            i = thread // 32
            while i < batch:
                row = types.int64(load(tail_rows, first + i))
                place = row * neurons + neuron
                if is_compact != 0:
                    place = (first + i) * neurons + neuron
                value = load(tail_values, place)
                hidden = number(x, 0)
                d_hidden = number(x, 0)
                up = number(x, 1)
                if not value <= 0:
                    if gated != 0:
                        up = warp_dot(x, x, row * width, up_weight, weights, width, is_aligned)
                    hidden = value * up
                    d_hidden = warp_dot(
                        dy, dy, row * width, down_weight, weights, width, is_aligned
                    )
                    d_hidden += l1 * sign(hidden, number(x, 1))
                if thread % 32 == 0:
                    hidden_of[i] = hidden
                    d_up_of[i] = d_hidden * value
                    d_pattern_of[i] = d_hidden * up
                i += warps
            cuda.syncthreads()  # the batch's coefficients are there
            d = thread
            while d < width:
                pattern_sum = number(x, 0)
                up_sum = number(x, 0)
                down_sum = number(x, 0)
                if first > 0:
                    pattern_sum = load(sums, sums_start + d)
                    up_sum = load(sums, sums_start + width + d)
                    down_sum = load(sums, sums_start + 2 * width + d)
                for i in range(batch):
                    hidden = number(x, hidden_of[i])
                    d_up = number(x, d_up_of[i])
                    d_pattern = number(x, d_pattern_of[i])
                    if hidden != 0 or d_up != 0 or d_pattern != 0:
                        row = types.int64(load(tail_rows, first + i))
                        x_value = load(x, row * width + d)
                        pattern_sum += d_pattern * x_value
                        up_sum += d_up * x_value
                        down_sum += hidden * load(dy, row * width + d)
                if first + batch < count:
                    store(sums, sums_start + d, pattern_sum)
                    store(sums, sums_start + width + d, up_sum)
                    store(sums, sums_start + 2 * width + d, down_sum)
                else:
                    add(pattern_grad, weights + d, pattern_sum)
                    add(down_grad, weights + d, down_sum)
                    if gated != 0:
                        add(up_grad, weights + d, up_sum)
                d += cuda.blockDim.x
            cuda.syncthreads()  # the next batch's coefficients go to the same place
            first += BATCH
        neuron += cuda.gridDim.x
