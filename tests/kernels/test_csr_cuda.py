import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.formats import CSRMatrix  # noqa: E402
from twell_numba.kernels.csr import cuda, reference  # noqa: E402

SMALL = [
    (0, 3, 2),
    (3, 0, 2),
    (1, 1, 1),
    (5, 7, 1),
    (9, 4, 15),
    (6, 10, 33),
    (3, 5, 64),
    (4, 40, 3),
]
LARGE = [(65537, 20, 3), (70, 65537, 1), (2048, 5632, 65), (33, 129, 2049)]


def make(rng, rows, columns, dtype, density=0.3):
    dense = rng.standard_normal((rows, columns)) * (rng.random((rows, columns)) < density)
    if rows > 2:
        dense[1] = 0
        dense[2] = rng.standard_normal(columns)
    return CSRMatrix.from_dense(dense.astype(dtype))


def exact(A):
    return CSRMatrix(A.data.astype(np.float64), A.indices, A.indptr, A.shape)


def cases(rng, machine, dtype):
    random = [(*rng.integers(1, 200, 2), rng.integers(1, 70)) for _ in range(200)]
    return machine.shapes(SMALL, LARGE + machine.share(random, dtype))


def test_products_match_the_reference(rng, machine, precision, relative_error, rounded):
    dtype, tolerance = precision
    for rows, columns, width in cases(rng, machine, dtype):
        A = make(rng, rows, columns, dtype, density=0.01 if rows * columns > 10**6 else 0.3)
        on_gpu = A.to(machine.gpu.stream)
        for name, shape in (
            ("csr_matmul", (columns, width)),
            ("csr_transposed_matmul", (rows, width)),
            ("csr_left_matmul", (width, rows)),
        ):
            x, x64 = rounded(rng.standard_normal(shape), dtype)
            operands, wanted = (on_gpu, machine.upload(x)), (exact(A), x64)
            if name == "csr_left_matmul":
                operands, wanted = operands[::-1], wanted[::-1]
            actual = getattr(cuda, name)(*operands)
            expected = getattr(reference, name)(*wanted)
            assert actual.dtype == dtype
            assert relative_error(actual, expected) <= tolerance, (name, rows, columns, width)


def test_vectors(rng, machine, relative_error):
    A = make(rng, 7, 5, np.float32)
    on_gpu = A.to(machine.gpu.stream)
    x, y = rng.standard_normal(5).astype(np.float32), rng.standard_normal(7).astype(np.float32)
    dense = A.to_dense().astype(np.float64)
    assert relative_error(cuda.csr_matmul(on_gpu, machine.upload(x)), dense @ x) < 1e-6
    assert relative_error(cuda.csr_transposed_matmul(on_gpu, machine.upload(y)), dense.T @ y) < 1e-6
    assert relative_error(cuda.csr_left_matmul(machine.upload(y), on_gpu), y @ dense) < 1e-6


def test_sampled_product(rng, machine, precision, relative_error, rounded):
    dtype, tolerance = precision
    for rows, columns, width in cases(rng, machine, dtype):
        A = make(rng, rows, columns, dtype, 0.01 if rows * columns > 10**6 else 0.3)
        (y, y64), (x, x64) = (
            rounded(rng.standard_normal((size, width)), dtype) for size in (rows, columns)
        )
        on_gpu = A.to(machine.gpu.stream)
        actual = cuda.csr_sampled_product(on_gpu, machine.upload(y), machine.upload(x))
        expected = reference.csr_sampled_product(exact(A), y64, x64)
        result = actual.to("cpu")
        result.validate()
        assert result.dtype == dtype
        np.testing.assert_array_equal(result.indices, A.indices)
        assert relative_error(result.data, expected.data) <= tolerance, (rows, columns, width)


def test_sampled_product_overwrites_out(rng, machine):
    A = make(rng, 6, 5, np.float32).to(machine.gpu.stream)
    Y, X = (machine.upload(rng.standard_normal((n, 3)).astype(np.float32)) for n in (6, 5))
    expected = cuda.csr_sampled_product(A, Y, X).data.to_numpy()
    assert cuda.csr_sampled_product(A, Y, X, A) is A
    np.testing.assert_array_equal(A.data.to_numpy(), expected)
    other = make(rng, 6, 5, np.float32).to(machine.gpu.stream)
    with pytest.raises(ValueError, match="other index arrays"):
        cuda.csr_sampled_product(A, Y, X, other)


@pytest.mark.parametrize("width", [3, 20])
def test_zeros_annihilate_nan(machine, width):
    A = CSRMatrix(np.array([0.0, 2.0], np.float32), np.array([0, 1]), np.array([0, 2, 2]), (2, 3))
    x = np.full((3, width), np.nan, np.float32)
    x[1] = 1
    product = cuda.csr_matmul(A.to(machine.gpu.stream), machine.upload(x))
    np.testing.assert_array_equal(product.to_numpy(), [[2] * width, [0] * width])


def test_out_may_share_memory_with_the_operand(rng, machine):
    A = make(rng, 6, 6, np.float32).to(machine.gpu.stream)
    X = machine.upload(rng.standard_normal((6, 4)).astype(np.float32))
    expected = cuda.csr_matmul(A, X).to_numpy()
    assert cuda.csr_matmul(A, X, X) is X
    np.testing.assert_array_equal(X.to_numpy(), expected)
    apart = machine.upload(np.zeros((6, 4), np.float32))
    again = machine.upload(expected)
    assert cuda.csr_matmul(A, again, apart) is apart


def test_mixed_dtypes_give_float32(rng, machine, relative_error):
    A = make(rng, 6, 5, np.float32)
    x = rng.standard_normal((5, 4)).astype(ml_dtypes.bfloat16)
    on_gpu = A.to(machine.gpu.stream)
    product = cuda.csr_matmul(on_gpu, machine.upload(x))
    assert product.dtype == np.float32
    assert relative_error(product, A.to_dense().astype(np.float64) @ x.astype(np.float64)) < 1e-6


def test_same_bits_on_every_run(rng, machine):
    rows = 3000 if machine.is_real else 8
    A = make(rng, rows, 300, np.float32, 0.1).to(machine.gpu.stream)
    X = machine.upload(rng.standard_normal((rows, 40)).astype(np.float32))
    runs = [
        cuda.csr_transposed_matmul(A, X).to_numpy() for _ in range(50 if machine.is_real else 2)
    ]
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


def test_refuses_what_does_not_fit(rng, machine):
    A = make(rng, 6, 5, np.float32).to(machine.gpu.stream)
    X = machine.upload(np.ones((5, 4), np.float32))
    with pytest.raises(ValueError, match=r"X of shape \(5, 4\) given, \(6,\) or \(6, N\) wanted"):
        cuda.csr_transposed_matmul(A, X)
    with pytest.raises(TypeError, match="X of type ndarray given, a DeviceArray wanted"):
        cuda.csr_matmul(A, np.ones((5, 4), np.float32))
    with pytest.raises(TypeError, match="out of dtype float64 given, float32 wanted"):
        cuda.csr_matmul(A, X, machine.upload(np.ones((6, 4))))
