"""Feedforward layers with block-ELL weights on tensor cores, in 16 bits: the kernels.

    forward    g = x Wg^T,  u = x Wu^T,  h = relu(g) * u,  y = h Wd
    backward   dh = dy Wd^T,  du = dh * relu(g),  dg = dh * u * [g > 0],  dx = du Wu + dg Wg
               dWd = h^T dy,  dWu = du^T x,  dWg = dg^T x,  at the blocks

x, y (M, D), g, u, h (M, F), row-major; weights (F, D) in blocks of b x b, b a multiple of 32. Sums
are in float32 and in a fixed order; g and u are rounded to 16 bits before h is made of them.

All products go by *strips* of 64 columns or neurons, of 32 where b is no multiple of 64. A block of
threads computes ROWS rows of a strip of a result, or some blocks of a gradient over a part of the
tokens. What it multiplies passes through a ring of stages in shared memory, copied ahead, and from
there by ``ldmatrix`` to registers.

Bound by what the multiprocessors read from the second-level cache: of x, dy, g, u and h each block
needs its columns once for every block, so larger blocks are faster. With b = 64 hidden_forward
reads 1.7 GB and writes 0.55 GB. Milliseconds on an H200, M = 16384, D = 2048, F = 5632, bfloat16,
10% of the blocks stored:

                        b = 32          b = 64
    hidden_forward      0.50            0.36
    sum_columns         0.20, 0.36      0.13, 0.22      (y, dx)
    hidden_backward     0.40            0.39
    sample_blocks       0.25            0.17 to 0.20    (each of three)
    the others          0.11            0.11            (together)

Tried on Hopper GPUs with the copy engine and wgmma, 256 tokens a tile: for b = 64 a layer's forward
pass took 0.41 ms instead of 0.51, with backward 1.44 instead of 1.71, but layers of some random
shapes came out wrong, so it is not here; for b = 32 it was slower (0.93 and 3.5), because the copy
engine takes as long for 64 bytes of a row as for 128.

Slower: 48 rows of x held in shared memory while the weights pass (hidden_forward 0.63 at both
sizes, hidden_backward 0.53); fragments loaded from memory straight to registers (0.74 and 1.1;
sum_columns 0.35, sample_blocks 0.77 with b = 32); 256 rows a block of threads (0.46 with b = 64);
16 rows a warp (0.67). Two or four stages are as fast as three or slower, but for hidden_backward
with b = 64 (0.36 with two, and four blocks of threads). What counts is that some blocks of threads
wait for memory while others multiply: hence g is rounded to words before u is computed, which
leaves registers for three of them instead of two (0.46 before).
"""

import math

from twell_numba.device.gpu import kernel
from twell_numba.device.gpu.language import (
    FULL_WARP,
    cuda,
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
    warp_sum,
)
from twell_numba.device.gpu.tensor_cores import (
    copy_ahead,
    eight_numbers_of,
    end_of_copies,
    inlined,
    load_four_words,
    load_matrices,
    load_transposed_matrices,
    multiply_add,
    store_four_words,
    wait_for_copies,
    wait_for_older_copies,
    words_of,
)

# Steps of a product in shared memory: one is multiplied, the others are on their way.
STAGES = 3
THREADS = 128
# Rows of a result that a warp and a block of threads compute.
TOKENS = 32
ROWS = THREADS // 32 * TOKENS
# Blocks of threads that a multiprocessor should have room for, with strips of 32 and of 64.
ROOM = {32: 4, 64: 3}
# The same for sampled products, of STEP tokens a step.
SAMPLE_STAGES = 4
SAMPLE_THREADS = 128
SAMPLE_ROOM = 4
STEP = 16


@inlined
def blocks_in_row(columns, first, slots):
    """Return how many blocks a row of blocks has."""
    count = types.int32(0)
    slot = types.int32(cuda.threadIdx.x) % 32
    while slot < slots:
        count += types.int32(load(columns, first + slot) >= 0)
        slot += 32
    return warp_sum(count)


@inlined
def exchanged(strip, row, chunk):
    """Return at which word of a row in shared memory a chunk of eight numbers lies.

    Eight rows' chunks of one number are in different banks.
    """
    if strip == 32:
        row //= 2
    return (chunk ^ (row % (strip // 8))) * 4


@inlined
def stage_after(stage, steps, stages):
    """Return the stage that follows another one after some steps."""
    stage += types.int32(steps)
    if stage >= stages:
        stage -= types.int32(stages)
    return stage


@inlined
def start_product(
    w_to, strip, middle, steps, first, first_at, second, second_at, width, row, rows, i, b
):
    """Return where a thread's numbers begin in X and in a block, and where the first step's are.

    Writes where in a stage the block's rows go: in the order in which a lane's sums are adjacent
    neurons.
    """
    thread = types.int32(cuda.threadIdx.x)
    across = strip // 8
    line = thread // across
    for k in range(strip * across // THREADS):
        w = line + k * (THREADS // across)
        w = w // 32 * 32 + w // 2 % 4 * 8 + w % 32 // 8 * 2 + w % 2
        w_to[k] = (ROWS + w) * (strip // 2) + exchanged(strip, w, thread % across)
    x_from = (row + line) * width + thread % across * 8
    w_from = (i + line) * b + thread % across * 8
    block = types.int64(second_at)
    columns = second[2]
    if middle > 0:
        block = types.int64(first_at)
        columns = first[2]
    column = types.int64(0)
    if steps > 0:
        column = types.int64(load(columns, block)) * b
    return x_from, w_from, block, types.int64(0), column


@inlined
def copy_step(
    step, steps, middle, stage, place, w_to, strip, ring, first, second, second_at,
    width, row, rows, b,
):  # fmt: skip
    """Begin to copy what a step multiplies: rows of X, and a strip of a block's rows.

    ``place`` is where in X, in a block, the block, the column in it and where X's columns begin;
    return that of the next step.
    """
    x_from, w_from, block, c, column = place
    if step < steps:
        X, values, columns = first
        if step >= middle:
            X, values, columns = second
        thread = types.int32(cuda.threadIdx.x)
        across = strip // 8
        line = thread // across
        target = stage * ((ROWS + strip) * (strip // 2))
        to = target + line * (strip // 2) + exchanged(strip, line, thread % across)
        limit = types.int32(min(rows - row, ROWS)) - line
        at = x_from + (column + c)
        for k in range(ROWS * across // THREADS):
            lines = k * (THREADS // across)
            copy_ahead(ring, to + lines * (strip // 2), X, at, lines < limit)
            at += (THREADS // across) * width
        at = w_from + block * (b * b) + c
        for k in range(strip * across // THREADS):
            copy_ahead(ring, target + w_to[k], values, at, 1)
            at += (THREADS // across) * b
        c += strip
        if c == b:
            c = types.int64(0)
            block += 1
        if step + 1 == middle:
            block = second_at
            columns = second[2]
        if step + 1 < steps:
            column = types.int64(load(columns, block)) * b
    end_of_copies()
    return x_from, w_from, block, c, column


@inlined
def add_step(sums, strip, stage, ring, X):
    """Add what a step multiplies to the sums of TOKENS rows by a strip of each warp."""
    thread = types.int32(cuda.threadIdx.x)
    lane = thread % 32
    target = stage * ((ROWS + strip) * (strip // 2))
    left = target + (thread // 32 * TOKENS + lane % 16) * (strip // 2)
    right = target + (ROWS + lane // 16 * 8 + lane % 8) * (strip // 2)
    for k in range(strip // 16):
        chunk = exchanged(strip, lane % 8, 2 * k + lane // 16)
        a = load_matrices(ring, left + chunk)
        c = load_matrices(ring, left + 16 * (strip // 2) + chunk)
        chunk = exchanged(strip, lane % 8, 2 * k + lane // 8 % 2)
        for q in range(strip // 16):
            w = load_matrices(ring, right + q * 16 * (strip // 2) + chunk)
            top = q * 8
            multiply_add(X, sums, top, a[0], a[1], a[2], a[3], w[0], w[1])
            multiply_add(X, sums, top + 4, a[0], a[1], a[2], a[3], w[2], w[3])
            bottom = strip // 2 + q * 8
            multiply_add(X, sums, bottom, c[0], c[1], c[2], c[3], w[0], w[1])
            multiply_add(X, sums, bottom + 4, c[0], c[1], c[2], c[3], w[2], w[3])


@inlined
def add_steps(
    sums, begin, end, steps, middle, stage, place, w_to, strip, ring, first, second, second_at,
    width, row, rows, b,
):  # fmt: skip
    """Do the steps from ``begin`` to ``end``; return the stage and the place that follow."""
    step = types.int32(begin)
    while step < end:
        wait_for_copies()
        cuda.syncthreads()
        place = copy_step(
            step + types.int32(STAGES - 1), steps, middle, stage_after(stage, STAGES - 1, STAGES),
            place, w_to, strip, ring, first, second, second_at, width, row, rows, b,
        )  # fmt: skip
        add_step(sums, strip, stage, ring, first[0])
        stage = stage_after(stage, 1, STAGES)
        step += types.int32(1)
    return stage, place


@inlined
def clear(sums, size):
    """Set sums to 0."""
    for k in range(size):
        sums[k] = types.float32(0)


@inlined
def eight_sums(pointer, sums, strip, tile, half, n):
    """Return a lane's sums of eight adjacent neurons of a token, as words."""
    k = tile * (strip // 2) + n * 16 + half * 2
    return words_of(
        pointer, sums[k], sums[k + 1], sums[k + 4], sums[k + 5],
        sums[k + 8], sums[k + 9], sums[k + 12], sums[k + 13],
    )  # fmt: skip


@inlined
def gated_relu(g, u, gated):
    """Return h of an entry; NaN is kept."""
    h = g
    if gated != 0:
        h = g * u
    if g <= 0:
        h = types.float32(0)
    return h


@inlined
def put_gate(words, sums, strip, kept_gate, row, rows, neurons, neuron, kept):
    """Round g of a strip to words, and write them."""
    lane = types.int32(cuda.threadIdx.x) % 32
    token = row + types.int32(cuda.threadIdx.x) // 32 * TOKENS + lane // 4
    for tile in range(2):
        for half in range(2):
            for n in range(strip // 32):
                g = eight_sums(kept_gate, sums, strip, tile, half, n)
                first = ((tile * 2 + half) * (strip // 32) + n) * 4
                for k in range(4):
                    words[first + k] = g[k]
                at = token + tile * 16 + half * 8
                if kept != 0 and at < rows:
                    start = at * neurons + neuron + n * 32 + lane % 4 * 8
                    store_four_words(kept_gate, start, g)


@inlined
def finish_hidden(
    words, sums, strip, n, total, counted, hidden, kept_up, counts, absolute_sums,
    row, rows, neurons, neuron, gated,
):  # fmt: skip
    """Write h and u of 32 neurons of a strip, and what is counted in h over TOKENS rows."""
    lane = types.int32(cuda.threadIdx.x) % 32
    row += types.int32(cuda.threadIdx.x) // 32 * TOKENS
    neuron += n * 32 + lane % 4 * 8
    for k in range(8):
        total[k] = types.float32(0)
        counted[k] = types.int32(0)
    for tile in range(2):
        for half in range(2):
            token = row + tile * 16 + half * 8 + lane // 4
            if token < rows:
                first = ((tile * 2 + half) * (strip // 32) + n) * 4
                g_words = (words[first], words[first + 1], words[first + 2], words[first + 3])
                g = eight_numbers_of(hidden, g_words)
                u = g
                if gated != 0:
                    u_words = eight_sums(hidden, sums, strip, tile, half, n)
                    store_four_words(kept_up, token * neurons + neuron, u_words)
                    u = eight_numbers_of(hidden, u_words)
                h = (
                    gated_relu(g[0], u[0], gated), gated_relu(g[1], u[1], gated),
                    gated_relu(g[2], u[2], gated), gated_relu(g[3], u[3], gated),
                    gated_relu(g[4], u[4], gated), gated_relu(g[5], u[5], gated),
                    gated_relu(g[6], u[6], gated), gated_relu(g[7], u[7], gated),
                )  # fmt: skip
                store_four_words(hidden, token * neurons + neuron, words_of(hidden, *h))
                for k in range(8):
                    total[k] += abs(h[k])
                    counted[k] += types.int32(h[k] != 0)
    for k in range(8):
        all_counted = sum_of_groups(counted[k])
        whole = sum_of_groups(total[k])
        if lane // 4 == 0 and row < rows:
            part = row // TOKENS * neurons + neuron + k
            store(counts, part, all_counted)
            store(absolute_sums, part, whole)


@inlined
def sum_of_groups(value):
    """Return the sum over a warp's eight groups of four lanes."""
    value += cuda.shfl_xor_sync(FULL_WARP, value, 4)
    value += cuda.shfl_xor_sync(FULL_WARP, value, 8)
    value += cuda.shfl_xor_sync(FULL_WARP, value, 16)
    return value


@inlined
def d_gate_and_d_up(gradient, scale, g, u, gated):
    """Return dg and du of an entry from dh; ``scale`` is that of the L1 term."""
    h = gated_relu(g, u, gated)
    slope = types.float32(0)
    if h > 0:
        slope = scale
    if h < 0:
        slope = -scale
    if math.isnan(h):
        slope = h
    gradient += slope
    if g <= 0:
        gradient = types.float32(0)
    d_up = gradient * g
    if gated != 0:
        gradient = gradient * u
    return gradient, d_up


@inlined
def finish_d_hidden(
    sums, strip, gate, up, l1_scale, d_gate, d_up, row, rows, neurons, neuron, gated
):
    """Write dg and du of a strip."""
    lane = types.int32(cuda.threadIdx.x) % 32
    row += types.int32(cuda.threadIdx.x) // 32 * TOKENS
    scale = types.float32(load(l1_scale, 0))
    for tile in range(2):
        for half in range(2):
            token = row + tile * 16 + half * 8 + lane // 4
            if token < rows:
                for n in range(strip // 32):
                    start = token * neurons + neuron + n * 32 + lane % 4 * 8
                    g = eight_numbers_of(gate, load_four_words(gate, start))
                    u = g
                    if gated != 0:
                        u = eight_numbers_of(up, load_four_words(up, start))
                    k = tile * (strip // 2) + n * 16 + half * 2
                    d0 = d_gate_and_d_up(sums[k], scale, g[0], u[0], gated)
                    d1 = d_gate_and_d_up(sums[k + 1], scale, g[1], u[1], gated)
                    d2 = d_gate_and_d_up(sums[k + 4], scale, g[2], u[2], gated)
                    d3 = d_gate_and_d_up(sums[k + 5], scale, g[3], u[3], gated)
                    d4 = d_gate_and_d_up(sums[k + 8], scale, g[4], u[4], gated)
                    d5 = d_gate_and_d_up(sums[k + 9], scale, g[5], u[5], gated)
                    d6 = d_gate_and_d_up(sums[k + 12], scale, g[6], u[6], gated)
                    d7 = d_gate_and_d_up(sums[k + 13], scale, g[7], u[7], gated)
                    words = words_of(gate, d0[0], d1[0], d2[0], d3[0], d4[0], d5[0], d6[0], d7[0])
                    store_four_words(d_gate, start, words)
                    if gated != 0:
                        words = words_of(
                            gate, d0[1], d1[1], d2[1], d3[1], d4[1], d5[1], d6[1], d7[1]
                        )
                        store_four_words(d_up, start, words)


def make_hidden_forward(strip):
    """Return the kernel for strips of 32 or 64 neurons."""
    half, quarter = strip // 2, strip * strip // 8 // THREADS
    size, room = STAGES * (ROWS + strip) * strip * 2, ROOM[strip]

    @kernel(threads=THREADS, shared_memory=size, blocks_per_multiprocessor=room)
    def hidden_forward(
        x, gate, gate_columns, gate_slots, up, up_columns, up_slots, hidden, kept_gate, kept_up,
        counts, absolute_sums, rows, width, neurons, b, gated,
    ):  # fmt: skip
        """Compute h, g and u."""
        ring = cuda.shared.array(0, types.uint32)
        sums = cuda.local.array(strip, types.float32)
        words = cuda.local.array(half, types.uint32)
        total = cuda.local.array(8, types.float32)
        counted = cuda.local.array(8, types.int32)
        w_to = cuda.local.array(quarter, types.int32)
        strips = types.uint32(neurons) // types.uint32(strip)
        first, second = (x, gate, gate_columns), (x, up, up_columns)
        item = types.uint32(cuda.blockIdx.x)
        while item < types.uint32((rows + ROWS - 1) // ROWS) * strips:
            row = types.int64(item // strips) * ROWS
            neuron = types.int64(item % strips) * strip
            block_row = types.int64(types.uint32(neuron) // types.uint32(b))
            i = neuron - block_row * b
            first_at = block_row * gate_slots
            second_at = block_row * up_slots
            in_block = types.int32(types.uint32(b) // types.uint32(strip))
            middle = blocks_in_row(gate_columns, first_at, gate_slots) * in_block
            steps = middle
            if gated != 0:
                steps += blocks_in_row(up_columns, second_at, up_slots) * in_block
            place = start_product(
                w_to, strip, middle, steps, first, first_at, second, second_at,
                width, row, rows, i, b,
            )  # fmt: skip
            for step in range(STAGES - 1):
                place = copy_step(
                    types.int32(step), steps, middle, types.int32(step), place, w_to, strip, ring,
                    first, second, second_at, width, row, rows, b,
                )  # fmt: skip
            clear(sums, strip)
            stage, place = add_steps(
                sums, 0, middle, steps, middle, types.int32(0), place, w_to, strip, ring,
                first, second, second_at, width, row, rows, b,
            )  # fmt: skip
            put_gate(words, sums, strip, kept_gate, row, rows, neurons, neuron, gated)
            clear(sums, strip)
            add_steps(
                sums, middle, steps, steps, middle, stage, place, w_to, strip, ring,
                first, second, second_at, width, row, rows, b,
            )  # fmt: skip
            cuda.syncthreads()  # the next copies are written to the same place
            finish_hidden(
                words, sums, strip, 0, total, counted, hidden, kept_up, counts, absolute_sums,
                row, rows, neurons, neuron, gated,
            )  # fmt: skip
            if strip == 64:
                finish_hidden(
                    words, sums, strip, 1, total, counted, hidden, kept_up, counts, absolute_sums,
                    row, rows, neurons, neuron, gated,
                )  # fmt: skip
            item += types.uint32(cuda.gridDim.x)

    return hidden_forward


@inlined
def multiply(
    sums, w_to, strip, ring, first, first_at, first_count, second, second_at, second_count,
    width, row, rows, i, b,
):  # fmt: skip
    """Compute the sum of two products of ROWS rows with rows i to i + strip of some blocks."""
    in_block = types.int32(types.uint32(b) // types.uint32(strip))
    middle = types.int32(first_count) * in_block
    steps = middle + types.int32(second_count) * in_block
    clear(sums, strip)
    place = start_product(
        w_to, strip, middle, steps, first, first_at, second, second_at, width, row, rows, i, b
    )
    for step in range(STAGES - 1):
        place = copy_step(
            types.int32(step), steps, middle, types.int32(step), place, w_to, strip, ring,
            first, second, second_at, width, row, rows, b,
        )  # fmt: skip
    add_steps(
        sums, 0, steps, steps, middle, types.int32(0), place, w_to, strip, ring,
        first, second, second_at, width, row, rows, b,
    )  # fmt: skip
    cuda.syncthreads()  # the next product's copies are written to the same place


def make_hidden_backward(strip):
    """Return the kernel for strips of 32 or 64 neurons."""
    quarter = strip * strip // 8 // THREADS
    size, room = STAGES * (ROWS + strip) * strip * 2, ROOM[strip]

    @kernel(threads=THREADS, shared_memory=size, blocks_per_multiprocessor=room)
    def hidden_backward(
        dy, down, down_columns, down_slots, gate, up, l1_scale, d_gate, d_up,
        rows, width, neurons, b, gated,
    ):  # fmt: skip
        """Compute dg and du."""
        ring = cuda.shared.array(0, types.uint32)
        sums = cuda.local.array(strip, types.float32)
        w_to = cuda.local.array(quarter, types.int32)
        strips = types.uint32(neurons) // types.uint32(strip)
        item = types.uint32(cuda.blockIdx.x)
        operand = (dy, down, down_columns)
        while item < types.uint32((rows + ROWS - 1) // ROWS) * strips:
            row = types.int64(item // strips) * ROWS
            neuron = types.int64(item % strips) * strip
            block_row = types.int64(types.uint32(neuron) // types.uint32(b))
            i = neuron - block_row * b
            first = block_row * down_slots
            multiply(
                sums, w_to, strip, ring, operand, first,
                blocks_in_row(down_columns, first, down_slots), operand, first, 0,
                width, row, rows, i, b,
            )  # fmt: skip
            finish_d_hidden(
                sums, strip, gate, up, l1_scale, d_gate, d_up, row, rows, neurons, neuron, gated
            )
            item += types.uint32(cuda.gridDim.x)

    return hidden_backward


@kernel(threads=256)
def turn_blocks(values, starts, blocks, turned, block_rows, columns, slots, b):
    """Write the transposes of blocks in the order of columns, and the row each comes from.

    One block of threads for each.
    """
    target = types.int64(cuda.blockIdx.x)
    if target < load(starts, columns):
        block = types.int64(load(blocks, target))
        side = types.int32(b)
        i = types.int32(cuda.threadIdx.x)
        while i < side * side:
            value = load(values, block * b * b + i % side * b + i // side)
            store(turned, target * b * b + i, value)
            i += types.int32(cuda.blockDim.x)
        if cuda.threadIdx.x == 0:
            store(block_rows, target, block // slots)


def make_sum_columns(strip):
    """Return the kernel for strips of 32 or 64 columns."""
    quarter = strip * strip // 8 // THREADS
    size, room = STAGES * (ROWS + strip) * strip * 2, ROOM[strip]

    @kernel(threads=THREADS, shared_memory=size, blocks_per_multiprocessor=room)
    def sum_columns(
        first_left, first_turned, first_rows, first_starts,
        second_left, second_turned, second_rows, second_starts,
        out, rows, inner, width, b, matrices,
    ):  # fmt: skip
        """Compute left @ W, or the sum of two of them, from W's transposed blocks by column."""
        ring = cuda.shared.array(0, types.uint32)
        sums = cuda.local.array(strip, types.float32)
        w_to = cuda.local.array(quarter, types.int32)
        strips = types.uint32(width) // types.uint32(strip)
        lane = types.int32(cuda.threadIdx.x) % 32
        item = types.uint32(cuda.blockIdx.x)
        while item < types.uint32((rows + ROWS - 1) // ROWS) * strips:
            row = types.int64(item // strips) * ROWS
            start = types.int64(item % strips) * strip
            column = types.int64(types.uint32(start) // types.uint32(b))
            first = types.int64(load(first_starts, column))
            second = types.int64(load(second_starts, column))
            second_count = types.int64(0)
            if matrices == 2:
                second_count = types.int64(load(second_starts, column + 1)) - second
            multiply(
                sums, w_to, strip, ring, (first_left, first_turned, first_rows), first,
                types.int64(load(first_starts, column + 1)) - first,
                (second_left, second_turned, second_rows), second, second_count,
                inner, row, rows, start - column * b, b,
            )  # fmt: skip
            token = row + types.int32(cuda.threadIdx.x) // 32 * TOKENS + lane // 4
            for tile in range(2):
                for half in range(2):
                    at = token + tile * 16 + half * 8
                    if at < rows:
                        for n in range(strip // 32):
                            words = eight_sums(out, sums, strip, tile, half, n)
                            place = at * width + start + n * 32 + lane % 4 * 8
                            store_four_words(out, place, words)
            item += types.uint32(cuda.gridDim.x)

    return sum_columns


@inlined
def locate_piece(piece, blocks, block_columns, slots, strip, b):
    """Return the row and the column at which a strip x strip piece begins, and its first value."""
    in_block = types.int32(types.uint32(b) // types.uint32(strip))
    whole = types.uint32(piece) // types.uint32(in_block * in_block)
    inside = types.uint32(piece) - whole * types.uint32(in_block * in_block)
    i = types.int32(inside % types.uint32(in_block)) * strip
    j = types.int32(inside // types.uint32(in_block)) * strip
    block = types.int64(load(blocks, whole))
    row = types.int64(types.uint32(block) // types.uint32(slots)) * b + i
    column = types.int64(load(block_columns, block)) * b + j
    return row, column, (block * b + i) * b + j


@inlined
def copy_tokens(ring, stage, strip, left, left_from, neurons, right, right_from, width, token, end):
    """Begin to copy what STEP tokens multiply: strips of left, and of right."""
    thread = types.int32(cuda.threadIdx.x)
    across = strip // 8
    line = thread // across
    to = stage * (SAMPLE_THREADS * STEP) + line * (strip // 2)
    to += exchanged(strip, line, thread % across)
    lines = SAMPLE_THREADS // across * (strip // 2)
    at = token + line % STEP
    is_there = at < end
    start = at * neurons
    for k in range(STEP // 8):
        copy_ahead(ring, to + k * lines, left, start + left_from[k], is_there)
    to += SAMPLE_THREADS * (STEP // 2)
    start = at * width
    for k in range(STEP // 8):
        if right_from[k] >= 0:
            copy_ahead(ring, to + k * lines, right, start + right_from[k], is_there)
    end_of_copies()


@inlined
def add_tokens(sums, strip, ring, stage, slot, left):
    """Add what STEP tokens add to 32 rows of a warp's piece, of which ``slot`` has the columns."""
    thread = types.int32(cuda.threadIdx.x)
    lane = thread % 32
    words = strip // 2
    target = stage * (SAMPLE_THREADS * STEP)
    rows = thread // 32 % (strip // 32) * 4
    mine = target + thread // strip * (STEP * words) + (lane // 16 * 8 + lane % 8) * words
    other = target + SAMPLE_THREADS * (STEP // 2) + slot * (STEP * words)
    other += (lane // 8 % 2 * 8 + lane % 8) * words
    for k in range(STEP // 16):
        chunk = exchanged(strip, lane % 8, rows + lane // 8 % 2)
        a = load_transposed_matrices(ring, mine + k * 16 * words + chunk)
        chunk = exchanged(strip, lane % 8, rows + 2 + lane // 8 % 2)
        c = load_transposed_matrices(ring, mine + k * 16 * words + chunk)
        for q in range(strip // 16):
            chunk = exchanged(strip, lane % 8, 2 * q + lane // 16)
            w = load_transposed_matrices(ring, other + k * 16 * words + chunk)
            top = q * 8
            multiply_add(left, sums, top, a[0], a[1], a[2], a[3], w[0], w[1])
            multiply_add(left, sums, top + 4, a[0], a[1], a[2], a[3], w[2], w[3])
            bottom = strip // 2 + q * 8
            multiply_add(left, sums, bottom, c[0], c[1], c[2], c[3], w[0], w[1])
            multiply_add(left, sums, bottom + 4, c[0], c[1], c[2], c[3], w[2], w[3])


def make_sample_blocks(strip):
    """Return the kernel for pieces of 32 x 32 or 64 x 64 numbers."""
    size = SAMPLE_STAGES * 2 * SAMPLE_THREADS * STEP * 2
    copies, together = STEP // 8, SAMPLE_THREADS // strip

    @kernel(threads=SAMPLE_THREADS, shared_memory=size, blocks_per_multiprocessor=SAMPLE_ROOM)
    def sample_blocks(
        left, right, starts, blocks, block_columns, partial,
        rows, neurons, width, slots, b, groups, parts, tokens_of_part,
    ):  # fmt: skip
        """Add up left^T @ right at a matrix's blocks, over a part of the tokens each.

        A block of threads takes pieces that follow each other down the columns of blocks; those of
        one column share what they need of ``right``.
        """
        ring = cuda.shared.array(0, types.uint32)
        sums = cuda.local.array(strip, types.float32)
        left_from = cuda.local.array(copies, types.int32)
        right_from = cuda.local.array(copies, types.int32)
        thread = types.int32(cuda.threadIdx.x)
        lane = thread % 32
        in_block = types.int32(types.uint32(b) // types.uint32(strip))
        pieces = types.int32(load(starts, types.uint32(width) // types.uint32(b)))
        pieces *= in_block * in_block
        item = types.uint32(cuda.blockIdx.x)
        while item < types.uint32(parts * groups):
            part = types.int64(item // types.uint32(groups))
            first = types.int32(item % types.uint32(groups)) * types.int32(together)
            if first < pieces:
                for k in range(copies):
                    line = thread // (strip // 8) + k * (SAMPLE_THREADS // (strip // 8))
                    piece = first + line // STEP
                    right_from[k] = -1
                    place = locate_piece(
                        min(piece, pieces - 1), blocks, block_columns, slots, strip, b
                    )
                    left_from[k] = place[0] + thread % (strip // 8) * 8
                    before = types.int64(-1)
                    if piece > first:
                        other = locate_piece(
                            min(piece, pieces) - 1, blocks, block_columns, slots, strip, b
                        )
                        before = other[1]
                    if place[1] != before:
                        right_from[k] = place[1] + thread % (strip // 8) * 8
                slot = thread // strip
                piece = first + slot
                mine = locate_piece(min(piece, pieces - 1), blocks, block_columns, slots, strip, b)
                is_same = slot > 0
                while is_same:
                    other = locate_piece(
                        min(first + slot, pieces) - 1, blocks, block_columns, slots, strip, b
                    )
                    is_same = other[1] == mine[1]
                    if is_same:
                        slot -= types.int32(1)
                        is_same = slot > 0
                clear(sums, strip)
                token = part * tokens_of_part
                end = min(rows, token + tokens_of_part)
                for stage in range(SAMPLE_STAGES - 1):
                    copy_tokens(
                        ring, types.int32(stage), strip, left, left_from, neurons,
                        right, right_from, width, token + stage * STEP, end,
                    )  # fmt: skip
                stage = types.int32(0)
                while token < end:
                    wait_for_older_copies()
                    cuda.syncthreads()
                    copy_tokens(
                        ring, stage_after(stage, SAMPLE_STAGES - 1, SAMPLE_STAGES), strip,
                        left, left_from, neurons, right, right_from, width,
                        token + (SAMPLE_STAGES - 1) * STEP, end,
                    )  # fmt: skip
                    if piece < pieces:
                        add_tokens(sums, strip, ring, stage, slot, left)
                    stage = stage_after(stage, 1, SAMPLE_STAGES)
                    token += STEP
                cuda.syncthreads()  # the next copies are written to the same place
                if piece < pieces:
                    line = thread // 32 % (strip // 32) * 32 + lane // 4
                    start = part * (neurons // b * slots * b * b) + mine[2]
                    for tile in range(2):
                        for half in range(2):
                            at = start + (line + tile * 16 + half * 8) * b + lane % 4 * 2
                            for q in range(strip // 8):
                                k = tile * (strip // 2) + q * 4 + half * 2
                                store(partial, at + q * 8, sums[k])
                                store(partial, at + q * 8 + 1, sums[k + 1])
            item += types.uint32(cuda.gridDim.x)

    return sample_blocks


hidden_forward_32, hidden_forward_64 = make_hidden_forward(32), make_hidden_forward(64)
hidden_backward_32, hidden_backward_64 = make_hidden_backward(32), make_hidden_backward(64)
sum_columns_32, sum_columns_64 = make_sum_columns(32), make_sum_columns(64)
sample_blocks_32, sample_blocks_64 = make_sample_blocks(32), make_sample_blocks(64)
# The most that a block of threads takes.
SHARED_MEMORY = hidden_forward_64.shared_memory


@kernel(threads=256)
def add_parts(partial, block_columns, gradient, size, block_size, parts):
    """Add the parts' sums to a gradient, where there are blocks; four numbers a thread."""
    i = global_thread() * 4
    while i < size:
        if load(block_columns, i // block_size) >= 0:
            for k in range(4):
                total = load(partial, i + k)
                for part in range(1, parts):
                    total += load(partial, part * size + i + k)
                store(gradient, i + k, number(gradient, load(gradient, i + k) + total))
        i += grid_threads() * 4


@kernel(threads=1024)
def add_counts(counts, part_sums, nonzeros, absolute_sums, fired, parts, neurons):
    """Add up what was counted for each neuron; 32 neurons a block of threads."""
    totals = cuda.shared.array(1024, types.float64)
    numbers = cuda.shared.array(1024, types.int64)
    lane = types.int32(cuda.threadIdx.x) % 32
    item = types.int64(cuda.blockIdx.x)
    while item * 32 < neurons:
        neuron = item * 32 + lane
        count = types.int64(0)
        total = types.float64(0)
        part = types.int64(cuda.threadIdx.x // 32)
        while part < parts and neuron < neurons:
            count += load(counts, part * neurons + neuron)
            total += load(part_sums, part * neurons + neuron)
            part += cuda.blockDim.x // 32
        totals[cuda.threadIdx.x] = total
        numbers[cuda.threadIdx.x] = count
        cuda.syncthreads()
        if cuda.threadIdx.x < 32 and neuron < neurons:
            for warp in range(1, cuda.blockDim.x // 32):
                count += numbers[warp * 32 + lane]
                total += totals[warp * 32 + lane]
            store(nonzeros, neuron, count)
            store(absolute_sums, neuron, total)
            store(fired, neuron, types.int64(count != 0))
        cuda.syncthreads()
        item += cuda.gridDim.x
