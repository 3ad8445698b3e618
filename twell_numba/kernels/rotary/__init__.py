"""Rotary position embedding, forward and backward."""

from twell_numba.kernels.rotary.cpu import rotary, rotary_backward
from twell_numba.kernels.rotary.reference import rotary_tables

__all__ = ["rotary", "rotary_backward", "rotary_tables"]
