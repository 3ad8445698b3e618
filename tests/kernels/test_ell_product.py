"""``A @ X`` for TwELL and hybrid ELL against the reference and dense NumPy."""

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_numba.formats import HybridELLMatrix, SparseMatrix, TwELLMatrix
from twell_numba.kernels.ell_product import cpu, reference

LAYOUTS = {
    "twell": (TwELLMatrix, {}),
    "twell tile 4, 1 slot": (TwELLMatrix, {"tile": 4, "slots": 1}),
    "twell tile 5, 5 slots": (TwELLMatrix, {"tile": 5, "slots": 5}),
    "hybrid ELL": (HybridELLMatrix, {}),
    "hybrid ELL width 2": (HybridELLMatrix, {"width": 2}),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
every_class = pytest.mark.parametrize("cls", [TwELLMatrix, HybridELLMatrix])

MATMUL = {
    (TwELLMatrix, "cpu"): cpu.twell_matmul,
    (TwELLMatrix, "reference"): reference.twell_matmul,
    (HybridELLMatrix, "cpu"): cpu.hybrid_ell_matmul,
    (HybridELLMatrix, "reference"): reference.hybrid_ell_matmul,
}
every_matmul = pytest.mark.parametrize(
    ("cls", "matmul"), [(cls, function) for (cls, _), function in MATMUL.items()]
)

F16, BF16, F32, F64 = np.float16, ml_dtypes.bfloat16, np.float32, np.float64


def sparse_dense(rows: int, columns: int, seed: int = 0, density: float = 0.3) -> np.ndarray:
    rng = np.random.default_rng(seed)
    dense = rng.standard_normal((rows, columns)) * (rng.random((rows, columns)) < density)
    if rows > 2:
        dense[1] = rng.standard_normal(columns)
        dense[2] = 0.0
    return dense


def dense_operand(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@every_layout
@settings(derandomize=True, max_examples=25, database=None, deadline=None)
@given(
    rows=st.sampled_from([0, 1, 2, 3, 33, 100]),
    columns=st.sampled_from([0, 1, 3, 4, 5, 9, 16]),
    width=st.sampled_from([None, 0, 1, 2, 7]),
    dtype=st.sampled_from([F32, F64]),
    seed=st.integers(0, 1000),
)
def test_product_matches_reference_and_dense(layout, rows, columns, width, dtype, seed):
    cls, keywords = layout
    dense = sparse_dense(rows, columns, seed).astype(dtype)
    X = dense_operand(columns, *([] if width is None else [width]), seed=seed).astype(dtype)
    matrix = cls.from_dense(dense, **keywords)
    matrix.validate()
    product = matrix @ X
    tolerance = 1e-5 if dtype is F32 else 1e-13
    assert product.dtype == dtype
    assert product.shape == (dense @ X).shape
    np.testing.assert_allclose(product, dense @ X, rtol=tolerance, atol=tolerance)
    wanted = MATMUL[cls, "reference"](matrix, X)
    np.testing.assert_allclose(product, wanted, rtol=tolerance, atol=tolerance)


@every_layout
def test_product_with_the_transpose(layout):
    cls, keywords = layout
    dense = sparse_dense(9, 14)
    X = dense_operand(9, 3)
    np.testing.assert_allclose(cls.from_dense(dense, **keywords).T @ X, dense.T @ X, atol=1e-13)


@every_matmul
@pytest.mark.parametrize(
    ("first", "second", "result"),
    [
        (F16, F16, F16),
        (BF16, BF16, BF16),
        (F16, BF16, F32),
        (BF16, F32, F32),
        (F32, F16, F32),
        (F32, F64, F64),
        (F64, BF16, F64),
    ],
)
def test_result_dtypes(cls, matmul, first, second, result):
    dense, X = sparse_dense(6, 40).astype(first), dense_operand(40, 5).astype(second)
    product = matmul(cls.from_dense(dense), X)
    assert product.dtype == result
    wide = F64 if result is F64 else F32
    wanted = dense.astype(wide) @ X.astype(wide)
    tolerance = {F16: 2e-3, BF16: 2e-2, F32: 1e-5, F64: 1e-12}[result]
    np.testing.assert_allclose(product.astype(F64), wanted, rtol=tolerance, atol=tolerance)


@every_matmul
def test_half_precision_sums_are_not_rounded_on_the_way(cls, matmul):
    # Added up in float16, 2048 + 1 + 1 + ... stays 2048.
    dense = np.ones((1, 9), F16)
    dense[0, 0] = 2048
    assert matmul(cls.from_dense(dense), np.ones(9, F16)) == 2056


@every_matmul
def test_float16_overflow_on_the_way_does_no_harm_and_in_the_end_warns(cls, matmul):
    dense = np.array([[60000, 60000, -60000]], F16)
    matrix = cls.from_dense(dense)
    assert matmul(matrix, np.ones(3, F16)) == 60000
    with pytest.warns(RuntimeWarning, match="overflow"):
        assert matmul(matrix, np.array([1, 1, 0], F16)) == np.inf


@every_layout
@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_zeros_annihilate(layout, name, poison):
    cls, keywords = layout
    dense = np.zeros((4, 9))
    dense[0, 1] = 2.0
    dense[1, [0, 1, 2, 3, 4, 6, 7, 8]] = 1.0  # long: in the tail of the narrow layouts
    dense[2, 5] = 3.0
    X = np.ones((9, 2))
    X[5] = poison
    matrix = cls.from_dense(dense, **keywords)
    product = MATMUL[cls, name](matrix, X)
    np.testing.assert_array_equal(product, [[2, 2], [8, 8], [3 * poison] * 2, [0, 0]])
    assert not np.signbit(product[3]).any()


@every_matmul
def test_stored_zeros_annihilate_too(cls, matmul):
    matrix = cls.from_dense(np.array([[5.0, 1.0]]))
    matrix.values[matrix.values == 5.0] = 0.0
    assert matmul(matrix, np.array([np.nan, 2.0])) == 2.0


@every_layout
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_nan_and_infinite_entries_take_part(layout, name):
    cls, keywords = layout
    dense = np.zeros((4, 9))
    dense[0, 2] = np.nan
    dense[1, :] = [np.inf, 1, 1, 1, 1, 1, 1, 1, 1]
    dense[2, 3] = -np.inf
    dense[3, 4] = np.inf
    X = np.ones((9, 1))
    X[4] = 0.0
    product = MATMUL[cls, name](cls.from_dense(dense, **keywords), X)
    np.testing.assert_array_equal(product[:, 0], [np.nan, np.inf, -np.inf, np.nan])


@every_layout
@pytest.mark.parametrize("dtype", [F16, F32, F64])
def test_padding_is_never_read(layout, dtype):
    cls, keywords = layout
    dense, X = sparse_dense(7, 13).astype(dtype), dense_operand(13, 3).astype(dtype)
    matrix = cls.from_dense(dense, **keywords)
    wanted = matrix @ X
    padding = ~matrix.stored()
    matrix.values[padding] = np.nan
    matrix.columns[padding] = np.iinfo(matrix.columns.dtype).max
    np.testing.assert_array_equal(matrix @ X, wanted)


@every_class
def test_padding_is_not_converted_either(cls):
    matrix = cls.from_dense(sparse_dense(7, 13).astype(F32))
    # A signalling NaN: converting it would warn.
    matrix.values.view(np.uint32)[~matrix.stored()] = 0x7F800001
    X = dense_operand(13, 3)
    np.testing.assert_allclose(matrix @ X, matrix.to_dense().astype(F64) @ X, rtol=1e-12)


@every_class
@pytest.mark.parametrize("count", [31, 32, 33, 64, 256])
def test_no_entry_of_a_tile_is_lost(cls, count):
    dense = np.zeros((2, 512))
    dense[1, 200 : 200 + count] = np.arange(1, count + 1)
    X = dense_operand(512, 4)
    np.testing.assert_allclose(cls.from_dense(dense) @ X, dense @ X, rtol=1e-12)


@every_class
@pytest.mark.parametrize("columns", [65535, 65536, 65537])
def test_columns_beyond_16_bits(cls, columns):
    dense = np.zeros((2, columns), F32)
    dense[0, [0, columns - 1]] = [1, 2]
    dense[1, columns - 2] = 3
    X = np.arange(columns, dtype=F32)
    np.testing.assert_array_equal(cls.from_dense(dense) @ X, [2 * (columns - 1), 3 * (columns - 2)])


@every_class
def test_every_row_in_the_tail(cls):
    dense = dense_operand(300, 40)
    X = dense_operand(40, 3)
    layout = {"tile": 40, "slots": 2} if cls is TwELLMatrix else {"width": 2}
    matrix = cls.from_dense(dense, **layout)
    assert matrix.tail_rows.size == 300
    np.testing.assert_allclose(matrix @ X, dense @ X, rtol=1e-10, atol=1e-12)


@every_class
def test_any_memory_arrangement_of_the_dense_operand(cls):
    dense, X = sparse_dense(5, 30), dense_operand(30, 6)
    matrix = cls.from_dense(dense)
    wanted = matrix @ X
    read_only = X.copy()
    read_only.flags.writeable = False
    unaligned = np.zeros(X.nbytes + 1, np.uint8)[1:].view(F64).reshape(X.shape)
    unaligned[...] = X
    for arranged in (
        np.asfortranarray(X),
        X[::-1, ::-1].copy()[::-1, ::-1],
        np.repeat(X, 2, axis=1)[:, ::2],
        X.astype(">f8"),
        read_only,
        unaligned,
    ):
        before = arranged.copy()
        product = matrix @ arranged
        assert product.dtype == F64
        np.testing.assert_array_equal(product, wanted)
        np.testing.assert_array_equal(arranged, before)


@every_class
def test_same_bits_every_run(cls):
    matrix = cls.from_dense(sparse_dense(200, 100).astype(F32))
    X = dense_operand(100, 8).astype(F32)
    first = matrix @ X
    for _ in range(5):
        np.testing.assert_array_equal(matrix @ X, first)


@every_matmul
@pytest.mark.parametrize("shape", [(), (4,), (6,), (4, 5), (5, 5, 5), (0,)])
def test_shapes_that_do_not_fit_are_refused(cls, matmul, shape):
    matrix = cls.from_dense(np.eye(4, 5))
    with pytest.raises(ValueError, match=r"X of shape .* given, \(5,\) or \(5, N\) wanted"):
        matmul(matrix, np.ones(shape))


@every_matmul
def test_other_operands_are_refused(cls, matmul):
    matrix = cls.from_dense(np.eye(4))
    for X in (np.eye(4, dtype=np.int64), np.eye(4, dtype=np.complex64), [[1], [2], [3], [4]]):
        with pytest.raises(TypeError, match="one of float64, float32, float16, bfloat16 wanted"):
            matmul(matrix, X)
    with pytest.raises(TypeError, match=r"use to_dense\(\)"):
        matmul(matrix, matrix)
    with pytest.raises(TypeError, match="dtype object given"):
        matmul(matrix, scipy.sparse.eye_array(4))


@every_matmul
def test_matrices_of_another_format_are_refused(cls, matmul):
    other: type[SparseMatrix] = HybridELLMatrix if cls is TwELLMatrix else TwELLMatrix
    with pytest.raises(TypeError, match=f"A of type {other.__name__} given, {cls.__name__} wanted"):
        matmul(other.from_dense(np.eye(2)), np.eye(2))
