"""Arrays of floats in another dtype, on the GPU: reads and writes each number once."""

from numpy.typing import DTypeLike

from twell_numba.device.gpu.array import DeviceArray, empty
from twell_numba.device.gpu.language import global_thread, grid_threads, load, store
from twell_numba.device.gpu.launch import kernel


def cast(array: DeviceArray, dtype: DTypeLike, out: DeviceArray | None = None) -> DeviceArray:
    """Return a copy of an array in another dtype, rounded to nearest even.

    From float64 to 16 bits it is rounded twice, to float32 first.

    Parameters
    ----------
    array : DeviceArray of floats
    dtype : dtype of floats
    out : DeviceArray, optional
        Of that dtype and the array's shape. Overwritten and returned.
    """
    if out is None:
        out = empty(array.shape, dtype, array.stream)
    if out.dtype != dtype or out.shape != array.shape:
        raise ValueError(
            f"out of dtype {out.dtype} and shape {out.shape} given, {dtype} and {array.shape} "
            "wanted"
        )
    _cast(_cast.blocks(array.size), array, out, array.size)
    return out


@kernel()
def _cast(array, out, size):
    i = global_thread()
    while i < size:
        store(out, i, load(array, i))
        i += grid_threads()
