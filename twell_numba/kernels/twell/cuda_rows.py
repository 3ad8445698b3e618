"""The kernels of activation-sparse layers in which a block holds a row in its registers, on a GPU.

For rows of D numbers, at most 8192, that can be read eight at a time; the
formulas are those of :mod:`cuda_forward` and :mod:`cuda_backward`, whose kernels take any other D.
A block takes a row of x (or a part of a neuron's list), a thread of it ``8 * groups`` numbers of
every row read, so that x, dy and all sums stay in registers and nothing is read twice:

    forward:    phase 1  u_i = x . Wu[j_i]       D / 8 / groups threads each add up their columns,
                                                 then a warp, then the warps' sums by one thread
                phase 2  y += h_i Wd[j_i]        each thread its columns
    backward:   phase 1  dh_i = dy . Wd[j_i],    phase 2  dx += dg_i Wg[j_i] + du_i Wu[j_i]
    gradients:  Wg += dg_i x[r_i],  Wu += du_i x[r_i],  Wd += h_i dy[r_i],  for the entries i of a
                neuron's list, in rows r_i

Bound by what the second-level cache delivers: 4 D bytes an entry forward, 6 D backward, 4 D for the
gradients, in 16 bits. So several entries' rows are asked for before the first is used (``unroll``).
Compiled for each D: as constants D, groups and unroll make loops straight and registers of arrays.
"""

import functools

from twell_numba.device.gpu import Kernel, kernel
from twell_numba.device.gpu.language import (
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
def list_row(columns, counts, row, first, tile, tiles, slots, place_of, neuron_of, total_of):
    """List entries ``first`` to ``first + LIST`` of a row, count all; for a block's warp 0."""
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
            if 0 <= position < LIST:
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
def forward_row(
    width: int, gated: bool, groups: int = 0, unroll: int = 4, resident: int = 0
) -> Kernel:
    """Return the kernel that computes u and y of a row that is not in the tail, a block a row.

    ``forward_row(width, gated)(rows, x, up_weight, down_weight, values, columns, counts, up_values,
    y, nonzeros, absolute_sums, fired, tile, tiles, slots)``; y of rows in the tail becomes 0.
    ``resident`` blocks are to fit a multiprocessor; 0 leaves it open.
    """
    groups = groups or groups_of(width)
    threads, whole = threads_of(width, groups)
    stride, own_columns, warps = 8 * threads, 8 * groups, threads // 32
    parts = LIST * warps

    @kernel(threads=threads, blocks_per_multiprocessor=resident)
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
        dots = cuda.local.array(unroll, arithmetic_type(x))
        if thread < 32:
            list_row(columns, counts, row, 0, tile, tiles, slots, place_of, neuron_of, total_of)
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
                while i + unroll <= n:
                    for r in range(unroll):
                        start = types.int64(neuron_of[i + r]) * width + d
                        dot = number(x, 0)
                        for g in range(groups):
                            numbers = load_if(mine, up_weight, start + g * stride)
                            dot += dot_eight(own, g * 8, numbers)
                        dots[r] = dot
                    for r in range(unroll):
                        dot = warp_sum(dots[r])
                        if thread % 32 == 0:
                            part_of[(i + r) * warps + thread // 32] = dot
                    i = types.int32(i + unroll)
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
            while i + unroll <= n:
                for r in range(unroll):
                    start = types.int64(neuron_of[i + r]) * width + d
                    hidden = hidden_of[i + r]
                    for g in range(groups):
                        numbers = load_if(mine, down_weight, start + g * stride)
                        add_scaled_to(sums, g * 8, hidden, numbers)
                i = types.int32(i + unroll)
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
                        total_of,
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
def backward_row(
    width: int, gated: bool, groups: int = 0, unroll: int = 4, resident: int = 0, halves: int = 3
) -> Kernel:
    """Return the kernel that computes dh and dx of a row that is not in the tail, a block a row.

    ``backward_row(width, gated)(rows, dy, pattern_weight, up_weight, down_weight, values, columns,
    counts, up_values, l1_scale, d_hidden, dx, tile, tiles, slots)``; dx of rows in the tail becomes
    0.
    ``halves``: 1 computes dh alone, 2 takes dh as given, 3 does both.
    """
    groups = groups or groups_of(width)
    threads, whole = threads_of(width, groups)
    stride, own_columns, warps = 8 * threads, 8 * groups, threads // 32
    parts = LIST * warps
    pairs = max(1, unroll // 2) if gated else unroll
    with_dots, with_sums = halves in (1, 3), halves in (2, 3)

    @kernel(threads=threads, blocks_per_multiprocessor=resident)
    def backward_row(
        dy, pattern_weight, up_weight, down_weight, values, columns, counts, up_values, l1_scale,
        d_hidden, dx, tile, tiles, slots,
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        row = types.int64(cuda.blockIdx.x)
        d = types.int64(thread) * 8
        mine = whole or d < width
        place_of = cuda.shared.array(LIST, types.int32)
        neuron_of = cuda.shared.array(LIST, types.int32)
        d_up_of = cuda.shared.array(LIST, arithmetic_type(dy))
        d_pattern_of = cuda.shared.array(LIST, arithmetic_type(dy))
        part_of = cuda.shared.array(parts, arithmetic_type(dy))
        total_of = cuda.shared.array(1, types.int32)
        own = cuda.local.array(own_columns, arithmetic_type(dy))
        sums = cuda.local.array(own_columns, arithmetic_type(dy))
        dots = cuda.local.array(unroll, arithmetic_type(dy))
        if thread < 32:
            list_row(columns, counts, row, 0, tile, tiles, slots, place_of, neuron_of, total_of)
        if with_dots:
            for g in range(groups):
                keep(own, g * 8, load_if(mine, dy, row * width + d + g * stride))
        for c in range(own_columns):
            sums[c] = number(dy, 0)
        l1 = number(dy, load(l1_scale, 0))
        cuda.syncthreads()  # the list is there
        total = types.int32(total_of[0])
        first = types.int32(0)
        while first < total:
            n = types.int32(min(total - first, LIST))
            if with_dots:
                i = types.int32(0)
                while i + unroll <= n:
                    for r in range(unroll):
                        start = types.int64(neuron_of[i + r]) * width + d
                        dot = number(dy, 0)
                        for g in range(groups):
                            numbers = load_if(mine, down_weight, start + g * stride)
                            dot += dot_eight(own, g * 8, numbers)
                        dots[r] = dot
                    for r in range(unroll):
                        dot = warp_sum(dots[r])
                        if thread % 32 == 0:
                            part_of[(i + r) * warps + thread // 32] = dot
                    i = types.int32(i + unroll)
                while i < n:
                    start = types.int64(neuron_of[i]) * width + d
                    dot = number(dy, 0)
                    for g in range(groups):
                        numbers = load_if(mine, down_weight, start + g * stride)
                        dot += dot_eight(own, g * 8, numbers)
                    dot = warp_sum(dot)
                    if thread % 32 == 0:
                        part_of[i * warps + thread // 32] = dot
                    i = types.int32(i + 1)
                cuda.syncthreads()  # all parts of dh are there
            if thread < 32:
                i = types.int32(thread)
                while i < n:
                    place = row * tiles * slots + place_of[i]
                    value = number(dy, load(values, place))
                    up = number(dy, 1)
                    if gated:
                        up = number(dy, load(up_values, place))
                    gradient = number(dy, 0)
                    if with_dots:
                        for w in range(warps):
                            gradient += part_of[i * warps + w]
                        gradient += l1 * sign(value * up, number(dy, 1))
                        store(d_hidden, place, gradient)
                    else:
                        gradient = number(dy, load(d_hidden, place))
                    d_up_of[i] = gradient * value
                    d_pattern_of[i] = gradient * up
                    i = types.int32(i + 32)
            cuda.syncthreads()  # du and dg are there
            if with_sums:
                i = types.int32(0)
                while i + pairs <= n:
                    for r in range(pairs):
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
                    i = types.int32(i + pairs)
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
                if thread < 32:
                    list_row(
                        columns, counts, row, first, tile, tiles, slots, place_of, neuron_of,
                        total_of,
                    )  # fmt: skip
                cuda.syncthreads()  # the next one is there
        if with_sums:
            for g in range(groups):
                store_if(mine, dx, row * width + d + g * stride, kept(sums, g * 8))

    return backward_row


@functools.cache
def add_gradients_of_part(
    width: int, gated: bool, groups: int = 0, unroll: int = 4, resident: int = 0
) -> Kernel:
    """Return the kernel that adds up the gradients of a part of a neuron's list, a block a part.

    ``add_gradients_of_part(width, gated)(blocks, dy, x, values, up_values, d_hidden, neuron_starts,
    part_starts, part_neurons, entry_rows, entry_slots, pattern_grad, up_grad, down_grad, part_sums,
    neurons, row_slots)``, for at least as many blocks as there are parts. A neuron's first part is
    added to the gradients, the others' sums go to ``part_sums``, three rows each: of Wd, Wg, Wu.
    """
    groups = groups or groups_of(width)
    threads, whole = threads_of(width, groups)
    stride, own_columns = 8 * threads, 8 * groups

    @kernel(threads=threads, blocks_per_multiprocessor=resident)
    def add_gradients_of_part(
        dy, x, values, up_values, d_hidden, neuron_starts, part_starts, part_neurons, entry_rows,
        entry_slots, pattern_grad, up_grad, down_grad, part_sums, neurons, row_slots,
    ):  # fmt: skip
        row_of = cuda.shared.array(LIST, types.int32)
        hidden_of = cuda.shared.array(LIST, arithmetic_type(x))
        d_up_of = cuda.shared.array(LIST, arithmetic_type(x))
        d_pattern_of = cuda.shared.array(LIST, arithmetic_type(x))
        down_sums = cuda.local.array(own_columns, arithmetic_type(x))
        pattern_sums = cuda.local.array(own_columns, arithmetic_type(x))
        up_sums = cuda.local.array(own_columns, arithmetic_type(x))
        thread = cuda.threadIdx.x
        part = types.int64(cuda.blockIdx.x)
        if part < load(part_starts, neurons):
            neuron = types.int64(load(part_neurons, part))
            size = types.int64(load(part_starts, neurons + 1))
            part_of_neuron = part - load(part_starts, neuron)
            entry = types.int64(load(neuron_starts, neuron)) + part_of_neuron * size
            end = min(types.int64(load(neuron_starts, neuron + 1)), entry + size)
            d = types.int64(thread) * 8
            mine = whole or d < width
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
                    hidden = number(x, load(values, place))
                    d_pattern = number(x, load(d_hidden, place))
                    if gated:
                        up = number(x, load(up_values, place))
                        d_up_of[i] = d_pattern * hidden
                        d_pattern *= up
                        hidden *= up
                    row_of[i] = row
                    hidden_of[i] = hidden
                    d_pattern_of[i] = d_pattern
                    i = types.int32(i + threads)
                cuda.syncthreads()  # the list is there
                i = types.int32(0)
                while i + unroll <= n:
                    for r in range(unroll):
                        start = types.int64(row_of[i + r]) * width + d
                        hidden = hidden_of[i + r]
                        for g in range(groups):
                            numbers = load_if(mine, dy, start + g * stride)
                            add_scaled_to(down_sums, g * 8, hidden, numbers)
                    for r in range(unroll):
                        start = types.int64(row_of[i + r]) * width + d
                        d_pattern = d_pattern_of[i + r]
                        for g in range(groups):
                            numbers = load_if(mine, x, start + g * stride)
                            add_scaled_to(pattern_sums, g * 8, d_pattern, numbers)
                            if gated:
                                add_scaled_to(up_sums, g * 8, d_up_of[i + r], numbers)
                    i = types.int32(i + unroll)
                while i < n:
                    start = types.int64(row_of[i]) * width + d
                    hidden = hidden_of[i]
                    d_pattern = d_pattern_of[i]
                    for g in range(groups):
                        numbers = load_if(mine, dy, start + g * stride)
                        add_scaled_to(down_sums, g * 8, hidden, numbers)
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
