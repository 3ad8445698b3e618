"""Causal attention with grouped key/value heads, forward and backward, on the CPU or a GPU."""

from twell_numba.kernels.attention import cpu
from twell_numba.kernels.dispatch import by_device

__all__ = ["causal_attention", "causal_attention_backward"]

causal_attention = by_device(cpu.causal_attention, "twell_numba.kernels.attention.cuda")
causal_attention_backward = by_device(
    cpu.causal_attention_backward, "twell_numba.kernels.attention.cuda"
)
