"""Times of a feedforward layer with sparse weights against the same layer, dense, in NumPy."""

import math
from collections.abc import Callable

import numpy as np

from twell_numba.formats import BlockELLMatrix, CSRMatrix
from twell_numba.infer.ffn_problem import (
    FFNProblem,
    FFNShape,
    NumPyFFN,
    error_of_layer,
    layer_run,
)
from twell_numba.infer.timing import time_in_turn
from twell_numba.layers.ffn import GatedFFN
from twell_numba.layers.parameter import SparseParameter

# Sparse calls are short: without it, they would be timed on cores that have just woken up.
WARM_SECONDS = 0.02


def benchmark_weights(
    shape: FFNShape, density: float, block_size: int, rounds: int, seed: int, backward: bool
) -> list[dict]:
    """Time a gated FFN in float32 of which the weights are sparse.

    Parameters
    ----------
    shape : FFNShape
        With more than one token; ``nonzeros`` is how many neurons would fire for one if all weights
        were there.
    density : float
        Fraction of the weights (for block-ELL: of the blocks) that are not zero, drawn at random.
    block_size : int
        b of block-ELL.
    rounds : int
        Timed calls of each path.
    seed : int
        Of the random weights and inputs.
    backward : bool
        Time forward and backward together; otherwise the forward pass.

    Returns
    -------
    list of dict
        One row for ``csr`` and one for ``block_ell``, with the keys of ``twell bench --json``.
        ``dense_ms`` is NumPy's time for the dense layer, whose speed zeros do not change.
        ``density`` is what is stored of all weights. Errors as in
        :func:`~twell_numba.infer.benchmark.benchmark_ffn`.
    """
    problems = {
        "csr": _with_sparse_weights(FFNProblem(shape, seed), density, 1),
        "block_ell": _with_sparse_weights(FFNProblem(shape, seed), density, block_size),
    }
    hold: dict[str, Callable[[np.ndarray], CSRMatrix | BlockELLMatrix]] = {
        "csr": CSRMatrix.from_dense,
        "block_ell": lambda weight: BlockELLMatrix.from_dense(weight, block_size=block_size),
    }
    layers = {path: problem.layer(path, hold[path]) for path, problem in problems.items()}
    calls = {"numpy": NumPyFFN(problems["csr"]).run(backward)}
    for path, layer in layers.items():
        calls[path] = layer_run(layer, problems[path], backward)
    milliseconds = time_in_turn(calls, rounds, warm_seconds=WARM_SECONDS)
    return [
        {
            "operation": "forward+backward" if backward else "forward",
            "path": path,
            "device": "cpu",
            "dtype": "float32",
            "shape": {"M": shape.tokens, "D": shape.width, "F": shape.neurons},
            "density": _stored_density(layer),
            "dense_ms": milliseconds["numpy"],
            "sparse_ms": milliseconds[path],
            "speedup": milliseconds["numpy"] / milliseconds[path],
            "max_relative_error": error_of_layer(problems[path], layer, backward),
        }
        for path, layer in layers.items()
    ]


def break_even_density(rows: list[dict]) -> float | None:
    """Return the density below which a path is faster than dense, between measured ones.

    Parameters
    ----------
    rows : list of dict
        Of one operation and path.

    Returns
    -------
    float or None
        Where the speed-up passes 1, its logarithm taken as straight over that of the density
        between two measurements; None where it does not within those there are.
    """
    points = sorted((row["density"], row["speedup"]) for row in rows)
    for (below, faster), (above, slower) in zip(points, points[1:], strict=False):
        if faster >= 1 > slower:
            part = math.log(faster) / math.log(faster / slower)
            return below * (above / below) ** part
    return None


def _stored_density(layer: GatedFFN) -> float:
    stored = 0
    for parameter in layer.parameters():
        assert isinstance(parameter, SparseParameter)
        stored += parameter.matrix.nnz
    return stored / sum(parameter.size for parameter in layer.parameters())


def _with_sparse_weights(problem: FFNProblem, density: float, block_size: int) -> FFNProblem:
    """Set most b x b blocks of the weights to zero; the rest grows, so that sums stay as large."""
    rows, columns = problem.gate.shape
    for name in ("gate", "up", "down"):
        blocks = (-(-rows // block_size), -(-columns // block_size))
        keep = problem.random.random(blocks) < density
        keep[0, 0] = True
        elements = keep.repeat(block_size, axis=0).repeat(block_size, axis=1)[:rows, :columns]
        weight = getattr(problem, name) * elements / np.float32(math.sqrt(density))
        setattr(problem, name, weight)
    return problem
