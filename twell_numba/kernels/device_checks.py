"""Checks of the arrays that GPU kernels get; nothing is converted: it would be a hidden copy.

Arrays are float32, bfloat16, float16 or float64. Kernels compute in float32 whatever is stored in
fewer bits, and return what is per row (a loss, an inverse rms) in float32 then.
"""

from typing import Any

import ml_dtypes
import numpy as np

from twell_numba.device.gpu import DeviceArray, Stream, from_numpy, require_same_gpu
from twell_numba.kernels.checks import index_input, require_shape

FLOAT_DTYPES = tuple(
    np.dtype(dtype) for dtype in (np.float32, ml_dtypes.bfloat16, np.float16, np.float64)
)


def float_arrays(**arrays: Any) -> None:
    """Check arrays of floats, of one dtype and on one GPU.

    Raises
    ------
    TypeError
        If one is no DeviceArray, not of floats, or the dtypes differ.
    ValueError
        If they are on different GPUs.
    """
    first_name, first = next(iter(arrays.items()))
    for name, array in arrays.items():
        _require_floats(name, array)
        if array.dtype != first.dtype:
            raise TypeError(
                f"{name} of dtype {array.dtype} given beside {first_name} of {first.dtype}, "
                "one dtype for all wanted"
            )
    require_same_gpu(**arrays)


def float_array(name: str, array: Any, dtype: np.dtype, beside: DeviceArray) -> None:
    """Check an array of a dtype of its own, on the GPU of another.

    Raises
    ------
    TypeError, ValueError
        As :func:`float_arrays`.
    """
    _require_floats(name, array)
    if array.dtype != dtype:
        raise TypeError(f"{name} of dtype {array.dtype} given, {dtype} wanted")
    require_same_gpu(first=beside, **{name: array})


def index_array(
    name: str, array: Any, rows: int | str, lowest: int, end: int, stream: Stream
) -> Any:
    """Return row numbers on the GPU: int32 or int64, shape (rows,).

    Numbers in the host's memory are checked to be in [lowest, end) and copied. Those on the GPU
    cannot be looked at without waiting for it: kernels must see to those out of range.

    Raises
    ------
    TypeError
        If they are not integers.
    ValueError
        If the shape is another, or a number is out of range.
    """
    if not isinstance(array, DeviceArray):
        host = index_input(name, array)
        require_shape(name, host, (rows,))
        if host.size and not (host.min() >= lowest and host.max() < end):
            outside = host[(host < lowest) | (host >= end)][0]
            raise ValueError(f"{name}: {outside} given, numbers in [{lowest}, {end}) wanted")
        return from_numpy(host, stream)
    if array.dtype not in (np.int32, np.int64):
        raise TypeError(f"{name} of dtype {array.dtype} given, int32 or int64 wanted")
    require_shape(name, array, (rows,))  # type: ignore[arg-type]
    return array


def arithmetic_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which kernels compute with arrays of ``dtype``."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _require_floats(name: str, array: Any) -> None:
    if not isinstance(array, DeviceArray):
        raise TypeError(f"{name} of type {type(array).__name__} given, a DeviceArray wanted")
    if array.dtype not in FLOAT_DTYPES:
        names = ", ".join(dtype.name for dtype in FLOAT_DTYPES)
        raise TypeError(f"{name} of dtype {array.dtype} given, one of {names} wanted")


def rows_are_aligned(*arrays: DeviceArray) -> int:
    """Return 1 if all rows can be read and written eight numbers at a time, otherwise 0.

    They can if each begins at a multiple of 16 bytes and has a multiple of eight numbers.
    """
    return int(all(a.shape[-1] % 8 == 0 and a.pointer % 16 == 0 for a in arrays))
