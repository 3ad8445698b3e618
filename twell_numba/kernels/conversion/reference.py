"""Conversions in plain NumPy: the definition.

What is not zero becomes an entry, bit by bit: NaN keeps its payload. 0.0 and -0.0 are left out, or
are 0.0 in a part that is stored dense.
"""

import numpy as np

from twell_numba.formats.block_ell import place_blocks
from twell_numba.formats.ell import pack_segments
from twell_numba.formats.index_width import index_dtype


def dense_to_csr(dense: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As :func:`twell_numba.kernels.conversion.cpu.dense_to_csr`."""
    rows, columns = np.nonzero(dense)
    indptr = np.zeros(dense.shape[0] + 1, index_dtype(rows.size))
    np.cumsum(np.bincount(rows, minlength=dense.shape[0]), out=indptr[1:])
    return dense[rows, columns], columns.astype(index_dtype(dense.shape[1])), indptr


def dense_to_segments(
    dense: np.ndarray,
    *,
    segments_per_row: int,
    segment_width: int,
    slots: int,
    column_dtype: np.dtype,
) -> dict[str, np.ndarray]:
    """As :func:`twell_numba.kernels.conversion.cpu.dense_to_segments`."""
    rows, columns = np.nonzero(dense)
    return pack_segments(
        rows,
        columns,
        dense[rows, columns],
        (dense.shape[0], dense.shape[1]),
        segments_per_row=segments_per_row,
        segment_width=segment_width,
        slots=slots,
        column_dtype=column_dtype,
    )


def dense_to_block_ell(
    dense: np.ndarray, block_size: int, blocks_per_row: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """As :func:`twell_numba.kernels.conversion.cpu.dense_to_block_ell`."""
    rows, columns = dense.shape
    padded = np.pad(dense, ((0, -rows % block_size), (0, -columns % block_size)))
    padded[padded == 0] = 0  # -0.0 becomes 0.0
    blocks = padded.reshape(
        padded.shape[0] // block_size, block_size, padded.shape[1] // block_size, block_size
    ).transpose(0, 2, 1, 3)
    block_rows, found = np.nonzero((blocks != 0).any(axis=(2, 3)))
    slots, block_columns = place_blocks(
        block_rows, found, (rows, columns), block_size, blocks_per_row
    )
    values = np.zeros((*block_columns.shape, block_size, block_size), dense.dtype)
    values[block_rows, slots] = blocks[block_rows, found]
    return values, block_columns


def transpose_csr(
    data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As :func:`twell_numba.kernels.conversion.cpu.transpose_csr`."""
    rows = np.repeat(np.arange(indptr.size - 1), np.diff(indptr))
    order = np.argsort(indices, kind="stable")
    new_indptr = np.zeros(columns + 1, index_dtype(data.size))
    np.cumsum(np.bincount(indices, minlength=columns), out=new_indptr[1:])
    return data[order], rows[order].astype(index_dtype(indptr.size - 1)), new_indptr
