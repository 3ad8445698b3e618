"""What a feedforward layer with sparse weights hands from its forward to its backward pass."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class SparseWeightActivations:
    """What was counted in h; h itself is not kept.

    With sparse weights a product costs little, so the backward pass computes g and u again, a strip
    of tokens at a time, and no arrays of M x F are written and read.

    Attributes
    ----------
    shape : tuple of int
        M and F.
    nonzeros : int
        Entries of h that are not 0.
    absolute_sum : float
        Sum of |h|.
    fired : ndarray of bool, shape (F,)
        Neurons that were not 0 for at least one token.
    """

    shape: tuple[int, int]
    nonzeros: int
    absolute_sum: float
    fired: np.ndarray


def activation_statistics(
    activations: SparseWeightActivations,
) -> tuple[int, float, np.ndarray]:
    """Return how sparse the activations are, as counted in the forward pass.

    Returns
    -------
    nonzeros : int
        Entries with h != 0.
    absolute_sum : float
        Sum of |h|.
    fired : ndarray of bool, shape (F,)
        Whether the neuron's h was not 0 for at least one row.
    """
    return activations.nonzeros, activations.absolute_sum, activations.fired
