"""Products of a sparse matrix given as the entries of its rows: CSR, TwELL and hybrid ELL.

The formats' own families check operands; this one is compiled code, and its definition is
:mod:`twell_numba.kernels.sparse_reference`.
"""

from twell_numba.kernels.packed_rows.cpu import PackedRows, multiply, multiply_transposed, sample

__all__ = ["PackedRows", "multiply", "multiply_transposed", "sample"]
