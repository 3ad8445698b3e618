"""Checks and conversions between a caller's arrays and a compiled kernel.

Kernels are compiled for C-contiguous arrays of one float dtype (float32 or float64) in native byte
order. Inputs reach them as read-only views: a kernel that wrote to one would not compile, and
read-only (memory-mapped) and writable arrays share one compiled version.
"""

import numpy as np
from numpy.typing import DTypeLike

FLOAT_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


def common_float_dtype(**arrays: np.ndarray) -> np.dtype:
    """Return the dtype that all arrays share, in native byte order.

    Raises
    ------
    TypeError
        If one is not an array of float32 or float64, or they differ.
    """
    common = None
    for name, array in arrays.items():
        if common is not None and type(array) is np.ndarray and array.dtype is common:
            continue
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} of type {type(array).__name__} given, a NumPy array wanted")
        dtype = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
        if dtype not in FLOAT_DTYPES:
            raise TypeError(f"{name} of dtype {array.dtype} given, float32 or float64 wanted")
        if common is None:
            common = dtype
        elif dtype != common:
            first = next(iter(arrays))
            raise TypeError(
                f"{name} of dtype {array.dtype} given beside {first} of {common}, "
                "one dtype for all wanted"
            )
    assert common is not None, "at least one array is needed"
    return common


def float_inputs(**arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the arrays ready for a kernel to read, in the order given.

    All are of the same dtype, float32 or float64, in native byte order, C-contiguous (copied only
    if they were not) and read-only views.

    Raises
    ------
    TypeError
        As :func:`common_float_dtype`.
    """
    dtype = common_float_dtype(**arrays)
    return tuple([contiguous(array, dtype) for array in arrays.values()])


def index_input(name: str, array: np.ndarray) -> np.ndarray:
    """Return an array of integers as int64, C-contiguous, as a read-only view.

    Raises
    ------
    TypeError
        If it is not an array of integers.
    ValueError
        If an unsigned number does not fit (it would become another, negative number).
    """
    array = np.asarray(array)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} of dtype {array.dtype} given, integers wanted")
    if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{name} up to {array.max()} given, numbers that fit int64 wanted")
    return contiguous(array, np.int64)


def contiguous(array: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Return a read-only, C-contiguous view of ``array`` in ``dtype``, of a copy if need be."""
    if array.dtype == dtype:
        flags = array.flags
        if flags.c_contiguous and not flags.writeable and type(array) is np.ndarray:
            return array  # as it has to be: what a layer passes for its weights at every call
    view = np.asarray(array, dtype=dtype, order="C").view(np.ndarray)
    view.flags.writeable = False
    return view


def require_shape(name: str, array: np.ndarray, shape: tuple[int | str, ...]) -> None:
    """Raise ValueError unless ``array`` has this shape.

    A size given as a string is the name of a free dimension: ``("M", "D")`` asks for two
    dimensions of any size.
    """
    if array.shape == shape:
        return
    fits = array.ndim == len(shape) and all(
        isinstance(wanted, str) or size == wanted
        for size, wanted in zip(array.shape, shape, strict=True)
    )
    if not fits:
        wanted_shape = "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
        raise ValueError(f"{name} of shape {array.shape} given, shape {wanted_shape} wanted")


def require_in_place(
    name: str, array: np.ndarray, shape: tuple[int | str, ...], dtype: np.dtype
) -> None:
    """Check an array that a kernel changes in place: it cannot be converted, only refused.

    Raises
    ------
    TypeError
        If it is not an array of this dtype in native byte order.
    ValueError
        If it has another shape, or is not C-contiguous and writable.
    """
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        given = getattr(array, "dtype", type(array).__name__)
        raise TypeError(f"{name} of {given} given, {dtype} wanted: it is changed in place")
    require_shape(name, array, shape)
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise ValueError(f"{name} is changed in place: a C-contiguous, writable array wanted")
