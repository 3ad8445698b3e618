"""Products of a CSR matrix with dense vectors and matrices."""

from twell_numba.kernels.csr.cpu import (
    csr_left_matmul,
    csr_matmul,
    csr_sampled_product,
    csr_transposed_matmul,
)

__all__ = ["csr_left_matmul", "csr_matmul", "csr_sampled_product", "csr_transposed_matmul"]
