"""Rows of a table by token, forward and backward."""

from twell_numba.kernels.dispatch import by_device
from twell_numba.kernels.embedding import cpu

_GPU = "twell_numba.kernels.embedding.cuda"

embedding = by_device(cpu.embedding, _GPU)
embedding_backward = by_device(cpu.embedding_backward, _GPU)

__all__ = ["embedding", "embedding_backward"]
