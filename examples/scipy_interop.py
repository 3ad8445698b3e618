"""Sparse matrices to and from SciPy, and SciPy's solvers on any format.

Run it with:  python examples/scipy_interop.py
"""

import numpy as np
import scipy.sparse
import scipy.sparse.linalg

from twell_numba.formats import BlockELLMatrix, CSRMatrix, HybridELLMatrix, TwELLMatrix

# A heat equation on a square grid, assembled by SciPy.
SIDE = 40
line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(SIDE, SIDE))
grid = scipy.sparse.kronsum(line, line)
print(f"SciPy's: {grid.format}, {grid.shape[0]} x {grid.shape[1]}, {grid.nnz} entries")

# Any of SciPy's formats becomes any of ours, and comes back.
for scipy_format in ("csr", "csc", "coo", "bsr"):
    matrix = CSRMatrix.from_scipy(grid.asformat(scipy_format))
    assert abs(matrix.to_scipy(scipy_format) - grid).max() == 0

# Entries by their places, as SciPy's coo; those at the same place are added up.
matrix = CSRMatrix.from_coordinates([0, 0, 1], [1, 1, 0], [1.0, 2.0, 5.0], shape=(2, 2))
print(f"from coordinates: {matrix.to_dense().tolist()}")

# The arrays of a CSR matrix in canonical form need no copy in either direction.
canonical = scipy.sparse.csr_array(grid)
canonical.sum_duplicates()
ours = CSRMatrix(canonical.data, canonical.indices, canonical.indptr, canonical.shape)
theirs = scipy.sparse.csr_array((ours.data, ours.indices, ours.indptr), shape=ours.shape)
assert np.shares_memory(ours.data, canonical.data)
assert np.shares_memory(ours.data, theirs.data)

# A transposed CSR matrix is the matrix by columns.
by_columns = ours.T
csc = scipy.sparse.csc_array(
    (by_columns.data, by_columns.indices, by_columns.indptr), shape=ours.shape
)
assert abs(csc - grid).max() == 0

# SciPy's solvers take a linear operator of any format.
heat = np.zeros(SIDE * SIDE)
heat[SIDE * SIDE // 2 + SIDE // 2] = 1
for cls in (CSRMatrix, BlockELLMatrix, TwELLMatrix, HybridELLMatrix):
    operator = cls.from_scipy(grid).aslinearoperator()
    temperature, status = scipy.sparse.linalg.cg(operator, heat, rtol=1e-8)
    residual = np.linalg.norm(grid @ temperature - heat)
    assert status == 0
    largest = scipy.sparse.linalg.svds(operator, k=1, return_singular_vectors=False)[0]
    print(f"{cls.__name__:<16} cg residual {residual:.1e}, largest singular value {largest:.6f}")
