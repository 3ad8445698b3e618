"""Times of a feedforward layer on the patterns of a trained model's layers."""

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from scipy.sparse import csr_array

from twell_numba.infer.benchmark import benchmark_ffn
from twell_numba.infer.ffn_pattern import firing_neurons_of, follow
from twell_numba.infer.ffn_problem import FFNProblem

MEAN = "mean"


def benchmark_pattern(
    problem: FFNProblem,
    name: str,
    pattern: csr_array,
    rounds: int,
    *,
    remove_dead: bool = False,
    layers: int = 1,
    float8: bool = False,
) -> Iterator[list[dict[str, Any]]]:
    """Time every path of a gated FFN in which neurons fire as a pattern says.

    Parameters
    ----------
    problem : FFNProblem
        Of the sizes wanted; left as it is.
    name : str
        Of the pattern, for the rows.
    pattern : csr_array, shape (tokens, at most F)
        See :func:`~twell_numba.infer.ffn_pattern.load_patterns`.
    rounds : int
        Timed calls of each path.
    remove_dead : bool
        Time the layer also without the neurons that fire for no token of the whole pattern, against
        the dense layer that has them all.
    layers : int
    float8 : bool
        As of :func:`~twell_numba.infer.benchmark.benchmark_ffn`.

    Yields
    ------
    list of dict
        The rows of :func:`~twell_numba.infer.benchmark.benchmark_ffn`, first of the forward pass
        and then with backward, and of each first with all neurons. They also have ``pattern``,
        ``dead_removed``, and ``pattern_recall`` and ``pattern_precision``: how many of the
        pattern's entries fire, and how much of what fires it has.
    """
    whole, agreement = follow(problem, pattern)
    problems: list[tuple[FFNProblem, FFNProblem | None]] = [(whole, None)]
    if remove_dead:
        problems.append((whole.with_neurons(firing_neurons_of(pattern)), whole))
    for backward in (False, True):
        for timed, compared in problems:
            rows = benchmark_ffn(timed, rounds, backward, layers, compared, float8=float8)
            for row in rows:
                row["pattern"], row["dead_removed"] = name, compared is not None
                row["pattern_recall"], row["pattern_precision"] = agreement
            yield rows


def mean_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of the mean over patterns: of times, nonzeros, neurons and bytes.

    The speed-up is that of the mean times, the error the largest of all.

    Parameters
    ----------
    rows : list of dict
        Of :func:`benchmark_pattern`, of several patterns.
    """
    cases: dict[tuple[str, bool, str], list[dict[str, Any]]] = {}
    for row in rows:
        path = row["path"].partition(" ")[0]
        cases.setdefault((row["operation"], row["dead_removed"], path), []).append(row)
    return [_mean(alike) for alike in cases.values()]


def _mean(rows: list[dict[str, Any]]) -> dict[str, Any]:
    paths = {row["path"] for row in rows}
    mean = dict(rows[0])
    if len(paths) > 1:  # auto took different ones
        mean["path"] = mean["path"].partition(" ")[0]
    mean["pattern"] = MEAN
    mean["shape"] = mean["shape"] | {"F": round(fmean(row["shape"]["F"] for row in rows))}
    mean["max_relative_error"] = max(row["max_relative_error"] for row in rows)
    for key in (
        "nonzeros_per_token",
        "dense_ms",
        "sparse_ms",
        "dense_peak_bytes",
        "sparse_peak_bytes",
        "pattern_recall",
        "pattern_precision",
    ):
        if mean[key] is not None:
            mean[key] = fmean(row[key] for row in rows)
    mean["speedup"] = mean["dense_ms"] / mean["sparse_ms"]
    return mean
