"""Freezes the zeros of the feedforward weights: only what is not zero is held and trained on."""

import copy
from functools import partial

import numpy as np

from twell_numba.formats import BlockELLMatrix, CSRMatrix
from twell_numba.layers.ffn import DENSITY_OF_FORMAT, GatedFFN, TwoMatrixFFN
from twell_numba.layers.parameter import SparseParameter, make_parameter
from twell_numba.models.transformer import Transformer
from twell_numba.train.optimizer import AdamW

_THINNED_BY = 101


def freeze_zeros(model: Transformer, optimizer: AdamW, weight_format: str, block_size: int) -> None:
    """Hold the feedforward weights in a sparse format, and their moments at the same entries.

    Parameters
    ----------
    model : Transformer
        Its weights are held dense. Their parameters are new objects afterwards, without gradients.
    optimizer : AdamW
        Of all the model's parameters.
    weight_format : {"csr", "block_ell"}
    block_size : int
        b of ``block_ell``.
    """
    model.hold_ffn_weights(weight_format, block_size)
    for ffn in model.ffn_layers:
        for parameter in ffn.parameters():
            assert isinstance(parameter, SparseParameter)
            optimizer.replace(parameter, partial(at_stored_entries, parameter.matrix))


def slowness(model: Transformer) -> str | None:
    """Say in one line if so many weights are stored that training would be faster with dense ones.

    Parameters
    ----------
    model : Transformer
        After :func:`freeze_zeros`.
    """
    parameters = model.ffn_parameters
    stored = [part.matrix.nnz for part in parameters if isinstance(part, SparseParameter)]
    density = sum(stored) / sum(parameter.size for parameter in parameters)
    limit = DENSITY_OF_FORMAT[model.weight_format]
    if density < limit:
        return None
    return (
        f"{density:.2%} of the FFN weights are left, as {model.weight_format}, which is slower "
        f"than dense above {limit:.0%}; for speed take a smaller target_density or sparse_from=0"
    )


def at_stored_entries(matrix: CSRMatrix | BlockELLMatrix, dense: np.ndarray) -> np.ndarray:
    """Return what an array holds where a sparse matrix has its entries.

    Parameters
    ----------
    matrix : CSRMatrix or BlockELLMatrix, shape (F, D)
    dense : ndarray, shape (F, D)

    Returns
    -------
    ndarray
        In the layout of the matrix's ``stored_values``; padding is 0.
    """
    if isinstance(matrix, CSRMatrix):
        rows = np.repeat(np.arange(matrix.shape[0]), matrix.row_lengths())
        return dense[rows, matrix.indices]
    b = matrix.block_size
    padded = np.zeros([-(-size // b) * b for size in dense.shape], dense.dtype)
    padded[: dense.shape[0], : dense.shape[1]] = dense
    blocks = padded.reshape(padded.shape[0] // b, b, padded.shape[1] // b, b)
    entries = np.zeros(matrix.values.shape, dense.dtype)
    block_rows, slots = np.nonzero(matrix.block_columns >= 0)
    block_columns = matrix.block_columns[block_rows, slots]
    entries[block_rows, slots] = blocks[block_rows, :, block_columns]
    return entries


def thinned_copy(layer: GatedFFN | TwoMatrixFFN) -> GatedFFN | TwoMatrixFFN:
    """Return a layer with a few of the weights of another one, or those that are left of it.

    Its gradients are its own.
    """
    layer = copy.copy(layer)
    for name in layer.weight_names:
        parameter = getattr(layer, name)
        operand = parameter.operand
        if not isinstance(parameter, SparseParameter):
            operand = np.zeros_like(parameter.value)
            operand.reshape(-1)[::_THINNED_BY] = parameter.value.reshape(-1)[::_THINNED_BY]
        setattr(layer, name, make_parameter(parameter.name, operand))
    return layer
