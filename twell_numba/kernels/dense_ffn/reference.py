"""The dense feedforward layers in plain NumPy: the definition and the oracle.

For the formulas see :mod:`twell_numba.kernels.dense_ffn.cpu`, which has the same functions.
"""

from typing import NamedTuple

import numpy as np

from twell_numba.kernels.activation_functions import activation_number


class DenseActivations(NamedTuple):
    """The activations of a dense forward pass, each (M, F).

    ``up`` is None in a two-matrix layer, where ``pattern`` is x Wu^T; in a gated layer ``pattern``
    is x Wg^T. ``hidden`` is h.
    """

    pattern: np.ndarray
    up: np.ndarray | None
    hidden: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """M and F."""
        rows, neurons = self.hidden.shape
        return rows, neurons


def gated_ffn_forward(
    x: np.ndarray,
    gate_weight: np.ndarray,
    up_weight: np.ndarray,
    down_weight: np.ndarray,
    activation: str = "relu",
) -> tuple[np.ndarray, DenseActivations]:
    """Return y (M, D) and the activations."""
    gate = x @ gate_weight.T
    up = x @ up_weight.T
    counts, value, _ = _evaluate(activation, gate)
    hidden = np.where(counts, value * up, 0).astype(x.dtype)
    return hidden @ down_weight, DenseActivations(gate, up, hidden)


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
    """Return dx (M, D) and add the weights' gradients in place."""
    gate, up, hidden = activations
    counts, value, slope = _evaluate(activation, gate)
    d_hidden = dy @ down_weight.T + l1_scale * np.sign(hidden)
    d_up = np.where(counts, d_hidden * value, 0)
    d_gate = np.where(counts, d_hidden * up * slope, 0)
    down_grad += hidden.T @ dy
    up_grad += d_up.T @ x
    gate_grad += d_gate.T @ x
    return d_up @ up_weight + d_gate @ gate_weight


def ffn_forward(
    x: np.ndarray, up_weight: np.ndarray, down_weight: np.ndarray, activation: str = "relu"
) -> tuple[np.ndarray, DenseActivations]:
    """Return y (M, D) and the activations of a two-matrix layer."""
    up = x @ up_weight.T
    counts, value, _ = _evaluate(activation, up)
    hidden = np.where(counts, value, 0).astype(x.dtype)
    return hidden @ down_weight, DenseActivations(up, None, hidden)


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
    """Return dx (M, D) of a two-matrix layer and add the weights' gradients in place."""
    up, _, hidden = activations
    counts, _, slope = _evaluate(activation, up)
    d_up = np.where(counts, (dy @ down_weight.T + l1_scale * np.sign(hidden)) * slope, 0)
    down_grad += hidden.T @ dy
    up_grad += d_up.T @ x
    return d_up @ up_weight


def _evaluate(activation: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where f does not cut off, and there its value and its derivative."""
    activation_number(activation)
    if activation == "relu":
        return ~(x <= 0), x, np.ones_like(x)
    if activation == "relu2":
        return ~(x <= 0), x * x, 2 * x
    sigmoid = np.exp(-np.logaddexp(0, -x))
    return np.ones(x.shape, np.bool_), x * sigmoid, sigmoid * (1 + x * np.exp(-np.logaddexp(0, x)))


def activation_statistics(activations: DenseActivations) -> tuple[int, float, np.ndarray]:
    """Return the count of h != 0, the sum of |h| and, for each neuron, whether it ever fired."""
    nonzero = activations.hidden != 0
    absolute_sum = np.abs(activations.hidden).sum(dtype=np.float64)
    return int(nonzero.sum()), float(absolute_sum), nonzero.any(axis=0)
