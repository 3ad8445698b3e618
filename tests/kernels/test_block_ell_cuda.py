import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.formats import BlockELLMatrix  # noqa: E402
from twell_numba.kernels.block_ell import cuda, reference  # noqa: E402

# (M, K, N, b): no row or column, blocks straddled on both edges, blocks larger than the matrix
SMALL = [
    (0, 3, 2, 2),
    (3, 0, 2, 2),
    (1, 1, 1, 1),
    (5, 7, 1, 3),
    (9, 4, 15, 4),
    (6, 10, 33, 4),
    (4, 40, 3, 16),
    (3, 2, 17, 8),
    (6, 5, 24, 5),
]
LARGE = [(65537, 20, 3, 32), (700, 65537, 1, 64), (2048, 5632, 65, 32), (33, 129, 2049, 16)]


def make(rng, rows, columns, dtype, b, density=0.3):
    """Return a matrix with NaN wherever its array of values holds no entry."""
    block_rows, block_columns = -(-rows // b), -(-columns // b)
    chosen = np.kron(rng.random((block_rows, block_columns)) < density, np.ones((b, b)))
    dense = rng.standard_normal((rows, columns)) * chosen[:rows, :columns]
    if rows > b:
        dense[:b] = 0
        dense[-1] = rng.standard_normal(columns)
    A = BlockELLMatrix.from_dense(dense.astype(dtype), block_size=b)
    values = A.values.copy()
    values[~places(A)] = np.nan
    return BlockELLMatrix(values, A.block_columns, A.shape, block_size=b)


def places(A):
    """Where ``values`` holds entries."""
    b = A.block_size
    rows = np.arange(A.values.shape[0])[:, None, None, None] * b + np.arange(b)[:, None]
    columns = A.block_columns[:, :, None, None] * b + np.arange(b)
    is_there = A.block_columns[:, :, None, None] >= 0
    return is_there & (rows < A.shape[0]) & (columns < A.shape[1])


def upload(machine, A):
    return A.to(machine.gpu.stream)


def cases(rng, machine):
    random = []
    if machine.is_real:
        sizes = [(*rng.integers(1, 300, 2), rng.integers(1, 100)) for _ in range(200)]
        random = [(*map(int, size), int(rng.choice([1, 5, 16, 32, 64]))) for size in sizes]
    return machine.shapes(SMALL, LARGE + random)


def test_products_match_dense_ones(rng, machine, precision, relative_error, rounded):
    dtype, tolerance = precision
    for rows, columns, width, b in cases(rng, machine):
        A = make(rng, rows, columns, dtype, b, density=rng.choice([0.02, 0.3]))
        dense, on_gpu = A.to_dense().astype(np.float64), upload(machine, A)
        x, x64 = rounded(rng.standard_normal((columns, width)), dtype)
        y, y64 = rounded(rng.standard_normal((rows, width)), dtype)
        z, z64 = rounded(rng.standard_normal((width, rows)), dtype)
        for actual, expected in (
            (cuda.block_ell_matmul(on_gpu, machine.upload(x)), dense @ x64),
            (cuda.block_ell_transposed_matmul(on_gpu, machine.upload(y)), dense.T @ y64),
            (cuda.block_ell_left_matmul(machine.upload(z), on_gpu), z64 @ dense),
        ):
            assert actual.dtype == dtype
            assert relative_error(actual, expected) <= tolerance, (rows, columns, width, b)


def test_products_match_the_reference(rng, machine, relative_error):
    A = make(rng, 7, 10, np.float64, 4)
    on_gpu = upload(machine, A)
    x, y = rng.standard_normal((10, 3)), rng.standard_normal((7, 3))
    for name, operand in (("block_ell_matmul", x), ("block_ell_transposed_matmul", y)):
        actual = getattr(cuda, name)(on_gpu, machine.upload(operand))
        assert relative_error(actual, getattr(reference, name)(A, operand)) < 1e-13
    actual = cuda.block_ell_left_matmul(machine.upload(y.T.copy()), on_gpu)
    assert relative_error(actual, reference.block_ell_left_matmul(y.T, A)) < 1e-13


@pytest.mark.parametrize("width", [264, 259])
def test_more_columns_than_a_warp_takes(rng, machine, width, relative_error):
    A = make(rng, 7, 6, np.float32, 5)
    dense, on_gpu = A.to_dense().astype(np.float64), upload(machine, A)
    x, y = (rng.standard_normal((size, width)).astype(np.float32) for size in (6, 7))
    product = cuda.block_ell_matmul(on_gpu, machine.upload(x))
    assert relative_error(product, dense @ x) < 1e-6
    product = cuda.block_ell_transposed_matmul(on_gpu, machine.upload(y))
    assert relative_error(product, dense.T @ y) < 1e-6


def test_vectors(rng, machine, relative_error):
    A = make(rng, 7, 5, np.float32, 3)
    on_gpu = upload(machine, A)
    x, y = rng.standard_normal(5).astype(np.float32), rng.standard_normal(7).astype(np.float32)
    dense = A.to_dense().astype(np.float64)
    assert relative_error(cuda.block_ell_matmul(on_gpu, machine.upload(x)), dense @ x) < 1e-6
    transposed = cuda.block_ell_transposed_matmul(on_gpu, machine.upload(y))
    assert relative_error(transposed, dense.T @ y) < 1e-6
    left = cuda.block_ell_left_matmul(machine.upload(y), on_gpu)
    assert relative_error(left, y @ dense) < 1e-6


def test_sampled_product(rng, machine, precision, relative_error, rounded):
    dtype, tolerance = precision
    for rows, columns, width, b in cases(rng, machine):
        A = make(rng, rows, columns, dtype, b)
        (y, y64), (x, x64) = (
            rounded(rng.standard_normal((size, width)), dtype) for size in (rows, columns)
        )
        on_gpu = upload(machine, A)
        actual = cuda.block_ell_sampled_product(on_gpu, machine.upload(y), machine.upload(x))
        result = actual.to("cpu")
        result.validate()
        assert result.dtype == dtype
        is_entry = places(A)
        pattern = np.where(is_entry, 1, 0).astype(np.float64)
        mask = BlockELLMatrix(pattern, A.block_columns, A.shape, block_size=b).to_dense()
        expected = (y64 @ x64.T) * mask
        assert relative_error(result.to_dense(), expected) <= tolerance, (rows, columns, width, b)
        assert (result.values[~is_entry] == 0).all()


def test_sampled_product_overwrites_out(rng, machine):
    host = make(rng, 6, 5, np.float32, 4)
    A = upload(machine, host)
    Y, X = (machine.upload(rng.standard_normal((n, 3)).astype(np.float32)) for n in (6, 5))
    expected = cuda.block_ell_sampled_product(A, Y, X).values.to_numpy()
    assert cuda.block_ell_sampled_product(A, Y, X, A) is A
    is_entry = places(host)
    np.testing.assert_array_equal(A.values.to_numpy()[is_entry], expected[is_entry])
    with pytest.raises(ValueError, match="other block columns"):
        cuda.block_ell_sampled_product(A, Y, X, upload(machine, host))


@pytest.mark.parametrize("width", [3, 20])
def test_zeros_annihilate_nan(machine, width):
    A = BlockELLMatrix(
        np.array([[[[0, 2], [0, 0]]]], np.float32), np.array([[0]]), (2, 3), block_size=2
    )
    x = np.full((3, width), np.nan, np.float32)
    x[1] = 1
    product = cuda.block_ell_matmul(upload(machine, A), machine.upload(x))
    np.testing.assert_array_equal(product.to_numpy(), [[2] * width, [0] * width])
    y = np.array([[1] * width, [np.nan] * width], np.float32)
    product = cuda.block_ell_transposed_matmul(upload(machine, A), machine.upload(y))
    np.testing.assert_array_equal(product.to_numpy(), [[0] * width, [2] * width, [0] * width])
    product = cuda.block_ell_left_matmul(machine.upload(y.T.copy()), upload(machine, A))
    np.testing.assert_array_equal(product.to_numpy(), [[0, 2, 0]] * width)


def test_out_may_share_memory_with_the_operand(rng, machine):
    A = upload(machine, make(rng, 6, 6, np.float32, 4))
    X = machine.upload(rng.standard_normal((6, 4)).astype(np.float32))
    expected = cuda.block_ell_matmul(A, X).to_numpy()
    assert cuda.block_ell_matmul(A, X, X) is X
    np.testing.assert_array_equal(X.to_numpy(), expected)


def test_mixed_dtypes_give_float32(rng, machine, relative_error):
    A = make(rng, 6, 5, np.float32, 2)
    x = rng.standard_normal((5, 4)).astype(ml_dtypes.bfloat16)
    product = cuda.block_ell_matmul(upload(machine, A), machine.upload(x))
    assert product.dtype == np.float32
    assert relative_error(product, A.to_dense().astype(np.float64) @ x.astype(np.float64)) < 1e-6


def test_same_bits_on_every_run(rng, machine):
    rows = 3000 if machine.is_real else 8
    A = upload(machine, make(rng, rows, 300, np.float32, 16, 0.1))
    X = machine.upload(rng.standard_normal((rows, 40)).astype(np.float32))
    runs = [
        cuda.block_ell_transposed_matmul(A, X).to_numpy()
        for _ in range(50 if machine.is_real else 2)
    ]
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


def test_refuses_what_does_not_fit(rng, machine):
    A = upload(machine, make(rng, 6, 5, np.float32, 2))
    X = machine.upload(np.ones((5, 4), np.float32))
    with pytest.raises(ValueError, match=r"X of shape \(5, 4\) given, \(6,\) or \(6, N\) wanted"):
        cuda.block_ell_transposed_matmul(A, X)
    with pytest.raises(TypeError, match="X of type ndarray given, a DeviceArray wanted"):
        cuda.block_ell_matmul(A, np.ones((5, 4), np.float32))
    with pytest.raises(TypeError, match="out of dtype float64 given, float32 wanted"):
        cuda.block_ell_matmul(A, X, machine.upload(np.ones((6, 4))))
