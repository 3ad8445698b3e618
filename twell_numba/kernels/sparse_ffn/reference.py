"""Feedforward layers with sparse weights of any format in plain NumPy: the definition.

Gated:       g = x Wg^T,  u = x Wu^T,  h = relu(g) * u,  y = h Wd
Two-matrix:  h = relu(x Wu^T),  y = h Wd

with x, y (M, D) and sparse weights (F, D). Weights that are zero, stored or not, contribute
nothing, whatever they meet. NaN is kept by relu. Backward::

    dh = dy Wd^T + l1_scale * sign(h);  du = dh * relu(g);  dg = dh * u;  dx = du Wu + dg Wg
    and at each stored entry (j, d):  dWd = h_j . dy_d,  dWu = du_j . x_d,  dWg = dg_j . x_d

A stored entry that is zero has a gradient as any other: training may move it. Where x or dy hold
NaN or infinities, gradients do too; of which entries is not defined, as compiled code skips neurons
that fire for none of several tokens.
"""

from typing import TypeVar

import numpy as np

from twell_numba.formats import BlockELLMatrix, CSRMatrix
from twell_numba.kernels.ffn_checks import sparse_backward_inputs, sparse_forward_inputs
from twell_numba.kernels.sparse_ffn.activations import SparseWeightActivations
from twell_numba.kernels.sparse_reference import left_matmul, matmul

Matrix = TypeVar("Matrix", CSRMatrix, BlockELLMatrix)


def gated_ffn_forward(
    x: np.ndarray, gate: Matrix, up: Matrix, down: Matrix, wanted: type[Matrix]
) -> tuple[np.ndarray, SparseWeightActivations]:
    """Return y (M, D) and the activations; ``wanted`` is the format of the weights."""
    x = sparse_forward_inputs(wanted, x, gate_weight=gate, up_weight=up, down_weight=down)
    return _output(_gated_hidden(x, gate, up)[2], down)


def gated_ffn_backward(
    dy: np.ndarray,
    x: np.ndarray,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    activations: SparseWeightActivations,
    l1_scale: float,
    gate_grad: np.ndarray,
    up_grad: np.ndarray,
    down_grad: np.ndarray,
    wanted: type[Matrix],
) -> np.ndarray:
    """Return dx (M, D) and add the gradients of the weights' ``stored_values`` in place."""
    x = sparse_forward_inputs(wanted, x, gate_weight=gate, up_weight=up, down_weight=down)
    dy = sparse_backward_inputs(
        dy,
        x,
        activations,
        gate_grad=(gate, gate_grad),
        up_grad=(up, up_grad),
        down_grad=(down, down_grad),
    )
    gate_values, up_values, hidden = _gated_hidden(x, gate, up)
    fires = ~(gate_values <= 0)
    d_hidden = _times_transpose(dy, down) + x.dtype.type(l1_scale) * np.sign(hidden)
    d_up = _where(fires, d_hidden, gate_values)
    d_gate = _where(fires, d_hidden, up_values)
    _add_sampled(down, hidden, dy, down_grad)
    _add_sampled(up, d_up, x, up_grad)
    _add_sampled(gate, d_gate, x, gate_grad)
    return _times(d_up, up) + _times(d_gate, gate)


def ffn_forward(
    x: np.ndarray, up: Matrix, down: Matrix, wanted: type[Matrix]
) -> tuple[np.ndarray, SparseWeightActivations]:
    """Return y (M, D) and the activations; ``wanted`` is the format of the weights."""
    x = sparse_forward_inputs(wanted, x, up_weight=up, down_weight=down)
    return _output(_relu(_times_transpose(x, up)), down)


def ffn_backward(
    dy: np.ndarray,
    x: np.ndarray,
    up: Matrix,
    down: Matrix,
    activations: SparseWeightActivations,
    l1_scale: float,
    up_grad: np.ndarray,
    down_grad: np.ndarray,
    wanted: type[Matrix],
) -> np.ndarray:
    """Return dx (M, D) and add the gradients of the weights' ``stored_values`` in place."""
    x = sparse_forward_inputs(wanted, x, up_weight=up, down_weight=down)
    dy = sparse_backward_inputs(
        dy, x, activations, up_grad=(up, up_grad), down_grad=(down, down_grad)
    )
    hidden = _relu(_times_transpose(x, up))
    d_hidden = _times_transpose(dy, down) + x.dtype.type(l1_scale)
    d_up = np.where(hidden == 0, hidden.dtype.type(0), d_hidden)
    _add_sampled(down, hidden, dy, down_grad)
    _add_sampled(up, d_up, x, up_grad)
    return _times(d_up, up)


def _gated_hidden(
    x: np.ndarray, gate: Matrix, up: Matrix
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return g, u and h, each (M, F)."""
    gate_values, up_values = _times_transpose(x, gate), _times_transpose(x, up)
    hidden = _where(~(gate_values <= 0), gate_values, up_values)
    return gate_values, up_values, hidden


def _output(hidden: np.ndarray, down: Matrix) -> tuple[np.ndarray, SparseWeightActivations]:
    nonzero = hidden != 0
    activations = SparseWeightActivations(
        hidden.shape,
        int(np.count_nonzero(nonzero)),
        float(np.abs(hidden).sum(dtype=np.float64)),
        nonzero.any(axis=0),
    )
    return _times(hidden, down), activations


def _times_transpose(x: np.ndarray, weight: Matrix) -> np.ndarray:
    """Return x W^T."""
    return matmul(weight, x.T, type(weight)).T


def _times(hidden: np.ndarray, weight: Matrix) -> np.ndarray:
    """Return h W."""
    return left_matmul(hidden, weight, type(weight))


def _relu(values: np.ndarray) -> np.ndarray:
    """Return the values above 0 and NaN, zeros elsewhere."""
    return np.where(values <= 0, values.dtype.type(0), values)


def _where(fires: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the product where a neuron fires, zeros elsewhere."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(fires, first * second, first.dtype.type(0))


def _add_sampled(weight: Matrix, left: np.ndarray, right: np.ndarray, gradient: np.ndarray) -> None:
    """Add ``left[:, j] . right[:, d]`` at each stored entry (j, d)."""
    with np.errstate(over="ignore", invalid="ignore"):
        if isinstance(weight, BlockELLMatrix):
            b = weight.block_size
            for block_row, slot in np.argwhere(weight.block_columns >= 0):
                first, column = block_row * b, int(weight.block_columns[block_row, slot]) * b
                product = left[:, first : first + b].T @ right[:, column : column + b]
                height, width = product.shape  # less than b at the lower and right edge
                gradient[block_row, slot, :height, :width] += product
        else:
            rows, columns, _ = weight.coordinates()
            gradient += np.einsum("me,me->e", left[:, rows], right[:, columns])
