"""Products of a CSR matrix with dense arrays, and feedforward layers of such weights."""

from twell_numba.kernels.csr import cpu
from twell_numba.kernels.dispatch import by_device
from twell_numba.kernels.sparse_ffn import SparseWeightActivations

_GPU = "twell_numba.kernels.csr.cuda"

activation_statistics = by_device(cpu.activation_statistics, _GPU)
csr_left_matmul = by_device(cpu.csr_left_matmul, _GPU)
csr_matmul = by_device(cpu.csr_matmul, _GPU)
csr_sampled_product = by_device(cpu.csr_sampled_product, _GPU)
csr_transposed_matmul = by_device(cpu.csr_transposed_matmul, _GPU)
ffn_backward = by_device(cpu.ffn_backward, _GPU)
ffn_forward = by_device(cpu.ffn_forward, _GPU)
gated_ffn_backward = by_device(cpu.gated_ffn_backward, _GPU)
gated_ffn_forward = by_device(cpu.gated_ffn_forward, _GPU)

__all__ = [
    "SparseWeightActivations",
    "activation_statistics",
    "csr_left_matmul",
    "csr_matmul",
    "csr_sampled_product",
    "csr_transposed_matmul",
    "ffn_backward",
    "ffn_forward",
    "gated_ffn_backward",
    "gated_ffn_forward",
]
