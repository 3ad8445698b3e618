"""Sparse matrices: what they hold, conversions and files.

===================== ============================================================================
:class:`TwELLMatrix`     entries packed by row and tile of columns; for inference
:class:`HybridELLMatrix` entries packed by row, to one width; for training
===================== ============================================================================

Both are exact for any input: a row that does not fit the fixed width is kept whole in a dense
*tail*, which grows as needed. They share the methods of :class:`SparseMatrix`::

    matrix = TwELLMatrix.from_dense(activations)
    product = matrix @ weights  # a NumPy array
    matrix.save("activations.safetensors")
    matrix == load("activations.safetensors")

Rules that hold for every format and every kernel:

- **Zeros annihilate.** In ``A @ X`` a zero of ``A`` contributes nothing, whatever it meets in
  ``X``; a dense product would give NaN for ``0 * nan`` and ``0 * inf``. It makes no difference
  whether the zero is absent, stored or part of a tail row, so equal matrices give equal products.
  Check ``np.isfinite(X).all()`` where NaN in ``X`` must be seen.
- **0.0 and -0.0 are not stored** by conversions; both come back as 0.0. NaN and infinities are
  entries like any other.
- **Padding is never read.** Slots beyond a count may hold anything.
- **Inputs are never changed**, and may have any strides, be read-only or big-endian.
- dtypes are float64, float32, float16 and bfloat16 (of ``ml_dtypes``). Products are summed in
  float32, or in float64 if an operand is.
"""

from twell_numba.formats.base import SparseMatrix
from twell_numba.formats.files import load
from twell_numba.formats.hybrid_ell import HybridELLMatrix
from twell_numba.formats.twell import TwELLMatrix

__all__ = ["HybridELLMatrix", "SparseMatrix", "TwELLMatrix", "load"]
