"""Rows of which a tile overflows, the tail, of activation-sparse layers on a GPU.

    u = x . Wu[j],  dh = dy . Wd[j] + l1 sign(h)     for each row of the tail and j that fires in it
    y = sum of h Wd[j],  dx = sum of dg Wg[j] + du Wu[j]
    dWd[j] += h dy,  dWu[j] += du x,  dWg[j] += dg x  with h = g u,  dg = dh u,  du = dh g

The products g before the ReLU are in ``tail_values``, in row ``tail_rows[i]``, or i if it is
compact. u and dh go to row i of arrays of as many numbers, kept for one pass alone. How many rows
there are is known on the GPU alone: all kernels run for any number, and return at once for none.

The tail is a few rows of thousands of entries each. So a row is shared by many blocks: a warp takes
the dot products of 32 neurons, a block 256 columns of a sum, of which its warps each add up a
share. (With a block for each row, 5 rows of up to 1700 entries took 5 ms forward, on an H200.)
Bound by the latency of reading rows one after the other, for many rows by the second-level cache.
"""

from twell_numba.device.gpu import kernel
from twell_numba.device.gpu.language import (
    arithmetic_type,
    block_sum,
    cuda,
    device_function,
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
from twell_numba.kernels.twell.cuda_language import ballot, lowest_bit, sign

THREADS = 256
# Numbers that a block's warps leave in shared memory: eight for each thread.
PARTS = 8 * THREADS


@device_function
def start_of(tail_rows, i, neurons, is_compact):
    """Return where the products of the tail's row i begin in ``tail_values``."""
    start = types.int64(i) * neurons
    if is_compact == 0:
        start = types.int64(load(tail_rows, i)) * neurons
    return start


@device_function
def lanes_that_fire(tail_values, start, neuron, neurons):
    """Return the word whose bits are the lanes of which the neuron fires."""
    fires = 0
    if neuron < neurons and not load(tail_values, start + neuron) <= 0:
        fires = 1
    return types.int64(ballot(fires)) & 0xFFFFFFFF


@kernel(threads=THREADS)
def tail_up(
    x, up_weight, tail_values, tail_rows, tail_count, up_of, neurons, width, is_compact, is_aligned
):
    """Compute u where a neuron fires; a warp takes 32 neurons of a row."""
    lane = global_thread() % 32
    chunks = (neurons + 31) // 32
    item = global_thread() // 32
    while item < load(tail_count, 0) * chunks:
        i = item // chunks
        first = item % chunks * 32
        x_start = types.int64(load(tail_rows, i)) * width
        start = start_of(tail_rows, i, neurons, is_compact)
        firing = lanes_that_fire(tail_values, start, first + lane, neurons)
        up = number(x, 0)
        while firing != 0:
            j = lowest_bit(firing)
            dot = warp_dot(x, x, x_start, up_weight, (first + j) * width, width, is_aligned)
            if lane == j:
                up = dot
            firing &= firing - 1
        if first + lane < neurons:
            store(up_of, i * neurons + first + lane, up)
        item += grid_threads() // 32


@kernel(threads=THREADS)
def tail_d_hidden(
    dy, down_weight, tail_values, tail_rows, tail_count, l1_scale, up_of, d_hidden_of, neurons,
    width, is_compact, gated, is_aligned,
):  # fmt: skip
    """Compute dh where a neuron fires; a warp takes 32 neurons of a row."""
    l1 = number(dy, load(l1_scale, 0))
    lane = global_thread() % 32
    chunks = (neurons + 31) // 32
    item = global_thread() // 32
    while item < load(tail_count, 0) * chunks:
        i = item // chunks
        first = item % chunks * 32
        dy_start = types.int64(load(tail_rows, i)) * width
        start = start_of(tail_rows, i, neurons, is_compact)
        firing = lanes_that_fire(tail_values, start, first + lane, neurons)
        gradient = number(dy, 0)
        while firing != 0:
            j = lowest_bit(firing)
            dot = warp_dot(dy, dy, dy_start, down_weight, (first + j) * width, width, is_aligned)
            if lane == j:
                hidden = number(dy, load(tail_values, start + first + j))
                if gated != 0:
                    hidden *= load(up_of, i * neurons + first + j)
                gradient = dot + l1 * sign(hidden, number(dy, 1))
            firing &= firing - 1
        if first + lane < neurons:
            store(d_hidden_of, i * neurons + first + lane, gradient)
        item += grid_threads() // 32


@device_function
def sum_of_warps(parts, sums):
    """Return eight sums over a block's warps, in order, to the first of them; for 256 columns."""
    for c in range(8):
        parts[types.int64(cuda.threadIdx.x) * 8 + c] = sums[c]
    cuda.syncthreads()  # all parts are there
    thread = types.int64(cuda.threadIdx.x)
    if thread < 32:
        for warp in range(1, cuda.blockDim.x // 32):
            place = (warp * 32 + thread) * 8
            sums = (
                sums[0] + parts[place],
                sums[1] + parts[place + 1],
                sums[2] + parts[place + 2],
                sums[3] + parts[place + 3],
                sums[4] + parts[place + 4],
                sums[5] + parts[place + 5],
                sums[6] + parts[place + 6],
                sums[7] + parts[place + 7],
            )
    cuda.syncthreads()  # the next sums go to the same place
    return sums


@kernel(threads=THREADS)
def tail_outputs(
    down_weight, tail_values, tail_rows, tail_count, up_of, y, nonzeros, absolute_sums, fired,
    neurons, width, is_compact, gated, is_aligned,
):  # fmt: skip
    """Compute y, and what rows of h hold; a block takes 256 columns of a row."""
    parts = cuda.shared.array(PARTS, arithmetic_type(y))
    thread = types.int64(cuda.threadIdx.x)
    lane = thread % 32
    warps = types.int64(cuda.blockDim.x) // 32
    chunks = (width + 255) // 256
    item = types.int64(cuda.blockIdx.x)
    while item < load(tail_count, 0) * chunks:
        i = item // chunks
        d = item % chunks * 256 + lane * 8
        start = start_of(tail_rows, i, neurons, is_compact)
        sums = eight_zeros(y)
        count = 0
        total = number(y, 0)
        first = thread // 32 * 32
        while first < neurons:
            firing = lanes_that_fire(tail_values, start, first + lane, neurons)
            while firing != 0:
                neuron = first + lowest_bit(firing)
                hidden = number(y, load(tail_values, start + neuron))
                if gated != 0:
                    hidden *= load(up_of, i * neurons + neuron)
                if hidden != 0:
                    numbers = load_eight(down_weight, neuron * width, d, width, is_aligned)
                    sums = add_scaled(sums, hidden, numbers)
                    if lane == 0:
                        count += 1
                        total += abs(hidden)
                        store(fired, neuron, 1)
                firing &= firing - 1
            first += warps * 32
        row = types.int64(load(tail_rows, i))
        count_of_row = block_sum(count)
        total_of_row = block_sum(total)
        if gated != 0 and item % chunks == 0 and thread == 0:
            store(nonzeros, row, count_of_row)
            store(absolute_sums, row, total_of_row)
        sums = sum_of_warps(parts, sums)
        if thread < 32:
            store_eight(y, row * width, d, width, sums, is_aligned)
        item += cuda.gridDim.x


@kernel(threads=THREADS)
def tail_inputs(
    pattern_weight, up_weight, tail_values, tail_rows, tail_count, up_of, d_hidden_of, dx, neurons,
    width, is_compact, gated, is_aligned,
):  # fmt: skip
    """Compute dx; a block takes 256 columns of a row."""
    parts = cuda.shared.array(PARTS, arithmetic_type(dx))
    thread = types.int64(cuda.threadIdx.x)
    lane = thread % 32
    warps = types.int64(cuda.blockDim.x) // 32
    chunks = (width + 255) // 256
    item = types.int64(cuda.blockIdx.x)
    while item < load(tail_count, 0) * chunks:
        i = item // chunks
        d = item % chunks * 256 + lane * 8
        start = start_of(tail_rows, i, neurons, is_compact)
        sums = eight_zeros(dx)
        first = thread // 32 * 32
        while first < neurons:
            firing = lanes_that_fire(tail_values, start, first + lane, neurons)
            while firing != 0:
                neuron = first + lowest_bit(firing)
                d_pattern = number(dx, load(d_hidden_of, i * neurons + neuron))
                if gated != 0:
                    d_up = d_pattern * load(tail_values, start + neuron)
                    d_pattern *= load(up_of, i * neurons + neuron)
                    numbers = load_eight(up_weight, neuron * width, d, width, is_aligned)
                    sums = add_scaled(sums, d_up, numbers)
                numbers = load_eight(pattern_weight, neuron * width, d, width, is_aligned)
                sums = add_scaled(sums, d_pattern, numbers)
                firing &= firing - 1
            first += warps * 32
        sums = sum_of_warps(parts, sums)
        if thread < 32:
            row = types.int64(load(tail_rows, i))
            store_eight(dx, row * width, d, width, sums, is_aligned)
        item += cuda.gridDim.x


@kernel(threads=THREADS)
def tail_gradients(
    dy, x, tail_values, tail_rows, tail_count, up_of, d_hidden_of, pattern_grad, up_grad,
    down_grad, neurons, width, is_compact, gated, is_aligned,
):  # fmt: skip
    """Add to the gradients; a block takes 256 columns of a neuron, a lane of it a row's numbers."""
    parts = cuda.shared.array(PARTS, arithmetic_type(x))
    thread = types.int64(cuda.threadIdx.x)
    lane = thread % 32
    warps = types.int64(cuda.blockDim.x) // 32
    chunks = (width + 255) // 256
    count = types.int64(load(tail_count, 0))
    item = types.int64(cuda.blockIdx.x)
    while count > 0 and item < neurons * chunks:
        neuron = item // chunks
        d = item % chunks * 256 + lane * 8
        pattern_sums = eight_zeros(x)
        up_sums = eight_zeros(x)
        down_sums = eight_zeros(x)
        first = thread // 32 * 32
        any_fires = 0
        while first < count:
            fires = 0
            if first + lane < count:
                start = start_of(tail_rows, first + lane, neurons, is_compact)
                if not load(tail_values, start + neuron) <= 0:
                    fires = 1
            firing = types.int64(ballot(fires)) & 0xFFFFFFFF
            while firing != 0:
                any_fires = 1
                i = first + lowest_bit(firing)
                row = types.int64(load(tail_rows, i))
                start = start_of(tail_rows, i, neurons, is_compact)
                hidden = number(x, load(tail_values, start + neuron))
                d_pattern = number(x, load(d_hidden_of, i * neurons + neuron))
                numbers = load_eight(x, row * width, d, width, is_aligned)
                if gated != 0:
                    up = load(up_of, i * neurons + neuron)
                    up_sums = add_scaled(up_sums, d_pattern * hidden, numbers)
                    d_pattern *= up
                    hidden *= up
                pattern_sums = add_scaled(pattern_sums, d_pattern, numbers)
                numbers = load_eight(dy, row * width, d, width, is_aligned)
                down_sums = add_scaled(down_sums, hidden, numbers)
                firing &= firing - 1
            first += warps * 32
        if cuda.syncthreads_or(any_fires) != 0:
            pattern_sums = sum_of_warps(parts, pattern_sums)
            down_sums = sum_of_warps(parts, down_sums)
            if gated != 0:
                up_sums = sum_of_warps(parts, up_sums)
            if thread < 32:
                add_eight(pattern_grad, neuron * width, d, width, pattern_sums, is_aligned)
                add_eight(down_grad, neuron * width, d, width, down_sums, is_aligned)
                if gated != 0:
                    add_eight(up_grad, neuron * width, d, width, up_sums, is_aligned)
        item += cuda.gridDim.x
