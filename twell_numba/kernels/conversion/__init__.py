"""Conversions that read a whole matrix: from dense to each sparse format, and transposition."""

from twell_numba.kernels.conversion.cpu import (
    dense_to_block_ell,
    dense_to_csr,
    dense_to_segments,
    transpose_csr,
)

__all__ = ["dense_to_block_ell", "dense_to_csr", "dense_to_segments", "transpose_csr"]
