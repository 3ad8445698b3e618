"""The product of a sparse and a dense matrix, compiled for the CPU.

Each thread computes a range of rows. A row of the result stays in the cache while the rows of ``X``
that the stored entries point at are added to it; nothing else of ``X`` is read.
"""

from typing import Any

import numpy as np

from twell_numba.device import run_ranges
from twell_numba.device.jit import jit
from twell_numba.formats import HybridELLMatrix, TwELLMatrix
from twell_numba.formats.arrays import kernel_array
from twell_numba.formats.ell import ELLMatrix
from twell_numba.kernels.checks import contiguous
from twell_numba.kernels.ell_product.operands import product_operands

# Fewest rows worth a thread of their own.
GRAIN = 16
# Rows differ in their entries, so threads that finish early take more.
PARTS_PER_THREAD = 4


def twell_matmul(A: TwELLMatrix, X: Any) -> np.ndarray:
    """Return ``A @ X`` for a TwELL matrix.

    Zeros of ``A``, stored or not, contribute nothing, also where ``X`` is NaN or infinite.

    Parameters
    ----------
    A : TwELLMatrix, shape (M, F)
    X : array, shape (F,) or (F, N)
        float64, float32, float16 or bfloat16, with any strides and byte order.

    Returns
    -------
    array, shape (M,) or (M, N)
        Of the wider of the two dtypes (float32 for float16 with bfloat16), added up in float32 or
        wider. A sum too large for float16 becomes infinite with NumPy's ``RuntimeWarning``.

    Raises
    ------
    TypeError
        If an operand has the wrong type or dtype.
    ValueError
        If the shapes do not fit.
    """
    return _matmul(A, X, TwELLMatrix)


def hybrid_ell_matmul(A: HybridELLMatrix, X: Any) -> np.ndarray:
    """Return ``A @ X`` for a hybrid ELL matrix; otherwise as :func:`twell_matmul`."""
    return _matmul(A, X, HybridELLMatrix)


def _matmul(A: ELLMatrix, X: Any, wanted: type[ELLMatrix]) -> np.ndarray:
    operands = product_operands(A, X, wanted)
    dtype = operands.sum_dtype
    dense = contiguous(kernel_array(operands.X), dtype)
    total = np.zeros((A.shape[0], dense.shape[1]), dtype)

    segments = (A.shape[0], A.segments_per_row)
    slots = (*segments, A.values.shape[-1])
    # Padding may hold anything, so it is not converted with the values.
    given = A.values if A.dtype == dtype else A.values_as(dtype)
    values = contiguous(given.reshape(slots), dtype)
    columns = contiguous(A.columns.reshape(slots), A.columns.dtype)
    counts = contiguous(A.counts.reshape(segments), A.counts.dtype)
    width = A.segment_width
    run_ranges(
        lambda start, stop: _add_segments(
            values, columns, counts, width, dense, total, start, stop
        ),
        A.shape[0],
        grain=GRAIN,
        parts_per_thread=PARTS_PER_THREAD,
    )
    tail_rows = contiguous(A.tail_rows, np.int64)
    tail_values = contiguous(A.tail_values, dtype)
    run_ranges(
        lambda start, stop: _add_tail(tail_rows, tail_values, dense, total, start, stop),
        tail_rows.size,
        parts_per_thread=PARTS_PER_THREAD,
    )
    return total.astype(operands.result_dtype, copy=False).reshape(operands.result_shape)


@jit
def _add_segments(values, columns, counts, segment_width, dense, total, start, stop):
    """Add the products of the entries in slots to rows ``start`` to ``stop`` of ``total``."""
    for row in range(start, stop):
        for segment in range(counts.shape[1]):
            first_column = segment * segment_width
            for slot in range(counts[row, segment]):
                value = values[row, segment, slot]
                # A stored zero is skipped: zeros annihilate, even where they meet a NaN.
                if value != 0:
                    column = first_column + np.int64(columns[row, segment, slot])
                    for n in range(dense.shape[1]):
                        total[row, n] += value * dense[column, n]


@jit
def _add_tail(tail_rows, tail_values, dense, total, start, stop):
    """Add the products of tail rows ``start`` to ``stop`` to their rows of ``total``."""
    for place in range(start, stop):
        row = tail_rows[place]
        for column in range(tail_values.shape[1]):
            value = tail_values[place, column]
            if value != 0:
                for n in range(dense.shape[1]):
                    total[row, n] += value * dense[column, n]
