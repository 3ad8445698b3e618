"""A linear layer without bias, on the CPU.

    y = x W^T,   dW = dy^T x,   dx = dy W            x (M, N), W (K, N), y (M, K)

Bound by BLAS: 2 M N K operations each; forward of few rows by reading W, see
:mod:`twell_numba.device.few_rows`.
"""

import numpy as np

from twell_numba.device.blas import add_matmul, matmul
from twell_numba.device.few_rows import FEW_ROWS, few_rows_product
from twell_numba.kernels.checks import float_inputs, require_in_place, require_shape


def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return ``x @ weight.T``.

    Parameters
    ----------
    x : ndarray, shape (M, N)
        float32 or float64, as all arrays here.
    weight : ndarray, shape (K, N)

    Returns
    -------
    ndarray, shape (M, K)

    Raises
    ------
    TypeError
        If the dtypes differ or are not float32 or float64.
    ValueError
        If the shapes do not fit together.
    """
    x, weight = float_inputs(x=x, weight=weight)
    require_shape("x", x, ("M", "N"))
    require_shape("weight", weight, ("K", x.shape[1]))
    if x.shape[0] <= FEW_ROWS:
        return few_rows_product(x, weight)
    return matmul(x, weight.T)


def linear_backward(
    dy: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    weight_grad: np.ndarray | None,
    dx: np.ndarray | None = None,
) -> np.ndarray:
    """Differentiate :func:`linear`.

    Parameters
    ----------
    dy : ndarray, shape (M, K)
    x, weight
        As given to the forward pass.
    weight_grad : ndarray, shape (K, N), or None
        C-contiguous. Changed in place: the gradient of the weight is added. None leaves that out.
    dx : ndarray, shape (M, N), optional
        C-contiguous. The gradient of x is added to it in place.

    Returns
    -------
    dx : ndarray, shape (M, N)

    Raises
    ------
    TypeError, ValueError
        As :func:`linear`, and if an array cannot be changed in place.
    """
    dy, x, weight = float_inputs(dy=dy, x=x, weight=weight)
    require_shape("x", x, ("M", "N"))
    require_shape("weight", weight, ("K", x.shape[1]))
    require_shape("dy", dy, (x.shape[0], weight.shape[0]))
    if weight_grad is not None:
        require_in_place("weight_grad", weight_grad, weight.shape, x.dtype)
        add_matmul(dy.T, x, weight_grad)
    if dx is None:
        return matmul(dy, weight)
    require_in_place("dx", dx, x.shape, x.dtype)
    add_matmul(dy, weight, dx)
    return dx
