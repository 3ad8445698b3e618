"""A matrix product with trained weights, without bias."""

from collections.abc import Callable

from twell_numba.device.arrays import Array
from twell_numba.kernels.dense_product import linear, linear_backward
from twell_numba.layers.parameter import Parameter

Backprop = Callable[..., Array]


class Linear:
    """Y = X W^T.

    Parameters
    ----------
    name : str
        Name of the weight in a checkpoint.
    weight : array, shape (out, in)
    """

    def __init__(self, name: str, weight: Array) -> None:
        self.weight = Parameter(name, weight)

    @classmethod
    def sharing(cls, parameter: Parameter) -> "Linear":
        """Return a layer that uses (and trains) a parameter of another layer: tied weights."""
        layer = cls(parameter.name, parameter.value)
        layer.weight = parameter
        return layer

    def __call__(self, x: Array) -> tuple[Array, Backprop]:
        """Return Y (M, out) for X (M, in), and the backward pass.

        ``backprop(dy, dx=None)`` returns dX (M, in); if it is given one already, it adds to it.
        """
        weight = self.weight.operand
        y = linear(x, weight)

        def backprop(dy: Array, dx: Array | None = None) -> Array:
            return linear_backward(dy, x, weight, self.weight.grad_buffer(), dx)

        return y, backprop

    def parameters(self) -> list[Parameter]:
        """Return the parameters trained here."""
        return [self.weight]
