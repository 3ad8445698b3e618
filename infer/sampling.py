"""Choosing the next token from a model's logits."""

import math

import numpy as np

from twell_numba.device.arrays import Array, is_on_gpu, to_host
from twell_numba.errors import TwellError, UsageError
from twell_numba.kernels.sampling import sample_token


def sample(
    logits: Array,
    rng: np.random.Generator,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> int:
    """Draw a token from softmax(logits / temperature), cut to its likeliest tokens.

    Parameters
    ----------
    logits : array, shape (V,)
        -inf forbids a token. On a GPU the token is drawn there: the same one for the same logits.
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
    uniform: Array = np.array([rng.random() if temperature else 0.0])
    if is_on_gpu(logits):
        from twell_numba.device.gpu import from_numpy

        uniform = from_numpy(uniform, logits.stream)
    token = int(to_host(sample_token(logits, uniform, temperature, top_k, top_p))[0])
    if token < 0:
        raise TwellError(
            f"the largest logit is {to_host(logits).max()}, a finite number wanted: the model's "
            f"weights have diverged, use an earlier checkpoint"
        )
    return token


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Raise UsageError unless the settings of :func:`sample` are in range."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise UsageError(f"temperature {temperature} given, a finite number of at least 0 wanted")
    if top_k < 0:
        raise UsageError(f"top-k {top_k} given, at least 0 wanted (0 keeps every token)")
    if not 0 < top_p <= 1:
        raise UsageError(f"top-p {top_p} given, above 0 and at most 1 wanted (1 keeps every token)")
