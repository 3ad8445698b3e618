"""Layers of which given neurons fire for each token: patterns of trained models, from a file.

A pattern says for which tokens and neurons relu(x Wg^T) is above 0, and no more. Gate weights and
inputs are made that reproduce it, so that every path computes the whole layer, as in the model that
the pattern comes from. Each neuron has a random direction r_j of about unit length, and a token's x
is the sum of the directions of the neurons that fire for it: x . r_j is then about 1 for those and,
since many random directions are nearly at right angles, about 0 for all others. An offset of -1/2
makes signs of that. Where many neurons fire for a token, some signs are wrong; they are put right
by projections of x on the violated inequalities, all of a token's taken together (the surrogate
constraints of Yang and Murty, 1992). With D = 2048 and F = 5632 patterns of up to 600 neurons a
token are reproduced exactly, most rows at once.
"""

import zipfile
import zlib
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array

from twell_numba.errors import TwellError, UsageError
from twell_numba.infer.ffn_problem import FFNProblem

# Neurons that fire have a gate of at least this much, all others of at most minus it.
MARGIN = 0.1
OFFSET = -0.5
# Of what x is made of beside the neurons' directions: rows without any are no zeros.
NOISE = 0.05
# Each projection goes beyond the violated half-space by half of the distance; fewer are needed so.
OVER_RELAXATION = 1.5
MOST_PROJECTIONS = 50
PANEL_ROWS = 1024
MOST_NEURONS = 2**20


class Agreement(NamedTuple):
    """How well a problem reproduces a pattern.

    Attributes
    ----------
    recall : float
        Fraction of the pattern's entries that fire.
    precision : float
        Fraction of what fires that the pattern has.
    """

    recall: float
    precision: float


def load_patterns(path: str, names: tuple[str, ...] = ()) -> dict[str, csr_array]:
    """Return the patterns in a file, by the names of their layers.

    Parameters
    ----------
    path : str
        A file of ``numpy.savez`` with, for each layer, ``NAME_counts`` (M,), the number of neurons
        that fire for each token, and ``NAME_columns``, their indices, ascending for each token, one
        token after the other.
    names : tuple of str
        The layers wanted; all of the file if none is given.

    Returns
    -------
    dict of str to csr_array of float32, shape (M, F)
        Ones where a neuron fires. F is the same for all: up to the last neuron that any layer has.

    Raises
    ------
    TwellError
        If the file is not of that form.
    UsageError
        If it has no layer of a name.
    """
    try:
        with open(path, "rb") as opened:
            if not zipfile.is_zipfile(opened):
                raise ValueError("an archive as numpy.savez writes it wanted")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise TwellError(f"{path} is no file of patterns (.npz): {error}") from None
    layers = [name.removesuffix("_counts") for name in arrays if name.endswith("_counts")]
    there = [name for name in layers if f"{name}_columns" in arrays]
    if not there:
        raise TwellError(f"{path} holds no pattern: arrays NAME_counts and NAME_columns wanted")
    for name in names:
        if name not in there:
            raise UsageError(f"--pattern-layer {name} given, {path} has {', '.join(there)}")
    patterns = {
        name: _pattern(f"{name} of {path}", arrays[f"{name}_counts"], arrays[f"{name}_columns"])
        for name in there
    }
    neurons = max(pattern.shape[1] for pattern in patterns.values())
    for pattern in patterns.values():
        pattern.resize(pattern.shape[0], neurons)
    return {name: patterns[name] for name in names or there}


def _pattern(name: str, counts: np.ndarray, columns: np.ndarray) -> csr_array:
    """Return a pattern as wide as its last neuron wants.

    Raises
    ------
    TwellError
        If the arrays are none.
    """
    for array in (counts, columns):
        # A member of the archive that is no array comes as bytes.
        if np.ndim(array) != 1 or array.dtype.kind not in "iu" or array.min(initial=0) < 0:
            raise TwellError(f"{name}: counts and columns wanted, whole numbers of at least 0")
        largest = int(array.max(initial=0))
        if largest >= MOST_NEURONS:
            raise TwellError(
                f"{name}: {largest} given as a count or column, less than {MOST_NEURONS} wanted"
            )
    if len(counts) == 0:
        raise TwellError(f"{name}: no token given, at least one wanted")
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    if len(columns) != starts[-1]:
        raise TwellError(
            f"{name}: {columns.size} columns given, {starts[-1]} wanted, the sum of its counts"
        )
    columns = columns.astype(np.int64)
    is_first = np.zeros(len(columns) + 1, bool)
    is_first[starts] = True
    if np.any((np.diff(columns, prepend=-1) <= 0) & ~is_first[:-1]):
        raise TwellError(f"{name}: columns that do not ascend for each token given")
    ones = np.ones(len(columns), np.float32)
    return csr_array((ones, columns, starts), shape=(len(counts), 1 + int(columns.max(initial=0))))


def firing_neurons_of(pattern: csr_array) -> np.ndarray:
    """Return the neurons that fire for any token of the whole pattern; the others are dead."""
    return np.unique(pattern.indices)


def follow(problem: FFNProblem, pattern: csr_array) -> tuple[FFNProblem, Agreement]:
    """Return a problem with the same sizes, Wu, Wd and dY, and with Wg and X that follow a pattern.

    Parameters
    ----------
    problem : FFNProblem
        Its Wg and X give the directions, and the noise.
    pattern : csr_array, shape (M, at most F)
        Of float32, ones. For fewer tokens than the problem's it begins again.

    Returns
    -------
    problem : FFNProblem
    agreement : Agreement
        With few tokens or neurons firing it is (1, 1); large patterns need a large D.
    """
    tokens = problem.shape.tokens
    distinct = min(tokens, pattern.shape[0])
    alive = firing_neurons_of(pattern)
    wanted = pattern[:distinct, alive]
    directions = problem.gate[alive, 1:].astype(np.float32)
    x = NOISE * problem.x[:distinct, 1:].astype(np.float32) + wanted @ directions
    unfinished = np.arange(distinct)
    for _ in range(MOST_PROJECTIONS):
        left = [
            _project(x, directions, wanted, rows, problem.dtype) for rows in _panels(unfinished)
        ]
        unfinished = np.concatenate([unfinished[:0], *left])
    x = x.astype(problem.dtype)
    agreement = _agreement(x, directions, wanted, unfinished)

    repeated = np.arange(tokens) % distinct
    new_x = np.ones_like(problem.x)
    new_x[:, 1:] = x[repeated]
    gate = problem.gate.copy()
    gate[:, 0] = -_longest(x) * _longest(gate[:, 1:])  # so far below 0 that nothing lifts it there
    gate[alive, 0] = OFFSET
    nonzeros = float(np.diff(pattern.indptr)[repeated].mean())
    return problem.with_inputs(new_x, gate, nonzeros), agreement


def _panels(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[start : start + PANEL_ROWS] for start in range(0, len(rows), PANEL_ROWS)]


def _project(
    x: np.ndarray, directions: np.ndarray, wanted: csr_array, rows: np.ndarray, dtype: np.dtype
) -> np.ndarray:
    """Move those of some rows of x of which a gate is on the wrong side; return which they were."""
    gate = x[rows].astype(dtype).astype(np.float32) @ directions.T + OFFSET
    fires = wanted[rows].toarray() > 0
    side = np.where(fires, np.float32(1), np.float32(-1))
    distance = side * gate
    is_wrong = (distance < MARGIN / 2).any(axis=1)
    rows, distance, side = rows[is_wrong], distance[is_wrong], side[is_wrong]
    missing = csr_array(side * np.maximum(MARGIN - distance, 0))
    # Sum over j of missing_j (r_j . x - wanted_j) is one inequality, and this its normal.
    normal = missing @ directions
    step = missing.multiply(missing).sum(axis=1) / np.square(normal).sum(axis=1)
    x[rows] += OVER_RELAXATION * step[:, None] * normal
    return rows


def _agreement(
    x: np.ndarray, directions: np.ndarray, wanted: csr_array, unfinished: np.ndarray
) -> Agreement:
    """Count in the rows that may be wrong; in the others, what fires is what is wanted."""
    missed = added = 0
    for rows in _panels(unfinished):
        fires = x[rows].astype(np.float32) @ directions.T > -OFFSET
        should = wanted[rows].toarray() > 0
        missed += int(np.count_nonzero(should & ~fires))
        added += int(np.count_nonzero(fires & ~should))
    right = wanted.nnz - missed
    if not wanted.nnz:
        return Agreement(1.0, 1.0)
    return Agreement(float(right / wanted.nnz), float(right / max(1, right + added)))


def _longest(vectors: np.ndarray) -> float:
    """Return more than the length of any row."""
    return 1.1 * float(np.sqrt(np.square(vectors.astype(np.float32)).sum(axis=1).max(initial=1)))
