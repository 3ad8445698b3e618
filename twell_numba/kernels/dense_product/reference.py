"""A linear layer without bias, in plain NumPy.

y = x W^T,   dW = dy^T x,   dx = dy W            x (M, N), W (K, N), y (M, K)
"""

import numpy as np


def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return y (M, K)."""
    return x @ weight.T


def linear_backward(
    dy: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    weight_grad: np.ndarray | None,
    dx: np.ndarray | None = None,
) -> np.ndarray:
    """Return dx (M, N), added to the one given; add dW (K, N) into weight_grad."""
    if weight_grad is not None:
        weight_grad += dy.T @ x
    if dx is None:
        return dy @ weight
    dx += dy @ weight
    return dx
