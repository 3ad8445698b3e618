"""The activation-sparse feedforward layers in plain NumPy: the definition and the oracle.

The numbers are those of the dense reference; only what is returned is packed. For the formulas see
:mod:`twell_numba.kernels.twell.cpu`, which has the same functions.
"""

import numpy as np

from twell_numba.kernels.activation_functions import activation_number
from twell_numba.kernels.dense_ffn import reference as dense
from twell_numba.kernels.twell.activations import PackedActivations


def relu_pack(gate: np.ndarray, tile: int = 256, slots: int = 64) -> PackedActivations:
    """Pack ``relu(gate)``, NaN included, of a (M, F) array."""
    return _pack(gate, gate, None, tile, slots)


def gated_ffn_forward(
    x: np.ndarray,
    gate_weight: np.ndarray,
    up_weight: np.ndarray,
    down_weight: np.ndarray,
    tile: int = 256,
    slots: int = 64,
    activation: str = "relu",
) -> tuple[np.ndarray, PackedActivations]:
    """Return y (M, D) and the packed activations."""
    weights = (gate_weight, up_weight, down_weight)
    y, (gate, up, _) = dense.gated_ffn_forward(x, *weights, activation)
    return y, _pack(gate, _power(gate, activation), up, tile, slots)


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
    """Return dx (M, D) and add the weights' gradients in place."""
    weights = (gate_weight, up_weight, down_weight)
    _, recomputed = dense.gated_ffn_forward(x, *weights, activation)
    return dense.gated_ffn_backward(
        dy, x, *weights, recomputed, l1_scale, gate_grad, up_grad, down_grad, activation
    )


def ffn_forward(
    x: np.ndarray,
    up_weight: np.ndarray,
    down_weight: np.ndarray,
    tile: int = 256,
    slots: int = 64,
    activation: str = "relu",
) -> tuple[np.ndarray, PackedActivations]:
    """Return y (M, D) and the packed activations of a two-matrix layer."""
    y, (up, _, _) = dense.ffn_forward(x, up_weight, down_weight, activation)
    return y, _pack(up, _power(up, activation), None, tile, slots)


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
    """Return dx (M, D) of a two-matrix layer and add the weights' gradients in place."""
    _, recomputed = dense.ffn_forward(x, up_weight, down_weight, activation)
    return dense.ffn_backward(
        dy, x, up_weight, down_weight, recomputed, l1_scale, up_grad, down_grad, activation
    )


def activation_statistics(activations: PackedActivations) -> tuple[int, float, np.ndarray]:
    """Return the count of h != 0, the sum of |h| and, for each neuron, whether it ever fired."""
    hidden = activations.hidden().to_dense()
    nonzero = hidden != 0
    return int(nonzero.sum()), float(np.abs(hidden).sum(dtype=np.float64)), nonzero.any(axis=0)


def _power(x: np.ndarray, activation: str) -> np.ndarray:
    """Return what relu or relu2 makes of positive x."""
    activation_number(activation, ("relu", "relu2"))
    return x * x if activation == "relu2" else x


def _pack(
    pattern: np.ndarray, values: np.ndarray, up: np.ndarray | None, tile: int, slots: int
) -> PackedActivations:
    """Pack ``values`` (and ``up``) where ``pattern`` is positive or NaN, row by row."""
    rows, neurons = pattern.shape
    tiles = -(-neurons // tile)
    packed = PackedActivations(
        neurons=neurons,
        tile=tile,
        slots=slots,
        values=np.zeros((rows, tiles * slots), values.dtype),
        columns=np.zeros((rows, tiles * slots), np.uint16),
        counts=np.zeros((rows, tiles), np.int32),
        up_values=None if up is None else np.zeros((rows, tiles * slots), values.dtype),
        tail_rows=np.zeros(0, np.int64),
        tail_values=np.zeros((0, neurons), values.dtype),
    )
    fires = ~(pattern <= 0)
    tail_rows = []
    for row in range(rows):
        tile_columns = [np.flatnonzero(fires[row, t * tile : (t + 1) * tile]) for t in range(tiles)]
        if any(len(columns) > slots for columns in tile_columns):
            tail_rows.append(row)
            continue
        for t, columns in enumerate(tile_columns):
            packed.counts[row, t] = len(columns)
            places = slice(t * slots, t * slots + len(columns))
            packed.columns[row, places] = columns
            packed.values[row, places] = values[row, t * tile + columns]
            if packed.up_values is not None and up is not None:
                packed.up_values[row, places] = up[row, t * tile + columns]
    packed.tail_rows = np.array(tail_rows, np.int64)
    packed.tail_values = np.where(fires[tail_rows], values[tail_rows], 0).astype(values.dtype)
    if up is not None:
        packed.up_tail = up[tail_rows]
    return packed
