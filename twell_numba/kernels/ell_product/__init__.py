"""Products of a sparse matrix in TwELL or hybrid ELL with dense vectors and matrices."""

from twell_numba.kernels.dispatch import by_device
from twell_numba.kernels.ell_product import cpu

_GPU = "twell_numba.kernels.ell_product.cuda"

hybrid_ell_left_matmul = by_device(cpu.hybrid_ell_left_matmul, _GPU)
hybrid_ell_matmul = by_device(cpu.hybrid_ell_matmul, _GPU)
hybrid_ell_sampled_product = by_device(cpu.hybrid_ell_sampled_product, _GPU)
hybrid_ell_transposed_matmul = by_device(cpu.hybrid_ell_transposed_matmul, _GPU)
twell_left_matmul = by_device(cpu.twell_left_matmul, _GPU)
twell_matmul = by_device(cpu.twell_matmul, _GPU)
twell_sampled_product = by_device(cpu.twell_sampled_product, _GPU)
twell_transposed_matmul = by_device(cpu.twell_transposed_matmul, _GPU)

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
