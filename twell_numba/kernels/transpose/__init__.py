"""Transposed copies of dense matrices."""

from twell_numba.kernels.dispatch import by_device
from twell_numba.kernels.transpose import cpu
from twell_numba.kernels.transpose.cpu import row_major

transpose = by_device(cpu.transpose, "twell_numba.kernels.transpose.cuda")

__all__ = ["row_major", "transpose"]
