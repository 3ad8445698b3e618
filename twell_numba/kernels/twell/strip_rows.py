"""Forward and backward passes over packed entries by strips of columns, on a GPU.

With entries i of a row m, of neurons j_i, and h = g u, dg = dh u, du = dh g:

    dots    u_i = x[m] . Wu[j_i],    dh_i = dy[m] . Wd[j_i] + l1 sign(h_i)
    sums    y[m] = sum h_i Wd[j_i],  dx[m] = sum dg_i Wg[j_i] + du_i Wu[j_i]

Bound by what the second-level cache delivers, and that depends on how much is gathered from at a
time: a strip of a matrix is small enough to be near every multiprocessor. So all blocks that run at
the same time work on the same strip of columns. A warp takes a row's strip: its share of the row or
of the sums stays in registers, and neighbouring warps take neighbouring rows, which in text often
need the same neurons. Dots want the whole row at once, up to 2048 columns: then lists, u, h and
statistics (or dh, dg and du) come from the same kernel.

Entries of a row are listed side by side, from ``row * tiles * slots`` on: neurons, places in the
row of the packed layout, and what they are multiplied by. For the time of a call that takes, of 16
bits, 6 bytes a slot forward (4 more for each strip if D is above 2048), and backward 20
(14 once dots are done), of which 12 go to :mod:`entry_transpose`.

On an H200, M 16384, D 2048, F 5632, bfloat16, in ms and TB/s of the weights' rows read. The options
are a strip's columns, entries asked for at a time, warps of a block and those that a multiprocessor
has room for:

| | options | 29 alike | trained | 29 skewed |
| --- | --- | --- | --- | --- |
| a block a row: u, h and y | | 0.557, 7.0 | 0.409, 7.7 | 0.453, 8.6 |
| u, lists and h | 2048, 2, 2, 16 | 0.242, 8.0 | 0.224, 7.1 | 0.214, 9.1 |
| | 2048, 2, 4, 16 | 0.247, 7.9 | 0.223, 7.1 | 0.216, 9.0 |
| | 2048, 4, 4, 16 | 0.249, 7.8 | 0.221, 7.1 | 0.217, 9.0 |
| | 2048, 2, 8, 16 | 0.255, 7.6 | | |
| | 2048, 2, 16, 16 | 0.273, 7.1 | | |
| | 2048, 2, 4, 20 | 0.440, 4.4 | | |
| u alone, by strips | 1024, 2, 4, 24 | 0.223, 8.7 | 0.193, 8.2 | 0.185, 10.5 |
| (h is another 0.05 to 0.08) | 512, 4, 4, 24 | 0.223, 8.7 | 0.193, 8.2 | 0.199, 9.8 |
| | 256, 8, 8, 32 | 0.261, 7.4 | | |
| y | 512, 4, 2, 28 | 0.206, 9.4 | 0.163, 9.7 | 0.161, 12.1 |
| | 512, 4, 4, 28 | 0.207, 9.4 | 0.159, 9.9 | 0.161, 12.1 |
| | 512, 8, 4, 24 | 0.209, 9.3 | 0.160, 9.9 | 0.164, 11.9 |
| | 256, 8, 8, 32 | 0.217, 9.0 | | |
| | 1024, 4, 4, 24 | 0.221, 8.8 | | |
| | 2048, 4, 4, 16 | 0.227, 8.5 | | |
| dh, lists, dg and du | 2048, 2, 2, 16 | 0.239, 8.1 | 0.222, 7.1 | 0.209, 9.3 |
| dx, a block a row | | 0.435, 8.9 | 0.353, 8.9 | 0.396, 9.9 |
| dx | 256, 4, 2, 32 | 0.398, 9.8 | 0.305, 10.4 | 0.311, 12.5 |
| | 512, 4, 4, 24 | 0.415, 9.4 | 0.317, 10.0 | 0.319, 12.2 |
| | 1024, 4, 4, 16 | 0.459, 8.4 | | |

*Trained* is the pattern of a layer of a trained model: 23.5 entries a row, 200 at most. NVIDIA's
profiler says of u, and of y, of neurons alike: 75% and 83% of the second-level cache's throughput,
85% and 97% of what is read found there, 3.3 and 4.9 warps at work for each scheduler, which issue
in 47% and 58% of all cycles; warps wait for what they read.
"""

import functools

import numpy as np

from twell_numba.device.gpu import DeviceArray, Kernel, empty, kernel
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
from twell_numba.kernels.cuda_vectors import load_aligned, round_like
from twell_numba.kernels.device_checks import arithmetic_dtype
from twell_numba.kernels.twell.cuda_activations import DeviceActivations
from twell_numba.kernels.twell.cuda_language import sign, warp_prefix
from twell_numba.kernels.twell.cuda_registers import (
    add_scaled_to,
    dot_eight,
    fold,
    keep,
    kept,
    load_if,
    store_if,
)
from twell_numba.kernels.twell.entry_gradients import add_weight_gradients
from twell_numba.kernels.twell.entry_transpose import index_dtype, list_by_neuron

# Columns of a strip that a warp takes with one load, eight a lane.
COLUMNS = 256
# The widest strip of dots, and entries asked for before the first is used and warps that a
# multiprocessor should have room for, of strips up to so many columns.
WIDEST_DOTS = 2048
DOTS = {256: (8, 32), 512: (4, 24), 1024: (2, 20), 2048: (2, 16)}
# The same of sums, which take four entries at a time: the strip, warps.
SUMS = (512, 28)
SUMS_OF_TWO = (256, 32)
WARPS = 2  # of a block
# So few rows are cut into narrow strips, so that many warps share them.
FEW_ROWS = 64
NARROW = 256


def forward_entries(
    x: DeviceArray,
    up_weight: DeviceArray,
    down_weight: DeviceArray,
    packed: DeviceActivations,
) -> DeviceArray:
    """Return y of rows that are not in the tail (of others 0); compute u, and statistics.

    Parameters
    ----------
    x : DeviceArray, shape (M, D)
        16-byte aligned, D a multiple of 8.
    up_weight, down_weight : DeviceArray, shape (F, D)
        The same.
    packed : DeviceActivations
        Of a gated layer: up_values, row_nonzeros, row_absolute_sums and fired are written. Of a
        layer without a gate, nothing.
    """
    rows, width = x.shape
    lists = RowLists(packed, x)
    statistics = (packed.row_nonzeros, packed.row_absolute_sums, packed.fired)
    options = dots_options(rows, width)
    if packed.gated and width <= options[0]:
        multiply_forward(*options, width == options[0])(
            -(-rows // WARPS), x, up_weight, packed.values, packed.columns, packed.counts,
            packed.up_values, lists.row_counts, lists.neurons, lists.places, lists.first,
            *statistics, rows, width, packed.tile, packed.tiles, packed.slots,
        )  # fmt: skip
    else:
        lists.list(packed)
        dots, strips = lists.first, 0
        if packed.gated:
            dots, strips = lists.multiply(x, up_weight)
        finish_forward(
            finish_forward.blocks_of_warps(rows), dots, packed.values, packed.up_values,
            lists.row_counts, lists.neurons, lists.places, lists.first, *statistics, rows,
            lists.row_slots, strips,
        )  # fmt: skip
    return lists.sum_one(down_weight)


def backward_entries(
    dy: DeviceArray,
    x: DeviceArray,
    weights: tuple[DeviceArray, DeviceArray, DeviceArray],
    packed: DeviceActivations,
    l1_scale: DeviceArray,
    gradients: tuple[DeviceArray, DeviceArray, DeviceArray],
) -> DeviceArray:
    """Return dx of rows that are not in the tail (of others 0), and add to the gradients.

    Parameters
    ----------
    dy, x : DeviceArray, shape (M, D)
        16-byte aligned, D a multiple of 8.
    weights : tuple of DeviceArray, shape (F, D) each
        Wg, Wu and Wd; without a gate, the first is Wu.
    packed : DeviceActivations
    l1_scale : DeviceArray, shape (1,)
        In the type in which there is computed.
    gradients : tuple of DeviceArray, shape (F, D) each
        Of the weights, changed in place.

    Returns
    -------
    DeviceArray, shape (M, D)
    """
    pattern_grad, up_grad, down_grad = gradients
    lists, entry_places = list_by_neuron(packed)
    row_lists = backward_dots(dy, weights[2], packed, l1_scale, entry_places, lists.coefficients)
    del entry_places  # memory for what follows
    if packed.gated:
        dx = row_lists.sum_two(weights[0], weights[1])
    else:
        dx = row_lists.sum_one(weights[1])
    del row_lists
    of_inputs = (pattern_grad, up_grad) if packed.gated else (up_grad,)
    add_weight_gradients(dy, x, lists, (down_grad, *of_inputs))
    return dx


def backward_dots(
    dy: DeviceArray,
    down_weight: DeviceArray,
    packed: DeviceActivations,
    l1_scale: DeviceArray,
    entry_places: DeviceArray,
    coefficients: tuple[DeviceArray, ...],
) -> "RowLists":
    """Compute h, dg and du of each entry, which go to ``entry_places`` of three lists.

    Without a gate they are h and dh, and the lists two.

    Returns
    -------
    RowLists
        Of dg and du, or of dh.
    """
    rows, width = dy.shape
    lists = RowLists(packed, dy, second=packed.gated)
    gated = int(packed.gated)
    given = (packed.values, packed.up_values, l1_scale, entry_places)
    written = (lists.first, lists.second, coefficients[0], coefficients[1], coefficients[-1])
    options = dots_options(rows, width)
    if width <= options[0]:
        multiply_backward(*options, width == options[0])(
            -(-rows // WARPS), dy, down_weight, packed.columns, packed.counts, *given,
            lists.row_counts, lists.neurons, lists.places, *written, rows, width, packed.tile,
            packed.tiles, packed.slots, gated,
        )  # fmt: skip
    else:
        lists.list(packed)
        dots, strips = lists.multiply(dy, down_weight)
        finish_backward(
            finish_backward.blocks_of_warps(rows), dots, *given, lists.row_counts, lists.places,
            *written, rows, lists.row_slots, strips, gated,
        )  # fmt: skip
    del lists.places  # of no use for sums
    return lists


def strip_of(width: int, widest: int) -> int:
    """Return how many columns a strip has: no more than there are, whole warps."""
    return min(widest, -(-width // COLUMNS) * COLUMNS)


def dots_options(rows: int, width: int) -> tuple[int, int, int]:
    """Return the strip of products of rows, entries asked for at a time, and room for warps."""
    strip = strip_of(width, NARROW if rows <= FEW_ROWS else WIDEST_DOTS)
    entries, room = next(DOTS[widest] for widest in DOTS if strip <= widest)
    return strip, entries, room


class RowLists:
    """The entries of each row side by side, for the time of a pass.

    Attributes
    ----------
    row_counts : DeviceArray of int32, shape (M,)
    neurons, places : DeviceArray of uint16 or int32, shape (M, tiles * slots)
        Each entry's neuron, and its place in the row of the packed layout (until dots are done).
    first, second : DeviceArray, shape (M, tiles * slots)
        What entries are multiplied by, in the dtype of x: h, or dg and du.
    """

    def __init__(self, packed: DeviceActivations, x: DeviceArray, *, second: bool = False) -> None:
        self.rows, self.width = x.shape
        self.row_slots = packed.tiles * packed.slots
        self.sums = arithmetic_dtype(x.dtype)
        shape, stream = (self.rows, self.row_slots), x.stream
        self.row_counts = empty(self.rows, np.int32, stream)
        self.neurons = empty(shape, index_dtype(packed.neurons), stream)
        self.places = empty(shape, index_dtype(self.row_slots), stream)
        self.first = empty(shape, x.dtype, stream)
        self.second = empty(shape if second else (0, 0), x.dtype, stream)

    def list(self, packed: DeviceActivations) -> None:
        """List the entries."""
        list_rows(
            list_rows.blocks_of_warps(self.rows), packed.columns, packed.counts, self.row_counts,
            self.neurons, self.places, self.rows, packed.tile, packed.tiles, packed.slots,
        )  # fmt: skip

    def multiply(self, x: DeviceArray, weight: DeviceArray) -> tuple[DeviceArray, int]:
        """Return the products of rows of x and of neurons, in parts, one for each strip."""
        options = dots_options(self.rows, self.width)
        strips = -(-self.width // options[0])
        dots = empty((strips, self.rows, self.row_slots), self.sums, x.stream)
        multiply_rows(*options, self.width % options[0] == 0)(
            strips * -(-self.rows // WARPS), x, weight, self.row_counts, self.neurons, dots,
            self.rows, self.width, self.row_slots,
        )  # fmt: skip
        return dots, strips

    def sum_one(self, weight: DeviceArray) -> DeviceArray:
        """Return sums of a matrix's rows."""
        return self._sum(SUMS, False, (weight, weight), (self.first, self.first))

    def sum_two(self, first: DeviceArray, second: DeviceArray) -> DeviceArray:
        """Return sums of two matrices' rows."""
        return self._sum(SUMS_OF_TWO, True, (first, second), (self.first, self.second))

    def _sum(
        self,
        options: tuple[int, int],
        two: bool,
        matrices: tuple[DeviceArray, DeviceArray],
        factors: tuple[DeviceArray, DeviceArray],
    ) -> DeviceArray:
        sums = empty((self.rows, self.width), self.first.dtype, self.first.stream)
        strip, room = options
        strip = strip_of(self.width, NARROW if self.rows <= FEW_ROWS else strip)
        strips = -(-self.width // strip)
        sum_rows(strip, room, two, self.width % strip == 0)(
            strips * -(-self.rows // WARPS), *matrices, self.row_counts, self.neurons, *factors,
            sums, self.rows, self.width, self.row_slots,
        )  # fmt: skip
        return sums


# ---- Lists


@device_function
def list_entry(places, neurons, position, place, neuron, is_there):
    """Write an entry to a row's list."""
    if is_there:
        store(places, position, place)
        store(neurons, position, neuron)


@device_function
def list_row(columns, counts, row, tile, tiles, slots, neurons, places):
    """List a row's entries and return how many there are; for a warp."""
    lane = types.int32(cuda.threadIdx.x % 32)
    base = row * tiles * slots
    listed = types.int64(0)
    first = types.int64(0)
    while first < tiles:
        t = first + lane
        count = types.int32(0)
        if t < tiles:
            count = types.int32(load(counts, row * tiles + t))
        before, total = warp_prefix(count)
        position = base + listed + before
        slot = types.int32(0)
        while slot < count:
            start = base + t * slots
            last = start + count - 1
            place = start + slot
            a = load(columns, place)
            b = load(columns, min(place + 1, last))
            c = load(columns, min(place + 2, last))
            d = load(columns, min(place + 3, last))
            list_entry(places, neurons, position, place - base, t * tile + types.int64(a), True)
            n = count - slot
            list_entry(
                places, neurons, position + 1, place + 1 - base, t * tile + types.int64(b), n > 1
            )
            list_entry(
                places, neurons, position + 2, place + 2 - base, t * tile + types.int64(c), n > 2
            )
            list_entry(
                places, neurons, position + 3, place + 3 - base, t * tile + types.int64(d), n > 3
            )
            position += 4
            slot = types.int32(slot + 4)
        listed += total
        first += 32
    cuda.syncwarp()  # the list is there
    return types.int32(listed)


@kernel()
def list_rows(columns, counts, row_counts, neurons, places, rows, tile, tiles, slots):
    """List the entries of all rows, and count them; a warp takes a row."""
    row = types.int64(cuda.blockIdx.x) * (cuda.blockDim.x // 32) + cuda.threadIdx.x // 32
    if row < rows:
        total = list_row(columns, counts, row, tile, tiles, slots, neurons, places)
        if cuda.threadIdx.x % 32 == 0:
            store(row_counts, row, total)


# ---- Dots


@device_function
def sum_over_lanes(dots, folds):
    """Return, in lane l, the warp's sum of number ``l % 2^folds``."""
    for f in range(folds):
        fold(dots, 1 << (folds - 1 - f), 1 << f)
    total = dots[0]
    for f in range(folds, 5):
        total += cuda.shfl_xor_sync(FULL_WARP, total, 1 << f)
    return total


@device_function
def keep_row(own, groups, matrix, row, width, d, whole):
    """Read a lane's share of a row."""
    for g in range(groups):
        mine = whole or d + g * COLUMNS < width
        keep(own, g * 8, load_if(mine, matrix, row * width + d + g * COLUMNS))


@device_function
def multiply_32(
    own, groups, folds, dots, weight, neuron_of, dot_of, mine_first, n, width, d, whole
):  # fmt: skip
    """Multiply a row with those of up to 32 listed neurons; for a warp."""
    lane = types.int32(cuda.threadIdx.x % 32)
    i = types.int32(0)
    while i < n:
        for r in range(1 << folds):
            start = types.int64(neuron_of[mine_first + i + r]) * width + d
            dot = number(weight, 0)
            for g in range(groups):
                mine = whole or d + g * COLUMNS < width
                dot += dot_eight(own, g * 8, load_if(mine, weight, start + g * COLUMNS))
            dots[r] = dot
        dot = sum_over_lanes(dots, folds)
        if lane < 1 << folds:
            dot_of[mine_first + i + lane] = dot
        i = types.int32(i + (1 << folds))
    cuda.syncwarp()  # all dots are there


def options_of(strip: int, unroll: int) -> tuple[int, int, int]:
    """Return loads of a row's strip, a lane's columns of it, and the logarithm of ``unroll``."""
    groups = strip // COLUMNS
    return groups, 8 * groups, unroll.bit_length() - 1


@functools.cache
def multiply_rows(strip: int, unroll: int, room: int, whole: bool) -> Kernel:
    """Return the kernel that multiplies rows of x with those of their neurons, on a strip of D.

    ``multiply_rows(...)(strips * row_blocks, x, weight, row_counts, neurons, dots, rows, width,
    row_slots)``, where ``dots`` is (strips, M, tiles * slots).
    """
    groups, own_columns, folds = options_of(strip, unroll)
    lists = 32 * WARPS

    @kernel(threads=32 * WARPS, blocks_per_multiprocessor=room // WARPS)
    def multiply_rows(x, weight, row_counts, neurons, dots, rows, width, row_slots):
        neuron_of = cuda.shared.array(lists, types.int32)
        dot_of = cuda.shared.array(lists, arithmetic_type(x))
        own = cuda.local.array(own_columns, arithmetic_type(x))
        own_dots = cuda.local.array(unroll, arithmetic_type(x))
        lane = types.int32(cuda.threadIdx.x % 32)
        listed = types.int32(cuda.threadIdx.x - lane)
        row_blocks = types.int32((rows + WARPS - 1) // WARPS)
        row = types.int64(cuda.blockIdx.x % row_blocks) * WARPS + cuda.threadIdx.x // 32
        strip_number = types.int64(cuda.blockIdx.x // row_blocks)
        d = strip_number * strip + lane * 8
        if row < rows:
            total = types.int32(load(row_counts, row))
            keep_row(own, groups, x, row, width, d, whole)
            base = row * row_slots
            first = types.int32(0)
            while first < total:
                n = types.int32(min(total - first, 32))
                neuron_of[listed + lane] = load(neurons, base + first + min(lane, n - 1))
                cuda.syncwarp()  # the list is there
                multiply_32(
                    own, groups, folds, own_dots, weight, neuron_of, dot_of, listed, n, width, d,
                    whole,
                )  # fmt: skip
                if lane < n:
                    index = strip_number * rows * row_slots + base + first + lane
                    store(dots, index, dot_of[listed + lane])
                first = types.int32(first + 32)

    return multiply_rows


@device_function
def finish_up(values, up_values, fired, hidden, entry, place, neuron, up):
    """Store u and h of an entry, and return h and whether it is not 0."""
    store(up_values, place, up)
    value = load(values, place) * round_like(up_values, up)
    store(hidden, entry, value)
    count = types.int32(0)
    if value != 0:
        count = types.int32(1)
        if load(fired, neuron) == 0:  # writing what is there already would take longer
            store(fired, neuron, 1)
    return value, count


@device_function
def store_statistics(nonzeros, absolute_sums, row, count, absolute_sum):
    """Store a row's statistics, added up over a warp."""
    count = warp_sum(count)
    absolute_sum = warp_sum(absolute_sum)
    if cuda.threadIdx.x % 32 == 0:
        store(nonzeros, row, count)
        store(absolute_sums, row, absolute_sum)


@device_function
def finish_d_hidden(
    values, up_values, l1, first_factors, second_factors, list_hidden, list_pattern, list_up, entry,
    place, listed_at, d_hidden, gated,
):  # fmt: skip
    """Store what follows from dh of an entry."""
    value = number(list_hidden, load(values, place))
    up = number(list_hidden, 1)
    if gated != 0:
        up = number(list_hidden, load(up_values, place))
    hidden = value * up
    d_hidden += l1 * sign(hidden, number(list_hidden, 1))
    store(first_factors, entry, d_hidden * up)
    store(list_hidden, listed_at, hidden)
    store(list_pattern, listed_at, d_hidden * up)
    if gated != 0:
        store(second_factors, entry, d_hidden * value)
        store(list_up, listed_at, d_hidden * value)


@functools.cache
def multiply_forward(strip: int, unroll: int, room: int, whole: bool) -> Kernel:
    """Return the kernel that lists rows and computes u, h and statistics, of rows of one strip."""
    groups, own_columns, folds = options_of(strip, unroll)
    lists = 32 * WARPS

    @kernel(threads=32 * WARPS, blocks_per_multiprocessor=room // WARPS)
    def multiply_forward(
        x, weight, values, columns, counts, up_values, row_counts, neurons, places, hidden,
        nonzeros, absolute_sums, fired, rows, width, tile, tiles, slots,
    ):  # fmt: skip
        neuron_of = cuda.shared.array(lists, types.int32)
        dot_of = cuda.shared.array(lists, arithmetic_type(x))
        own = cuda.local.array(own_columns, arithmetic_type(x))
        own_dots = cuda.local.array(unroll, arithmetic_type(x))
        lane = types.int32(cuda.threadIdx.x % 32)
        listed = types.int32(cuda.threadIdx.x - lane)
        row = types.int64(cuda.blockIdx.x) * WARPS + cuda.threadIdx.x // 32
        d = types.int64(lane * 8)
        if row < rows:
            keep_row(own, groups, x, row, width, d, whole)
            total = list_row(columns, counts, row, tile, tiles, slots, neurons, places)
            if lane == 0:
                store(row_counts, row, total)
            base = row * tiles * slots
            count = types.int32(0)
            absolute_sum = number(x, 0)
            first = types.int32(0)
            while first < total:
                n = types.int32(min(total - first, 32))
                entry = base + first + min(lane, n - 1)
                neuron = load(neurons, entry)
                neuron_of[listed + lane] = neuron
                cuda.syncwarp()  # the list is there
                multiply_32(
                    own, groups, folds, own_dots, weight, neuron_of, dot_of, listed, n, width, d,
                    whole,
                )  # fmt: skip
                if lane < n:
                    value, one = finish_up(
                        values, up_values, fired, hidden, entry, base + load(places, entry),
                        neuron, dot_of[listed + lane],
                    )  # fmt: skip
                    absolute_sum += abs(value)
                    count = types.int32(count + one)
                first = types.int32(first + 32)
            store_statistics(nonzeros, absolute_sums, row, count, absolute_sum)

    return multiply_forward


@functools.cache
def multiply_backward(strip: int, unroll: int, room: int, whole: bool) -> Kernel:
    """Return the kernel that lists rows and computes dh, dg and du, of rows of one strip."""
    groups, own_columns, folds = options_of(strip, unroll)
    lists = 32 * WARPS

    @kernel(threads=32 * WARPS, blocks_per_multiprocessor=room // WARPS)
    def multiply_backward(
        dy, weight, columns, counts, values, up_values, l1_scale, entry_places, row_counts, neurons,
        places, first_factors, second_factors, list_hidden, list_pattern, list_up, rows, width,
        tile, tiles, slots, gated,
    ):  # fmt: skip
        neuron_of = cuda.shared.array(lists, types.int32)
        dot_of = cuda.shared.array(lists, arithmetic_type(dy))
        own = cuda.local.array(own_columns, arithmetic_type(dy))
        own_dots = cuda.local.array(unroll, arithmetic_type(dy))
        lane = types.int32(cuda.threadIdx.x % 32)
        listed = types.int32(cuda.threadIdx.x - lane)
        row = types.int64(cuda.blockIdx.x) * WARPS + cuda.threadIdx.x // 32
        d = types.int64(lane * 8)
        if row < rows:
            l1 = number(dy, load(l1_scale, 0))
            keep_row(own, groups, dy, row, width, d, whole)
            total = list_row(columns, counts, row, tile, tiles, slots, neurons, places)
            if lane == 0:
                store(row_counts, row, total)
            base = row * tiles * slots
            first = types.int32(0)
            while first < total:
                n = types.int32(min(total - first, 32))
                entry = base + first + min(lane, n - 1)
                neuron_of[listed + lane] = load(neurons, entry)
                cuda.syncwarp()  # the list is there
                multiply_32(
                    own, groups, folds, own_dots, weight, neuron_of, dot_of, listed, n, width, d,
                    whole,
                )  # fmt: skip
                if lane < n:
                    place = base + load(places, entry)
                    finish_d_hidden(
                        values, up_values, l1, first_factors, second_factors, list_hidden,
                        list_pattern, list_up, entry, place, load(entry_places, place),
                        dot_of[listed + lane], gated,
                    )  # fmt: skip
                first = types.int32(first + 32)

    return multiply_backward


@device_function
def sum_of_parts(dots, entry, size, strips):
    """Return an entry's dot, added up over the strips in order."""
    total = number(dots, 0)
    for s in range(strips):
        total += load(dots, s * size + entry)
    return total


@kernel()
def finish_forward(
    dots, values, up_values, row_counts, neurons, places, hidden, nonzeros, absolute_sums, fired,
    rows, row_slots, strips,
):  # fmt: skip
    """Compute u, h and statistics; a warp takes a row. Without strips, h is there as ``values``."""
    row = types.int64(cuda.blockIdx.x) * (cuda.blockDim.x // 32) + cuda.threadIdx.x // 32
    if row < rows:
        base = row * row_slots
        end = base + load(row_counts, row)
        count = types.int32(0)
        absolute_sum = number(values, 0)
        entry = base + cuda.threadIdx.x % 32
        while entry < end:
            place = base + load(places, entry)
            if strips > 0:
                up = sum_of_parts(dots, entry, rows * row_slots, strips)
                value, one = finish_up(
                    values, up_values, fired, hidden, entry, place, load(neurons, entry), up
                )
                absolute_sum += abs(value)
                count = types.int32(count + one)
            else:
                store(hidden, entry, load(values, place))
            entry += 32
        if strips > 0:
            store_statistics(nonzeros, absolute_sums, row, count, absolute_sum)


@kernel()
def finish_backward(
    dots, values, up_values, l1_scale, entry_places, row_counts, places, first_factors,
    second_factors, list_hidden, list_pattern, list_up, rows, row_slots, strips, gated,
):  # fmt: skip
    """Compute dh, dg and du; a warp takes a row."""
    row = types.int64(cuda.blockIdx.x) * (cuda.blockDim.x // 32) + cuda.threadIdx.x // 32
    if row < rows:
        l1 = number(dots, load(l1_scale, 0))
        base = row * row_slots
        end = base + load(row_counts, row)
        entry = base + cuda.threadIdx.x % 32
        while entry < end:
            place = base + load(places, entry)
            finish_d_hidden(
                values, up_values, l1, first_factors, second_factors, list_hidden, list_pattern,
                list_up, entry, place, load(entry_places, place),
                sum_of_parts(dots, entry, rows * row_slots, strips), gated,
            )  # fmt: skip
            entry += 32


# ---- Sums


@functools.cache
def sum_rows(strip: int, room: int, two: bool, whole: bool) -> Kernel:
    """Return the kernel that adds up neurons' rows times their factors, on a strip of D.

    ``sum_rows(...)(strips * row_blocks, first_weight, second_weight, row_counts, neurons,
    first_factors, second_factors, y, rows, width, row_slots)``; the second matrix is read if
    ``two``.
    """
    groups, own_columns, _ = options_of(strip, 4)
    lists = 32 * WARPS

    @kernel(threads=32 * WARPS, blocks_per_multiprocessor=room // WARPS)
    def sum_rows(
        first_weight, second_weight, row_counts, neurons, first_factors, second_factors, y, rows,
        width, row_slots,
    ):  # fmt: skip
        neuron_of = cuda.shared.array(lists, types.int32)
        first_of = cuda.shared.array(lists, arithmetic_type(y))
        second_of = cuda.shared.array(lists, arithmetic_type(y))
        sums = cuda.local.array(own_columns, arithmetic_type(y))
        lane = types.int32(cuda.threadIdx.x % 32)
        listed = types.int32(cuda.threadIdx.x - lane)
        row_blocks = types.int32((rows + WARPS - 1) // WARPS)
        row = types.int64(cuda.blockIdx.x % row_blocks) * WARPS + cuda.threadIdx.x // 32
        d = types.int64(cuda.blockIdx.x // row_blocks) * strip + lane * 8
        if row < rows:
            total = types.int32(load(row_counts, row))
            for c in range(own_columns):
                sums[c] = number(y, 0)
            base = row * row_slots
            first = types.int32(0)
            while first < total:
                n = types.int32(min(total - first, 32))
                entry = base + first + min(lane, n - 1)
                neuron_of[listed + lane] = load(neurons, entry)
                first_of[listed + lane] = load(first_factors, entry)
                if two:
                    second_of[listed + lane] = load(second_factors, entry)
                cuda.syncwarp()  # the list is there
                i = types.int32(0)
                while i + 4 <= n:
                    add_four_rows(
                        sums, groups, first_weight, neuron_of, first_of, listed + i, width, d,
                        whole,
                    )  # fmt: skip
                    if two:
                        add_four_rows(
                            sums, groups, second_weight, neuron_of, second_of, listed + i, width, d,
                            whole,
                        )  # fmt: skip
                    i = types.int32(i + 4)
                while i < n:
                    add_up_to_four_rows(
                        sums, groups, first_weight, neuron_of, first_of, listed + i, n - i, width,
                        d, whole,
                    )  # fmt: skip
                    if two:
                        add_up_to_four_rows(
                            sums, groups, second_weight, neuron_of, second_of, listed + i, n - i,
                            width, d, whole,
                        )  # fmt: skip
                    i = types.int32(i + 4)
                cuda.syncwarp()  # the list is not needed any more
                first = types.int32(first + 32)
            for g in range(groups):
                mine = whole or d + g * COLUMNS < width
                store_if(mine, y, row * width + d + g * COLUMNS, kept(sums, g * 8))

    return sum_rows


@device_function
def add_four_rows(sums, groups, weight, neuron_of, factor_of, first, width, d, whole):
    """Let sums grow by four listed rows times their factors."""
    for r in range(4):
        start = types.int64(neuron_of[first + r]) * width + d
        for g in range(groups):
            mine = whole or d + g * COLUMNS < width
            numbers = load_if(mine, weight, start + g * COLUMNS)
            add_scaled_to(sums, g * 8, factor_of[first + r], numbers)


@device_function
def add_up_to_four_rows(
    sums, groups, weight, neuron_of, factor_of, first, n, width, d, whole
):  # fmt: skip
    """Do the same with at most four and ``n``; the list goes on with the last one's neuron."""
    for g in range(groups):
        at = d + g * COLUMNS
        if whole or at < width:
            a = load_aligned(weight, types.int64(neuron_of[first]) * width + at)
            b = load_aligned(weight, types.int64(neuron_of[first + 1]) * width + at)
            c = load_aligned(weight, types.int64(neuron_of[first + 2]) * width + at)
            e = load_aligned(weight, types.int64(neuron_of[first + 3]) * width + at)
            add_scaled_to(sums, g * 8, factor_of[first], a)
            if n > 1:
                add_scaled_to(sums, g * 8, factor_of[first + 1], b)
            if n > 2:
                add_scaled_to(sums, g * 8, factor_of[first + 2], c)
            if n > 3:
                add_scaled_to(sums, g * 8, factor_of[first + 3], e)
