"""Products with a weight matrix, forward and backward: what a linear layer computes."""

from twell_numba.kernels.dense_product import cpu
from twell_numba.kernels.dispatch import by_device

_GPU = "twell_numba.kernels.dense_product.cuda"

linear = by_device(cpu.linear, _GPU)
linear_backward = by_device(cpu.linear_backward, _GPU)

__all__ = ["linear", "linear_backward"]
