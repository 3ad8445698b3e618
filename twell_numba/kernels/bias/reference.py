"""The bias of a linear layer, in plain NumPy.

y += b,   db += the sum of dy over its rows            y, dy (M, K), b (K,)
"""

import numpy as np


def add_bias(y: np.ndarray, bias: np.ndarray) -> None:
    """Add b (K,) to each row of y (M, K), in place."""
    y += bias


def bias_backward(dy: np.ndarray, bias_grad: np.ndarray) -> None:
    """Add db (K,) into bias_grad, for dy (M, K)."""
    bias_grad += dy.sum(axis=0)
