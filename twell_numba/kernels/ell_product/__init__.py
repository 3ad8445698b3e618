"""Products of a sparse matrix in TwELL or hybrid ELL with dense vectors and matrices."""

from twell_numba.kernels.ell_product.cpu import (
    hybrid_ell_left_matmul,
    hybrid_ell_matmul,
    hybrid_ell_sampled_product,
    hybrid_ell_transposed_matmul,
    twell_left_matmul,
    twell_matmul,
    twell_sampled_product,
    twell_transposed_matmul,
)

__all__ = [
    "hybrid_ell_left_matmul",
    "hybrid_ell_matmul",
    "hybrid_ell_sampled_product",
    "hybrid_ell_transposed_matmul",
    "twell_left_matmul",
    "twell_matmul",
    "twell_sampled_product",
    "twell_transposed_matmul",
]
