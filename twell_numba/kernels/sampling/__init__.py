"""Choosing the next token from a model's logits."""

from twell_numba.kernels.dispatch import by_device
from twell_numba.kernels.sampling import cpu

sample_token = by_device(cpu.sample_token, "twell_numba.kernels.sampling.cuda")

__all__ = ["sample_token"]
