"""Dense feedforward layers on the CPU: the path to take while activations are not sparse.

Gated:       g = x Wg^T,  u = x Wu^T,  h = f(g) * u,  y = h Wd
Two-matrix:  h = f(x Wu^T),  y = h Wd

with x, y (M, D), weights (F, D) and f one of
:mod:`~twell_numba.kernels.activation_functions`; backward as in
:mod:`twell_numba.kernels.twell.cpu`, for every neuron. The functions have the names and arguments
of the TwELL family, so that a layer takes either.

Bound by BLAS: 3 (or 2) products forward, 6 (or 4) backward. What lies between two products runs as
one kernel over a panel of rows: at M = 1024, F = 2048 relu and product take 0.27 ms on 2 threads,
0.94 ms as two NumPy operations over whole arrays.

Few rows, as in decoding, are bound by reading the weights, see
:mod:`twell_numba.device.few_rows`. Then a thread takes a chunk of neurons through all products, and
what the chunks add to y is added up in order: the threads meet once, not after each product, and
the bits do not depend on their number.
"""

from collections.abc import Callable

import numpy as np

from twell_numba.device.blas import SMALL_PRODUCT, add_matmul, single_threaded_blas
from twell_numba.device.few_rows import (
    FEW_ROWS,
    add_scaled_rows,
    dots_with_rows,
    sum_over_chunks,
)
from twell_numba.device.jit import jit
from twell_numba.device.threads import run_ranges
from twell_numba.kernels.activation_functions import activation_number
from twell_numba.kernels.dense_ffn.cpu_activations import (
    activate,
    activate_backward,
    activate_gated,
    activate_gated_backward,
)
from twell_numba.kernels.dense_ffn.reference import DenseActivations
from twell_numba.kernels.ffn_checks import backward_inputs, forward_inputs, l1_scale_input

# Rows a thread takes through all products at a time.
PANEL_ROWS = 512
ROW_GRAIN = 16


def gated_ffn_forward(
    x: np.ndarray,
    gate_weight: np.ndarray,
    up_weight: np.ndarray,
    down_weight: np.ndarray,
    activation: str = "relu",
) -> tuple[np.ndarray, DenseActivations]:
    """Compute y = (f(x Wg^T) * (x Wu^T)) Wd.

    Parameters
    ----------
    x : ndarray of float32 or float64, shape (M, D)
    gate_weight, up_weight, down_weight : ndarray, shape (F, D)
        Neuron-major: row j belongs to neuron j.
    activation : {"relu", "silu", "relu2"}
        f.

    Returns
    -------
    y : ndarray, shape (M, D)
    activations : DenseActivations
        What :func:`gated_ffn_backward` needs.

    Raises
    ------
    TypeError, ValueError
        If dtypes or shapes do not fit, or there is no such activation.
    """
    function = activation_number(activation)
    x, gate_weight, up_weight, down_weight = forward_inputs(
        x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight
    )
    shape = (x.shape[0], gate_weight.shape[0])
    gate, up, hidden = (np.empty(shape, x.dtype) for _ in range(3))
    activations = DenseActivations(gate, up, hidden)
    if shape[0] <= FEW_ROWS:
        weights = (gate_weight, up_weight, down_weight)
        arguments = (x, *weights, function, gate, up, hidden)
        return sum_over_chunks(_gated_chunks, arguments, shape[0], down_weight, 3), activations
    y = np.empty_like(x)

    def panel(rows: slice) -> None:
        np.matmul(x[rows], gate_weight.T, out=gate[rows])
        np.matmul(x[rows], up_weight.T, out=up[rows])
        activate_gated(function, gate[rows], up[rows], hidden[rows], 0, shape[1])
        np.matmul(hidden[rows], down_weight, out=y[rows])

    _run_panels(panel, shape[0], x.size * shape[1])
    return y, activations


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
    activation: str = "relu",
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
    activation : str
        As given to the forward pass.

    Returns
    -------
    dx : ndarray, shape (M, D)

    Raises
    ------
    TypeError, ValueError
        As :func:`gated_ffn_forward`; also if the activations are not of this x, or a gradient
        cannot be added to in place.
    """
    function = activation_number(activation)
    x, gate_weight, up_weight, down_weight = forward_inputs(
        x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight
    )
    dy = backward_inputs(
        dy,
        x,
        (gate_weight, up_weight, down_weight),
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
        activate_gated_backward(
            function, d_up[rows], gate[rows], up[rows], hidden[rows], scale, d_gate[rows]
        )
        np.matmul(d_up[rows], up_weight, out=dx[rows])
        dx[rows] += d_gate[rows] @ gate_weight

    _run_panels(panel, x.shape[0], x.size * gate.shape[1])
    add_matmul(hidden.T, dy, down_grad)
    add_matmul(d_up.T, x, up_grad)
    add_matmul(d_gate.T, x, gate_grad)
    return dx


def ffn_forward(
    x: np.ndarray, up_weight: np.ndarray, down_weight: np.ndarray, activation: str = "relu"
) -> tuple[np.ndarray, DenseActivations]:
    """Compute y = f(x Wu^T) Wd; parameters and returns as :func:`gated_ffn_forward`."""
    function = activation_number(activation)
    x, up_weight, down_weight = forward_inputs(x=x, up_weight=up_weight, down_weight=down_weight)
    shape = (x.shape[0], up_weight.shape[0])
    up, hidden = (np.empty(shape, x.dtype) for _ in range(2))
    activations = DenseActivations(up, None, hidden)
    if shape[0] <= FEW_ROWS:
        arguments = (x, up_weight, down_weight, function, up, hidden)
        return sum_over_chunks(_chunks, arguments, shape[0], down_weight, 2), activations
    y = np.empty_like(x)

    def panel(rows: slice) -> None:
        np.matmul(x[rows], up_weight.T, out=up[rows])
        activate(function, up[rows], hidden[rows], 0, shape[1])
        np.matmul(hidden[rows], down_weight, out=y[rows])

    _run_panels(panel, shape[0], x.size * shape[1])
    return y, activations


def ffn_backward(
    dy: np.ndarray,
    x: np.ndarray,
    up_weight: np.ndarray,
    down_weight: np.ndarray,
    activations: DenseActivations,
    l1_scale: float,
    up_grad: np.ndarray,
    down_grad: np.ndarray,
    activation: str = "relu",
) -> np.ndarray:
    """Differentiate :func:`ffn_forward`; parameters and returns as :func:`gated_ffn_backward`."""
    function = activation_number(activation)
    x, up_weight, down_weight = forward_inputs(x=x, up_weight=up_weight, down_weight=down_weight)
    gradients = {"up_grad": up_grad, "down_grad": down_grad}
    dy = backward_inputs(
        dy, x, (up_weight, down_weight), activations, DenseActivations, **gradients
    )
    up, _, hidden = activations
    scale = l1_scale_input(l1_scale, x.dtype)
    d_up = np.empty_like(up)
    dx = np.empty_like(x)

    def panel(rows: slice) -> None:
        np.matmul(dy[rows], down_weight.T, out=d_up[rows])
        activate_backward(function, d_up[rows], up[rows], hidden[rows], scale)
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
def _gated_chunks(
    x,
    gate_weight,
    up_weight,
    down_weight,
    activation,
    gate,
    up,
    hidden,
    bounds,
    partial,
    start,
    stop,
):
    """Write what each chunk of neurons adds to y, for the chunks ``start`` to ``stop``."""
    for chunk in range(start, stop):
        first, last = bounds[chunk], bounds[chunk + 1]
        dots_with_rows(x, gate_weight, gate, first, last)
        dots_with_rows(x, up_weight, up, first, last)
        activate_gated(activation, gate, up, hidden, first, last)
        partial[chunk] = 0
        add_scaled_rows(hidden, down_weight, partial[chunk], first, last)


@jit
def _chunks(x, up_weight, down_weight, activation, up, hidden, bounds, partial, start, stop):
    """Do the same for a two-matrix layer."""
    for chunk in range(start, stop):
        first, last = bounds[chunk], bounds[chunk + 1]
        dots_with_rows(x, up_weight, up, first, last)
        activate(activation, up, hidden, first, last)
        partial[chunk] = 0
        add_scaled_rows(hidden, down_weight, partial[chunk], first, last)


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
