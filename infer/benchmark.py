"""Times of a feedforward layer's execution paths against NumPy's BLAS."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from twell_numba.infer.timing import time_in_turn
from twell_numba.kernels.dense_ffn import reference
from twell_numba.layers.ffn import PATHS, GatedFFN


@dataclass(frozen=True)
class FFNShape:
    """Sizes of a benchmark: M tokens, model width D, hidden width F, neurons firing a token."""

    tokens: int
    width: int
    neurons: int
    nonzeros: float


def benchmark_ffn(shape: FFNShape, rounds: int, seed: int, backward: bool) -> list[dict]:
    """Time every path of a gated FFN in float32 against the same layer written in NumPy.

    Parameters
    ----------
    shape : FFNShape
    rounds : int
        Timed calls of each path.
    seed : int
        Of the random weights and inputs.
    backward : bool
        Time forward and backward together; otherwise the forward pass.

    Returns
    -------
    list of dict
        One row a path, with the keys of ``twell bench --json``: ``dense_ms`` is NumPy's time,
        ``sparse_ms`` the path's. ``max_relative_error`` is the largest norm-wise error of its
        results (y; with backward also dx and the weights' gradients) against float64.
    """
    problem = _Problem(shape, seed)
    numpy_ffn = _NumPyFFN(problem)
    layers = {path: problem.layer(path) for path in PATHS}
    calls: dict[str, Callable[[], object]] = {"numpy": numpy_ffn.run(backward)}
    for path, layer in layers.items():
        calls[path] = _layer_run(layer, problem, backward)
    milliseconds = time_in_turn(calls, rounds)
    return [
        _row(
            "forward+backward" if backward else "forward",
            path,
            problem,
            layers[path],
            milliseconds["numpy"],
            milliseconds[path],
            backward,
        )
        for path in PATHS
    ]


def benchmark_one_token(
    width: int, neurons: int, nonzeros: float, rounds: int, seed: int
) -> list[dict]:
    """Time one token through every path: on its own, and right after a large product in BLAS.

    Returns rows as :func:`benchmark_ffn`, for the operations ``forward`` and
    ``forward after BLAS``.
    """
    problem = _Problem(FFNShape(1, width, neurons, nonzeros), seed)
    numpy_ffn = _NumPyFFN(problem)
    layers = {path: problem.layer(path) for path in PATHS}
    calls = {"numpy": numpy_ffn.run(backward=False)}
    for path, layer in layers.items():
        calls[path] = _layer_run(layer, problem, backward=False)
    left = problem.random.standard_normal((512, width), np.float32)

    def wake_blas() -> None:
        np.matmul(left, problem.gate.T)

    rows = []
    for operation, prepare in (("forward", None), ("forward after BLAS", wake_blas)):
        milliseconds = time_in_turn(calls, 3 * rounds, prepare, pause=prepare is None)
        rows += [
            _row(
                operation,
                path,
                problem,
                layers[path],
                milliseconds["numpy"],
                milliseconds[path],
                backward=False,
            )
            for path in PATHS
        ]
    return rows


class _Problem:
    """Random weights and inputs of which a chosen number of neurons fires for a token.

    The first input is 1 for every token and its gate weight is minus the normal quantile that
    leaves the wanted fraction above 0.
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

    def layer(self, path: str) -> GatedFFN:
        return GatedFFN("mlp", self.gate, self.up, self.down, path)

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


class _NumPyFFN:
    """The gated FFN as a NumPy user would write it at best: BLAS products into kept buffers."""

    def __init__(self, problem: _Problem) -> None:
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


def _layer_run(layer: GatedFFN, problem: _Problem, backward: bool) -> Callable[[], object]:
    def forward() -> None:
        layer(problem.x)

    def both() -> None:
        layer(problem.x)[1](problem.dy)

    return both if backward else forward


def _row(
    operation: str,
    path: str,
    problem: _Problem,
    layer: GatedFFN,
    dense_ms: float,
    sparse_ms: float,
    backward: bool,
) -> dict:
    shape = problem.shape
    taken = layer.statistics.path
    return {
        "operation": operation,
        "path": path if path == taken else f"{path} ({taken})",
        "device": "cpu",
        "dtype": "float32",
        "shape": {"M": shape.tokens, "D": shape.width, "F": shape.neurons},
        "nonzeros_per_token": layer.statistics.nonzeros / shape.tokens,
        "dense_ms": dense_ms,
        "sparse_ms": sparse_ms,
        "speedup": dense_ms / sparse_ms,
        "max_relative_error": _error(problem, layer, backward),
    }


def _error(problem: _Problem, layer: GatedFFN, backward: bool) -> float:
    for parameter in layer.parameters():
        parameter.zero_grad()
    y, backprop = layer(problem.x)
    results = [y]
    if backward:
        results += [
            backprop(problem.dy),
            *(parameter.grad_buffer() for parameter in layer.parameters()),
        ]
    return max(map(_relative_error, results, problem.exact(backward)))


def _relative_error(result: np.ndarray, exact: np.ndarray) -> float:
    """Return the norm-wise error; 0 where both are all zeros (no neuron fired)."""
    error, scale = np.linalg.norm(result - exact), np.linalg.norm(exact)
    return float(error / scale) if scale else float(error)
