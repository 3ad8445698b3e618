"""Products of a block-ELL matrix with dense arrays, and feedforward layers of such weights."""

from twell_numba.kernels.block_ell import cpu
from twell_numba.kernels.dispatch import by_device
from twell_numba.kernels.sparse_ffn import SparseWeightActivations

_GPU = "twell_numba.kernels.block_ell.cuda"

activation_statistics = by_device(cpu.activation_statistics, _GPU)
block_ell_left_matmul = by_device(cpu.block_ell_left_matmul, _GPU)
block_ell_matmul = by_device(cpu.block_ell_matmul, _GPU)
block_ell_sampled_product = by_device(cpu.block_ell_sampled_product, _GPU)
block_ell_transposed_matmul = by_device(cpu.block_ell_transposed_matmul, _GPU)
ffn_backward = by_device(cpu.ffn_backward, _GPU)
ffn_forward = by_device(cpu.ffn_forward, _GPU)
gated_ffn_backward = by_device(cpu.gated_ffn_backward, _GPU)
gated_ffn_forward = by_device(cpu.gated_ffn_forward, _GPU)

__all__ = [
    "SparseWeightActivations",
    "activation_statistics",
    "block_ell_left_matmul",
    "block_ell_matmul",
    "block_ell_sampled_product",
    "block_ell_transposed_matmul",
    "ffn_backward",
    "ffn_forward",
    "gated_ffn_backward",
    "gated_ffn_forward",
]
