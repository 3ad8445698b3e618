"""Rotary position embedding, forward and backward."""

from twell_numba.kernels.dispatch import by_device
from twell_numba.kernels.rotary import cpu
from twell_numba.kernels.rotary.reference import rotary_tables

_GPU = "twell_numba.kernels.rotary.cuda"

rotary = by_device(cpu.rotary, _GPU)
rotary_backward = by_device(cpu.rotary_backward, _GPU)

__all__ = ["rotary", "rotary_backward", "rotary_tables"]
