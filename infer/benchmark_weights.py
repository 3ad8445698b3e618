"""Times of a feedforward layer with sparse weights against the same layer with dense ones."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from twell_numba.formats import BlockELLMatrix, CSRMatrix
from twell_numba.infer.benchmark import time_where_it_runs
from twell_numba.infer.ffn_problem import (
    FFNProblem,
    NumPyFFN,
    error_of_layer,
    layer_run,
)
from twell_numba.layers.ffn import GatedFFN
from twell_numba.layers.parameter import SparseParameter

# Sparse calls are short: without it, they would be timed on cores that have just woken up.
WARM_SECONDS = 0.02

OPERATIONS = ("forward", "forward+backward")


def benchmark_weights(
    problem: FFNProblem,
    density: float,
    block_size: int,
    rounds: int,
    operations: Sequence[str] = OPERATIONS,
) -> Iterator[list[dict]]:
    """Time a gated FFN of which the weights are sparse.

    Parameters
    ----------
    problem : FFNProblem
        ``nonzeros`` is how many neurons would fire for a token if all weights were there. It is
        left as it is.
    density : float
        Fraction of the weights (for block-ELL: of the blocks) that are not zero, drawn at random.
    block_size : int
        b of block-ELL.
    rounds : int
        Timed calls of each path.
    operations : sequence of str
        Some of ``OPERATIONS``.

    Yields
    ------
    list of dict
        For each operation, one row for ``csr`` and one for ``block_ell``, with the keys of ``twell
        bench --json``. ``dense_ms`` is the time for the dense layer, whose speed zeros do not
        change: on the CPU NumPy's, on a GPU that of the path ``dense``. ``density`` is what is
        stored of all weights. Errors as in :func:`~twell_numba.infer.benchmark.benchmark_ffn`.
    """
    problems = {
        "csr": _with_sparse_weights(problem, density, 1),
        "block_ell": _with_sparse_weights(problem, density, block_size),
    }
    hold: dict[str, Callable[[np.ndarray], CSRMatrix | BlockELLMatrix]] = {
        "csr": CSRMatrix.from_dense,
        "block_ell": lambda weight: BlockELLMatrix.from_dense(weight, block_size=block_size),
    }
    layers = {path: sparse.layer(path, hold[path]) for path, sparse in problems.items()}
    for operation in operations:
        backward = operation == "forward+backward"
        calls: dict[str, Callable[[], object]] = {}
        if problem.device == "cpu":
            calls["dense"] = NumPyFFN(problems["csr"]).run(backward)
        else:
            calls["dense"] = layer_run(problems["csr"].layer("dense"), problems["csr"], backward)
        for path, layer in layers.items():
            calls[path] = layer_run(layer, problems[path], backward)
        milliseconds = time_where_it_runs(problem.device, calls, rounds, WARM_SECONDS)
        yield [
            _row(operation, path, problems[path], layer, milliseconds)
            for path, layer in layers.items()
        ]


def _row(
    operation: str,
    path: str,
    problem: FFNProblem,
    layer: GatedFFN,
    milliseconds: dict[str, float],
) -> dict:
    shape = problem.shape
    return {
        "operation": operation,
        "path": path,
        "device": problem.device,
        "dtype": problem.dtype.name,
        "shape": {"M": shape.tokens, "D": shape.width, "F": shape.neurons},
        "density": _stored_density(layer),
        "dense_ms": milliseconds["dense"],
        "sparse_ms": milliseconds[path],
        "speedup": milliseconds["dense"] / milliseconds[path],
        "max_relative_error": error_of_layer(problem, layer, operation == "forward+backward"),
    }


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
    """Return a copy of which most b x b blocks of the weights are zero.

    The rest is larger, so that sums stay as large.
    """
    sparse = problem.with_nonzeros(problem.shape.nonzeros)
    sparse.random = copy.deepcopy(problem.random)  # the same pattern each time
    rows, columns = problem.gate.shape
    blocks = (-(-rows // block_size), -(-columns // block_size))
    for name in ("gate", "up", "down"):
        keep = sparse.random.random(blocks) < density
        keep[0, 0] = True
        elements = keep.repeat(block_size, axis=0).repeat(block_size, axis=1)[:rows, :columns]
        weight = (
            getattr(sparse, name).astype(np.float32) * elements / np.float32(math.sqrt(density))
        )
        setattr(sparse, name, weight.astype(problem.dtype))
    return sparse
