"""Products of a CSR matrix by NVIDIA's cuSPARSE, through CuPy: for benchmarks to compare with.

CuPy is no dependency of this package: where it is not installed, there is nothing to compare with.
"""

from collections.abc import Callable

import numpy as np

from twell_numba.device.gpu.array import DeviceArray
from twell_numba.device.gpu.packages import import_package


def cusparse_products(
    data: DeviceArray,
    indices: DeviceArray,
    indptr: DeviceArray,
    shape: tuple[int, int],
    X: DeviceArray,
    Y: DeviceArray,
    left: DeviceArray,
) -> dict[str, Callable[[], object]]:
    """Return CuPy's products of A with dense matrices, each laid out as cuSPARSE wants it.

    Parameters
    ----------
    data, indices, indptr : DeviceArray
        A's arrays, without a copy.
    shape : tuple of int
        (M, K).
    X : DeviceArray, shape (K, N)
    Y : DeviceArray, shape (M, N)
    left : DeviceArray, shape (N, M)

    Returns
    -------
    dict of str to callable
        ``A @ X``, ``A.T @ X`` (with Y) and ``X @ A`` (with left), which give their work to X's
        stream. Empty where CuPy is missing, does not work, or does not know the dtype.
    """
    if data.dtype not in (np.float32, np.float64):
        return {}
    try:
        cupy = import_package("cupy", "cupy")
        sparse = import_package("cupyx.scipy.sparse", "cupy")
        spmm = import_package("cupyx.cusparse", "cupy").spmm
        with cupy.cuda.Device(X.gpu.id), cupy.cuda.ExternalStream(X.stream.handle):
            arrays = (cupy.asarray(data), cupy.asarray(indices), cupy.asarray(indptr))
            A = sparse.csr_matrix(arrays, shape=shape)
            X_by_column, Y_by_column = (cupy.asfortranarray(cupy.asarray(a)) for a in (X, Y))
            left_transposed = cupy.asarray(left).T
    except Exception:  # whatever is wrong with CuPy here: there is nothing to compare with
        return {}

    def on_stream(product: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            with cupy.cuda.Device(X.gpu.id), cupy.cuda.ExternalStream(X.stream.handle):
                product()

        return run

    products: dict[str, Callable[[], object]] = {
        "A @ X": on_stream(lambda: spmm(A, X_by_column)),
        "A.T @ X": on_stream(lambda: spmm(A, Y_by_column, transa=True)),
        "X @ A": on_stream(lambda: spmm(A, left_transposed, transa=True)),
    }
    return {name: product for name, product in products.items() if _works(product)}


def _works(product: Callable[[], object]) -> bool:
    try:
        product()
    except Exception:  # see above
        return False
    return True
