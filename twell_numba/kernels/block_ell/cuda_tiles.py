"""Feedforward layers with block-ELL weights on tensor cores, in 16 bits: the kernels.

    forward    g = x Wg^T,  u = x Wu^T,  h = relu(g) * u,  y = h Wd
    backward   dh = dy Wd^T,  du = dh * relu(g),  dg = dh * u * [g > 0],  dx = du Wu + dg Wg
               dWd = h^T dy,  dWu = du^T x,  dWg = dg^T x,  at the blocks

x, y (M, D), g, u, h (M, F), row-major; weights (F, D) in blocks of b x b, b a multiple of 32. All
products go by *strips* of 64 columns or neurons, of 32 where b is no multiple of 64. A block of
threads computes a strip of a result for as many rows as it has threads, or a strip of columns of
some blocks of a gradient. What it multiplies passes through shared memory, ``STAGES`` steps on
their way at a time. Sums are in float32 and in a fixed order.

Bound by what the multiprocessors read from the second-level cache: of x, dy, g, u and h each block
needs its b columns once for every block.
"""

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
    store_eight_numbers,
    wait_for_copies,
)

# Steps of a product in shared memory; ``wait_for_copies`` leaves one less than that on their way.
STAGES = 3
THREADS = 128
# Rows of a result that a warp computes.
TOKENS = 32
# Tokens of a step of a sampled product.
STEP = 32
SAMPLE_THREADS = 256


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
def swizzled(strip):
    """Return by what the chunks of eight numbers of a row are exchanged, for lane % 8 as the row.

    Eight rows' chunks of one number then lie in different banks.
    """
    row = types.int32(cuda.threadIdx.x) % 8
    if strip == 32:
        row //= 2
    return row


@inlined
def copy_step(
    step, steps, middle, strip, ring, X1, values1, columns1, first1, X2, values2, columns2, first2,
    width, row, rows, i, b,
):  # fmt: skip
    """Begin to copy what a step multiplies: rows of X, and a strip of a block's rows."""
    if step < steps:
        X, values, columns, block, inside = X1, values1, columns1, first1, step
        if step >= middle:
            X, values, columns, block, inside = X2, values2, columns2, first2, step - middle
        in_block = types.uint32(b // strip)
        block += types.uint32(inside) // in_block
        c = types.int32(types.uint32(inside) % in_block) * strip
        thread = types.int32(cuda.threadIdx.x)
        threads = types.int32(cuda.blockDim.x)
        across = strip // 8
        chunk = thread % across
        line = thread // across
        exchange = line % 8
        if strip == 32:
            exchange = line // 2 % 4
        target = step % STAGES * ((threads + strip) * (strip // 2))
        place = target + line * (strip // 2) + (chunk ^ exchange) * 4
        source = types.int64(load(columns, block)) * b + c + chunk * 8
        for k in range(across):
            token = min(row + line + k * (threads // across), rows - 1)
            copy_ahead(
                ring, place + k * (threads // across) * (strip // 2), X, token * width + source, 1
            )
        target += threads * (strip // 2)
        source = (block * b + i) * b + c + chunk * 8
        while line < strip:
            # rows in the order in which a lane's sums are adjacent neurons
            w = line // 32 * 32 + line // 2 % 4 * 8 + line % 32 // 8 * 2 + line % 2
            exchange = w % 8
            if strip == 32:
                exchange = w // 2 % 4
            place = target + w * (strip // 2) + (chunk ^ exchange) * 4
            copy_ahead(ring, place, values, source + line * b, 1)
            line += threads // across
    end_of_copies()


@inlined
def add_step(sums, first_sum, strip, step, ring, X):
    """Add what a step multiplies to the sums of TOKENS rows by a strip of each warp."""
    thread = types.int32(cuda.threadIdx.x)
    lane = thread % 32
    exchange = swizzled(strip)
    target = step % STAGES * ((types.int32(cuda.blockDim.x) + strip) * (strip // 2))
    left = target + (thread // 32 * TOKENS + lane % 16) * (strip // 2)
    right = target + (
        types.int32(cuda.blockDim.x) + lane // 16 * 8 + lane % 8
    ) * (strip // 2)  # fmt: skip
    for k in range(strip // 16):
        chunk = ((2 * k + lane // 16) ^ exchange) * 4
        a = load_matrices(ring, left + chunk)
        c = load_matrices(ring, left + 16 * (strip // 2) + chunk)
        chunk = ((2 * k + lane // 8 % 2) ^ exchange) * 4
        for q in range(strip // 16):
            w = load_matrices(ring, right + q * 16 * (strip // 2) + chunk)
            top = first_sum + q * 8
            multiply_add(X, sums, top, a[0], a[1], a[2], a[3], w[0], w[1])
            multiply_add(X, sums, top + 4, a[0], a[1], a[2], a[3], w[2], w[3])
            bottom = first_sum + strip // 2 + q * 8
            multiply_add(X, sums, bottom, c[0], c[1], c[2], c[3], w[0], w[1])
            multiply_add(X, sums, bottom + 4, c[0], c[1], c[2], c[3], w[2], w[3])


@inlined
def multiply_blocks(
    sums, second_sum, size, strip, ring, X1, values1, columns1, first1, count1,
    X2, values2, columns2, first2, count2, width, row, rows, i, b,
):  # fmt: skip
    """Compute the product of rows of X1 with rows i to i + strip of some blocks, and X2's.

    Each warp has TOKENS rows. The second product is added from ``sums[second_sum]`` on.
    """
    for k in range(size // 4):
        for part in range(4):
            sums[k * 4 + part] = types.float32(0)
    in_block = types.int32(b // strip)
    middle = types.int32(count1) * in_block
    steps = middle + types.int32(count2) * in_block
    for step in range(STAGES - 1):
        copy_step(
            types.int32(step), steps, middle, strip, ring, X1, values1, columns1, first1,
            X2, values2, columns2, first2, width, row, rows, i, b,
        )  # fmt: skip
    step = types.int32(0)
    while step < middle:
        wait_for_copies()
        cuda.syncthreads()
        copy_step(
            step + types.int32(STAGES - 1), steps, middle, strip, ring, X1, values1, columns1,
            first1, X2, values2, columns2, first2, width, row, rows, i, b,
        )  # fmt: skip
        add_step(sums, 0, strip, step, ring, X1)
        step += types.int32(1)
    while step < steps:
        wait_for_copies()
        cuda.syncthreads()
        copy_step(
            step + types.int32(STAGES - 1), steps, middle, strip, ring, X1, values1, columns1,
            first1, X2, values2, columns2, first2, width, row, rows, i, b,
        )  # fmt: skip
        add_step(sums, second_sum, strip, step, ring, X1)
        step += types.int32(1)
    cuda.syncthreads()  # the next product's copies are written to the same place


@inlined
def eight_sums(sums, first_sum, strip, tile, half, neurons):
    """Return a lane's sums of eight adjacent neurons of a token."""
    k = first_sum + tile * (strip // 2) + neurons * 16 + half * 2
    return (
        sums[k], sums[k + 1], sums[k + 4], sums[k + 5],
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
def finish_tokens(
    sums, strip, tile, half, total, counted, hidden, kept_gate, kept_up,
    row, rows, neurons, first, gated, kept,
):  # fmt: skip
    """Write h, g and u of eight tokens, one for each group of lanes, and count."""
    lane = types.int32(cuda.threadIdx.x) % 32
    token = row + tile * 16 + half * 8 + lane // 4
    if token < rows:
        for n in range(strip // 32):
            start = token * neurons + first + n * 32 + lane % 4 * 8
            g = eight_sums(sums, 0, strip, tile, half, n)
            u = eight_sums(sums, strip, strip, tile, half, n)
            if kept != 0:
                store_eight_numbers(kept_gate, start, *g)
                store_eight_numbers(kept_up, start, *u)
            h = (
                gated_relu(g[0], u[0], gated), gated_relu(g[1], u[1], gated),
                gated_relu(g[2], u[2], gated), gated_relu(g[3], u[3], gated),
                gated_relu(g[4], u[4], gated), gated_relu(g[5], u[5], gated),
                gated_relu(g[6], u[6], gated), gated_relu(g[7], u[7], gated),
            )  # fmt: skip
            store_eight_numbers(hidden, start, *h)
            for k in range(8):
                total[n * 8 + k] += abs(h[k])
                counted[n * 8 + k] += types.int32(h[k] != 0)


@inlined
def finish_hidden(
    sums, strip, total, counted, hidden, kept_gate, kept_up, counts, absolute_sums,
    row, rows, neurons, first, gated, kept,
):  # fmt: skip
    """Write h, g and u of a strip, and what is counted in h over TOKENS rows."""
    lane = types.int32(cuda.threadIdx.x) % 32
    row += types.int32(cuda.threadIdx.x) // 32 * TOKENS
    for k in range(strip // 4):
        total[k] = types.float32(0)
        counted[k] = types.int32(0)
    finish_tokens(
        sums, strip, 0, 0, total, counted, hidden, kept_gate, kept_up,
        row, rows, neurons, first, gated, kept,
    )  # fmt: skip
    finish_tokens(
        sums, strip, 0, 1, total, counted, hidden, kept_gate, kept_up,
        row, rows, neurons, first, gated, kept,
    )  # fmt: skip
    finish_tokens(
        sums, strip, 1, 0, total, counted, hidden, kept_gate, kept_up,
        row, rows, neurons, first, gated, kept,
    )  # fmt: skip
    finish_tokens(
        sums, strip, 1, 1, total, counted, hidden, kept_gate, kept_up,
        row, rows, neurons, first, gated, kept,
    )  # fmt: skip
    for n in range(strip // 32):
        for k in range(8):
            all_counted = sum_of_groups(counted[n * 8 + k])
            whole = sum_of_groups(total[n * 8 + k])
            if lane // 4 == 0 and row < rows:
                part = row // TOKENS * neurons + first + n * 32 + lane % 4 * 8 + k
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
def d_gate_and_d_up(gradient, scale, h, g, u, gated):
    """Return dg and du of an entry from dh; ``scale`` is that of the L1 term."""
    if h > 0:
        gradient += scale
    elif h < 0:
        gradient -= scale
    elif h != 0:
        gradient += h  # NaN
    if g <= 0:
        gradient = types.float32(0)
    d_up = gradient * g
    if gated != 0:
        gradient = gradient * u
    return gradient, d_up


@inlined
def finish_d_hidden(
    sums, strip, gate, up, hidden, l1_scale, d_gate, d_up, row, rows, neurons, first, gated
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
                    start = token * neurons + first + n * 32 + lane % 4 * 8
                    dh = eight_sums(sums, 0, strip, tile, half, n)
                    h = eight_numbers_of(hidden, load_four_words(hidden, start))
                    g = h
                    u = h
                    if gated != 0:
                        g = eight_numbers_of(gate, load_four_words(gate, start))
                        u = eight_numbers_of(up, load_four_words(up, start))
                    d0 = d_gate_and_d_up(dh[0], scale, h[0], g[0], u[0], gated)
                    d1 = d_gate_and_d_up(dh[1], scale, h[1], g[1], u[1], gated)
                    d2 = d_gate_and_d_up(dh[2], scale, h[2], g[2], u[2], gated)
                    d3 = d_gate_and_d_up(dh[3], scale, h[3], g[3], u[3], gated)
                    d4 = d_gate_and_d_up(dh[4], scale, h[4], g[4], u[4], gated)
                    d5 = d_gate_and_d_up(dh[5], scale, h[5], g[5], u[5], gated)
                    d6 = d_gate_and_d_up(dh[6], scale, h[6], g[6], u[6], gated)
                    d7 = d_gate_and_d_up(dh[7], scale, h[7], g[7], u[7], gated)
                    store_eight_numbers(
                        d_gate, start, d0[0], d1[0], d2[0], d3[0], d4[0], d5[0], d6[0], d7[0]
                    )
                    if gated != 0:
                        store_eight_numbers(
                            d_up, start, d0[1], d1[1], d2[1], d3[1], d4[1], d5[1], d6[1], d7[1]
                        )


def make_hidden_forward(strip):
    """Return the kernel for strips of 32 or 64 neurons."""
    two_sums, quarter = 2 * strip, strip // 4
    size = STAGES * (THREADS + strip) * strip * 2

    @kernel(threads=THREADS, shared_memory=size)
    def hidden_forward(
        x, gate, gate_columns, gate_slots, up, up_columns, up_slots, hidden, kept_gate, kept_up,
        counts, absolute_sums, rows, width, neurons, b, gated, kept,
    ):  # fmt: skip
        """Compute h, and what the backward pass wants."""
        ring = cuda.shared.array(0, types.uint32)
        sums = cuda.local.array(two_sums, types.float32)
        total = cuda.local.array(quarter, types.float32)
        counted = cuda.local.array(quarter, types.int32)
        strips = neurons // strip
        item = types.int64(cuda.blockIdx.x)
        while item < (rows + cuda.blockDim.x - 1) // cuda.blockDim.x * strips:
            row = item // strips * cuda.blockDim.x
            neuron = item % strips * strip
            first = neuron // b * gate_slots
            second = neuron // b * up_slots
            up_count = types.int32(0)
            if gated != 0:
                up_count = blocks_in_row(up_columns, second, up_slots)
            multiply_blocks(
                sums, strip, two_sums, strip, ring,
                x, gate, gate_columns, first, blocks_in_row(gate_columns, first, gate_slots),
                x, up, up_columns, second, up_count, width, row, rows, neuron % b, b,
            )  # fmt: skip
            finish_hidden(
                sums, strip, total, counted, hidden, kept_gate, kept_up, counts, absolute_sums,
                row, rows, neurons, neuron, gated, kept,
            )  # fmt: skip
            item += cuda.gridDim.x

    return hidden_forward


def make_hidden_backward(strip):
    """Return the kernel for strips of 32 or 64 neurons."""
    size = STAGES * (THREADS + strip) * strip * 2

    @kernel(threads=THREADS, shared_memory=size)
    def hidden_backward(
        dy, down, down_columns, down_slots, gate, up, hidden, l1_scale, d_gate, d_up,
        rows, width, neurons, b, gated,
    ):  # fmt: skip
        """Compute dg and du."""
        ring = cuda.shared.array(0, types.uint32)
        sums = cuda.local.array(strip, types.float32)
        strips = neurons // strip
        item = types.int64(cuda.blockIdx.x)
        while item < (rows + cuda.blockDim.x - 1) // cuda.blockDim.x * strips:
            row = item // strips * cuda.blockDim.x
            neuron = item % strips * strip
            first = neuron // b * down_slots
            multiply_blocks(
                sums, 0, strip, strip, ring,
                dy, down, down_columns, first, blocks_in_row(down_columns, first, down_slots),
                dy, down, down_columns, first, 0, width, row, rows, neuron % b, b,
            )  # fmt: skip
            finish_d_hidden(
                sums, strip, gate, up, hidden, l1_scale, d_gate, d_up,
                row, rows, neurons, neuron, gated,
            )  # fmt: skip
            item += cuda.gridDim.x

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
    size = STAGES * (THREADS + strip) * strip * 2

    @kernel(threads=THREADS, shared_memory=size)
    def sum_columns(
        first_left, first_turned, first_rows, first_starts,
        second_left, second_turned, second_rows, second_starts,
        out, rows, inner, width, b, matrices,
    ):  # fmt: skip
        """Compute left @ W, or the sum of two of them, from W's transposed blocks by column."""
        ring = cuda.shared.array(0, types.uint32)
        sums = cuda.local.array(strip, types.float32)
        strips = width // strip
        lane = types.int32(cuda.threadIdx.x) % 32
        item = types.int64(cuda.blockIdx.x)
        while item < (rows + cuda.blockDim.x - 1) // cuda.blockDim.x * strips:
            row = item // strips * cuda.blockDim.x
            start = item % strips * strip
            column = start // b
            first = types.int64(load(first_starts, column))
            first_count = types.int64(load(first_starts, column + 1)) - first
            second = types.int64(load(second_starts, column))
            second_count = types.int64(0)
            if matrices == 2:
                second_count = types.int64(load(second_starts, column + 1)) - second
            multiply_blocks(
                sums, 0, strip, strip, ring,
                first_left, first_turned, first_rows, first, first_count,
                second_left, second_turned, second_rows, second, second_count,
                inner, row, rows, start % b, b,
            )  # fmt: skip
            for tile in range(2):
                for half in range(2):
                    token = (
                        row + types.int32(cuda.threadIdx.x) // 32 * TOKENS
                        + tile * 16 + half * 8 + lane // 4
                    )  # fmt: skip
                    if token < rows:
                        for n in range(strip // 32):
                            at = token * width + start + n * 32 + lane % 4 * 8
                            store_eight_numbers(out, at, *eight_sums(sums, 0, strip, tile, half, n))
            item += cuda.gridDim.x

    return sum_columns


@inlined
def copy_tokens(ring, stage, strip, left, lines, neurons, right, width, column, token, end):
    """Begin to copy what STEP tokens multiply: strips of left, and one of right."""
    thread = types.int32(cuda.threadIdx.x)
    threads = types.int32(cuda.blockDim.x)
    across = strip // 8
    words = strip // 2
    target = stage * ((threads + strip) * (STEP // 2))
    chunk = thread % across
    for k in range(STEP // 8):
        line = (thread + k * threads) // across
        exchange = line % 8
        if strip == 32:
            exchange = line // 2 % 4
        if lines[k] >= 0:
            at = token + line % STEP
            is_there = at < end
            place = target + line * words + (chunk ^ exchange) * 4
            copy_ahead(
                ring, place, left, min(at, end - 1) * neurons + lines[k] + chunk * 8, is_there
            )
    target += threads * (STEP // 2)
    line = thread // across
    while line < STEP:
        exchange = line % 8
        if strip == 32:
            exchange = line // 2 % 4
        at = token + line
        is_there = at < end
        place = target + line * words + (chunk ^ exchange) * 4
        copy_ahead(ring, place, right, min(at, end - 1) * width + column + chunk * 8, is_there)
        line += threads // across
    end_of_copies()


@inlined
def add_tokens(sums, strip, ring, stage, left):
    """Add what STEP tokens add to 32 rows of a warp's block, and a strip of its columns."""
    thread = types.int32(cuda.threadIdx.x)
    lane = thread % 32
    threads = types.int32(cuda.blockDim.x)
    words = strip // 2
    exchange = swizzled(strip)
    target = stage * ((threads + strip) * (STEP // 2))
    warp = thread // 32
    rows = warp % (strip // 32) * 4
    mine = target + warp // (strip // 32) * (STEP * words) + (lane // 16 * 8 + lane % 8) * words
    other = target + threads * (STEP // 2) + (lane // 8 % 2 * 8 + lane % 8) * words
    for k in range(STEP // 16):
        chunk = ((rows + lane // 8 % 2) ^ exchange) * 4
        a = load_transposed_matrices(ring, mine + k * 16 * words + chunk)
        chunk = ((rows + 2 + lane // 8 % 2) ^ exchange) * 4
        c = load_transposed_matrices(ring, mine + k * 16 * words + chunk)
        for q in range(strip // 16):
            chunk = ((2 * q + lane // 16) ^ exchange) * 4
            w = load_transposed_matrices(ring, other + k * 16 * words + chunk)
            top = q * 8
            multiply_add(left, sums, top, a[0], a[1], a[2], a[3], w[0], w[1])
            multiply_add(left, sums, top + 4, a[0], a[1], a[2], a[3], w[2], w[3])
            bottom = strip // 2 + q * 8
            multiply_add(left, sums, bottom, c[0], c[1], c[2], c[3], w[0], w[1])
            multiply_add(left, sums, bottom + 4, c[0], c[1], c[2], c[3], w[2], w[3])


def make_sample_blocks(strip):
    """Return the kernel for strips of 32 or 64 columns."""
    size = STAGES * (SAMPLE_THREADS + strip) * STEP * 2
    copies = STEP // 8

    @kernel(threads=SAMPLE_THREADS, shared_memory=size)
    def sample_blocks(
        left, right, starts, blocks, block_columns, partial,
        rows, neurons, width, slots, b, groups, parts, tokens_of_part,
    ):  # fmt: skip
        """Add up left^T @ right at a matrix's blocks, over a part of the tokens each.

        A block of threads takes a strip of columns of some blocks that follow each other down a
        column of blocks: they share what they need of ``right``.
        """
        ring = cuda.shared.array(0, types.uint32)
        sums = cuda.local.array(strip, types.float32)
        lines = cuda.local.array(copies, types.int64)
        thread = types.int32(cuda.threadIdx.x)
        lane = thread % 32
        in_block = types.int32(b // strip)
        size = neurons // b * slots * b * b
        together = types.int32(cuda.blockDim.x) // types.int32(strip)
        item = types.int64(cuda.blockIdx.x)
        while item < parts * groups:
            part = item // groups
            group = types.int32(item % groups)
            column = types.int32(0)
            start = types.int32(load(starts, 0))
            pieces = types.int32(0)
            columns = types.int32(width // b)
            while column < columns:
                end = types.int32(load(starts, column + 1))
                pieces = (end - start) * in_block
                here = (pieces + together - 1) // together * in_block
                if group < here:
                    break
                group -= here
                start = end
                column += types.int32(1)
            if column < columns:
                inside = group % in_block * strip
                piece = group // in_block * together
                for k in range(copies):
                    mine = (
                        piece + (thread + k * types.int32(cuda.blockDim.x)) // (strip // 8) // STEP
                    )
                    lines[k] = -1
                    if mine < pieces:
                        block = types.int64(load(blocks, start + mine // in_block))
                        lines[k] = block // slots * b + mine % in_block * strip
                for k in range(strip):
                    sums[k] = types.float32(0)
                token = part * tokens_of_part
                end_of_part = min(rows, token + tokens_of_part)
                left_column = types.int64(column) * b + inside
                for stage in range(STAGES - 1):
                    copy_tokens(
                        ring, types.int32(stage), strip, left, lines, neurons, right, width,
                        left_column, token + stage * STEP, end_of_part,
                    )  # fmt: skip
                stage = types.int32(0)
                my_piece = piece + thread // strip
                while token < end_of_part:
                    wait_for_copies()
                    cuda.syncthreads()
                    copy_tokens(
                        ring, (stage + types.int32(STAGES - 1)) % STAGES, strip, left, lines, neurons,
                        right, width, left_column, token + (STAGES - 1) * STEP, end_of_part,
                    )  # fmt: skip
                    if my_piece < pieces:
                        add_tokens(sums, strip, ring, stage, left)
                    stage = (stage + types.int32(1)) % types.int32(STAGES)
                    token += STEP
                cuda.syncthreads()
                if my_piece < pieces:
                    block = types.int64(load(blocks, start + my_piece // in_block))
                    i = my_piece % in_block * strip + thread // 32 % (strip // 32) * 32
                    for tile in range(2):
                        for half in range(2):
                            line = i + tile * 16 + half * 8 + lane // 4
                            at = part * size + (block * b + line) * b + inside + lane % 4 * 2
                            for q in range(strip // 8):
                                k = tile * (strip // 2) + q * 4 + half * 2
                                store(partial, at + q * 8, sums[k])
                                store(partial, at + q * 8 + 1, sums[k + 1])
            item += cuda.gridDim.x

    return sample_blocks


hidden_forward_32, hidden_forward_64 = make_hidden_forward(32), make_hidden_forward(64)
hidden_backward_32, hidden_backward_64 = make_hidden_backward(32), make_hidden_backward(64)
sum_columns_32, sum_columns_64 = make_sum_columns(32), make_sum_columns(64)
sample_blocks_32, sample_blocks_64 = make_sample_blocks(32), make_sample_blocks(64)


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


@kernel(threads=256)
def add_counts(counts, part_sums, nonzeros, absolute_sums, fired, parts, neurons):
    """Add up what was counted for each neuron; 32 neurons a block of threads."""
    totals = cuda.shared.array(256, types.float64)
    numbers = cuda.shared.array(256, types.int64)
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
