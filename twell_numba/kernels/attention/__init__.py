"""Causal attention with grouped key/value heads, forward and backward."""

from twell_numba.kernels.attention.cpu import causal_attention, causal_attention_backward

__all__ = ["causal_attention", "causal_attention_backward"]
