"""Rows of a table by token, on the CPU.

    x_m = table[token_m]            tokens [M], table [V, D], x [M, D]
    dtable[token_m] += dx_m

Bound by memory: every number of x is moved once. NumPy's ``take`` is such a copy already. The
backward pass gives each thread a range of columns, not of rows, so that two threads never add to
the same number and every sum runs in the order of m: the same bits every run, for any number of
threads.
"""

import numpy as np

from twell_numba.device.jit import jit
from twell_numba.device.threads import run_ranges
from twell_numba.kernels.checks import (
    float_inputs,
    index_input,
    require_in_place,
    require_shape,
)

# Fewest numbers worth a thread of their own (100 us of work: waking a thread takes about as long).
GRAIN = 500_000


def embedding(tokens: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the rows of ``table`` that ``tokens`` name.

    Parameters
    ----------
    tokens : ndarray of integers, shape (M,)
    table : ndarray, shape (V, D)
        float32 or float64.

    Returns
    -------
    ndarray, shape (M, D)

    Raises
    ------
    TypeError
        If the tokens are not integers or the table is not float32 or float64.
    ValueError
        If a token is not in [0, V), or a shape is wrong.
    """
    (table,) = float_inputs(table=table)
    require_shape("table", table, ("V", "D"))
    tokens = _checked_tokens(tokens, table.shape[0])
    return np.take(table, tokens, axis=0)


def embedding_backward(dx: np.ndarray, tokens: np.ndarray, dtable: np.ndarray) -> None:
    """Add each row of ``dx`` to its token's row of ``dtable``.

    Parameters
    ----------
    dx : ndarray, shape (M, D)
    tokens : ndarray of integers, shape (M,)
    dtable : ndarray, shape (V, D)
        Of dx's dtype, C-contiguous. Changed in place.

    Raises
    ------
    TypeError, ValueError
        As :func:`embedding`, and if ``dtable`` cannot be changed in place.
    """
    (dx,) = float_inputs(dx=dx)
    require_shape("dx", dx, ("M", "D"))
    rows, width = dx.shape
    require_in_place("dtable", dtable, ("V", width), dx.dtype)
    tokens = _checked_tokens(tokens, dtable.shape[0])
    require_shape("tokens", tokens, (rows,))
    # a cache line a thread at least
    run_ranges(
        lambda start, stop: _add_columns(dx, tokens, dtable, start, stop),
        width,
        grain=max(32, 1 + GRAIN // max(rows, 1)),
    )


def _checked_tokens(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    tokens = index_input("tokens", tokens)
    require_shape("tokens", tokens, ("M",))
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < vocabulary):
        outside = tokens[(tokens < 0) | (tokens >= vocabulary)][0]
        raise ValueError(f"token {outside} given, tokens in [0, {vocabulary}) wanted")
    return tokens


@jit
def _add_columns(dx, tokens, dtable, start, stop):
    for m in range(tokens.size):
        # slices, because a loop that does not start at 0 is not vectorized (an index might be
        # negative): 31 us instead of 127 for M = 2048, D = 128 on one core of an AMD EPYC (Zen 5)
        row = dtable[tokens[m], start:stop]
        addend = dx[m, start:stop]
        for d in range(row.size):
            row[d] += addend[d]
