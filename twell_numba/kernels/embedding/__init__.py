"""Rows of a table by token, forward and backward."""

from twell_numba.kernels.embedding.cpu import embedding, embedding_backward

__all__ = ["embedding", "embedding_backward"]
