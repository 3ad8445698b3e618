"""Tensor maps: what the copy engine of a Hopper GPU knows of a matrix that it copies from.

A map names a matrix in memory and how tall boxes are that are copied from it; they have 64 columns.
Rows and columns outside of the matrix are copied as zeros. The driver encodes it in 128 bytes,
which must lie in the GPU's memory when they are used. They are handed to a kernel as 16 integers,
like any other argument, and each block writes them to memory of its own
(:func:`twell_numba.device.gpu.hopper.write_tensor_map`): so a launch can be recorded in a graph,
and nothing waits for a copy from the host's memory.
"""

import functools

import ml_dtypes
import numpy as np

from twell_numba.device.gpu.array import DeviceArray
from twell_numba.device.gpu.driver import call
from twell_numba.device.gpu.packages import bindings

# What a map takes in memory, in integers of 64 bits; its address is a multiple of as many bytes.
WORDS = 16

_ALIGNMENT = 16  # bytes, of the matrix and of each of its rows
_BOX_COLUMNS = 64
_TALLEST_BOX = 256
_MOST_ROWS = 2**31


class TensorMap:
    """A matrix in memory, as a kernel's argument for the copy engine.

    A box lies in shared memory row after row, each of 128 bytes, at an address that is a multiple
    of 1024; of row r the 16 bytes numbered c are where those numbered ``c ^ (r % 8)`` would be (the
    *128-byte swizzle*, which tensor cores read without bank conflicts).

    Parameters
    ----------
    matrix : DeviceArray of bfloat16, shape (rows, columns)
    box_rows : int
        Rows of a box, at most 256.

    Attributes
    ----------
    array : DeviceArray
        The matrix.
    words : tuple of int
        The map, 16 integers.

    Raises
    ------
    ValueError
        If :func:`fits` is false of the matrix, or a box is too tall.
    """

    __slots__ = ("array", "words")

    def __init__(self, matrix: DeviceArray, box_rows: int) -> None:
        if not fits(matrix):
            raise ValueError(
                f"matrix of {matrix.dtype} and shape {matrix.shape} at {matrix.pointer:#x} given, "
                "bfloat16 with rows that begin at multiples of 16 bytes wanted"
            )
        if not 0 < box_rows <= _TALLEST_BOX:
            raise ValueError(f"boxes of {box_rows} rows given, 1 to {_TALLEST_BOX} wanted")
        self.array = matrix
        rows, columns = matrix.shape
        self.words = _encode(matrix.pointer, rows, columns, box_rows)


def fits(matrix: DeviceArray) -> bool:
    """Return whether the copy engine can copy from a matrix."""
    if matrix.dtype != ml_dtypes.bfloat16 or matrix.ndim != 2 or matrix.size == 0:
        return False
    rows, columns = matrix.shape
    is_aligned = matrix.pointer % _ALIGNMENT == 0 and columns * 2 % _ALIGNMENT == 0
    return is_aligned and max(rows, columns) < _MOST_ROWS


@functools.lru_cache(maxsize=4096)
def _encode(pointer: int, rows: int, columns: int, box_rows: int) -> tuple[int, ...]:
    """Return a map's words, which say nothing but what is given here."""
    driver = bindings()
    sizes = driver.cuuint64_t, driver.cuuint32_t
    encoded = call(
        "cuTensorMapEncodeTiled",
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        2,
        pointer,
        [sizes[0](columns), sizes[0](rows)],  # the fastest dimension first
        [sizes[0](2 * columns)],
        [sizes[1](_BOX_COLUMNS), sizes[1](box_rows)],
        [sizes[1](1), sizes[1](1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    words = np.array([int(word) for word in encoded.opaque], np.uint64)
    assert words.size == WORDS
    return tuple(words.view(np.int64).tolist())  # kernels' integers are signed
