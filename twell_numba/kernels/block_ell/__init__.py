"""Products of a block-ELL matrix with dense vectors and matrices."""

from twell_numba.kernels.block_ell.cpu import (
    block_ell_left_matmul,
    block_ell_matmul,
    block_ell_sampled_product,
    block_ell_transposed_matmul,
)

__all__ = [
    "block_ell_left_matmul",
    "block_ell_matmul",
    "block_ell_sampled_product",
    "block_ell_transposed_matmul",
]
