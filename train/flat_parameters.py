"""All parameters of a model side by side in a GPU's memory, so that one kernel changes them all."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from twell_numba.device.gpu import DeviceArray, zeros
from twell_numba.device.gpu.cast import cast
from twell_numba.layers.parameter import Parameter

# Numbers from one parameter's beginning to the next are a multiple of this: 256 bytes of float32.
ALIGNMENT = 64


class FlatParameters:
    """Values, gradients and moments of parameters, each a part of one long array.

    The parameters' own arrays are views of these afterwards. What lies between two parameters is
    0 and stays 0, with gradients of 0.

    Parameters
    ----------
    parameters : sequence of Parameter
        Of float32, on the host or on the GPU.
    stream : Stream
    operand_dtype : dtype
        In which kernels compute with them: float32, bfloat16 or float16.

    Attributes
    ----------
    value, grad, first_moment, second_moment : DeviceArray of float32, shape (N,)
    copy : DeviceArray, shape (N,), or None
        What kernels compute with, where that is no float32.
    decayed : int
        So many numbers from the beginning on belong to parameters with weight decay.
    """

    def __init__(
        self, parameters: Sequence[Parameter], stream: Any, operand_dtype: np.dtype
    ) -> None:
        ordered = sorted(parameters, key=lambda parameter: not parameter.decay)
        self._places: dict[str, tuple[int, tuple[int, ...]]] = {}
        size = self.decayed = 0
        for parameter in ordered:
            self._places[parameter.name] = size, parameter.value.shape
            size += -(-parameter.value.size // ALIGNMENT) * ALIGNMENT
            if parameter.decay:
                self.decayed = size
        self.value, self.grad, self.first_moment, self.second_moment = (
            zeros(size, np.float32, stream) for _ in range(4)
        )
        for parameter in ordered:
            self.part(self.value, parameter.name).copy_from(parameter.value)
        self.copy: DeviceArray | None = None
        if operand_dtype != np.float32:
            self.copy = cast(self.value, operand_dtype)
        for parameter in ordered:
            name = parameter.name
            parameter.train_on_gpu(
                self.part(self.value, name),
                None if self.copy is None else self.part(self.copy, name),
                self.part(self.grad, name),
            )

    def part(self, flat: DeviceArray, name: str) -> DeviceArray:
        """Return the part of one of the arrays that belongs to a parameter, in its shape."""
        start, shape = self._places[name]
        return flat[start : start + math.prod(shape)].reshape(shape)

    def refresh_copy(self) -> None:
        """Make the copy anew, after the values were changed from outside."""
        if self.copy is not None:
            cast(self.value, self.copy.dtype, self.copy)
