"""Dense products: by cuBLASLt on a real GPU; by our own kernel there and on the emulated one."""

import sys

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device.gpu import (  # noqa: E402
    TARGETS,
    cublas,
    empty,
    gemm,
    packages,
    record_graph,
    tiled_product,
)
from twell_numba.errors import TwellError  # noqa: E402

# M, K, N: nothing, one, and a tile of 32 and a step of 16 less and more one
SMALL = [
    (0, 3, 4),
    (3, 0, 4),
    (3, 4, 0),
    (1, 1, 1),
    (1, 17, 33),
    (31, 16, 32),
    (33, 15, 5),
]
LARGE = [(65537, 33, 7), (7, 65537, 31), (129, 257, 1023), (2048, 5632, 512), (1, 4096, 4096)]
TRANSPOSES = [(False, False), (True, False), (False, True), (True, True)]
PATHS = ["tiled", pytest.param("cublas", marks=pytest.mark.gpu)]


def stored(matrix, is_transposed):
    return np.ascontiguousarray(matrix.T if is_transposed else matrix)


def paths_on(machine, path):
    if path == "cublas" and not machine.is_real:
        pytest.skip("needs a real GPU")
    return path


@pytest.mark.parametrize("path", PATHS)
def test_matches_numpy(rng, machine, precision, path, relative_error, rounded):
    path = paths_on(machine, path)
    dtype, tolerance = precision
    random = [tuple(rng.integers(1, 600, 3)) for _ in range(50)] if machine.is_real else []
    for number, (m, k, n) in enumerate(machine.shapes(SMALL, LARGE + random)):
        a, a64 = rounded(rng.standard_normal((m, k)), dtype)
        b, b64 = rounded(rng.standard_normal((k, n)), dtype)
        start, start64 = rounded(rng.standard_normal((m, n)), dtype)
        every = machine.is_real or dtype == np.float32
        for flags in TRANSPOSES if every else [TRANSPOSES[number % 4]]:
            transpose_a, transpose_b = flags
            left = machine.upload(stored(a, transpose_a))
            right = machine.upload(stored(b, transpose_b))
            options = {"transpose_a": transpose_a, "transpose_b": transpose_b, "path": path}
            if not left.size or not right.size or not start.size:
                options["path"] = "auto"
            product = gemm.matmul(left, right, **options)
            assert product.dtype == dtype
            assert relative_error(product, a64 @ b64) <= tolerance, (m, k, n, flags)
            out = machine.upload(start)
            assert gemm.matmul(left, right, out, accumulate=True, **options) is out
            assert relative_error(out, start64 + a64 @ b64) <= tolerance, (m, k, n, flags)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_result_in_float32_of_operands_in_16_bits(
    rng, machine, path, dtype, relative_error, rounded
):
    path = paths_on(machine, path)
    a, a64 = rounded(rng.standard_normal((9, 40)), np.dtype(dtype))
    b, b64 = rounded(rng.standard_normal((40, 5)), np.dtype(dtype))
    start = rng.standard_normal((9, 5)).astype(np.float32)
    out = machine.upload(start)
    gemm.matmul(machine.upload(a), machine.upload(b), out, accumulate=True, path=path)
    assert relative_error(out, start + a64 @ b64) <= 1e-6


@pytest.mark.parametrize("path", PATHS)
def test_views_that_are_not_aligned(rng, machine, path, relative_error, rounded):
    path = paths_on(machine, path)
    for dtype in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        a, a64 = rounded(rng.standard_normal((12, 7)), dtype)
        b, b64 = rounded(rng.standard_normal((8, 9)), dtype)
        whole = machine.upload(np.zeros((12, 9), dtype))
        left, right = machine.upload(a)[3:10], machine.upload(b)[1:8]
        gemm.matmul(left, right, whole[5:], path=path)
        assert relative_error(whole[5:], a64[3:10] @ b64[1:8]) <= 5e-3
        assert not whole[:5].to_numpy().any()


@pytest.mark.parametrize("path", PATHS)
def test_same_bits_on_every_run(rng, machine, path):
    path = paths_on(machine, path)
    size = 700 if machine.is_real else 35
    a, b = (machine.upload(rng.standard_normal((size, size), np.float32)) for _ in range(2))
    first = gemm.matmul(a, b, path=path).to_numpy()
    for _ in range(3):
        np.testing.assert_array_equal(gemm.matmul(a, b, path=path).to_numpy(), first)


def test_nan_and_infinity_stay_in_their_row(machine):
    a = np.ones((3, 20), np.float32)
    a[1, 19] = np.nan
    a[2, 3] = np.inf
    product = gemm.matmul(machine.upload(a), machine.upload(np.ones((20, 2), np.float32)))
    np.testing.assert_array_equal(product.to_numpy(), a.sum(axis=1)[:, None].repeat(2, axis=1))


def test_no_launch_where_there_is_nothing_to_add_up(machine, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("launched")

    monkeypatch.setattr(gemm, "tiled_product", fail)
    monkeypatch.setattr(cublas, "product", fail)
    for m, k, n in [(0, 3, 2), (3, 3, 0), (0, 0, 0)]:
        a, b = (machine.upload(np.ones(shape, np.float32)) for shape in ((m, k), (k, n)))
        assert gemm.matmul(a, b).shape == (m, n)
    a, b = (machine.upload(np.ones(shape, np.float32)) for shape in ((2, 0), (0, 2)))
    out = machine.upload(np.full((2, 2), 7, np.float32))
    assert gemm.matmul(a, b, out, accumulate=True).to_numpy().tolist() == [[7, 7], [7, 7]]
    assert gemm.matmul(a, b, out).to_numpy().tolist() == [[0, 0], [0, 0]]


def test_the_first_operands_stream_waits_for_the_others(machine):
    if machine.is_real:
        pytest.skip("looks into the emulated stream")
    other = type(machine.gpu.stream)(machine.gpu, 78)
    a, b = (machine.upload(np.ones((2, 2), np.float32)) for _ in range(2))
    b.stream = other
    product = gemm.matmul(a, b)
    assert product.stream is a.stream
    assert other in a.stream.waited_for
    assert a.stream in other.waited_for


def test_refuses_what_does_not_fit(machine):
    a, b = (machine.upload(np.ones(shape, np.float32)) for shape in ((2, 3), (3, 4)))
    with pytest.raises(ValueError, match=r"a of shape \(2, 3\) and b of shape \(3, 4\) given, "):
        gemm.matmul(a, b, transpose_b=True)
    with pytest.raises(ValueError, match=r"\(K, M\) and \(K, N\) wanted"):
        gemm.matmul(a, b, transpose_a=True)
    with pytest.raises(ValueError, match="accumulate without out"):
        gemm.matmul(a, b, accumulate=True)
    with pytest.raises(ValueError, match=r"out of shape \(2, 3\) given, \(2, 4\) wanted"):
        gemm.matmul(a, b, empty((2, 3), np.float32, a.stream))
    with pytest.raises(ValueError, match="path 'blas' given, one of auto, cublas, tiled"):
        gemm.matmul(a, b, path="blas")
    with pytest.raises(TypeError, match="b of type ndarray given, a DeviceArray wanted"):
        gemm.matmul(a, np.ones((3, 4), np.float32))
    with pytest.raises(TypeError, match="a of dtype int64 given, one of float32, bfloat16"):
        gemm.matmul(machine.upload(np.ones((2, 3), np.int64)), b)
    with pytest.raises(TypeError, match="b of dtype float64 given beside a of float32"):
        gemm.matmul(a, machine.upload(np.ones((3, 4))))
    with pytest.raises(TypeError, match="out of dtype float64 given, float32 wanted"):
        gemm.matmul(a, b, empty((2, 4), np.float64, a.stream))
    square = machine.upload(np.ones((4, 4), np.float32))
    with pytest.raises(ValueError, match="out that shares memory with b given"):
        gemm.matmul(square.copy(), square, square)
    with pytest.raises(ValueError, match="out that shares memory with a given"):
        gemm.matmul(square[1:], square.copy(), square[:3])


def test_a_missing_library_names_the_extra_and_leaves_our_own_kernel(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvmath.bindings.cublasLt", None)
    packages.import_package.cache_clear()
    cublas.library.cache_clear()
    try:
        with pytest.raises(TwellError, match=r"nvmath-python.*pip install 'twell_numba\[cuda\]'"):
            cublas.library()
        assert gemm.default_path.__wrapped__() == "tiled"
    finally:
        packages.import_package.cache_clear()
        cublas.library.cache_clear()


def test_a_library_that_cannot_be_loaded_is_told_so(monkeypatch):
    class Bindings:
        @staticmethod
        def get_version():
            raise RuntimeError("libcublasLt.so.13:\nno such file")

    monkeypatch.setattr(cublas, "import_package", lambda *_: Bindings)
    with pytest.raises(TwellError, match="cuBLASLt cannot be loaded: libcublasLt.so.13: no such"):
        cublas.library.__wrapped__()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "float64"])
def test_our_own_kernel_compiles_for_every_target(kind):
    targets = TARGETS if kind in ("float32", "bfloat16") else TARGETS[:1]
    kinds = (f"{kind}*", f"{kind}*", f"{kind}*", *["int"] * 8)
    for target in targets:
        code, _ = tiled_product._product.compile(kinds, target)
        assert code.startswith(b"\x7fELF"), target


@pytest.mark.gpu
def test_products_are_recorded_in_a_graph(rng, real_gpu, relative_error):
    from twell_numba.device.gpu import from_numpy

    a, b = (rng.standard_normal((300, 300)).astype(np.float32) for _ in range(2))
    left, right = from_numpy(a, real_gpu.stream), from_numpy(b, real_gpu.stream)
    for path in ("cublas", "tiled"):
        out = gemm.matmul(left, right, path=path)
        with record_graph(real_gpu.stream) as graph:
            gemm.matmul(left, right, out, path=path)
            squared = gemm.matmul(out, out, path=path)
        for factor in (1, 2):
            left.copy_from(a * np.float32(factor))
            graph.replay()
            expected = (factor * a.astype(np.float64)) @ b
            assert relative_error(out, expected) <= 1e-5
            assert relative_error(squared, expected @ expected) <= 1e-5
        left.copy_from(a)
