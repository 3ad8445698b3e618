"""Choosing the next token from a model's logits."""

import numpy as np

from twell_numba.device.arrays import Array, is_on_gpu, to_host
from twell_numba.errors import TwellError
from twell_numba.infer.request import GenerationSettings, TokenLogprob
from twell_numba.kernels.sampling import sample_token


def sample(
    logits: Array,
    rng: np.random.Generator,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
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
    min_p : float
        Then keep those that have at least this fraction of the likeliest token's probability
        (Nguyen et al., 2024).

    Raises
    ------
    UsageError
        If a setting is out of range.
    TwellError
        If no token can be chosen: a logit is NaN or +inf, or all are -inf.
    """
    GenerationSettings(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p).validate()
    uniform: Array = np.array([rng.random() if temperature else 0.0])
    if is_on_gpu(logits):
        from twell_numba.device.gpu import from_numpy

        uniform = from_numpy(uniform, logits.stream)
    token = int(to_host(sample_token(logits, uniform, temperature, top_k, top_p, min_p))[0])
    if token < 0:
        raise no_token_error(to_host(logits))
    return token


def no_token_error(logits: np.ndarray) -> TwellError:
    """Return the error that says why no token can be chosen from logits (V,)."""
    largest = logits.max()
    if largest == -np.inf:
        return TwellError("every logit is -inf, which forbids all tokens; at least one wanted")
    return TwellError(
        f"the largest logit is {largest}, a finite number wanted: the model's weights have "
        f"diverged, use an earlier checkpoint"
    )


def penalize_repetition(logits: np.ndarray, seen: np.ndarray, penalty: float) -> None:
    """Make tokens less likely that were seen before, in place (Keskar et al., 2019).

    Parameters
    ----------
    logits : ndarray, shape (V,)
        Of the tokens seen, positive ones are divided by the penalty, negative ones multiplied.
    seen : ndarray of integers
        Tokens, each once; those without a logit are passed over.
    penalty : float
    """
    seen = seen[seen < logits.size]
    before = logits[seen]
    logits[seen] = np.where(before > 0, before / penalty, before * penalty)


def log_probability(logits: np.ndarray, token: int, count: int) -> TokenLogprob:
    """Return how likely a token is by softmax(logits), and the ``count`` likeliest tokens.

    Parameters
    ----------
    logits : ndarray, shape (V,)
    token : int
    count : int
        At most V are given.
    """
    largest = logits.max()
    total = np.exp(logits - largest).sum(dtype=np.float64)
    log_sum = float(largest) + float(np.log(total))
    pairs = [(int(other), float(logits[other]) - log_sum) for other in _likeliest(logits, count)]
    return TokenLogprob(token, float(logits[token]) - log_sum, tuple(pairs))


def _likeliest(logits: np.ndarray, count: int) -> np.ndarray:
    """Return the tokens of the largest logits, the largest first."""
    first = max(0, logits.size - count)
    if first == logits.size:
        return np.empty(0, np.int64)
    top = np.argpartition(logits, first)[first:]
    return top[np.lexsort((top, -logits[top]))]
