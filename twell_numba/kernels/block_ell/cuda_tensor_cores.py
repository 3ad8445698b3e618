"""Feedforward layers with block-ELL weights on tensor cores, in 16 bits: the kernels.

    forward    g = x Wg^T,  u = x Wu^T,  h = relu(g) * u,  y = h Wd
    backward   dh = dy Wd^T,  du = dh * relu(g),  dg = dh * u * [g > 0],  dx = du Wu + dg Wg
               dWd = h^T dy,  dWu = du^T x,  dWg = dg^T x,  at the blocks

x, y (M, D), g, u, h (M, F), row-major; weights (F, D) in blocks of b x b, b a multiple of 32. A
warp computes 32 columns of a result for ``TOKENS`` rows, or twice 32 x 32 numbers of a gradient's
blocks, and loads what it multiplies straight into registers: the 16 bytes a lane loads are its part
of a fragment, because the order along the dimension that is added up is free. Sums are in float32
and in a fixed order.

Bound by what the multiprocessors read from the second-level cache: of x, dy, g, u and h each block
needs its 32 or b columns once for every block.
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
)
from twell_numba.device.gpu.tensor_cores import (
    high_halves,
    inlined,
    load_four_words,
    load_shared_words,
    load_two_words,
    low_halves,
    multiply_add,
    numbers_of,
    store_four,
    store_shared_words,
)

# Columns of a result, or rows of a block, that a warp computes.
STRIP = 32
# Rows of a result that a warp computes.
TOKENS = 48
TILES = TOKENS // 8
SUMS = 2 * TILES * 4
PAIR_WORDS = 16 + 4 * TILES
TWO_SUMS = 2 * SUMS
# Warps that lie side by side in the grid and read the same blocks.
SHARING = 8
THREADS = 256
# Threads and shared memory of the kernels that hold TOKENS rows of x or dy in shared memory.
HOLDING_THREADS = 384
HELD_BYTES = TOKENS * (2 * 2048 + 64)
# Sums of the two pieces of a gradient's blocks that a warp computes, and the words of 16 tokens.
TWO_PIECES = 64
STEP_WORDS = 24


@inlined
def load_weights(values, place, b):
    """Return four rows of a block, from ``place`` on, 32 bits a word."""
    first = load_four_words(values, place)
    second = load_four_words(values, place + b)
    third = load_four_words(values, place + 2 * b)
    fourth = load_four_words(values, place + 3 * b)
    return (*first, *second, *third, *fourth)


@inlined
def add_tile(X, sums, first, n, weights, x):
    """Add the product of 32 rows of a block with eight rows of X, along 32 numbers."""
    w = weights
    top = first + n * 4
    multiply_add(X, sums, top, w[0], w[4], w[1], w[5], x[0], x[1])
    multiply_add(X, sums, top, w[2], w[6], w[3], w[7], x[2], x[3])
    bottom = first + (TILES + n) * 4
    multiply_add(X, sums, bottom, w[8], w[12], w[9], w[13], x[0], x[1])
    multiply_add(X, sums, bottom, w[10], w[14], w[11], w[15], x[2], x[3])


@inlined
def add_product(sums, first_sum, X, width, row, rows, values, columns, first, end, i, b):
    """Add the product of TOKENS rows of X with rows i to i + 31 of the blocks first to end."""
    lane = types.int32(cuda.threadIdx.x) % 32
    group = lane // 4
    chunk = lane % 4 * 8
    for block in range(first, end):
        column = types.int64(load(columns, block)) * b
        if column >= 0:
            for c in range(0, b, 32):
                place = (block * b + i + 4 * group) * b + c + chunk
                weights = load_weights(values, place, b)
                for n in range(TILES):
                    token = min(row + n * 8 + group, rows - 1)
                    x = load_four_words(X, token * width + column + c + chunk)
                    add_tile(X, sums, first_sum, n, weights, x)


@inlined
def load_pair(words, X, width, row, rows, values, block, column, i, c, b):
    """Load what 32 columns of a block and TOKENS rows of X add to a product."""
    lane = types.int32(cuda.threadIdx.x) % 32
    group = lane // 4
    chunk = lane % 4 * 8
    weights = load_weights(values, (block * b + i + 4 * group) * b + c + chunk, b)
    for k in range(16):
        words[k] = weights[k]
    for n in range(TILES):
        token = min(row + n * 8 + group, rows - 1)
        x = load_four_words(X, token * width + max(column, 0) * b + c + chunk)
        for k in range(4):
            words[16 + 4 * n + k] = x[k]


@inlined
def add_product_ahead(sums, first_sum, X, width, row, rows, values, columns, first, end, i, b):
    """Do as add_product; what the next step multiplies is on its way during this one."""
    words = cuda.local.array(PAIR_WORDS, types.uint32)
    later = cuda.local.array(PAIR_WORDS, types.uint32)
    if first < end:
        block = types.int64(first)
        c = types.int64(0)
        column = types.int64(load(columns, block))
        load_pair(words, X, width, row, rows, values, block, column, i, c, b)
        next_block = block
        next_c = c + 32
        if next_c == b:
            next_c = types.int64(0)
            next_block += 1
        next_column = types.int64(load(columns, min(next_block, end - 1)))
        while block < end:
            if next_block < end:
                load_pair(later, X, width, row, rows, values, next_block, next_column, i, next_c, b)
            if column >= 0:
                w = words
                for n in range(TILES):
                    x = 16 + 4 * n
                    top = first_sum + n * 4
                    multiply_add(X, sums, top, w[0], w[4], w[1], w[5], w[x], w[x + 1])
                    multiply_add(X, sums, top, w[2], w[6], w[3], w[7], w[x + 2], w[x + 3])
                    bottom = first_sum + (TILES + n) * 4
                    multiply_add(X, sums, bottom, w[8], w[12], w[9], w[13], w[x], w[x + 1])
                    multiply_add(X, sums, bottom, w[10], w[14], w[11], w[15], w[x + 2], w[x + 3])
            for k in range(PAIR_WORDS):
                words[k] = later[k]
            block = next_block
            column = next_column
            next_c += 32
            if next_c == b:
                next_c = types.int64(0)
                next_block += 1
            next_column = types.int64(load(columns, min(next_block, end - 1)))


@inlined
def add_held_product(sums, first_sum, X, held, stride, values, columns, first, end, i, b):
    """Do as add_product, with rows of X that are held in shared memory."""
    lane = types.int32(cuda.threadIdx.x) % 32
    group = lane // 4
    chunk = lane % 4
    block = first
    c = types.int64(0)
    if first < end:
        start = (i + 4 * group) * b + chunk * 8
        weights = load_weights(values, block * b * b + start, b)
        column = types.int64(load(columns, block))
        while block < end:
            # the next weights are on their way while these are multiplied
            next_block = block
            next_c = c + 32
            if next_c == b:
                next_c = types.int64(0)
                next_block += 1
            ahead = min(next_block, end - 1)
            next_weights = load_weights(values, ahead * b * b + start + next_c, b)
            next_column = types.int64(load(columns, ahead))
            if column >= 0:
                at = types.int32((column * b + c) // 2) + chunk * 4 + group * stride
                for n in range(TILES):
                    x = load_shared_words(held, at + n * 8 * stride)
                    add_tile(X, sums, first_sum, n, weights, x)
            weights = next_weights
            column = next_column
            block = next_block
            c = next_c


@inlined
def hold_rows(X, width, row, rows, held, stride):
    """Copy TOKENS rows of X to shared memory; past the last row, that again."""
    across = types.int32(width // 8)
    i = types.int32(cuda.threadIdx.x)
    while i < TOKENS * across:
        token = i // across
        column = i % across
        words = load_four_words(X, min(row + token, rows - 1) * width + column * 8)
        store_shared_words(held, token * stride + column * 4, words)
        i += types.int32(cuda.blockDim.x)
    cuda.syncthreads()


@inlined
def stride_of(width):
    """Return the words of a held row: two rows' numbers then lie in different banks."""
    words = types.int32(width // 2)
    if words % 32 == 0:
        words += 16
    return words


@inlined
def warp_quarter_sum(value):
    """Return the sum over the four lanes of a group."""
    value += cuda.shfl_xor_sync(FULL_WARP, value, 1)
    value += cuda.shfl_xor_sync(FULL_WARP, value, 2)
    return value


@inlined
def clear(sums, size):
    """Set sums to 0."""
    for k in range(size):
        sums[k] = types.float32(0)


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
def put_counts(counts, absolute_sums, part, count, total, place):
    """Write what four lanes counted in a neuron's h."""
    total = warp_quarter_sum(total)
    count = warp_quarter_sum(count)
    if place == 0:
        store(absolute_sums, part, total)
        store(counts, part, count)


@inlined
def finish_hidden(
    sums, hidden, kept_gate, kept_up, counts, absolute_sums, row, rows, strip, neurons, gated, kept
):
    """Write h, g and u of a strip, and what is counted in h over TOKENS rows."""
    lane = types.int32(cuda.threadIdx.x) % 32
    group = lane // 4
    place = lane % 4
    neuron = strip * STRIP + 4 * group
    zero = types.float32(0)
    total0, total1, total2, total3 = zero, zero, zero, zero
    none = types.int32(0)
    count0, count1, count2, count3 = none, none, none, none
    for n in range(TILES):
        for s in range(2):
            token = row + n * 8 + 2 * place + s
            if token < rows:
                start = token * neurons + neuron
                top = n * 4 + s
                bottom = (TILES + n) * 4 + s
                g0, g1, g2, g3 = sums[top], sums[top + 2], sums[bottom], sums[bottom + 2]
                u0 = sums[SUMS + top]
                u1 = sums[SUMS + top + 2]
                u2 = sums[SUMS + bottom]
                u3 = sums[SUMS + bottom + 2]
                if kept != 0:
                    store_four(kept_gate, start, g0, g1, g2, g3)
                    store_four(kept_up, start, u0, u1, u2, u3)
                h0, h1 = gated_relu(g0, u0, gated), gated_relu(g1, u1, gated)
                h2, h3 = gated_relu(g2, u2, gated), gated_relu(g3, u3, gated)
                store_four(hidden, start, h0, h1, h2, h3)
                total0 += abs(h0)
                total1 += abs(h1)
                total2 += abs(h2)
                total3 += abs(h3)
                count0 += types.int32(h0 != 0)
                count1 += types.int32(h1 != 0)
                count2 += types.int32(h2 != 0)
                count3 += types.int32(h3 != 0)
    part = row // TOKENS * neurons + neuron
    put_counts(counts, absolute_sums, part, count0, total0, place)
    put_counts(counts, absolute_sums, part + 1, count1, total1, place)
    put_counts(counts, absolute_sums, part + 2, count2, total2, place)
    put_counts(counts, absolute_sums, part + 3, count3, total3, place)


@kernel(threads=THREADS)
def hidden_forward(
    x, gate, gate_columns, gate_slots, up, up_columns, up_slots, hidden, kept_gate, kept_up,
    counts, absolute_sums, rows, width, neurons, b, gated, kept,
):  # fmt: skip
    """Compute h, and what the backward pass wants; a warp takes TOKENS rows of 32 neurons."""
    sums = cuda.local.array(TWO_SUMS, types.float32)
    strips = neurons // STRIP
    groups = ((rows + TOKENS - 1) // TOKENS + SHARING - 1) // SHARING
    item = global_thread() // 32
    while item < groups * strips * SHARING:
        row = (item // SHARING // strips * SHARING + item % SHARING) * TOKENS
        strip = item // SHARING % strips
        if row < rows:
            block_row = strip * STRIP // b
            i = strip * STRIP % b
            clear(sums, TWO_SUMS)
            first = block_row * gate_slots
            add_product(
                sums, 0, x, width, row, rows, gate, gate_columns, first, first + gate_slots, i, b
            )
            if gated != 0:
                first = block_row * up_slots
                add_product(
                    sums, SUMS, x, width, row, rows, up, up_columns, first, first + up_slots, i, b
                )
            finish_hidden(
                sums, hidden, kept_gate, kept_up, counts, absolute_sums,
                row, rows, strip, neurons, gated, kept,
            )  # fmt: skip
        item += grid_threads() // 32


@kernel(threads=HOLDING_THREADS, shared_memory=HELD_BYTES)
def hidden_forward_held(
    x, gate, gate_columns, gate_slots, up, up_columns, up_slots, hidden, kept_gate, kept_up,
    counts, absolute_sums, rows, width, neurons, b, gated, kept,
):  # fmt: skip
    """Do as hidden_forward, with TOKENS rows of x in shared memory at a time."""
    sums = cuda.local.array(TWO_SUMS, types.float32)
    held = cuda.shared.array(0, types.uint32)
    stride = stride_of(width)
    strips = neurons // STRIP
    items = (rows + TOKENS - 1) // TOKENS * strips
    item = items * cuda.blockIdx.x // cuda.gridDim.x
    end = items * (cuda.blockIdx.x + 1) // cuda.gridDim.x
    while item < end:
        row = item // strips * TOKENS
        hold_rows(x, width, row, rows, held, stride)
        strip = item % strips + cuda.threadIdx.x // 32
        last_strip = min(strips, item % strips + end - item)
        item += last_strip - item % strips
        while strip < last_strip:
            block_row = strip * STRIP // b
            i = strip * STRIP % b
            clear(sums, TWO_SUMS)
            first = block_row * gate_slots
            add_held_product(
                sums, 0, x, held, stride, gate, gate_columns, first, first + gate_slots, i, b
            )
            if gated != 0:
                first = block_row * up_slots
                add_held_product(
                    sums, SUMS, x, held, stride, up, up_columns, first, first + up_slots, i, b
                )
            finish_hidden(
                sums, hidden, kept_gate, kept_up, counts, absolute_sums,
                row, rows, strip, neurons, gated, kept,
            )  # fmt: skip
            strip += cuda.blockDim.x // 32
        cuda.syncthreads()  # the next rows are written to the same place


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
    sums, gate, up, hidden, l1_scale, d_gate, d_up, row, rows, strip, neurons, gated
):
    """Write dg and du of a strip."""
    lane = types.int32(cuda.threadIdx.x) % 32
    neuron = strip * STRIP + 4 * (lane // 4)
    place = lane % 4
    scale = types.float32(load(l1_scale, 0))
    for n in range(TILES):
        for s in range(2):
            token = row + n * 8 + 2 * place + s
            if token < rows:
                start = token * neurons + neuron
                h = numbers_of(hidden, load_two_words(hidden, start))
                g = h
                u = h
                if gated != 0:
                    g = numbers_of(gate, load_two_words(gate, start))
                    u = numbers_of(up, load_two_words(up, start))
                top = n * 4 + s
                bottom = (TILES + n) * 4 + s
                first = d_gate_and_d_up(sums[top], scale, h[0], g[0], u[0], gated)
                second = d_gate_and_d_up(sums[top + 2], scale, h[1], g[1], u[1], gated)
                third = d_gate_and_d_up(sums[bottom], scale, h[2], g[2], u[2], gated)
                fourth = d_gate_and_d_up(sums[bottom + 2], scale, h[3], g[3], u[3], gated)
                store_four(d_gate, start, first[0], second[0], third[0], fourth[0])
                if gated != 0:
                    store_four(d_up, start, first[1], second[1], third[1], fourth[1])


@kernel(threads=THREADS)
def hidden_backward(
    dy, down, down_columns, down_slots, gate, up, hidden, l1_scale, d_gate, d_up,
    rows, width, neurons, b, gated,
):  # fmt: skip
    """Compute dg and du; a warp takes TOKENS rows of 32 neurons."""
    sums = cuda.local.array(SUMS, types.float32)
    strips = neurons // STRIP
    groups = ((rows + TOKENS - 1) // TOKENS + SHARING - 1) // SHARING
    item = global_thread() // 32
    while item < groups * strips * SHARING:
        row = (item // SHARING // strips * SHARING + item % SHARING) * TOKENS
        strip = item // SHARING % strips
        if row < rows:
            first = strip * STRIP // b * down_slots
            clear(sums, SUMS)
            add_product(
                sums, 0, dy, width, row, rows, down, down_columns,
                first, first + down_slots, strip * STRIP % b, b,
            )  # fmt: skip
            finish_d_hidden(
                sums, gate, up, hidden, l1_scale, d_gate, d_up, row, rows, strip, neurons, gated
            )
        item += grid_threads() // 32


@kernel(threads=HOLDING_THREADS, shared_memory=HELD_BYTES)
def hidden_backward_held(
    dy, down, down_columns, down_slots, gate, up, hidden, l1_scale, d_gate, d_up,
    rows, width, neurons, b, gated,
):  # fmt: skip
    """Do as hidden_backward, with TOKENS rows of dy in shared memory at a time."""
    sums = cuda.local.array(SUMS, types.float32)
    held = cuda.shared.array(0, types.uint32)
    stride = stride_of(width)
    strips = neurons // STRIP
    items = (rows + TOKENS - 1) // TOKENS * strips
    item = items * cuda.blockIdx.x // cuda.gridDim.x
    end = items * (cuda.blockIdx.x + 1) // cuda.gridDim.x
    while item < end:
        row = item // strips * TOKENS
        hold_rows(dy, width, row, rows, held, stride)
        strip = item % strips + cuda.threadIdx.x // 32
        last_strip = min(strips, item % strips + end - item)
        item += last_strip - item % strips
        while strip < last_strip:
            first = strip * STRIP // b * down_slots
            clear(sums, SUMS)
            add_held_product(
                sums, 0, dy, held, stride, down, down_columns,
                first, first + down_slots, strip * STRIP % b, b,
            )  # fmt: skip
            finish_d_hidden(
                sums, gate, up, hidden, l1_scale, d_gate, d_up, row, rows, strip, neurons, gated
            )
            strip += cuda.blockDim.x // 32
        cuda.syncthreads()


@kernel(threads=THREADS)
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


@kernel(threads=THREADS)
def sum_columns(
    first_left, first_turned, first_rows, first_starts,
    second_left, second_turned, second_rows, second_starts,
    out, rows, inner, width, b, matrices,
):  # fmt: skip
    """Compute left @ W, or the sum of two such products, from W's transposed blocks by column."""
    sums = cuda.local.array(SUMS, types.float32)
    strips = width // STRIP
    groups = ((rows + TOKENS - 1) // TOKENS + SHARING - 1) // SHARING
    item = global_thread() // 32
    lane = types.int32(cuda.threadIdx.x) % 32
    while item < groups * strips * SHARING:
        row = (item // SHARING // strips * SHARING + item % SHARING) * TOKENS
        strip = item // SHARING % strips
        if row < rows:
            column = strip * STRIP // b
            i = strip * STRIP % b
            clear(sums, SUMS)
            add_product(
                sums, 0, first_left, inner, row, rows, first_turned, first_rows,
                load(first_starts, column), load(first_starts, column + 1), i, b,
            )  # fmt: skip
            if matrices == 2:
                add_product(
                    sums, 0, second_left, inner, row, rows, second_turned, second_rows,
                    load(second_starts, column), load(second_starts, column + 1), i, b,
                )  # fmt: skip
            for n in range(TILES):
                for s in range(2):
                    token = row + n * 8 + lane % 4 * 2 + s
                    if token < rows:
                        store_four(
                            out, token * width + strip * STRIP + 4 * (lane // 4),
                            sums[n * 4 + s], sums[n * 4 + s + 2],
                            sums[(TILES + n) * 4 + s], sums[(TILES + n) * 4 + s + 2],
                        )  # fmt: skip
        item += grid_threads() // 32


@inlined
def load_tokens(words, first, X, width, column, token, end):
    """Write four adjacent numbers of four tokens to eight words of a local array."""
    for k in range(4):
        two = (types.uint32(0), types.uint32(0))
        if token + k < end:
            two = load_two_words(X, (token + k) * width + column)
        words[first + 2 * k] = two[0]
        words[first + 2 * k + 1] = two[1]


@inlined
def pair_tokens(words, first):
    """Return eight words of two tokens' numbers each: four of the first two, four of the others."""
    w = words
    return (
        low_halves(w[first], w[first + 2]),
        high_halves(w[first], w[first + 2]),
        low_halves(w[first + 1], w[first + 3]),
        high_halves(w[first + 1], w[first + 3]),
        low_halves(w[first + 4], w[first + 6]),
        high_halves(w[first + 4], w[first + 6]),
        low_halves(w[first + 5], w[first + 7]),
        high_halves(w[first + 5], w[first + 7]),
    )


@inlined
def load_step(words, left, left_width, rows, right, right_width, column, token, end):
    """Load what sixteen tokens add to two pieces."""
    load_tokens(words, 0, right, right_width, column, token, end)
    load_tokens(words, 8, left, left_width, rows[0], token, end)
    load_tokens(words, 16, left, left_width, rows[1], token, end)


@inlined
def add_step(left, sums, words):
    """Add what sixteen tokens add to two pieces."""
    c = pair_tokens(words, 0)
    for k in range(2):
        a = pair_tokens(words, 8 + 8 * k)
        for q in range(4):
            top = (k * 8 + q) * 4
            multiply_add(left, sums, top, a[0], a[1], a[4], a[5], c[q], c[4 + q])
            bottom = (k * 8 + 4 + q) * 4
            multiply_add(left, sums, bottom, a[2], a[3], a[6], a[7], c[q], c[4 + q])


@inlined
def store_piece(partial, start, b, sums, first):
    """Write a piece's sums to 32 rows of a block, from ``start`` on."""
    lane = types.int32(cuda.threadIdx.x) % 32
    for t in range(4):
        at = start + (lane // 4 * 4 + t) * b + lane % 4 * 8
        for q in range(4):
            k = first + (t // 2 * 4 + q) * 4 + t % 2 * 2
            store(partial, at + q, sums[k])
            store(partial, at + 4 + q, sums[k + 1])


@inlined
def locate_piece(piece, blocks, block_columns, slots, b):
    """Return the row and the column at which a piece of a matrix begins, and its first value."""
    in_block = b // STRIP
    inside = piece % (in_block * in_block)
    block = types.int64(load(blocks, piece // (in_block * in_block)))
    i = inside % in_block * STRIP
    j = inside // in_block * STRIP
    row = block // slots * b + i
    column = types.int64(load(block_columns, block)) * b + j
    return row, column, (block * b + i) * b + j


@kernel(threads=THREADS)
def sample_blocks(
    left, right, starts, blocks, block_columns, partial,
    rows, neurons, width, slots, b, groups, parts, tokens_of_part,
):  # fmt: skip
    """Add up left^T @ right at a matrix's blocks, over a part of the tokens each.

    A warp takes two pieces of 32 x 32 numbers that follow each other down a column of blocks: they
    share what they need of ``right``, as the warps beside it do.
    """
    sums = cuda.local.array(TWO_PIECES, types.float32)
    words = cuda.local.array(STEP_WORDS, types.uint32)
    later = cuda.local.array(STEP_WORDS, types.uint32)
    lane = types.int32(cuda.threadIdx.x) % 32
    group = 4 * (lane // 4)
    place = 4 * (lane % 4)
    in_block = b // STRIP
    pieces = types.int64(load(starts, width // b)) * in_block * in_block
    size = neurons // b * slots * b * b
    item = global_thread() // 32
    while item < parts * groups:
        part = item // groups
        piece = item % groups * 2
        if piece < pieces:
            first = locate_piece(piece, blocks, block_columns, slots, b)
            second = locate_piece(min(piece + 1, pieces - 1), blocks, block_columns, slots, b)
            is_one_column = first[1] == second[1]
            lines = (first[0] + group, second[0] + group)
            end = min(rows, (part + 1) * tokens_of_part)
            turn = 0
            while turn < 2:
                column = (first[1] if turn == 0 else second[1]) + group
                clear(sums, TWO_PIECES)
                step = part * tokens_of_part
                load_step(words, left, neurons, lines, right, width, column, step + place, end)
                while step < end:
                    step += 16
                    load_step(later, left, neurons, lines, right, width, column, step + place, end)
                    add_step(left, sums, words)
                    for w in range(STEP_WORDS):
                        words[w] = later[w]
                if turn == 0:
                    store_piece(partial, part * size + first[2], b, sums, 0)
                if is_one_column or turn == 1:
                    store_piece(partial, part * size + second[2], b, sums, 32)
                    turn = 1
                turn += 1
        item += grid_threads() // 32


@kernel(threads=THREADS)
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


@kernel(threads=THREADS)
def add_counts(counts, part_sums, nonzeros, absolute_sums, fired, parts, neurons):
    """Add up what was counted for each neuron."""
    neuron = global_thread()
    while neuron < neurons:
        count = types.int64(0)
        total = types.float64(0)
        for part in range(parts):
            count += load(counts, part * neurons + neuron)
            total += load(part_sums, part * neurons + neuron)
        store(nonzeros, neuron, count)
        store(absolute_sums, neuron, total)
        store(fired, neuron, types.int64(count != 0))
        neuron += grid_threads()
