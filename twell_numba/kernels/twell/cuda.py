"""Activation-sparse feedforward layers on a GPU, forward and backward.

Gated:       g = x Wg^T,  u = x Wu^T,  h = relu(g) * u,  y = h Wd
Two-matrix:  h = relu(x Wu^T),  y = h Wd

as on the CPU (:mod:`twell_numba.kernels.twell.cpu`, whose formulas these are): one dense product,
packed as TwELL, then only rows of the weights that belong to stored entries.

Where tensor cores can, the product is packed by the kernel that computes it, and never reaches
memory: on Hopper GPUs in bfloat16 (:mod:`hopper_gate`), on those of compute capability 8 in 16 bits
(:mod:`cuda_gate`). Elsewhere NVIDIA's library computes it and another kernel packs it.

Rows of which a tile overflows, the *tail*, are exact, too, at any density; nothing waits for the
GPU, and all of it can be recorded in a graph. If the product is not in memory, the tail is computed
anew, as a dense layer of its rows alone (:mod:`dense_tail`). Otherwise the product is kept, and the
tail read from it (:mod:`cuda_tail`); ``compact_tail`` keeps the tail's rows alone, which takes one
wait.

Three sets of kernels work on the entries: strip by strip of the columns where D and the arrays'
alignment let eight numbers be read at a time (:mod:`strip_rows`, :mod:`entry_gradients`); otherwise
a warp takes a row, or a part of a neuron's gradients (:mod:`cuda_forward`, :mod:`cuda_backward`).
On Hopper GPUs blocks of tokens that need the same neurons can share them, by tensor cores
(:mod:`shared_neurons`): that is asked for, because it is faster for some patterns alone.
Every sum is in a fixed order, without atomics: the same bits in every run.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from twell_numba.device.gpu import DeviceArray, empty, view, zeros
from twell_numba.device.gpu.gemm import matmul
from twell_numba.device.gpu.tensor_cores import OLDEST_CAPABILITY as TENSOR_CORES
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.cuda_scalars import scalar_on_gpu
from twell_numba.kernels.cuda_statistics import add_statistics as add_statistics
from twell_numba.kernels.cuda_statistics import statistics_on_gpu
from twell_numba.kernels.device_checks import arithmetic_dtype, float_arrays, rows_are_aligned
from twell_numba.kernels.device_ffn_checks import backward_arrays, forward_arrays
from twell_numba.kernels.twell import (
    cuda_gate,
    dense_tail,
    hopper_gate,
    shared_neurons,
    strip_rows,
)
from twell_numba.kernels.twell.cuda_activations import DeviceActivations, TailSource
from twell_numba.kernels.twell.cuda_backward import (
    add_gradients,
    backward_rows,
)
from twell_numba.kernels.twell.cuda_decode import MOST_TOKENS, decode_forward
from twell_numba.kernels.twell.cuda_forward import forward_rows
from twell_numba.kernels.twell.cuda_pack import (
    TILE_OF_A_WARP,
    copy_rows,
    count_rows,
    list_tail_rows,
    mark_tail,
    pack_rows,
    pack_tiles,
)
from twell_numba.kernels.twell.cuda_pack import list_tail as list_tail  # tests look for it here
from twell_numba.kernels.twell.cuda_tail import (
    tail_d_hidden,
    tail_gradients,
    tail_inputs,
    tail_outputs,
    tail_up,
)
from twell_numba.kernels.twell.entry_transpose import list_by_neuron
from twell_numba.kernels.twell.token_groups import LearnedPattern, Sharing, order_tokens

# TwELL's layout unless another is asked for. Memory grows with the slots; in trained sparse models
# at most 28 of 256 neurons fire for a token.
TILE, SLOTS = 256, 32
# Blocks that work on the tail, at most, for each multiprocessor.
TAIL_BLOCKS = 8


def relu_pack(
    gate: DeviceArray, tile: int = TILE, slots: int = SLOTS, *, compact_tail: bool = False
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
    require_tile(tile, slots)
    float_arrays(gate=gate)
    require_shape("gate", gate, ("M", "F"))  # type: ignore[arg-type]
    return _pack_gate(gate, tile, slots, gated=False, compact_tail=compact_tail)


def gated_ffn_forward(
    x: DeviceArray,
    gate_weight: DeviceArray,
    up_weight: DeviceArray,
    down_weight: DeviceArray,
    tile: int = TILE,
    slots: int = SLOTS,
    *,
    compact_tail: bool = False,
    learned: LearnedPattern | None = None,
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
        Where x Wg^T is in memory, keep rows of which a tile overflows, instead of all of it, for
        the backward pass; this waits for the GPU once.
    learned : LearnedPattern, optional
        Let blocks of 128 tokens read each of their neurons' weights once, forward and backward,
        where :func:`shared_neurons.fits`: the faster, the more neurons they have in common. Tokens
        of a group come into a block. See :func:`learn_to_share`.

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
    require_tile(tile, slots)
    forward_arrays(x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
    if _is_decoding(x, tile, slots, compact_tail):
        return decode_forward(x, gate_weight, up_weight, down_weight)
    weights = (gate_weight, up_weight, down_weight)
    activations = pack_product(
        x, weights, tile, slots, gated=True, compact_tail=compact_tail,
        lists_tail=learned is None,
    )  # fmt: skip
    if learned is not None and shared_neurons.fits(x, up_weight, down_weight, activations):
        activations.token_order = order_tokens(activations, learned)
        activations.hot = learned.hot
    elif learned is not None and activations.tail_source is not None:
        _mark_tail(activations)
        list_tail_rows(activations)
    return forward_packed(x, up_weight, down_weight, activations), activations


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
        As :func:`gated_ffn_forward`; also if the activations are not those of this x, or a gradient
        shares memory with another, a weight, x or dy.
    """
    forward_arrays(x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
    gradients = {"gate_grad": gate_grad, "up_grad": up_grad, "down_grad": down_grad}
    weights = (gate_weight, up_weight, down_weight)
    backward_arrays(dy, x, weights, activations, DeviceActivations, **gradients)
    _require_gate(activations, is_wanted=True)
    return _backward(dy, x, weights, activations, l1_scale, (gate_grad, up_grad, down_grad))


def ffn_forward(
    x: DeviceArray,
    up_weight: DeviceArray,
    down_weight: DeviceArray,
    tile: int = TILE,
    slots: int = SLOTS,
    *,
    compact_tail: bool = False,
) -> tuple[DeviceArray, DeviceActivations]:
    """Compute y = relu(x Wu^T) Wd, reading down only where relu is positive.

    Parameters, returns and errors as :func:`gated_ffn_forward`, without the gate; the activations'
    ``values`` are h.
    """
    require_tile(tile, slots)
    forward_arrays(x=x, up_weight=up_weight, down_weight=down_weight)
    if _is_decoding(x, tile, slots, compact_tail):
        return decode_forward(x, None, up_weight, down_weight)
    weights = (up_weight, down_weight)
    activations = pack_product(x, weights, tile, slots, gated=False, compact_tail=compact_tail)
    return forward_packed(x, up_weight, down_weight, activations), activations


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
    forward_arrays(x=x, up_weight=up_weight, down_weight=down_weight)
    gradients = {"up_grad": up_grad, "down_grad": down_grad}
    given = (up_weight, down_weight)
    backward_arrays(dy, x, given, activations, DeviceActivations, **gradients)
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


def can_share(pattern_weight: DeviceArray, tokens: int) -> bool:
    """Return whether blocks of tokens can share neurons of a gated layer, so that it may be faster.

    Parameters
    ----------
    pattern_weight : DeviceArray, shape (F, D)
        That decides which neurons fire.
    tokens : int
        M.
    """
    return shared_neurons.can_share(pattern_weight, tokens)


def learn_to_share(
    activations: DeviceActivations, width: int, learned: LearnedPattern | None = None
) -> Sharing:
    """Learn which tokens need the same neurons; waits for the GPU.

    Parameters
    ----------
    activations : DeviceActivations
        Of tokens like those to come, at best thousands.
    width : int
        D.
    learned : LearnedPattern, optional
        What was learned earlier.

    Returns
    -------
    Sharing
        With what is for :func:`gated_ffn_forward`: ``learned`` itself if it is about as good as
        what would be learned now, None if sharing would not be faster.
    """
    return shared_neurons.learn_to_share(activations, width, learned)


# ---- Checks


def require_tile(tile: int, slots: int) -> None:
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


def _is_decoding(x: DeviceArray, tile: int, slots: int, compact_tail: bool) -> bool:
    """Return whether there are so few tokens that the layer is two kernels of its own."""
    return x.shape[0] <= MOST_TOKENS and (tile, slots, compact_tail) == (TILE, SLOTS, False)


def pack_product(
    x: DeviceArray,
    weights: tuple[DeviceArray, ...],
    tile: int,
    slots: int,
    *,
    gated: bool,
    compact_tail: bool,
    lists_tail: bool = True,
) -> DeviceActivations:
    """Pack relu(x W^T), for the first of a layer's weights, which decides which neurons fire.

    Where the product is not in memory and ``lists_tail`` is false (with a gate alone), rows of the
    tail are still to be marked and listed: ``tail_source`` is not None there.
    """
    assert gated or lists_tail, "without a gate what fires is counted, of all rows"
    weight = weights[0]
    packing = _fused_packing(x, weights, tile)
    if packing is None:
        gate = matmul(x, weight, transpose_b=True)
        return _pack_gate(gate, tile, slots, gated=gated, compact_tail=compact_tail)
    rows = x.shape[0]
    packed, state = _activations((rows, weight.shape[0]), x, tile, slots, gated=gated)
    packed.tail_source = TailSource(x, weight, state)
    packing(x, weight, packed.values, packed.columns, packed.counts, slots)
    if lists_tail:
        _mark_tail(packed)
        _finish_packing(packed)
    return packed


def _fused_packing(
    x: DeviceArray, weights: tuple[DeviceArray, ...], tile: int
) -> Callable[..., None] | None:
    """Return the kernel that packs the product it computes; None where there is none."""
    is_16_bits = x.dtype.itemsize == 2 and x.gpu.capability >= TENSOR_CORES
    if not is_16_bits or tile != hopper_gate.TILE or not rows_are_aligned(x, *weights):
        return None
    if hopper_gate.fits(x, weights[0]):
        return hopper_gate.gate_pack
    return cuda_gate.gate_pack if x.gpu.capability[0] == 8 else None


def _pack_gate(
    gate: DeviceArray, tile: int, slots: int, *, gated: bool, compact_tail: bool
) -> DeviceActivations:
    """Pack relu(gate)."""
    rows, neurons = gate.shape
    packed, _ = _activations(gate.shape, gate, tile, slots, gated=gated)
    packed.tail_values = gate
    overflows = packed.overflows
    arrays = (packed.values, packed.columns, packed.counts)
    if tile == TILE_OF_A_WARP and rows_are_aligned(gate):
        blocks = pack_rows.blocks_of_warps(rows)
        pack_rows(blocks, gate, *arrays, overflows, rows, neurons, packed.tiles, slots)
    else:
        items = rows * packed.tiles
        pack_tiles(
            pack_tiles.blocks_of_warps(items), gate, *arrays, rows, neurons, tile, packed.tiles,
            slots,
        )  # fmt: skip
        _mark_tail(packed)
    _finish_packing(packed)
    if compact_tail:
        _make_tail_compact(packed, gate)
    return packed


def _activations(
    shape: tuple[int, ...], like: DeviceArray, tile: int, slots: int, *, gated: bool
) -> tuple[DeviceActivations, DeviceArray]:
    """Return activations to be filled, of ``like``'s dtype, and two integers, 0."""
    (rows, neurons), stream = shape, like.stream
    tiles = -(-neurons // tile)
    places = (rows, tiles * slots)
    words = -(-rows // 32)
    # all that begins with zeros, cleared at once
    zeroed = zeros(4 * (words + 3) + neurons, np.uint8, stream)
    integers = view(zeroed, 0, (words + 3,), np.int32)
    fired = view(zeroed, integers.nbytes, (neurons,), np.bool_)
    packed = DeviceActivations(
        neurons=neurons,
        tile=tile,
        slots=slots,
        gated=gated,
        values=empty(places, like.dtype, stream),
        columns=empty(places, np.uint16, stream),
        counts=empty((rows, tiles), np.int32, stream),
        up_values=empty(places if gated else (0, 0), like.dtype, stream),
        tail_rows=empty(rows, np.int32, stream),
        tail_count=integers[words : words + 1],
        tail_values=empty((0, neurons), like.dtype, stream),
        is_compact=False,
        row_nonzeros=empty(rows, np.int32, stream),
        row_absolute_sums=empty(rows, arithmetic_dtype(like.dtype), stream),
        fired=fired,
        overflows=integers[:words],
    )
    return packed, integers[words + 1 :]


def _mark_tail(packed: DeviceActivations) -> None:
    """Mark the rows of which a tile overflows; they have no entries then."""
    rows = packed.shape[0]
    blocks = mark_tail.blocks(rows)
    mark_tail(blocks, packed.counts, packed.overflows, rows, packed.tiles, packed.slots)


def _finish_packing(packed: DeviceActivations) -> None:
    """List the tail, and without a gate, count what fires (of the tail, where it is read)."""
    rows, overflows = packed.shape[0], packed.overflows
    list_tail_rows(packed)
    if not packed.gated:
        count_rows(
            count_rows.blocks_of_warps(rows), packed.values, packed.columns, packed.counts,
            packed.tail_values, overflows, packed.row_nonzeros, packed.row_absolute_sums,
            packed.fired, rows, packed.neurons, packed.tile, packed.tiles, packed.slots,
            int(packed.tail_source is None),
        )  # fmt: skip


def _make_tail_compact(packed: DeviceActivations, gate: DeviceArray) -> None:
    count = int(packed.tail_count.to_numpy()[0])
    tail = empty((count, packed.neurons), gate.dtype, gate.stream)
    copy_rows(copy_rows.blocks(tail.size), gate, packed.tail_rows, tail, count, packed.neurons)
    packed.tail_values, packed.is_compact = tail, True


def _tail_blocks(packed: DeviceActivations, items: int) -> int:
    """Return how many blocks work on so many items of the tail; an item takes a block or less."""
    return min(items, TAIL_BLOCKS * packed.values.gpu.multiprocessors)


def forward_packed(
    x: DeviceArray, up_weight: DeviceArray, down_weight: DeviceArray, packed: DeviceActivations
) -> DeviceArray:
    rows, width = x.shape
    is_aligned = rows_are_aligned(x, up_weight, down_weight)
    if packed.token_order is not None:
        y = shared_neurons.forward_entries(x, up_weight, down_weight, packed)
    elif is_aligned and width:
        y = strip_rows.forward_entries(x, up_weight, down_weight, packed)
    else:
        y = empty(x.shape, x.dtype, x.stream)
        statistics = (packed.row_nonzeros, packed.row_absolute_sums, packed.fired)
        forward_rows(
            forward_rows.blocks_of_warps(rows), x, up_weight, down_weight, packed.values,
            packed.columns, packed.counts, packed.up_values, y, *statistics, rows, width,
            packed.tile, packed.tiles, packed.slots, int(packed.gated), is_aligned,
        )  # fmt: skip
    forward_tail(x, up_weight, down_weight, packed, y, is_aligned)
    return y


def forward_tail(
    x: DeviceArray,
    up_weight: DeviceArray,
    down_weight: DeviceArray,
    packed: DeviceActivations,
    y: DeviceArray,
    is_aligned: int,
) -> None:
    """Compute y, and what rows of h hold, for rows of the tail."""
    if packed.tail_source is not None:
        weights = (packed.tail_source.weight, up_weight, down_weight)
        dense_tail.forward_of_tail(
            x, weights, packed.tail_rows, packed.tail_count, packed.tail_source.state, y,
            (packed.row_nonzeros, packed.row_absolute_sums, packed.fired), gated=packed.gated,
        )  # fmt: skip
        return
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
    if packed.tail_source is not None:
        if not rows_are_aligned(dy, x, *weights):
            dy, x = dy.copy(), x.copy()
            weights = (weights[0].copy(), weights[1].copy(), weights[2].copy())
        dense_tail.backward_of_tail(
            dy, x, weights, packed.tail_rows, packed.tail_count, packed.tail_source.state,
            l1_scale, dx, gradients, gated=packed.gated,
        )  # fmt: skip
        return
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
    is_aligned = rows_are_aligned(dy, x, *weights, *gradients)
    of_entries = (dy, x, weights, packed, scale, gradients)
    if packed.token_order is not None and is_aligned:
        dx = shared_neurons.backward_entries(*of_entries)
    elif is_aligned and x.shape[1]:
        dx = strip_rows.backward_entries(*of_entries)
    else:
        dx = _backward_by_warps(*of_entries, is_aligned)
    _backward_tail(dy, x, weights, packed, scale, gradients, dx, is_aligned)
    return dx


def _backward_by_warps(
    dy: DeviceArray,
    x: DeviceArray,
    weights: tuple[DeviceArray, DeviceArray, DeviceArray],
    packed: DeviceActivations,
    l1_scale: DeviceArray,
    gradients: tuple[DeviceArray, DeviceArray, DeviceArray],
    is_aligned: int,
) -> DeviceArray:
    """Return dx for rows that are not in the tail (for others, 0), and add to the gradients."""
    (rows, width), neurons, gated = x.shape, packed.neurons, int(packed.gated)
    dx = empty(x.shape, x.dtype, x.stream)
    lists, entry_places = list_by_neuron(packed)
    hidden, d_pattern, d_up = lists.coefficients[0], lists.coefficients[1], lists.coefficients[-1]
    backward_rows(
        backward_rows.blocks_of_warps(rows), dy, *weights, packed.values, packed.columns,
        packed.counts, packed.up_values, l1_scale, entry_places, hidden, d_pattern, d_up, dx,
        rows, width, packed.tile, packed.tiles, packed.slots, gated, is_aligned,
    )  # fmt: skip
    if rows and neurons and width:
        add_gradients(
            add_gradients.blocks_of_warps(neurons * -(-width // 256)), dy, x, lists.neuron_starts,
            lists.rows, hidden, d_pattern, d_up, *gradients, neurons, width, gated, is_aligned,
        )  # fmt: skip
    return dx
