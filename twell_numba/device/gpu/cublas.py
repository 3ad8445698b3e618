"""Dense products by NVIDIA's cuBLASLt, called on addresses through nvmath-python's bindings.

What the library wants to know of a product (layouts, algorithm) is a *plan*, made once for each
shape, dtype, alignment and GPU. The algorithm is the first that the library's own heuristic
offers: the same one in every run. Algorithms that round partial sums to the result's dtype are
left out, so that sums are in float32 (float64 for float64) from beginning to end.

The library's matrices are column-major: a row-major matrix is to it the transpose of one, so
C = A B is asked for as C^T = B^T A^T, without moving a number.
"""

import functools
import sys
from typing import Any

import numpy as np

from twell_numba.device.gpu.array import DeviceArray, empty
from twell_numba.device.gpu.devices import GPU
from twell_numba.device.gpu.driver import GPUError
from twell_numba.device.gpu.packages import EXTRA, import_package
from twell_numba.errors import TwellError

# cudaDataType_t and cublasComputeType_t
_TYPES = {"float32*": 0, "float64*": 1, "float16*": 2, "bfloat16*": 14}
_COMPUTE_FLOAT32, _COMPUTE_FLOAT64 = 68, 70
# cublasLtMatmulDescAttributes_t
_TRANSPOSE_FIRST, _TRANSPOSE_SECOND = 3, 4
# cublasLtMatmulPreferenceAttributes_t
_MOST_WORKSPACE, _REDUCTION_SCHEMES, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
# cublasLtReductionScheme_t: partial sums are added up in the compute type
_REDUCE_IN_COMPUTE_TYPE = 2

# What the library recommends for the newest GPUs; memory is taken only for as much as a plan uses.
WORKSPACE = 32 * 2**20
BEST_ALIGNMENT = 256
_MOST_PLANS = 4096

_factors: dict[str, tuple[np.ndarray, np.ndarray]] = {
    "float32*": (np.zeros(1, np.float32), np.ones(1, np.float32)),
    "float64*": (np.zeros(1, np.float64), np.ones(1, np.float64)),
}
_plans: dict[tuple[Any, ...], "_Plan | None"] = {}


@functools.cache
def library() -> Any:
    """Return ``nvmath.bindings.cublasLt``, with the library behind it loaded.

    Raises
    ------
    TwellError
        If the package or the library is not installed, or there is no driver.
    """
    bindings = import_package("nvmath.bindings.cublasLt", "nvmath-python")
    try:
        bindings.get_version()
    except Exception as error:  # nvmath and cuda-pathfinder each have errors of their own
        raise TwellError(
            f"cuBLASLt cannot be loaded: {_one_line(error)}; install it with: {EXTRA}"
        ) from error
    return bindings


def product(
    a: DeviceArray,
    b: DeviceArray,
    out: DeviceArray,
    inner: int,
    *,
    transpose_a: bool,
    transpose_b: bool,
    accumulate: bool,
) -> bool:
    """Write the product of ``a`` and ``b`` to ``out``, or add it; see ``gemm.matmul``.

    Parameters
    ----------
    a, b, out : DeviceArray
        Two-dimensional, with at least one element each.
    inner : int
        Terms of each sum, K.

    Returns
    -------
    bool
        False if the library has no algorithm for this product; then nothing was done.

    Raises
    ------
    TwellError
        If the library is missing.
    GPUError
        If it refuses the product.
    """
    gpu = a.gpu
    # the lowest bit that is set in one of the addresses, 256 at most
    bits = a.pointer | b.pointer | out.pointer | BEST_ALIGNMENT
    key = (
        gpu.id, a.kind, out.kind, a.shape, b.shape, transpose_a, transpose_b, bits & -bits,
    )  # fmt: skip
    gpu.make_current()
    try:
        plan = _plans[key]
    except KeyError:
        plan = _plans[key] = _make_plan(a, b, out, inner, transpose_a, transpose_b, bits & -bits)
    if plan is None:
        return False
    plan.run(a, b, out, accumulate)
    return True


class _Plan:
    """A product, described to the library once."""

    def __init__(self, bindings: Any, gpu: GPU, kind: str, *, is_float64: bool) -> None:
        self._bindings = bindings
        self._handle = _handle(gpu.id)
        self._factors = [factor.ctypes.data for factor in _factors[kind]]
        compute = _COMPUTE_FLOAT64 if is_float64 else _COMPUTE_FLOAT32
        self._description = bindings.matmul_desc_create(compute, _TYPES[kind])
        self._layouts: list[int] = []
        self._algorithm: Any = None
        self._workspace = 0

    def __del__(self) -> None:
        if sys.is_finalizing():  # the library may be gone, and all it held goes with the process
            return
        for layout in getattr(self, "_layouts", ()):
            self._bindings.matrix_layout_destroy(layout)
        if getattr(self, "_description", None) is not None:
            self._bindings.matmul_desc_destroy(self._description)

    def describe(
        self,
        first: tuple[DeviceArray, bool],
        second: tuple[DeviceArray, bool],
        out: DeviceArray,
    ) -> None:
        """Tell of the matrices as the library sees them, and which are to be transposed."""
        for (_, is_transposed), attribute in (
            (first, _TRANSPOSE_FIRST),
            (second, _TRANSPOSE_SECOND),
        ):
            flag = np.array([is_transposed], np.int32)
            self._bindings.matmul_desc_set_attribute(
                self._description, attribute, flag.ctypes.data, flag.nbytes
            )
        for array in (first[0], second[0], out):
            rows, columns = array.shape
            self._layouts.append(
                self._bindings.matrix_layout_create(_TYPES[array.kind], columns, rows, columns)
            )

    def choose_algorithm(self, alignment: int) -> bool:
        """Take the first algorithm that the heuristic offers; False if there is none."""
        bindings = self._bindings
        preference = bindings.matmul_preference_create()
        try:
            settings: list[tuple[int, np.ndarray]] = [
                (_MOST_WORKSPACE, np.array([WORKSPACE], np.uint64)),
                (_REDUCTION_SCHEMES, np.array([_REDUCE_IN_COMPUTE_TYPE], np.uint32)),
                *((each, np.array([alignment], np.uint32)) for each in _ALIGNMENTS),
            ]
            for attribute, value in settings:
                bindings.matmul_preference_set_attribute(
                    preference, attribute, value.ctypes.data, value.nbytes
                )
            found = np.zeros(1, np.int32)
            results = np.zeros(1, bindings.matmul_heuristic_result_dtype)
            first, second, out = self._layouts
            try:
                bindings.matmul_algo_get_heuristic(
                    self._handle, self._description, first, second, out, out, preference,
                    1, results.ctypes.data, found.ctypes.data,
                )  # fmt: skip
            except bindings.cuBLASLtError:  # "not supported" is said as an error
                return False
        finally:
            bindings.matmul_preference_destroy(preference)
        if found[0] < 1 or results["state"][0] != 0:
            return False
        self._algorithm = results  # its first member is the algorithm
        self._workspace = int(results["workspace_size"][0])
        return True

    def run(self, a: DeviceArray, b: DeviceArray, out: DeviceArray, accumulate: bool) -> None:
        """Give the product to the stream of ``a``."""
        stream = a.stream
        pointer = 0
        if self._workspace:
            # from the pool: in a recording it belongs to the graph, otherwise to this stream's work
            workspace = empty(self._workspace, np.uint8, stream)
            pointer = workspace.pointer
        zero, one = self._factors
        first, second, result = self._layouts
        try:
            self._bindings.matmul(
                self._handle, self._description,
                one, b.pointer, first, a.pointer, second,
                one if accumulate else zero, out.pointer, result, out.pointer, result,
                self._algorithm.ctypes.data, pointer, self._workspace, stream.handle,
            )  # fmt: skip
        except Exception as error:
            raise GPUError(
                f"cuBLASLt refused the product of {a.shape} and {b.shape} of {a.dtype} on GPU "
                f"{a.gpu.id}: {_one_line(error)}"
            ) from error


def _make_plan(
    a: DeviceArray,
    b: DeviceArray,
    out: DeviceArray,
    inner: int,
    transpose_a: bool,
    transpose_b: bool,
    alignment: int,
) -> _Plan | None:
    is_float64 = out.kind == "float64*"
    kind = "float64*" if is_float64 else "float32*"
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    plan = _Plan(library(), a.gpu, kind, is_float64=is_float64)
    plan.describe((b, transpose_b), (a, transpose_a), out)
    return plan if plan.choose_algorithm(alignment) else None


@functools.cache
def _handle(gpu_id: int) -> int:
    """Return the library's handle for the current GPU, whose number is given."""
    try:
        return library().create()
    except TwellError:
        raise
    except Exception as error:
        raise GPUError(f"cuBLASLt cannot start on GPU {gpu_id}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
