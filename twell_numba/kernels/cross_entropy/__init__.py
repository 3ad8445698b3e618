"""Softmax cross entropy of rows of logits, forward and backward."""

from twell_numba.kernels.cross_entropy import cpu
from twell_numba.kernels.dispatch import by_device

_GPU = "twell_numba.kernels.cross_entropy.cuda"

cross_entropy = by_device(cpu.cross_entropy, _GPU)
cross_entropy_backward = by_device(cpu.cross_entropy_backward, _GPU)
cross_entropy_in_place = by_device(cpu.cross_entropy_in_place, _GPU)

__all__ = ["cross_entropy", "cross_entropy_backward", "cross_entropy_in_place"]
