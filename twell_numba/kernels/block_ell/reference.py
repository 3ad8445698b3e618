"""Products of a block-ELL matrix in plain NumPy.

See :mod:`twell_numba.kernels.sparse_reference`, the definition for every format.
"""

from typing import Any

import numpy as np

from twell_numba.formats import BlockELLMatrix
from twell_numba.kernels import sparse_reference as definition
from twell_numba.kernels.sparse_ffn import SparseWeightActivations
from twell_numba.kernels.sparse_ffn import activation_statistics as activation_statistics
from twell_numba.kernels.sparse_ffn import reference as ffn_definition


def block_ell_matmul(A: BlockELLMatrix, X: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``A @ X``; as :func:`twell_numba.kernels.block_ell.cpu.block_ell_matmul`."""
    return definition.matmul(A, X, BlockELLMatrix, out)


def block_ell_transposed_matmul(
    A: BlockELLMatrix, X: Any, out: np.ndarray | None = None
) -> np.ndarray:
    """Return ``A.T @ X``."""
    return definition.transposed_matmul(A, X, BlockELLMatrix, out)


def block_ell_left_matmul(X: Any, A: BlockELLMatrix, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``X @ A``."""
    return definition.left_matmul(X, A, BlockELLMatrix, out)


def block_ell_sampled_product(
    A: BlockELLMatrix, Y: Any, X: Any, out: BlockELLMatrix | None = None
) -> BlockELLMatrix:
    """Return the values of ``Y @ X.T`` at A's entries."""
    values, dtype = definition.sampled_values(A, Y, X, BlockELLMatrix)
    rows, columns, _ = A.coordinates()
    b = A.block_size
    slots = [
        np.flatnonzero(A.block_columns[row // b] == column // b)[0]
        for row, column in zip(rows, columns, strict=True)
    ]
    if out is None:
        out = BlockELLMatrix(
            np.zeros(A.values.shape, dtype), A.block_columns, A.shape, block_size=b, validate=False
        )
    definition.require_same_pattern(A, out, dtype, ("block_size", "block_columns"))
    out.values[rows // b, slots, rows % b, columns % b] = values.astype(dtype)
    return out


def gated_ffn_forward(
    x: np.ndarray, gate: BlockELLMatrix, up: BlockELLMatrix, down: BlockELLMatrix
) -> tuple[np.ndarray, SparseWeightActivations]:
    """Return y = (relu(x Wg^T) * (x Wu^T)) Wd; as :func:`..ffn.gated_ffn_forward`."""
    return ffn_definition.gated_ffn_forward(x, gate, up, down, BlockELLMatrix)


def gated_ffn_backward(
    dy: np.ndarray,
    x: np.ndarray,
    gate: BlockELLMatrix,
    up: BlockELLMatrix,
    down: BlockELLMatrix,
    activations: SparseWeightActivations,
    l1_scale: float,
    gate_grad: np.ndarray,
    up_grad: np.ndarray,
    down_grad: np.ndarray,
) -> np.ndarray:
    """Return dx and add the gradients in place; as :func:`..ffn.gated_ffn_backward`."""
    weights, gradients = (gate, up, down), (gate_grad, up_grad, down_grad)
    return ffn_definition.gated_ffn_backward(
        dy, x, *weights, activations, l1_scale, *gradients, BlockELLMatrix
    )


def ffn_forward(
    x: np.ndarray, up: BlockELLMatrix, down: BlockELLMatrix
) -> tuple[np.ndarray, SparseWeightActivations]:
    """Return y = relu(x Wu^T) Wd; as :func:`..ffn.ffn_forward`."""
    return ffn_definition.ffn_forward(x, up, down, BlockELLMatrix)


def ffn_backward(
    dy: np.ndarray,
    x: np.ndarray,
    up: BlockELLMatrix,
    down: BlockELLMatrix,
    activations: SparseWeightActivations,
    l1_scale: float,
    up_grad: np.ndarray,
    down_grad: np.ndarray,
) -> np.ndarray:
    """Return dx and add the gradients in place; as :func:`..ffn.ffn_backward`."""
    return ffn_definition.ffn_backward(
        dy, x, up, down, activations, l1_scale, up_grad, down_grad, BlockELLMatrix
    )
