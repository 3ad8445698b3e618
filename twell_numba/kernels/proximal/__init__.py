"""What makes weights exact zeros: soft and hard thresholds, and the magnitude to cut at."""

from twell_numba.kernels.proximal.cpu import (
    block_soft_threshold,
    hard_threshold,
    largest_magnitude,
    soft_threshold,
)

__all__ = ["block_soft_threshold", "hard_threshold", "largest_magnitude", "soft_threshold"]
