"""Times of a feedforward layer's execution paths: against NumPy on the CPU, dense on a GPU."""

from collections.abc import Callable

import numpy as np

from twell_numba.infer.ffn_problem import (
    FFNProblem,
    NumPyFFN,
    error_of_layer,
    layer_run,
)
from twell_numba.infer.timing import time_in_turn, time_in_turn_on_gpu
from twell_numba.layers.ffn import PATHS_OF_FORMAT, GatedFFN

PATHS = PATHS_OF_FORMAT["dense"]
# What paths are compared with, where it is none of them.
BASELINE = "baseline"
# The path ``twell`` with 8-bit weights: there is no backward pass.
FLOAT8 = "twell_float8"


def benchmark_ffn(
    problem: FFNProblem,
    rounds: int,
    backward: bool,
    layers: int = 1,
    whole: FFNProblem | None = None,
    *,
    float8: bool = False,
) -> list[dict]:
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
    layers : int
        Sets of weights, used in turn. With more than fit in a cache, weights come from memory, as
        in a model that generates text. Times are of one layer.
    whole : FFNProblem, optional
        Whose dense layer is compared with instead: the problem before dead neurons were removed.
    float8 : bool
        Time the forward pass also with 8-bit weights (``twell_float8``); the error of its row is
        against the weights before they were rounded.

    Returns
    -------
    list of dict
        One row a path, with the keys of ``twell bench --json``: ``dense_ms`` is the time of what is
        compared with, ``sparse_ms`` the path's; of a GPU, ``dense_peak_bytes`` and
        ``sparse_peak_bytes`` are the most memory in use at once: inputs, weights, gradients and
        what a call allocates. ``max_relative_error`` is the largest norm-wise error of its results
        (y; with backward also dx and the weights' gradients) against float64.
    """
    problems = _with_own_weights(problem, layers)
    paths = (*PATHS, FLOAT8) if float8 and not backward else PATHS
    layers_of_path = {path: [_layer(each, path) for each in problems] for path in paths}
    calls: dict[str, Callable[[], object]] = {}
    if problem.device == "cpu":
        ffns = [NumPyFFN(each) for each in _with_own_weights(whole or problem, layers)]
        calls[BASELINE] = _in_turn([ffn.run(backward) for ffn in ffns])
    elif whole is not None:
        dense = [each.layer("dense") for each in _with_own_weights(whole, layers)]
        calls[BASELINE] = _in_turn([layer_run(layer, whole, backward) for layer in dense])
    for path, made in layers_of_path.items():
        calls[path] = _in_turn([layer_run(layer, problem, backward) for layer in made])
    times = time_where_it_runs(problem.device, calls, rounds)
    milliseconds = {name: time / layers for name, time in times.items()}
    peaks = {path: _peak_bytes(problem, layers_of_path[path][0], backward) for path in paths}
    if whole is not None:
        peaks[BASELINE] = _peak_bytes(whole, whole.layer("dense"), backward)
    operation = "forward+backward" if backward else "forward"
    return _rows(operation, problem, layers_of_path, milliseconds, peaks, backward)


def benchmark_one_token(problem: FFNProblem, rounds: int) -> list[dict]:
    """Time one token through every path: on its own, and right after a large product in BLAS.

    On the CPU; returns rows as :func:`benchmark_ffn`, for the operations ``forward`` and
    ``forward after BLAS``.
    """
    numpy_ffn = NumPyFFN(problem)
    layers = {path: [problem.layer(path)] for path in PATHS}
    calls = {BASELINE: numpy_ffn.run(backward=False)}
    for path, (layer,) in layers.items():
        calls[path] = layer_run(layer, problem, backward=False)
    left = problem.random.standard_normal((512, problem.shape.width), np.float32)

    def wake_blas() -> None:
        np.matmul(left, problem.gate.T)

    rows = []
    for operation, prepare in (("forward", None), ("forward after BLAS", wake_blas)):
        milliseconds = time_in_turn(calls, 3 * rounds, prepare, pause=prepare is None)
        rows += _rows(operation, problem, layers, milliseconds, peaks={}, backward=False)
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


def _with_own_weights(problem: FFNProblem, layers: int) -> list[FFNProblem]:
    """Return the problem as often as there are layers, each with its own weights in memory."""
    return [problem, *(problem.with_weights_elsewhere() for _ in range(layers - 1))]


def _layer(problem: FFNProblem, path: str) -> GatedFFN:
    if path != FLOAT8:
        return problem.layer(path)
    layer = problem.layer("twell")
    layer.hold_float8()
    return layer


def _in_turn(calls: list[Callable[[], object]]) -> Callable[[], object]:
    def run() -> None:
        for call in calls:
            call()

    return run if len(calls) > 1 else calls[0]


def _peak_bytes(problem: FFNProblem, layer: GatedFFN, backward: bool) -> int | None:
    """Return the most bytes of a GPU's memory that are in use while a layer is called.

    Inputs, weights and the buffers of their gradients count, as far as the call needs them. All
    that is compiled at a first call has been before.
    """
    if problem.device == "cpu":
        return None
    from twell_numba.device.gpu import choose

    gpu = choose(problem.device)
    call = layer_run(layer, problem, backward)
    x, dy = problem.inputs
    held = x.nbytes + sum(parameter.nbytes for parameter in layer.parameters())
    if backward:
        held += dy.nbytes + sum(parameter.grad_buffer().nbytes for parameter in layer.parameters())
    layer.forget_last_call()  # of one that was timed, it would keep the recording
    gpu.synchronize()
    gpu.memory.reset_peak()
    before = gpu.memory.peak()
    call()
    gpu.synchronize()
    return held + gpu.memory.peak() - before


def _rows(
    operation: str,
    problem: FFNProblem,
    layers: dict[str, list[GatedFFN]],
    milliseconds: dict[str, float],
    peaks: dict[str, int | None],
    backward: bool,
) -> list[dict]:
    shape = problem.shape
    dense_ms = milliseconds.get(BASELINE, milliseconds["dense"])
    rows = []
    for path, made in layers.items():
        layer = made[0]
        error = error_of_layer(problem, layer, backward)
        taken = layer.statistics.path
        rows.append(
            {
                "operation": operation,
                "path": path if path in (taken, FLOAT8) else f"{path} ({taken})",
                "device": problem.device,
                "dtype": problem.dtype.name,
                "shape": {"M": shape.tokens, "D": shape.width, "F": shape.neurons},
                "layers": len(made),
                "nonzeros_per_token": layer.statistics.nonzeros / shape.tokens,
                "dense_ms": dense_ms,
                "sparse_ms": milliseconds[path],
                "speedup": dense_ms / milliseconds[path],
                "dense_peak_bytes": peaks.get(BASELINE, peaks.get("dense")),
                "sparse_peak_bytes": peaks.get(path),
                "max_relative_error": error,
            }
        )
    return rows
