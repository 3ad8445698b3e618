"""Root mean square normalization of rows, forward and backward."""

from twell_numba.kernels.dispatch import by_device
from twell_numba.kernels.rms_norm import cpu

_GPU = "twell_numba.kernels.rms_norm.cuda"

add_rms_norm = by_device(cpu.add_rms_norm, _GPU)
rms_norm = by_device(cpu.rms_norm, _GPU)
rms_norm_backward = by_device(cpu.rms_norm_backward, _GPU)

__all__ = ["add_rms_norm", "rms_norm", "rms_norm_backward"]
