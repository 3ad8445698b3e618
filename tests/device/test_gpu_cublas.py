"""What cuBLASLt is told of a product, with a stand-in for it that computes in the host's memory."""

import ctypes

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device.gpu import GPUError, cublas, gemm  # noqa: E402
from twell_numba.errors import TwellError  # noqa: E402

DTYPES = {0: np.float32, 1: np.float64, 2: np.float16, 14: ml_dtypes.bfloat16}


class CUBLASLt:
    """Stands for ``nvmath.bindings.cublasLt``: the functions used, with the library's meaning."""

    class cuBLASLtError(Exception):
        pass

    matmul_heuristic_result_dtype = np.dtype(
        [("algo", np.uint64, 8), ("workspace_size", np.uint64), ("state", np.int32)]
    )

    def __init__(self):
        self.things = {}
        self.preferences = []
        self.heuristics = 0
        self.workspaces = []
        self.fails = False
        self.offers = 1

    def _new(self, thing):
        self.things[len(self.things) + 1] = thing
        return len(self.things)

    def matmul_desc_create(self, compute_type, scale_type):
        assert (compute_type, scale_type) in ((68, 0), (70, 1))
        return self._new({"scale": DTYPES[scale_type]})

    def matmul_desc_set_attribute(self, description, attribute, address, nbytes):
        assert nbytes == 4
        self.things[description][attribute] = ctypes.c_int32.from_address(address).value

    def matmul_desc_destroy(self, description):
        self.things[description] = None

    def matrix_layout_create(self, kind, rows, columns, leading):
        assert leading >= rows > 0 < columns
        return self._new((DTYPES[kind], rows, columns, leading))

    def matrix_layout_destroy(self, layout):
        self.things[layout] = None

    def matmul_preference_create(self):
        self.preferences.append({})
        return self._new(self.preferences[-1])

    def matmul_preference_set_attribute(self, preference, attribute, address, nbytes):
        value = int.from_bytes(ctypes.string_at(address, nbytes), "little")
        self.things[preference][attribute] = value

    def matmul_preference_destroy(self, preference):
        self.things[preference] = None

    def matmul_algo_get_heuristic(self, *arguments):
        *_, count, results, found = arguments
        assert count == 1
        self.heuristics += 1
        if self.offers is None:
            raise self.cuBLASLtError("CUBLAS_STATUS_NOT_SUPPORTED")
        result = np.zeros(1, self.matmul_heuristic_result_dtype)
        result["workspace_size"] = 1000
        ctypes.memmove(results, result.ctypes.data, result.nbytes)
        ctypes.c_int32.from_address(found).value = self.offers

    def matmul(
        self, handle, description, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout,
        algorithm, workspace, workspace_size, stream,
    ):  # fmt: skip
        if self.fails:
            raise self.cuBLASLtError("CUBLAS_STATUS_EXECUTION_FAILED:\n13")
        assert handle == 99
        assert (c, c_layout) == (d, d_layout)
        assert algorithm
        self.workspaces.append((workspace, workspace_size))
        said = self.things[description]
        read = said["scale"]
        alpha, beta = (np.frombuffer(ctypes.string_at(p, 8), read)[0] for p in (alpha, beta))
        first, second, result = (
            self._matrix(*each) for each in ((a, a_layout), (b, b_layout), (d, d_layout))
        )
        first = first.T if said[3] else first
        second = second.T if said[4] else second
        assert first.shape == (result.shape[0], second.shape[0])
        start = beta * result.astype(read) if beta else 0
        result[:] = alpha * (first.astype(read) @ second.astype(read)) + start

    def _matrix(self, address, layout):
        dtype, rows, columns, leading = self.things[layout]
        nbytes = leading * columns * np.dtype(dtype).itemsize
        memory = (ctypes.c_char * nbytes).from_address(address)
        return np.frombuffer(memory, dtype).reshape(columns, leading)[:, :rows].T


@pytest.fixture
def library(monkeypatch):
    stand_in = CUBLASLt()
    monkeypatch.setattr(cublas, "library", lambda: stand_in)
    monkeypatch.setattr(cublas, "_handle", lambda gpu_id: 99)
    monkeypatch.setattr(cublas, "_plans", {})
    return stand_in


@pytest.fixture
def machine(machine):
    if machine.is_real:
        pytest.skip("the stand-in works in the host's memory")
    return machine


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
def test_the_library_is_told_what_is_meant(
    rng, machine, library, precision, transpose_a, transpose_b, relative_error, rounded
):
    dtype, tolerance = precision
    for m, k, n in [(3, 5, 7), (1, 8, 4), (6, 1, 1), (64, 32, 33)]:
        a, a64 = rounded(rng.standard_normal((m, k)), dtype)
        b, b64 = rounded(rng.standard_normal((k, n)), dtype)
        left = machine.upload(np.ascontiguousarray(a.T if transpose_a else a))
        right = machine.upload(np.ascontiguousarray(b.T if transpose_b else b))
        options = {"transpose_a": transpose_a, "transpose_b": transpose_b, "path": "cublas"}
        out = gemm.matmul(left, right, **options)
        assert relative_error(out, a64 @ b64) <= tolerance
        gemm.matmul(left, right, out, accumulate=True, **options)
        assert relative_error(out, 2 * (a64 @ b64)) <= 2 * tolerance
    assert library.heuristics == 4  # a plan serves both calls
    assert all(size == 1000 and address for address, size in library.workspaces)


def test_a_result_in_float32_of_operands_in_16_bits(rng, machine, library, relative_error):
    a = rng.standard_normal((4, 9)).astype(ml_dtypes.bfloat16)
    start = rng.standard_normal((4, 4)).astype(np.float32)
    out, left = machine.upload(start), machine.upload(a)
    gemm.matmul(left, left.copy(), out, transpose_b=True, accumulate=True, path="cublas")
    wide = a.astype(np.float64)
    assert relative_error(out, start + wide @ wide.T) <= 1e-6


def test_the_library_knows_how_the_arrays_are_aligned(machine, library):
    a = machine.upload(np.ones((9, 3), np.float32))
    b = machine.upload(np.ones((3, 2), np.float32))
    for rows in (slice(1, 3), slice(4, 6), slice(0, 2)):
        gemm.matmul(a[rows], b, path="cublas")
        addresses = a[rows].pointer, b.pointer
        alignment = library.preferences[-1][5]
        assert alignment <= 256
        assert all(address % alignment == 0 for address in addresses)
    assert {preference[3] for preference in library.preferences} == {2}
    assert library.preferences[0][5] == 4


def test_our_own_kernel_where_the_library_has_no_algorithm(machine, library, monkeypatch):
    monkeypatch.setattr(gemm, "default_path", lambda: "cublas")
    a = machine.upload(np.ones((2, 3), np.float32))
    b = machine.upload(np.ones((3, 2), np.float32))
    for library.offers in (0, None):
        assert gemm.matmul(a, b).to_numpy().tolist() == [[3, 3], [3, 3]]
        assert machine.gpu.launches[-1][0] == "product"
        with pytest.raises(TwellError, match=r"no algorithm for the product of \(2, 3\) and"):
            gemm.matmul(a, b, path="cublas")
        cublas._plans.clear()
    assert not library.workspaces


def test_a_refused_product_is_one_clear_line(machine, library):
    library.fails = True
    a = machine.upload(np.ones((2, 2), np.float32))
    with pytest.raises(GPUError, match=r"refused the product of \(2, 2\) and \(2, 2\)") as caught:
        gemm.matmul(a, a.copy(), path="cublas")
    assert "\n" not in str(caught.value)


def test_plans_are_given_back(machine, library, monkeypatch):
    monkeypatch.setattr(cublas, "_MOST_PLANS", 2)
    for rows in range(1, 6):
        a = machine.upload(np.ones((rows, 2), np.float32))
        gemm.matmul(a, machine.upload(np.ones((2, 2), np.float32)), path="cublas")
    assert len(cublas._plans) <= 2
    kept = [thing for thing in library.things.values() if thing is not None]
    assert len(kept) == 4 * len(cublas._plans)
