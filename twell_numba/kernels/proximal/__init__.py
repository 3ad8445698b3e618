"""What makes weights exact zeros: soft and hard thresholds, and the magnitude to cut at."""

from twell_numba.kernels.dispatch import by_device
from twell_numba.kernels.proximal import cpu

_GPU = "twell_numba.kernels.proximal.cuda"

block_mean_squares = by_device(cpu.block_mean_squares, _GPU)
block_soft_threshold = by_device(cpu.block_soft_threshold, _GPU)
count_nonzero = by_device(cpu.count_nonzero, _GPU)
cut_alike = by_device(cpu.cut_alike, _GPU)
hard_threshold = by_device(cpu.hard_threshold, _GPU)
hard_thresholds = by_device(cpu.hard_thresholds, _GPU)
largest_magnitude = by_device(cpu.largest_magnitude, _GPU)
largest_magnitudes = by_device(cpu.largest_magnitudes, _GPU)
set_blocks_to_zero = by_device(cpu.set_blocks_to_zero, _GPU)
soft_threshold = by_device(cpu.soft_threshold, _GPU)

__all__ = [
    "block_mean_squares",
    "block_soft_threshold",
    "count_nonzero",
    "cut_alike",
    "hard_threshold",
    "hard_thresholds",
    "largest_magnitude",
    "largest_magnitudes",
    "set_blocks_to_zero",
    "soft_threshold",
]
