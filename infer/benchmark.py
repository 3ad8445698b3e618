"""Times of a feedforward layer's execution paths against NumPy's BLAS."""

from collections.abc import Callable

import numpy as np

from twell_numba.infer.ffn_problem import (
    FFNProblem,
    FFNShape,
    NumPyFFN,
    error_of_layer,
    layer_run,
)
from twell_numba.infer.timing import time_in_turn
from twell_numba.layers.ffn import PATHS_OF_FORMAT, GatedFFN

PATHS = PATHS_OF_FORMAT["dense"]


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
        ``sparse_ms`` the path's. ``maxrelative_error`` is the largest norm-wise error of its
        results (y; with backward also dx and the weights' gradients) against float64.
    """
    problem = FFNProblem(shape, seed)
    numpy_ffn = NumPyFFN(problem)
    layers = {path: problem.layer(path) for path in PATHS}
    calls: dict[str, Callable[[], object]] = {"numpy": numpy_ffn.run(backward)}
    for path, layer in layers.items():
        calls[path] = layer_run(layer, problem, backward)
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
    problem = FFNProblem(FFNShape(1, width, neurons, nonzeros), seed)
    numpy_ffn = NumPyFFN(problem)
    layers = {path: problem.layer(path) for path in PATHS}
    calls = {"numpy": numpy_ffn.run(backward=False)}
    for path, layer in layers.items():
        calls[path] = layer_run(layer, problem, backward=False)
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


def _row(
    operation: str,
    path: str,
    problem: FFNProblem,
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
        "max_relative_error": error_of_layer(problem, layer, backward),
    }
