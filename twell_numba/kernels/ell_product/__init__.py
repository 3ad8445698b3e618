"""Products of a sparse matrix in TwELL or hybrid ELL with a dense vector or matrix."""

from twell_numba.kernels.ell_product.cpu import hybrid_ell_matmul, twell_matmul

__all__ = ["hybrid_ell_matmul", "twell_matmul"]
