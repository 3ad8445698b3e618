"""The AdamW update, and the sum of squares that gradient clipping needs."""

from twell_numba.kernels.adamw import cpu
from twell_numba.kernels.dispatch import by_device

_GPU = "twell_numba.kernels.adamw.cuda"

adamw_step = by_device(cpu.adamw_step, _GPU)
sum_of_squares = by_device(cpu.sum_of_squares, _GPU)

__all__ = ["adamw_step", "sum_of_squares"]
