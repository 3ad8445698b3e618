"""The kernels of activation-sparse layers in which a block holds a row in its registers, on a GPU.

For rows of D numbers, at most 8192, that can be read eight at a time. A block takes a row of x (or
a part of a neuron's list), a thread of it ``8 * groups`` numbers of every row read, so that x, dy
and all sums stay in registers and nothing is read twice:

    forward:    phase 1  u_i = x . Wu[j_i]       each thread adds up its columns, then a warp its
                                                 threads, then one thread the warps
                phase 2  y += h_i Wd[j_i]        each thread its columns
    gradients:  phase 1  dh_i = dy[r_i] . Wd[j],  Wd[j] += h_i dy[r_i]
                phase 2  Wg[j] += dg_i x[r_i],  Wu[j] += du_i x[r_i]
                         for the entries i of a neuron's list, in rows r_i
    backward:   dx += dg_i Wg[j_i] + du_i Wu[j_i]

with h_i = g_i u_i, dg_i = dh_i u_i and du_i = dh_i g_i. dh is computed by neuron, where dy is read
anyway: 8 D bytes an entry backward in 16 bits, 10 D if it were by row. Forward it is 4 D.

Bound by what the second-level cache delivers, so the rows of several entries are asked for before
the first is used. Dot products also need sums over lanes: among the gradients, four are folded into
one another. Compiled for each D: as constants D and ``groups`` make loops straight and registers of
arrays.

Tried on an H200, M = 16384, D = 2048, F = 5632, bfloat16, 29 entries a row, neurons alike, in ms:

    forward    128 threads, 4 entries at a time, 5 blocks on a multiprocessor      0.56
               4 dot products folded into one another                              0.58
               as many blocks as there is room for                                 0.63
               2 or 8 entries at a time                                            0.62, 0.80
               256 threads, 4 blocks                                               0.65
               64 threads, 2 entries at a time, 9 blocks; rows of 1000 entries     0.51
               then take a third longer
               one loop for all entries, without loads past the last               0.75
               the same with hints to the cache: weights last, x and y first       0.75
    backward   dh and dx in one kernel, gradients in another: 0.85 + 0.61          1.46
               dh with the gradients, its sums folded: 0.75 + 0.45                 1.19
               the same, not folded: 0.96 + 0.45                                   1.42
               one loop for all entries: 1.06 + 0.55                               1.61
               the same, and dx of the columns' first half first: 1.06 + 0.52      1.58

Reading alone goes at 8 to 9 TB/s, with dot products at 6 to 7.
"""

import functools

from twell_numba.device.gpu import Kernel, kernel
from twell_numba.device.gpu.language import (
    FULL_WARP,
    arithmetic_type,
    cuda,
    device_function,
    load,
    number,
    store,
    types,
    warp_sum,
)
from twell_numba.kernels.cuda_vectors import eight_zeros, load_aligned, store_aligned
from twell_numba.kernels.twell.cuda_language import sign, warp_prefix

# Entries that a block lists in shared memory at a time.
LIST = 128
# Entries whose rows are asked for before the first is used.
UNROLL = 4
WIDEST = 8192


def fits(width: int) -> bool:
    """Return whether there are kernels for rows of this width (which must be aligned, too)."""
    return 0 < width <= WIDEST and width % 8 == 0


def groups_of(width: int) -> int:
    """Return how many times eight columns a thread takes."""
    return 2 if width >= 1024 and width % 512 == 0 else 1


def threads_of(width: int, groups: int) -> tuple[int, bool]:
    """Return how many threads share a row, whole warps, and whether all of them have columns."""
    warps = -(-width // (256 * groups))
    return 32 * warps, 256 * groups * warps == width


@device_function
def load_if(mine, matrix, index):
    """Return eight numbers from ``index`` on, of a thread that has columns; otherwise 0."""
    numbers = eight_zeros(matrix)
    if mine:
        numbers = load_aligned(matrix, index)
    return numbers


@device_function
def store_if(mine, matrix, index, numbers):
    """Write eight numbers from ``index`` on, for a thread that has columns."""
    if mine:
        store_aligned(matrix, index, numbers)


@device_function
def keep(own, first, numbers):
    """Write eight numbers to an array."""
    own[first] = numbers[0]
    own[first + 1] = numbers[1]
    own[first + 2] = numbers[2]
    own[first + 3] = numbers[3]
    own[first + 4] = numbers[4]
    own[first + 5] = numbers[5]
    own[first + 6] = numbers[6]
    own[first + 7] = numbers[7]


@device_function
def kept(own, first):
    """Return eight numbers of an array."""
    return (
        own[first],
        own[first + 1],
        own[first + 2],
        own[first + 3],
        own[first + 4],
        own[first + 5],
        own[first + 6],
        own[first + 7],
    )


@device_function
def add_scaled_to(sums, first, factor, numbers):
    """Let eight sums of an array grow by ``factor`` times a number."""
    sums[first] += factor * numbers[0]
    sums[first + 1] += factor * numbers[1]
    sums[first + 2] += factor * numbers[2]
    sums[first + 3] += factor * numbers[3]
    sums[first + 4] += factor * numbers[4]
    sums[first + 5] += factor * numbers[5]
    sums[first + 6] += factor * numbers[6]
    sums[first + 7] += factor * numbers[7]


@device_function
def dot_eight(own, first, numbers):
    """Return the product of eight numbers of an array and eight others."""
    return (
        (own[first] * numbers[0] + own[first + 1] * numbers[1])
        + (own[first + 2] * numbers[2] + own[first + 3] * numbers[3])
    ) + (
        (own[first + 4] * numbers[4] + own[first + 5] * numbers[5])
        + (own[first + 6] * numbers[6] + own[first + 7] * numbers[7])
    )


@device_function
def fold(numbers, pairs, step):
    """Add pairs of numbers up over pairs of lanes, so that each lane has the sums of one of two."""
    for i in range(pairs):
        kept_here, sent = numbers[2 * i], numbers[2 * i + 1]
        if cuda.threadIdx.x & step != 0:
            kept_here, sent = sent, kept_here
        numbers[i] = kept_here + cuda.shfl_xor_sync(FULL_WARP, sent, step)


@device_function
def sum_four_over_lanes(numbers):
    """Return, in lane l, the warp's sum of number ``l % 4`` of four, in 6 exchanges, not 20."""
    fold(numbers, 2, 1)
    fold(numbers, 1, 2)
    total = numbers[0]
    total += cuda.shfl_xor_sync(FULL_WARP, total, 4)
    total += cuda.shfl_xor_sync(FULL_WARP, total, 8)
    total += cuda.shfl_xor_sync(FULL_WARP, total, 16)
    return total


@device_function
def list_row(
    columns, counts, row, first, tile, tiles, slots, place_of, neuron_of, total_of, length
):  # fmt: skip
    """List ``length`` entries of a row from ``first`` on, and count all; for a block's warp 0."""
    lane = cuda.threadIdx.x
    listed = types.int64(0)
    start = types.int64(0)
    while start < tiles:
        t = start + lane
        count = types.int64(0)
        if t < tiles:
            count = types.int64(load(counts, row * tiles + t))
        before, total = warp_prefix(count)
        position = listed + before - first
        for slot in range(count):
            if 0 <= position < length:
                place = t * slots + slot
                place_of[position] = place
                column = types.int64(load(columns, row * tiles * slots + place))
                neuron_of[position] = t * tile + column
            position += 1
        listed += total
        start += 32
    if lane == 0:
        total_of[0] = listed


@functools.cache
def forward_row(width: int, gated: bool) -> Kernel:
    """Return the kernel that computes u and y of a row that is not in the tail, a block a row.

    ``forward_row(width, gated)(rows, x, up_weight, down_weight, values, columns, counts, up_values,
    y, nonzeros, absolute_sums, fired, tile, tiles, slots)``; y of rows in the tail becomes 0.
    """
    groups = groups_of(width)
    threads, whole = threads_of(width, groups)
    stride, own_columns, warps = 8 * threads, 8 * groups, threads // 32
    parts = LIST * warps

    @kernel(threads=threads, blocks_per_multiprocessor=max(1, 640 // threads))
    def forward_row(
        x, up_weight, down_weight, values, columns, counts, up_values, y, nonzeros, absolute_sums,
        fired, tile, tiles, slots,
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        row = types.int64(cuda.blockIdx.x)
        d = types.int64(thread) * 8
        mine = whole or d < width
        place_of = cuda.shared.array(LIST, types.int32)
        neuron_of = cuda.shared.array(LIST, types.int32)
        hidden_of = cuda.shared.array(LIST, arithmetic_type(x))
        part_of = cuda.shared.array(parts, arithmetic_type(x))
        total_of = cuda.shared.array(1, types.int32)
        own = cuda.local.array(own_columns, arithmetic_type(x))
        sums = cuda.local.array(own_columns, arithmetic_type(x))
        dots = cuda.local.array(UNROLL, arithmetic_type(x))
        if thread < 32:
            list_row(
                columns, counts, row, 0, tile, tiles, slots, place_of, neuron_of, total_of, LIST
            )  # fmt: skip
        for g in range(groups):
            keep(own, g * 8, load_if(mine, x, row * width + d + g * stride))
        for c in range(own_columns):
            sums[c] = number(x, 0)
        absolute_sum = number(x, 0)
        nonzero_count = types.int32(0)
        cuda.syncthreads()  # the list is there
        total = types.int32(total_of[0])
        first = types.int32(0)
        while first < total:
            n = types.int32(min(total - first, LIST))
            if gated:
                i = types.int32(0)
                while i + UNROLL <= n:
                    for r in range(UNROLL):
                        start = types.int64(neuron_of[i + r]) * width + d
                        dot = number(x, 0)
                        for g in range(groups):
                            numbers = load_if(mine, up_weight, start + g * stride)
                            dot += dot_eight(own, g * 8, numbers)
                        dots[r] = dot
                    for r in range(UNROLL):
                        dot = warp_sum(dots[r])
                        if thread % 32 == 0:
                            part_of[(i + r) * warps + thread // 32] = dot
                    i = types.int32(i + UNROLL)
                while i < n:
                    start = types.int64(neuron_of[i]) * width + d
                    dot = number(x, 0)
                    for g in range(groups):
                        numbers = load_if(mine, up_weight, start + g * stride)
                        dot += dot_eight(own, g * 8, numbers)
                    dot = warp_sum(dot)
                    if thread % 32 == 0:
                        part_of[i * warps + thread // 32] = dot
                    i = types.int32(i + 1)
                cuda.syncthreads()  # all parts of u are there
            if thread < 32:
                i = types.int32(thread)
                while i < n:
                    place = row * tiles * slots + place_of[i]
                    hidden = number(x, load(values, place))
                    if gated:
                        up = number(x, 0)
                        for w in range(warps):
                            up += part_of[i * warps + w]
                        store(up_values, place, up)
                        hidden *= load(up_values, place)  # what was stored, rounded
                        absolute_sum += abs(hidden)
                        if hidden != 0:
                            nonzero_count = types.int32(nonzero_count + 1)
                            store(fired, neuron_of[i], 1)
                    hidden_of[i] = hidden
                    i = types.int32(i + 32)
            cuda.syncthreads()  # h is there
            i = types.int32(0)
            while i + UNROLL <= n:
                for r in range(UNROLL):
                    start = types.int64(neuron_of[i + r]) * width + d
                    hidden = hidden_of[i + r]
                    for g in range(groups):
                        numbers = load_if(mine, down_weight, start + g * stride)
                        add_scaled_to(sums, g * 8, hidden, numbers)
                i = types.int32(i + UNROLL)
            while i < n:
                start = types.int64(neuron_of[i]) * width + d
                hidden = hidden_of[i]
                for g in range(groups):
                    numbers = load_if(mine, down_weight, start + g * stride)
                    add_scaled_to(sums, g * 8, hidden, numbers)
                i = types.int32(i + 1)
            first = types.int32(first + LIST)
            if first < total:
                cuda.syncthreads()  # the list is not needed any more
                if thread < 32:
                    list_row(
                        columns, counts, row, first, tile, tiles, slots, place_of, neuron_of,
                        total_of, LIST,
                    )  # fmt: skip
                cuda.syncthreads()  # the next one is there
        for g in range(groups):
            store_if(mine, y, row * width + d + g * stride, kept(sums, g * 8))
        if gated and thread < 32:
            nonzero_count = warp_sum(nonzero_count)
            absolute_sum = warp_sum(absolute_sum)
            if thread == 0:
                store(nonzeros, row, nonzero_count)
                store(absolute_sums, row, absolute_sum)

    return forward_row


@functools.cache
def backward_row(width: int, gated: bool) -> Kernel:
    """Return the kernel that computes dx of a row that is not in the tail, a block a row.

    ``backward_row(width, gated)(rows, pattern_weight, up_weight, values, columns, counts,
    up_values, d_hidden, dx, tile, tiles, slots)``; dx of rows in the tail becomes 0.
    """
    groups = groups_of(width)
    threads, whole = threads_of(width, groups)
    stride, own_columns = 8 * threads, 8 * groups
    entries = UNROLL // 2 if gated else UNROLL  # two rows are read of each, or one

    @kernel(threads=threads, blocks_per_multiprocessor=max(1, 640 // threads))
    def backward_row(
        pattern_weight, up_weight, values, columns, counts, up_values, d_hidden, dx, tile, tiles,
        slots,
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        row = types.int64(cuda.blockIdx.x)
        d = types.int64(thread) * 8
        mine = whole or d < width
        place_of = cuda.shared.array(LIST, types.int32)
        neuron_of = cuda.shared.array(LIST, types.int32)
        d_up_of = cuda.shared.array(LIST, arithmetic_type(dx))
        d_pattern_of = cuda.shared.array(LIST, arithmetic_type(dx))
        total_of = cuda.shared.array(1, types.int32)
        sums = cuda.local.array(own_columns, arithmetic_type(dx))
        for c in range(own_columns):
            sums[c] = number(dx, 0)
        first = types.int32(0)
        total = types.int32(1)
        while first < total:
            if thread < 32:
                list_row(
                    columns, counts, row, first, tile, tiles, slots, place_of, neuron_of, total_of,
                    LIST,
                )  # fmt: skip
            cuda.syncthreads()  # the list is there
            total = types.int32(total_of[0])
            n = types.int32(min(total - first, LIST))
            i = types.int32(thread)
            while i < n:
                place = row * tiles * slots + place_of[i]
                gradient = number(dx, load(d_hidden, place))
                if gated:
                    d_up_of[i] = gradient * number(dx, load(values, place))
                    gradient *= number(dx, load(up_values, place))
                d_pattern_of[i] = gradient
                i = types.int32(i + threads)
            cuda.syncthreads()  # du and dg are there
            i = types.int32(0)
            while i + entries <= n:
                for r in range(entries):
                    start = types.int64(neuron_of[i + r]) * width + d
                    d_pattern = d_pattern_of[i + r]
                    for g in range(groups):
                        numbers = load_if(mine, pattern_weight, start + g * stride)
                        add_scaled_to(sums, g * 8, d_pattern, numbers)
                    if gated:
                        d_up = d_up_of[i + r]
                        for g in range(groups):
                            numbers = load_if(mine, up_weight, start + g * stride)
                            add_scaled_to(sums, g * 8, d_up, numbers)
                i = types.int32(i + entries)
            while i < n:
                start = types.int64(neuron_of[i]) * width + d
                d_pattern = d_pattern_of[i]
                for g in range(groups):
                    numbers = load_if(mine, pattern_weight, start + g * stride)
                    add_scaled_to(sums, g * 8, d_pattern, numbers)
                if gated:
                    d_up = d_up_of[i]
                    for g in range(groups):
                        numbers = load_if(mine, up_weight, start + g * stride)
                        add_scaled_to(sums, g * 8, d_up, numbers)
                i = types.int32(i + 1)
            first = types.int32(first + LIST)
            if first < total:
                cuda.syncthreads()  # the list is not needed any more
        for g in range(groups):
            store_if(mine, dx, row * width + d + g * stride, kept(sums, g * 8))

    return backward_row


@functools.cache
def add_gradients_of_part(width: int, gated: bool) -> Kernel:
    """Return the kernel that computes dh and gradients of a part of a neuron's list, a block each.

    ``add_gradients_of_part(width, gated)(blocks, dy, x, down_weight, values, up_values, l1_scale,
    d_hidden, neuron_starts, part_starts, part_neurons, entry_rows, entry_slots, pattern_grad,
    up_grad, down_grad, part_sums, neurons, row_slots)``, for at least as many blocks as there are
    parts. A neuron's first part is added to the gradients, the others' sums go to ``part_sums``,
    three rows each: of Wd, Wg, Wu.
    """
    groups = 1
    threads, whole = threads_of(width, groups)
    stride, own_columns, warps = 8 * threads, 8 * groups, threads // 32
    parts = LIST * warps

    @kernel(threads=threads, blocks_per_multiprocessor=max(1, 1024 // threads))
    def add_gradients_of_part(
        dy, x, down_weight, values, up_values, l1_scale, d_hidden, neuron_starts, part_starts,
        part_neurons, entry_rows, entry_slots, pattern_grad, up_grad, down_grad, part_sums,
        neurons, row_slots,
    ):  # fmt: skip
        row_of = cuda.shared.array(LIST, types.int32)
        hidden_of = cuda.shared.array(LIST, arithmetic_type(x))
        # first what dh is to be multiplied by, then the products
        d_up_of = cuda.shared.array(LIST, arithmetic_type(x))
        d_pattern_of = cuda.shared.array(LIST, arithmetic_type(x))
        part_of = cuda.shared.array(parts, arithmetic_type(x))
        own = cuda.local.array(own_columns, arithmetic_type(x))
        dots = cuda.local.array(UNROLL, arithmetic_type(x))
        down_sums = cuda.local.array(own_columns, arithmetic_type(x))
        pattern_sums = cuda.local.array(own_columns, arithmetic_type(x))
        up_sums = cuda.local.array(own_columns, arithmetic_type(x))
        thread = cuda.threadIdx.x
        part = types.int64(cuda.blockIdx.x)
        if part < load(part_starts, neurons):
            l1 = number(x, load(l1_scale, 0))
            neuron = types.int64(load(part_neurons, part))
            size = types.int64(load(part_starts, neurons + 1))
            part_of_neuron = part - load(part_starts, neuron)
            entry = types.int64(load(neuron_starts, neuron)) + part_of_neuron * size
            end = min(types.int64(load(neuron_starts, neuron + 1)), entry + size)
            d = types.int64(thread) * 8
            mine = whole or d < width
            for g in range(groups):
                keep(own, g * 8, load_if(mine, down_weight, neuron * width + d + g * stride))
            for c in range(own_columns):
                down_sums[c] = number(x, 0)
                pattern_sums[c] = number(x, 0)
                up_sums[c] = number(x, 0)
            is_empty = entry >= end
            while entry < end:
                n = types.int32(min(end - entry, LIST))
                i = types.int32(thread)
                while i < n:
                    row = types.int64(load(entry_rows, entry + i))
                    place = row * row_slots + load(entry_slots, entry + i)
                    value = number(x, load(values, place))
                    up = number(x, 1)
                    if gated:
                        up = number(x, load(up_values, place))
                    row_of[i] = row
                    hidden_of[i] = value * up
                    d_up_of[i] = value
                    d_pattern_of[i] = up
                    i = types.int32(i + threads)
                cuda.syncthreads()  # the list is there
                i = types.int32(0)
                while i + UNROLL <= n:
                    for r in range(UNROLL):
                        start = types.int64(row_of[i + r]) * width + d
                        hidden = hidden_of[i + r]
                        dot = number(x, 0)
                        for g in range(groups):
                            numbers = load_if(mine, dy, start + g * stride)
                            dot += dot_eight(own, g * 8, numbers)
                            add_scaled_to(down_sums, g * 8, hidden, numbers)
                        dots[r] = dot
                    dot = sum_four_over_lanes(dots)
                    lane = thread % 32
                    if lane < UNROLL:
                        part_of[(i + lane) * warps + thread // 32] = dot
                    i = types.int32(i + UNROLL)
                while i < n:
                    start = types.int64(row_of[i]) * width + d
                    hidden = hidden_of[i]
                    dot = number(x, 0)
                    for g in range(groups):
                        numbers = load_if(mine, dy, start + g * stride)
                        dot += dot_eight(own, g * 8, numbers)
                        add_scaled_to(down_sums, g * 8, hidden, numbers)
                    dot = warp_sum(dot)
                    if thread % 32 == 0:
                        part_of[i * warps + thread // 32] = dot
                    i = types.int32(i + 1)
                cuda.syncthreads()  # all parts of dh are there
                i = types.int32(thread)
                while i < n:
                    gradient = number(x, 0)
                    for w in range(warps):
                        gradient += part_of[i * warps + w]
                    gradient += l1 * sign(hidden_of[i], number(x, 1))
                    place = types.int64(row_of[i]) * row_slots + load(entry_slots, entry + i)
                    store(d_hidden, place, gradient)
                    d_up_of[i] *= gradient
                    d_pattern_of[i] *= gradient
                    i = types.int32(i + threads)
                cuda.syncthreads()  # du and dg are there
                i = types.int32(0)
                while i + UNROLL <= n:
                    for r in range(UNROLL):
                        start = types.int64(row_of[i + r]) * width + d
                        d_pattern = d_pattern_of[i + r]
                        for g in range(groups):
                            numbers = load_if(mine, x, start + g * stride)
                            add_scaled_to(pattern_sums, g * 8, d_pattern, numbers)
                            if gated:
                                add_scaled_to(up_sums, g * 8, d_up_of[i + r], numbers)
                    i = types.int32(i + UNROLL)
                while i < n:
                    start = types.int64(row_of[i]) * width + d
                    d_pattern = d_pattern_of[i]
                    for g in range(groups):
                        numbers = load_if(mine, x, start + g * stride)
                        add_scaled_to(pattern_sums, g * 8, d_pattern, numbers)
                        if gated:
                            add_scaled_to(up_sums, g * 8, d_up_of[i], numbers)
                    i = types.int32(i + 1)
                cuda.syncthreads()  # the list is not needed any more
                entry += LIST
            if part_of_neuron > 0:
                # neurons before this one have a first part each, which has no rows there
                start = (part - neuron - 1) * 3 * width + d
                for g in range(groups):
                    index = start + g * stride
                    store_if(mine, part_sums, index, kept(down_sums, g * 8))
                    store_if(mine, part_sums, index + width, kept(pattern_sums, g * 8))
                    if gated:
                        store_if(mine, part_sums, index + 2 * width, kept(up_sums, g * 8))
            elif mine and not is_empty:
                start = neuron * width + d
                for g in range(groups):
                    add_kept(down_grad, start + g * stride, down_sums, g * 8)
                    add_kept(pattern_grad, start + g * stride, pattern_sums, g * 8)
                    if gated:
                        add_kept(up_grad, start + g * stride, up_sums, g * 8)

    return add_gradients_of_part


@device_function
def add_kept(matrix, index, sums, first):
    """Add eight sums of an array to numbers that no other thread touches."""
    keep_added(sums, first, load_aligned(matrix, index))
    store_aligned(matrix, index, kept(sums, first))


@device_function
def keep_added(sums, first, numbers):
    """Let eight sums of an array grow by a number each."""
    for i in range(8):
        sums[first + i] += numbers[i]


@kernel()
def add_parts(
    part_sums, part_starts, pattern_grad, up_grad, down_grad, neurons, width, gated
):  # fmt: skip
    """Add what the parts of neurons have left in ``part_sums``, in order; a block a neuron."""
    neuron = types.int64(cuda.blockIdx.x)
    part = types.int64(load(part_starts, neuron)) + 1
    end = types.int64(load(part_starts, neuron + 1))
    if part < end:
        d = types.int64(cuda.threadIdx.x)
        while d < width:
            down_sum = number(part_sums, 0)
            pattern_sum = number(part_sums, 0)
            up_sum = number(part_sums, 0)
            for p in range(part, end):
                start = (p - neuron - 1) * 3 * width + d
                down_sum += load(part_sums, start)
                pattern_sum += load(part_sums, start + width)
                if gated != 0:
                    up_sum += load(part_sums, start + 2 * width)
            place = neuron * width + d
            store(down_grad, place, load(down_grad, place) + down_sum)
            store(pattern_grad, place, load(pattern_grad, place) + pattern_sum)
            if gated != 0:
                store(up_grad, place, load(up_grad, place) + up_sum)
            d += cuda.blockDim.x
