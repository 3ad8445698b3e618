"""Products of a CSR matrix with dense arrays, and feedforward layers of such weights."""

from twell_numba.kernels.csr.cpu import (
    csr_left_matmul,
    csr_matmul,
    csr_sampled_product,
    csr_transposed_matmul,
    ffn_backward,
    ffn_forward,
    gated_ffn_backward,
    gated_ffn_forward,
)
from twell_numba.kernels.sparse_ffn import SparseWeightActivations, activation_statistics

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
