"""AdamW (Loshchilov and Hutter, 2019) in plain NumPy.

With g = grad * grad_scale and t counted from 1:

    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    w <- w - learning_rate * weight_decay * w
           - learning_rate * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
"""

import numpy as np


def adamw_step(
    value: np.ndarray,
    grad: np.ndarray,
    first_moment: np.ndarray,
    second_moment: np.ndarray,
    *,
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
) -> None:
    """Change value, first_moment and second_moment (all of grad's shape) in place."""
    scaled = grad * grad.dtype.type(grad_scale)
    first_moment *= beta1
    first_moment += (1 - beta1) * scaled
    second_moment *= beta2
    second_moment += (1 - beta2) * scaled * scaled
    corrected_first = first_moment / (1 - beta1**step)
    corrected_second = second_moment / (1 - beta2**step)
    value *= 1 - learning_rate * weight_decay
    value -= learning_rate * corrected_first / (np.sqrt(corrected_second) + eps)


def sum_of_squares(grad: np.ndarray) -> float:
    """Return the sum of the squares of all entries, accumulated in float64."""
    return float(np.sum(np.square(grad, dtype=np.float64)))
