"""The AdamW update, and the sum of squares that gradient clipping needs."""

from twell_numba.kernels.adamw.cpu import adamw_step, sum_of_squares

__all__ = ["adamw_step", "sum_of_squares"]
