"""A matrix product with trained weights, with or without a bias."""

from collections.abc import Callable

from twell_numba.device.arrays import Array
from twell_numba.kernels.bias import add_bias, bias_backward
from twell_numba.kernels.dense_product import linear, linear_backward
from twell_numba.layers.parameter import Parameter

Backprop = Callable[..., Array]


class Linear:
    """Y = X W^T + b.

    Parameters
    ----------
    name : str
        Name of the weight in a checkpoint, ``{layer}.weight``; the bias is ``{layer}.bias``.
    weight : array, shape (out, in)
    bias : array, shape (out,), optional
        Weight decay does not apply to it.

    Raises
    ------
    ValueError
        If the bias is not of the shape wanted.
    """

    def __init__(self, name: str, weight: Array, bias: Array | None = None) -> None:
        self.weight = Parameter(name, weight)
        self.bias: Parameter | None = None
        if bias is not None:
            name = name.removesuffix("weight") + "bias"
            if bias.shape != weight.shape[:1]:
                raise ValueError(
                    f"{name} of shape {bias.shape} given, {weight.shape[:1]} wanted beside a "
                    f"weight of shape {weight.shape}"
                )
            self.bias = Parameter(name, bias, decay=False)

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
        if self.bias is not None:
            add_bias(y, self.bias.operand)

        def backprop(dy: Array, dx: Array | None = None) -> Array:
            if self.bias is not None:
                bias_backward(dy, self.bias.grad_buffer())
            return linear_backward(dy, x, weight, self.weight.grad_buffer(), dx)

        return y, backprop

    def parameters(self) -> list[Parameter]:
        """Return the parameters trained here."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]
