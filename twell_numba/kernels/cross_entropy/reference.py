"""Softmax cross entropy in plain NumPy.

    L_m = log sum_v exp(x_mv),   loss_m = L_m - x_m,target(m)

and backward, for a sum of the losses times ``scale``:

    dx_mv = (exp(x_mv - L_m) - [v = target(m)]) * scale

A row of target -1 does not count: its loss and its gradient are 0.
"""

import numpy as np


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return losses (M,) and L (M,) for logits (M, V) and targets (M,)."""
    maximum = logits.max(axis=1)
    log_sum_exp = maximum + np.log(np.exp(logits - maximum[:, None]).sum(axis=1))
    chosen = logits[np.arange(logits.shape[0]), np.maximum(targets, 0)]
    return np.where(targets < 0, 0, log_sum_exp - chosen).astype(logits.dtype), log_sum_exp


def cross_entropy_backward(
    logits: np.ndarray, targets: np.ndarray, log_sum_exp: np.ndarray, scale: float
) -> np.ndarray:
    """Return dlogits (M, V)."""
    dlogits = np.exp(logits - log_sum_exp[:, None])
    counted = targets >= 0
    dlogits[counted, targets[counted]] -= 1
    dlogits[~counted] = 0
    return dlogits * logits.dtype.type(scale)


def cross_entropy_in_place(logits: np.ndarray, targets: np.ndarray, scale: float) -> np.ndarray:
    """Return losses (M,), and overwrite the logits with their gradient."""
    losses, log_sum_exp = cross_entropy(logits, targets)
    logits[...] = cross_entropy_backward(logits, targets, log_sum_exp, scale)
    return losses
