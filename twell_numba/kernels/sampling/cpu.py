"""Choosing tokens from logits on the CPU, without sorting all of them.

The definition is the reference's: tokens in the order of their logits, cut to the first ones, and
one drawn by a sum from the first on. Here they are put into 1024 buckets by their logits; the sums
go over whole buckets, and only the bucket in which one ends is sorted: at most four of them.

Bound by the exponentials, which NumPy takes in float64, and by three passes over them. Threads
share out the rows.
"""

import numpy as np
from numpy.typing import ArrayLike

from twell_numba.device.jit import jit
from twell_numba.device.threads import run_ranges
from twell_numba.kernels.checks import float_inputs, require_shape

BUCKETS = 1024
# The span of the buckets: what is further below the largest logit has no weight to speak of, and
# shares the last one.
SPAN = 64.0
SMALLEST_SPAN = 1e-300
# Fewest logits worth a thread of their own (100 us of work).
GRAIN = 20_000


def sample_token(
    logits: np.ndarray,
    uniform: np.ndarray,
    temperature: ArrayLike = 1.0,
    top_k: ArrayLike = 0,
    top_p: ArrayLike = 1.0,
    min_p: ArrayLike = 0.0,
) -> np.ndarray:
    """Draw a token from softmax(logits / temperature) of each row, cut to its likeliest tokens.

    Parameters
    ----------
    logits : ndarray of float32 or float64, shape (V,) or (B, V)
        -inf forbids a token.
    uniform : ndarray of float64, shape (B,)
        In [0, 1), one number for each row.
    temperature, top_k, top_p, min_p : number, or array of shape (B,)
        See :func:`twell_numba.kernels.sampling.reference.sample_token`.

    Returns
    -------
    ndarray of int64, shape (B,)
        -1 where no token can be chosen: a logit is NaN or +inf, or all are -inf.

    Raises
    ------
    TypeError
        If logits are of another dtype.
    ValueError
        If the shapes do not fit.
    """
    (logits,) = float_inputs(logits=logits)
    if logits.ndim not in (1, 2) or logits.shape[-1] == 0:
        raise ValueError(f"logits of shape {logits.shape} given, (V,) or (B, V) wanted")
    rows = logits.reshape(-1, logits.shape[-1])
    require_shape("uniform", uniform, (len(rows),))
    numbers = [
        np.broadcast_to(np.asarray(setting, np.float64), len(rows))
        for setting in (uniform, temperature, top_p, min_p)
    ]
    counts = np.broadcast_to(np.asarray(top_k, np.int64), len(rows))
    tokens = np.empty(len(rows), np.int64)

    def draw(start: int, stop: int) -> None:
        for row in range(start, stop):
            settings = [float(number[row]) for number in numbers]
            tokens[row] = _draw_from(rows[row], int(counts[row]), *settings)

    run_ranges(draw, len(rows), grain=1 + GRAIN // rows.shape[1])
    return tokens


def _draw_from(
    logits: np.ndarray, top_k: int, uniform: float, temperature: float, top_p: float, min_p: float
) -> int:
    largest = logits.max()
    if not np.isfinite(largest):
        return -1
    if temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):  # a tiny temperature makes -inf, which is right
        scaled = (logits.astype(np.float64) - np.float64(largest)) / temperature
    return int(_draw(logits, scaled, np.exp(scaled), uniform, top_k, top_p, min_p))


@jit
def _draw(logits, scaled, weights, uniform, top_k, top_p, min_p):
    count, mass, span, enough = 0, 0.0, 0.0, 0
    for v in range(weights.size):
        if weights[v] > 0:
            count += 1
            mass += weights[v]
            enough += weights[v] >= min_p
            span = max(span, -scaled[v])
    # Where the quotient would be infinite, all logits are as good as equal and share a bucket.
    scale = BUCKETS / min(span, SPAN) if span > SMALLEST_SPAN else 0.0
    bucket_of = np.empty(weights.size, np.int16)
    counts, masses = np.zeros(BUCKETS, np.int64), np.zeros(BUCKETS)
    for v in range(weights.size):
        bucket_of[v] = -1
        if weights[v] > 0:
            bucket = np.int64(min(-scaled[v] * scale, BUCKETS - 1.0))
            bucket_of[v] = bucket
            counts[bucket] += 1
            masses[bucket] += weights[v]

    buckets = logits, weights, bucket_of, counts, masses
    if 0 < top_k < count:
        count, mass, _ = _first(buckets, top_k, np.inf, False)
    if top_p < 1:
        count, mass, _ = _first(buckets, count, top_p * mass, False)
    if enough < count:
        count, mass, _ = _first(buckets, enough, np.inf, False)
    return _first(buckets, count, uniform * mass, True)[2]


@jit
def _first(buckets, most, wanted, is_strict):
    """Return how many tokens it takes to weigh as much as wanted (or more), at most ``most``.

    Also what they weigh, and the last of them.
    """
    logits, weights, bucket_of, counts, masses = buckets
    count, mass, token = 0, 0.0, np.int64(-1)
    for bucket in range(BUCKETS):
        sum_with = mass + masses[bucket]
        is_reached = sum_with > wanted or (sum_with == wanted and not is_strict)
        if count + counts[bucket] < most and not is_reached:
            count += counts[bucket]
            mass = sum_with
            continue
        members = np.flatnonzero(bucket_of == bucket)
        for i in np.argsort(-logits[members], kind="mergesort"):  # of equals, the first stays first
            token = members[i]
            count += 1
            mass += weights[token]
            if count >= most or mass > wanted or (mass == wanted and not is_strict):
                return count, mass, token
    return count, mass, token
