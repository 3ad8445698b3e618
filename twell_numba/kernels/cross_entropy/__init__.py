"""Softmax cross entropy of rows of logits, forward and backward."""

from twell_numba.kernels.cross_entropy.cpu import cross_entropy, cross_entropy_backward

__all__ = ["cross_entropy", "cross_entropy_backward"]
