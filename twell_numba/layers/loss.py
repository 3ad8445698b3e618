"""The training loss: cross entropy of the next token."""

import numpy as np

from twell_numba.device.arrays import Array, is_on_gpu
from twell_numba.kernels.cross_entropy import cross_entropy_in_place


def cross_entropy_loss(
    logits: Array, targets: Array, token_count: int | None = None
) -> tuple[Array, Array]:
    """Return the cross entropy of each token, and the gradient of their mean.

    Parameters
    ----------
    logits : array, shape (M, V)
        Overwritten with the gradient: a second array of this size is not made.
    targets : array of integers, shape (M,)
        The right token of each row, or -1 for a row that does not count.
    token_count : int, optional
        Divide the sum by this instead of by the number of counted tokens. With micro-batches, give
        all of them the counted tokens of the whole batch: their losses and gradients then add up
        to those of the whole batch, however unevenly the tokens are shared out. Wanted for targets
        on a GPU, which nobody counts.

    Returns
    -------
    losses : array, shape (M,)
        Of which the loss is the sum divided by the count. 0 for rows that do not count.
    dlogits : array, shape (M, V)
        ``logits`` itself.
    """
    if token_count is None:
        if is_on_gpu(targets):
            raise ValueError("targets on a GPU given without token_count, both wanted")
        token_count = int(np.count_nonzero(np.asarray(targets) >= 0))
    losses = cross_entropy_in_place(logits, targets, 1.0 / max(token_count, 1))
    return losses, logits
