"""Transposed copies of dense matrices."""

from twell_numba.kernels.transpose.cpu import row_major, transpose

__all__ = ["row_major", "transpose"]
