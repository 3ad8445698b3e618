"""Dense feedforward layers on the CPU: the path to take while activations are not sparse.

Gated:       g = x Wg^T,  u = x Wu^T,  h = relu(g) * u,  y = h Wd
Two-matrix:  h = relu(x Wu^T),  y = h Wd

with x, y (M, D) and weights (F, D); backward as in :mod:`twell_numba.kernels.twell.cpu`, for every
neuron. The functions have the names and arguments of the TwELL family, so that a layer takes
either.

Bound by BLAS: 3 (or 2) products forward, 6 (or 4) backward. What lies between two products runs as
one kernel over a panel of rows: at M = 1024, F = 2048 relu and product take 0.27 ms on 2 threads,
0.94 ms as two NumPy operations over whole arrays.
"""

from collections.abc import Callable

import numpy as np

from twell_numba.device.blas import SMALL_PRODUCT, add_matmul, single_threaded_blas
from twell_numba.device.jit import jit
from twell_numba.device.threads import run_ranges
from twell_numba.kernels.dense_ffn.reference import DenseActivations
from twell_numba.kernels.ffn_checks import backward_inputs, forward_inputs, l1_scale_input

# Rows a thread takes through all products at a time.
PANEL_ROWS = 512
ROW_GRAIN = 16


def gated_ffn_forward(
    x: np.ndarray, gate_weight: np.ndarray, up_weight: np.ndarray, down_weight: np.ndarray
) -> tuple[np.ndarray, DenseActivations]:
    """Compute y = (relu(x Wg^T) * (x Wu^T)) Wd.

    Parameters
    ----------
    x : ndarray of float32 or float64, shape (M, D)
    gate_weight, up_weight, down_weight : ndarray, shape (F, D)
        Neuron-major: row j belongs to neuron j.

    Returns
    -------
    y : ndarray, shape (M, D)
    activations : DenseActivations
        What :func:`gated_ffn_backward` needs.
    """
    x, gate_weight, up_weight, down_weight = forward_inputs(
        x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight
    )
    shape = (x.shape[0], gate_weight.shape[0])
    gate, up, hidden = (np.empty(shape, x.dtype) for _ in range(3))
    y = np.empty_like(x)

    def panel(rows: slice) -> None:
        np.matmul(x[rows], gate_weight.T, out=gate[rows])
        np.matmul(x[rows], up_weight.T, out=up[rows])
        _gated_relu(gate[rows], up[rows], hidden[rows])
        np.matmul(hidden[rows], down_weight, out=y[rows])

    _run_panels(panel, shape[0], x.size * shape[1])
    return y, DenseActivations(gate, up, hidden)


def gated_ffn_backward(
    dy: np.ndarray,
    x: np.ndarray,
    gate_weight: np.ndarray,
    up_weight: np.ndarray,
    down_weight: np.ndarray,
    activations: DenseActivations,
    l1_scale: float,
    gate_grad: np.ndarray,
    up_grad: np.ndarray,
    down_grad: np.ndarray,
) -> np.ndarray:
    """Differentiate :func:`gated_ffn_forward`.

    Parameters
    ----------
    dy : ndarray, shape (M, D)
    x, gate_weight, up_weight, down_weight
        As given to the forward pass.
    activations : DenseActivations
        From the forward pass.
    l1_scale : float
        dh grows by ``l1_scale * sign(h)``; lambda / (L M) for the L1 term of the loss.
    gate_grad, up_grad, down_grad : ndarray, shape (F, D)
        C-contiguous; changed in place: the gradients are added.

    Returns
    -------
    dx : ndarray, shape (M, D)
    """
    x, gate_weight, up_weight, down_weight = forward_inputs(
        x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight
    )
    dy = backward_inputs(
        dy,
        x,
        gate_weight,
        activations,
        DenseActivations,
        gate_grad=gate_grad,
        up_grad=up_grad,
        down_grad=down_grad,
    )
    gate, up, hidden = activations
    assert up is not None, "activations of a gated layer wanted"
    scale = l1_scale_input(l1_scale, x.dtype)
    d_gate, d_up = np.empty_like(gate), np.empty_like(gate)
    dx = np.empty_like(x)

    def panel(rows: slice) -> None:
        np.matmul(dy[rows], down_weight.T, out=d_up[rows])
        _gated_relu_backward(d_up[rows], gate[rows], up[rows], hidden[rows], scale, d_gate[rows])
        np.matmul(d_up[rows], up_weight, out=dx[rows])
        dx[rows] += d_gate[rows] @ gate_weight

    _run_panels(panel, x.shape[0], x.size * gate.shape[1])
    add_matmul(hidden.T, dy, down_grad)
    add_matmul(d_up.T, x, up_grad)
    add_matmul(d_gate.T, x, gate_grad)
    return dx


def ffn_forward(
    x: np.ndarray, up_weight: np.ndarray, down_weight: np.ndarray
) -> tuple[np.ndarray, DenseActivations]:
    """Compute y = relu(x Wu^T) Wd; parameters and returns as :func:`gated_ffn_forward`."""
    x, up_weight, down_weight = forward_inputs(x=x, up_weight=up_weight, down_weight=down_weight)
    shape = (x.shape[0], up_weight.shape[0])
    up, hidden = (np.empty(shape, x.dtype) for _ in range(2))
    y = np.empty_like(x)

    def panel(rows: slice) -> None:
        np.matmul(x[rows], up_weight.T, out=up[rows])
        np.maximum(up[rows], 0, out=hidden[rows])
        np.matmul(hidden[rows], down_weight, out=y[rows])

    _run_panels(panel, shape[0], x.size * shape[1])
    return y, DenseActivations(up, None, hidden)


def ffn_backward(
    dy: np.ndarray,
    x: np.ndarray,
    up_weight: np.ndarray,
    down_weight: np.ndarray,
    activations: DenseActivations,
    l1_scale: float,
    up_grad: np.ndarray,
    down_grad: np.ndarray,
) -> np.ndarray:
    """Differentiate :func:`ffn_forward`; parameters and returns as :func:`gated_ffn_backward`."""
    x, up_weight, down_weight = forward_inputs(x=x, up_weight=up_weight, down_weight=down_weight)
    dy = backward_inputs(
        dy, x, up_weight, activations, DenseActivations, up_grad=up_grad, down_grad=down_grad
    )
    up, _, hidden = activations
    scale = l1_scale_input(l1_scale, x.dtype)
    d_up = np.empty_like(up)
    dx = np.empty_like(x)

    def panel(rows: slice) -> None:
        np.matmul(dy[rows], down_weight.T, out=d_up[rows])
        _relu_backward(d_up[rows], up[rows], scale)
        np.matmul(d_up[rows], up_weight, out=dx[rows])

    _run_panels(panel, x.shape[0], x.size * up.shape[1])
    add_matmul(hidden.T, dy, down_grad)
    add_matmul(d_up.T, x, up_grad)
    return dx


def activation_statistics(activations: DenseActivations) -> tuple[int, float, np.ndarray]:
    """Measure how sparse the activations are.

    Returns
    -------
    nonzeros : int
        Entries with h != 0.
    absolute_sum : float
        Sum of |h|, in float64.
    fired : ndarray of bool, shape (F,)
        Whether the neuron's h was not 0 for at least one row.
    """
    hidden = activations.hidden
    fired = np.zeros(hidden.shape[1], np.bool_)
    nonzeros, absolute_sum = _statistics(hidden, fired)
    return nonzeros, absolute_sum, fired


def _run_panels(panel: Callable[[slice], None], rows: int, product_size: int) -> None:
    """Call ``panel`` for all rows, by all threads unless there is little to do."""
    if product_size < SMALL_PRODUCT:
        panel(slice(0, rows))
        return

    def work(start: int, stop: int) -> None:
        for first in range(start, stop, PANEL_ROWS):
            panel(slice(first, min(first + PANEL_ROWS, stop)))

    with single_threaded_blas():
        run_ranges(work, rows, grain=ROW_GRAIN)


@jit
def _gated_relu(gate, up, hidden):
    zero = gate.dtype.type(0)
    for m in range(gate.shape[0]):
        for j in range(gate.shape[1]):
            g = gate[m, j]
            hidden[m, j] = zero if g <= zero else g * up[m, j]


@jit
def _gated_relu_backward(d_hidden, gate, up, hidden, l1_scale, d_gate):
    """Write d_gate, and overwrite d_hidden with d_up."""
    zero = gate.dtype.type(0)
    for m in range(gate.shape[0]):
        for j in range(gate.shape[1]):
            g = gate[m, j]
            d = d_hidden[m, j] + l1_scale * np.sign(hidden[m, j])
            d_gate[m, j] = zero if g <= zero else d * up[m, j]
            d_hidden[m, j] = zero if g <= zero else d * g


@jit
def _relu_backward(d_hidden, up, l1_scale):
    """Overwrite d_hidden with d_up."""
    zero = up.dtype.type(0)
    for m in range(up.shape[0]):
        for j in range(up.shape[1]):
            d = d_hidden[m, j] + l1_scale
            d_hidden[m, j] = zero if up[m, j] <= zero else d


@jit
def _statistics(hidden, fired):
    nonzeros = 0
    absolute_sum = 0.0
    for m in range(hidden.shape[0]):
        row_nonzeros = 0
        row_sum = 0.0
        for j in range(hidden.shape[1]):
            nonzero = hidden[m, j] != 0
            row_nonzeros += nonzero
            row_sum += abs(hidden[m, j])
            fired[j] |= nonzero
        nonzeros += row_nonzeros
        absolute_sum += row_sum
    return nonzeros, absolute_sum
