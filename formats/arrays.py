"""The arrays that sparse matrices take: accepted dtypes, byte order and strides.

They are NumPy's, or those of a GPU (``twell_numba.device.gpu.DeviceArray``), which are always in
native byte order and C-contiguous.
"""

import operator
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
VALUE_DTYPES = (np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)

LARGEST_SIZE = 2**63 - 1

# numpy.ndarray or DeviceArray: they share attributes but no class.
Array: TypeAlias = Any


def is_on_gpu(operand: Any) -> bool:
    """Return whether an array, or a matrix made of arrays, is in a GPU's memory."""
    return getattr(operand, "is_on_gpu", False)


def host_array(array: Array) -> np.ndarray:
    """Return an array in the host's memory: itself, or a copy of one on a GPU, which waits."""
    return array.to_numpy() if is_on_gpu(array) else array


def refuse_gpu(operand: Any, owner: str) -> None:
    """Raise TypeError for what is in a GPU's memory; NumPy would not know what to do with it."""
    if is_on_gpu(operand):
        raise TypeError(
            f"{owner}: {type(operand).__name__} in a GPU's memory given, an array in the host's "
            "wanted; use to_numpy()"
        )


def value_dtype(dtype: Any, owner: str) -> np.dtype:
    """Return ``dtype`` in native byte order if a sparse matrix can hold it.

    Raises
    ------
    TypeError
        If it is none of :data:`VALUE_DTYPES`; ``owner`` opens the message.
    """
    given = np.dtype(dtype)
    native = given.newbyteorder("=")
    if native not in VALUE_DTYPES:
        accepted = ", ".join(accepted.name for accepted in VALUE_DTYPES)
        raise TypeError(f"{owner}: dtype {given.name} given, one of {accepted} wanted; use astype")
    return native


def value_array(array: Any, owner: str) -> np.ndarray:
    """Return ``array`` as an ndarray in native byte order, of one of :data:`VALUE_DTYPES`.

    Copies only where the byte order has to change. Strides stay as they are.

    Raises
    ------
    TypeError
        If it has another dtype, or is masked or on a GPU.
    """
    refuse_gpu(array, owner)
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{owner}: masked array given, a plain array wanted; use filled()")
    given = np.asarray(array)
    return given.astype(value_dtype(given.dtype, owner), copy=False)


def kernel_array(array: Any) -> Array:
    """Return ``array`` in native byte order, C-contiguous and aligned, as kernels need it.

    The array itself is returned where it is so already; those on a GPU always are.
    """
    if is_on_gpu(array):
        return array
    given = np.asarray(array)
    native = given.astype(given.dtype.newbyteorder("="), copy=False)
    return np.require(native, requirements=["C_CONTIGUOUS", "ALIGNED"])


def values_of_pattern(values: Any, replaced: Array, owner: str) -> Array:
    """Return ``values`` as a kernel needs them, to stand in for those of a matrix's pattern.

    Raises
    ------
    TypeError
        If the dtype is none of :data:`VALUE_DTYPES`, or they are not where those they replace are.
    ValueError
        If they have not the shape of those they replace.
    """
    if is_on_gpu(replaced):
        if not is_on_gpu(values):
            raise TypeError(
                f"{owner}.with_values: {type(values).__name__} given for a matrix on a GPU, a "
                "DeviceArray wanted; use from_numpy()"
            )
        value_dtype(values.dtype, f"{owner}.with_values")
        given = values
    else:
        given = kernel_array(value_array(values, f"{owner}.with_values"))
    if given.shape != replaced.shape:
        raise ValueError(
            f"{owner}.with_values: values of shape {given.shape} given, {replaced.shape} wanted: "
            "one for each place of this pattern"
        )
    return given


def matrix_shape(shape: Any, owner: str) -> tuple[int, int]:
    """Return ``shape`` as two Python integers, in which products of sizes cannot overflow."""
    try:
        rows, columns = (operator.index(size) for size in shape)
    except (TypeError, ValueError):
        raise ValueError(f"{owner}: shape {shape!r} given, two whole numbers wanted") from None
    if not (0 <= rows <= LARGEST_SIZE and 0 <= columns <= LARGEST_SIZE):
        raise ValueError(f"{owner}: shape {(rows, columns)} given, sizes of 0 to 2^63 - 1 wanted")
    return rows, columns


def index_array(indices: Any, size: int, name: str) -> np.ndarray:
    """Return ``indices`` as int64 after checking that each is in ``range(size)``.

    Raises
    ------
    TypeError
        If they are not whole numbers.
    ValueError
        If they are not one-dimensional, or one is out of range.
    """
    refuse_gpu(indices, name)
    given = np.asarray(indices)
    if given.size == 0 and given.ndim == 1:
        return np.zeros(0, np.int64)
    if given.dtype.kind not in "iu":
        raise TypeError(f"{name}: dtype {given.dtype.name} given, whole numbers wanted")
    if given.ndim != 1:
        raise ValueError(f"{name}: {given.ndim} dimensions given, 1 wanted")
    # Compared as Python integers, before the cast: a large uint64 would wrap to a negative int64.
    smallest, largest = int(given.min()), int(given.max())
    if smallest < 0 or largest >= size:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(f"{name}: index {wrong} given, 0 to {size - 1} wanted")
    return given.astype(np.int64)
