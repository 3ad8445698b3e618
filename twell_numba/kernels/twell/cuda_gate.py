"""The gate product on tensor cores, packed as TwELL before it reaches memory.

    relu(x Wg^T), positive entries and NaN alone, in tiles of 256 neurons

x (M, D), Wg (F, D), both in 16 bits and row-major, D a multiple of 8; sums are in float32 and in a
fixed order. For compute capability 8: ``mma.sync``, operands copied ahead to shared memory by
``cp.async``, at most 99 KB of it, which is what 8.6 and 8.9 have. Newer GPUs can run it, but take
:mod:`hopper_gate` (Hopper, bfloat16) or NVIDIA's library and a kernel that packs.

A block of threads computes 128 rows of a tile at a time, a warp 64 x 64 numbers of it, and goes
through tiles without a break: what the next tile begins with is copied while entries are packed.
Rows of Wg lie in shared memory in an order in which a lane's 16 sums of a row are adjacent neurons,
so that columns ascend in each tile: a lane's entries come after those of the lanes before it, and a
warp's after those of the warps before it.

Measured on an H200, the one GPU at hand, in bfloat16. Made for it (9.0) and, as text that the
driver assembles, for 8.0; beside it cuBLAS, whose product on this GPU uses instructions (wgmma)
that older ones lack, and cuBLAS followed by the kernel that packs. In ms:

    M, D, F, nonzeros a row          9.0     8.0   cuBLAS   cuBLAS + pack
    16384, 2048, 5632, 29          0.887   0.910   0.489    0.751
    16384, 2048, 5632, 907         0.981   1.021   0.501    3.281
    16384, 768, 3072, 29           0.206   0.206   0.111    0.308
    16384, 4096, 11008, 60         3.44            2.17     2.45
    512, 2048, 5632, 29            0.040   0.040   0.018    0.042

The first is 426 TFLOP/s, 1.8 times as long as cuBLAS. Bound by tensor cores as ``mma.sync`` feeds
them: operands pass through registers, of which sums take half (no spills).

Tried, at the first shape for 9.0: 3 steps in shared memory instead of 4, 0.889; 64 terms a step, 3
or 4 of them, 0.866, 0.903, but that is more shared memory than 8.6 has; two blocks of 128 threads
on a multiprocessor, 0.94 to 1.00; tiles in groups of 1, 4, 8, 16 and 32 blocks of rows, 0.977,
0.916, 0.887, 0.886, 0.885.
"""

from twell_numba.device.gpu import DeviceArray, kernel
from twell_numba.device.gpu.language import FULL_WARP, cuda, store, types
from twell_numba.device.gpu.tensor_cores import (
    copy_ahead,
    eight_numbers_of,
    end_of_copies,
    inlined,
    load_matrices,
    multiply_add,
    wait_for_older_copies,
    words_of,
)
from twell_numba.kernels.twell.cuda_language import count_bits

# Neurons of a tile, and threads of a block.
TILE = 256
# Rows of a tile that a block of threads computes.
ROWS = 128
# Rows and columns of the product that a warp computes.
SHARE = 64
# Tiles below each other that blocks of threads compute at a time: they share what they read.
GROUP = 16
# Terms of the sums in a step.
DEPTH = 32
# Steps in shared memory: one is multiplied, the others are on their way.
STAGES = 4
STAGE = (ROWS + TILE) * DEPTH // 2  # words
# Of a lane: sums, and words of the fragments that it multiplies, twice.
SUMS = SHARE * SHARE // 32
FRAGMENTS = SHARE // 2
# A row's entries in the neurons of a warp.
COUNTERS = ROWS * TILE // SHARE


@inlined
def swizzled(row, chunk):
    """Return at which word of a row in shared memory a chunk of eight numbers lies.

    Eight rows' chunks of one number are in different banks: two rows fill all of them.
    """
    return (chunk ^ (row // 2 % (DEPTH // 8))) * 4


@inlined
def place_of(item, rows, tiles):
    """Return the first row and the tile of a block's item."""
    row_tiles = types.uint32((rows + ROWS - 1) // ROWS)
    group = item // types.uint32(GROUP * tiles)
    first = types.uint32(group * types.uint32(GROUP))
    inside = types.uint32(item - types.uint32(first * types.uint32(tiles)))
    size = types.uint32(min(types.uint32(row_tiles - first), types.uint32(GROUP)))
    row = types.int64(first + inside % size) * ROWS
    return row, types.int64(inside // size)


@inlined
def start_of_copies(item, rows, width, neurons, tiles):
    """Return where a thread's numbers of x and Wg begin, and how many lines of each follow."""
    thread = types.int32(cuda.threadIdx.x)
    chunk = thread % (DEPTH // 8)
    line = thread // (DEPTH // 8)
    row, tile = place_of(item, rows, tiles)
    row += line
    # where a warp's lane 4 g + p finds its sums 2 n and 2 n + 1: neurons 16 p + 2 n and beside it
    neuron = tile * TILE + line // 64 * 64 + line % 8 // 2 * 16 + line % 64 // 8 * 2 + line % 2
    x_at = row * width + chunk * 8
    w_at = neuron * width + chunk * 8
    x_lines = types.int32(min(rows - row, ROWS))
    return x_at, w_at, x_lines, types.int32(min(neurons - neuron, TILE))


@inlined
def copy_step(ring, stage, x, gate, following, width):
    """Begin to copy what a step multiplies: some columns of 128 rows of x, and of rows of Wg.

    Nothing here depends on a branch, so that it goes on beside products.
    """
    item, terms, place = following
    x_at, w_at, x_lines, w_lines = place
    thread = types.int32(cuda.threadIdx.x)
    across = DEPTH // 8
    lines = TILE // across  # of threads
    chunk = thread % across
    line = thread // across
    to = types.int32(stage * STAGE + line * (DEPTH // 2) + swizzled(line, chunk))
    is_inside = chunk * 8 < terms
    for k in range(ROWS // lines):
        is_there = is_inside and k * lines < x_lines
        copy_ahead(ring, to + k * lines * (DEPTH // 2), x, x_at + k * lines * width, is_there)
    for k in range(across):
        neuron = k * lines // 64 * 64 + k * lines % 64 // 8 * 2
        is_there = is_inside and neuron < w_lines
        at = to + (ROWS + k * lines) * (DEPTH // 2)
        copy_ahead(ring, at, gate, w_at + neuron * width, is_there)
    end_of_copies()
    return item, terms, (x_at + DEPTH, w_at + DEPTH, x_lines, w_lines)


@inlined
def load_fragments(left, right, buffer, ring, stage, k):
    """Load what a warp multiplies in 16 terms of its sums."""
    thread = types.int32(cuda.threadIdx.x)
    lane = thread % 32
    start = stage * STAGE
    row = thread // 32 % 2 * SHARE + lane % 16
    place = start + row * (DEPTH // 2) + swizzled(lane % 8, 2 * k + lane // 16)
    for tile in range(SHARE // 16):
        words = load_matrices(ring, place + tile * 16 * (DEPTH // 2))
        for i in range(4):
            left[buffer * SHARE // 4 + tile * 4 + i] = words[i]
    row = ROWS + thread // 64 * SHARE + lane // 16 * 8 + lane % 8
    place = start + row * (DEPTH // 2) + swizzled(lane % 8, 2 * k + lane // 8 % 2)
    for tile in range(SHARE // 16):
        words = load_matrices(ring, place + tile * 16 * (DEPTH // 2))
        for i in range(4):
            right[buffer * SHARE // 4 + tile * 4 + i] = words[i]


@inlined
def multiply(sums, left, right, buffer, x):
    """Add 16 terms to the sums of a warp."""
    for i in range(SHARE // 16):
        a = buffer * SHARE // 4 + i * 4
        for j in range(SHARE // 8):
            b = buffer * SHARE // 4 + j * 2
            multiply_add(
                x, sums, i * SHARE // 2 + j * 4,
                left[a], left[a + 1], left[a + 2], left[a + 3], right[b], right[b + 1],
            )  # fmt: skip


@inlined
def wait_for_stage():
    """Wait until what the next step multiplies is in shared memory."""
    wait_for_older_copies()
    cuda.syncthreads()


@inlined
def firing_of(values, sums, first):
    """Return which of a lane's 16 sums of a row are entries once they are rounded, a bit each."""
    firing = types.int32(0)
    for half in range(2):
        k = first + half * 16
        words = words_of(
            values, sums[k], sums[k + 1], sums[k + 4], sums[k + 5],
            sums[k + 8], sums[k + 9], sums[k + 12], sums[k + 13],
        )  # fmt: skip
        numbers = eight_numbers_of(values, words)
        for i in range(8):
            if not numbers[i] <= 0:
                firing = types.int32(firing | (1 << (half * 8 + i)))
    return firing


@inlined
def count_row(i, existing, counted, place, values, sums):
    """Count a warp's entries of one of a lane's rows; return which are its, and how many before.

    A bit each for the lane's own; how many the lanes before it have is 16 bits higher.
    """
    lane = types.int32(cuda.threadIdx.x) % 32
    firing = types.int32(firing_of(values, sums, i // 2 * (SHARE // 2) + i % 2 * 2) & existing)
    count = types.int32(count_bits(firing))
    other = types.int32(cuda.shfl_xor_sync(FULL_WARP, count, 1))
    before = types.int32(0)
    if lane % 2 == 1:
        before = other
    count = types.int32(count + other)
    other = types.int32(cuda.shfl_xor_sync(FULL_WARP, count, 2))
    if lane % 4 > 1:
        before = types.int32(before + other)
    count = types.int32(count + other)
    if lane % 4 == 0:
        counted[types.uint32(place + i * 8)] = count
    return types.int32(firing | (before << 16))


@inlined
def put_row(i, entries, strip, counted, line, values, columns, sums, row, rows, tile, tiles, slots):
    """Store a lane's entries of one of its rows, those that fit in their tile."""
    firing = types.int32(entries & 0xFFFF)
    row += line + i * 8
    if row < rows and firing != 0:
        slot = types.int32(entries >> 16)
        for other in range(TILE // SHARE - 1):
            if other < strip:
                slot = types.int32(slot + counted[types.uint32(other * ROWS + line + i * 8)])
        start = (row * tiles + tile) * slots
        column = strip * SHARE + types.int32(cuda.threadIdx.x) % 4 * 16
        while firing != 0 and slot < slots:
            bit = types.int32(count_bits((firing & -firing) - 1))
            first = i // 2 * (SHARE // 2) + i % 2 * 2
            value = sums[first]
            for k in range(1, 16):
                if bit == k:
                    value = sums[first + k // 2 * 4 + k % 2]
            store(values, start + slot, value)
            store(columns, start + slot, column + bit)
            slot = types.int32(slot + 1)
            firing = types.int32(firing & (firing - 1))


@inlined
def pack(strip, counted, values, columns, sums, row, rows, tile, neurons, tiles, slots):
    """Store a warp's entries: those of a strip of 64 neurons of a tile."""
    lane = types.int32(cuda.threadIdx.x) % 32
    line = types.int32(cuda.threadIdx.x) // 32 % 2 * SHARE + lane // 4
    # how many of the lane's 16 neurons there are
    room = types.int32(min(neurons - tile * TILE, TILE)) - strip * SHARE - lane % 4 * 16
    existing = types.int32((1 << min(max(room, 0), 16)) - 1)
    place = strip * ROWS + line
    # by hand, because an index that is no constant would put the sums into memory
    r0 = count_row(0, existing, counted, place, values, sums)
    r1 = count_row(1, existing, counted, place, values, sums)
    r2 = count_row(2, existing, counted, place, values, sums)
    r3 = count_row(3, existing, counted, place, values, sums)
    r4 = count_row(4, existing, counted, place, values, sums)
    r5 = count_row(5, existing, counted, place, values, sums)
    r6 = count_row(6, existing, counted, place, values, sums)
    r7 = count_row(7, existing, counted, place, values, sums)
    cuda.syncthreads()
    to, at = (values, columns, sums), (row, rows, tile, tiles, slots)
    put_row(0, r0, strip, counted, line, *to, *at)
    put_row(1, r1, strip, counted, line, *to, *at)
    put_row(2, r2, strip, counted, line, *to, *at)
    put_row(3, r3, strip, counted, line, *to, *at)
    put_row(4, r4, strip, counted, line, *to, *at)
    put_row(5, r5, strip, counted, line, *to, *at)
    put_row(6, r6, strip, counted, line, *to, *at)
    put_row(7, r7, strip, counted, line, *to, *at)


@inlined
def copies_after(following, rows, width, neurons, tiles, items):
    """Return what is copied in the step that follows; nothing is there after the last item."""
    item, terms, place = following
    terms = types.int32(terms - DEPTH)
    if terms <= 0:
        terms = types.int32(width)
        item = types.uint32(item + types.uint32(cuda.gridDim.x))
        if item < items:
            place = start_of_copies(item, rows, width, neurons, tiles)
        else:
            terms = types.int32(0)
    return item, terms, place


@inlined
def stage_after(stage, steps):
    """Return the stage that follows another one after some steps."""
    stage = types.int32(stage + steps)
    if stage >= STAGES:
        stage = types.int32(stage - STAGES)
    return stage


@kernel(threads=TILE, shared_memory=4 * STAGES * STAGE, blocks_per_multiprocessor=1)
def gate_pack_tiles(x, gate, values, columns, counts, rows, width, neurons, tiles, slots):
    """Compute x Wg^T, and pack its tiles."""
    ring = cuda.shared.array(0, types.uint32)
    counted = cuda.shared.array(COUNTERS, types.int32)
    sums = cuda.local.array(SUMS, types.float32)
    left = cuda.local.array(FRAGMENTS, types.uint32)
    right = cuda.local.array(FRAGMENTS, types.uint32)
    thread = types.int32(cuda.threadIdx.x)
    items = types.uint32((rows + ROWS - 1) // ROWS * tiles)
    item = types.uint32(cuda.blockIdx.x)
    place = start_of_copies(item, rows, width, neurons, tiles)
    following = (item, types.int32(width), place)
    for k in range(STAGES - 1):
        following = copy_step(ring, types.int32(k), x, gate, following, width)
        following = copies_after(following, rows, width, neurons, tiles, items)
    stage = types.int32(0)
    wait_for_stage()
    load_fragments(left, right, 0, ring, stage, 0)
    while item < items:
        for k in range(SUMS):
            sums[k] = types.float32(0)
        column = types.int32(0)
        while column < types.int32(width):
            load_fragments(left, right, 1, ring, stage, 1)
            following = copy_step(ring, stage_after(stage, STAGES - 1), x, gate, following, width)
            multiply(sums, left, right, 0, x)
            wait_for_stage()
            stage = stage_after(stage, 1)
            load_fragments(left, right, 0, ring, stage, 0)
            multiply(sums, left, right, 1, x)
            following = copies_after(following, rows, width, neurons, tiles, items)
            column = types.int32(column + DEPTH)
        row, tile = place_of(item, rows, tiles)
        strip = thread // 64
        pack(strip, counted, values, columns, sums, row, rows, tile, neurons, tiles, slots)
        if thread < ROWS and row + thread < rows:
            count = types.int32(0)
            for k in range(TILE // SHARE):
                count += counted[types.uint32(k * ROWS + thread)]
            store(counts, (row + thread) * tiles + tile, count)
        item = types.uint32(item + types.uint32(cuda.gridDim.x))
        cuda.syncwarp()


def gate_pack(
    x: DeviceArray,
    gate_weight: DeviceArray,
    values: DeviceArray,
    columns: DeviceArray,
    counts: DeviceArray,
    slots: int,
) -> None:
    """Write ``relu(x Wg^T)``, packed as TwELL in tiles of 256 neurons.

    NaN is an entry; columns ascend in each tile. The same input gives the same bits in every run.

    Parameters
    ----------
    x : DeviceArray of bfloat16 or float16, shape (M, D)
        D a multiple of 8.
    gate_weight : DeviceArray, shape (F, D)
        Of x's dtype.
    values : DeviceArray, shape (M, tiles * slots)
        Of x's dtype; overwritten, as are the next two. Places past a tile's count are left as they
        are.
    columns : DeviceArray of uint16, shape (M, tiles * slots)
        Neuron of each entry, as an offset in its tile.
    counts : DeviceArray of int32, shape (M, tiles)
        Entries of each tile. More than ``slots`` say that it overflows, and that only the first
        ``slots`` of them are stored.
    slots : int
        Entries that a tile has room for.
    """
    rows, width = x.shape
    neurons, tiles = gate_weight.shape[0], counts.shape[1]
    if counts.size == 0:
        return
    if width == 0:
        counts.fill_with_zeros()
        return
    gate_pack_tiles(
        min(-(-rows // ROWS) * tiles, x.gpu.multiprocessors),
        x, gate_weight, values, columns, counts, rows, width, neurons, tiles, slots,
    )  # fmt: skip
