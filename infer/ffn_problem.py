"""What the benchmarks of the feedforward layer share: inputs, the layer in NumPy, errors."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from twell_numba.kernels.dense_ffn import reference
from twell_numba.layers.ffn import GatedFFN
from twell_numba.layers.parameter import Operand, Parameter, SparseParameter


@dataclass(frozen=True)
class FFNShape:
    """Sizes of a benchmark: M tokens, model width D, hidden width F, neurons firing a token."""

    tokens: int
    width: int
    neurons: int
    nonzeros: float


class FFNProblem:
    """Random weights and inputs of which a chosen number of neurons fires for a token.

    The first input is 1 for every token and its gate weight is minus the normal quantile that
    leaves the wanted fraction above 0.

    Attributes
    ----------
    gate, up, down : ndarray of float32, shape (F, D)
        May be replaced, by weights of which some are zero.
    """

    def __init__(self, shape: FFNShape, seed: int) -> None:
        self.shape = shape
        self.random = np.random.default_rng(seed)
        rows, width, neurons = shape.tokens, shape.width, shape.neurons
        self.x = self.random.standard_normal((rows, width), np.float32)
        self.dy = self.random.standard_normal((rows, width), np.float32)
        self.x[:, 0] = 1
        self.gate, self.up, self.down = (
            self.random.standard_normal((3, neurons, width), np.float32)
            / np.sqrt([width, width, neurons], dtype=np.float32)[:, None, None]
        )
        self.gate[:, 0] = -NormalDist().inv_cdf(1 - shape.nonzeros / neurons)

    def layer(self, path: str, hold: Callable[[np.ndarray], Operand] | None = None) -> GatedFFN:
        """Return a layer of these weights, each as ``hold`` makes it, or as it is."""
        if hold is None:
            return GatedFFN("mlp", self.gate, self.up, self.down, path)
        return GatedFFN("mlp", hold(self.gate), hold(self.up), hold(self.down), path)

    def exact(self, backward: bool) -> list[np.ndarray]:
        """Return y, and with ``backward`` also dx and the weights' gradients, from float64."""
        x, gate, up, down, dy = (
            array.astype(np.float64) for array in (self.x, self.gate, self.up, self.down, self.dy)
        )
        y, activations = reference.gated_ffn_forward(x, gate, up, down)
        if not backward:
            return [y]
        d_gate, d_up, d_down = (np.zeros_like(gate) for _ in range(3))
        dx = reference.gated_ffn_backward(
            dy, x, gate, up, down, activations, 0.0, d_gate, d_up, d_down
        )
        return [y, dx, d_gate, d_up, d_down]


class NumPyFFN:
    """The gated FFN as a NumPy user would write it at best: BLAS products into kept buffers."""

    def __init__(self, problem: FFNProblem) -> None:
        self.problem = problem
        rows, neurons = problem.shape.tokens, problem.shape.neurons
        self.gate, self.up, self.hidden, self.d_hidden, self.d_gate = (
            np.empty((rows, neurons), np.float32) for _ in range(5)
        )
        self.y, self.dx, self.dx_gate = (np.empty_like(problem.x) for _ in range(3))
        self.gradients = [np.empty_like(problem.gate) for _ in range(3)]

    def run(self, backward: bool) -> Callable[[], object]:
        def both() -> None:
            self.forward()
            self.backward()

        return both if backward else self.forward

    def forward(self) -> None:
        problem = self.problem
        np.matmul(problem.x, problem.gate.T, out=self.gate)
        np.matmul(problem.x, problem.up.T, out=self.up)
        np.maximum(self.gate, 0, out=self.gate)
        np.multiply(self.gate, self.up, out=self.hidden)
        np.matmul(self.hidden, problem.down, out=self.y)

    def backward(self) -> None:
        problem, d_hidden, d_gate = self.problem, self.d_hidden, self.d_gate
        gate_gradient, up_gradient, down_gradient = self.gradients
        np.matmul(problem.dy, problem.down.T, out=d_hidden)
        np.multiply(d_hidden, self.up, out=d_gate)
        np.multiply(d_gate, self.gate > 0, out=d_gate)
        np.multiply(d_hidden, self.gate, out=d_hidden)
        np.matmul(self.hidden.T, problem.dy, out=down_gradient)
        np.matmul(d_hidden.T, problem.x, out=up_gradient)
        np.matmul(d_gate.T, problem.x, out=gate_gradient)
        np.matmul(d_hidden, problem.up, out=self.dx)
        np.matmul(d_gate, problem.gate, out=self.dx_gate)
        np.add(self.dx, self.dx_gate, out=self.dx)


def layer_run(layer: GatedFFN, problem: FFNProblem, backward: bool) -> Callable[[], object]:
    def forward() -> None:
        layer(problem.x)

    def both() -> None:
        layer(problem.x)[1](problem.dy)

    return both if backward else forward


def error_of_layer(problem: FFNProblem, layer: GatedFFN, backward: bool) -> float:
    """Return the largest norm-wise error of y, and with ``backward`` of dx and the gradients.

    Of sparse weights, only gradients at stored entries are looked at: there are no others.
    """
    for parameter in layer.parameters():
        parameter.zero_grad()
    y, backprop = layer(problem.x)
    exact = problem.exact(backward)
    errors = [relative_error(y, exact[0])]
    if backward:
        errors.append(relative_error(backprop(problem.dy), exact[1]))
        for parameter, gradient in zip(layer.parameters(), exact[2:], strict=True):
            errors.append(_gradient_error(parameter, gradient))
    return max(errors)


def _gradient_error(parameter: Parameter, exact: np.ndarray) -> float:
    given = parameter.grad_buffer()
    if isinstance(parameter, SparseParameter):
        matrix = parameter.matrix
        stored = matrix.with_values(np.ones_like(given)).to_dense() != 0
        return relative_error(matrix.with_values(given).to_dense(), np.where(stored, exact, 0))
    return relative_error(given, exact)


def relative_error(result: np.ndarray, exact: np.ndarray) -> float:
    """Return the norm-wise error; 0 where both are all zeros (no neuron fired)."""
    error, scale = np.linalg.norm(result - exact), np.linalg.norm(exact)
    return float(error / scale) if scale else float(error)
