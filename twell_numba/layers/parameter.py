"""A trained array and its gradient, on the CPU or on a GPU.

On a GPU kernels may compute with a copy in 16 bits, while training changes the numbers in float32
and adds gradients in float32: mixed precision.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from twell_numba.device.arrays import Array, is_on_gpu, to_host, zeros_like
from twell_numba.formats import BlockELLMatrix, CSRMatrix
from twell_numba.kernels.twell.float8_weights import Float8Weights

Operand = Array | CSRMatrix | BlockELLMatrix
"""What a kernel takes for a weight: an array, or a sparse matrix."""


class Parameter:
    """An array that training changes, with the gradient that backward passes add into.

    Parameters
    ----------
    name : str
        Name of the tensor in a checkpoint.
    value : ndarray
        Held as it is, without a copy.
    decay : bool
        Whether weight decay applies to it.

    Attributes
    ----------
    grad : array or None
        Sum of the gradients added since :meth:`zero_grad`; None before the first one. It has the
        shape of ``value``, and its dtype, or float32 where that is a float of 16 bits.
    """

    def __init__(self, name: str, value: Array, decay: bool = True) -> None:
        self.name = name
        self.value = value
        self.decay = decay
        self.grad: Array | None = None

    @property
    def value(self) -> Array:
        """The array itself; it may be replaced by another one."""
        return self._value

    @value.setter
    def value(self, value: Array) -> None:
        self._value = value
        self._operand: Operand = _as_operand(value)

    @property
    def operand(self) -> Operand:
        """What kernels take: ``value``, a copy in fewer bits, or the matrix that holds it.

        They take it as it is, without a copy: for one token, checks count. On the CPU it is a
        read-only view.
        """
        return self._operand

    def move_to_gpu(self, stream: Any, dtype: DTypeLike) -> None:
        """Hold the values on a GPU from now on, in a dtype that need not be NumPy's own.

        Parameters
        ----------
        stream : twell_numba.device.gpu.Stream
        dtype : dtype of floats
        """
        self.value = _uploaded(self.value, stream, dtype)
        self.grad = None

    def move_to_host(self) -> None:
        """Hold the values in the host's memory from now on, without a gradient."""
        self.value = to_host(self.value)
        self.grad = None

    def train_on_gpu(self, value: Array, operand: Array | None, grad: Array) -> None:
        """Hold other arrays on a GPU that hold the same numbers: parts of larger ones, say.

        Parameters
        ----------
        value, grad : DeviceArray of float32
            In the shape of the present ``value``.
        operand : DeviceArray or None
            What kernels compute with, kept up to date by the optimizer; None: ``value`` itself.
        """
        self.value = value
        self.grad = grad
        if operand is not None:
            self._operand = operand

    def on_host(self) -> Operand:
        """Return the weights in the host's memory: as they are, or a copy of those on a GPU."""
        return to_host(self.value)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor; where only some entries are held, that of all of them."""
        return self.value.shape

    @property
    def size(self) -> int:
        """The number of elements of a tensor of this ``shape``."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that the weights take as they are held, without the gradient."""
        return self.value.nbytes

    def count_nonzero(self) -> int:
        """Return the number of elements that are not zero; NaN is not zero."""
        return int(np.count_nonzero(to_host(self.value)))

    def grad_buffer(self) -> Array:
        """Return ``grad`` for adding into, made of zeros on first use."""
        if self.grad is None:
            given = self.value.dtype
            dtype = np.dtype(np.float32) if given.itemsize == 2 else given.newbyteorder("=")
            self.grad = zeros_like(self.value, dtype)
        return self.grad

    def zero_grad(self) -> None:
        """Set the gradient to zero, keeping its memory."""
        if self.grad is None:
            return
        if is_on_gpu(self.grad):
            self.grad.fill_with_zeros()
        else:
            self.grad.fill(0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, shape={self.shape}, dtype={self.value.dtype})"


class SparseParameter(Parameter):
    """The stored entries of a sparse matrix: its pattern is fixed, its values are trained.

    ``value`` and ``grad`` hold one number for each stored entry, so that whatever works on them
    elementwise (an optimizer, a norm) works here as well and takes no more memory than they do.

    Parameters
    ----------
    name : str
        Name of the tensor in a checkpoint.
    matrix : CSRMatrix or BlockELLMatrix
        Held as it is, without a copy: ``value`` is its ``stored_values``. The padding of a
        BlockELLMatrix should hold zeros, as conversions leave it: it gets no gradient and so stays
        as it is, but whoever sums up ``value`` sees it.
    decay : bool
        Whether weight decay applies to it.
    """

    def __init__(self, name: str, matrix: CSRMatrix | BlockELLMatrix, decay: bool = True) -> None:
        self._matrix = matrix
        super().__init__(name, matrix.stored_values, decay)

    @property
    def matrix(self) -> CSRMatrix | BlockELLMatrix:
        """The matrix, whose values are ``value``."""
        return self._matrix

    @property
    def value(self) -> Array:
        """The values of the stored entries; if replaced, by an array of the same shape."""
        return self._matrix.stored_values

    @value.setter
    def value(self, value: Array) -> None:
        if value is not self._matrix.stored_values:
            self._matrix = self._matrix.with_values(value)
        self._operand = self._matrix

    def move_to_gpu(self, stream: Any, dtype: DTypeLike) -> None:
        """As for any parameter; the pattern goes there too."""
        self._matrix = self._matrix.to(stream)
        super().move_to_gpu(stream, dtype)

    def move_to_host(self) -> None:
        """As for any parameter; the pattern goes there too."""
        self._matrix = self._matrix.to("cpu")
        super().move_to_host()

    def train_on_gpu(self, value: Array, operand: Array | None, grad: Array) -> None:
        """As for any parameter; the arrays hold a number for each stored entry."""
        self._matrix = self._matrix.to(value.stream)
        super().train_on_gpu(value, None, grad)
        if operand is not None:
            self._operand = self._matrix.with_values(operand)

    def on_host(self) -> Operand:
        """Return the matrix in the host's memory."""
        return self._matrix.to("cpu")

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape, zeros included."""
        return self._matrix.shape

    @property
    def nbytes(self) -> int:
        """Bytes that values and indices take, padding included, without the gradient."""
        return self._matrix.nbytes

    def count_nonzero(self) -> int:
        """Return the number of elements that are not zero; NaN is not zero."""
        # Padding holds zeros.
        if is_on_gpu(self._matrix):
            return int(np.count_nonzero(to_host(self.value)))
        return self._matrix.count_nonzero()


class Float8Parameter(Parameter):
    """Weights held as 8-bit floats, which are not trained.

    Parameters
    ----------
    name : str
        Name of the tensor in a checkpoint.
    weights : Float8Weights
    """

    def __init__(self, name: str, weights: Float8Weights) -> None:
        self.name = name
        self.decay = False
        self.grad = None
        self._weights = weights

    @property
    def operand(self) -> Float8Weights:
        """The weights as they are held."""
        return self._weights

    @property
    def value(self) -> Array:
        """The numbers that the weights stand for: an array made anew, which nobody else sees."""
        return self._weights.to_dense()

    @value.setter
    def value(self, value: Array) -> None:
        raise TypeError(self._refusal())

    def move_to_gpu(self, stream: Any, dtype: DTypeLike) -> None:
        """As for any parameter; the weights stay 8-bit floats."""
        self._weights = replace(self._weights.to(stream), dtype=np.dtype(dtype))

    def move_to_host(self) -> None:
        """As for any parameter; the weights stay 8-bit floats."""
        self._weights = self._weights.to("cpu")

    def train_on_gpu(self, value: Array, operand: Array | None, grad: Array) -> None:
        """Refuse it."""
        raise TypeError(self._refusal())

    def grad_buffer(self) -> Array:
        """Refuse it."""
        raise TypeError(self._refusal())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights."""
        return self._weights.shape

    @property
    def nbytes(self) -> int:
        """Bytes that the 8-bit floats and their scales take."""
        return self._weights.nbytes

    def _refusal(self) -> str:
        return (
            f"{self.name} is held as 8-bit floats, for inference only; weights to be trained "
            'are wanted as they were: hold_weights("dense")'
        )


def make_parameter(name: str, weights: Operand) -> Parameter:
    """Return a parameter that holds an array or a sparse matrix, without a copy.

    Raises
    ------
    TypeError
        If it is neither an array, nor a CSRMatrix or BlockELLMatrix.
    """
    if isinstance(weights, CSRMatrix | BlockELLMatrix):
        return SparseParameter(name, weights)
    if isinstance(weights, np.ndarray) or is_on_gpu(weights):
        return Parameter(name, weights)
    raise TypeError(
        f"{name} of type {type(weights).__name__} given, a NumPy array, CSRMatrix or "
        f"BlockELLMatrix wanted"
    )


def _as_operand(value: Array) -> Operand:
    if is_on_gpu(value):
        return value
    read_only = value.view()
    read_only.flags.writeable = False
    return read_only


def _uploaded(value: Array, stream: Any, dtype: DTypeLike) -> Array:
    from twell_numba.device.gpu import from_numpy
    from twell_numba.device.gpu.cast import cast

    array = value if is_on_gpu(value) else from_numpy(value, stream)
    return array if array.dtype == dtype else cast(array, dtype)
