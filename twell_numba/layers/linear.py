"""A matrix product with trained weights, without bias."""

from collections.abc import Callable

import numpy as np

from twell_numba.device import add_matmul, matmul
from twell_numba.layers.parameter import Parameter


class Linear:
    """Y = X W^T.

    Parameters
    ----------
    name : str
        Name of the weight in a checkpoint.
    weight : ndarray, shape (out, in)
    """

    def __init__(self, name: str, weight: np.ndarray) -> None:
        self.weight = Parameter(name, weight)

    @classmethod
    def sharing(cls, parameter: Parameter) -> "Linear":
        """Return a layer that uses (and trains) a parameter of another layer: tied weights."""
        layer = cls(parameter.name, parameter.value)
        layer.weight = parameter
        return layer

    def __call__(self, x: np.ndarray) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
        """Return Y (M, out) for X (M, in), and the backward pass."""
        weight = self.weight.value
        y = matmul(x, weight.T)  # [M, in] @ [in, out]

        def backprop(dy: np.ndarray) -> np.ndarray:
            add_matmul(dy.T, x, self.weight.grad_buffer())  # [out, M] @ [M, in]
            return matmul(dy, weight)  # [M, out] @ [out, in]

        return y, backprop

    def parameters(self) -> list[Parameter]:
        """Return the parameters trained here."""
        return [self.weight]
