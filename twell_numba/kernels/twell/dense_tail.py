"""Rows of the tail on tensor cores: a dense layer of the rows on a list that the GPU alone knows.

    forward    g = x Wg^T,  u = x Wu^T,  h = relu(g) * u,  y = h Wd
    backward   dh = dy Wd^T + l1 sign(h),  dg = dh u [g > 0],  du = dh relu(g),  dx = dg Wg + du Wu
               dWd += h^T dy,  dWu += du^T x,  dWg += dg^T x

x, y (M, D), weights (F, D), row-major, in bfloat16 or float16, D a multiple of 8; of x, dy, y and
dx only the rows ``tail_rows[:tail_count]``. Without a gate h = relu(g). g, u, h, dg and du are
rounded to 16 bits, sums are in float32 and in a fixed order: the same bits in every run, and the
same neurons fire backward as forward. As in any dense layer, 0 times NaN is NaN.

A row is in the tail because hundreds of its neurons fire: so many that a dense product, in which
rows share what is read of the weights, costs no more than to look for them. Forward and backward
are one launch each, which returns at once if the tail is empty, and their workspace is for
PASS_ROWS rows however many M there are: more rows are done in several passes.

Work is cut into *items*: a tile of 128 x 64 numbers of a product, or 8 rows to be counted. Blocks
take items by number, in order, from a counter. Those of a *phase* need what all items before the
phase have written, hence wait until as many items are done; they are at work in blocks that run
already, so that no block waits for one that cannot start.

Up to FEW_ROWS rows are bound by how fast the weights arrive: :mod:`few_rows` has their products.

Measured on an H200, M = 16384, D = 2048, F = 5632, bfloat16, 18% of a row's neurons firing, in us.
Beside it kernels that gather what fires (:mod:`cuda_tail`), without the gate's product, which they
need in memory:

    rows in the tail           0    1    5   16   17   50  500  2000  16384
    forward                    3   38   39   44  117  124  300   762   6082
      gathered                 5   91  102  143       249 1631
    forward and backward       6  130  167  206  454  476 1034  2731  21826
      gathered                16  590 1115 1604      2328 6958

Few rows: forward reads 69 MB of weights; backward 115 MB and, with 16 rows, nearly all of 277 MB of
gradients, read and written. That is 1.6 and 2.4 TB/s of memory's 4.1: warps wait for what they have
asked for, half and 70% of their time, and no more of it is under way. Many rows: 190 TFLOP/s, what
``mma.sync`` gives in tiles of this size; all rows take four times as long as NVIDIA's library, so
that a layer whose rows are mostly in the tail should be computed as a dense one.

Tried: tiles of 128 x 64 for few rows, too, 111 forward at 16 rows; one block on a multiprocessor
(255 registers instead of 128), 46 forward, 175 instead of 162 backward; rows of Wd called into the
second-level cache before h is there, 50 forward; ordinary loads in :mod:`few_rows`, 42 forward,
101 instead of 92 backward at one row. Workspace for 512, 1024, 2048, 4096 rows: 1184, 842, 762, 761
forward with 2000 rows in the tail, 9.4, 6.7, 6.1, 6.2 ms with all.
"""

from llvmlite import ir

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import (
    cuda,
    intrinsic,
    load,
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
    words_of,
)
from twell_numba.kernels.block_ell.cuda_tensor_cores import (
    clear,
    d_gate_and_d_up,
    gated_relu,
    stage_after,
)
from twell_numba.kernels.cuda_vectors import round_like
from twell_numba.kernels.twell.few_rows import (
    FEW_COLUMNS,
    FEW_ROWS,
    FEW_SUMS,
    STRIP,
    add_columns_by_columns,
    add_rows_by_columns,
    add_rows_by_rows,
    add_warps,
    column_of_thread,
    listed_rows_of_lane,
    row_of_thread,
    rows_of_lane,
)

# Of a tile: a warp computes 32 rows of half of the columns.
ROWS, COLUMNS = 128, 64
THREADS = 256
SUMS = 32  # of a lane
# A step of a product: 64 terms. In shared memory a panel is 64 lines of 64 numbers.
DEPTH = 64
LINE = DEPTH // 2  # words
LINES = THREADS // 8  # that a block copies at a time, 16 bytes a thread
PANEL = 64 * LINE
STAGE = 3 * PANEL  # two panels of the left matrix, one of the right
STAGES = 3
RING = STAGES * STAGE
SHARED_BYTES = 4 * RING + 16  # the number of the block's item lies behind the ring
ROOM = 2  # blocks that a multiprocessor should have room for
# Rows of the tail for which there is workspace: 23 MB forward and 69 MB backward at F = 5632, taken
# in every call. Fewer are slower where nearly all rows are in the tail, as when a training begins.
PASS_ROWS = 2048
COUNTED_ROWS = THREADS // 32

_i32, _i64 = ir.IntType(32), ir.IntType(64)


# ---- Blocks that take items in order


def _take(typing_context, words, index):
    def generate(context, builder, signature, arguments):
        position = context.cast(builder, arguments[1], signature.args[1], types.int64)
        address = builder.ptrtoint(builder.gep(arguments[0], [position]), _i64)
        shape = ir.FunctionType(_i32, [_i64])
        text = "atom.acq_rel.gpu.global.add.s32 $0, [$1], 1;"
        code = ir.InlineAsm(shape, text, "=r,l,~{memory}", side_effect=True)
        return builder.call(code, [address])

    return types.int32(words, index), generate


def _take_alone(words, index, definition=_take):
    """What take does; see below."""
    value = load(words, index)
    store(words, index, value + 1)
    return value


def _announce(typing_context, words, index):
    def generate(context, builder, signature, arguments):
        position = context.cast(builder, arguments[1], signature.args[1], types.int64)
        address = builder.ptrtoint(builder.gep(arguments[0], [position]), _i64)
        shape = ir.FunctionType(ir.VoidType(), [_i64])
        text = "red.release.gpu.global.add.s32 [$0], 1;"
        code = ir.InlineAsm(shape, text, "l,~{memory}", side_effect=True)
        builder.call(code, [address])
        return context.get_dummy_value()

    return types.void(words, index), generate


def _announce_alone(words, index, definition=_announce):
    """What announce does; see below."""
    store(words, index, load(words, index) + 1)


def _observe(typing_context, words, index):
    def generate(context, builder, signature, arguments):
        position = context.cast(builder, arguments[1], signature.args[1], types.int64)
        address = builder.ptrtoint(builder.gep(arguments[0], [position]), _i64)
        shape = ir.FunctionType(_i32, [_i64])
        text = "ld.acquire.gpu.global.s32 $0, [$1];"
        code = ir.InlineAsm(shape, text, "=r,l,~{memory}", side_effect=True)
        return builder.call(code, [address])

    return types.int32(words, index), generate


def _observe_alone(words, index, definition=_observe):
    """What observe does; see below."""
    return load(words, index)


# take(words, index) adds 1 to a number that all blocks share and returns what it was; announce adds
# 1 after all that the block wrote before; observe returns it, and what was written before the
# announcements in it can then be read. The plain functions are what tests without a GPU run; they
# name the definitions as defaults so that these are part of the fingerprint of their kernels.
take = intrinsic(_take)
take.py_func = _take_alone
announce = intrinsic(_announce)
announce.py_func = _announce_alone
observe = intrinsic(_observe)
observe.py_func = _observe_alone


@inlined
def next_item(state, ring):
    """Return the number of the next item that nobody has taken, to all threads of the block."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        ring[RING] = types.uint32(take(state, 0))
    cuda.syncthreads()
    return types.int32(ring[RING])


@inlined
def wait_until_done(state, items):
    """Wait until so many items are done."""
    if cuda.threadIdx.x == 0 and items > 0:
        while observe(state, 1) < items:
            pass
    cuda.syncthreads()


@inlined
def is_done(state):
    """Say that the block's item is done."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        announce(state, 1)


@inlined
def leave(state, item, items):
    """Set the counters back to 0 if this is the last block to find no item left."""
    if cuda.threadIdx.x == 0 and item == items + cuda.gridDim.x - 1:
        store(state, 0, 0)
        store(state, 1, 0)


# ---- A tile of a product. An operand is a tuple: the matrix; its pitch, numbers from a row to the
# next; whether its rows are listed in tail_rows; whether it is turned, so that the terms of the sum
# run over its rows instead of its columns; the first and the end of its rows (columns, if turned)
# that count in this tile. ``listed`` is tail_rows and where in it the rows of the pass begin.


@inlined
def copy_panel(ring, to, matrix, pitch, is_listed, listed, row, rows, column, columns, mixed):
    """Begin to copy 64 rows of 64 columns to shared memory, with zeros past the ends.

    Eight lines' chunks of one number lie in different banks. If ``mixed``, lines are in the order
    in which a lane's sums are adjacent columns of the result.
    """
    thread = types.uint32(cuda.threadIdx.x)
    line = types.uint32(thread // 8)
    column = types.int32(column + thread % 8 * 8)
    row = types.int32(row + line)
    if mixed:
        line = types.uint32(line // 2 % 4 * 8 + line // 8 * 2 + line % 2)
    place = types.int32(to + (line * LINE + (thread % 8 ^ line % 8) * 4))
    for _ in range(64 // LINES):
        is_there = row < rows and column < columns
        at = row
        if is_listed and is_there:
            at = load(listed[0], listed[1] + row)
        copy_ahead(ring, place, matrix, types.int64(at) * pitch + column, is_there)
        row = types.int32(row + LINES)
        place = types.int32(place + LINES * LINE)


@inlined
def copy_step(ring, stage, step, steps, terms, left, right, listed):
    """Begin to copy what a step multiplies."""
    if step < steps:
        to = types.int32(stage * STAGE)
        term = types.int32(step * DEPTH)
        matrix, pitch, is_listed, is_turned, first, end = left
        for half in range(2):
            first = types.int32(left[4] + half * 64)
            if is_turned:
                copy_panel(ring, to, matrix, pitch, is_listed, listed, term, terms, first, end, 0)
            elif first < end:
                copy_panel(ring, to, matrix, pitch, is_listed, listed, first, end, term, terms, 0)
            to = types.int32(to + PANEL)
        matrix, pitch, is_listed, is_turned, first, end = right
        if is_turned:
            copy_panel(ring, to, matrix, pitch, is_listed, listed, term, terms, first, end, 0)
        else:
            copy_panel(ring, to, matrix, pitch, is_listed, listed, first, end, term, terms, 1)
    end_of_copies()


@inlined
def load_left(ring, panels, tile, k, is_turned):
    """Return a lane's words of 16 rows of a warp by 16 terms."""
    lane = types.uint32(cuda.threadIdx.x) % 32
    warp = types.uint32(cuda.threadIdx.x) // 64
    panel = panels + types.int32(warp // 2 * PANEL)
    row = types.uint32(warp % 2 * 32)  # in the panel
    if is_turned:
        line = types.uint32(lane // 16 * 8 + lane % 8)
        chunk = types.uint32((row // 8 + (tile * 2 + lane // 8 % 2)) ^ lane % 8)
        place = types.int32(panel + (line * LINE + chunk * 4))
        words = load_transposed_matrices(ring, types.int32(place + k * 16 * LINE))
    else:
        line = types.uint32(row + lane % 16)
        chunk = types.uint32((k * 2 + lane // 16) ^ lane % 8)
        place = types.int32(panel + (line * LINE + chunk * 4))
        words = load_matrices(ring, types.int32(place + tile * 16 * LINE))
    return words


@inlined
def load_right(ring, panel, pair, k, is_turned):
    """Return a lane's words of 16 terms by 16 columns of a warp."""
    lane = types.uint32(cuda.threadIdx.x) % 32
    column = types.uint32(types.uint32(cuda.threadIdx.x) // 32 % 2 * 32)
    if is_turned:
        line = types.uint32(lane // 8 % 2 * 8 + lane % 8)
        chunk = types.uint32((column // 8 + (pair * 2 + lane // 16)) ^ lane % 8)
        place = types.int32(panel + (line * LINE + chunk * 4))
        words = load_transposed_matrices(ring, types.int32(place + k * 16 * LINE))
    else:
        line = types.uint32(column + (lane // 16 * 8 + lane % 8))
        chunk = types.uint32((k * 2 + lane // 8 % 2) ^ lane % 8)
        place = types.int32(panel + (line * LINE + chunk * 4))
        words = load_matrices(ring, types.int32(place + pair * 16 * LINE))
    return words


@inlined
def add_step(sums, ring, stage, left, right, tiles):
    """Add what a step multiplies to the sums of the ``tiles`` times 16 rows of a warp."""
    panels = types.int32(stage * STAGE)
    panel = types.int32(panels + 2 * PANEL)
    for k in range(DEPTH // 16):
        if tiles > 0:
            w = load_right(ring, panel, 0, k, right[3])
            v = load_right(ring, panel, 1, k, right[3])
            a = load_left(ring, panels, 0, k, left[3])
            multiply_add(left[0], sums, 0, a[0], a[1], a[2], a[3], w[0], w[1])
            multiply_add(left[0], sums, 4, a[0], a[1], a[2], a[3], w[2], w[3])
            multiply_add(left[0], sums, 8, a[0], a[1], a[2], a[3], v[0], v[1])
            multiply_add(left[0], sums, 12, a[0], a[1], a[2], a[3], v[2], v[3])
            if tiles > 1:
                a = load_left(ring, panels, 1, k, left[3])
                multiply_add(left[0], sums, 16, a[0], a[1], a[2], a[3], w[0], w[1])
                multiply_add(left[0], sums, 20, a[0], a[1], a[2], a[3], w[2], w[3])
                multiply_add(left[0], sums, 24, a[0], a[1], a[2], a[3], v[0], v[1])
                multiply_add(left[0], sums, 28, a[0], a[1], a[2], a[3], v[2], v[3])


@inlined
def add_product(sums, ring, terms, left, right, listed):
    """Add a tile of a product of ``terms`` terms to the block's sums."""
    steps = types.int32((terms + (DEPTH - 1)) // DEPTH)
    rows = types.int32(left[5] - left[4] - types.int32(cuda.threadIdx.x) // 64 * 32)
    tiles = types.int32((rows + 15) // 16)  # with rows that count; not above 0 if there are none
    cuda.syncthreads()  # nobody reads shared memory any more
    for step in range(STAGES - 1):
        copy_step(ring, types.int32(step), types.int32(step), steps, terms, left, right, listed)
    stage = types.int32(0)
    step = types.int32(0)
    while step < steps:
        wait_for_copies()
        cuda.syncthreads()
        copy_step(
            ring, stage_after(stage, STAGES - 1, STAGES), types.int32(step + (STAGES - 1)), steps,
            terms, left, right, listed,
        )  # fmt: skip
        add_step(sums, ring, stage, left, right, tiles)
        stage = stage_after(stage, 1, STAGES)
        step += types.int32(1)


# ---- What becomes of the sums. For a tile and a half of it a lane has sums of one row: of eight
# adjacent columns, or, if the right matrix was turned, of four times two.


@inlined
def row_in_tile(tile, half):
    """Return a lane's row in the block's tile."""
    thread = types.int32(cuda.threadIdx.x)
    return thread // 64 * 32 + types.int32(tile * 16 + half * 8) + thread % 32 // 4


@inlined
def eight_columns():
    """Return where in the block's tile the eight columns of a lane begin."""
    thread = types.int32(cuda.threadIdx.x)
    return thread // 32 % 2 * 32 + thread % 4 * 8


@inlined
def words_of_eight(pointer, sums, tile, half):
    """Return a lane's eight sums of a row, as words."""
    k = tile * 16 + half * 2
    return words_of(
        pointer, sums[k], sums[k + 1], sums[k + 4], sums[k + 5],
        sums[k + 8], sums[k + 9], sums[k + 12], sums[k + 13],
    )  # fmt: skip


@inlined
def put_sums(sums, target, row, rows, pitch, neuron):
    """Write a tile of g or u, where the same lanes will read it."""
    for tile in range(2):
        for half in range(2):
            at = row + row_in_tile(tile, half)
            if at < rows:
                start = at * pitch + neuron + eight_columns()
                store_four_words(target, start, words_of_eight(target, sums, tile, half))


@inlined
def load_eight(pointer, start):
    """Return eight numbers."""
    return eight_numbers_of(pointer, load_four_words(pointer, start))


@inlined
def eight_hidden(g, u, gated):
    """Return h of eight entries."""
    return (
        gated_relu(g[0], u[0], gated), gated_relu(g[1], u[1], gated),
        gated_relu(g[2], u[2], gated), gated_relu(g[3], u[3], gated),
        gated_relu(g[4], u[4], gated), gated_relu(g[5], u[5], gated),
        gated_relu(g[6], u[6], gated), gated_relu(g[7], u[7], gated),
    )  # fmt: skip


@inlined
def put_hidden(sums, hidden, row, rows, pitch, neuron, gated):
    """Write h of a tile over g; u is in ``sums``."""
    for tile in range(2):
        for half in range(2):
            at = row + row_in_tile(tile, half)
            if at < rows:
                start = at * pitch + neuron + eight_columns()
                g = load_eight(hidden, start)
                u = g
                if gated != 0:
                    u = eight_numbers_of(hidden, words_of_eight(hidden, sums, tile, half))
                store_four_words(hidden, start, words_of(hidden, *eight_hidden(g, u, gated)))


@inlined
def put_d_hidden(sums, scale, hidden, d_gate, d_up, row, rows, pitch, neuron, gated):
    """Write h of a tile, dg over g and du over u; dy Wd^T is in ``sums``."""
    for tile in range(2):
        for half in range(2):
            at = row + row_in_tile(tile, half)
            if at < rows:
                start = at * pitch + neuron + eight_columns()
                g = load_eight(d_gate, start)
                u = g
                if gated != 0:
                    u = load_eight(d_up, start)
                store_four_words(hidden, start, words_of(hidden, *eight_hidden(g, u, gated)))
                k = tile * 16 + half * 2
                d0 = d_gate_and_d_up(sums[k], scale, g[0], u[0], gated)
                d1 = d_gate_and_d_up(sums[k + 1], scale, g[1], u[1], gated)
                d2 = d_gate_and_d_up(sums[k + 4], scale, g[2], u[2], gated)
                d3 = d_gate_and_d_up(sums[k + 5], scale, g[3], u[3], gated)
                d4 = d_gate_and_d_up(sums[k + 8], scale, g[4], u[4], gated)
                d5 = d_gate_and_d_up(sums[k + 9], scale, g[5], u[5], gated)
                d6 = d_gate_and_d_up(sums[k + 12], scale, g[6], u[6], gated)
                d7 = d_gate_and_d_up(sums[k + 13], scale, g[7], u[7], gated)
                words = words_of(hidden, d0[0], d1[0], d2[0], d3[0], d4[0], d5[0], d6[0], d7[0])
                store_four_words(d_gate, start, words)
                if gated != 0:
                    words = words_of(hidden, d0[1], d1[1], d2[1], d3[1], d4[1], d5[1], d6[1], d7[1])
                    store_four_words(d_up, start, words)


@inlined
def add_to(gradient, place, value):
    """Add to a number of a gradient unless it is 0: where no row of the tail fires."""
    if value != 0:
        store(gradient, place, load(gradient, place) + value)


@inlined
def add_tile(sums, gradient, neuron, neurons, column, width):
    """Add a tile to a gradient."""
    lane = types.int32(cuda.threadIdx.x) % 32
    for tile in range(2):
        for half in range(2):
            at = neuron + row_in_tile(tile, half)
            if at < neurons:
                for n in range(4):
                    d = column + types.int32(cuda.threadIdx.x) // 32 % 2 * 32 + n * 8 + lane % 4 * 2
                    if d < width:
                        k = tile * 16 + n * 4 + half * 2
                        add_to(gradient, at * width + d, sums[k])
                        add_to(gradient, at * width + d + 1, sums[k + 1])


@inlined
def put_rows(sums, result, listed, row, rows, column, width):
    """Write a tile of a result whose rows are listed."""
    lane = types.int32(cuda.threadIdx.x) % 32
    for tile in range(2):
        for half in range(2):
            at = row + row_in_tile(tile, half)
            if at < rows:
                start = types.int64(load(listed[0], listed[1] + at)) * width
                for n in range(4):
                    d = column + types.int32(cuda.threadIdx.x) // 32 % 2 * 32 + n * 8 + lane % 4 * 2
                    if d < width:
                        k = tile * 16 + n * 4 + half * 2
                        store(result, start + d, sums[k])
                        store(result, start + d + 1, sums[k + 1])


# ---- The same for few rows


@inlined
def few_dots(parts, a, tail_rows, rows, weight, neuron, neurons, width):
    """Return a thread's two of products of rows, rounded as ``a`` is."""
    sums = cuda.local.array(FEW_SUMS, types.float32)
    starts, are_there = listed_rows_of_lane(tail_rows, rows, width)
    clear(sums, FEW_SUMS)
    add_rows_by_rows(sums, a, starts, are_there, weight, neuron, neurons, width)
    return add_warps(sums, parts)


@inlined
def few_hidden(
    parts, x, gate_weight, up_weight, tail_rows, rows, hidden, neuron, neurons, width, pitch, gated
):
    """Write h of a tile."""
    g = few_dots(parts, x, tail_rows, rows, gate_weight, neuron, neurons, width)
    u = g
    if gated != 0:
        u = few_dots(parts, x, tail_rows, rows, up_weight, neuron, neurons, width)
    if row_of_thread() < rows:
        place = row_of_thread() * pitch + neuron + column_of_thread()
        for i in range(2):
            h = gated_relu(round_like(hidden, g[i]), round_like(hidden, u[i]), gated)
            store(hidden, place + i, h)


@inlined
def few_d_hidden(
    parts, dy, x, gate_weight, up_weight, down_weight, tail_rows, rows, l1_scale, hidden, d_gate,
    d_up, neuron, neurons, width, pitch, gated,
):  # fmt: skip
    """Write h, dg and du of a tile."""
    g = few_dots(parts, x, tail_rows, rows, gate_weight, neuron, neurons, width)
    u = g
    if gated != 0:
        u = few_dots(parts, x, tail_rows, rows, up_weight, neuron, neurons, width)
    d_hidden = few_dots(parts, dy, tail_rows, rows, down_weight, neuron, neurons, width)
    if row_of_thread() < rows:
        scale = types.float32(load(l1_scale, 0))
        place = row_of_thread() * pitch + neuron + column_of_thread()
        for i in range(2):
            rounded_g, rounded_u = round_like(hidden, g[i]), round_like(hidden, u[i])
            store(hidden, place + i, gated_relu(rounded_g, rounded_u, gated))
            d = d_gate_and_d_up(d_hidden[i], scale, rounded_g, rounded_u, gated)
            store(d_gate, place + i, d[0])
            if gated != 0:
                store(d_up, place + i, d[1])


@inlined
def few_outputs(
    parts, first, second, first_weight, second_weight, result, tail_rows, rows, neurons, column,
    width, pitch, has_second,
):  # fmt: skip
    """Write a tile of one product or the sum of two, rows of which are listed."""
    sums = cuda.local.array(FEW_SUMS, types.float32)
    starts, are_there = rows_of_lane(rows, pitch)
    clear(sums, FEW_SUMS)
    add_rows_by_columns(sums, first, starts, are_there, first_weight, neurons, column, width)
    if has_second != 0:
        add_rows_by_columns(sums, second, starts, are_there, second_weight, neurons, column, width)
    two = add_warps(sums, parts)
    at = types.int32(column + column_of_thread())
    if row_of_thread() < rows and at < width:
        start = types.int64(load(tail_rows, row_of_thread())) * width
        store(result, start + at, two[0])
        store(result, start + at + 1, two[1])


# ---- The whole. Divisions are of unsigned 32-bit integers: others are calls, which cost registers.


@inlined
def tiles_of(size, tile):
    """Return how many tiles so many rows or columns are."""
    return types.int32(types.uint32(size + tile - 1) // types.uint32(tile))


@inlined
def count_hidden(hidden, listed, row, rows, pitch, neurons, nonzeros, absolute_sums, fired):
    """Count and add up what rows of h hold; a warp takes a row."""
    lane = types.int64(cuda.threadIdx.x) % 32
    at = row + types.int64(cuda.threadIdx.x) // 32
    if at < rows:
        count = types.int32(0)
        total = types.float32(0)
        neuron = lane * 8
        while neuron < neurons:
            h = eight_numbers_of(hidden, load_four_words(hidden, at * pitch + neuron))
            for i in range(8):
                if h[i] != 0 and neuron + i < neurons:  # NaN goes on past it
                    count += types.int32(1)
                    total += abs(h[i])
                    store(fired, neuron + i, 1)
            neuron += 256
        count = warp_sum(count)
        total = warp_sum(total)
        if lane == 0:
            place = load(listed[0], listed[1] + at)
            store(nonzeros, place, count)
            store(absolute_sums, place, total)


@inlined
def items_of_rows(rows, strips, columns, wants_outputs):
    """Return how many items so many rows of a pass are."""
    counted = tiles_of(rows, COUNTED_ROWS) * wants_outputs
    return types.int32(tiles_of(rows, ROWS) * (strips + columns) + counted)


@kernel(threads=THREADS, shared_memory=SHARED_BYTES, blocks_per_multiprocessor=ROOM)
def tail_forward(
    x, gate_weight, up_weight, down_weight, tail_rows, tail_count, state, hidden, y, nonzeros,
    absolute_sums, fired, neurons, width, pitch, pass_rows, few_rows, gated, wants_outputs,
):  # fmt: skip
    """Compute h, y and what rows of h hold."""
    ring = cuda.shared.array(0, types.uint32)
    parts = cuda.shared.array(0, types.float32)
    sums = cuda.local.array(SUMS, types.float32)
    count = types.int32(load(tail_count, 0))
    neurons, width, pitch = types.int32(neurons), types.int32(width), types.int32(pitch)
    is_few = count <= few_rows
    tile = types.uint32(COLUMNS)
    if is_few:
        tile = types.uint32(FEW_COLUMNS)
    strips = tiles_of(pitch, tile)
    columns = types.int32(tiles_of(width, tile) * wants_outputs)
    pass_rows = types.int32(pass_rows)
    full = items_of_rows(pass_rows, strips, columns, wants_outputs)
    passes = types.int32(types.uint32(count) // types.uint32(pass_rows))  # that are full
    items = types.int32(
        passes * full + items_of_rows(count - passes * pass_rows, strips, columns, wants_outputs)
    )
    item = items
    if count > 0:
        item = next_item(state, ring)
    while item < items:
        number = types.int32(types.uint32(item) // types.uint32(full))
        first_row = types.int32(number * pass_rows)
        rows = types.int32(min(pass_rows, count - first_row))
        groups = types.uint32(tiles_of(rows, ROWS))
        listed = (tail_rows, first_row)
        i = types.uint32(item - number * full)
        if i < groups * strips:
            wait_until_done(state, types.int32(number * full))
            row = types.int32(i % groups * ROWS)
            neuron = types.int32(i // groups * tile)
            if is_few:
                few_hidden(
                    parts, x, gate_weight, up_weight, tail_rows, rows, hidden, neuron, neurons,
                    width, pitch, gated,
                )  # fmt: skip
            else:
                left = (x, width, 1, 0, row, rows)
                clear(sums, SUMS)
                right = (gate_weight, width, 0, 0, neuron, neurons)
                add_product(sums, ring, width, left, right, listed)
                put_sums(sums, hidden, row, rows, pitch, neuron)
                if gated != 0:
                    clear(sums, SUMS)
                    right = (up_weight, width, 0, 0, neuron, neurons)
                    add_product(sums, ring, width, left, right, listed)
                put_hidden(sums, hidden, row, rows, pitch, neuron, gated)
        else:
            wait_until_done(state, types.int32(number * full + groups * strips))
            i = types.uint32(i - groups * strips)
            if i < groups * columns:
                row = types.int32(i % groups * ROWS)
                column = types.int32(i // groups * tile)
                if is_few:
                    few_outputs(
                        parts, hidden, hidden, down_weight, down_weight, y, tail_rows, rows,
                        neurons, column, width, pitch, 0,
                    )  # fmt: skip
                else:
                    clear(sums, SUMS)
                    left = (hidden, pitch, 0, 0, row, rows)
                    right = (down_weight, width, 0, 1, column, width)
                    add_product(sums, ring, neurons, left, right, listed)
                    put_rows(sums, y, listed, row, rows, column, width)
            else:
                row = types.int32((i - groups * columns) * COUNTED_ROWS)
                count_hidden(
                    hidden, listed, row, rows, pitch, neurons, nonzeros, absolute_sums, fired
                )
        is_done(state)
        item = next_item(state, ring)
    if count > 0:
        leave(state, item, items)


@inlined
def items_of_backward(rows, neurons, strips, columns, grad_columns, gated):
    """Return how many items so many rows of a pass are."""
    items = tiles_of(rows, ROWS) * (strips + columns)
    if rows > 0:
        items += tiles_of(neurons, ROWS) * grad_columns * (2 + gated)
    return types.int32(items)


@kernel(threads=THREADS, shared_memory=SHARED_BYTES, blocks_per_multiprocessor=ROOM)
def tail_backward(
    dy, x, gate_weight, up_weight, down_weight, tail_rows, tail_count, state, l1_scale, hidden,
    d_gate, d_up, dx, gate_grad, up_grad, down_grad, neurons, width, pitch, pass_rows, few_rows,
    gated,
):  # fmt: skip
    """Compute dx, and add to the gradients."""
    ring = cuda.shared.array(0, types.uint32)
    parts = cuda.shared.array(0, types.float32)
    sums = cuda.local.array(SUMS, types.float32)
    count = types.int32(load(tail_count, 0))
    neurons, width, pitch = types.int32(neurons), types.int32(width), types.int32(pitch)
    gated = types.int32(gated)
    is_few = count <= few_rows
    tile, grad_tile = types.uint32(COLUMNS), types.uint32(COLUMNS)
    if is_few:
        tile, grad_tile = types.uint32(FEW_COLUMNS), types.uint32(STRIP)
    strips = tiles_of(pitch, tile)
    columns = tiles_of(width, tile)
    grad_columns = tiles_of(width, grad_tile)
    pass_rows = types.int32(pass_rows)
    full = items_of_backward(pass_rows, neurons, strips, columns, grad_columns, gated)
    passes = types.int32(types.uint32(count) // types.uint32(pass_rows))  # that are full
    rest = types.int32(count - passes * pass_rows)
    items = types.int32(
        passes * full + items_of_backward(rest, neurons, strips, columns, grad_columns, gated)
    )
    item = items
    if count > 0:
        item = next_item(state, ring)
    while item < items:
        number = types.int32(types.uint32(item) // types.uint32(full))
        first_row = types.int32(number * pass_rows)
        rows = types.int32(min(pass_rows, count - first_row))
        groups = types.uint32(tiles_of(rows, ROWS))
        listed = (tail_rows, first_row)
        i = types.uint32(item - number * full)
        if i < groups * strips:
            wait_until_done(state, types.int32(number * full))
            row = types.int32(i % groups * ROWS)
            neuron = types.int32(i // groups * tile)
            if is_few:
                few_d_hidden(
                    parts, dy, x, gate_weight, up_weight, down_weight, tail_rows, rows, l1_scale,
                    hidden, d_gate, d_up, neuron, neurons, width, pitch, gated,
                )  # fmt: skip
            else:
                left = (x, width, 1, 0, row, rows)
                clear(sums, SUMS)
                right = (gate_weight, width, 0, 0, neuron, neurons)
                add_product(sums, ring, width, left, right, listed)
                put_sums(sums, d_gate, row, rows, pitch, neuron)
                if gated != 0:
                    clear(sums, SUMS)
                    right = (up_weight, width, 0, 0, neuron, neurons)
                    add_product(sums, ring, width, left, right, listed)
                    put_sums(sums, d_up, row, rows, pitch, neuron)
                clear(sums, SUMS)
                left = (dy, width, 1, 0, row, rows)
                right = (down_weight, width, 0, 0, neuron, neurons)
                add_product(sums, ring, width, left, right, listed)
                scale = types.float32(load(l1_scale, 0))
                put_d_hidden(sums, scale, hidden, d_gate, d_up, row, rows, pitch, neuron, gated)
        else:
            wait_until_done(state, types.int32(number * full + groups * strips))
            i = types.uint32(i - groups * strips)
            if i < groups * columns:
                row = types.int32(i % groups * ROWS)
                column = types.int32(i // groups * tile)
                if is_few:
                    few_outputs(
                        parts, d_gate, d_up, gate_weight, up_weight, dx, tail_rows, rows,
                        neurons, column, width, pitch, gated,
                    )  # fmt: skip
                else:
                    clear(sums, SUMS)
                    left = (d_gate, pitch, 0, 0, row, rows)
                    right = (gate_weight, width, 0, 1, column, width)
                    add_product(sums, ring, neurons, left, right, listed)
                    if gated != 0:
                        left = (d_up, pitch, 0, 0, row, rows)
                        right = (up_weight, width, 0, 1, column, width)
                        add_product(sums, ring, neurons, left, right, listed)
                    put_rows(sums, dx, listed, row, rows, column, width)
            else:
                i = types.uint32(i - groups * columns)
                which = types.int32(i % types.uint32(2 + gated))
                i = types.uint32(i // types.uint32(2 + gated))
                neuron = types.int32(i // types.uint32(grad_columns) * ROWS)
                column = types.int32(i % types.uint32(grad_columns) * grad_tile)
                source, operand, gradient = hidden, dy, down_grad
                if which == 1:
                    source, operand, gradient = d_gate, x, gate_grad
                elif which == 2:
                    source, operand, gradient = d_up, x, up_grad
                if is_few:
                    add_columns_by_columns(
                        gradient, source, pitch, operand, tail_rows, rows, neuron,
                        min(neuron + ROWS, pitch), neurons, column, width,
                    )  # fmt: skip
                else:
                    clear(sums, SUMS)
                    left = (source, pitch, 0, 1, neuron, neurons)
                    right = (operand, width, 1, 1, column, width)
                    add_product(sums, ring, rows, left, right, listed)
                    add_tile(sums, gradient, neuron, neurons, column, width)
        is_done(state)
        item = next_item(state, ring)
    if count > 0:
        leave(state, item, items)


# ---- What is launched


def workspace_rows(rows: int) -> int:
    """Return of how many rows the workspace is, for M rows of which any may be in the tail."""
    return min(PASS_ROWS, -(-rows // ROWS) * ROWS)


def _workspace(x: DeviceArray, neurons: int, rows: int) -> DeviceArray:
    return empty((rows, -(-neurons // COLUMNS) * COLUMNS), x.dtype, x.stream)


def _blocks(x: DeviceArray) -> int:
    return ROOM * x.gpu.multiprocessors


def forward_of_tail(
    x: DeviceArray,
    weights: tuple[DeviceArray, DeviceArray, DeviceArray],
    tail_rows: DeviceArray,
    tail_count: DeviceArray,
    state: DeviceArray,
    y: DeviceArray,
    statistics: tuple[DeviceArray, DeviceArray, DeviceArray],
    *,
    gated: bool,
) -> None:
    """Compute y of the tail's rows, and what their h holds.

    Parameters
    ----------
    x : DeviceArray, shape (M, D)
        bfloat16 or float16; D is a multiple of 8 and rows are aligned to 16 bytes, as in the
        weights.
    weights : three of DeviceArray, shape (F, D)
        Wg, Wu, Wd; without a gate the first decides which neurons fire and the second is not read.
    tail_rows : DeviceArray of int32
    tail_count : DeviceArray of int32, shape (1,)
        How many rows are listed in ``tail_rows``, at most M.
    state : DeviceArray of int32, shape (2,)
        Zeros, before and after.
    y : DeviceArray, shape (M, D)
    statistics : DeviceArray of int32 and float32, shape (M,), and of bool, shape (F,)
        Nonzeros of h and sum of |h| of each row, written for the tail's rows; whether a neuron's h
        is not 0 for a row, set to true where it is.
    gated : bool
    """
    (rows, width), neurons = x.shape, weights[0].shape[0]
    if not rows or not neurons:
        return
    hidden = _workspace(x, neurons, workspace_rows(rows))
    sizes = (neurons, width, hidden.shape[1], hidden.shape[0], FEW_ROWS, int(gated), 1)
    tail_forward(
        _blocks(x), x, *weights, tail_rows, tail_count, state, hidden, y, *statistics, *sizes
    )


def backward_of_tail(
    dy: DeviceArray,
    x: DeviceArray,
    weights: tuple[DeviceArray, DeviceArray, DeviceArray],
    tail_rows: DeviceArray,
    tail_count: DeviceArray,
    state: DeviceArray,
    l1_scale: DeviceArray,
    dx: DeviceArray,
    gradients: tuple[DeviceArray, DeviceArray, DeviceArray],
    *,
    gated: bool,
) -> None:
    """Compute dx of the tail's rows, and add what they give to the gradients.

    Parameters
    ----------
    dy, x, dx : DeviceArray, shape (M, D)
    l1_scale : DeviceArray of float32, shape (1,)
    gradients : three of DeviceArray, shape (F, D)
        Of the weights, in their order, at any addresses; without a gate the second is not written.

    The others as in :func:`forward_of_tail`.
    """
    (rows, width), neurons = x.shape, weights[0].shape[0]
    if not rows or not neurons:
        return
    workspaces = [_workspace(x, neurons, workspace_rows(rows)) for _ in range(3)]
    gate_grad, up_grad, down_grad = gradients
    pitch, pass_rows = workspaces[0].shape[::-1]
    # only few rows' gradients are read and written eight numbers at a time
    few_rows = FEW_ROWS if all(g.pointer % 16 == 0 for g in gradients) else 0
    sizes = (neurons, width, pitch, pass_rows, few_rows, int(gated))
    tail_backward(
        _blocks(x), dy, x, *weights, tail_rows, tail_count, state, l1_scale, *workspaces, dx,
        gate_grad, up_grad, down_grad, *sizes,
    )  # fmt: skip


def positive_rows(
    x: DeviceArray, weight: DeviceArray, tail_rows: DeviceArray, tail_count: DeviceArray,
    state: DeviceArray, count: int,
) -> DeviceArray:  # fmt: skip
    """Return relu(x W^T) of the tail's rows as the passes compute it, shape (count, pitch).

    ``pitch`` is F rounded up to a multiple of 64; numbers past F are 0.
    """
    neurons, width = weight.shape
    target = _workspace(x, neurons, -(-count // ROWS) * ROWS)
    if count:
        sizes = (neurons, width, target.shape[1], target.shape[0], FEW_ROWS, 0, 0)
        unused = (tail_rows, empty(1, "float32", x.stream), empty(1, "bool", x.stream))
        tail_forward(
            _blocks(x), x, weight, weight, weight, tail_rows, tail_count, state, target, target,
            *unused, *sizes,
        )  # fmt: skip
    return target[:count]
