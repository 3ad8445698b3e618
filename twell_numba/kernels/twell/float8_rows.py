"""Activation-sparse layers forward with 8-bit weights, on a GPU.

    u_i = su[j_i] (x . Nu[j_i]),    h_i = g_i u_i,    y = sum_i (h_i sd[j_i]) Nd[j_i]

for the entries i of a row of x, of neurons j_i, where Nu and Nd (F, D) are e4m3 numbers and su, sd
(F,) the neurons' scales (:class:`~twell_numba.kernels.twell.float8_weights.Float8Weights`).

A block takes a row, so that few rows leave most of a GPU idle. A thread has ``16 * groups`` columns
of x and y in its registers and reads the same ones of each entry's row; those of eight entries are
asked for before the first is used.

Where float32 is made of each number, two instructions a number bound the speed. So there is
computed in float16, two numbers at a time, and for eight products in a row only, which are then
added up in float32: of x and eight numbers of Nu beside each other in a thread, and of h and eight
entries' numbers of Nd. For that x and the h of a list come to be at most 2 by a power of two. It
loses less than the rounding of u and y to 16 bits does, and much less than 8-bit weights have lost
already. x in float32 is rounded, too; of float64 the weights are made dense for the call.

A u that is smaller than the error of its sum may come out as 0, because float16 sums are multiples
of some small number: of 93,000 entries of normal numbers in bfloat16 one did. Its h is 0 then, and
is not counted; what is counted is what y was computed with.

GPUs older than compute capability 8.9 have no instruction for e4m3: they move its bits to where
float16 has them, which divides by 256, and multiply with x and h that are 256 times larger. Results
are the same but for numbers below 2^-14 of the largest x of a row or h of a list, of which float16
keeps fewer bits unless they are 256 times larger.

On an H200, M = 16384, D = 2048, F = 5632, bfloat16, in ms, for entries a row, *s* for neurons that
fire unequally often; a block's threads, columns of each and the room for threads on a
multiprocessor:

| | 29 | 29s | 60 | 150 |
| --- | --- | --- | --- | --- |
| weights in bfloat16 (:mod:`strip_rows`) | 0.455 | 0.400 | 0.892 | 2.127 |
| 64, 32, 640: 96 registers; chosen | 0.268 | 0.256 | 0.480 | 1.141 |
| 64, 32, 512: 127 registers | 0.277 | 0.266 | 0.484 | 1.149 |
| 64, 32, 768: 80, and 16 bytes that do not fit | 0.278 | 0.261 | 0.492 | 1.150 |
| 64, 32, 320: 161 registers | 0.318 | 0.307 | | |
| 128, 16, 640: 90 registers | 0.357 | 0.348 | 0.586 | 1.294 |
| 128, 16, 1024: 64 registers | 0.280 | 0.273 | | |
| 128, 16, 1280: 48, and 80 bytes that do not fit | 0.312 | 0.285 | | |
| by moving bits: 128, 16, 640 | 0.480 | 0.473 | 0.842 | 1.926 |
| by moving bits: 64, 32, 512 | 0.494 | 0.488 | | |

The whole layer, with 128 threads of 16 columns, took 0.864, 0.858, 1.100 and 1.817 ms; with weights
in bfloat16 0.974, 0.904, 1.423 and 2.662. With float32 made of each number 29 entries took 0.395
ms; without folding dot products into one another 0.438, and then with four entries at a time 0.440,
with sixteen 0.537. Without a gate the chosen one has 8 bytes that do not fit.
"""

import functools

import numpy as np
from numpy.typing import DTypeLike

from twell_numba.device.gpu import DeviceArray, Kernel, empty, kernel, require_same_gpu
from twell_numba.device.gpu.language import (
    FULL_WARP,
    cuda,
    device_function,
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
    warp_sum,
)
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.device_checks import rows_are_aligned
from twell_numba.kernels.device_ffn_checks import forward_arrays
from twell_numba.kernels.twell import cuda as twell
from twell_numba.kernels.twell.cuda_activations import DeviceActivations
from twell_numba.kernels.twell.cuda_language import warp_prefix
from twell_numba.kernels.twell.cuda_registers import fold, kept, load_if, store_if
from twell_numba.kernels.twell.float8_language import (
    DIVISOR,
    INSTRUCTION_CAPABILITY,
    load_divided_pairs,
    load_number,
    load_pairs,
    multiply_add_pairs,
    numbers_of_pair,
    pair_of,
    power_to_one,
)
from twell_numba.kernels.twell.float8_weights import Float8Weights

# Entries that a block lists in shared memory at a time.
LIST = 128
# Entries whose rows are asked for before the first is used, and added up in float16.
UNROLL = 8
WIDEST = 8192
# Rows so wide are shared by half as many threads; threads of all blocks of a multiprocessor.
WIDE, ROOM = 2048, 640


def fits(width: int) -> bool:
    """Return whether there are kernels for rows of this width (which must be aligned, too)."""
    return 0 < width <= WIDEST and width % 16 == 0


@device_function
def sum_eight_over_lanes(numbers):
    """Return, in lane l, the warp's sum of number ``l % 8`` of eight, in 9 exchanges, not 40."""
    fold(numbers, 4, 1)
    fold(numbers, 2, 2)
    fold(numbers, 1, 4)
    total = numbers[0]
    total += cuda.shfl_xor_sync(FULL_WARP, total, 8)
    total += cuda.shfl_xor_sync(FULL_WARP, total, 16)
    return total


@device_function
def largest_of_eight(largest, numbers):
    """Return the largest absolute value of eight numbers and another one."""
    for i in range(8):
        largest = max(largest, types.float32(abs(numbers[i])))
    return largest


@device_function
def warp_largest(value):
    """Return the largest of the warp's numbers."""
    value = max(value, cuda.shfl_xor_sync(FULL_WARP, value, 16))
    value = max(value, cuda.shfl_xor_sync(FULL_WARP, value, 8))
    value = max(value, cuda.shfl_xor_sync(FULL_WARP, value, 4))
    value = max(value, cuda.shfl_xor_sync(FULL_WARP, value, 2))
    return max(value, cuda.shfl_xor_sync(FULL_WARP, value, 1))


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
def forward_row(width: int, gated: bool, by_instruction: bool) -> Kernel:
    """Return the kernel that computes u and y of a row that is not in the tail, a block a row.

    ``forward_row(width, gated, by_instruction)(rows, x, up_numbers, up_scales, down_numbers,
    down_scales, values, columns, counts, up_values, y, nonzeros, absolute_sums, fired, tile, tiles,
    slots)``; y of rows in the tail becomes 0. Without a gate nothing is read of up.
    """
    groups = 2 if width >= WIDE and width % 1024 == 0 else 1
    warps = -(-width // (512 * groups))
    threads, whole = 32 * warps, 512 * groups * warps == width
    stride, own_columns, parts, own_words = 16 * threads, 16 * groups, LIST * warps, 8 * groups
    factor = 1 if by_instruction else DIVISOR  # of what pairs are multiplied with
    lists = LIST // 32

    @kernel(threads=threads, blocks_per_multiprocessor=max(1, ROOM // threads))
    def forward_row(
        x, up_numbers, up_scales, down_numbers, down_scales, values, columns, counts, up_values, y,
        nonzeros, absolute_sums, fired, tile, tiles, slots,
    ):  # fmt: skip
        thread = types.int32(cuda.threadIdx.x)
        row = types.int64(cuda.blockIdx.x)
        d = types.int64(thread) * 16
        mine = whole or d < width
        # a thread without columns reads some that are not its own, and multiplies them by 0
        column = types.int64(d if mine else 0)
        place_of = cuda.shared.array(LIST, types.int32)
        neuron_of = cuda.shared.array(LIST, types.int32)
        hidden_of = cuda.shared.array(LIST, types.uint32)
        part_of = cuda.shared.array(parts, types.float32)
        largest_of = cuda.shared.array(32, types.float32)
        down_unit_of = cuda.shared.array(1, types.float32)
        total_of = cuda.shared.array(1, types.int32)
        own = cuda.local.array(own_words, types.uint32)
        sums = cuda.local.array(own_columns, types.float32)
        dots = cuda.local.array(UNROLL, types.float32)
        chain = cuda.local.array(own_words, types.uint32)
        factors = cuda.local.array(UNROLL, types.uint32)
        hidden_own = cuda.local.array(lists, types.float32)
        if thread < 32:
            list_row(
                columns, counts, row, 0, tile, tiles, slots, place_of, neuron_of, total_of, LIST
            )  # fmt: skip
        if gated:
            largest = types.float32(0)
            for g in range(2 * groups):
                start = row * width + d + g // 2 * stride + g % 2 * 8
                largest = largest_of_eight(largest, load_if(mine, x, start))
            largest = warp_largest(largest)
            if thread % 32 == 0:
                largest_of[thread // 32] = largest
        for c in range(own_columns):
            sums[c] = types.float32(0)
        absolute_sum = types.float32(0)
        nonzero_count = types.int32(0)
        cuda.syncthreads()  # the list is there
        total = types.int32(total_of[0])
        x_unit = types.float32(1)
        first = types.int32(0)
        if gated:
            largest = types.float32(0)
            for w in range(warps):
                largest = max(largest, largest_of[w])
            scale = power_to_one(largest)
            x_unit = types.float32(1) / scale
            scale *= types.float32(factor)
        while first < total:
            n = types.int32(min(total - first, LIST))
            # whole groups of entries are computed with: the last once more, and h is 0
            last, end = types.int32(n - 1), types.int32((n + UNROLL - 1) // UNROLL * UNROLL)
            if gated:
                for g in range(2 * groups):
                    start = row * width + d + g // 2 * stride + g % 2 * 8
                    numbers = load_if(mine, x, start)
                    for c in range(4):
                        own[4 * g + c] = pair_of(numbers[2 * c] * scale, numbers[2 * c + 1] * scale)
                i = types.int32(0)
                while i < end:
                    for r in range(UNROLL):
                        start = types.int64(neuron_of[min(i + r, last)]) * width + column
                        dot = types.float32(0)
                        for g in range(groups):
                            if by_instruction:
                                pairs = load_pairs(up_numbers, start + g * stride)
                            else:
                                pairs = load_divided_pairs(up_numbers, start + g * stride)
                            pair = types.uint32(0)
                            for c in range(8):
                                pair = multiply_add_pairs(own[8 * g + c], pairs[c], pair)
                            low, high = numbers_of_pair(pair)
                            dot += low + high
                        dots[r] = dot
                    dot = sum_eight_over_lanes(dots)
                    if thread % 32 < UNROLL:
                        part_of[(i + thread % 32) * warps + thread // 32] = dot
                    i = types.int32(i + UNROLL)
                cuda.syncthreads()  # all parts of u are there
            if thread < 32:
                largest = types.float32(0)
                for k in range(lists):
                    i = types.int32(thread + 32 * k)
                    hidden = types.float32(0)
                    if i < n:
                        place = row * tiles * slots + place_of[i]
                        neuron = neuron_of[i]
                        hidden = types.float32(load(values, place))
                        if gated:
                            up = types.float32(0)
                            for w in range(warps):
                                up += part_of[i * warps + w]
                            store(up_values, place, up * x_unit * load(up_scales, neuron))
                            hidden *= load(up_values, place)  # what was stored, rounded
                            absolute_sum += abs(hidden)
                            if hidden != 0:
                                nonzero_count = types.int32(nonzero_count + 1)
                                store(fired, neuron, 1)
                        hidden *= load(down_scales, neuron)
                    hidden_own[k] = hidden
                    largest = max(largest, abs(hidden))
                unit = power_to_one(warp_largest(largest))
                if thread == 0:
                    down_unit_of[0] = types.float32(1) / unit
                unit *= types.float32(factor)
                for k in range(lists):
                    hidden = hidden_own[k] * unit
                    hidden_of[thread + 32 * k] = pair_of(hidden, hidden)
            cuda.syncthreads()  # h is there
            unit = down_unit_of[0]
            i = types.int32(0)
            while i < end:
                for c in range(own_words):
                    chain[c] = types.uint32(0)
                for r in range(UNROLL):
                    factors[r] = hidden_of[i + r]
                for r in range(UNROLL):
                    start = types.int64(neuron_of[min(i + r, last)]) * width + column
                    hidden = factors[r]
                    for g in range(groups):
                        if by_instruction:
                            pairs = load_pairs(down_numbers, start + g * stride)
                        else:
                            pairs = load_divided_pairs(down_numbers, start + g * stride)
                        for c in range(8):
                            chain[8 * g + c] = multiply_add_pairs(
                                hidden, pairs[c], chain[8 * g + c]
                            )
                for c in range(own_words):
                    low, high = numbers_of_pair(chain[c])
                    sums[2 * c] += unit * low
                    sums[2 * c + 1] += unit * high
                i = types.int32(i + UNROLL)
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
            start = row * width + d + g * stride
            store_if(mine, y, start, kept(sums, g * 16))
            store_if(mine, y, start + 8, kept(sums, g * 16 + 8))
        if gated and thread < 32:
            nonzero_count = warp_sum(nonzero_count)
            absolute_sum = warp_sum(absolute_sum)
            if thread == 0:
                store(nonzeros, row, nonzero_count)
                store(absolute_sums, row, absolute_sum)

    return forward_row


@kernel()
def expand(numbers, scales, tail_count, matrix, size, width, always):
    """Write the matrix that numbers and scales are; if there is a tail, or ``always``."""
    if always != 0 or load(tail_count, 0) != 0:
        i = global_thread()
        while i < size:
            store(matrix, i, number(matrix, load_number(numbers, i)) * load(scales, i // width))
            i += grid_threads()


def gated_ffn_forward(
    x: DeviceArray,
    gate_weight: DeviceArray,
    up_weight: Float8Weights,
    down_weight: Float8Weights,
    tile: int = twell.TILE,
    slots: int = twell.SLOTS,
) -> tuple[DeviceArray, DeviceActivations]:
    """Compute y = (relu(x Wg^T) * (x Wu^T)) Wd with 8-bit Wu and Wd.

    Which neurons fire is what it is in :func:`twell_numba.kernels.twell.cuda.gated_ffn_forward`,
    as are parameters, returns and errors. There is no backward pass.
    """
    twell.require_tile(tile, slots)
    forward_arrays(x=x, gate_weight=gate_weight)
    for name, weight in (("up_weight", up_weight), ("down_weight", down_weight)):
        _require_float8(name, weight, gate_weight)
    packed = twell.pack_product(x, (gate_weight,), tile, slots, gated=True, compact_tail=False)
    return _forward(x, up_weight, down_weight, packed), packed


def ffn_forward(
    x: DeviceArray,
    up_weight: DeviceArray,
    down_weight: Float8Weights,
    tile: int = twell.TILE,
    slots: int = twell.SLOTS,
) -> tuple[DeviceArray, DeviceActivations]:
    """Compute y = relu(x Wu^T) Wd with an 8-bit Wd; otherwise as :func:`gated_ffn_forward`."""
    twell.require_tile(tile, slots)
    forward_arrays(x=x, up_weight=up_weight)
    _require_float8("down_weight", down_weight, up_weight)
    packed = twell.pack_product(x, (up_weight,), tile, slots, gated=False, compact_tail=False)
    return _forward(x, down_weight, down_weight, packed), packed


def to_dense(weights: Float8Weights, dtype: DTypeLike) -> DeviceArray:
    """Return the matrix that 8-bit weights on a GPU stand for."""
    return _expanded(weights, np.dtype(dtype), None)


def _require_float8(name: str, weight: Float8Weights, beside: DeviceArray) -> None:
    if not isinstance(weight, Float8Weights) or not weight.is_on_gpu:
        raise TypeError(
            f"{name} of type {type(weight).__name__} given, Float8Weights on a GPU wanted"
        )
    require_shape(name, weight.numbers, beside.shape)
    require_same_gpu(**{name: weight.numbers, "x": beside})


def _forward(
    x: DeviceArray, up: Float8Weights, down: Float8Weights, packed: DeviceActivations
) -> DeviceArray:
    """Return y for packed activations; without a gate, nothing is read of up."""
    rows, width = x.shape
    is_aligned = rows_are_aligned(x) and all(w.numbers.pointer % 16 == 0 for w in (up, down))
    if not (is_aligned and fits(width)) or x.dtype == np.float64:
        return twell.forward_packed(x, to_dense(up, x.dtype), to_dense(down, x.dtype), packed)
    y = empty(x.shape, x.dtype, x.stream)
    by_instruction = x.gpu.capability >= INSTRUCTION_CAPABILITY
    forward_row(width, packed.gated, by_instruction)(
        rows, x, up.numbers, up.scales, down.numbers, down.scales, packed.values, packed.columns,
        packed.counts, packed.up_values, y, packed.row_nonzeros, packed.row_absolute_sums,
        packed.fired, packed.tile, packed.tiles, packed.slots,
    )  # fmt: skip
    tail_up, tail_down = (_expanded(weights, x.dtype, packed.tail_count) for weights in (up, down))
    twell.forward_tail(x, tail_up, tail_down, packed, y, 1)
    return y


def _expanded(
    weights: Float8Weights, dtype: np.dtype, tail_count: DeviceArray | None
) -> DeviceArray:
    """Return the dense matrix; if a count is given, it holds anything where that is 0."""
    numbers = weights.numbers
    neurons, width = numbers.shape
    matrix = empty(numbers.shape, dtype, numbers.stream)
    always = int(tail_count is None)
    count = weights.scales if tail_count is None else tail_count
    blocks = min(expand.blocks(matrix.size), 16 * numbers.gpu.multiprocessors)
    expand(blocks, numbers, weights.scales, count, matrix, matrix.size, width, always)
    return matrix
