"""What products with the transpose of a CSR matrix on a GPU need, made once for a pattern."""

from twell_numba.device.gpu import DeviceArray
from twell_numba.formats import CSRMatrix
from twell_numba.kernels.conversion import cuda_order
from twell_numba.kernels.conversion.cuda import take
from twell_numba.kernels.device_products import once_for_pattern


def by_column(A: CSRMatrix) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    """Return the transpose's pattern: where its values stand in ``data``, its indices and indptr.

    Made at the first call, without waiting; see
    :func:`twell_numba.kernels.conversion.cuda_order.by_column`.
    """
    return once_for_pattern(
        A, "by_column", lambda: cuda_order.by_column(A.indices, A.indptr, A.shape[1])
    )


def transposed(A: CSRMatrix) -> CSRMatrix:
    """Return the transpose, with its own copy of the values; the pattern is shared."""
    order, indices, indptr = by_column(A)
    shape = (A.shape[1], A.shape[0])
    return CSRMatrix(take(A.data, order), indices, indptr, shape, validate=False)
