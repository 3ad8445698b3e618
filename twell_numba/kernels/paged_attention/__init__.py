"""Attention of several sequences whose keys and values lie in pages, on the CPU or a GPU."""

from twell_numba.kernels.dispatch import by_device
from twell_numba.kernels.paged_attention import cpu

_GPU = "twell_numba.kernels.paged_attention.cuda"

store_tokens = by_device(cpu.store_tokens, _GPU)
decode_attention = by_device(cpu.decode_attention, _GPU)
prefill_attention = by_device(cpu.prefill_attention, _GPU)

__all__ = ["decode_attention", "prefill_attention", "store_tokens"]
