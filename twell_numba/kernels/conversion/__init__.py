"""Conversions that read a whole matrix: from dense to each sparse format, and transposition."""

from twell_numba.kernels.conversion import cpu
from twell_numba.kernels.dispatch import by_device

_GPU = "twell_numba.kernels.conversion.cuda"

dense_to_block_ell = by_device(cpu.dense_to_block_ell, _GPU)
dense_to_csr = by_device(cpu.dense_to_csr, _GPU)
dense_to_segments = by_device(cpu.dense_to_segments, _GPU)
transpose_csr = by_device(cpu.transpose_csr, _GPU)

__all__ = ["dense_to_block_ell", "dense_to_csr", "dense_to_segments", "transpose_csr"]
