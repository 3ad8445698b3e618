"""Sparse feedforward weights as tensors of a checkpoint: ``<name>.<format>.<array>``.

All are of the neuron-major [F, D] matrix, those of the down projection too.

``csr``
    ``data`` (nnz,), ``indices`` (nnz,), ``indptr`` (F + 1,), as in
    :class:`~twell_numba.formats.CSRMatrix`.
``block_ell``
    ``block_columns`` (block_rows, blocks_per_row), as in
    :class:`~twell_numba.formats.BlockELLMatrix`; ``values`` (blocks, b, b): the blocks that are
    there, in the order of ``block_columns``. In memory every row of blocks has room for as many
    blocks as the fullest one; a file does without that room.
"""

from collections.abc import Mapping

import numpy as np

from twell_numba.formats import BlockELLMatrix, CSRMatrix
from twell_numba.formats.block_ell import NO_BLOCK

ARRAY_NAMES = {"csr": ("data", "indices", "indptr"), "block_ell": ("values", "block_columns")}
VALUES_NAMES = {"csr": "data", "block_ell": "values"}


def tensor_names(name: str, weight_format: str) -> list[str]:
    """Return the names of the tensors that hold a sparse weight."""
    return [f"{name}.{weight_format}.{array}" for array in ARRAY_NAMES[weight_format]]


def to_tensors(name: str, matrix: CSRMatrix | BlockELLMatrix) -> dict[str, np.ndarray]:
    """Return the tensors of a sparse weight by their names."""
    if isinstance(matrix, CSRMatrix):
        arrays = [matrix.data, matrix.indices, matrix.indptr]
    else:
        values = np.where(matrix.stored_places(), matrix.values, matrix.dtype.type(0))
        arrays = [values[matrix.block_columns != NO_BLOCK], matrix.block_columns]
    return dict(zip(tensor_names(name, matrix.format_name), arrays, strict=True))


def from_tensors(
    name: str, weight_format: str, shape: tuple[int, int], tensors: Mapping[str, np.ndarray]
) -> CSRMatrix | BlockELLMatrix:
    """Return the weight that tensors, read from a file, hold.

    Parameters
    ----------
    name : str
    weight_format : {"csr", "block_ell"}
    shape : tuple of int
        F and D.
    tensors : mapping of str to ndarray
        Those of :func:`tensor_names` are taken.

    Raises
    ------
    ValueError, TypeError
        If they are not those of a valid matrix of this shape.
    """
    arrays = [tensors[tensor] for tensor in tensor_names(name, weight_format)]
    if weight_format == "csr":
        data, indices, indptr = arrays
        return CSRMatrix(data, indices, indptr, shape)
    blocks, block_columns = arrays
    if blocks.ndim != 3 or blocks.shape[1] != blocks.shape[2] or blocks.shape[1] == 0:
        raise ValueError(f"values of shape {blocks.shape} given, (blocks, b, b) wanted")
    block_size = blocks.shape[1]
    if block_size > min(shape):
        raise ValueError(f"blocks of {block_size} rows given, at most {min(shape)} wanted")
    # Before anything is made of that size.
    block_rows, most = (-(-size // block_size) for size in shape)
    if block_columns.ndim != 2 or len(block_columns) != block_rows or block_columns.shape[1] > most:
        raise ValueError(
            f"block_columns of shape {block_columns.shape} given, {block_rows} rows of at most "
            f"{most} wanted"
        )
    there = block_columns != NO_BLOCK
    if np.count_nonzero(there) != len(blocks):
        raise ValueError(
            f"{len(blocks)} blocks in values given, {np.count_nonzero(there)} wanted, as many as "
            f"block_columns names"
        )
    values = np.zeros((*block_columns.shape, block_size, block_size), blocks.dtype)
    values[there] = blocks
    matrix = BlockELLMatrix(values, block_columns, shape, block_size=block_size)
    # Beyond the matrix's edge a file may hold anything; training sums up all it holds.
    matrix.values[~matrix.stored_places()] = 0
    return matrix
