"""Products with at most 16 rows, for kernels: as fast as a matrix arrives from memory.

    rows by rows       C[r, n] = A[r] . W[n]
    rows by columns    C[r, n] = A[r] . W[:, n]
    columns by columns W[m, n] += A[:, m] . B[:, n]

A tile of the first two is 16 x 32 numbers. A warp adds up every eighth 64 terms, then the block
adds its eight warps' sums. Numbers pass from memory to the registers of tensor cores without
shared memory in between: which term stands where in a fragment is open, so each lane takes
adjacent numbers, and what has to be transposed it transposes in its own registers. Many words are
under way at a time in each lane, which is what hides how far away memory is.

On an H200 a product of 16 rows with Wg (F, D) = (5632, 2048), bfloat16, takes 13.5 us in a kernel
of its own, launch and all: 23 MB at 1.7 TB/s. In :mod:`dense_tail` three of them take 44 us.

In fragments ``group = lane // 4`` and ``place = lane % 4``, as in device/gpu/tensor_cores.py. For
all blocks of 256 threads.
"""

from llvmlite import ir

from twell_numba.device.gpu.language import cuda, intrinsic, load, types
from twell_numba.device.gpu.tensor_cores import inlined, load_four_words, multiply_add
from twell_numba.kernels.block_ell.cuda_tensor_cores import clear
from twell_numba.kernels.cuda_vectors import load_aligned, store_aligned

FEW_ROWS = 16
WARPS = 8
FEW_COLUMNS = 32  # of a tile
FEW_SUMS = 16  # of a lane
STEP = 64  # terms that a warp loads at a time
STRIP = WARPS * 64  # columns of W that a block adds to

_i32, _i64 = ir.IntType(32), ir.IntType(64)


# ---- Words of 16-bit numbers, or zeros. The plain functions are what tests without a GPU run; they
# name the definitions as defaults so that these are part of the fingerprint of their kernels.


def _load_words(context, builder, signature, arguments, count):
    position = context.cast(builder, arguments[1], signature.args[1], types.int64)
    address = builder.ptrtoint(builder.gep(arguments[0], [position]), _i64)
    flag = context.cast(builder, arguments[2], signature.args[2], types.boolean)
    flag = builder.select(flag, ir.Constant(_i32, 1), ir.Constant(_i32, 0))
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(count))
    vector = f".v{count}" if count > 1 else ""
    targets = ", ".join(f"${i}" for i in range(count))
    targets = f"{{{targets}}}" if count > 1 else targets
    text = (
        f"{{ .reg .pred p; setp.ne.s32 p, ${count + 1}, 0; {zeros} "
        f"@p ld.relaxed.gpu.global{vector}.b32 {targets}, [${count}]; }}"
    )
    result = ir.LiteralStructType([_i32] * count) if count > 1 else _i32
    # outputs are written before the last input is read
    constraints = ",".join(["=&r"] * count + ["l", "r", "~{memory}"])
    code = ir.InlineAsm(ir.FunctionType(result, [_i64, _i32]), text, constraints, side_effect=True)
    words = builder.call(code, [address, flag])
    if count == 1:
        return words
    items = [builder.extract_value(words, i) for i in range(count)]
    return context.make_tuple(builder, signature.return_type, items)


def _four_words(typing_context, pointer, index, is_there):
    def generate(context, builder, signature, arguments):
        return _load_words(context, builder, signature, arguments, 4)

    return types.UniTuple(types.uint32, 4)(pointer, index, is_there), generate


def _two_words(typing_context, pointer, index, is_there):
    def generate(context, builder, signature, arguments):
        return _load_words(context, builder, signature, arguments, 2)

    return types.UniTuple(types.uint32, 2)(pointer, index, is_there), generate


def _one_word(typing_context, pointer, index, is_there):
    def generate(context, builder, signature, arguments):
        return _load_words(context, builder, signature, arguments, 1)

    return types.uint32(pointer, index, is_there), generate


def _four_words_alone(pointer, index, is_there, definition=_four_words):
    """What four_words does; see below."""
    zero = types.uint32(0)
    words = (zero, zero, zero, zero)
    if is_there:
        words = load_four_words(pointer, index)
    return words


def _two_words_alone(pointer, index, is_there, definition=_two_words):
    """What two_words does; see below."""
    zero = types.uint32(0)
    words = (zero, zero)
    if is_there:
        four = load_four_words(pointer, index // 8 * 8)
        words = (four[0], four[1]) if index % 8 == 0 else (four[2], four[3])
    return words


def _one_word_alone(pointer, index, is_there, definition=_one_word):
    """What one_word does; see below."""
    word = types.uint32(0)
    if is_there:
        word = load_four_words(pointer, index // 8 * 8)[index % 8 // 2]
    return word


# four_words(pointer, index, is_there) returns the eight numbers from pointer[index] on as words, or
# zeros; two_words four numbers, one_word two. ``index`` is a multiple of as many numbers. The loads
# are relaxed ones, because the assembler leaves their order alone: all of a step are under way
# before its first product, where of ordinary loads it moves half behind products.
four_words = intrinsic(_four_words)
four_words.py_func = _four_words_alone
two_words = intrinsic(_two_words)
two_words.py_func = _two_words_alone
one_word = intrinsic(_one_word)
one_word.py_func = _one_word_alone


@inlined
def low_halves(first, second):
    """Return the low halves of two words as a word."""
    return types.uint32((first & types.uint32(0xFFFF)) | (second << types.uint32(16)))


@inlined
def high_halves(first, second):
    """Return the high halves of two words as a word."""
    return types.uint32((first >> types.uint32(16)) | (second & types.uint32(0xFFFF0000)))


# ---- Tiles of 16 x 32. Column 4 n + j of a tile is column n of the j-th of four fragments, so that
# a lane has sums of four adjacent columns, twice. ``starts`` says where a lane's rows ``group`` and
# ``group + 8`` of A begin, and ``are_there`` whether they do.


@inlined
def rows_of_lane(rows, pitch):
    """Return ``starts`` and ``are_there`` for the first rows of a matrix."""
    group = types.int32(cuda.threadIdx.x) % 32 // 4
    return (
        (types.int64(group) * pitch, types.int64(group + 8) * pitch),
        (group < rows, group + 8 < rows),
    )


@inlined
def listed_rows_of_lane(tail_rows, rows, pitch):
    """Return ``starts`` and ``are_there`` for rows on a list."""
    group = types.int32(cuda.threadIdx.x) % 32 // 4
    first = types.int64(0)
    second = types.int64(0)
    if group < rows:
        first = types.int64(load(tail_rows, group))
    if group + 8 < rows:
        second = types.int64(load(tail_rows, group + 8))
    return (first * pitch, second * pitch), (group < rows, group + 8 < rows)


@inlined
def add_rows_by_rows(sums, a, starts, are_there, w, neuron, neurons, width):
    """Add to a warp's sums its part of A[r] . W[neuron + n]."""
    lane = types.int32(cuda.threadIdx.x) % 32
    words = cuda.local.array(32, types.uint32)
    first = neuron + lane // 4 * 4  # of the lane's four rows of W
    column = types.int32(cuda.threadIdx.x) // 32 * STEP + lane % 4 * 8
    end = width + lane % 4 * 8  # the whole warp ends together
    while column < end:
        for half in range(2):
            at = column + half * 32
            for j in range(4):
                start = types.int64(first + j) * width
                four = four_words(w, start + at, first + j < neurons and at < width)
                for i in range(4):
                    words[half * 16 + j * 4 + i] = four[i]
        p = four_words(a, starts[0] + column, are_there[0] and column < width)
        q = four_words(a, starts[1] + column, are_there[1] and column < width)
        at = column + 32
        r = four_words(a, starts[0] + at, are_there[0] and at < width)
        s = four_words(a, starts[1] + at, are_there[1] and at < width)
        for j in range(4):
            k = j * 4
            multiply_add(a, sums, k, p[0], q[0], p[1], q[1], words[k], words[k + 1])
            multiply_add(a, sums, k, p[2], q[2], p[3], q[3], words[k + 2], words[k + 3])
        for j in range(4):
            k = j * 4 + 16
            multiply_add(a, sums, j * 4, r[0], s[0], r[1], s[1], words[k], words[k + 1])
            multiply_add(a, sums, j * 4, r[2], s[2], r[3], s[3], words[k + 2], words[k + 3])
        column += types.int32(WARPS * STEP)


@inlined
def add_sixteen_terms(a, sums, p, q, k, words, first):
    """Add 16 terms: of A words ``k`` and ``k + 1`` of p and q, of W four rows of two words."""
    for i in range(2):
        w0, w1 = words[first + i], words[first + 2 + i]
        w2, w3 = words[first + 4 + i], words[first + 6 + i]
        low, high = low_halves(w0, w1), low_halves(w2, w3)
        multiply_add(a, sums, i * 8, p[k], q[k], p[k + 1], q[k + 1], low, high)
        low, high = high_halves(w0, w1), high_halves(w2, w3)
        multiply_add(a, sums, i * 8 + 4, p[k], q[k], p[k + 1], q[k + 1], low, high)


@inlined
def add_rows_by_columns(sums, a, starts, are_there, w, neurons, column, width):
    """Add to a warp's sums its part of A[r] . W[:, column + n]; rows of A are padded to STEP."""
    lane = types.int32(cuda.threadIdx.x) % 32
    words = cuda.local.array(32, types.uint32)
    at = column + lane // 4 * 4
    neuron = types.int32(cuda.threadIdx.x) // 32 * STEP + lane % 4 * 16
    end = neurons + lane % 4 * 16
    while neuron < end:
        for i in range(16):
            start = types.int64(neuron + i) * width
            two = two_words(w, start + at, neuron + i < neurons and at < width)
            words[i * 2] = two[0]
            words[i * 2 + 1] = two[1]
        p = four_words(a, starts[0] + neuron, are_there[0])
        q = four_words(a, starts[1] + neuron, are_there[1])
        r = four_words(a, starts[0] + neuron + 8, are_there[0])
        s = four_words(a, starts[1] + neuron + 8, are_there[1])
        add_sixteen_terms(a, sums, p, q, 0, words, 0)
        add_sixteen_terms(a, sums, p, q, 2, words, 8)
        add_sixteen_terms(a, sums, r, s, 0, words, 16)
        add_sixteen_terms(a, sums, r, s, 2, words, 24)
        neuron += types.int32(WARPS * STEP)


@inlined
def row_of_thread():
    """Return of which row of a tile a thread gets two sums."""
    return types.int32(cuda.threadIdx.x) // 16


@inlined
def column_of_thread():
    """Return at which column of a tile a thread's two sums are."""
    return types.int32(cuda.threadIdx.x) % 16 * 2


@inlined
def add_warps(sums, parts):
    """Return the block's two sums of this thread; ``parts`` is shared memory for all of a tile."""
    thread = types.int32(cuda.threadIdx.x)
    place = (thread // 32 * FEW_ROWS + thread % 32 // 4) * FEW_COLUMNS + thread % 4 * 8
    cuda.syncthreads()  # nobody reads shared memory any more
    for j in range(4):
        for half in range(2):
            at = place + half * 8 * FEW_COLUMNS + j
            parts[at] = sums[j * 4 + half * 2]
            parts[at + 4] = sums[j * 4 + half * 2 + 1]
    cuda.syncthreads()
    first = types.float32(0)
    second = types.float32(0)
    for warp in range(WARPS):
        first += parts[warp * FEW_ROWS * FEW_COLUMNS + thread * 2]
        second += parts[warp * FEW_ROWS * FEW_COLUMNS + thread * 2 + 1]
    return first, second


# ---- Gradients


@inlined
def add_unless_zero(gradient, place, sums, first):
    """Add eight sums of every fourth to a gradient, unless all are 0: no row of A has the neuron.

    Return nothing.
    """
    is_needed = False
    for j in range(8):
        is_needed = is_needed or sums[first + j * 4] != 0
    if is_needed:
        old = load_aligned(gradient, place)
        new = (
            old[0] + sums[first], old[1] + sums[first + 4],
            old[2] + sums[first + 8], old[3] + sums[first + 12],
            old[4] + sums[first + 16], old[5] + sums[first + 20],
            old[6] + sums[first + 24], old[7] + sums[first + 28],
        )  # fmt: skip
        store_aligned(gradient, place, new)


@inlined
def add_columns_by_columns(
    gradient, a, pitch, b, tail_rows, rows, neuron, end, neurons, column, width
):
    """Add A[:, m] . B[:, n] for m from ``neuron`` to ``end``, n from ``column`` on; B is listed.

    The first and the end of m are multiples of 16. Neuron 2 m + i of 16 is row m or m + 8 of a
    fragment; column 8 n + j is column n of fragment j: each lane has eight adjacent columns, twice.
    """
    lane = types.int32(cuda.threadIdx.x) % 32
    row = lane % 4 * 4
    column += types.int32(cuda.threadIdx.x) // 32 * 64
    lows = cuda.local.array(8, types.uint32)
    highs = cuda.local.array(8, types.uint32)
    words = cuda.local.array(16, types.uint32)
    sums = cuda.local.array(32, types.float32)
    for i in range(4):
        start = types.int64(0)
        at = column + lane // 4 * 8
        if row + i < rows:
            start = types.int64(load(tail_rows, row + i)) * width
        four = four_words(b, start + at, row + i < rows and at < width)
        for k in range(4):
            words[i * 4 + k] = four[k]
    for k in range(4):
        lows[2 * k] = low_halves(words[k], words[4 + k])
        lows[2 * k + 1] = high_halves(words[k], words[4 + k])
        highs[2 * k] = low_halves(words[8 + k], words[12 + k])
        highs[2 * k + 1] = high_halves(words[8 + k], words[12 + k])
    column += lane % 4 * 16
    while neuron < end:
        at = types.int64(row) * pitch + (neuron + lane // 4 * 2)
        w0 = one_word(a, at, row < rows)
        w1 = one_word(a, at + pitch, row + 1 < rows)
        w2 = one_word(a, at + 2 * pitch, row + 2 < rows)
        w3 = one_word(a, at + 3 * pitch, row + 3 < rows)
        a0, a1 = low_halves(w0, w1), high_halves(w0, w1)
        a2, a3 = low_halves(w2, w3), high_halves(w2, w3)
        clear(sums, 32)
        for j in range(8):
            multiply_add(a, sums, j * 4, a0, a1, a2, a3, lows[j], highs[j])
        for i in range(2):
            of_lane = neuron + lane // 4 * 2 + i
            place = types.int64(of_lane) * width + column
            if of_lane < neurons and column < width:
                add_unless_zero(gradient, place, sums, 2 * i)
            if of_lane < neurons and column + 8 < width:
                add_unless_zero(gradient, place + 8, sums, 2 * i + 1)
        neuron += types.int32(16)
