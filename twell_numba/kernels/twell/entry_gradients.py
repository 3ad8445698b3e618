"""Weight gradients of an activation-sparse layer from lists of entries by neuron, on a GPU.

    Wd'[j] += sum h_e dy[r_e],    Wg'[j] += sum dg_e x[r_e],    Wu'[j] += sum du_e x[r_e]

over the entries e of neuron j, which are in rows r_e of x and dy (M, D); gradients are (F, D).
Without a gate Wu' takes what is said of Wg', with dh for dg.

Bound by what the second-level cache delivers: 4 D bytes an entry in 16 bits. A block is a warp and
takes a strip of 256 columns of a part of a neuron's list (:mod:`entry_transpose`); blocks that run
at the same time work on the same strip, so that what they gather from x and dy stays near.
"""

import functools

from twell_numba.device.gpu import DeviceArray, Kernel, empty, kernel
from twell_numba.device.gpu.language import (
    arithmetic_type,
    cuda,
    device_function,
    global_thread,
    grid_threads,
    load,
    number,
    types,
)
from twell_numba.kernels.cuda_vectors import load_aligned, store_aligned
from twell_numba.kernels.device_checks import arithmetic_dtype
from twell_numba.kernels.twell import entry_transpose
from twell_numba.kernels.twell.cuda_registers import (
    add_kept,
    add_scaled_to,
    keep_added,
    kept,
)
from twell_numba.kernels.twell.entry_transpose import NeuronLists

# Columns of D that blocks running at the same time work on: a warp's, eight a lane.
STRIP = 256
# Entries that a block lists in shared memory at a time.
LIST = 128
# Warps that a multiprocessor should have room for.
ROOM = 24
# Blocks that add what split lists have left, for each multiprocessor.
ADDING_BLOCKS = 4


def add_weight_gradients(
    dy: DeviceArray,
    x: DeviceArray,
    lists: NeuronLists,
    gradients: tuple[DeviceArray, ...],
) -> None:
    """Add to the gradients what the entries give; nothing waits for the GPU.

    Neurons that the lists leave out get nothing. For the time of the call, 12 D bytes for each of
    ``entry_transpose.MOST_PARTS`` are used (in float64, 24).

    Parameters
    ----------
    dy, x : DeviceArray, shape (M, D)
        16-byte aligned, D a multiple of 8.
    lists : NeuronLists
        Whose coefficients are h, dg and du of each entry; h and dh without a gate.
    gradients : tuple of DeviceArray, shape (F, D) each
        Those of Wd, Wg and Wu, or of Wd and Wu; changed in place.
    """
    rows, (neurons, width) = x.shape[0], gradients[0].shape
    if not rows or not neurons or not width:
        return
    matrices, strips = len(gradients), -(-width // STRIP)
    hidden, d_pattern, d_up = lists.coefficients[0], lists.coefficients[1], lists.coefficients[-1]
    sums = (gradients[0], gradients[1], gradients[-1])
    # a neuron has no more entries than there are rows
    can_split = rows > entry_transpose.FEWEST_ENTRIES
    parts = lists.part_neurons.size if can_split else neurons
    part_sums = empty((parts - neurons, 3, width), arithmetic_dtype(x.dtype), x.stream)
    sum_part(matrices == 3)(
        parts * strips, dy, x, lists.neuron_starts, lists.part_starts, lists.part_neurons,
        lists.rows, hidden, d_pattern, d_up, *sums, part_sums, neurons, width, parts,
    )  # fmt: skip
    if can_split:
        items = min(neurons, parts - neurons) * matrices * strips
        blocks = min(ADDING_BLOCKS * x.gpu.multiprocessors, add_split_parts.blocks_of_warps(items))
        add_split_parts(
            blocks, part_sums, lists.part_starts, lists.split_neurons, *sums, width, matrices
        )


@functools.cache
def sum_part(gated: bool) -> Kernel:
    """Return the kernel that computes gradients of a part of a neuron's list, on a strip of D."""

    @kernel(threads=32, blocks_per_multiprocessor=ROOM)
    def sum_part(
        dy, x, neuron_starts, part_starts, part_neurons, rows, hidden, d_pattern, d_up,
        down_grad, pattern_grad, up_grad, part_sums, neurons, width, most,
    ):  # fmt: skip
        row_of = cuda.shared.array(LIST, types.int32)
        hidden_of = cuda.shared.array(LIST, arithmetic_type(x))
        d_pattern_of = cuda.shared.array(LIST, arithmetic_type(x))
        d_up_of = cuda.shared.array(LIST, arithmetic_type(x))
        down_sums = cuda.local.array(8, arithmetic_type(x))
        pattern_sums = cuda.local.array(8, arithmetic_type(x))
        up_sums = cuda.local.array(8, arithmetic_type(x))
        lane = types.int32(cuda.threadIdx.x)
        part = types.int32(cuda.blockIdx.x % most)
        neuron = types.int32(-1)
        if part < load(part_starts, neurons):
            neuron = types.int32(load(part_neurons, part))
        if neuron >= 0:
            d = types.int32(cuda.blockIdx.x // most * STRIP + lane * 8)
            mine = d < width
            at = d if mine else types.int32(0)  # what is read there is not used
            size = types.int32(load(part_starts, neurons + 1))
            part_of_neuron = types.int32(part - load(part_starts, neuron))
            entry = types.int32(load(neuron_starts, neuron) + part_of_neuron * size)
            end = types.int32(min(load(neuron_starts, neuron + 1), entry + size))
            for c in range(8):
                down_sums[c] = number(x, 0)
                pattern_sums[c] = number(x, 0)
                up_sums[c] = number(x, 0)
            is_empty = entry >= end
            while entry < end:
                n = types.int32(min(types.int32(end - entry), types.int32(LIST)))
                i = lane
                while i < n:
                    row_of[i] = load(rows, entry + i)
                    hidden_of[i] = load(hidden, entry + i)
                    d_pattern_of[i] = load(d_pattern, entry + i)
                    if gated:
                        d_up_of[i] = load(d_up, entry + i)
                    i = types.int32(i + 32)
                cuda.syncthreads()  # the list is there
                i = types.int32(0)
                while i + 8 <= n:
                    dy_rows = four_rows(dy, row_of, i, i + 4, width, at)
                    more_dy_rows = four_rows(dy, row_of, i + 4, i + 8, width, at)
                    x_rows = four_rows(x, row_of, i, i + 4, width, at)
                    more_x_rows = four_rows(x, row_of, i + 4, i + 8, width, at)
                    add_four(down_sums, hidden_of, i, dy_rows)
                    add_four(down_sums, hidden_of, i + 4, more_dy_rows)
                    add_four(pattern_sums, d_pattern_of, i, x_rows)
                    if gated:
                        add_four(up_sums, d_up_of, i, x_rows)
                    add_four(pattern_sums, d_pattern_of, i + 4, more_x_rows)
                    if gated:
                        add_four(up_sums, d_up_of, i + 4, more_x_rows)
                    i = types.int32(i + 8)
                while i < n:
                    dy_rows = four_rows(dy, row_of, i, n, width, at)
                    x_rows = four_rows(x, row_of, i, n, width, at)
                    add_up_to_four(down_sums, hidden_of, i, n, dy_rows)
                    add_up_to_four(pattern_sums, d_pattern_of, i, n, x_rows)
                    if gated:
                        add_up_to_four(up_sums, d_up_of, i, n, x_rows)
                    i = types.int32(i + 4)
                cuda.syncthreads()  # the list is not needed any more
                entry = types.int32(entry + LIST)
            if mine:
                if part_of_neuron > 0:
                    # neurons before this one have a first part each, which has no rows there
                    index = types.int64(part - neuron - 1) * 3 * width + d
                    store_aligned(part_sums, index, kept(down_sums, 0))
                    store_aligned(part_sums, index + width, kept(pattern_sums, 0))
                    if gated:
                        store_aligned(part_sums, index + 2 * width, kept(up_sums, 0))
                elif not is_empty:
                    index = types.int64(neuron) * width + d
                    add_kept(down_grad, index, down_sums, 0)
                    add_kept(pattern_grad, index, pattern_sums, 0)
                    if gated:
                        add_kept(up_grad, index, up_sums, 0)

    return sum_part


@device_function
def row_at(matrix, row_of, i, n, width, d):
    """Return eight numbers of the row of a listed entry, the last one's past the end."""
    return load_aligned(matrix, types.int64(row_of[min(i, n - 1)]) * width + d)


@device_function
def four_rows(matrix, row_of, i, n, width, d):
    """Return eight numbers of each of four entries' rows."""
    return (
        row_at(matrix, row_of, i, n, width, d),
        row_at(matrix, row_of, i + 1, n, width, d),
        row_at(matrix, row_of, i + 2, n, width, d),
        row_at(matrix, row_of, i + 3, n, width, d),
    )


@device_function
def add_four(sums, factor_of, i, rows):
    """Let eight sums grow by four rows times their factors."""
    add_scaled_to(sums, 0, factor_of[i], rows[0])
    add_scaled_to(sums, 0, factor_of[i + 1], rows[1])
    add_scaled_to(sums, 0, factor_of[i + 2], rows[2])
    add_scaled_to(sums, 0, factor_of[i + 3], rows[3])


@device_function
def add_up_to_four(sums, factor_of, i, n, rows):
    """Do the same with those of the four that are listed."""
    add_scaled_to(sums, 0, factor_of[i], rows[0])
    if i + 1 < n:
        add_scaled_to(sums, 0, factor_of[i + 1], rows[1])
    if i + 2 < n:
        add_scaled_to(sums, 0, factor_of[i + 2], rows[2])
    if i + 3 < n:
        add_scaled_to(sums, 0, factor_of[i + 3], rows[3])


@kernel()
def add_split_parts(
    part_sums, part_starts, split_neurons, down_grad, pattern_grad, up_grad, width, matrices
):  # fmt: skip
    """Add what parts of neurons have left in ``part_sums``, in order.

    A warp takes 256 columns of a neuron's row of a matrix. Four parts are asked for at a time.
    """
    sums = cuda.local.array(8, arithmetic_type(part_sums))
    chunks = types.int32((width + 255) // 256)
    step = types.int64(matrices * chunks)
    items = load(split_neurons, 0) * step
    item = types.int64(global_thread() // 32)
    while item < items:
        neuron = types.int64(load(split_neurons, 1 + item // step))
        matrix = types.int32(types.int32(item % step) // chunks)
        d = types.int32(item % step) % chunks * 256 + cuda.threadIdx.x % 32 * 8
        if d < width:
            for c in range(8):
                sums[c] = number(part_sums, 0)
            pitch = 3 * width
            first = types.int64(load(part_starts, neuron))
            start = (first - neuron) * pitch + matrix * width + d
            last = types.int64(load(part_starts, neuron + 1)) - first - 2  # from 0 on
            part = types.int64(0)
            while part <= last:
                first_sums = load_aligned(part_sums, start + part * pitch)
                second_sums = load_aligned(part_sums, start + min(part + 1, last) * pitch)
                third_sums = load_aligned(part_sums, start + min(part + 2, last) * pitch)
                fourth_sums = load_aligned(part_sums, start + min(part + 3, last) * pitch)
                keep_added(sums, 0, first_sums)
                if part + 1 <= last:
                    keep_added(sums, 0, second_sums)
                if part + 2 <= last:
                    keep_added(sums, 0, third_sums)
                if part + 3 <= last:
                    keep_added(sums, 0, fourth_sums)
                part += 4
            place = neuron * width + d
            if matrix == 0:
                add_kept(down_grad, place, sums, 0)
            elif matrix == 1:
                add_kept(pattern_grad, place, sums, 0)
            else:
                add_kept(up_grad, place, sums, 0)
        item += grid_threads() // 32
