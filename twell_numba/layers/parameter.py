"""A trained array and its gradient."""

import numpy as np


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
    read_only : ndarray
        A read-only view of ``value``, which kernels take as it is: for one token, checks count.
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
        self.read_only = value.view()
        self.read_only.flags.writeable = False

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
        return f"Parameter({self.name!r}, shape={self.value.shape}, dtype={self.value.dtype})"
