"""Sparse matrices: what they hold, conversions, products and files.

======================== =========================================================================
:class:`CSRMatrix`       entries packed by row, of any number; transposed, it serves as CSC
:class:`BlockELLMatrix`  square blocks of entries, as many in every row of blocks
:class:`TwELLMatrix`     entries packed by row and tile of columns, to one width; for inference
:class:`HybridELLMatrix` entries packed by row, to one width; for training
======================== =========================================================================

All are exact for any input. In TwELL and hybrid ELL, a row that does not fit the fixed width is
kept whole in a dense *tail*, which grows as needed. All share the methods of
:class:`SparseMatrix`::

    matrix = CSRMatrix.from_dense(weights)  # or from_coordinates, from_scipy, from_sparse
    product = matrix @ activations  # a NumPy array
    blocks = BlockELLMatrix.from_sparse(matrix, block_size=32)
    blocks == matrix  # by value, whatever the format
    matrix.save("weights.safetensors")
    matrix == load("weights.safetensors")

The arrays of a matrix are in the host's memory or in a GPU's; ``matrix.device`` says where::

    on_gpu = matrix.to("cuda")  # or CSRMatrix.from_dense(device_array)
    product = on_gpu @ device_array  # a DeviceArray of twell_numba.device.gpu
    on_gpu.to("cpu") == matrix

There, conversions between formats, ``from_dense``, ``to_dense``, ``astype``, ``T`` and products
run on the GPU; what NumPy or SciPy is to see (``to_scipy``, ``coordinates``, ``save``, ``==``,
``validate`` and counts) is copied to the host first, and what would copy unasked is refused.

Rules that hold for every format and every kernel:

- **Zeros annihilate.** In ``A @ X`` a zero of ``A`` contributes nothing, whatever it meets in
  ``X``; a dense product would give NaN for ``0 * nan`` and ``0 * inf``. It makes no difference
  whether the zero is absent, stored or part of a tail row, so equal matrices give equal products.
  Check ``np.isfinite(X).all()`` where NaN in ``X`` must be seen.
- **0.0 and -0.0 are not stored** by conversions; both come back as 0.0. NaN and infinities are
  entries like any other. Zeros that a constructor was given, or that were written into the arrays
  of a matrix, stay stored in it, its copies, its transpose and its file.
- **Always canonical.** Each place is stored once, columns ascend, and index arrays are as wide as
  the numbers in them need. A constructor checks all it is given and names the row that is wrong;
  ``validate=False`` leaves that out.
- **Padding is never read.** Slots beyond a count and the parts of blocks beyond the matrix's edge
  may hold anything.
- **Inputs are never changed**, and may have any strides, be read-only or big-endian.
- dtypes are float64, float32, float16 and bfloat16 (of ``ml_dtypes``). Products are summed in
  float32, or in float64 if an operand is.

Where names are shared with ``scipy.sparse``, they mean the same, but for these differences:

- The arrays given to a constructor must be canonical, and are checked in full. SciPy takes columns
  in any order and repeated ones, and looks at pointers only.
- dtypes are floating-point: integers, booleans and complex numbers are refused, not converted. The
  index arrays of one matrix may differ in dtype.
- ``from_coordinates`` adds up duplicates at once, in float64, and refuses a sum too large for the
  dtype. SciPy's COO adds them up later, in their own dtype.
- ``nnz`` counts stored zeros, as in SciPy, but for those in a tail. In a block it counts all
  elements inside the matrix, as SciPy's BSR.
- ``astype`` and conversions leave out zeros and what rounds to zero; SciPy's keep the pattern.
- ``A.T`` is a new matrix of A's own format. SciPy's is a view, by columns where A is by rows.
- ``A == B`` is one truth value. SciPy compares element by element.
- ``A @ X`` skips zeros that are stored; SciPy multiplies with them, so that it may give NaN there.
  ``X`` is dense: sparse products of two sparse matrices, sums, indexing and reductions are SciPy's
  (``to_scipy``).
- ``np.asarray(A)`` is the dense array up to 16 MiB and a ``TypeError`` beyond. SciPy's is an array
  of one object, whatever the size.
- ``save`` writes safetensors, never a pickle or ``.npz``.
"""

from twell_numba.formats.base import SparseMatrix
from twell_numba.formats.block_ell import BlockELLMatrix
from twell_numba.formats.csr import CSRMatrix
from twell_numba.formats.files import load
from twell_numba.formats.hybrid_ell import HybridELLMatrix
from twell_numba.formats.twell import TwELLMatrix

__all__ = [
    "BlockELLMatrix",
    "CSRMatrix",
    "HybridELLMatrix",
    "SparseMatrix",
    "TwELLMatrix",
    "load",
]
