"""Products of a CSR matrix in plain NumPy, and feedforward layers of which it is the weights.

See :mod:`twell_numba.kernels.sparse_reference` and :mod:`twell_numba.kernels.sparse_ffn.reference`.
"""

from typing import Any

import numpy as np

from twell_numba.formats import CSRMatrix
from twell_numba.kernels import sparse_reference as definition
from twell_numba.kernels.sparse_ffn import SparseWeightActivations
from twell_numba.kernels.sparse_ffn import activation_statistics as activation_statistics
from twell_numba.kernels.sparse_ffn import reference as ffn_definition


def csr_matmul(A: CSRMatrix, X: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``A @ X``; as :func:`twell_numba.kernels.csr.cpu.csr_matmul`."""
    return definition.matmul(A, X, CSRMatrix, out)


def csr_transposed_matmul(A: CSRMatrix, X: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``A.T @ X``; as :func:`twell_numba.kernels.csr.cpu.csr_transposed_matmul`."""
    return definition.transposed_matmul(A, X, CSRMatrix, out)


def csr_left_matmul(X: Any, A: CSRMatrix, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``X @ A``; as :func:`twell_numba.kernels.csr.cpu.csr_left_matmul`."""
    return definition.left_matmul(X, A, CSRMatrix, out)


def csr_sampled_product(A: CSRMatrix, Y: Any, X: Any, out: CSRMatrix | None = None) -> CSRMatrix:
    """Return ``Y @ X.T`` at A's entries; as :func:`..cpu.csr_sampled_product`."""
    values, dtype = definition.sampled_values(A, Y, X, CSRMatrix)
    data = values.astype(dtype)
    if out is None:
        return CSRMatrix(data, A.indices, A.indptr, A.shape, validate=False)
    definition.require_same_pattern(A, out, dtype, ("indptr", "indices"))
    out.data[...] = data
    return out


def gated_ffn_forward(
    x: np.ndarray, gate: CSRMatrix, up: CSRMatrix, down: CSRMatrix
) -> tuple[np.ndarray, SparseWeightActivations]:
    """Return y = (relu(x Wg^T) * (x Wu^T)) Wd; as :func:`..ffn.gated_ffn_forward`."""
    return ffn_definition.gated_ffn_forward(x, gate, up, down, CSRMatrix)


def gated_ffn_backward(
    dy: np.ndarray,
    x: np.ndarray,
    gate: CSRMatrix,
    up: CSRMatrix,
    down: CSRMatrix,
    activations: SparseWeightActivations,
    l1_scale: float,
    gate_grad: np.ndarray,
    up_grad: np.ndarray,
    down_grad: np.ndarray,
) -> np.ndarray:
    """Return dx and add the gradients in place; as :func:`..ffn.gated_ffn_backward`."""
    weights, gradients = (gate, up, down), (gate_grad, up_grad, down_grad)
    return ffn_definition.gated_ffn_backward(
        dy, x, *weights, activations, l1_scale, *gradients, CSRMatrix
    )


def ffn_forward(
    x: np.ndarray, up: CSRMatrix, down: CSRMatrix
) -> tuple[np.ndarray, SparseWeightActivations]:
    """Return y = relu(x Wu^T) Wd; as :func:`..ffn.ffn_forward`."""
    return ffn_definition.ffn_forward(x, up, down, CSRMatrix)


def ffn_backward(
    dy: np.ndarray,
    x: np.ndarray,
    up: CSRMatrix,
    down: CSRMatrix,
    activations: SparseWeightActivations,
    l1_scale: float,
    up_grad: np.ndarray,
    down_grad: np.ndarray,
) -> np.ndarray:
    """Return dx and add the gradients in place; as :func:`..ffn.ffn_backward`."""
    return ffn_definition.ffn_backward(
        dy, x, up, down, activations, l1_scale, up_grad, down_grad, CSRMatrix
    )
