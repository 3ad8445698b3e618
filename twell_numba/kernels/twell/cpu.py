"""Activation-sparse feedforward layers on the CPU, forward and backward.

Gated:       g = x Wg^T,  u = x Wu^T,  h = relu(g) * u,  y = h Wd
Two-matrix:  h = relu(x Wu^T),  y = h Wd

with x, y (M, D) and all weights neuron-major (F, D). Only the product that decides which neurons
fire (g, or u of a two-matrix FFN) is dense. Its positive entries are packed as TwELL, and
everything after it is computed for the stored entries alone:

    dh = dy Wd^T + l1 sign(h),  du = dh * relu(g),  dg = dh * u
    dWd = h^T dy,  dWu = du^T x,  dWg = dg^T x,  dx = du Wu + dg Wg

With the activation ``relu2``, relu(g)^2 takes the place of relu(g), here and in what is packed. Its
derivative, 2 relu(g), is found again as twice the root.

How the data flows. Forward runs by rows: a thread multiplies a range of rows with the gate (BLAS on
one thread), packs them and gathers the rows of Wu and Wd that its tokens need, while all of it is
in the thread's cache. Backward runs twice over the entries: by neuron (each entry's position listed
under its neuron, which TwELL's tiles give without sorting), so that a gradient row is written by
one thread, without atomics and with the same bits on every run; then by row for dx. Rows in the
TwELL tail, too dense for their tiles, go through BLAS as dense rows.

What bounds the speed. Every stored entry moves 2 rows of D numbers forward and 4 backward, mostly
from the last-level cache: at 1% of F = 2048, D = 512 float32 that is 84 MB forward, which two
threads read in 1.2 ms (70 GB/s), beside a gate product of 4.8 ms (AVX-512) or 8.8 ms (AVX2).

64 entries a tile of 256 are the default: where 2% of the neurons fire that is as fast as 32, at 9%
it is 1.2 to 1.6 times as fast, because hardly a row overflows.

Versions tried for M = 1024, D = 512, F = 2048, 20 entries a row, 2 threads, milliseconds:

- gathering right after the gate product: one entry at a time 1.34, two 1.24, four (here) 1.16, six
  1.21, eight 1.18. In another run four took 1.09, with and without software prefetch of the next
  rows; neuron by neuron over panels of 128, 256, 512 tokens took 1.40, 1.38, 1.33.
- packing alone: entry by entry 0.58, skipping 16 zeros at once 0.67, a vector comparison whose mask
  bits are walked (here) 0.19.
- prefetch in the backward pass by neuron, of x, of dy, or of both: no difference.
"""

from collections.abc import Callable

import numpy as np

from twell_numba.device.blas import SMALL_PRODUCT, add_matmul, matmul, single_threaded_blas
from twell_numba.device.few_rows import FEW_ROWS, few_rows_combination, few_rows_product
from twell_numba.device.jit import jit
from twell_numba.device.simd import LANES, lowest_bit, positive_mask
from twell_numba.device.threads import run_ranges
from twell_numba.kernels.activation_functions import activation_number
from twell_numba.kernels.checks import float_inputs, require_shape
from twell_numba.kernels.ffn_checks import backward_inputs, forward_inputs, l1_scale_input
from twell_numba.kernels.twell.activations import PackedActivations

# Those that leave exact zeros.
ACTIVATIONS = ("relu", "relu2")
# Rows whose pre-activations a thread holds at a time: enough for BLAS to run at full speed.
PANEL_ROWS = 512
# Stored entries of one neuron handled at a time in the backward pass.
BLOCK_ENTRIES = 64
# Fewest rows and neurons that pay for waking another thread.
ROW_GRAIN = 16
NEURON_GRAIN = 64


def relu_pack(gate: np.ndarray, tile: int = 256, slots: int = 64) -> PackedActivations:
    """Pack ``relu(gate)`` as TwELL.

    Parameters
    ----------
    gate : ndarray of float32 or float64, shape (M, F)
    tile : int
        T, columns a tile; at most 65536.
    slots : int
        Entries a tile can hold. A row of which a tile holds more goes to the tail, whole.

    Returns
    -------
    PackedActivations
        Its ``pattern()`` is the :class:`~twell_numba.formats.TwELLMatrix`. NaN is kept, -0.0 is
        not.
    """
    _require_tile(tile, slots)
    (gate,) = float_inputs(gate=gate)
    require_shape("gate", gate, ("M", "F"))
    packed = _allocate(gate.shape[0], gate.shape[1], tile, slots, gate.dtype)
    tail: list[tuple[np.ndarray, np.ndarray]] = []
    run_ranges(
        lambda start, stop: _pack_panel(gate[start:stop], start, packed, tail, False),
        gate.shape[0],
        grain=ROW_GRAIN,
    )
    _collect_tail(packed, tail)
    return packed


def gated_ffn_forward(
    x: np.ndarray,
    gate_weight: np.ndarray,
    up_weight: np.ndarray,
    down_weight: np.ndarray,
    tile: int = 256,
    slots: int = 64,
    activation: str = "relu",
) -> tuple[np.ndarray, PackedActivations]:
    """Compute y = (relu(x Wg^T) * (x Wu^T)) Wd, reading up and down only where relu is positive.

    Parameters
    ----------
    x : ndarray of float32 or float64, shape (M, D)
    gate_weight, up_weight, down_weight : ndarray, shape (F, D)
        Neuron-major: row j belongs to neuron j.
    tile, slots : int
        TwELL's tile width and entries a tile.
    activation : {"relu", "relu2"}
        ``relu2`` squares what relu gives.

    Returns
    -------
    y : ndarray, shape (M, D)
    activations : PackedActivations
        What :func:`gated_ffn_backward` needs.

    Raises
    ------
    TypeError, ValueError
        If dtypes or shapes do not fit, or the activation leaves no zeros.
    """
    is_squared = _is_squared(activation)
    x, gate_weight, up_weight, down_weight = forward_inputs(
        x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight
    )
    _require_tile(tile, slots)
    packed = _allocate(x.shape[0], gate_weight.shape[0], tile, slots, x.dtype)
    packed.up_values = np.empty_like(packed.values)
    packed.up_tail = np.empty_like(packed.tail_values)
    y = np.empty_like(x)

    def gather(start: int, stop: int) -> None:
        _gated_forward_rows(
            x,
            up_weight,
            down_weight,
            packed.values,
            packed.columns,
            packed.counts,
            tile,
            packed.up_values,
            y,
            start,
            stop,
        )

    _forward_panels(x, gate_weight, packed, gather, is_squared)
    if packed.tail_rows.size:
        packed.up_tail = _times_transposed(x[packed.tail_rows], up_weight)
        y[packed.tail_rows] = _times(packed.tail_values * packed.up_tail, down_weight)
    return y, packed


def gated_ffn_backward(
    dy: np.ndarray,
    x: np.ndarray,
    gate_weight: np.ndarray,
    up_weight: np.ndarray,
    down_weight: np.ndarray,
    activations: PackedActivations,
    l1_scale: float,
    gate_grad: np.ndarray,
    up_grad: np.ndarray,
    down_grad: np.ndarray,
    activation: str = "relu",
) -> np.ndarray:
    """Differentiate :func:`gated_ffn_forward` over the stored entries.

    Parameters
    ----------
    dy : ndarray, shape (M, D)
    x, gate_weight, up_weight, down_weight
        As given to the forward pass.
    activations : PackedActivations
        From the forward pass.
    l1_scale : float
        dh grows by ``l1_scale * sign(h)``; lambda / (L M) for the L1 term of the loss.
    gate_grad, up_grad, down_grad : ndarray, shape (F, D)
        C-contiguous; changed in place: the gradients are added.
    activation : str
        As given to the forward pass.

    Returns
    -------
    dx : ndarray, shape (M, D)
    """
    is_squared = _is_squared(activation)
    x, gate_weight, up_weight, down_weight = forward_inputs(
        x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight
    )
    dy = backward_inputs(
        dy,
        x,
        (gate_weight, up_weight, down_weight),
        activations,
        PackedActivations,
        gate_grad=gate_grad,
        up_grad=up_grad,
        down_grad=down_grad,
    )
    packed, tile = activations, activations.tile
    scale = l1_scale_input(l1_scale, x.dtype)
    assert packed.up_values is not None, "activations of a gated FFN"
    assert packed.up_tail is not None, "activations of a gated FFN"
    d_gate_values, d_up_values = np.empty_like(packed.values), np.empty_like(packed.values)
    neuron_starts, entry_rows, entry_slots = _entries_by_neuron(packed)
    dx = np.empty_like(x)

    run_ranges(
        lambda start, stop: _gated_backward_neurons(
            dy,
            x,
            down_weight,
            scale,
            is_squared,
            packed.values,
            packed.up_values,
            neuron_starts,
            entry_rows,
            entry_slots,
            d_gate_values,
            d_up_values,
            gate_grad,
            up_grad,
            down_grad,
            start,
            stop,
        ),
        packed.neurons,
        grain=NEURON_GRAIN,
        parts_per_thread=8,
    )
    run_ranges(
        lambda start, stop: _gated_backward_rows(
            gate_weight,
            up_weight,
            d_gate_values,
            d_up_values,
            packed.columns,
            packed.counts,
            tile,
            dx,
            start,
            stop,
        ),
        x.shape[0],
        grain=ROW_GRAIN,
        parts_per_thread=8,
    )
    if packed.tail_rows.size:
        rows, gate, up = packed.tail_rows, packed.tail_values, packed.up_tail
        dy_tail, x_tail = dy[rows], x[rows]
        fires = ~(gate <= 0)
        hidden = gate * up
        d_hidden = _times_transposed(dy_tail, down_weight) + scale * np.sign(hidden)
        d_up = np.where(fires, d_hidden * gate, 0)
        d_gate = np.where(fires, d_hidden * up, 0)
        if is_squared:
            d_gate *= 2 * np.sqrt(gate)
        add_matmul(hidden.T, dy_tail, down_grad)
        add_matmul(d_up.T, x_tail, up_grad)
        add_matmul(d_gate.T, x_tail, gate_grad)
        dx[rows] = _times(d_up, up_weight) + _times(d_gate, gate_weight)
    return dx


def ffn_forward(
    x: np.ndarray,
    up_weight: np.ndarray,
    down_weight: np.ndarray,
    tile: int = 256,
    slots: int = 64,
    activation: str = "relu",
) -> tuple[np.ndarray, PackedActivations]:
    """Compute y = relu(x Wu^T) Wd, reading down only where relu is positive.

    Parameters and returns as :func:`gated_ffn_forward`, without the gate; the activations'
    ``values`` are h.
    """
    is_squared = _is_squared(activation)
    x, up_weight, down_weight = forward_inputs(x=x, up_weight=up_weight, down_weight=down_weight)
    _require_tile(tile, slots)
    packed = _allocate(x.shape[0], up_weight.shape[0], tile, slots, x.dtype)
    y = np.empty_like(x)

    def gather(start: int, stop: int) -> None:
        _gather_rows(
            down_weight, packed.values, packed.columns, packed.counts, tile, y, start, stop
        )

    _forward_panels(x, up_weight, packed, gather, is_squared)
    if packed.tail_rows.size:
        y[packed.tail_rows] = _times(packed.tail_values, down_weight)
    return y, packed


def ffn_backward(
    dy: np.ndarray,
    x: np.ndarray,
    up_weight: np.ndarray,
    down_weight: np.ndarray,
    activations: PackedActivations,
    l1_scale: float,
    up_grad: np.ndarray,
    down_grad: np.ndarray,
    activation: str = "relu",
) -> np.ndarray:
    """Differentiate :func:`ffn_forward` over the stored entries.

    Parameters and returns as :func:`gated_ffn_backward`, without the gate.
    """
    is_squared = _is_squared(activation)
    x, up_weight, down_weight = forward_inputs(x=x, up_weight=up_weight, down_weight=down_weight)
    gradients = {"up_grad": up_grad, "down_grad": down_grad}
    dy = backward_inputs(
        dy, x, (up_weight, down_weight), activations, PackedActivations, **gradients
    )
    packed, tile = activations, activations.tile
    scale = l1_scale_input(l1_scale, x.dtype)
    d_up_values = np.empty_like(packed.values)
    neuron_starts, entry_rows, entry_slots = _entries_by_neuron(packed)
    dx = np.empty_like(x)

    run_ranges(
        lambda start, stop: _backward_neurons(
            dy,
            x,
            down_weight,
            scale,
            is_squared,
            packed.values,
            neuron_starts,
            entry_rows,
            entry_slots,
            d_up_values,
            up_grad,
            down_grad,
            start,
            stop,
        ),
        packed.neurons,
        grain=NEURON_GRAIN,
        parts_per_thread=8,
    )
    run_ranges(
        lambda start, stop: _gather_rows(
            up_weight, d_up_values, packed.columns, packed.counts, tile, dx, start, stop
        ),
        x.shape[0],
        grain=ROW_GRAIN,
        parts_per_thread=8,
    )
    if packed.tail_rows.size:
        rows, hidden = packed.tail_rows, packed.tail_values
        dy_tail, x_tail = dy[rows], x[rows]
        d_hidden = _times_transposed(dy_tail, down_weight) + scale * np.sign(hidden)
        d_up = np.where(~(hidden <= 0), d_hidden, 0)
        if is_squared:
            d_up *= 2 * np.sqrt(hidden)
        add_matmul(hidden.T, dy_tail, down_grad)
        add_matmul(d_up.T, x_tail, up_grad)
        dx[rows] = _times(d_up, up_weight)
    return dx


def activation_statistics(activations: PackedActivations) -> tuple[int, float, np.ndarray]:
    """Measure how sparse the activations are.

    Returns
    -------
    nonzeros : int
        Entries with h != 0 (a stored h can be 0 where u is 0).
    absolute_sum : float
        Sum of |h|, in float64.
    fired : ndarray of bool, shape (F,)
        Whether the neuron's h was not 0 for at least one row.
    """
    packed = activations
    fired = np.zeros(packed.neurons, np.bool_)
    gated = packed.up_values is not None
    nonzeros, absolute_sum = _statistics(
        packed.values,
        packed.up_values if gated else packed.values,
        gated,
        packed.columns,
        packed.counts,
        packed.tile,
        fired,
    )
    if packed.tail_rows.size:
        hidden = packed.tail_values
        if packed.up_tail is not None:
            hidden = hidden * packed.up_tail
        nonzero = hidden != 0
        nonzeros += int(np.count_nonzero(nonzero))
        absolute_sum += float(np.abs(hidden).sum(dtype=np.float64))
        fired |= nonzero.any(axis=0)
    return nonzeros, absolute_sum, fired


# ---- Checks and allocation


def _is_squared(activation: str) -> bool:
    activation_number(activation, ACTIVATIONS)
    return activation == "relu2"


def _require_tile(tile: int, slots: int) -> None:
    if not 1 <= tile <= 65536:
        raise ValueError(
            f"tile={tile} given, 1 to 65536 wanted: columns in a tile are 16 bits wide"
        )
    if not 1 <= slots <= tile:
        raise ValueError(f"slots={slots} given, 1 to tile={tile} wanted")


def _allocate(rows: int, neurons: int, tile: int, slots: int, dtype: np.dtype) -> PackedActivations:
    """Return activations of a two-matrix layer with room for every entry and an empty tail."""
    tiles = -(-neurons // tile)
    return PackedActivations(
        neurons=neurons,
        tile=tile,
        slots=slots,
        values=np.empty((rows, tiles * slots), dtype),
        columns=np.empty((rows, tiles * slots), np.uint16),
        counts=np.empty((rows, tiles), np.int32),
        up_values=None,
        tail_rows=np.empty(0, np.int64),
        tail_values=np.empty((0, neurons), dtype),
    )


# ---- Products of the tail's rows, of which there may be few


def _times_transposed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return few_rows_product(x, weight) if len(x) <= FEW_ROWS else matmul(x, weight.T)


def _times(h: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return few_rows_combination(h, weight) if len(h) <= FEW_ROWS else matmul(h, weight)


# ---- Forward, by panels of rows


def _forward_panels(
    x: np.ndarray,
    weight: np.ndarray,
    packed: PackedActivations,
    gather: Callable[[int, int], None],
    is_squared: bool,
) -> None:
    """Multiply by ``weight``, pack and gather, a panel of rows at a time on every thread."""
    rows, neurons = x.shape[0], weight.shape[0]
    tail: list[tuple[np.ndarray, np.ndarray]] = []
    if rows <= FEW_ROWS or x.size * neurons < SMALL_PRODUCT:
        product = few_rows_product(x, weight) if rows <= FEW_ROWS else np.matmul(x, weight.T)
        _pack_panel(product, 0, packed, tail, is_squared)
        gather(0, rows)
        _collect_tail(packed, tail)
        return

    def work(start: int, stop: int) -> None:
        buffer = np.empty((min(PANEL_ROWS, stop - start), neurons), x.dtype)
        for first in range(start, stop, PANEL_ROWS):
            last = min(first + PANEL_ROWS, stop)
            panel = buffer[: last - first]
            np.matmul(x[first:last], weight.T, out=panel)
            _pack_panel(panel, first, packed, tail, is_squared)
            gather(first, last)

    with single_threaded_blas():
        run_ranges(work, rows, grain=ROW_GRAIN)
    _collect_tail(packed, tail)


def _pack_panel(
    panel: np.ndarray,
    first_row: int,
    packed: PackedActivations,
    tail: list[tuple[np.ndarray, np.ndarray]],
    is_squared: bool,
) -> None:
    """Pack some rows; those that overflow are emptied and their relu is appended to ``tail``."""
    overflows = _pack_rows(
        panel,
        first_row,
        packed.tile,
        packed.slots,
        is_squared,
        packed.values,
        packed.columns,
        packed.counts,
    )
    if overflows:
        counts = packed.counts[first_row : first_row + panel.shape[0]]
        rows = np.flatnonzero((counts > packed.slots).any(axis=1))
        counts[rows] = 0
        values = np.maximum(panel[rows], 0)
        tail.append((first_row + rows, values * values if is_squared else values))


def _collect_tail(packed: PackedActivations, tail: list[tuple[np.ndarray, np.ndarray]]) -> None:
    if tail:
        tail.sort(key=lambda part: part[0][0])
        packed.tail_rows = np.concatenate([rows for rows, _ in tail])
        packed.tail_values = np.concatenate([values for _, values in tail])


@jit
def _pack_rows(panel, first_row, tile, slots, is_squared, values, columns, counts):
    """Pack the positive and NaN entries of each row; return how many tiles hold more than fit."""
    neurons = panel.shape[1]
    overflows = 0
    for row in range(panel.shape[0]):
        m = first_row + row
        for t in range(counts.shape[1]):
            start = t * tile
            stop = min(start + tile, neurons)
            vector_stop = stop - (stop - start) % LANES
            count = 0
            for j in range(start, vector_stop, LANES):
                mask = positive_mask(panel, row, j)
                while mask != 0:
                    k = j + lowest_bit(mask)
                    mask = np.uint16(mask & np.uint16(mask - np.uint16(1)))
                    if count < slots:
                        values[m, t * slots + count] = panel[row, k]
                        columns[m, t * slots + count] = np.uint16(k - start)
                    count += 1
            for k in range(vector_stop, stop):
                if not panel[row, k] <= 0:
                    if count < slots:
                        values[m, t * slots + count] = panel[row, k]
                        columns[m, t * slots + count] = np.uint16(k - start)
                    count += 1
            counts[m, t] = count
            if is_squared:
                for place in range(t * slots, t * slots + min(count, slots)):
                    values[m, place] *= values[m, place]
            if count > slots:
                overflows += 1
    return overflows


@jit
def _gated_forward_rows(
    x, up_weight, down_weight, values, columns, counts, tile, up_values, y, start, stop
):
    capacity = values.shape[1]
    neurons = np.empty(capacity, np.int64)
    places = np.empty(capacity, np.int64)
    up = np.empty(capacity, x.dtype)
    for m in range(start, stop):
        count = _row_entries(columns, counts, tile, m, neurons, places)
        _gather_dots(x[m], up_weight, neurons, count, up)
        for i in range(count):
            up_values[m, places[i]] = up[i]
            up[i] *= values[m, places[i]]
        y[m, :] = 0
        _gather_sum(up, down_weight, neurons, count, y[m])


@jit
def _gather_rows(weight, values, columns, counts, tile, y, start, stop):
    """y[m] = the sum over row m's entries of value * weight[neuron]."""
    capacity = values.shape[1]
    neurons = np.empty(capacity, np.int64)
    places = np.empty(capacity, np.int64)
    coefficients = np.empty(capacity, y.dtype)
    for m in range(start, stop):
        count = _row_entries(columns, counts, tile, m, neurons, places)
        for i in range(count):
            coefficients[i] = values[m, places[i]]
        y[m, :] = 0
        _gather_sum(coefficients, weight, neurons, count, y[m])


@jit
def _row_entries(columns, counts, tile, m, neurons, places):
    """List row m's entries: the neuron and the place in the row of each; return their number."""
    slots = columns.shape[1] // max(counts.shape[1], 1)
    count = 0
    for t in range(counts.shape[1]):
        for place in range(t * slots, t * slots + counts[m, t]):
            neurons[count] = t * tile + np.int64(columns[m, place])
            places[count] = place
            count += 1
    return count


# ---- Backward, by neuron and then by row


def _entries_by_neuron(packed: PackedActivations) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """List every stored entry under its neuron, rows ascending.

    Returns
    -------
    neuron_starts : ndarray of int64, shape (F + 1,)
    entry_rows, entry_slots : ndarray of int64, shape (nnz,)
        The entry's row and place in the row.
    """
    tile_starts = np.zeros(packed.counts.shape[1] + 1, np.int64)
    np.cumsum(packed.counts.sum(axis=0, dtype=np.int64), out=tile_starts[1:])
    entries = int(tile_starts[-1])
    neuron_starts = np.empty(packed.neurons + 1, np.int64)
    neuron_starts[-1] = entries
    entry_rows = np.empty(entries, np.int64)
    entry_slots = np.empty(entries, np.int64)
    run_ranges(
        lambda start, stop: _list_tiles(
            packed.columns,
            packed.counts,
            packed.tile,
            tile_starts,
            neuron_starts,
            entry_rows,
            entry_slots,
            start,
            stop,
        ),
        packed.counts.shape[1],
    )
    return neuron_starts, entry_rows, entry_slots


@jit
def _list_tiles(
    columns, counts, tile, tile_starts, neuron_starts, entry_rows, entry_slots, start, stop
):
    """Counting sort of each tile's entries by neuron; a tile's neurons are nobody else's."""
    slots = columns.shape[1] // max(counts.shape[1], 1)
    next_entry = np.empty(tile, np.int64)
    for t in range(start, stop):
        next_entry[:] = 0
        for m in range(counts.shape[0]):
            for place in range(t * slots, t * slots + counts[m, t]):
                next_entry[columns[m, place]] += 1
        position = tile_starts[t]
        for offset in range(min(tile, neuron_starts.shape[0] - 1 - t * tile)):
            neuron_starts[t * tile + offset] = position
            count = next_entry[offset]
            next_entry[offset] = position
            position += count
        for m in range(counts.shape[0]):
            for place in range(t * slots, t * slots + counts[m, t]):
                entry = next_entry[columns[m, place]]
                next_entry[columns[m, place]] += 1
                entry_rows[entry] = m
                entry_slots[entry] = place


@jit
def _gated_backward_neurons(
    dy,
    x,
    down_weight,
    l1_scale,
    is_squared,
    values,
    up_values,
    neuron_starts,
    entry_rows,
    entry_slots,
    d_gate_values,
    d_up_values,
    gate_grad,
    up_grad,
    down_grad,
    start,
    stop,
):
    hidden = np.empty(BLOCK_ENTRIES, x.dtype)
    d_hidden = np.empty(BLOCK_ENTRIES, x.dtype)
    d_up = np.empty(BLOCK_ENTRIES, x.dtype)
    d_gate = np.empty(BLOCK_ENTRIES, x.dtype)
    for j in range(start, stop):
        for first in range(neuron_starts[j], neuron_starts[j + 1], BLOCK_ENTRIES):
            count = min(BLOCK_ENTRIES, neuron_starts[j + 1] - first)
            rows = entry_rows[first : first + count]
            places = entry_slots[first : first + count]
            _gather_dots(down_weight[j], dy, rows, count, d_hidden)
            for i in range(count):
                gate = values[rows[i], places[i]]
                up = up_values[rows[i], places[i]]
                hidden[i] = gate * up
                d_hidden[i] += l1_scale * np.sign(hidden[i])
                d_up[i] = d_hidden[i] * gate
                d_gate[i] = d_hidden[i] * up
                if is_squared:
                    root = np.sqrt(gate)
                    d_gate[i] *= root + root
                d_up_values[rows[i], places[i]] = d_up[i]
                d_gate_values[rows[i], places[i]] = d_gate[i]
            _gather_sum(hidden, dy, rows, count, down_grad[j])
            _gather_sum(d_up, x, rows, count, up_grad[j])
            _gather_sum(d_gate, x, rows, count, gate_grad[j])


@jit
def _gated_backward_rows(
    gate_weight, up_weight, d_gate_values, d_up_values, columns, counts, tile, dx, start, stop
):
    capacity = d_up_values.shape[1]
    neurons = np.empty(capacity, np.int64)
    places = np.empty(capacity, np.int64)
    d_gate = np.empty(capacity, dx.dtype)
    d_up = np.empty(capacity, dx.dtype)
    for m in range(start, stop):
        count = _row_entries(columns, counts, tile, m, neurons, places)
        for i in range(count):
            d_gate[i] = d_gate_values[m, places[i]]
            d_up[i] = d_up_values[m, places[i]]
        dx[m, :] = 0
        _gather_sum(d_up, up_weight, neurons, count, dx[m])
        _gather_sum(d_gate, gate_weight, neurons, count, dx[m])


@jit
def _backward_neurons(
    dy,
    x,
    down_weight,
    l1_scale,
    is_squared,
    values,
    neuron_starts,
    entry_rows,
    entry_slots,
    d_up_values,
    up_grad,
    down_grad,
    start,
    stop,
):
    hidden = np.empty(BLOCK_ENTRIES, x.dtype)
    d_up = np.empty(BLOCK_ENTRIES, x.dtype)
    for j in range(start, stop):
        for first in range(neuron_starts[j], neuron_starts[j + 1], BLOCK_ENTRIES):
            count = min(BLOCK_ENTRIES, neuron_starts[j + 1] - first)
            rows = entry_rows[first : first + count]
            places = entry_slots[first : first + count]
            _gather_dots(down_weight[j], dy, rows, count, d_up)
            for i in range(count):
                hidden[i] = values[rows[i], places[i]]
                d_up[i] += l1_scale * np.sign(hidden[i])
                if is_squared:
                    root = np.sqrt(hidden[i])
                    d_up[i] *= root + root
                d_up_values[rows[i], places[i]] = d_up[i]
            _gather_sum(hidden, dy, rows, count, down_grad[j])
            _gather_sum(d_up, x, rows, count, up_grad[j])


@jit
def _statistics(values, up_values, gated, columns, counts, tile, fired):
    slots = columns.shape[1] // max(counts.shape[1], 1)
    nonzeros = 0
    absolute_sum = 0.0
    for m in range(counts.shape[0]):
        for t in range(counts.shape[1]):
            for place in range(t * slots, t * slots + counts[m, t]):
                hidden = values[m, place]
                if gated:
                    hidden *= up_values[m, place]
                if hidden != 0:
                    nonzeros += 1
                    absolute_sum += abs(hidden)
                    fired[t * tile + np.int64(columns[m, place])] = True
    return nonzeros, absolute_sum


# ---- The two primitives: rows of a matrix chosen by a list, four at a time so that what all four
# ---- share is loaded once


@jit
def _gather_dots(vector, matrix, chosen, count, dots):
    """dots[i] = vector . matrix[chosen[i]] for i < count."""
    zero = vector.dtype.type(0)
    grouped = count - count % 4
    for i in range(0, grouped, 4):
        row0 = matrix[chosen[i]]
        row1 = matrix[chosen[i + 1]]
        row2 = matrix[chosen[i + 2]]
        row3 = matrix[chosen[i + 3]]
        dot0 = zero
        dot1 = zero
        dot2 = zero
        dot3 = zero
        for k in range(vector.shape[0]):
            dot0 += vector[k] * row0[k]
            dot1 += vector[k] * row1[k]
            dot2 += vector[k] * row2[k]
            dot3 += vector[k] * row3[k]
        dots[i] = dot0
        dots[i + 1] = dot1
        dots[i + 2] = dot2
        dots[i + 3] = dot3
    for i in range(grouped, count):
        row = matrix[chosen[i]]
        dot = zero
        for k in range(vector.shape[0]):
            dot += vector[k] * row[k]
        dots[i] = dot


@jit
def _gather_sum(coefficients, matrix, chosen, count, total):
    """total += the sum over i < count of coefficients[i] * matrix[chosen[i]]."""
    grouped = count - count % 4
    for i in range(0, grouped, 4):
        row0 = matrix[chosen[i]]
        row1 = matrix[chosen[i + 1]]
        row2 = matrix[chosen[i + 2]]
        row3 = matrix[chosen[i + 3]]
        c0 = coefficients[i]
        c1 = coefficients[i + 1]
        c2 = coefficients[i + 2]
        c3 = coefficients[i + 3]
        for k in range(total.shape[0]):
            total[k] += (c0 * row0[k] + c1 * row1[k]) + (c2 * row2[k] + c3 * row3[k])
    for i in range(grouped, count):
        row = matrix[chosen[i]]
        c = coefficients[i]
        for k in range(total.shape[0]):
            total[k] += c * row[k]
