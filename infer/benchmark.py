"""Times of a feedforward layer's execution paths: against NumPy on the CPU, dense on a GPU."""

from collections.abc import Callable

import numpy as np

from twell_numba.infer.ffn_problem import (
    FFNProblem,
    FFNShape,
    NumPyFFN,
    error_of_layer,
    layer_run,
)
from twell_numba.infer.timing import time_in_turn, time_in_turn_on_gpu
from twell_numba.layers.ffn import PATHS_OF_FORMAT, GatedFFN

PATHS = PATHS_OF_FORMAT["dense"]


def benchmark_ffn(problem: FFNProblem, rounds: int, backward: bool) -> list[dict]:
    """Time every path of a gated FFN.

    On the CPU, against the same layer written in NumPy. On a GPU, against the path ``dense``: the
    products by cuBLASLt, what lies between two of them in one kernel.

    Parameters
    ----------
    problem : FFNProblem
        On the CPU in float32.
    rounds : int
        Timed calls of each path.
    backward : bool
        Time forward and backward together; otherwise the forward pass.

    Returns
    -------
    list of dict
        One row a path, with the keys of ``twell bench --json``: ``dense_ms`` is the time of what is
        compared with, ``sparse_ms`` the path's. ``max_relative_error`` is the largest norm-wise
        error of its results (y; with backward also dx and the weights' gradients) against float64.
    """
    layers = {path: problem.layer(path) for path in PATHS}
    calls: dict[str, Callable[[], object]] = {}
    if problem.device == "cpu":
        calls["numpy"] = NumPyFFN(problem).run(backward)
    for path, layer in layers.items():
        calls[path] = layer_run(layer, problem, backward)
    milliseconds = time_where_it_runs(problem.device, calls, rounds)
    operation = "forward+backward" if backward else "forward"
    return _rows(operation, problem, layers, milliseconds, backward)


def benchmark_one_token(
    width: int, neurons: int, nonzeros: float, rounds: int, seed: int
) -> list[dict]:
    """Time one token through every path: on its own, and right after a large product in BLAS.

    On the CPU; returns rows as :func:`benchmark_ffn`, for the operations ``forward`` and
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
        rows += _rows(operation, problem, layers, milliseconds, backward=False)
    return rows


def describe_baseline(device: str) -> tuple[str, str]:
    """Return the machine's name, and what ``dense_ms`` is the time of there."""
    if device == "cpu":
        return "cpu", "NumPy: the dense layer by its BLAS"
    from twell_numba.device.gpu import choose, gemm

    library = {"cublas": "cuBLASLt", "tiled": "our own kernel"}[gemm.default_path()]
    return (
        f"{choose(device).name} ({device})",
        f"dense: this library's dense path, products by {library}, the rest fused",
    )


def time_where_it_runs(
    device: str,
    calls: dict[str, Callable[[], object]],
    rounds: int,
    warm_seconds: float = 0.0,
) -> dict[str, float]:
    """Return the median milliseconds of each call on the CPU, or on a GPU.

    See :mod:`twell_numba.infer.timing`; ``warm_seconds`` is for the CPU.
    """
    if device == "cpu":
        return time_in_turn(calls, rounds, warm_seconds=warm_seconds)
    from twell_numba.device.gpu import choose

    return time_in_turn_on_gpu(calls, rounds, choose(device).stream)


def _rows(
    operation: str,
    problem: FFNProblem,
    layers: dict[str, GatedFFN],
    milliseconds: dict[str, float],
    backward: bool,
) -> list[dict]:
    shape = problem.shape
    dense_ms = milliseconds["numpy" if problem.device == "cpu" else "dense"]
    rows = []
    for path, layer in layers.items():
        error = error_of_layer(problem, layer, backward)
        taken = layer.statistics.path
        rows.append(
            {
                "operation": operation,
                "path": path if path == taken else f"{path} ({taken})",
                "device": problem.device,
                "dtype": problem.dtype.name,
                "shape": {"M": shape.tokens, "D": shape.width, "F": shape.neurons},
                "nonzeros_per_token": layer.statistics.nonzeros / shape.tokens,
                "dense_ms": dense_ms,
                "sparse_ms": milliseconds[path],
                "speedup": dense_ms / milliseconds[path],
                "max_relative_error": error,
            }
        )
    return rows
