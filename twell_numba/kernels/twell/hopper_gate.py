"""The dense product of an activation-sparse layer and its packing, in one kernel for Hopper GPUs.

    g = x Wg^T,  relu(g) packed as TwELL in tiles of T = 256 neurons

for x (M, D) and Wg (F, D) in bfloat16; sums are in float32. g itself never reaches memory.

Blocks stay on their multiprocessors and take one item after the other: 128 rows by 256 neurons, a
tile's whole width, so that a row's entries of a tile are counted inside one block, without atomics
and always in the same order. Of a block's three warpgroups

    the first has one thread at work: it lets the copy engine bring 64 columns of x and Wg at a
    time, into the next of 4 stages of shared memory that the others have left,
    the other two multiply 64 rows each, and pack what they have when an item is done.

Two blocks are a cluster: they work on one tile of neurons, and each brings half of its weights for
both. The second warpgroup that multiplies stays AHEAD stages behind the first, so that tensor cores
have work while one of them packs.

A warp packs eight rows at a time. Tensor cores leave each lane two columns in every eight; through
shared memory lanes get 64 columns of one row each instead. Then a lane knows its entries as bits,
what it must know of others is how many they have, and it writes one entry after the other.

Bound by tensor cores, 2 M F D operations, and they by the GPU's power: at M = 16384, D = 2048,
F = 5632 both this kernel and cuBLAS's draw 690 to 700 W on an H200, and its clock falls to 1.7 and
1.5 GHz. So times change with what ran before, and ratios to cuBLAS (tiles of 192 x 192, clusters
of 2; it writes g) in the same run say more. Versions tried on an H200, 29 entries a row where
nothing else is said, 32 slots a tile, AHEAD = 2:

                                                                  ms    cuBLAS   ratio
    no packing, no cluster                                      0.499   0.492    1.02
                clusters of 2                                   0.531   0.553    0.96
                    rows' blocks in groups of 2 to 16           0.531 to 0.533
                    the last round of items halved              0.517   0.524    0.99
                    a wait for each product                     0.493   0.515    0.96
                    compiled to be linked with other code       0.613   0.535    1.15
                clusters of 4, compiled so                      1.032   0.490    2.11
    a lane packs its own entries: bits say what others have     0.567   0.523    1.08
                    compiled to be linked with other code       0.576   0.523    1.10
    four lanes go through their row together, by ballots        0.573   0.537    1.07
                    150 entries a row                           0.626   0.512    1.22
                    no cluster                                  0.577   0.541    1.07
                    AHEAD = 0                                   0.554   0.507    1.09
                    AHEAD = 3                                   0.551   0.512    1.08
                    8 stages of 32 columns                      0.531   0.500    1.06
                    128 bytes brought to the second-level cache 0.561   0.522    1.07
                    integers of 32 bits in the products' loop   0.505   0.492    1.03

By entries a row, in another run and with integers of 32 bits (at 911 all tiles overflow):

                                                      29      60      150     911
    four lanes go through their row together   ratio  1.08    1.12    1.21    1.58
    a lane packs 64 columns of its row         ratio  1.09    1.03    1.05    1.27
        AHEAD = 3: this kernel                 ratio  1.01    1.02    1.05    1.27
                                               ms     0.540   0.557   0.571   0.663
        entries are not written                ratio  0.98    1.01    1.04    1.12
"""

import numpy as np

from twell_numba.device.gpu import DeviceArray, empty, kernel, tensor_map
from twell_numba.device.gpu.hopper import (
    COLUMNS,
    INNER,
    ROW_BYTES,
    ROWS,
    SUMS,
    arrive,
    arrive_and_expect,
    arrive_in_block,
    begin_product,
    copy_box,
    copy_box_to_blocks,
    give_registers_away,
    int32,
    load_four_shared_words,
    load_shared_word,
    make_barrier,
    operand,
    positive_halves,
    positive_word,
    publish_barriers,
    shared_address,
    store_low_half,
    store_two_shared_words,
    take_registers,
    wait_for_cluster,
    wait_for_older_products,
    wait_for_phase,
    wait_for_sums,
    write_tensor_map,
)
from twell_numba.device.gpu.language import FULL_WARP, cuda, store, types
from twell_numba.device.gpu.tensor_cores import inlined
from twell_numba.device.gpu.tensor_map import WORDS, TensorMap
from twell_numba.kernels.twell.cuda_language import count_bits

TILE = COLUMNS
# Warpgroups of a block that multiply, each ROWS rows; one more brings their operands.
CONSUMERS = 2
THREADS = 128 * (CONSUMERS + 1)
BLOCK_ROWS = ROWS * CONSUMERS
# Blocks that share a tile of weights: each copies its part of it to all.
CLUSTER = 2
# Pairs of operands in shared memory; a power of 2.
STAGES = 4
# Products that the first consumer is ahead of the second.
AHEAD = 3

X_BYTES = BLOCK_ROWS * ROW_BYTES
WEIGHT_BYTES = TILE * ROW_BYTES
STAGE_BYTES = X_BYTES + WEIGHT_BYTES
ALIGNMENT = 1024
# Where each warp has eight lines, a row of the tile each, while it packs; and where barriers are.
LINES = STAGES * STAGE_BYTES
LINE_BYTES = 2 * TILE
BARRIERS = LINES + CONSUMERS * 4 * 8 * LINE_BYTES
SHARED_BYTES = BARRIERS + 8 * (2 * STAGES + 1) + ALIGNMENT
ALL_BLOCKS = (1 << CLUSTER) - 1


@inlined
def release(barrier, thread):
    """Tell all blocks that this warpgroup has read a pair of operands."""
    if thread % 128 < CLUSTER:
        arrive_in_block(barrier, thread % 128)


@inlined
def word_address(lines, line, quarter, column):
    """Return where a warp has the word of a column, 0 to 31, of a quarter of a line.

    Its halves are the bfloat16 numbers of that column and of the one 32 further. Which 16 bytes of
    a quarter are where differs between lines and between quarters, so that no two of the warp's
    accesses meet in a bank.
    """
    turn = int32((2 * (line % 4) + line // 4) ^ (quarter % 2 + quarter // 2 * 4))
    return int32((lines + LINE_BYTES * line + LINE_BYTES // 4 * quarter + 16 * turn) ^ (4 * column))


@inlined
def share(sums, half, lines, line, part):
    """Write one half of a warp's sums to its lines; a lane has two columns in every eight."""
    for i in range(SUMS // 8):
        quarter, column = i // 4, i % 4 * 8
        first = 4 * (8 * quarter + i % 4) + 2 * half
        store_two_shared_words(
            word_address(lines, line, quarter, column ^ (2 * part)),
            positive_word(sums[first], sums[first + 16]),
            positive_word(sums[first + 1], sums[first + 17]),
        )


@inlined
def entries_of(words, first):
    """Return which of a quarter's columns from ``first`` on are entries.

    Bits 0 to 15 are of 16 columns, the others of those 32 further.
    """
    found = int32(0)
    for i in range(4):
        a, b, c, d = load_four_shared_words(int32(words ^ (4 * first + 16 * i)))
        found = int32(found | (positive_halves(a) << (4 * i)) | (positive_halves(b) << (4 * i + 1)))
        found = int32(found | (positive_halves(c) << (4 * i + 2)))
        found = int32(found | (positive_halves(d) << (4 * i + 3)))
    return found


@inlined
def bits_below(end):
    """Return a word whose bits below ``end``, limited to 0 to 32, are set."""
    return int32((types.int64(1) << min(max(end, int32(0)), int32(32))) - 1)


@inlined
def pack(sums, half, lines, arrays, row, layout):
    """Pack eight rows of a warp's sums, the first or the second half of its 16.

    ``row`` is the lane's, of four lanes; each packs a quarter of the tile's columns. ``lines`` is
    where the warp's lines are in shared memory.
    """
    values, columns, counts = arrays
    tile, rows, neurons, tiles, slots = layout
    line = int32(cuda.threadIdx.x % 32 // 4)
    part = int32(cuda.threadIdx.x % 4)
    cuda.syncwarp()  # lanes may still read what was packed before
    share(sums, half, lines, line, part)
    cuda.syncwarp()
    words = word_address(lines, line, part, 0)
    even, odd = entries_of(words, 0), entries_of(words, 16)
    lows = int32((even & 0xFFFF) | (odd << 16))  # columns 0 to 31 of the lane's
    highs = int32(((even >> 16) & 0xFFFF) | (odd & -0x10000))  # and 32 to 63
    # copies of what is outside are 0, but NaN times 0 is not
    stop = int32(neurons - tile * TILE - 64 * part) if row < rows else int32(0)
    lows = int32(lows & bits_below(stop))
    highs = int32(highs & bits_below(int32(stop - 32)))

    count = int32(count_bits(lows) + count_bits(highs))
    # entries of the lane beside this one, and of the other two of the row
    beside = cuda.shfl_xor_sync(FULL_WARP, count, 1)
    across = cuda.shfl_xor_sync(FULL_WARP, int32(count + beside), 2)
    start = (row * tiles + tile) * slots
    place = start + (beside if part % 2 == 1 else int32(0)) + (across if part > 1 else int32(0))
    while (lows | highs) != 0 and place < start + slots:
        is_low = lows != 0
        pending = lows if is_low else highs
        bit = int32(count_bits((pending & -pending) - 1))
        pending = int32(pending & (pending - 1))
        word = load_shared_word(int32(words ^ (4 * bit)))
        column = int32(64 * part + bit)
        if is_low:
            lows = pending
        else:
            highs = pending
            word = int32(word >> 16)
            column = int32(column + 32)
        store_low_half(values, place, word)
        store_low_half(columns, place, column)
        place += 1
    if part == 0 and row < rows:
        store(counts, row * tiles + tile, int32(count + beside + across))


@kernel(threads=THREADS, blocks_per_multiprocessor=1, shared_memory=SHARED_BYTES, cluster=CLUSTER)
def gate_and_pack(x_map, weight_map, maps, values, columns, counts, rows, neurons, steps, slots):
    """Pack relu(x Wg^T); blocks stay and take one item after the other."""
    start = shared_address(cuda.shared.array(0, types.int32))
    stages = int32((start + ALIGNMENT - 1) & -ALIGNMENT)
    full = int32(stages + BARRIERS)
    free = int32(full + 8 * STAGES)
    ahead = int32(free + 8 * STAGES)
    thread = types.int64(cuda.threadIdx.x)
    block = types.int64(cuda.blockIdx.x)
    rank = block % CLUSTER
    if thread == 0:
        for i in range(STAGES):
            make_barrier(full + 8 * i, 1)
            make_barrier(free + 8 * i, CONSUMERS * CLUSTER)
        make_barrier(ahead, 1)
        publish_barriers()
    wait_for_cluster()

    tiles = (neurons + TILE - 1) // TILE
    row_blocks = (rows + BLOCK_ROWS * CLUSTER - 1) // (BLOCK_ROWS * CLUSTER)
    item = block // CLUSTER
    stride = types.int64(cuda.gridDim.x) // CLUSTER
    if thread < 128:
        give_registers_away(56)
        if thread == 0:
            x_map_there = write_tensor_map(maps, block * 2 * WORDS, x_map)
            weight_map_there = write_tensor_map(maps, (block * 2 + 1) * WORDS, weight_map)
            stage = types.int64(0)
            parity = 1
            while item < row_blocks * tiles:
                row_block, tile = item // tiles, item % tiles
                row = (row_block * CLUSTER + rank) * BLOCK_ROWS
                neuron = tile * TILE + rank * (TILE // CLUSTER)
                for step in range(steps):
                    wait_for_phase(free + 8 * stage, parity)
                    target, barrier = stages + stage * STAGE_BYTES, full + 8 * stage
                    arrive_and_expect(barrier, STAGE_BYTES)
                    copy_box(target, x_map_there, step * INNER, row, barrier)
                    target += X_BYTES + rank * (WEIGHT_BYTES // CLUSTER)
                    copy_box_to_blocks(
                        target, weight_map_there, step * INNER, neuron, barrier, ALL_BLOCKS
                    )
                    stage += 1
                    if stage == STAGES:
                        stage = 0
                        parity ^= 1
                item += stride
    else:
        take_registers(224)
        consumer = int32(thread // 128 - 1)
        row_of_thread = consumer * ROWS + thread % 128 // 32 * 16 + thread % 32 // 4
        lines = int32(stages + LINES + (thread - 128) // 32 * (8 * LINE_BYTES))
        sums = cuda.local.array(SUMS, types.float32)
        # what changes at each step has 32 bits: with 64 the whole takes 4% longer
        last = int32(steps)
        stage = int32(0)
        parity = int32(0)
        is_started = consumer == 1
        if consumer == 1:
            wait_for_phase(ahead, 0)
        while item < row_blocks * tiles:
            row_block, tile = item // tiles, item % tiles
            before = stage
            for step in range(last):
                wait_for_phase(int32(full + int32(8) * stage), parity)
                source = int32(stages + int32(STAGE_BYTES) * stage)
                left = operand(int32(source + int32(ROWS * ROW_BYTES) * consumer))
                right = operand(int32(source + int32(X_BYTES)))
                begin_product(sums, left, right, step, COLUMNS, 0)
                wait_for_older_products()
                if step > 0:
                    release(int32(free + int32(8) * before), thread)
                before = stage
                stage = int32((stage + int32(1)) & int32(STAGES - 1))
                if stage == 0:
                    parity = int32(parity ^ int32(1))
                if not is_started and step + 1 == min(AHEAD, steps):
                    is_started = True
                    if thread % 128 == 0:
                        arrive(ahead)
            wait_for_sums(sums)
            release(int32(free + int32(8) * before), thread)
            row = (row_block * CLUSTER + rank) * BLOCK_ROWS + row_of_thread
            arrays = (values, columns, counts)
            layout = (tile, rows, neurons, tiles, slots)
            pack(sums, 0, lines, arrays, row, layout)
            pack(sums, 1, lines, arrays, row + 8, layout)
            item += stride
    wait_for_cluster()  # others still arrive at barriers of this block


def fits(x: DeviceArray, gate_weight: DeviceArray) -> bool:
    """Return whether :func:`gate_pack` can take these: on Hopper, bfloat16, aligned rows."""
    is_hopper = x.gpu.capability == (9, 0)
    return is_hopper and tensor_map.fits(x) and tensor_map.fits(gate_weight)


def gate_pack(
    x: DeviceArray,
    gate_weight: DeviceArray,
    values: DeviceArray,
    columns: DeviceArray,
    counts: DeviceArray,
    slots: int,
) -> None:
    """Pack relu(x Wg^T) as TwELL in tiles of 256 neurons.

    Parameters
    ----------
    x : DeviceArray of bfloat16, shape (M, D)
    gate_weight : DeviceArray of bfloat16, shape (F, D)
    values : DeviceArray of bfloat16, shape (M, tiles * slots)
        Overwritten, as the next two: entries of each tile with ascending columns; past its count,
        nothing is written. NaN is an entry.
    columns : DeviceArray of uint16, shape (M, tiles * slots)
        Neuron of each entry, as an offset inside its tile.
    counts : DeviceArray of int32, shape (M, tiles)
        Positive numbers in each tile. Where there are more than ``slots``, the first are stored.
    slots : int
    """
    rows, width = x.shape
    if rows == 0:
        return
    neurons = gate_weight.shape[0]
    maps = TensorMap(x, BLOCK_ROWS), TensorMap(gate_weight, TILE // CLUSTER)
    row_blocks = -(-rows // (BLOCK_ROWS * CLUSTER))
    items = row_blocks * -(-neurons // TILE)
    blocks = CLUSTER * min(items, x.gpu.multiprocessors // CLUSTER)
    memory = empty((blocks, 2 * WORDS), np.int64, x.stream)
    gate_and_pack(
        blocks, *maps, memory, values, columns, counts,
        rows, neurons, -(-width // INNER), slots,
    )  # fmt: skip
