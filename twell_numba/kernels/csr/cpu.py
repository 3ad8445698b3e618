"""Products of a CSR matrix, and feedforward layers of such weights, compiled for the CPU.

    A @ X,  A.T @ X,  X @ A,  and the values of Y @ X.T at A's entries

with A (M, K) of which each row is one segment of entries: see
:mod:`twell_numba.kernels.packed_rows.cpu`.

    y = (relu(x Wg^T) * (x Wu^T)) Wd  or  relu(x Wu^T) Wd

with x, y (M, D) and CSR weights (F, D): see :mod:`twell_numba.kernels.csr.ffn_strips`.
"""

import math
from typing import Any

import numpy as np

from twell_numba.device.vectors import register_lanes
from twell_numba.formats import CSRMatrix
from twell_numba.kernels.csr.ffn_strips import backward_kernel, forward_kernel, one_token
from twell_numba.kernels.ffn_checks import sparse_backward_inputs, sparse_forward_inputs
from twell_numba.kernels.packed_rows import PackedRows, multiply, multiply_transposed, sample
from twell_numba.kernels.sparse_ffn import SparseWeightActivations
from twell_numba.kernels.sparse_ffn import activation_statistics as activation_statistics
from twell_numba.kernels.sparse_ffn.cpu import (
    add_parts,
    read_only_arrays,
    run_backward,
    run_forward,
    run_one_token,
    strip_registers,
)
from twell_numba.kernels.sparse_operands import (
    left_product_operands,
    product_operands,
    require_same_pattern,
    sampled_operands,
    transposed_product_operands,
)

# Tokens of a strip fill so many registers: more take the strips of x and y out of the second-level
# cache, fewer read an entry's column more often.
STRIP_REGISTERS = 8

_FORWARD = {
    (registers, gated): forward_kernel(registers, gated)
    for registers in (1, 2, STRIP_REGISTERS)
    for gated in (True, False)
}
_BACKWARD = {
    (registers, gated): backward_kernel(registers, gated)
    for registers in (1, 2, STRIP_REGISTERS)
    for gated in (True, False)
}


def csr_matmul(A: CSRMatrix, X: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``A @ X``.

    Zeros of ``A``, stored or not, contribute nothing, also where ``X`` is NaN or infinite.

    Parameters
    ----------
    A : CSRMatrix, shape (M, K)
    X : array, shape (K,) or (K, N)
        float64, float32, float16 or bfloat16, with any strides and byte order.
    out : array, shape (M,) or (M, N), optional
        Of the result's dtype, with any strides; it is overwritten and returned. It may share memory
        with ``X``.

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
    operands = product_operands(A, X, CSRMatrix, out)
    multiply(_packed_rows(A, operands.X.dtype), operands.X, operands.total)
    return operands.result()


def csr_transposed_matmul(A: CSRMatrix, X: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``A.T @ X``, of shape (K,) or (K, N); otherwise as :func:`csr_matmul`."""
    operands = transposed_product_operands(A, X, CSRMatrix, out)
    multiply_transposed(_packed_rows(A, operands.X.dtype), operands.X, operands.total)
    return operands.result()


def csr_left_matmul(X: Any, A: CSRMatrix, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``X @ A`` for ``X`` (M,) or (N, M); otherwise as :func:`csr_matmul`."""
    operands = left_product_operands(X, A, CSRMatrix, out)
    multiply_transposed(_packed_rows(A, operands.X.dtype), operands.X, operands.total)
    return operands.result()


def csr_sampled_product(A: CSRMatrix, Y: Any, X: Any, out: CSRMatrix | None = None) -> CSRMatrix:
    """Return the values of ``Y @ X.T`` at the entries of ``A``, stored zeros included.

    Parameters
    ----------
    A : CSRMatrix, shape (M, K)
        Its values are not looked at.
    Y : array, shape (M, D)
    X : array, shape (K, D)
        Both float64, float32, float16 or bfloat16, with any strides and byte order.
    out : CSRMatrix, optional
        Of A's pattern and the result's dtype; its values are overwritten and it is returned.

    Returns
    -------
    CSRMatrix
        Of the wider dtype of ``Y`` and ``X``. A new one shares A's index arrays.

    Raises
    ------
    TypeError
        If an operand has the wrong type or dtype.
    ValueError
        If the shapes or patterns do not fit.
    """
    Y, X, dtype = sampled_operands(A, Y, X, CSRMatrix)
    if out is not None:
        require_same_pattern(A, out, dtype, ("indptr", "indices"))
    values = np.empty(A.data.shape, Y.dtype)
    sample(_packed_rows(A, None), Y, X, values)
    data = values.astype(dtype, copy=False)
    if out is None:
        return CSRMatrix(data, A.indices, A.indptr, A.shape, validate=False)
    out.data[...] = data
    return out


def gated_ffn_forward(
    x: np.ndarray, gate: CSRMatrix, up: CSRMatrix, down: CSRMatrix
) -> tuple[np.ndarray, SparseWeightActivations]:
    """Compute y = (relu(x Wg^T) * (x Wu^T)) Wd with sparse weights.

    Weights that are zero contribute nothing, whatever they meet. NaN is kept by relu.

    Parameters
    ----------
    x : ndarray of float32 or float64, shape (M, D)
    gate, up, down : CSRMatrix, shape (F, D)
        Neuron-major, down too: row j belongs to neuron j. Of x's dtype.

    Returns
    -------
    y : ndarray, shape (M, D)
    activations : SparseWeightActivations
        What was counted in h; :func:`gated_ffn_backward` wants it.

    Raises
    ------
    TypeError, ValueError
        If formats, dtypes or shapes do not fit.
    """
    x = sparse_forward_inputs(CSRMatrix, x, gate_weight=gate, up_weight=up, down_weight=down)
    return _forward(x, gate, up, down, gated=True)


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
    """Differentiate :func:`gated_ffn_forward`, for the weights at their stored entries alone.

    Parameters
    ----------
    dy : ndarray, shape (M, D)
    x, gate, up, down
        As given to the forward pass.
    activations : SparseWeightActivations
        From the forward pass.
    l1_scale : float
        dh grows by ``l1_scale * sign(h)``; lambda / (L M) for the L1 term of the loss.
    gate_grad, up_grad, down_grad : ndarray
        C-contiguous, of the shape and dtype of each weight's ``stored_values``; changed in place:
        the gradients are added. A stored zero has one as any other entry.

    Returns
    -------
    dx : ndarray, shape (M, D)

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit the others.
    """
    x = sparse_forward_inputs(CSRMatrix, x, gate_weight=gate, up_weight=up, down_weight=down)
    dy = sparse_backward_inputs(
        dy,
        x,
        activations,
        gate_grad=(gate, gate_grad),
        up_grad=(up, up_grad),
        down_grad=(down, down_grad),
    )
    gradients = (gate_grad, up_grad, down_grad)
    dx, parts = _backward(dy, x, (gate, up, down), l1_scale, gradients, gated=True)
    add_parts(parts, gradients)
    return dx


def ffn_forward(
    x: np.ndarray, up: CSRMatrix, down: CSRMatrix
) -> tuple[np.ndarray, SparseWeightActivations]:
    """Compute y = relu(x Wu^T) Wd; parameters and returns as :func:`gated_ffn_forward`."""
    x = sparse_forward_inputs(CSRMatrix, x, up_weight=up, down_weight=down)
    return _forward(x, up, up, down, gated=False)


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
    """Differentiate :func:`ffn_forward`; parameters and returns as :func:`gated_ffn_backward`."""
    x = sparse_forward_inputs(CSRMatrix, x, up_weight=up, down_weight=down)
    dy = sparse_backward_inputs(
        dy, x, activations, up_grad=(up, up_grad), down_grad=(down, down_grad)
    )
    gradients = (up_grad, down_grad)
    dx, parts = _backward(dy, x, (up, down), l1_scale, gradients, gated=False)
    add_parts(parts, gradients)
    return dx


def _forward(
    x: np.ndarray, gate: CSRMatrix, up: CSRMatrix, down: CSRMatrix, *, gated: bool
) -> tuple[np.ndarray, SparseWeightActivations]:
    if x.shape[0] == 1:
        # Arrays as they are: for one token, nine read-only views would take a fifth of the time.
        given = [(weight.data, weight.indices, weight.indptr) for weight in (gate, up, down)]
        y, activations = run_one_token(one_token, x, given, down.shape[0], gated)
        if math.isfinite(activations.absolute_sum):
            return y, activations
    weights = [read_only_arrays(weight) for weight in (gate, up, down)]
    lanes = register_lanes(x.dtype)
    registers = strip_registers(x, lanes, STRIP_REGISTERS)
    stored = gate.nnz + up.nnz + down.nnz
    return run_forward(
        _FORWARD[registers, gated], x, weights, down.shape[0], registers * lanes, stored
    )


def _backward(
    dy: np.ndarray,
    x: np.ndarray,
    weights: tuple[CSRMatrix, ...],
    l1_scale: float,
    gradients: tuple[np.ndarray, ...],
    *,
    gated: bool,
) -> tuple[np.ndarray, list[np.ndarray]]:
    lanes = register_lanes(x.dtype)
    registers = strip_registers(x, lanes, STRIP_REGISTERS)
    return run_backward(
        _BACKWARD[registers, gated],
        dy,
        x,
        [read_only_arrays(weight) for weight in weights],
        weights[0].shape[0],
        l1_scale,
        gradients,
        registers * lanes,
    )


def _packed_rows(A: CSRMatrix, dtype: np.dtype | None) -> PackedRows:
    """Return the entries with values in ``dtype``; as they are for None."""
    pointers = A.indptr.astype(np.int64, copy=False)[:, np.newaxis]
    values = A.data if dtype is None else A.data.astype(dtype, copy=False)
    return PackedRows(values, A.indices, pointers[:-1], pointers[1:], max(A.shape[1], 1), A.shape)
