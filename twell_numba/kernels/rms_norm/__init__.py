"""Root mean square normalization of rows, forward and backward."""

from twell_numba.kernels.rms_norm.cpu import rms_norm, rms_norm_backward

__all__ = ["rms_norm", "rms_norm_backward"]
