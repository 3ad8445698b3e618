"""RMSNorm (Zhang and Sennrich, 2019) in plain NumPy.

    r_m  = 1 / sqrt(mean_d(x_md^2) + eps)
    y_md = x_md * r_m * w_d

and, with n = x * r (the normalized rows):

    dw_d  = sum_m dy_md * n_md
    dx_md = r_m * (dy_md w_d - n_md * mean_d(dy_md w_d n_md))
"""

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Return y (M, D) and r (M,) for x (M, D) and weight (D,)."""
    inverse_rms = (np.mean(x * x, axis=1) + eps) ** -0.5
    return x * inverse_rms[:, None] * weight, inverse_rms


def add_rms_norm(
    x: np.ndarray, addend: np.ndarray, weight: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x + addend (M, D), and y and r of it."""
    total = x + addend
    return total, *rms_norm(total, weight, eps)


def rms_norm_backward(
    dy: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    inverse_rms: np.ndarray,
    weight_grad: np.ndarray,
    residual: np.ndarray | None = None,
) -> np.ndarray:
    """Return dx (M, D), to which ``residual`` is added; add dw (D,) into weight_grad."""
    normalized = x * inverse_rms[:, None]
    dnormalized = dy * weight
    projection = np.mean(dnormalized * normalized, axis=1, keepdims=True)
    dx = inverse_rms[:, None] * (dnormalized - normalized * projection)
    weight_grad += np.sum(dy * normalized, axis=0)
    return dx if residual is None else dx + residual
