"""What is common to NumPy's arrays and those on a GPU."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

# numpy.ndarray or twell_numba.device.gpu.DeviceArray, all arrays of a call of the same kind. They
# share attributes and a few methods, but no class; kernels check what they are given.
Array: TypeAlias = Any


def is_on_gpu(operand: Any) -> bool:
    """Return whether an array, or what is made of arrays, is in a GPU's memory."""
    return getattr(operand, "is_on_gpu", False)


def to_host(array: Array) -> np.ndarray:
    """Return a NumPy array: itself, or a copy of one on a GPU, for which the GPU is waited for."""
    return array.to_numpy() if is_on_gpu(array) else array


def zeros_like(array: Array, dtype: DTypeLike | None = None) -> Array:
    """Return zeros of an array's shape, and its dtype unless another is given, where it is."""
    dtype = array.dtype if dtype is None else dtype
    if not is_on_gpu(array):
        return np.zeros(array.shape, dtype)
    from twell_numba.device.gpu import zeros

    return zeros(array.shape, dtype, array.stream)
