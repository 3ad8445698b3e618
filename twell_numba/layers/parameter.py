"""A trained array and its gradient."""

import math

import numpy as np

from twell_numba.formats import BlockELLMatrix, CSRMatrix

Operand = np.ndarray | CSRMatrix | BlockELLMatrix
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
    grad : ndarray or None
        Sum of the gradients added since :meth:`zero_grad`; None before the first one. It has the
        shape and dtype of ``value``.
    """

    def __init__(self, name: str, value: np.ndarray, decay: bool = True) -> None:
        self.name = name
        self.value = value
        self.decay = decay
        self.grad: np.ndarray | None = None

    @property
    def value(self) -> np.ndarray:
        """The array itself; it may be replaced by another one."""
        return self._value

    @value.setter
    def value(self, value: np.ndarray) -> None:
        self._value = value
        read_only = value.view()
        read_only.flags.writeable = False
        self._operand: Operand = read_only

    @property
    def operand(self) -> Operand:
        """What kernels take: a read-only view of ``value``, or the matrix that holds it.

        They take it as it is, without a copy: for one token, checks count.
        """
        return self._operand

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
        return int(np.count_nonzero(self.value))

    def grad_buffer(self) -> np.ndarray:
        """Return ``grad`` for adding into, made of zeros on first use."""
        if self.grad is None:
            self.grad = np.zeros(self.value.shape, self.value.dtype)
        return self.grad

    def add_grad(self, gradient: np.ndarray) -> None:
        """Add ``gradient`` into ``grad``.

        Raises
        ------
        ValueError
            If the shape is not that of the value: broadcasting would hide a mistake.
        """
        if gradient.shape != self.value.shape:
            raise ValueError(
                f"gradient of shape {gradient.shape} given for {self.name}, "
                f"shape {self.value.shape} wanted"
            )
        buffer = self.grad_buffer()
        buffer += gradient

    def zero_grad(self) -> None:
        """Set the gradient to zero, keeping its memory."""
        if self.grad is not None:
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
    def value(self) -> np.ndarray:
        """The values of the stored entries; if replaced, by an array of the same shape."""
        return self._matrix.stored_values

    @value.setter
    def value(self, value: np.ndarray) -> None:
        if value is not self._matrix.stored_values:
            self._matrix = self._matrix.with_values(value)

    @property
    def operand(self) -> Operand:
        """The matrix."""
        return self._matrix

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
        return self._matrix.count_nonzero()


def make_parameter(name: str, weights: Operand) -> Parameter:
    """Return a parameter that holds an array or a sparse matrix, without a copy.

    Raises
    ------
    TypeError
        If it is neither an array, nor a CSRMatrix or BlockELLMatrix.
    """
    if isinstance(weights, np.ndarray):
        return Parameter(name, weights)
    if isinstance(weights, CSRMatrix | BlockELLMatrix):
        return SparseParameter(name, weights)
    raise TypeError(
        f"{name} of type {type(weights).__name__} given, a NumPy array, CSRMatrix or "
        f"BlockELLMatrix wanted"
    )
