"""Every sparse format against dense NumPy: conversions, comparison, invariants."""

import copy
import pickle
import subprocess
import sys
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from twell_numba.errors import TwellError
from twell_numba.formats import (
    BlockELLMatrix,
    CSRMatrix,
    HybridELLMatrix,
    SparseMatrix,
    TwELLMatrix,
    base,
    index_width,
    load,
)
from twell_numba.formats.base import FORMATS

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]

# A format added later is a line here, with the layouts to test; every test below then runs on it.
LAYOUTS: dict[type[SparseMatrix], list[dict]] = {
    CSRMatrix: [{}],
    BlockELLMatrix: [
        {},
        {"block_size": 1},
        {"block_size": 3},
        {"block_size": 4, "blocks_per_row": 9},
    ],
    TwELLMatrix: [
        {},
        {"tile": 4, "slots": 1},
        {"tile": 3, "compression": 2},
        {"tile": 1},
    ],
    HybridELLMatrix: [{}, {"width": 2}],
}
every_layout = pytest.mark.parametrize(
    "layout",
    [
        pytest.param((cls, keywords), id=f"{cls.format_name}{keywords or ''}")
        for cls, layouts in LAYOUTS.items()
        for keywords in layouts
    ],
)
every_class = pytest.mark.parametrize("cls", LAYOUTS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
many_examples = settings(derandomize=True, max_examples=300, database=None, deadline=None)

special_values = st.sampled_from([0.0, 0.0, 0.0, -0.0, 1.0, -2.5, np.nan, np.inf, -np.inf])
# Which of a format's layouts a property is tested on; see `build`.
layout_numbers = st.integers(0, 11)


@st.composite
def dense_matrices(draw: st.DrawFn) -> np.ndarray:
    shape = draw(st.tuples(st.integers(0, 5), st.integers(0, 13)))
    dense = draw(arrays(np.float32, shape, elements=special_values))
    return dense.astype(draw(st.sampled_from(DTYPES)))


def some_layout(cls: type[SparseMatrix], number: int) -> dict:
    return LAYOUTS[cls][number % len(LAYOUTS[cls])]


def build(layout: tuple[type[SparseMatrix], dict], dense: np.ndarray) -> SparseMatrix:
    cls, keywords = layout
    return cls.from_dense(dense, **keywords)


def test_every_format_is_tested() -> None:
    assert set(LAYOUTS) == set(FORMATS.values())


def sparse_example(dtype: type = np.float32, shape: tuple[int, int] = (7, 13)) -> np.ndarray:
    rng = np.random.default_rng(7)
    dense = rng.standard_normal(shape) * (rng.random(shape) < 0.3)
    dense[2] = 1.0
    dense[4] = 0.0
    return dense.astype(dtype)


def assert_same_matrix(given: np.ndarray, wanted: np.ndarray) -> None:
    """Compare values, NaN equal to NaN, and dtypes; in float64, as NumPy knows no bfloat16."""
    assert given.dtype == wanted.dtype.newbyteorder("=")
    np.testing.assert_array_equal(given.astype(np.float64), wanted.astype(np.float64))


def poison_padding(matrix: SparseMatrix) -> None:
    """Fill what no operation may read with NaN and numbers far out of range."""
    for name, padding in matrix._padding().items():
        array = getattr(matrix, name)
        array[padding] = np.iinfo(array.dtype).max if array.dtype.kind in "iu" else np.nan


def values_of(matrix: SparseMatrix) -> np.ndarray:
    """Return the array that holds a matrix's values."""
    return getattr(matrix, matrix.array_names[0])


def nonzeros(dense: np.ndarray) -> int:
    return np.count_nonzero(dense.astype(np.float64))


# ---------------------------------------------------------------------- conversions


@every_class
@many_examples
@given(dense=dense_matrices(), number=layout_numbers)
def test_dense_round_trip_is_exact(cls, dense, number):
    matrix = cls.from_dense(dense, **some_layout(cls, number))
    matrix.validate()
    assert matrix.shape == dense.shape
    assert matrix.dtype == dense.dtype
    assert matrix.count_nonzero() == nonzeros(dense)
    assert matrix.density == (nonzeros(dense) / dense.size if dense.size else 0.0)
    if cls is not BlockELLMatrix:  # of which a block's zeros are entries too
        assert matrix.nnz == matrix.count_nonzero()
        np.testing.assert_array_equal(
            matrix.row_lengths(), np.count_nonzero(dense.astype(np.float64), axis=1)
        )
    assert matrix.row_lengths().sum() == matrix.nnz
    assert_same_matrix(matrix.to_dense(), dense)
    assert_same_matrix(np.asarray(matrix), dense)


@every_class
@many_examples
@given(dense=dense_matrices(), number=layout_numbers)
def test_transpose_agrees_with_dense(cls, dense, number):
    matrix = cls.from_dense(dense, **some_layout(cls, number))
    transpose = matrix.T
    assert type(transpose) is cls
    transpose.validate()
    assert_same_matrix(transpose.to_dense(), dense.T)
    assert transpose.nnz == matrix.nnz
    assert matrix == transpose.T


@every_class
@many_examples
@given(dense=dense_matrices(), number=layout_numbers)
def test_copies_and_pickles_are_the_same_matrix(cls, dense, number):
    matrix = cls.from_dense(dense, **some_layout(cls, number))
    for same in (
        matrix.copy(),
        copy.copy(matrix),
        copy.deepcopy(matrix),
        pickle.loads(pickle.dumps(matrix)),
    ):
        assert type(same) is cls
        same.validate()
        assert same == matrix
        for name in matrix.array_names:
            assert getattr(same, name).tobytes() == getattr(matrix, name).tobytes()


@every_class
@pytest.mark.parametrize("other", LAYOUTS)
@many_examples
@given(dense=dense_matrices(), number=layout_numbers, other_number=layout_numbers)
def test_any_format_becomes_any_other(cls, other, dense, number, other_number):
    matrix = cls.from_dense(dense, **some_layout(cls, number))
    poison_padding(matrix)
    keywords = some_layout(other, other_number)
    converted = other.from_sparse(matrix, **keywords)
    converted.validate()
    assert type(converted) is other
    wanted = other.from_dense(dense, **keywords)
    assert converted.shape == wanted.shape
    assert converted.nnz == wanted.nnz
    for name in converted.array_names:
        given_array, wanted_array = getattr(converted, name), getattr(wanted, name)
        assert given_array.dtype == wanted_array.dtype
        assert given_array.shape == wanted_array.shape
        assert given_array.tobytes() == wanted_array.tobytes()
        assert not np.shares_memory(given_array, getattr(matrix, name, np.zeros(1)))


@every_class
@many_examples
@given(
    dense=dense_matrices(),
    number=layout_numbers,
    scipy_format=st.sampled_from(["csr", "csc", "coo", "bsr"]),
    is_array=st.booleans(),
)
def test_scipy_round_trip_is_exact(cls, dense, number, scipy_format, is_array):
    keywords = some_layout(cls, number)
    matrix = cls.from_dense(dense, **keywords)
    through_scipy = matrix.to_scipy(scipy_format)
    assert through_scipy.format == scipy_format
    if scipy_format != "bsr":
        assert through_scipy.nnz == nonzeros(dense)
    np.testing.assert_array_equal(through_scipy.toarray(), dense.astype(np.float64))
    if not is_array:
        through_scipy = getattr(scipy.sparse, f"{scipy_format}_matrix")(through_scipy)
    back = cls.from_scipy(through_scipy, **keywords)
    back.validate()
    assert back == matrix


@every_class
@many_examples
@given(dense=dense_matrices(), number=layout_numbers, dtype=st.sampled_from(DTYPES))
def test_astype_is_exact_where_the_dtype_allows(cls, dense, number, dtype):
    # The values drawn are exact in all dtypes.
    matrix = cls.from_dense(dense, **some_layout(cls, number))
    poison_padding(matrix)
    converted = matrix.astype(dtype)
    converted.validate()
    assert_same_matrix(converted.to_dense(), dense.astype(dtype))
    assert converted == matrix


@every_class
@many_examples
@given(dense=dense_matrices(), number=layout_numbers, place=st.integers(0, 64))
def test_equality_is_that_of_the_dense_matrices(cls, dense, number, place):
    matrix = cls.from_dense(dense, **some_layout(cls, number))
    for other, layouts in LAYOUTS.items():
        assert matrix == other.from_dense(dense, **layouts[number % len(layouts)])
    changed = dense.copy()
    if changed.size:
        changed.flat[place % changed.size] = 7
        assert matrix != cls.from_dense(changed, **some_layout(cls, number))


@every_class
@many_examples
@given(dense=dense_matrices(), number=layout_numbers)
def test_files_hold_the_same_arrays(cls, dense, number, tmp_path_factory):
    matrix = cls.from_dense(dense, **some_layout(cls, number))
    path = tmp_path_factory.getbasetemp() / f"{cls.format_name}.safetensors"
    with mock.patch("os.fsync"):  # which would take longer than all the rest
        matrix.save(path)
    same = load(path)
    assert type(same) is cls
    assert same.shape == matrix.shape
    for name in matrix.array_names:
        assert getattr(same, name).dtype == getattr(matrix, name).dtype
        assert getattr(same, name).shape == getattr(matrix, name).shape
        assert getattr(same, name).tobytes() == getattr(matrix, name).tobytes()


@every_layout
@every_dtype
def test_astype_rounds_as_numpy_does(layout, dtype):
    dense = sparse_example(np.float64)
    converted = build(layout, dense).astype(dtype)
    converted.validate()
    assert_same_matrix(converted.to_dense(), dense.astype(dtype))


@every_class
def test_astype_does_not_store_what_rounds_to_zero(cls):
    matrix = cls.from_dense(np.array([[1e-30, 1.0]])).astype(np.float16)
    assert matrix.count_nonzero() == 1


@every_class
def test_astype_overflow_is_not_silent(cls):
    matrix = cls.from_dense(np.array([[1e6]]))
    with pytest.warns(RuntimeWarning, match="overflow"):
        converted = matrix.astype(np.float16)
    assert converted.to_dense()[0, 0] == np.inf


@every_class
@pytest.mark.parametrize("width", [65535, 65536, 65537])
def test_columns_beyond_16_bits(cls, width):
    dense = np.zeros((2, width), np.float32)
    dense[0, [0, width - 2, width - 1]] = [1, 2, 3]
    matrix = cls.from_dense(dense)
    matrix.validate()
    assert_same_matrix(matrix.to_dense(), dense)


@every_class
def test_columns_beyond_32_bits(cls):
    width = 2**32 + 2
    layout = {"tile": 65536, "slots": 1} if cls is TwELLMatrix else {}
    matrix = cls.from_coordinates([0, 0], [1, width - 1], [1.0, 2.0], (1, width), **layout)
    matrix.validate()
    rows, columns, values = CSRMatrix.from_sparse(matrix).coordinates()
    assert rows.tolist() == [0, 0]
    assert columns.tolist() == [1, width - 1]
    assert values.tolist() == [1.0, 2.0]


@every_class
@pytest.mark.parametrize(("rows", "columns"), [(3, 50), (2, 200), (1, 127), (1, 128)])
def test_index_widths_follow_from_totals(cls, rows, columns, monkeypatch):
    """With 8-bit indices in place of 32-bit ones, 128 entries or columns need the wide ones."""
    monkeypatch.setattr(index_width, "NARROW", np.dtype(np.int8))
    dense = np.arange(1, rows * columns + 1, dtype=np.float32).reshape(rows, columns)
    layouts = [{"width": columns}] if cls is HybridELLMatrix else LAYOUTS[cls][:3]
    for keywords in layouts:
        built = cls.from_dense(dense, **keywords)
        entries = np.nonzero(dense)
        for matrix in (
            built,
            cls.from_coordinates(*entries, dense[entries], dense.shape, **keywords),
            built.T.T,
            cls.from_sparse(HybridELLMatrix.from_dense(dense), **keywords),
        ):
            matrix.validate()
            assert matrix.nnz == rows * columns
            assert_same_matrix(matrix.to_dense(), dense)
            assert_same_matrix(matrix.T.to_dense(), dense.T)
            for name in {"indices", "indptr", "block_columns"} & set(matrix.array_names):
                largest = {
                    "indices": columns,
                    "indptr": rows * columns,
                    "block_columns": -(-columns // keywords.get("block_size", 16)),
                }[name]
                wanted = np.int8 if largest <= 127 else np.int64
                assert getattr(matrix, name).dtype == wanted


@every_layout
def test_tail_takes_every_row(layout):
    dense = np.arange(1, 3000 * 13 + 1, dtype=np.float64).reshape(3000, 13)
    assert_same_matrix(build(layout, dense).to_dense(), dense)


@every_dtype
@every_class
def test_negative_zero_is_not_stored_and_nan_is(cls, dtype):
    dense = np.array([[-0.0, 0.0, np.nan, -1.0]], dtype)
    matrix = cls.from_dense(dense)
    assert matrix.count_nonzero() == 2
    assert CSRMatrix.from_sparse(matrix).indices.tolist() == [2, 3]
    assert not np.signbit(matrix.to_dense().astype(np.float64)[0, 0])


def arrangements(dense: np.ndarray) -> dict[str, np.ndarray]:
    read_only = dense.copy()
    read_only.flags.writeable = False
    unaligned = np.zeros(dense.nbytes + 1, np.uint8)[1:].view(dense.dtype).reshape(dense.shape)
    unaligned[...] = dense
    return {
        "C": dense.copy(),
        "Fortran": np.asfortranarray(dense),
        "negative strides": dense[::-1, ::-1].copy()[::-1, ::-1],
        "every second": np.repeat(np.repeat(dense, 2, axis=0), 2, axis=1)[::2, ::2],
        "read-only": read_only,
        "unaligned": unaligned,
        "big-endian": dense.astype(dense.dtype.newbyteorder(">")),
    }


@every_layout
@pytest.mark.parametrize("arrangement", arrangements(np.ones((1, 1))))
def test_any_memory_arrangement(layout, arrangement):
    dense = arrangements(sparse_example(np.float64))[arrangement]
    before = dense.copy()
    assert_same_matrix(build(layout, dense).to_dense(), dense)
    np.testing.assert_array_equal(dense, before)


@every_class
def test_memory_mapped_arrays(cls, tmp_path):
    dense = sparse_example()
    np.save(tmp_path / "dense.npy", dense)
    matrix = cls.from_dense(np.load(tmp_path / "dense.npy", mmap_mode="r"))
    assert_same_matrix(matrix.to_dense(), dense)
    mapped = {}
    for name in matrix.array_names:
        if getattr(matrix, name).size:  # an empty file cannot be mapped
            np.save(tmp_path / name, getattr(matrix, name))
            mapped[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
        else:
            mapped[name] = getattr(matrix, name)
    parameters = {name: getattr(matrix, name) for name in matrix.parameter_names}
    same = cls(**mapped, shape=matrix.shape, **parameters)
    assert same == matrix
    assert_same_matrix(same.T.to_dense(), dense.T)
    np.testing.assert_allclose(same @ np.ones(13), dense.sum(axis=1), rtol=1e-5)


@every_layout
def test_constructor_accepts_big_endian_and_read_only_arrays(layout):
    matrix = build(layout, sparse_example())
    swapped = {}
    for name in matrix.array_names:
        array = getattr(matrix, name)
        swapped[name] = array.astype(array.dtype.newbyteorder(">"))
        swapped[name].flags.writeable = False
    parameters = {name: getattr(matrix, name) for name in matrix.parameter_names}
    same = type(matrix)(**swapped, shape=matrix.shape, **parameters)
    assert same.dtype.isnative
    assert same == matrix


@every_layout
def test_constructor_copies_nothing(layout):
    matrix = build(layout, sparse_example())
    given = {name: getattr(matrix, name) for name in matrix.array_names}
    parameters = {name: getattr(matrix, name) for name in matrix.parameter_names}
    same = type(matrix)(**given, shape=matrix.shape, **parameters)
    for name, array in given.items():
        assert getattr(same, name) is array


@every_layout
def test_copy_shares_nothing(layout):
    matrix = build(layout, sparse_example())
    duplicate = matrix.copy()
    for name in matrix.array_names:
        assert not np.shares_memory(getattr(matrix, name), getattr(duplicate, name))


# ---------------------------------------------------------------------- coordinates, SciPy


@every_class
@many_examples
@given(
    entries=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 9), st.sampled_from([-1.0, 0.0, 1.0, 2.0]))
    ),
    number=layout_numbers,
    dtype=st.sampled_from(DTYPES),
)
def test_entries_at_one_place_add_up(cls, entries, number, dtype):
    rows, columns = np.array([entry[:2] for entry in entries], np.int64).reshape(-1, 2).T
    values = np.array([entry[2] for entry in entries], np.float64)
    wanted = np.zeros((4, 10))
    np.add.at(wanted, (rows, columns), values)
    keywords = some_layout(cls, number)
    matrix = cls.from_coordinates(rows, columns, values.astype(dtype), (4, 10), **keywords)
    matrix.validate()
    assert matrix.count_nonzero() == np.count_nonzero(wanted)
    assert_same_matrix(matrix.to_dense(), wanted.astype(dtype))


@every_class
def test_duplicates_are_summed_wide(cls):
    # In float16, 2048 + 1 is 2048: one after the other they would add up to 2048.
    values = np.array([2048] + [1] * 8, np.float16)
    matrix = cls.from_coordinates([0] * 9, [1] * 9, values, (1, 2))
    assert matrix.to_dense()[0, 1] == 2056


@every_class
def test_a_sum_too_large_for_the_dtype_is_refused(cls):
    values = np.array([60000, 60000], np.float16)
    with pytest.raises(
        ValueError, match=r"row 2, column 1 add up to 120000, too large for float16"
    ):
        cls.from_coordinates([2, 2], [1, 1], values, (3, 2))


@every_class
def test_a_sum_too_large_for_float64_is_refused(cls):
    with pytest.raises(ValueError, match="add up to inf, too large for float64"):
        cls.from_coordinates([0, 0], [0, 0], [1e308, 1e308], (1, 1))


@every_class
def test_infinities_add_up_as_in_numpy(cls):
    values = np.array([np.inf, -np.inf, np.inf, 1, np.nan, 1])
    matrix = cls.from_coordinates([0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 2, 2], values, (1, 3))
    assert_same_matrix(matrix.to_dense(), np.array([[np.nan, np.inf, np.nan]]))


@every_class
@pytest.mark.parametrize("scipy_format", ["csr", "csc", "coo", "bsr", "lil", "dok", "dia"])
def test_every_scipy_format(cls, scipy_format):
    dense = sparse_example(np.float64)
    given = scipy.sparse.csr_array(dense).asformat(scipy_format)
    assert_same_matrix(cls.from_scipy(given).to_dense(), dense)


@every_class
def test_scipy_duplicates_stored_zeros_and_disorder(cls):
    # Row 0: columns 2, 0, 2 (unsorted, one twice); row 1: a stored zero.
    given = scipy.sparse.csr_array(
        (np.array([1.0, 2.0, 3.0, 0.0]), np.array([2, 0, 2, 1]), np.array([0, 3, 4])), shape=(2, 3)
    )
    before = given.copy()
    matrix = cls.from_scipy(given)
    assert matrix.count_nonzero() == 2
    assert_same_matrix(matrix.to_dense(), np.array([[2.0, 0, 4], [0, 0, 0]]))
    for name in ("data", "indices", "indptr"):
        np.testing.assert_array_equal(getattr(given, name), getattr(before, name))


@every_class
def test_scipy_entries_beyond_the_last_pointer_are_not_entries(cls):
    given = scipy.sparse.csr_array(np.array([[0.0, 1.0], [2.0, 0.0]]))
    given.data = np.append(given.data, [99.0, 99.0])
    given.indices = np.append(given.indices, [7, 8]).astype(np.int32)
    assert_same_matrix(cls.from_scipy(given).to_dense(), np.array([[0.0, 1.0], [2.0, 0.0]]))
    assert given.data.size == 4


@every_class
def test_scipy_column_out_of_range_is_refused(cls):
    given = scipy.sparse.csr_array(np.eye(2))
    given.indices[1] = 5
    with pytest.raises(ValueError, match="indices"):
        cls.from_scipy(given)


@every_class
@pytest.mark.parametrize(
    ("rows", "columns", "values", "message"),
    [
        ([0], [3], [1.0], r"columns: index 3 given, 0 to 2 wanted"),
        ([-1], [0], [1.0], r"rows: index -1 given, 0 to 1 wanted"),
        (np.array([2**63 + 1], np.uint64), [0], [1.0], r"rows: index 9223372036854775809 given"),
        ([0, 1], [0], [1.0], r"shapes \(2,\), \(1,\) and \(1,\) given"),
        ([[0]], [0], [1.0], r"rows: 2 dimensions given, 1 wanted"),
    ],
)
def test_wrong_coordinates_are_refused(cls, rows, columns, values, message):
    with pytest.raises(ValueError, match=message):
        cls.from_coordinates(rows, columns, values, (2, 3))


# ---------------------------------------------------------------------- refusals


@every_class
@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_, np.complex128, np.longdouble, "O"])
def test_other_dtypes_are_refused_with_the_accepted_ones(cls, dtype):
    dense = np.zeros((2, 2), dtype)
    match = "one of float64, float32, float16, bfloat16 wanted"
    with pytest.raises(TypeError, match=match):
        cls.from_dense(dense)
    with pytest.raises(TypeError, match=match):
        cls.from_dense(np.zeros((2, 2))).astype(dtype)
    with pytest.raises(TypeError, match=match):
        cls.from_coordinates([0], [0], np.zeros(1, dtype), (1, 1))


@every_class
def test_wrong_kinds_of_input_are_refused(cls):
    with pytest.raises(TypeError, match="use from_scipy"):
        cls.from_dense(scipy.sparse.eye_array(2))
    with pytest.raises(TypeError, match="a SciPy sparse matrix wanted"):
        cls.from_scipy(np.eye(2))
    with pytest.raises(TypeError, match="dtype int64 given"):
        cls.from_scipy(scipy.sparse.csr_array(np.eye(2, dtype=np.int64)))
    with pytest.raises(TypeError, match="use filled"):
        cls.from_dense(np.ma.masked_array(np.eye(2), mask=np.eye(2)))
    with pytest.raises(ValueError, match="3 dimensions given, 2 wanted"):
        cls.from_dense(np.zeros((2, 2, 2)))
    with pytest.raises(TypeError, match="use from_sparse"):
        cls.from_dense(cls.from_dense(np.eye(2)))
    with pytest.raises(TypeError, match="ndarray given, a matrix of twell_numba.formats wanted"):
        cls.from_sparse(np.eye(2))
    with pytest.raises(TypeError, match="layout keyword 'tiles' given, (one of .*|none) wanted"):
        cls.from_dense(np.eye(2), tiles=3)


@every_class
def test_never_large_and_dense_by_accident(cls, monkeypatch):
    matrix = cls.from_dense(np.eye(3))
    monkeypatch.setattr(base, "LARGEST_IMPLICIT_ARRAY", 72)
    assert_same_matrix(np.asarray(matrix), np.eye(3))
    monkeypatch.setattr(base, "LARGEST_IMPLICIT_ARRAY", 71)
    with pytest.raises(TypeError, match=r"would take 72 bytes .* use to_dense\(\)"):
        np.asarray(matrix)


def test_a_matrix_far_too_large_to_be_dense():
    matrix = CSRMatrix.from_coordinates([0], [2**40], [1.0], (10, 2**62))
    with pytest.raises(TypeError, match=r"use to_dense\(\)"):
        np.asarray(matrix)


@every_class
def test_array_protocol(cls, tmp_path):
    matrix = cls.from_dense(np.eye(3))
    assert_same_matrix(np.asarray(matrix, np.float32), np.eye(3, dtype=np.float32))
    assert_same_matrix(np.array(matrix), np.eye(3))
    with pytest.raises(ValueError, match="without a copy"):
        np.array(matrix, copy=False)
    np.save(tmp_path / "matrix.npy", matrix)
    assert_same_matrix(np.load(tmp_path / "matrix.npy", allow_pickle=False), np.eye(3))


@every_class
def test_devices(cls):
    matrix = cls.from_dense(np.eye(3))
    assert matrix.to("cpu") is matrix
    assert matrix.device == "cpu"
    assert not matrix.is_on_gpu
    with mock.patch("twell_numba.device.gpu.choose", side_effect=TwellError("no driver")) as choose:
        for device in ("cuda", "cuda:1"):
            with pytest.raises(TwellError, match="no driver"):
                matrix.to(device)
            choose.assert_called_with(device)
    with pytest.raises(ValueError, match="'cpu', 'cuda' or 'cuda:N' wanted"):
        matrix.to("tpu")


# ---------------------------------------------------------------------- comparison, measures


@every_layout
def test_equality_is_by_value(layout):
    dense = sparse_example()
    dense[0, 0] = np.nan
    matrix = build(layout, dense)
    assert matrix == build(layout, dense.astype(np.float64))
    changed = dense.copy()
    changed[2, 3] += 1
    moved = np.roll(dense, 1, axis=1)
    for different in (changed, moved, dense[:, :-1], -dense):
        assert matrix != build(layout, different)
    assert matrix != "a matrix"


@every_class
def test_equal_matrices_need_equal_values_not_only_places(cls):
    assert cls.from_dense(np.array([[np.nan, 1.0]])) != cls.from_dense(np.array([[1.0, np.nan]]))


@every_class
def test_matrices_cannot_be_hashed(cls):
    with pytest.raises(TypeError, match="unhashable"):
        hash(cls.from_dense(np.eye(2)))


@every_class
def test_stored_zeros_are_stored_but_not_nonzero(cls):
    dense = np.array([[5.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
    matrix = cls.from_dense(dense)
    stored = matrix.nnz
    values_of(matrix)[values_of(matrix) == 5.0] = 0.0
    dense[0, 0] = 0.0
    for same in (matrix, matrix.copy(), matrix.T):
        same.validate()
        assert same.nnz == stored
        assert same.count_nonzero() == 2
        assert same.density == pytest.approx(2 / 6)
    assert matrix == cls.from_dense(dense)
    assert matrix.to_scipy().nnz == 2
    assert CSRMatrix.from_sparse(matrix).nnz == 2
    assert matrix.astype(np.float32) == cls.from_dense(dense)


@every_class
def test_measures(cls):
    matrix = cls.from_dense(sparse_example())
    assert matrix.density == matrix.count_nonzero() / (7 * 13)
    assert matrix.nbytes == sum(getattr(matrix, name).nbytes for name in matrix.array_names)
    assert cls.from_dense(np.zeros((0, 5))).density == 0.0


@pytest.mark.parametrize(
    ("matrix", "wanted"),
    [
        (
            CSRMatrix.from_dense(np.eye(4, dtype=np.float32)),
            "<CSRMatrix 4 x 4 float32: 4 stored entries (25.00%), 52 bytes>",
        ),
        (
            BlockELLMatrix.from_dense(np.eye(5), block_size=2),
            "<BlockELLMatrix 5 x 5 float64: 9 stored entries (36.00%), block_size 2, 3 blocks, "
            "108 bytes>",
        ),
        (
            TwELLMatrix.from_dense(np.eye(4, 600, dtype=np.float32)),
            "<TwELLMatrix 4 x 600 float32: 4 stored entries (0.17%), tile 256, slots 32, 2.352 kB>",
        ),
        (
            HybridELLMatrix.from_dense(np.ones((2, 3)), width=1),
            "<HybridELLMatrix 2 x 3 float64: 6 stored entries (100.00%), width 1, tail rows 2, "
            "96 bytes>",
        ),
        (
            HybridELLMatrix.from_dense(np.ones((0, 3)), width=1),
            "<HybridELLMatrix 0 x 3 float64: 0 stored entries (0.00%), width 1, 0 bytes>",
        ),
    ],
)
def test_repr_says_what_it_is(matrix, wanted):
    assert repr(matrix) == wanted


# ---------------------------------------------------------------------- padding, invariants


@every_layout
@every_dtype
def test_padding_is_never_read(layout, dtype):
    dense = sparse_example(dtype)
    matrix = build(layout, dense)
    poison_padding(matrix)
    matrix.validate()
    assert matrix.nnz == build(layout, dense).nnz
    assert matrix.count_nonzero() == nonzeros(dense)
    np.testing.assert_array_equal(matrix.row_lengths(), build(layout, dense).row_lengths())
    assert matrix == build(layout, dense)
    assert_same_matrix(matrix.to_dense(), dense)
    assert_same_matrix(matrix.T.to_dense(), dense.T)
    assert_same_matrix(matrix.astype(np.float64).to_dense(), dense.astype(np.float64))
    np.testing.assert_array_equal(matrix.to_scipy().toarray(), dense.astype(np.float64))


def test_importing_formats_does_not_import_numba():
    command = "import sys, twell_numba.formats; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", command], check=True)
