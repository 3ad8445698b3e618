"""Dense matrix products on a GPU: by cuBLASLt, or by a kernel of our own where that is missing.

C = op(A) op(B)  or  C += op(A) op(B)                    op: as it is, or transposed
"""

import functools

import numpy as np

from twell_numba.device.gpu import cublas
from twell_numba.device.gpu.array import DeviceArray, empty, require_same_gpu
from twell_numba.device.gpu.tiled_product import tiled_product
from twell_numba.errors import TwellError

_FLOATS = ("float32*", "bfloat16*", "float16*", "float64*")
PATHS = ("auto", "cublas", "tiled")


@functools.cache
def default_path() -> str:
    """Return how products are computed unless asked otherwise.

    Returns
    -------
    str
        ``cublas`` where cuBLASLt can be loaded, otherwise ``tiled``.
    """
    try:
        cublas.library()
    except TwellError:
        return "tiled"
    return "cublas"


def matmul(
    a: DeviceArray,
    b: DeviceArray,
    out: DeviceArray | None = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    accumulate: bool = False,
    path: str = "auto",
) -> DeviceArray:
    """Return ``a @ b`` for two matrices, either of them transposed if asked.

    The work goes to the stream of ``a`` and can be recorded in a graph, once the same product was
    computed before. The same input gives the same bits in every run on the same GPU.

    Parameters
    ----------
    a : DeviceArray of floats, shape (M, K), or (K, M) if ``transpose_a``
    b : DeviceArray, shape (K, N), or (N, K) if ``transpose_b``
        Of a's dtype.
    out : DeviceArray, shape (M, N), optional
        Of the operands' dtype, or float32 for operands in 16 bits. It is overwritten and returned.
    accumulate : bool
        Add the product to ``out``, which must be given, instead of overwriting it.
    path : str
        ``cublas`` (cuBLASLt), ``tiled`` (our own kernel), or ``auto``: what :func:`default_path`
        names, and the other where that has no algorithm for this product.

    Returns
    -------
    DeviceArray, shape (M, N)
        Sums are in float32, or float64 for float64; zeros where K is 0.

    Raises
    ------
    TypeError
        If an operand is no DeviceArray of floats, or the dtypes do not fit.
    ValueError
        If the shapes do not fit, ``out`` shares memory with an operand, or the arrays are on
        different GPUs.
    TwellError
        If ``path`` is ``cublas`` and the library is missing or has no algorithm for this product.
    """
    rows, inner, columns = _sizes(a, b, transpose_a, transpose_b)
    if path not in PATHS:
        raise ValueError(f"path {path!r} given, one of {', '.join(PATHS)} wanted")
    if out is None:
        if accumulate:
            raise ValueError("accumulate without out given, the array to add to wanted")
        require_same_gpu(a=a, b=b)
        out = empty((rows, columns), a.dtype, a.stream)
    else:
        _check_out(out, a, b, (rows, columns))
    if out.size == 0:
        return out
    if inner == 0:
        if not accumulate:
            out.fill_with_zeros()
        return out
    wait_for = [array for array in (b, out) if array.stream is not a.stream]
    for array in wait_for:
        a.stream.wait(array.stream)
    if a.stream.capture is not None:
        for array in (a, b, out):
            a.stream.capture.keep(array.owner)
    _compute(a, b, out, inner, transpose_a, transpose_b, accumulate, path)
    for array in wait_for:
        array.stream.wait(a.stream)
    return out


def _compute(
    a: DeviceArray,
    b: DeviceArray,
    out: DeviceArray,
    inner: int,
    transpose_a: bool,
    transpose_b: bool,
    accumulate: bool,
    path: str,
) -> None:
    chosen = default_path() if path == "auto" else path
    if chosen == "cublas":
        done = cublas.product(
            a, b, out, inner,
            transpose_a=transpose_a, transpose_b=transpose_b, accumulate=accumulate,
        )  # fmt: skip
        if done:
            return
        if path == "cublas":
            raise TwellError(
                f"cuBLASLt has no algorithm for the product of {a.shape} and {b.shape} of "
                f"{a.dtype} on GPU {a.gpu.id}; use path='auto'"
            )
    tiled_product(
        a, b, out, inner,
        transpose_a=transpose_a, transpose_b=transpose_b, accumulate=accumulate,
    )  # fmt: skip


def _sizes(
    a: DeviceArray, b: DeviceArray, transpose_a: bool, transpose_b: bool
) -> tuple[int, int, int]:
    """Return M, K and N, after checking the operands."""
    for name, array in (("a", a), ("b", b)):
        if not isinstance(array, DeviceArray):
            raise TypeError(f"{name} of type {type(array).__name__} given, a DeviceArray wanted")
        if array.kind not in _FLOATS:
            names = ", ".join(kind[:-1] for kind in _FLOATS)
            raise TypeError(f"{name} of dtype {array.dtype} given, one of {names} wanted")
    if a.dtype != b.dtype:
        raise TypeError(f"b of dtype {b.dtype} given beside a of {a.dtype}, one dtype wanted")
    if len(a.shape) == 2 and len(b.shape) == 2:
        rows, inner = a.shape[::-1] if transpose_a else a.shape
        other, columns = b.shape[::-1] if transpose_b else b.shape
        if inner == other:
            return rows, inner, columns
    wanted = f"{'(K, M)' if transpose_a else '(M, K)'} and {'(N, K)' if transpose_b else '(K, N)'}"
    raise ValueError(f"a of shape {a.shape} and b of shape {b.shape} given, {wanted} wanted")


def _check_out(out: DeviceArray, a: DeviceArray, b: DeviceArray, shape: tuple[int, int]) -> None:
    if not isinstance(out, DeviceArray):
        raise TypeError(f"out of type {type(out).__name__} given, a DeviceArray wanted")
    if out.dtype != a.dtype and not (out.dtype == np.float32 and a.dtype.itemsize == 2):
        wanted = f"{a.dtype} or float32" if a.dtype.itemsize == 2 else f"{a.dtype}"
        raise TypeError(f"out of dtype {out.dtype} given, {wanted} wanted")
    if out.shape != shape:
        raise ValueError(f"out of shape {out.shape} given, {shape} wanted")
    require_same_gpu(a=a, b=b, out=out)
    for name, array in (("a", a), ("b", b)):
        if max(out.pointer, array.pointer) < min(
            out.pointer + out.nbytes, array.pointer + array.nbytes
        ):
            raise ValueError(f"out that shares memory with {name} given, memory of its own wanted")
