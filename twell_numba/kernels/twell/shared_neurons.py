"""Products with packed entries by blocks of 128 tokens that share neurons, on Hopper GPUs.

Blocks are made of tokens for which the same neurons fire (:mod:`token_groups`). With U the neurons
that fire for any token of a block (:mod:`shared_lists`), entries i of row m, of neurons j_i, and
h = g u, dg = dh u, du = dh g:

    dots    x[block] Wu[U]^T,  of which u_i are kept;   dy[block] Wd[U]^T,  of which dh_i
    sums    y[block] = h Wd[U],                         dx[block] = dg Wg[U] + du Wu[U]

In bfloat16, sums in float32. Most of dots is thrown away, and most of what is multiplied in sums is
0; but each row of the weights is read once for a block, not once for an entry, and tensor cores do
it. In text U has 0.12 to 0.26 times as many neurons as the block has entries. Where tokens have
little in common, :mod:`strip_rows` is faster.

Blocks of threads stay on their multiprocessors and take one item after the other, those that take
longest first and every other round in reverse: 128 tokens by up to 256 neurons of U, or by 256
columns of y. As in :mod:`hopper_gate` one warpgroup brings operands, into 4 stages of shared
memory, and two multiply 64 tokens each. Neither tokens nor rows of weights lie side by side:
threads copy them by 16 bytes.

    dots    parts of U that are about alike, multiplied as 64, 96, ... or 256 neurons. A row's four
            lanes of a warp take its entries in turn, read ahead from a list; u comes to them
            through shared memory, and h goes to *panels* of 128 tokens by 64 neurons, cleared
            before.
    sums    takes panels as they are, by the copy engine. The weights' rows are what is summed over.

A neuron whose weights are not finite makes y NaN for all tokens of its block, not only for those
for which it fires, as the dense layer does for all.

Bound by tensor cores, whose clock follows the power that is drawn, and by what lies between two
products. Versions tried on an H200, M 16384, D 2048, F 5632, in ms, with tokens in the order of the
text; a block's U has 1230 neurons of *trained 24* and 1992 of *trained 82*:

| | trained 24: dots, sums | trained 82 |
| --- | --- | --- |
| predicted | 0.150, 0.140 | 0.230, 0.220 |
| entries found tile by tile, one at a time; copies with flags | 0.307, 0.207 | 0.467, 0.313 |
| a list of entries, read one ahead; each product waited for | 0.185, 0.199 | 0.286, 0.308 |
| copies with addresses and predicates of their own | 0.166, 0.162 | 0.274, 0.247 |
| four entries read ahead; neurons of sums read one step ahead | 0.168, 0.147 | 0.260, 0.222 |
| 32-bit numbers; four neurons read at once: as kept | 0.159, 0.133 | 0.254, 0.199 |
| the same, each product waited for | 0.164, 0.138 | 0.263, 0.221 |
| the same, the second consumer 3 steps behind the first | 0.160, 0.137 | 0.264, 0.223 |
| the same, nothing written | 0.145, 0.122 | 0.231, 0.203 |

Backward 0.190 and 0.241, 0.335 and 0.372. With tokens in the order of groups, 788 and 1382 neurons:
0.121 and 0.092, 0.194 and 0.142. README.md beside this file has what was tried since, and what is
kept: 0.107 and 0.087 for 746 neurons.
"""

import functools
from dataclasses import replace

import ml_dtypes
import numpy as np

from twell_numba.device.gpu import DeviceArray, Kernel, empty, kernel, tensor_map
from twell_numba.device.gpu.hopper import (
    COLUMNS,
    INNER,
    ROW_BYTES,
    ROWS,
    SUMS,
    address_of,
    arrive,
    arrive_and_expect,
    arrive_when_copied,
    begin_product,
    copy_box,
    copy_sixteen_bytes,
    give_registers_away,
    int32,
    load_four_integers,
    load_four_shared_words,
    load_shared_word,
    make_barrier,
    number_of_half,
    operand,
    operand_by_rows,
    publish_barriers,
    row_address,
    shared_address,
    show_to_tensor_cores,
    store_low_half,
    store_shared_word,
    take_registers,
    wait_for_cluster,
    wait_for_older_products,
    wait_for_phase,
    wait_for_sums,
    word_of_two,
    write_tensor_map,
)
from twell_numba.device.gpu.language import FULL_WARP, cuda, load, number, store, types
from twell_numba.device.gpu.tensor_cores import inlined, store_four_words
from twell_numba.device.gpu.tensor_map import WORDS, TensorMap
from twell_numba.kernels.device_checks import rows_are_aligned
from twell_numba.kernels.twell import entry_transpose, hot_neurons
from twell_numba.kernels.twell.cuda_activations import DeviceActivations
from twell_numba.kernels.twell.cuda_language import sign
from twell_numba.kernels.twell.entry_gradients import add_weight_gradients
from twell_numba.kernels.twell.entry_transpose import list_by_neuron
from twell_numba.kernels.twell.learned_groups import learn_pattern
from twell_numba.kernels.twell.shared_lists import (
    ENTRIES,
    MOST_NEURONS,
    MOST_SLOTS,
    NEURONS,
    PANEL,
    TOKENS,
    SharedNeurons,
    list_shared_neurons,
)
from twell_numba.kernels.twell.token_groups import LearnedPattern, Sharing, order_tokens

# Warpgroups of a block that multiply, ROWS tokens each; one more brings their operands.
CONSUMERS = 2
PRODUCERS = 128
THREADS = 128 * CONSUMERS + PRODUCERS
# Pairs of operands in shared memory; a power of 2.
STAGES = 4

LEFT_BYTES = TOKENS * ROW_BYTES
RIGHT_BYTES = NEURONS * ROW_BYTES
STAGE_BYTES = LEFT_BYTES + RIGHT_BYTES
ALIGNMENT = 1024
# Where each warp has eight lines, a row of the product each, when it is done; and barriers.
LINES = STAGES * STAGE_BYTES
LINE_BYTES = 2 * COLUMNS
BARRIERS = LINES + CONSUMERS * 4 * 8 * LINE_BYTES
SHARED_BYTES = BARRIERS + 16 * STAGES + ALIGNMENT
FULL, FREE = BARRIERS, BARRIERS + 8 * STAGES
# Rows of the right operand, and of tokens, of which each producer brings 16 bytes, and how far they
# are apart.
OWN_ROWS = NEURONS * ROW_BYTES // 16 // PRODUCERS
OWN_TOKENS = TOKENS * ROW_BYTES // 16 // PRODUCERS
OWN_ROWS_APART = PRODUCERS // 8

# Entries that a lane reads at a time.
BATCH = 4

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 88, 208

MOST_ROWS = 2**23 - TOKENS  # entries are numbered in 32 bits
# It is faster than strips from so many entries on for each neuron of a block, and numbers of x.
ENTRIES_A_NEURON = 2.6
# What is learned anew takes the place of what was learned before if blocks had so many times as
# many neurons with that, or weight gradients were expected to take so many times as long:
# recordings have to be made anew for it.
WORTH_LEARNING = 1.05
# Of all rows; such layers are no faster where blocks share.
MOST_IN_TAIL = 1 / 64
LEAST_NUMBERS = 2**23
# Measured, in us, of the forward pass but for the product that packs, for D = 2048 and M = 16384
# (see README.md): launches and the like; by M, what is done once; by M and D, a neuron of a block;
# by M, as many entries as there are rows. And dense, by M, a neuron, in parts without D and by D.
LAUNCHED, ONCE, SHARED_NEURON, ENTRY = 75.0, 20.0, 0.19, 0.665
DENSE_ACTIVATION, DENSE_PRODUCTS = 0.034, 0.151
# And rows of the tail, whatever M is: if there are any, and a row for each of F, by D.
TAIL, TAIL_ROW = 40.0, 0.6 / 5632
# Blocks are to share where they are reckoned to take at most so much of the dense time, and up to
# so many times as many entries as were measured: more may not fit.
WORTH_SHARING, MOST_GROWTH = 0.95, 1.25


# ---- What both kernels do


@inlined
def make_barriers(stages, arrivals):
    """Make the barriers of all stages, which are full after so many arrivals."""
    if cuda.threadIdx.x == 0:
        for i in range(STAGES):
            make_barrier(stages + FULL + 8 * i, arrivals)
            make_barrier(stages + FREE + 8 * i, CONSUMERS)
        publish_barriers()
    wait_for_cluster()


@inlined
def after(stage, parity):
    """Return the next stage and its parity."""
    stage = int32((stage + int32(1)) & int32(STAGES - 1))
    if stage == 0:
        parity = int32(parity ^ int32(1))
    return stage, parity


@inlined
def wait_for_operands(stages, stage, parity):
    """Wait for a pair of operands and return where it is."""
    wait_for_phase(int32(stages + int32(FULL) + int32(8) * stage), parity)
    show_to_tensor_cores()
    return int32(stages + int32(STAGE_BYTES) * stage)


@inlined
def go_on(stages, stage, parity, before, step, thread):
    """Leave the operands of the product before the newest."""
    wait_for_older_products()
    if step > 0 and thread % 128 == 0:
        arrive(int32(stages + int32(FREE) + int32(8) * before))
    before = stage
    stage, parity = after(stage, parity)
    return stage, parity, before


@inlined
def end_product(sums, stages, before, thread):
    """Wait for all products and leave the last one's operands."""
    wait_for_sums(sums)
    if thread % 128 == 0:
        arrive(int32(stages + int32(FREE) + int32(8) * before))


def _multiply(columns, by_rows):
    """Return the function that multiplies 64 tokens by so many neurons, or entries by columns.

    Neurons' rows are the right operand's rows, or, of entries, what is summed over.
    """

    @inlined
    def multiply(sums, steps, stages, consumer, thread, stage, parity):
        before = stage
        for step in range(steps):
            source = wait_for_operands(stages, stage, parity)
            left = operand(int32(source + int32(ROWS * ROW_BYTES) * consumer))
            there = int32(source + int32(LEFT_BYTES))
            right = operand_by_rows(there) if by_rows == 1 else operand(there)
            begin_product(sums, left, right, step, columns, by_rows)
            stage, parity, before = go_on(stages, stage, parity, before, step, thread)
        end_product(sums, stages, before, thread)
        return stage, parity

    return multiply


multiply_64, multiply_96, multiply_128, multiply_160, multiply_192, multiply_224, multiply_256 = (
    _multiply(columns, by_rows=0) for columns in range(64, NEURONS + 1, 32)
)
multiply_by_rows = _multiply(COLUMNS, by_rows=1)


@inlined
def multiply_part(sums, n, steps, stages, consumer, thread, stage, parity):
    """Multiply 64 tokens by a part of their neurons, and by rows of no meaning up to a size."""
    if n > 224:
        stage, parity = multiply_256(sums, steps, stages, consumer, thread, stage, parity)
    elif n > 192:
        stage, parity = multiply_224(sums, steps, stages, consumer, thread, stage, parity)
    elif n > 160:
        stage, parity = multiply_192(sums, steps, stages, consumer, thread, stage, parity)
    elif n > 128:
        stage, parity = multiply_160(sums, steps, stages, consumer, thread, stage, parity)
    elif n > 96:
        stage, parity = multiply_128(sums, steps, stages, consumer, thread, stage, parity)
    elif n > 64:
        stage, parity = multiply_96(sums, steps, stages, consumer, thread, stage, parity)
    else:
        stage, parity = multiply_64(sums, steps, stages, consumer, thread, stage, parity)
    return stage, parity


@inlined
def item_of(turn):
    """Return the item that a block of threads takes as its next; every other round in reverse."""
    grid, own = types.int64(cuda.gridDim.x), types.int64(cuda.blockIdx.x)
    return turn * grid + (own if turn % 2 == 0 else grid - 1 - own)


@inlined
def line_address(lines, line):
    """Return where a warp has a line; its words are at this address xor four times their number.

    Where the 16 bytes numbered c of a line are differs between lines, so that neither words of
    eight lines nor 16 bytes of one meet in a bank.
    """
    return int32(lines + (LINE_BYTES + 16) * line)


@inlined
def share(sums, half, lines):
    """Write one half of a warp's sums to its lines, as words of bfloat16."""
    line = int32(cuda.threadIdx.x % 32 // 4)
    start = int32(line_address(lines, line) ^ int32(4 * (cuda.threadIdx.x % 4)))
    cuda.syncwarp()  # lanes may still read what was there before
    for j in range(SUMS // 4):
        first = 4 * j + 2 * half
        store_shared_word(int32(start ^ (16 * j)), word_of_two(sums[first], sums[first + 1]))
    cuda.syncwarp()


# ---- Dots


@inlined
def row_of(tokens, block, token, rows):
    """Return which token one of a block is; the last one past it."""
    return types.int64(load(tokens, min(block * TOKENS + token, rows - 1)))


@inlined
def bring_rows_and_tokens(stages, x, tokens, weight, neurons, items, rows, width, room):
    """Bring tokens and their neurons' rows, 64 columns at a time; for the producers."""
    thread = types.int64(cuda.threadIdx.x)
    own = cuda.local.array(OWN_ROWS, types.int64)
    own_tokens = cuda.local.array(OWN_TOKENS, types.int64)
    line, chunk = int32(thread // 8), int32(thread % 8)
    own_target = int32(stages + line * ROW_BYTES + 16 * (chunk ^ (line % 8)))
    stage = int32(0)
    parity = int32(1)
    steps = int32((width + INNER - 1) // INNER)
    total = load(items, 0)
    turn = types.int64(0)
    item = item_of(turn)
    code = load(items, 1 + min(item, total - 1)) if total > 0 else types.int64(0)
    while item < total:
        block, low, n = code >> 32, code >> 16 & 0x7FFF, int32(code & 0x1FF)
        turn += 1
        item = item_of(turn)
        code = load(items, 1 + min(item, total - 1))  # in time for the next
        for i in range(OWN_TOKENS):
            # the last one's row also instead of those past it
            row = row_of(tokens, block, line + OWN_ROWS_APART * i, rows)
            own_tokens[i] = address_of(x, row * width + chunk * 8)
        for i in range(OWN_ROWS):
            r = block * room + low + min(int32(line + OWN_ROWS_APART * i), int32(n - 1))
            own[i] = address_of(weight, types.int64(load(neurons, r)) * width + chunk * 8)
        for step in range(steps):
            wait_for_phase(int32(stages + int32(FREE) + int32(8) * stage), parity)
            first_column = int32(step * INNER + chunk * 8)
            target = int32(own_target + int32(STAGE_BYTES) * stage)
            for i in range(OWN_TOKENS):
                place = int32(target + int32(OWN_ROWS_APART * ROW_BYTES * i))
                copy_sixteen_bytes(place, own_tokens[i], first_column, width)
                own_tokens[i] += ROW_BYTES
            target = int32(target + int32(LEFT_BYTES))
            for i in range(OWN_ROWS):
                if OWN_ROWS_APART * i < n:
                    place = int32(target + int32(OWN_ROWS_APART * ROW_BYTES * i))
                    copy_sixteen_bytes(place, own[i], first_column, width)
            arrive_when_copied(int32(stages + int32(FULL) + int32(8) * stage))
            for i in range(OWN_ROWS):
                own[i] += ROW_BYTES
            stage, parity = after(stage, parity)


@inlined
def clear_rows(matrix, block, low, n, is_last, room, first_row):
    """Write zeros to 16 tokens of a part of h, and of the panel's rest; a warp does."""
    zero = int32(0)
    zeros = (zero, zero, zero, zero)
    lane = int32(cuda.threadIdx.x % 32)
    start = block * room * TOKENS + (first_row + lane // 2) * PANEL
    end = int32(low + n)
    if is_last != 0:
        end = int32((end + PANEL - 1) // PANEL * PANEL)
    position = int32(low + lane % 2 * 8)
    while position < end:
        store_four_words(matrix, start + place_in_panels(position), zeros)
        position = int32(position + 16)


@inlined
def shared_half(line, position):
    """Return a number of a line, as a word of which the upper half is of no use."""
    word = load_shared_word(int32(line ^ int32(4 * (position >> 1))))
    if position & 1 == 1:
        word = int32(word >> 16)
    return word


@inlined
def place_in_panels(position):
    """Return where in panels of 128 tokens the entry of a position is, of the first token."""
    return int32((position >> 6) * (TOKENS * PANEL) + (position & (PANEL - 1)))


@inlined
def find_entries(starts, block, token, part, parts):
    """Return where a lane's first entry of a row and a part is listed, and where its last may be.

    Four lanes share a row's entries of a part.
    """
    first = (block * TOKENS + token) * (parts + 1) + part
    entry = int32(load(starts, first) + cuda.threadIdx.x % 4)
    return int32(block * ENTRIES + entry), int32(block * ENTRIES + load(starts, first + 1))


@inlined
def load_entries(codes, entries, entry, end):
    """Read a lane's next entries."""
    for i in range(BATCH):
        codes[i] = 0  # so that what was there before takes no registers
        if entry + 4 * i < end:
            codes[i] = load(entries, entry + 4 * i)


@inlined
def load_flags(flags, fired, codes, entry, end):
    """Read whether the neurons of a lane's next entries fired already."""
    for i in range(BATCH):
        flags[i] = 0
        if entry + 4 * i < end:
            flags[i] = types.int32(load(fired, int32(int32(codes[i] >> 32) & 0xFFFF)))


@inlined
def finish_hidden(codes, flags, lines, token, row, part, ahead, entries, layout, results):
    """Compute u and h of the entries of eight rows; a row's four lanes take turns."""
    entry, end = ahead
    block, low, row_slots, room, rows, parts = layout
    up_values, hidden, fired, row_counts, row_sums = results
    first_slot, first_place = row * row_slots, block * room * TOKENS + token * PANEL
    line = line_address(lines, int32(cuda.threadIdx.x % 32 // 4))
    later = cuda.local.array(BATCH, types.int64)
    nonzeros = int32(0)
    absolute_sum = types.float32(0)
    while entry < end:
        load_entries(later, entries, int32(entry + 4 * BATCH), end)
        for i in range(BATCH):
            if entry + 4 * i < end:
                code, high = int32(codes[i]), int32(codes[i] >> 32)
                position = int32(code >> 16 & 0xFF)
                word = shared_half(line, position)
                value = number_of_half(int32(high >> 16)) * number_of_half(word)
                store_low_half(up_values, first_slot + int32(code & 0xFFFF), word)
                there = place_in_panels(int32(low + position))
                store(hidden, first_place + there, value)
                absolute_sum += abs(value)
                if value != 0:
                    nonzeros = int32(nonzeros + 1)
                    if flags[i] == 0:
                        store(fired, int32(high & 0xFFFF), 1)
        entry = int32(entry + 4 * BATCH)
        for i in range(BATCH):
            codes[i] = later[i]
        load_flags(flags, fired, codes, entry, end)
    absolute_sum += cuda.shfl_xor_sync(FULL_WARP, absolute_sum, 1)
    absolute_sum += cuda.shfl_xor_sync(FULL_WARP, absolute_sum, 2)
    nonzeros = int32(nonzeros + cuda.shfl_xor_sync(FULL_WARP, nonzeros, 1))
    nonzeros = int32(nonzeros + cuda.shfl_xor_sync(FULL_WARP, nonzeros, 2))
    if cuda.threadIdx.x % 4 == 0 and block * TOKENS + token < rows:
        store(row_counts, row * parts + part, nonzeros)
        store(row_sums, row * parts + part, absolute_sum)


@inlined
def finish_d_hidden(codes, lines, token, first_slot, ahead, arrays, layout, results):
    """Compute dh, dg and du of the entries of eight rows; a row's four lanes take turns."""
    entry, end = ahead
    entries, up_values, entry_places, l1 = arrays
    block, low, room = layout
    d_pattern, d_up, list_hidden, list_pattern, list_up = results
    first_place = block * room * TOKENS + token * PANEL
    line = line_address(lines, int32(cuda.threadIdx.x % 32 // 4))
    ups = cuda.local.array(BATCH, types.float32)
    places = cuda.local.array(BATCH, types.int32)
    later = cuda.local.array(BATCH, types.int64)
    while entry < end:
        load_entries(later, entries, int32(entry + 4 * BATCH), end)
        for i in range(BATCH):
            if entry + 4 * i < end:
                slot = int32(first_slot + int32(int32(codes[i]) & 0xFFFF))
                ups[i] = load(up_values, slot)
                places[i] = load(entry_places, slot)
        for i in range(BATCH):
            if entry + 4 * i < end:
                position = int32(int32(codes[i]) >> 16 & 0xFF)
                d_hidden = number_of_half(shared_half(line, position))
                value = number_of_half(int32(codes[i] >> 48))
                h = value * ups[i]
                d_hidden += l1 * sign(h, types.float32(1))
                there = first_place + place_in_panels(int32(low + position))
                store(d_pattern, there, d_hidden * ups[i])
                store(d_up, there, d_hidden * value)
                store(list_hidden, places[i], h)
                store(list_pattern, places[i], d_hidden * ups[i])
                store(list_up, places[i], d_hidden * value)
        entry = int32(entry + 4 * BATCH)
        for i in range(BATCH):
            codes[i] = later[i]


@kernel(threads=THREADS, blocks_per_multiprocessor=1, shared_memory=SHARED_BYTES)
def multiply_tokens(
    x, tokens, weight, neurons, items, entries, starts, up_values, hidden, fired, row_counts,
    row_sums, rows, width, row_slots, room,
):  # fmt: skip
    """Compute u and h of all entries of shared blocks; blocks of threads stay."""
    stages = int32((shared_address(cuda.shared.array(0, types.int32)) + ALIGNMENT - 1) & -ALIGNMENT)
    make_barriers(stages, PRODUCERS)
    thread = int32(cuda.threadIdx.x)
    if thread < PRODUCERS:
        give_registers_away(PRODUCER_REGISTERS)
        bring_rows_and_tokens(stages, x, tokens, weight, neurons, items, rows, width, room)
    else:
        take_registers(CONSUMER_REGISTERS)
        consumer = int32((thread - PRODUCERS) // 128)
        warp = types.int64((thread - PRODUCERS) // 32)
        lines = int32(stages + LINES + warp * (8 * LINE_BYTES))
        sums = cuda.local.array(SUMS, types.float32)
        upper_codes = cuda.local.array(BATCH, types.int64)
        lower_codes = cuda.local.array(BATCH, types.int64)
        upper_flags = cuda.local.array(BATCH, types.int32)
        lower_flags = cuda.local.array(BATCH, types.int32)
        steps = int32((width + INNER - 1) // INNER)
        stage = int32(0)
        parity = int32(0)
        total = load(items, 0)
        turn = types.int64(0)
        item = item_of(turn)
        code = load(items, 1 + min(item, total - 1)) if total > 0 else types.int64(0)
        while item < total:
            block, low, n = code >> 32, int32(code >> 16 & 0x7FFF), int32(code & 0x1FF)
            part, is_last = int32(code >> 9 & 0x7F), int32(code >> 31 & 1)
            turn += 1
            item = item_of(turn)
            code = load(items, 1 + min(item, total - 1))
            parts, token = room // NEURONS, 16 * warp + thread % 32 // 4
            upper = find_entries(starts, block, token, part, parts)
            lower = find_entries(starts, block, token + 8, part, parts)
            rows_of = row_of(tokens, block, token, rows), row_of(tokens, block, token + 8, rows)
            load_entries(upper_codes, entries, upper[0], upper[1])
            load_entries(lower_codes, entries, lower[0], lower[1])
            clear_rows(hidden, block, low, n, is_last, room, 16 * warp)
            stage, parity = multiply_part(sums, n, steps, stages, consumer, thread, stage, parity)
            layout = (block, low, row_slots, room, rows, parts)
            results = (up_values, hidden, fired, row_counts, row_sums)
            load_flags(upper_flags, fired, upper_codes, upper[0], upper[1])
            share(sums, 0, lines)
            load_flags(lower_flags, fired, lower_codes, lower[0], lower[1])
            finish_hidden(
                upper_codes, upper_flags, lines, token, rows_of[0], part, upper, entries, layout,
                results,
            )  # fmt: skip
            share(sums, 1, lines)
            finish_hidden(
                lower_codes, lower_flags, lines, token + 8, rows_of[1], part, lower, entries,
                layout, results,
            )  # fmt: skip
    wait_for_cluster()  # copies may still be under way


@kernel(threads=THREADS, blocks_per_multiprocessor=1, shared_memory=SHARED_BYTES)
def multiply_tokens_backward(
    dy, tokens, weight, neurons, items, entries, starts, up_values, entry_places, l1_scale,
    d_pattern, d_up, list_hidden, list_pattern, list_up, rows, width, row_slots, room,
):  # fmt: skip
    """Compute dh, dg and du of all entries of shared blocks; blocks of threads stay."""
    stages = int32((shared_address(cuda.shared.array(0, types.int32)) + ALIGNMENT - 1) & -ALIGNMENT)
    make_barriers(stages, PRODUCERS)
    thread = int32(cuda.threadIdx.x)
    if thread < PRODUCERS:
        give_registers_away(PRODUCER_REGISTERS)
        bring_rows_and_tokens(stages, dy, tokens, weight, neurons, items, rows, width, room)
    else:
        take_registers(CONSUMER_REGISTERS)
        consumer = int32((thread - PRODUCERS) // 128)
        warp = types.int64((thread - PRODUCERS) // 32)
        lines = int32(stages + LINES + warp * (8 * LINE_BYTES))
        sums = cuda.local.array(SUMS, types.float32)
        upper_codes = cuda.local.array(BATCH, types.int64)
        lower_codes = cuda.local.array(BATCH, types.int64)
        steps = int32((width + INNER - 1) // INNER)
        stage = int32(0)
        parity = int32(0)
        l1 = load(l1_scale, 0)
        total = load(items, 0)
        turn = types.int64(0)
        item = item_of(turn)
        code = load(items, 1 + min(item, total - 1)) if total > 0 else types.int64(0)
        while item < total:
            block, low, n = code >> 32, int32(code >> 16 & 0x7FFF), int32(code & 0x1FF)
            part, is_last = int32(code >> 9 & 0x7F), int32(code >> 31 & 1)
            turn += 1
            item = item_of(turn)
            code = load(items, 1 + min(item, total - 1))
            parts, token = room // NEURONS, 16 * warp + thread % 32 // 4
            upper = find_entries(starts, block, token, part, parts)
            lower = find_entries(starts, block, token + 8, part, parts)
            upper_slot = int32(row_of(tokens, block, token, rows) * row_slots)
            lower_slot = int32(row_of(tokens, block, token + 8, rows) * row_slots)
            load_entries(upper_codes, entries, upper[0], upper[1])
            load_entries(lower_codes, entries, lower[0], lower[1])
            clear_rows(d_pattern, block, low, n, is_last, room, 16 * warp)
            clear_rows(d_up, block, low, n, is_last, room, 16 * warp)
            stage, parity = multiply_part(sums, n, steps, stages, consumer, thread, stage, parity)
            arrays = (entries, up_values, entry_places, l1)
            layout = (block, low, room)
            results = (d_pattern, d_up, list_hidden, list_pattern, list_up)
            share(sums, 0, lines)
            finish_d_hidden(upper_codes, lines, token, upper_slot, upper, arrays, layout, results)
            share(sums, 1, lines)
            finish_d_hidden(
                lower_codes, lines, token + 8, lower_slot, lower, arrays, layout, results
            )
    wait_for_cluster()  # copies may still be under way


@kernel()
def add_statistics_of_parts(
    union_counts, tokens, row_counts, row_sums, nonzeros, absolute_sums, rows, parts
):  # fmt: skip
    """Add up the statistics of rows of shared blocks; a thread takes a row."""
    place = types.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
    if place < rows:
        row = types.int64(load(tokens, place))
        neurons = load(union_counts, place // TOKENS)
        count = types.int32(0)
        total = number(absolute_sums, 0)
        for p in range((neurons + NEURONS - 1) // NEURONS):
            count = types.int32(count + load(row_counts, row * parts + p))
            total += load(row_sums, row * parts + p)
        store(nonzeros, row, count)
        store(absolute_sums, row, total)


# ---- Sums


@inlined
def load_own_neurons(own, listed, first):
    """Read whose rows a warp brings; anything past the last."""
    for i in range(OWN_ROWS // 4):
        a, b, c, d = load_four_integers(listed, first + 4 * i)
        own[4 * i], own[4 * i + 1], own[4 * i + 2], own[4 * i + 3] = a, b, c, d


@inlined
def bring_rows_and_entries(
    stages, maps_there, weights, listed, block, n, column, width, room, stage, parity
):  # fmt: skip
    """Bring entries and 256 columns of their neurons' rows, 64 neurons at a time."""
    thread = int32(cuda.threadIdx.x)
    lane, warp = int32(thread % 32), int32(thread // 32)
    mine = column + lane * 8
    rows_there = n if mine < width else int32(0)
    own_target = int32(
        stages + LEFT_BYTES + lane // 8 * (INNER * ROW_BYTES) + warp * (OWN_ROWS * ROW_BYTES)
        + 16 * (lane % 8)
    )  # fmt: skip
    own = cuda.local.array(OWN_ROWS, types.int32)
    later = cuda.local.array(OWN_ROWS, types.int32)
    first = block * room + warp * OWN_ROWS
    first_box = int32(block * room // PANEL * TOKENS)
    panels = int32((n + PANEL - 1) // PANEL)
    row_bytes = int32(2 * width)
    load_own_neurons(later, listed, first)
    panel = int32(0)
    map_there, weight = maps_there[0], address_of(weights[0], mine)
    for _ in range(int32(panels * len(maps_there))):
        for i in range(OWN_ROWS):
            own[i] = later[i]
        next_panel = int32(panel + 1) if panel + 1 < panels else int32(0)
        load_own_neurons(later, listed, first + next_panel * PANEL)  # in time for the next step
        wait_for_phase(int32(stages + int32(FREE) + int32(8) * stage), parity)
        barrier = int32(stages + int32(FULL) + int32(8) * stage)
        if thread == 0:
            arrive_and_expect(barrier, LEFT_BYTES)
            target = int32(stages + int32(STAGE_BYTES) * stage)
            copy_box(target, map_there, 0, first_box + panel * TOKENS, barrier)
        target = int32(own_target + int32(STAGE_BYTES) * stage)
        rest = int32(rows_there - panel * PANEL - warp * OWN_ROWS)  # rows past it are zeros
        for i in range(OWN_ROWS):
            # which 16 bytes of a row are where differs from row to row
            place = int32(int32(target ^ int32(16 * (i % 8))) + int32(ROW_BYTES * i))
            copy_sixteen_bytes(place, row_address(weight, own[i], row_bytes), i, rest)
        arrive_when_copied(barrier)
        stage, parity = after(stage, parity)
        panel = next_panel
        if panel == 0:
            map_there, weight = maps_there[-1], address_of(weights[-1], mine)
    return stage, parity


@inlined
def write_rows(y, own_tokens, lines, half, first, column, rows, width):
    """Write eight lines to rows of y; a warp does."""
    lane = types.int64(cuda.threadIdx.x % 32)
    for line in range(8):
        if first + 8 * half + line < rows and column + lane * 8 < width:
            row = types.int64(own_tokens[8 * half + line])
            words = load_four_shared_words(int32(line_address(lines, line) ^ int32(16 * lane)))
            store_four_words(y, row * width + column + lane * 8, words)


@functools.cache
def sum_neurons(two: bool) -> Kernel:
    """Return the kernel that multiplies entries of shared blocks by rows of one or two matrices."""

    @kernel(threads=THREADS, blocks_per_multiprocessor=1, shared_memory=SHARED_BYTES)
    def sum_neurons(
        first_map, second_map, maps, first_weight, second_weight, neurons, order, tokens, y, rows,
        width, room,
    ):  # fmt: skip
        stages = int32(
            (shared_address(cuda.shared.array(0, types.int32)) + ALIGNMENT - 1) & -ALIGNMENT
        )
        make_barriers(stages, PRODUCERS + 1)
        thread = int32(cuda.threadIdx.x)
        strips = (width + COLUMNS - 1) // COLUMNS
        total = load(order, 0) * strips
        turn = types.int64(0)
        item = item_of(turn)
        code = load(order, 1 + min(item, total - 1) // strips) if total > 0 else types.int64(0)
        if thread < PRODUCERS:
            give_registers_away(PRODUCER_REGISTERS)
            first_there = types.int64(0)
            second_there = types.int64(0)
            if thread == 0:
                place = types.int64(cuda.blockIdx.x) * 2 * WORDS
                first_there = write_tensor_map(maps, place, first_map)
                if two:
                    second_there = write_tensor_map(maps, place + WORDS, second_map)
            maps_there = (first_there, second_there) if two else (first_there,)
            weights = (first_weight, second_weight) if two else (first_weight,)
            stage = int32(0)
            parity = int32(1)
            while item < total:
                block, n, column = code >> 32, code & 0xFFFFFFFF, item % strips * COLUMNS
                turn += 1
                item = item_of(turn)
                code = load(order, 1 + min(item, total - 1) // strips)  # in time for the next
                stage, parity = bring_rows_and_entries(
                    stages, maps_there, weights, neurons, block, int32(n), column, width, room,
                    stage, parity,
                )  # fmt: skip
        else:
            take_registers(CONSUMER_REGISTERS)
            consumer = int32((thread - PRODUCERS) // 128)
            warp = types.int64((thread - PRODUCERS) // 32)
            lines = int32(stages + LINES + warp * (8 * LINE_BYTES))
            sums = cuda.local.array(SUMS, types.float32)
            own_tokens = cuda.local.array(16, types.int32)
            stage = int32(0)
            parity = int32(0)
            while item < total:
                block, n, column = code >> 32, code & 0xFFFFFFFF, item % strips * COLUMNS
                turn += 1
                item = item_of(turn)
                code = load(order, 1 + min(item, total - 1) // strips)
                steps = int32((n + PANEL - 1) // PANEL * (2 if two else 1))
                first = block * TOKENS + 16 * warp
                for i in range(16):
                    own_tokens[i] = load(tokens, min(first + i, rows - 1))  # in time for the end
                stage, parity = multiply_by_rows(
                    sums, steps, stages, consumer, thread, stage, parity
                )
                share(sums, 0, lines)
                write_rows(y, own_tokens, lines, 0, first, column, rows, width)
                share(sums, 1, lines)
                write_rows(y, own_tokens, lines, 1, first, column, rows, width)
        wait_for_cluster()  # copies may still be under way

    return sum_neurons


# ---- What is launched


def fits(
    x: DeviceArray, up_weight: DeviceArray, down_weight: DeviceArray, packed: DeviceActivations
) -> bool:
    """Return whether these kernels can take a gated layer: on Hopper, bfloat16, aligned rows."""
    can_be_read = tensor_map.fits(x) and rows_are_aligned(x, up_weight, down_weight)
    return bool(can_be_read and _can_list(packed) and not packed.is_compact)


def _can_list(packed: DeviceActivations) -> bool:
    """Return whether numbers of entries fit in the bits that they have, on a GPU for this."""
    row_slots = packed.tiles * packed.slots
    is_small = max(packed.neurons, row_slots) <= MOST_NEURONS and packed.shape[0] <= MOST_ROWS
    is_small = is_small and packed.slots <= MOST_SLOTS
    is_small = is_small and packed.values.size <= entry_transpose.MOST_SLOTS
    return packed.gated and _is_for_it(packed.values) and is_small


def _is_for_it(array: DeviceArray) -> bool:
    return array.gpu.capability == (9, 0) and array.dtype == ml_dtypes.bfloat16


def can_share(pattern_weight: DeviceArray, tokens: int) -> bool:
    """See :func:`twell_numba.kernels.twell.cuda.can_share`."""
    neurons, width = pattern_weight.shape
    is_large = tokens * width >= LEAST_NUMBERS
    is_small = neurons <= MOST_NEURONS and tokens <= MOST_ROWS
    return _is_for_it(pattern_weight) and is_large and is_small


def learn_to_share(
    packed: DeviceActivations, width: int, learned: LearnedPattern | None = None
) -> Sharing:
    """Return by what sharing is faster than strips with tokens like these, up to which density.

    Waits for the GPU. See :func:`twell_numba.kernels.twell.cuda.learn_to_share`.
    """
    (rows, neurons), stream = packed.shape, packed.values.stream
    if not _can_list(packed) or rows * width < LEAST_NUMBERS:
        return Sharing()
    in_tail = int(packed.tail_count.to_numpy()[0])
    if in_tail > MOST_IN_TAIL * rows:
        return Sharing()
    lists, _ = list_by_neuron(packed)
    newly_learned = learn_pattern(packed, lists)
    starts = lists.neuron_starts.to_numpy()
    entries = int(starts[-1])
    needed = neurons_of_blocks(packed, newly_learned)
    if needed is None or entries < ENTRIES_A_NEURON * needed.sum():
        return Sharing()
    tokens_of = np.diff(starts)
    hot = hot_neurons.choose_hot_neurons(tokens_of, rows, width)
    pattern = replace(newly_learned, hot=hot_neurons.hold_hot_neurons(hot, neurons, stream))
    before = None if learned is None else neurons_of_blocks(packed, learned)
    if learned is not None and before is not None and before.sum() <= needed.sum() * WORTH_LEARNING:
        old = hot[:0] if learned.hot is None else learned.hot.neurons.to_numpy()
        then, now = (
            hot_neurons.expected_microseconds(tokens_of, which, rows, width) for which in (old, hot)
        )
        if then <= now * WORTH_LEARNING:
            pattern, needed = learned, before
    return Sharing(pattern, densest_sharing(needed, entries, in_tail, packed.shape, width))


def neurons_of_blocks(packed: DeviceActivations, learned: LearnedPattern) -> np.ndarray | None:
    """Return how many neurons each block has, as int64; None where one cannot share.

    Waits for the GPU.
    """
    order, room = order_tokens(packed, learned), room_for(packed.neurons)
    counts = list_shared_neurons(packed, order, room, moves=False).counts.to_numpy()
    return counts.astype(np.int64) if counts.all() else None


def densest_sharing(
    needed: np.ndarray, entries: int, in_tail: int, shape: tuple[int, int], width: int
) -> float:
    """Return the fraction of neurons firing up to which sharing is to be faster than dense.

    Blocks' neurons are taken to become more as entries do. They become fewer less than entries do,
    so that sharing may begin a little early where it is slower now. And it is given up where a
    block could have too many neurons or entries, of which it would be in the tail.

    Parameters
    ----------
    needed : ndarray of int64
        Neurons of each block.
    entries : int
        Of all rows that are not in the tail.
    in_tail : int
        Rows of the tail.
    shape : tuple
        M and F.
    width : int
        D.
    """
    (rows, neurons), strips = shape, width / 2048
    tokens = rows / 16384
    dense = tokens * neurons * (DENSE_ACTIVATION + DENSE_PRODUCTS * strips)
    left = WORTH_SHARING * dense - LAUNCHED - ONCE * tokens
    if in_tail:
        left -= TAIL + TAIL_ROW * in_tail * neurons * strips
    taken = tokens * (SHARED_NEURON * strips * needed.mean() + ENTRY * entries / rows)
    growth = float(min(left / taken, room_for(neurons) / needed.max(), MOST_GROWTH))
    return min(max(0.0, growth) * entries / rows, ENTRIES / TOKENS) / neurons


def room_for(neurons: int) -> int:
    """Return how many neurons a block can have, of all, to share them.

    Three quarters: what they take room for grows.
    """
    return -(-3 * neurons // (4 * NEURONS)) * NEURONS


def _list(packed: DeviceActivations) -> SharedNeurons:
    assert packed.token_order is not None, "set where neurons are to be shared"
    return list_shared_neurons(packed, packed.token_order, room_for(packed.neurons))


def _blocks(x: DeviceArray) -> int:
    return int(x.gpu.multiprocessors)


def panels_of(shared: SharedNeurons, x: DeviceArray) -> DeviceArray:
    """Return room for what entries are multiplied by: panels of 128 tokens by 64 neurons."""
    blocks = shared.counts.size
    return empty((blocks * shared.room // PANEL * TOKENS, PANEL), x.dtype, x.stream)


def forward_entries(
    x: DeviceArray,
    up_weight: DeviceArray,
    down_weight: DeviceArray,
    packed: DeviceActivations,
) -> DeviceArray:
    """Return y of rows that are not in the tail (of others 0); compute u, and statistics.

    Parameters as of :func:`twell_numba.kernels.twell.strip_rows.forward_entries`, where
    :func:`fits`, and with the order of tokens.
    """
    return forward_shared(x, up_weight, down_weight, packed, _list(packed))


def backward_entries(
    dy: DeviceArray,
    x: DeviceArray,
    weights: tuple[DeviceArray, DeviceArray, DeviceArray],
    packed: DeviceActivations,
    l1_scale: DeviceArray,
    gradients: tuple[DeviceArray, DeviceArray, DeviceArray],
) -> DeviceArray:
    """Return dx of rows that are not in the tail (of others 0), and add to the gradients.

    Parameters as of :func:`twell_numba.kernels.twell.strip_rows.backward_entries`.
    """
    gate_weight, up_weight, down_weight = weights
    pattern_grad, up_grad, down_grad = gradients
    hot = packed.hot if hot_neurons.fits(len(dy)) else None
    lists, entry_places = list_by_neuron(packed, None if hot is None else hot.is_hot)
    shared = _list(packed)
    panels = backward_dots(
        dy, down_weight, packed, shared, l1_scale, entry_places, lists.coefficients
    )
    del entry_places  # memory for what follows
    dx = backward_sums(gate_weight, up_weight, shared, panels, dy.shape)
    del shared, panels
    add_weight_gradients(dy, x, lists, (down_grad, pattern_grad, up_grad))
    if hot is not None:
        hot_neurons.add_hot_gradients(dy, x, lists, hot, (down_grad, pattern_grad, up_grad))
    return dx


def forward_shared(
    x: DeviceArray,
    up_weight: DeviceArray,
    down_weight: DeviceArray,
    packed: DeviceActivations,
    shared: SharedNeurons,
) -> DeviceArray:
    """Return y of rows of shared blocks (of others 0); compute u, and statistics."""
    rows, width = x.shape
    parts = shared.parts
    hidden = panels_of(shared, x)
    row_counts = empty((rows, parts), np.int32, x.stream)
    row_sums = empty((rows, parts), np.float32, x.stream)
    maps = empty((_blocks(x), 2 * WORDS), np.int64, x.stream)
    multiply_tokens(
        _blocks(x), x, shared.tokens, up_weight, shared.neurons, shared.items, shared.entries,
        shared.starts, packed.up_values, hidden, packed.fired, row_counts, row_sums, rows, width,
        packed.tiles * packed.slots, shared.room,
    )  # fmt: skip
    add_statistics_of_parts(
        add_statistics_of_parts.blocks(rows), shared.counts, shared.tokens, row_counts, row_sums,
        packed.row_nonzeros, packed.row_absolute_sums, rows, parts,
    )  # fmt: skip
    hidden_map = TensorMap(hidden, TOKENS)
    y = empty(x.shape, x.dtype, x.stream)
    sum_neurons(False)(
        _blocks(x), hidden_map, hidden_map, maps, down_weight, down_weight, shared.neurons,
        shared.order, shared.tokens, y, rows, width, shared.room,
    )  # fmt: skip
    return y


def backward_dots(
    dy: DeviceArray,
    down_weight: DeviceArray,
    packed: DeviceActivations,
    shared: SharedNeurons,
    l1_scale: DeviceArray,
    entry_places: DeviceArray,
    coefficients: tuple[DeviceArray, ...],
) -> tuple[DeviceArray, DeviceArray]:
    """Compute h, dg and du of entries of shared blocks, and return panels of dg and du."""
    rows, width = dy.shape
    d_pattern, d_up = panels_of(shared, dy), panels_of(shared, dy)
    multiply_tokens_backward(
        _blocks(dy), dy, shared.tokens, down_weight, shared.neurons, shared.items, shared.entries,
        shared.starts, packed.up_values, entry_places, l1_scale, d_pattern, d_up, *coefficients,
        rows, width, packed.tiles * packed.slots, shared.room,
    )  # fmt: skip
    return d_pattern, d_up


def backward_sums(
    gate_weight: DeviceArray,
    up_weight: DeviceArray,
    shared: SharedNeurons,
    panels: tuple[DeviceArray, DeviceArray],
    shape: tuple[int, ...],
) -> DeviceArray:
    """Return dx (M, D) of rows of shared blocks (of others 0), from panels of dg and du."""
    (rows, width), blocks = shape, _blocks(panels[0])
    maps = empty((blocks, 2 * WORDS), np.int64, panels[0].stream)
    dx = empty(shape, panels[0].dtype, panels[0].stream)
    sum_neurons(True)(
        blocks, *(TensorMap(panel, TOKENS) for panel in panels), maps, gate_weight,
        up_weight, shared.neurons, shared.order, shared.tokens, dx, rows, width, shared.room,
    )  # fmt: skip
    return dx
