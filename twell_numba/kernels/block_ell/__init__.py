"""Products of a block-ELL matrix with dense arrays, and feedforward layers of such weights."""

from twell_numba.kernels.block_ell.cpu import (
    block_ell_left_matmul,
    block_ell_matmul,
    block_ell_sampled_product,
    block_ell_transposed_matmul,
    ffn_backward,
    ffn_forward,
    gated_ffn_backward,
    gated_ffn_forward,
)
from twell_numba.kernels.sparse_ffn import SparseWeightActivations, activation_statistics

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
