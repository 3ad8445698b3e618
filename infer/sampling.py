"""Choosing the next token from a model's logits."""

import math

import numpy as np

from twell_numba.errors import TwellError, UsageError


def sample(
    logits: np.ndarray,
    rng: np.random.Generator,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> int:
    """Draw a token from softmax(logits / temperature), cut to its likeliest tokens.

    Parameters
    ----------
    logits : ndarray, shape (V,)
        -inf forbids a token.
    rng : numpy.random.Generator
    temperature : float
        0 takes the likeliest token (of equals, the first).
    top_k : int
        Keep the k likeliest tokens; 0 keeps all.
    top_p : float
        Then keep the fewest likeliest tokens that together have at least this probability
        (Holtzman et al., 2020). At least one is kept.

    Raises
    ------
    UsageError
        If a setting is out of range.
    TwellError
        If no token can be chosen: a logit is NaN or +inf, or all are -inf.
    """
    check_sampling(temperature, top_k, top_p)
    largest = float(logits.max())
    if not math.isfinite(largest):
        raise TwellError(
            f"the largest logit is {largest}, a finite number wanted: the model's weights have "
            f"diverged, use an earlier checkpoint"
        )
    if temperature == 0:
        return int(np.argmax(logits))

    order = np.argsort(-logits, kind="stable")  # of equals, the first stays first
    if top_k:
        order = order[:top_k]
    with np.errstate(over="ignore"):  # a tiny temperature makes -inf, which is right
        scaled = (logits[order].astype(np.float64) - largest) / temperature
    cumulative = np.cumsum(np.exp(scaled))
    cumulative /= cumulative[-1]
    kept = int(np.searchsorted(cumulative, top_p)) + 1
    cumulative = cumulative[:kept]
    return int(order[np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")])


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Raise UsageError unless the settings of :func:`sample` are in range."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise UsageError(f"temperature {temperature} given, a finite number of at least 0 wanted")
    if top_k < 0:
        raise UsageError(f"top-k {top_k} given, at least 0 wanted (0 keeps every token)")
    if not 0 < top_p <= 1:
        raise UsageError(f"top-p {top_p} given, above 0 and at most 1 wanted (1 keeps every token)")
