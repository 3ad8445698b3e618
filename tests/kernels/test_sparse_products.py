"""The products of every sparse format: one suite, against float64 NumPy and the reference.

A format is added by a line in LAYOUTS and one in KERNELS.
"""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_numba.device import set_thread_count, thread_count
from twell_numba.formats import BlockELLMatrix, CSRMatrix, HybridELLMatrix, TwELLMatrix
from twell_numba.kernels import block_ell, csr, ell_product, packed_rows
from twell_numba.kernels.block_ell import reference as block_ell_reference
from twell_numba.kernels.csr import reference as csr_reference
from twell_numba.kernels.ell_product import reference as ell_reference

LAYOUTS = {
    "csr": (CSRMatrix, {}),
    "block-ELL 1": (BlockELLMatrix, {"block_size": 1}),
    "block-ELL 5": (BlockELLMatrix, {"block_size": 5}),
    "block-ELL 8": (BlockELLMatrix, {"block_size": 8}),
    "block-ELL 16": (BlockELLMatrix, {"block_size": 16}),
    "twell": (TwELLMatrix, {}),
    "twell tile 4, 1 slot": (TwELLMatrix, {"tile": 4, "slots": 1}),
    "hybrid ELL": (HybridELLMatrix, {}),
    "hybrid ELL width 2": (HybridELLMatrix, {"width": 2}),
}
KERNELS = {
    CSRMatrix: ("csr", csr, csr_reference),
    BlockELLMatrix: ("block_ell", block_ell, block_ell_reference),
    TwELLMatrix: ("twell", ell_product, ell_reference),
    HybridELLMatrix: ("hybrid_ell", ell_product, ell_reference),
}
LAYOUTS_OF = {cls: [given for of, given in LAYOUTS.values() if of is cls] for cls in KERNELS}
every_class = pytest.mark.parametrize("cls", KERNELS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
F16, BF16, F32, F64 = np.float16, ml_dtypes.bfloat16, np.float32, np.float64
TOLERANCE = {F16: 2e-3, BF16: 2e-2, F32: 1e-5, F64: 1e-12}

PRODUCTS = ("matmul", "transposed_matmul", "left_matmul")
every_product = pytest.mark.parametrize("product", PRODUCTS)


def sparse_dense(rows, columns, seed=0, density=0.3):
    """Return a dense array with many zeros, one full row and one empty row."""
    rng = np.random.default_rng(seed)
    dense = rng.standard_normal((rows, columns)) * (rng.random((rows, columns)) < density)
    if rows > 2:
        dense[1] = rng.standard_normal(columns)
        dense[2] = 0.0
    return dense


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape)


def operand(product, dense, width, seed=1):
    """Return a dense operand that fits: a vector for ``width`` None."""
    inner = dense.shape[1] if product == "matmul" else dense.shape[0]
    if width is None:
        return normal(inner, seed=seed)
    return (
        normal(width, inner, seed=seed)
        if product == "left_matmul"
        else normal(inner, width, seed=seed)
    )


def wanted_product(product, dense, X):
    dense, X = dense.astype(F64), X.astype(F64)
    if product == "left_matmul":
        return X @ dense
    return (dense if product == "matmul" else dense.T) @ X


def kernel(matrix, product, implementation):
    """Return the kernel function of a product as one of (operand, out)."""
    prefix, compiled, reference = KERNELS[type(matrix)]
    function = getattr(compiled if implementation == "cpu" else reference, f"{prefix}_{product}")
    if product == "left_matmul":
        return lambda X, out=None: function(X, matrix, out)
    return lambda X, out=None: function(matrix, X, out)


@pytest.fixture
def many_parts(monkeypatch):
    """Work is split over threads and blocks however little there is of it."""
    monkeypatch.setattr(packed_rows.cpu, "GRAIN", 1)
    monkeypatch.setattr(packed_rows.cpu, "BLOCK_ENTRIES", 0)
    monkeypatch.setattr(packed_rows.cpu, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(block_ell.cpu, "GRAIN", 1)


@pytest.fixture
def threads():
    """Set the number of threads for a test."""
    before = thread_count()
    yield set_thread_count
    set_thread_count(before)


@every_class
@every_product
@settings(derandomize=True, max_examples=300, database=None, deadline=None)
@given(
    data=st.data(),
    rows=st.sampled_from([0, 1, 2, 3, 7, 8, 9, 33, 65]),
    columns=st.sampled_from([0, 1, 3, 4, 5, 9, 16, 40]),
    width=st.sampled_from([None, 0, 1, 2, 7, 16, 17, 33, 100]),
    dtype=st.sampled_from([F32, F64]),
    seed=st.integers(0, 1000),
)
def test_products_match_numpy_and_the_reference(
    cls, product, data, rows, columns, width, dtype, seed
):
    keywords = data.draw(st.sampled_from(LAYOUTS_OF[cls]))
    dense = sparse_dense(rows, columns, seed).astype(dtype)
    X = operand(product, dense, width, seed).astype(dtype)
    matrix = cls.from_dense(dense, **keywords)
    matrix.validate()
    wanted = wanted_product(product, dense, X)
    tolerance = TOLERANCE[dtype]
    for result in (kernel(matrix, product, "cpu")(X), kernel(matrix, product, "reference")(X)):
        assert result.dtype == dtype
        assert result.shape == wanted.shape
        np.testing.assert_allclose(result, wanted, rtol=tolerance, atol=tolerance)


@every_class
@settings(derandomize=True, max_examples=300, database=None, deadline=None)
@given(
    data=st.data(),
    rows=st.sampled_from([0, 1, 3, 4, 7, 33]),
    columns=st.sampled_from([0, 1, 3, 5, 16, 40]),
    depth=st.sampled_from([0, 1, 2, 15, 16, 17, 64, 100]),
    dtype=st.sampled_from([F32, F64]),
    seed=st.integers(0, 1000),
)
def test_sampled_product(cls, data, rows, columns, depth, dtype, seed):
    keywords = data.draw(st.sampled_from(LAYOUTS_OF[cls]))
    matrix = cls.from_dense(sparse_dense(rows, columns, seed).astype(dtype), **keywords)
    Y, X = normal(rows, depth, seed=seed).astype(dtype), normal(columns, depth).astype(dtype)
    exact = Y.astype(F64) @ X.astype(F64).T
    for module in KERNELS[cls][1:]:
        sampled = getattr(module, f"{KERNELS[cls][0]}_sampled_product")(matrix, Y, X)
        sampled.validate()
        assert type(sampled) is cls
        assert sampled.dtype == dtype
        entry_rows, entry_columns, values = sampled.coordinates()
        tolerance = TOLERANCE[dtype]
        np.testing.assert_allclose(
            values, exact[entry_rows, entry_columns], rtol=tolerance, atol=tolerance
        )
        pattern = matrix.coordinates()
        if depth:  # zeros of a tail are no entries
            np.testing.assert_array_equal(entry_rows, pattern[0])
            np.testing.assert_array_equal(entry_columns, pattern[1])


@every_layout
def test_operators_and_methods(layout):
    cls, keywords = layout
    dense = sparse_dense(9, 14)
    matrix, X, Y = cls.from_dense(dense, **keywords), normal(14, 3), normal(9, 3)
    np.testing.assert_allclose(matrix @ X, dense @ X, atol=1e-13)
    np.testing.assert_allclose(matrix.matmul(X), dense @ X, atol=1e-13)
    np.testing.assert_allclose(matrix.T @ Y, dense.T @ Y, atol=1e-13)
    np.testing.assert_allclose(matrix.transposed_matmul(Y), dense.T @ Y, atol=1e-13)
    np.testing.assert_allclose(Y.T @ matrix, Y.T @ dense, atol=1e-13)
    np.testing.assert_allclose(matrix.left_matmul(Y.T), Y.T @ dense, atol=1e-13)
    np.testing.assert_allclose(Y[:, 0] @ matrix, Y[:, 0] @ dense, atol=1e-13)
    sampled = matrix.sampled_product(Y, X).to_dense()
    inside = sampled != 0
    assert inside[dense != 0].all()
    np.testing.assert_allclose(sampled[inside], (Y @ X.T)[inside], atol=1e-13)


@every_layout
@every_product
@pytest.mark.parametrize(
    ("first", "second", "result"),
    [
        (F16, F16, F16),
        (BF16, BF16, BF16),
        (F16, BF16, F32),
        (BF16, F32, F32),
        (F16, F64, F64),
        (F32, F64, F64),
        (F64, BF16, F64),
    ],
)
def test_result_dtypes(layout, product, first, second, result):
    cls, keywords = layout
    dense = sparse_dense(16, 40).astype(first)
    X = operand(product, dense, 5).astype(second)
    matrix = cls.from_dense(dense, **keywords)
    got = kernel(matrix, product, "cpu")(X)
    assert got.dtype == result
    assert kernel(matrix, product, "reference")(X).dtype == result
    wide = np.asarray(wanted_product(product, dense, X), F64)
    np.testing.assert_allclose(
        got.astype(F64), wide, rtol=TOLERANCE[result], atol=TOLERANCE[result]
    )
    out = np.empty_like(got)
    assert kernel(matrix, product, "cpu")(X, out) is out
    np.testing.assert_array_equal(out, got)


@every_layout
def test_half_precision_is_summed_in_single(layout):
    cls, keywords = layout
    dense = np.ones((9, 9), F16)
    dense[0] = 2048
    matrix = cls.from_dense(dense, **keywords)
    ones = np.ones(9, F16)
    assert matrix.transposed_matmul(ones)[0] == 2056
    assert (ones @ matrix)[0] == 2056


@every_layout
@every_product
@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("width", [None, 3, 40])
def test_zeros_annihilate(layout, product, implementation, poison, width):
    cls, keywords = layout
    dense = np.zeros((20, 20))
    dense[0, 1], dense[3, 0] = 2.0, 4.0
    dense[1, np.arange(20) != 5] = 1.0  # long: in the tail of the narrow layouts
    dense[np.arange(20) != 5, 1] = 1.0
    dense[2, 5] = dense[5, 2] = 3.0
    matrix = cls.from_dense(dense, **keywords)
    X = np.ones_like(operand(product, dense, width))
    (X.T if product == "left_matmul" else X)[5] = poison
    result = kernel(matrix, product, implementation)(X)
    clean = np.where(np.isfinite(X), X, 0.0)
    wanted = wanted_product(product, dense, clean)
    (wanted.T if product == "left_matmul" else wanted)[2] += 3.0 * poison
    np.testing.assert_array_equal(result, wanted)


@every_layout
@every_product
def test_nan_and_infinite_entries_take_part(layout, product):
    cls, keywords = layout
    dense = np.zeros((9, 9))
    dense[2, 2], dense[1, :], dense[:, 3], dense[4, 4] = np.nan, 1.0, 1.0, -np.inf
    X = np.ones_like(operand(product, dense, 20))
    X[4] = 0.0
    X[:, 4] = 0.0
    with np.errstate(invalid="ignore"):
        wanted = wanted_product(product, dense, X)
    result = kernel(cls.from_dense(dense, **keywords), product, "cpu")(X)
    np.testing.assert_array_equal(result, wanted)


@every_layout
@every_product
@pytest.mark.parametrize("dtype", [F16, F32])
def test_padding_is_never_read(layout, product, dtype):
    cls, keywords = layout
    dense = sparse_dense(13, 18).astype(dtype)
    matrix = cls.from_dense(dense, **keywords)
    X = operand(product, dense, 20).astype(F32)
    wanted = kernel(matrix, product, "cpu")(X)
    for name, padding in matrix._padding().items():
        array = getattr(matrix, name)
        if array.dtype == F16:
            array.view(np.uint16)[padding] = 0x7C01  # a signalling NaN: converting it may warn
        else:
            array[padding] = np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).max
    np.testing.assert_array_equal(kernel(matrix, product, "cpu")(X), wanted)


@every_layout
def test_padding_is_never_read_by_the_sampled_product(layout):
    cls, keywords = layout
    matrix = cls.from_dense(sparse_dense(13, 18), **keywords)
    Y, X = normal(13, 6), normal(18, 6)
    wanted = matrix.sampled_product(Y, X).to_dense()
    for name, padding in matrix._padding().items():
        array = getattr(matrix, name)
        array[padding] = np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).max
    np.testing.assert_array_equal(matrix.sampled_product(Y, X).to_dense(), wanted)


@every_layout
@every_product
@pytest.mark.parametrize("width", [None, 5, 20])
def test_any_memory_arrangement_of_the_operand(layout, product, width):
    cls, keywords = layout
    dense = sparse_dense(15, 30)
    matrix, X = cls.from_dense(dense, **keywords), operand(product, dense, width)
    wanted = kernel(matrix, product, "cpu")(X)
    read_only = X.copy()
    read_only.flags.writeable = False
    unaligned = np.zeros(X.nbytes + 1, np.uint8)[1:].view(F64).reshape(X.shape)
    unaligned[...] = X
    backwards = (slice(None, None, -1),) * X.ndim
    for arranged in (
        np.asfortranarray(X),
        X[backwards].copy()[backwards],
        np.repeat(X, 2, axis=-1)[..., ::2],
        X.astype(">f8"),
        read_only,
        unaligned,
    ):
        before = arranged.copy()
        result = kernel(matrix, product, "cpu")(arranged)
        assert result.dtype == F64
        np.testing.assert_array_equal(result, wanted)
        np.testing.assert_array_equal(arranged, before)


@every_layout
@every_product
@pytest.mark.parametrize("width", [None, 4, 20])
@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_out_is_overwritten_through_any_strides(layout, product, width, implementation):
    cls, keywords = layout
    dense = sparse_dense(15, 30)
    matrix, X = cls.from_dense(dense, **keywords), operand(product, dense, width)
    multiply = kernel(matrix, product, implementation)
    wanted = multiply(X)
    poison = np.full(wanted.shape, np.nan)
    wide = np.full((*wanted.shape[:-1], 2 * wanted.shape[-1]), np.nan)
    backwards = (slice(None, None, -1),) * wanted.ndim
    unaligned = np.zeros(wanted.nbytes + 1, np.uint8)[1:].view(F64).reshape(wanted.shape)
    for out in (
        poison,
        np.asfortranarray(poison),
        wide[..., ::2],
        poison.copy()[backwards],
        unaligned,
    ):
        assert multiply(X, out) is out
        np.testing.assert_array_equal(out, wanted)
    assert np.isnan(wide[..., 1::2]).all()


@every_layout
@every_product
@pytest.mark.parametrize("width", [None, 20])
def test_out_may_be_the_operand(layout, product, width):
    cls, keywords = layout
    dense = sparse_dense(20, 20)
    matrix, X = cls.from_dense(dense, **keywords), operand(product, dense, width)
    wanted = kernel(matrix, product, "cpu")(X)
    kernel(matrix, product, "cpu")(X, X)
    np.testing.assert_array_equal(X, wanted)


@every_layout
@every_product
def test_wrong_out_is_refused(layout, product):
    cls, keywords = layout
    dense = sparse_dense(6, 6)
    matrix, X = cls.from_dense(dense, **keywords), operand(product, dense, 6)
    multiply = kernel(matrix, product, "cpu")
    read_only = np.empty((6, 6))
    read_only.flags.writeable = False
    for out in (np.empty((6, 6), F32), np.empty((6, 6), ">f8"), [[0.0] * 6] * 6):
        with pytest.raises(TypeError, match=r"out of .* given, .* wanted"):
            multiply(X, out)
    with pytest.raises(ValueError, match=r"out of shape \(6, 5\) given, \(6, 6\) wanted"):
        multiply(X, np.empty((6, 5)))
    with pytest.raises(ValueError, match="out is read-only, a writable array wanted"):
        multiply(X, read_only)


@every_layout
def test_sampled_product_overwrites_out(layout):
    cls, keywords = layout
    matrix = cls.from_dense(sparse_dense(13, 18), **keywords)
    Y, X = normal(13, 6), normal(18, 6)
    wanted = matrix.sampled_product(Y, X)
    out = matrix.copy()
    assert matrix.sampled_product(Y, X, out=out) is out
    assert out == wanted
    with pytest.raises(TypeError, match=r"out of dtype float64 given, float32 wanted"):
        matrix.sampled_product(Y.astype(F32), X.astype(F32), out=out)
    with pytest.raises(TypeError, match=r"out of type ndarray given"):
        matrix.sampled_product(Y, X, out=out.to_dense())
    other = cls.from_dense(np.eye(13, 18) * (np.arange(13) == 0)[:, np.newaxis], **keywords)
    with pytest.raises(ValueError, match=r"out: .* differ from A's given"):
        other.sampled_product(Y, X, out=out)


@every_layout
@every_product
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("width", [None, 3, 90, 300])
def test_same_bits_every_run_and_for_every_number_of_threads(
    layout, product, dtype, width, many_parts, threads
):
    cls, keywords = layout
    dense = sparse_dense(90, 70).astype(dtype)
    matrix, X = cls.from_dense(dense, **keywords), operand(product, dense, width).astype(dtype)
    results = []
    for count in (1, 2, 3, 3):
        threads(count)
        results.append(kernel(matrix, product, "cpu")(X))
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    wanted = wanted_product(product, dense, X)
    np.testing.assert_allclose(
        results[0], wanted, rtol=TOLERANCE[dtype], atol=20 * TOLERANCE[dtype]
    )


@every_layout
def test_sampled_product_has_the_same_bits_for_every_number_of_threads(layout, many_parts, threads):
    cls, keywords = layout
    matrix = cls.from_dense(sparse_dense(90, 70).astype(F32), **keywords)
    Y, X = normal(90, 100).astype(F32), normal(70, 100).astype(F32)
    results = []
    for count in (1, 2, 3, 3):
        threads(count)
        results.append(matrix.sampled_product(Y, X).to_dense())
    for result in results:
        np.testing.assert_array_equal(result, results[0])


@every_layout
@pytest.mark.parametrize("shape", [(), (4,), (6,), (4, 6), (6, 6, 6), (0,)])
def test_operands_that_do_not_fit_are_refused(layout, shape):
    cls, keywords = layout
    matrix = cls.from_dense(np.eye(5), **keywords)
    for product in PRODUCTS:
        with pytest.raises(ValueError, match=r"X of shape .* given, \(5,\) or \(.*\) wanted"):
            kernel(matrix, product, "cpu")(np.ones(shape))
    with pytest.raises(ValueError, match=r"Y of shape .* and X of shape .* given"):
        matrix.sampled_product(np.ones(shape), np.ones((5, 2)))


@every_layout
def test_sparse_and_integer_operands_are_refused(layout):
    cls, keywords = layout
    matrix = cls.from_dense(np.eye(5), **keywords)
    for product in PRODUCTS:
        multiply = kernel(matrix, product, "cpu")
        with pytest.raises(TypeError, match="dense wanted; use to_dense"):
            multiply(matrix)
        with pytest.raises(TypeError, match="one of float64, float32, float16, bfloat16 wanted"):
            multiply(np.eye(5, dtype=np.int64))
