"""The bias of a linear layer, forward and backward."""

from twell_numba.kernels.bias import cpu
from twell_numba.kernels.dispatch import by_device

_GPU = "twell_numba.kernels.bias.cuda"

add_bias = by_device(cpu.add_bias, _GPU)
bias_backward = by_device(cpu.bias_backward, _GPU)

__all__ = ["add_bias", "bias_backward"]
