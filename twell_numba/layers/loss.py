"""The training loss: mean cross entropy of the next token."""

from collections.abc import Callable

import numpy as np

from twell_numba.kernels.cross_entropy import cross_entropy, cross_entropy_backward


def cross_entropy_loss(
    logits: np.ndarray, targets: np.ndarray, token_count: int | None = None
) -> tuple[float, Callable[[], np.ndarray]]:
    """Return the mean cross entropy over the counted tokens, and its backward pass.

    Parameters
    ----------
    logits : ndarray, shape (M, V)
    targets : ndarray of integers, shape (M,)
        The right token of each row, or -1 for a row that does not count.
    token_count : int, optional
        Divide the sum by this instead of by the number of counted tokens. With micro-batches, give
        all of them the counted tokens of the whole batch: their losses and gradients then add up
        to those of the whole batch, however unevenly the tokens are shared out.

    Returns
    -------
    loss : float
        Summed in float64. 0 if no token counts.
    backprop : callable
        Takes nothing and returns dlogits (M, V).
    """
    losses, log_sum_exp = cross_entropy(logits, targets)
    if token_count is None:
        token_count = int(np.count_nonzero(np.asarray(targets) >= 0))
    scale = 1.0 / max(token_count, 1)

    def backprop() -> np.ndarray:
        return cross_entropy_backward(logits, targets, log_sum_exp, scale)

    return float(losses.sum(dtype=np.float64)) * scale, backprop
