"""AdamW with decoupled weight decay, and clipping of the gradient by its global norm."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from twell_numba.device.arrays import Array, to_host
from twell_numba.errors import TwellError
from twell_numba.kernels.adamw import adamw_step, sum_of_squares
from twell_numba.layers.parameter import Parameter

if TYPE_CHECKING:
    from twell_numba.train.flat_parameters import FlatParameters

_FIRST = "first_moment."
_SECOND = "second_moment."


class AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over a table of parameters.

    With gradient g, learning rate a and step t, for each parameter w::

        m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
        w = w - a (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) - a weight_decay w

    Weight decay applies to parameters with ``decay`` set.

    Parameters
    ----------
    parameters : mapping of str to Parameter
        Their values are changed in place; gradients are read and kept.
    beta1, beta2, eps, weight_decay : float

    Attributes
    ----------
    step_count : int
        Steps taken, t.
    first_moment, second_moment : dict of str to array
        m and v by parameter name, in the parameter's shape and dtype.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        *,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        self._parameters = dict(parameters)
        self._beta1 = beta1
        self._beta2 = beta2
        self._eps = eps
        self._weight_decay = weight_decay
        self.step_count = 0
        self.first_moment: dict[str, Array] = {
            name: np.zeros_like(parameter.value) for name, parameter in self._parameters.items()
        }
        self.second_moment: dict[str, Array] = {
            name: np.zeros_like(parameter.value) for name, parameter in self._parameters.items()
        }

    def replace(
        self, parameter: Parameter, same_entries: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        """Go on with another parameter in the place of the one of the same name.

        Parameters
        ----------
        parameter : Parameter
            One that holds other entries of the same tensor, such as those that are not zero.
        same_entries : callable
            Takes an array like the old value and returns one like the new value: what becomes of
            the moments.
        """
        name = parameter.name
        self._parameters[name] = parameter
        for moments in (self.first_moment, self.second_moment):
            moments[name] = same_entries(moments[name])

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        for parameter in self._parameters.values():
            parameter.zero_grad()

    def gradient_norm(self) -> float:
        """Return the Euclidean norm of all gradients taken together, summed in float64."""
        return math.sqrt(
            sum(sum_of_squares(parameter.grad_buffer()) for parameter in self._parameters.values())
        )

    def step(self, learning_rate: float, grad_scale: float = 1.0) -> None:
        """Change every parameter by its gradient times ``grad_scale``."""
        self.step_count += 1
        for name, parameter in self._parameters.items():
            adamw_step(
                parameter.value,
                parameter.grad_buffer(),
                self.first_moment[name],
                self.second_moment[name],
                learning_rate=learning_rate,
                beta1=self._beta1,
                beta2=self._beta2,
                eps=self._eps,
                weight_decay=self._weight_decay if parameter.decay else 0.0,
                step=self.step_count,
                grad_scale=grad_scale,
            )

    def coefficients(self, learning_rate: float, step: int) -> np.ndarray:
        """Return what the update on a GPU multiplies by in a step, float32 of shape (2, 8).

        The first row is for parameters with weight decay, the second for those without. Columns:
        see :func:`twell_numba.kernels.adamw.cuda.adamw_step_recorded`.
        """
        common = [self._beta1, 1 - self._beta1, self._beta2, 1 - self._beta2, self._eps]
        corrected = [learning_rate / (1 - self._beta1**step), (1 - self._beta2**step) ** -0.5]
        decays = (learning_rate * self._weight_decay, 0.0)
        return np.array([[*common, decay, *corrected] for decay in decays], np.float32)

    def move_to_gpu(self, stream: Any, operand_dtype: DTypeLike) -> "FlatParameters":
        """Hold values, gradients and moments on a GPU; see :class:`FlatParameters`."""
        from twell_numba.train.flat_parameters import FlatParameters

        flat = FlatParameters(list(self._parameters.values()), stream, np.dtype(operand_dtype))
        for moments, all_moments in (
            (self.first_moment, flat.first_moment),
            (self.second_moment, flat.second_moment),
        ):
            for name, moment in moments.items():
                moments[name] = flat.part(all_moments, name)
                if self.step_count:  # before the first step they are zeros
                    moments[name].copy_from(moment)
        return flat

    def move_to_host(self) -> None:
        """Hold values and moments in the host's memory again, without gradients."""
        for name, parameter in self._parameters.items():
            parameter.move_to_host()
            self.first_moment[name] = to_host(self.first_moment[name])
            self.second_moment[name] = to_host(self.second_moment[name])

    def compile(self) -> None:
        """Compile the kernels on a copy of one parameter, changing nothing."""
        parameter = min(self._parameters.values(), key=lambda parameter: parameter.value.size)
        arrays = [np.zeros_like(parameter.value) for _ in range(4)]
        sum_of_squares(arrays[0])
        adamw_step(
            *arrays,
            learning_rate=0.0,
            beta1=self._beta1,
            beta2=self._beta2,
            eps=self._eps,
            weight_decay=0.0,
            step=1,
        )

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Return both moments of every parameter under one name each, for saving.

        They are the arrays themselves, or copies of what is on a GPU.
        """
        first = {_FIRST + name: to_host(moment) for name, moment in self.first_moment.items()}
        second = {_SECOND + name: to_host(moment) for name, moment in self.second_moment.items()}
        return first | second

    def load_state_arrays(self, arrays: Mapping[str, np.ndarray], step_count: int) -> None:
        """Go on from saved moments, which are copied; before any move to a GPU.

        Raises
        ------
        TwellError
            If an array is missing, unexpected, or of another shape or dtype, or a mean of squares
            is negative.
        """
        wanted = self.state_arrays()
        if arrays.keys() != wanted.keys():
            name = min(arrays.keys() ^ wanted.keys())
            fault = "missing" if name in wanted else "unexpected"
            raise TwellError(
                f"optimizer state {name} is {fault}: it belongs to another model; "
                f"resume from the checkpoint that was saved with this one"
            )
        for name, array in arrays.items():
            target = wanted[name]
            if array.shape != target.shape or array.dtype != target.dtype:
                raise TwellError(
                    f"optimizer state {name} is {array.dtype} {array.shape}, "
                    f"{target.dtype} {target.shape} wanted: it belongs to another model; "
                    f"resume from the checkpoint that was saved with this one"
                )
            if name.startswith(_SECOND) and (array < 0).any():
                raise TwellError(
                    f"optimizer state {name} holds {np.nanmin(array):.4g}, a mean of squares of at "
                    f"least 0 wanted: it is damaged; resume from an earlier checkpoint"
                )
            target[...] = array
        self.step_count = step_count


def clip_scale(gradient_norm: float, limit: float) -> float:
    """Return what to multiply gradients by for a norm of at most ``limit`` (0: no limit)."""
    if limit > 0 and gradient_norm > limit:
        return limit / gradient_norm
    return 1.0
