"""Root mean square normalization."""

from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike

from twell_numba.kernels.rms_norm import rms_norm, rms_norm_backward
from twell_numba.layers.parameter import Parameter


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight, row by row (Zhang and Sennrich, 2019).

    Parameters
    ----------
    name : str
        Name of the weight in a checkpoint.
    width : int
        D, the number of columns.
    eps : float
        Keeps the root away from zero.
    dtype : dtype
        Of the weight, which starts as ones.
    """

    def __init__(
        self, name: str, width: int, eps: float = 1e-5, dtype: DTypeLike = np.float32
    ) -> None:
        self.weight = Parameter(name, np.ones(width, dtype), decay=False)
        self.eps = eps

    def __call__(self, x: np.ndarray) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
        """Return Y (M, D) for X (M, D), and the backward pass."""
        weight = self.weight.value
        y, inverse_rms = rms_norm(x, weight, self.eps)

        def backprop(dy: np.ndarray) -> np.ndarray:
            dx, dweight = rms_norm_backward(dy, x, weight, inverse_rms)
            self.weight.add_grad(dweight)
            return dx

        return y, backprop

    def parameters(self) -> list[Parameter]:
        """Return the parameters trained here."""
        return [self.weight]
