"""Root mean square normalization."""

from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike

from twell_numba.device.arrays import Array
from twell_numba.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_backward
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

    def __call__(
        self, x: Array, addend: Array | None = None
    ) -> tuple[Array, Array, Callable[..., Array]]:
        """Normalize a residual stream, after adding to it what the layer before has computed.

        Parameters
        ----------
        x : array, shape (M, D)
        addend : array, shape (M, D), optional

        Returns
        -------
        total : array, shape (M, D)
            x + addend, or x itself.
        y : array, shape (M, D)
            ``total``, normalized.
        backprop : callable
            ``backprop(dy, residual=None)`` returns the gradient of ``total`` (and so of x and of
            the addend), to which it adds ``residual``: what comes back along the stream itself.
        """
        weight = self.weight.operand
        if addend is None:
            total = x
            y, inverse_rms = rms_norm(x, weight, self.eps)
        else:
            total, y, inverse_rms = add_rms_norm(x, addend, weight, self.eps)

        def backprop(dy: Array, residual: Array | None = None) -> Array:
            grad = self.weight.grad_buffer()
            return rms_norm_backward(dy, total, weight, inverse_rms, grad, residual)

        return total, y, backprop

    def parameters(self) -> list[Parameter]:
        """Return the parameters trained here."""
        return [self.weight]
