"""Activation-sparse feedforward layers on a GPU, forward and backward.

Gated:       g = x Wg^T,  u = x Wu^T,  h = relu(g) * u,  y = h Wd
Two-matrix:  h = relu(x Wu^T),  y = h Wd

as on the CPU (:mod:`twell_numba.kernels.twell.cpu`, whose formulas these are): one dense product,
packed as TwELL, then only rows of the weights that belong to stored entries.

Rows of which a tile overflows, the *tail*, are read from the dense product itself, which is kept
for them: what is computed is exact at any density, nothing waits for the GPU, and all of it can be
recorded in a graph. ``compact_tail`` keeps the tail's rows alone, which takes one wait.

Two sets of kernels work on the entries: a block holds a row in registers where D and the arrays'
alignment allow it (:mod:`cuda_rows`); otherwise a warp takes a row, or a part of a neuron's
gradients (:mod:`cuda_forward`, :mod:`cuda_backward`). The tail has kernels of its own
(:mod:`cuda_tail`). Every sum is in a fixed order, without atomics: the same bits in every run.
"""

from typing import Any

import numpy as np

from twell_numba.device.gpu import DeviceArray, empty, zeros
from twell_numba.device.gpu.gemm import matmul
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.cuda_scalars import scalar_on_gpu
from twell_numba.kernels.cuda_statistics import add_statistics as add_statistics
from twell_numba.kernels.cuda_statistics import statistics_on_gpu
from twell_numba.kernels.device_checks import arithmetic_dtype, float_arrays
from twell_numba.kernels.device_ffn_checks import backward_arrays, forward_arrays
from twell_numba.kernels.twell.cuda_activations import DeviceActivations
from twell_numba.kernels.twell.cuda_backward import (
    add_gradients,
    backward_rows,
)
from twell_numba.kernels.twell.cuda_by_neuron import (
    CHUNK_ROWS,
    FEWEST_ENTRIES,
    MOST_PARTS,
    TILE_THREADS,
    add_chunks,
    add_neurons,
    list_entries,
    mark_entries,
)
from twell_numba.kernels.twell.cuda_forward import forward_rows
from twell_numba.kernels.twell.cuda_pack import (
    TILE_OF_A_WARP,
    copy_rows,
    count_rows,
    list_tail,
    mark_tail,
    pack_rows,
    pack_tiles,
)
from twell_numba.kernels.twell.cuda_rows import (
    add_gradients_of_part,
    add_parts,
    backward_row,
    fits,
    forward_row,
)
from twell_numba.kernels.twell.cuda_tail import (
    tail_d_hidden,
    tail_gradients,
    tail_inputs,
    tail_outputs,
    tail_up,
)

# Blocks that work on the tail, at most, for each multiprocessor.
TAIL_BLOCKS = 8


def relu_pack(
    gate: DeviceArray, tile: int = 256, slots: int = 64, *, compact_tail: bool = False
) -> DeviceActivations:
    """Pack ``relu(gate)`` as TwELL.

    Parameters
    ----------
    gate : DeviceArray, shape (M, F)
        Unless ``compact_tail``, the result goes on using it: do not overwrite it.
    tile : int
        T, columns a tile; at most 65536.
    slots : int
        Entries a tile can hold. A row of which a tile holds more goes to the tail, whole.
    compact_tail : bool
        Copy the tail's rows instead of keeping ``gate``; waits for the GPU once.

    Returns
    -------
    DeviceActivations
        NaN is kept, -0.0 is not.

    Raises
    ------
    TypeError
        If ``gate`` is no DeviceArray of floats.
    ValueError
        If it has another number of dimensions, or ``tile`` or ``slots`` is out of range.
    """
    _require_tile(tile, slots)
    float_arrays(gate=gate)
    require_shape("gate", gate, ("M", "F"))  # type: ignore[arg-type]
    return _pack(gate, tile, slots, gated=False, compact_tail=compact_tail)


def gated_ffn_forward(
    x: DeviceArray,
    gate_weight: DeviceArray,
    up_weight: DeviceArray,
    down_weight: DeviceArray,
    tile: int = 256,
    slots: int = 64,
    *,
    compact_tail: bool = False,
) -> tuple[DeviceArray, DeviceActivations]:
    """Compute y = (relu(x Wg^T) * (x Wu^T)) Wd, reading up and down only where relu is positive.

    Parameters
    ----------
    x : DeviceArray, shape (M, D)
        float32, bfloat16, float16 or float64; sums are in float32 or wider.
    gate_weight, up_weight, down_weight : DeviceArray, shape (F, D)
        Neuron-major: row j belongs to neuron j. Of x's dtype.
    tile, slots : int
        TwELL's tile width and entries a tile.
    compact_tail : bool
        Keep rows of which a tile overflows, instead of the whole x Wg^T, for the backward pass;
        waits for the GPU once.

    Returns
    -------
    y : DeviceArray, shape (M, D)
    activations : DeviceActivations
        What :func:`gated_ffn_backward` needs.

    Raises
    ------
    TypeError
        If the dtypes differ or are not floats.
    ValueError
        If shapes do not fit together, arrays are on different GPUs, or ``tile`` or ``slots`` is out
        of range.
    """
    _require_tile(tile, slots)
    forward_arrays(x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
    gate = matmul(x, gate_weight, transpose_b=True)
    activations = _pack(gate, tile, slots, gated=True, compact_tail=compact_tail)
    return _forward(x, up_weight, down_weight, activations), activations


def gated_ffn_backward(
    dy: DeviceArray,
    x: DeviceArray,
    gate_weight: DeviceArray,
    up_weight: DeviceArray,
    down_weight: DeviceArray,
    activations: DeviceActivations,
    l1_scale: float | DeviceArray,
    gate_grad: DeviceArray,
    up_grad: DeviceArray,
    down_grad: DeviceArray,
) -> DeviceArray:
    """Differentiate :func:`gated_ffn_forward` over the stored entries.

    Parameters
    ----------
    dy : DeviceArray, shape (M, D)
    x, gate_weight, up_weight, down_weight
        As given to the forward pass.
    activations : DeviceActivations
        From the forward pass.
    l1_scale : float, or DeviceArray of float32, shape (1,)
        dh grows by ``l1_scale * sign(h)``; lambda / (L M) for the L1 term of the loss.
    gate_grad, up_grad, down_grad : DeviceArray, shape (F, D)
        Of x's dtype, or float32 for x in 16 bits; changed in place: the gradients are added.

    Returns
    -------
    dx : DeviceArray, shape (M, D)

    Raises
    ------
    TypeError, ValueError
        As :func:`gated_ffn_forward`; also if the activations are not those of this x, or two
        gradients are one array.
    """
    *_, neurons = forward_arrays(
        x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight
    )
    gradients = {"gate_grad": gate_grad, "up_grad": up_grad, "down_grad": down_grad}
    backward_arrays(dy, x, neurons, activations, DeviceActivations, **gradients)
    _require_gate(activations, is_wanted=True)
    weights = (gate_weight, up_weight, down_weight)
    return _backward(dy, x, weights, activations, l1_scale, (gate_grad, up_grad, down_grad))


def ffn_forward(
    x: DeviceArray,
    up_weight: DeviceArray,
    down_weight: DeviceArray,
    tile: int = 256,
    slots: int = 64,
    *,
    compact_tail: bool = False,
) -> tuple[DeviceArray, DeviceActivations]:
    """Compute y = relu(x Wu^T) Wd, reading down only where relu is positive.

    Parameters, returns and errors as :func:`gated_ffn_forward`, without the gate; the activations'
    ``values`` are h.
    """
    _require_tile(tile, slots)
    forward_arrays(x=x, up_weight=up_weight, down_weight=down_weight)
    up = matmul(x, up_weight, transpose_b=True)
    activations = _pack(up, tile, slots, gated=False, compact_tail=compact_tail)
    return _forward(x, up_weight, down_weight, activations), activations


def ffn_backward(
    dy: DeviceArray,
    x: DeviceArray,
    up_weight: DeviceArray,
    down_weight: DeviceArray,
    activations: DeviceActivations,
    l1_scale: float | DeviceArray,
    up_grad: DeviceArray,
    down_grad: DeviceArray,
) -> DeviceArray:
    """Differentiate :func:`ffn_forward` over the stored entries.

    Parameters, returns and errors as :func:`gated_ffn_backward`, without the gate.
    """
    *_, neurons = forward_arrays(x=x, up_weight=up_weight, down_weight=down_weight)
    gradients = {"up_grad": up_grad, "down_grad": down_grad}
    backward_arrays(dy, x, neurons, activations, DeviceActivations, **gradients)
    _require_gate(activations, is_wanted=False)
    weights = (up_weight, up_weight, down_weight)
    return _backward(dy, x, weights, activations, l1_scale, (up_grad, up_grad, down_grad))


def activation_statistics(activations: DeviceActivations) -> tuple[int, float, np.ndarray]:
    """Measure how sparse the activations are; waits for the GPU.

    Returns
    -------
    nonzeros : int
        Entries with h != 0 (a stored h can be 0 where u is 0).
    absolute_sum : float
        Sum of |h|, over the rows in float64.
    fired : ndarray of bool, shape (F,)
        Whether the neuron's h was not 0 for at least one row.
    """
    totals, fired = activation_statistics_on_gpu(activations)
    nonzeros, absolute_sum = totals.to_numpy()
    return int(nonzeros), float(absolute_sum), fired.to_numpy()


def activation_statistics_on_gpu(
    activations: DeviceActivations,
) -> tuple[DeviceArray, DeviceArray]:
    """Return what :func:`activation_statistics` does, without waiting.

    Returns
    -------
    totals : DeviceArray of float64, shape (2,)
        The count of h != 0 and the sum of |h|.
    fired : DeviceArray of bool, shape (F,)
    """
    totals = statistics_on_gpu(activations.row_nonzeros, activations.row_absolute_sums)
    return totals, activations.fired


# ---- Checks


def _require_tile(tile: int, slots: int) -> None:
    if not 1 <= tile <= 65536:
        raise ValueError(
            f"tile={tile} given, 1 to 65536 wanted: columns in a tile are 16 bits wide"
        )
    if not 1 <= slots <= tile:
        raise ValueError(f"slots={slots} given, 1 to tile={tile} wanted")


def _require_gate(activations: Any, *, is_wanted: bool) -> None:
    if isinstance(activations, DeviceActivations) and activations.gated != is_wanted:
        given, wanted = ("a", "no") if activations.gated else ("no", "a")
        raise ValueError(
            f"activations of a layer with {given} gate given, with {wanted} gate wanted"
        )


# ---- What is launched


def _pack(
    gate: DeviceArray, tile: int, slots: int, *, gated: bool, compact_tail: bool
) -> DeviceActivations:
    rows, neurons = gate.shape
    tiles, stream = -(-neurons // tile), gate.stream
    sums = arithmetic_dtype(gate.dtype)
    places = (rows, tiles * slots)
    overflows = zeros(-(-rows // 32), np.int32, stream)  # a bit a row
    packed = DeviceActivations(
        neurons=neurons,
        tile=tile,
        slots=slots,
        gated=gated,
        values=empty(places, gate.dtype, stream),
        columns=empty(places, np.uint16, stream),
        counts=empty((rows, tiles), np.int32, stream),
        up_values=empty(places if gated else (0, 0), gate.dtype, stream),
        tail_rows=empty(rows, np.int32, stream),
        tail_count=zeros(1, np.int32, stream),
        tail_values=gate,
        is_compact=False,
        row_nonzeros=empty(rows, np.int32, stream),
        row_absolute_sums=empty(rows, sums, stream),
        fired=zeros(neurons, np.bool_, stream),
    )
    layout = (rows, neurons, tile, tiles, slots)
    arrays = (packed.values, packed.columns, packed.counts)
    if tile == TILE_OF_A_WARP and _is_aligned(gate):
        blocks = pack_rows.blocks_of_warps(rows)
        pack_rows(blocks, gate, *arrays, overflows, rows, neurons, tiles, slots)
    else:
        pack_tiles(pack_tiles.blocks_of_warps(rows * tiles), gate, *arrays, *layout)
        mark_tail(mark_tail.blocks(rows), packed.counts, overflows, rows, tiles, slots)
    if rows:
        list_tail(1, overflows, packed.tail_rows, packed.tail_count, overflows.size)
    if not gated:
        statistics = (packed.row_nonzeros, packed.row_absolute_sums, packed.fired)
        count_rows(count_rows.blocks_of_warps(rows), *arrays, gate, overflows, *statistics, *layout)
    if compact_tail:
        _make_tail_compact(packed, gate)
    return packed


def _make_tail_compact(packed: DeviceActivations, gate: DeviceArray) -> None:
    count = int(packed.tail_count.to_numpy()[0])
    tail = empty((count, packed.neurons), gate.dtype, gate.stream)
    copy_rows(copy_rows.blocks(tail.size), gate, packed.tail_rows, tail, count, packed.neurons)
    packed.tail_values, packed.is_compact = tail, True


def _tail_blocks(packed: DeviceActivations, items: int) -> int:
    """Return how many blocks work on so many items of the tail; an item takes a block or less."""
    return min(items, TAIL_BLOCKS * packed.values.gpu.multiprocessors)


def _is_aligned(*arrays: DeviceArray) -> int:
    """Return whether all rows can be read and written eight numbers at a time."""
    return int(all(a.shape[1] % 8 == 0 and a.pointer % 16 == 0 for a in arrays))


def _forward(
    x: DeviceArray, up_weight: DeviceArray, down_weight: DeviceArray, packed: DeviceActivations
) -> DeviceArray:
    rows, width = x.shape
    y = empty(x.shape, x.dtype, x.stream)
    statistics = (packed.row_nonzeros, packed.row_absolute_sums, packed.fired)
    is_aligned = _is_aligned(x, up_weight, down_weight)
    entries = (packed.values, packed.columns, packed.counts, packed.up_values)
    arrays = (x, up_weight, down_weight, *entries, y, *statistics)
    layout = (packed.tile, packed.tiles, packed.slots)
    if is_aligned and fits(width):
        forward_row(width, packed.gated)(rows, *arrays, *layout)
    else:
        blocks = forward_rows.blocks_of_warps(rows)
        forward_rows(blocks, *arrays, rows, width, *layout, int(packed.gated), is_aligned)
    _forward_tail(x, up_weight, down_weight, packed, y, is_aligned)
    return y


def _forward_tail(
    x: DeviceArray,
    up_weight: DeviceArray,
    down_weight: DeviceArray,
    packed: DeviceActivations,
    y: DeviceArray,
    is_aligned: int,
) -> None:
    """Compute y, and what rows of h hold, for rows of the tail."""
    tail = (packed.tail_values, packed.tail_rows, packed.tail_count)
    statistics = (packed.row_nonzeros, packed.row_absolute_sums, packed.fired)
    layout = (packed.neurons, x.shape[1], int(packed.is_compact))
    up = _tail_up(x, up_weight, packed, is_aligned)
    blocks = _tail_blocks(packed, packed.tail_values.shape[0] * -(-x.shape[1] // 256))
    gated = int(packed.gated)
    tail_outputs(blocks, down_weight, *tail, up, y, *statistics, *layout, gated, is_aligned)


def _tail_up(
    x: DeviceArray, up_weight: DeviceArray, packed: DeviceActivations, is_aligned: int
) -> DeviceArray:
    """Return u of rows of the tail; without a gate, an array without elements."""
    tail = (packed.tail_values, packed.tail_rows, packed.tail_count)
    rows, neurons = packed.tail_values.shape
    up = empty((rows, neurons) if packed.gated else (0, 0), x.dtype, x.stream)
    if packed.gated:
        layout = (neurons, x.shape[1], int(packed.is_compact), is_aligned)
        tail_up(_tail_blocks(packed, rows * -(-neurons // 32)), x, up_weight, *tail, up, *layout)
    return up


def _backward_tail(
    dy: DeviceArray,
    x: DeviceArray,
    weights: tuple[DeviceArray, DeviceArray, DeviceArray],
    packed: DeviceActivations,
    l1_scale: DeviceArray,
    gradients: tuple[DeviceArray, DeviceArray, DeviceArray],
    dx: DeviceArray,
    is_aligned: int,
) -> None:
    """Compute dx for rows of the tail, and add what they give to the gradients."""
    pattern_weight, up_weight, down_weight = weights
    tail = (packed.tail_values, packed.tail_rows, packed.tail_count)
    rows, neurons = packed.tail_values.shape
    chunks = -(-x.shape[1] // 256)
    layout = (neurons, x.shape[1], int(packed.is_compact), int(packed.gated), is_aligned)
    up = _tail_up(x, up_weight, packed, is_aligned)
    d_hidden = empty((rows, neurons), x.dtype, x.stream)
    blocks = _tail_blocks(packed, rows * -(-neurons // 32))
    tail_d_hidden(blocks, dy, down_weight, *tail, l1_scale, up, d_hidden, *layout)
    blocks = _tail_blocks(packed, rows * chunks)
    tail_inputs(blocks, pattern_weight, up_weight, *tail, up, d_hidden, dx, *layout)
    blocks = _tail_blocks(packed, neurons * chunks if rows else 0)
    tail_gradients(blocks, dy, x, *tail, up, d_hidden, *gradients, *layout)


def _backward(
    dy: DeviceArray,
    x: DeviceArray,
    weights: tuple[DeviceArray, DeviceArray, DeviceArray],
    packed: DeviceActivations,
    l1_scale: float | DeviceArray,
    gradients: tuple[DeviceArray, DeviceArray, DeviceArray],
) -> DeviceArray:
    """Return dx; without a gate, Wu and its gradient stand in for the gate's."""
    scale = scalar_on_gpu("l1_scale", l1_scale, arithmetic_dtype(x.dtype), x)
    is_aligned = _is_aligned(dy, x, *weights, *gradients)
    dx = empty(x.shape, x.dtype, x.stream)
    if is_aligned and fits(x.shape[1]):
        _backward_in_registers(dy, x, weights, packed, scale, gradients, dx)
    else:
        _backward_by_warps(dy, x, weights, packed, scale, gradients, dx, is_aligned)
    _backward_tail(dy, x, weights, packed, scale, gradients, dx, is_aligned)
    return dx


def _backward_in_registers(
    dy: DeviceArray,
    x: DeviceArray,
    weights: tuple[DeviceArray, DeviceArray, DeviceArray],
    packed: DeviceActivations,
    l1_scale: DeviceArray,
    gradients: tuple[DeviceArray, DeviceArray, DeviceArray],
    dx: DeviceArray,
) -> None:
    """Add to the gradients and compute dx for rows that are not in the tail (for others, 0)."""
    (rows, width), neurons = x.shape, packed.neurons
    sums = arithmetic_dtype(x.dtype)
    d_hidden = empty(packed.values.shape, sums, x.stream)
    if rows and neurons:
        lists = _list_by_neuron(packed)
        _, part_starts, part_neurons, *_ = lists
        part_sums = empty((MOST_PARTS, 3, width), sums, x.stream)
        arrays = (dy, x, weights[2], packed.values, packed.up_values, l1_scale, d_hidden)
        add_gradients_of_part(width, packed.gated)(
            part_neurons.size, *arrays, *lists, *gradients, part_sums, neurons,
            packed.tiles * packed.slots,
        )  # fmt: skip
        gated = int(packed.gated)
        add_parts(neurons, part_sums, part_starts, *gradients, neurons, width, gated)
    backward_row(width, packed.gated)(
        rows, *weights[:2], packed.values, packed.columns, packed.counts, packed.up_values,
        d_hidden, dx, packed.tile, packed.tiles, packed.slots,
    )  # fmt: skip


def _backward_by_warps(
    dy: DeviceArray,
    x: DeviceArray,
    weights: tuple[DeviceArray, DeviceArray, DeviceArray],
    packed: DeviceActivations,
    l1_scale: DeviceArray,
    gradients: tuple[DeviceArray, DeviceArray, DeviceArray],
    dx: DeviceArray,
    is_aligned: int,
) -> None:
    """Do the same with rows of any width."""
    (rows, width), neurons, gated = x.shape, packed.neurons, int(packed.gated)
    d_hidden = empty(packed.values.shape, arithmetic_dtype(x.dtype), x.stream)
    backward_rows(
        backward_rows.blocks_of_warps(rows), dy, *weights, packed.values, packed.columns,
        packed.counts, packed.up_values, l1_scale, d_hidden, dx, rows, width, packed.tile,
        packed.tiles, packed.slots, gated, is_aligned,
    )  # fmt: skip
    if rows and neurons and width:
        starts, _, _, *entries = _list_by_neuron(packed)
        add_gradients(
            add_gradients.blocks_of_warps(neurons * -(-width // 256)), dy, x, packed.values,
            packed.up_values, d_hidden, starts, *entries, *gradients, neurons, width,
            packed.tiles * packed.slots, gated, is_aligned,
        )  # fmt: skip


def _list_by_neuron(packed: DeviceActivations) -> tuple[DeviceArray, ...]:
    """List every packed entry under its neuron, rows ascending.

    Returns
    -------
    neuron_starts : DeviceArray of int64, shape (F + 1,)
    part_starts : DeviceArray of int32, shape (F + 2,)
        Of each neuron's parts of its list, and of how many entries a part has at most.
    part_neurons : DeviceArray of int32, shape (F + MOST_PARTS,)
        Each part's neuron; as many as there are parts.
    entry_rows, entry_slots : DeviceArray of int32, shape (M * tiles * slots,)
        The entry's row and place in the row; as many as ``neuron_starts`` says.
    """
    (rows, neurons), stream = packed.shape, packed.values.stream
    chunks = -(-rows // CHUNK_ROWS)
    masks = zeros((chunks, neurons), np.int32, stream)
    places = empty((chunks, neurons), np.int32, stream)
    neuron_starts = empty(neurons + 1, np.int64, stream)
    part_starts = empty(neurons + 2, np.int32, stream)
    part_neurons = empty(neurons + MOST_PARTS, np.int32, stream)
    entry_rows = empty(packed.values.size, np.int32, stream)
    entry_slots = empty(packed.values.size, np.int32, stream)
    pattern = (packed.columns, packed.counts)
    layout = (rows, neurons, packed.tile, packed.tiles, packed.slots)
    blocks = mark_entries.blocks(rows * packed.tiles * TILE_THREADS)
    mark_entries(blocks, *pattern, masks, *layout)
    add_chunks(-(-neurons // 32), masks, places, neuron_starts, neurons, chunks)
    parts = (part_starts, part_neurons, neurons, FEWEST_ENTRIES, MOST_PARTS)
    add_neurons(1, neuron_starts, *parts)
    lists = (neuron_starts, entry_rows, entry_slots)
    list_entries(blocks, *pattern, masks, places, *lists, *layout)
    return neuron_starts, part_starts, part_neurons, entry_rows, entry_slots
