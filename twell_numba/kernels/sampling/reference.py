"""Choosing tokens from logits, in plain NumPy.

Tokens are put in the order of their logits, the largest first, of equals that of the smaller
number. With w = exp((logit - largest) / temperature), kept are

    the first k tokens,                          and of these
    the fewest from the first on whose w sum to at least top_p times the sum of all k, and of these
    those whose w is at least min_p (that of the first is 1).

With W the sum of those, and a uniform number u in [0, 1), the token is the first one up to which
the sum of w is above u W. Sums are in float64.
"""

import math

import numpy as np
from numpy.typing import ArrayLike


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
    logits : ndarray, shape (V,) or (B, V)
        -inf forbids a token.
    uniform : ndarray of float64, shape (B,)
        In [0, 1), one number for each row.
    temperature : float, or array of shape (B,), as all that follow
        0 takes the likeliest token (of equals, the first).
    top_k : int
        Keep the k likeliest tokens; 0 keeps all.
    top_p : float
        Then keep the fewest likeliest tokens that together have at least this probability
        (Holtzman et al., 2020). At least one is kept.
    min_p : float
        Then keep those that have at least this fraction of the likeliest token's probability
        (Nguyen et al., 2024), at most 1.

    Returns
    -------
    ndarray of int64, shape (B,)
        -1 where no token can be chosen: a logit is NaN or +inf, or all are -inf.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    settings = [
        np.broadcast_to(setting, len(rows)).tolist()
        for setting in (uniform, temperature, top_k, top_p, min_p)
    ]
    drawn = [_sample_row(*given) for given in zip(rows, *settings, strict=True)]
    return np.array(drawn, np.int64)


def _sample_row(
    logits: np.ndarray, uniform: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> int:
    largest = float(logits.max())
    if not math.isfinite(largest):
        return -1
    if temperature == 0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")  # of equals, the first stays first
    if top_k:
        order = order[:top_k]
    with np.errstate(over="ignore"):  # a tiny temperature makes -inf, which is right
        scaled = (logits[order].astype(np.float64) - largest) / temperature
    weights = np.exp(scaled)
    cumulative = np.cumsum(weights)
    cumulative /= cumulative[-1]
    kept = int(np.searchsorted(cumulative, top_p)) + 1
    cumulative = cumulative[: min(kept, np.count_nonzero(weights >= min_p))]
    return int(order[np.searchsorted(cumulative, uniform * cumulative[-1], side="right")])
