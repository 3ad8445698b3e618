"""Every sparse format against dense NumPy: conversions, comparison, invariants."""

import copy
import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from twell_numba.errors import TwellError
from twell_numba.formats import HybridELLMatrix, SparseMatrix, TwELLMatrix
from twell_numba.formats.ell import ELLMatrix

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]

# A format added later is a line or two here; every test below that takes `layout` then runs on it.
LAYOUTS = {
    "twell": (TwELLMatrix, {}),
    "twell tile 4, 1 slot": (TwELLMatrix, {"tile": 4, "slots": 1}),
    "twell tile 3, compression 2": (TwELLMatrix, {"tile": 3, "compression": 2}),
    "twell tile 1": (TwELLMatrix, {"tile": 1}),
    "hybrid ELL": (HybridELLMatrix, {}),
    "hybrid ELL width 2": (HybridELLMatrix, {"width": 2}),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
every_class = pytest.mark.parametrize("cls", dict.fromkeys(cls for cls, _ in LAYOUTS.values()))
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
few_examples = settings(derandomize=True, max_examples=30, database=None, deadline=None)

special_values = st.sampled_from([0.0, 0.0, 0.0, -0.0, 1.0, -2.5, np.nan, np.inf, -np.inf])


@st.composite
def dense_matrices(draw: st.DrawFn) -> np.ndarray:
    shape = draw(st.tuples(st.integers(0, 5), st.integers(0, 13)))
    dense = draw(arrays(np.float32, shape, elements=special_values))
    return dense.astype(draw(st.sampled_from(DTYPES)))


def build(layout: tuple[type[SparseMatrix], dict], dense: np.ndarray) -> SparseMatrix:
    cls, keywords = layout
    return cls.from_dense(dense, **keywords)


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
    """Fill what no operation may read with NaN and columns far out of range."""
    assert isinstance(matrix, ELLMatrix)
    padding = ~matrix.stored()
    matrix.values[padding] = np.nan
    matrix.columns[padding] = np.iinfo(matrix.columns.dtype).max


# ---------------------------------------------------------------------- conversions


@every_layout
@few_examples
@given(dense=dense_matrices())
def test_dense_round_trip_is_exact(layout, dense):
    matrix = build(layout, dense)
    matrix.validate()
    assert matrix.shape == dense.shape
    assert matrix.dtype == dense.dtype
    assert matrix.nnz == matrix.count_nonzero() == np.count_nonzero(dense.astype(np.float64))
    assert_same_matrix(matrix.to_dense(), dense)


@every_layout
@few_examples
@given(dense=dense_matrices())
def test_transpose_copy_and_pickle_agree_with_dense(layout, dense):
    matrix = build(layout, dense)
    transpose = matrix.T
    transpose.validate()
    assert_same_matrix(transpose.to_dense(), dense.T)
    for same in (
        transpose.T,
        matrix.copy(),
        copy.copy(matrix),
        copy.deepcopy(matrix),
        pickle.loads(pickle.dumps(matrix)),
    ):
        assert type(same) is type(matrix)
        same.validate()
        assert same == matrix


@every_layout
@few_examples
@given(dense=dense_matrices())
def test_scipy_round_trip_is_exact(layout, dense):
    matrix = build(layout, dense)
    through_scipy = matrix.to_scipy()
    assert through_scipy.nnz == matrix.nnz
    cls, keywords = layout
    assert cls.from_scipy(through_scipy, **keywords) == matrix


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
    assert matrix.nnz == 1


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
    rows, columns, values = matrix.coordinates()
    assert rows.tolist() == [0, 0]
    assert columns.tolist() == [1, width - 1]
    assert values.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("columns", "dtype"), [(0, np.int32), (2**31 - 1, np.int32), (2**31, np.int64)]
)
def test_width_of_hybrid_ell_column_numbers(columns, dtype):
    assert (
        HybridELLMatrix.from_coordinates([], [], np.zeros(0), (1, columns)).columns.dtype == dtype
    )


def test_more_entries_than_fit_16_bit_columns_are_counted():
    dense = np.ones((300, 200), np.float32)
    matrix = TwELLMatrix.from_dense(dense, tile=200, slots=200)
    assert matrix.nnz == 60000
    assert_same_matrix(matrix.to_dense(), dense)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 64, 256])
def test_no_entry_of_a_tile_is_lost(count):
    dense = np.zeros((3, 600), np.float32)
    dense[1, 256 : 256 + count] = np.arange(1, count + 1)
    dense[2, 599] = 5
    matrix = TwELLMatrix.from_dense(dense)
    assert matrix.tail_rows.tolist() == ([1] if count > matrix.slots else [])
    assert matrix.nnz == count + 1
    assert_same_matrix(matrix.to_dense(), dense)


@every_layout
def test_tail_takes_every_row(layout):
    dense = np.arange(1, 3000 * 13 + 1, dtype=np.float64).reshape(3000, 13)
    assert_same_matrix(build(layout, dense).to_dense(), dense)


@every_dtype
@every_class
def test_negative_zero_is_not_stored_and_nan_is(cls, dtype):
    dense = np.array([[-0.0, 0.0, np.nan, -1.0]], dtype)
    matrix = cls.from_dense(dense)
    assert matrix.nnz == 2
    assert matrix.coordinates()[1].tolist() == [2, 3]
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


@every_layout
@few_examples
@given(
    entries=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 9), st.sampled_from([-1.0, 0.0, 1.0, 2.0]))
    )
)
def test_entries_at_one_place_add_up(layout, entries):
    cls, keywords = layout
    rows, columns, values = (
        (np.array(part) for part in zip(*entries, strict=True))
        if entries
        else (
            np.zeros(0, np.int64),
            np.zeros(0, np.int64),
            np.zeros(0),
        )
    )
    wanted = np.zeros((4, 10), np.float32)
    np.add.at(wanted, (rows, columns), values)
    matrix = cls.from_coordinates(rows, columns, values.astype(np.float32), (4, 10), **keywords)
    matrix.validate()
    assert matrix.nnz == np.count_nonzero(wanted)
    assert_same_matrix(matrix.to_dense(), wanted)


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
    assert matrix.nnz == 2
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
    with pytest.raises(TypeError, match="layout keyword 'tiles' given, one of"):
        cls.from_dense(np.eye(2), tiles=3)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tile": 0}, "tile: 0 given, 1 to 65536 wanted"),
        ({"tile": 65537}, "tile: 65537 given, 1 to 65536 wanted"),
        ({"slots": 0}, "slots: 0 given, 1 to 256 wanted"),
        ({"slots": 257}, "slots: 257 given, 1 to 256 wanted"),
        ({"compression": 0}, "compression: 0 given, at least 1 wanted"),
    ],
)
def test_wrong_twell_layouts_are_refused(layout, message):
    with pytest.raises(ValueError, match=message):
        TwELLMatrix.from_dense(np.eye(3), **layout)


def test_layouts_that_are_no_numbers_are_refused():
    with pytest.raises(TypeError, match=r"width: 2.5 given, a whole number wanted"):
        HybridELLMatrix.from_dense(np.eye(3), width=2.5)
    with pytest.raises(TypeError, match="slots and compression given, one of them wanted"):
        TwELLMatrix.from_dense(np.eye(3), slots=4, compression=8)
    with pytest.raises(ValueError, match="width: 0 given, 1 to"):
        HybridELLMatrix.from_dense(np.eye(3), width=0)


@every_class
def test_never_dense_by_accident(cls, tmp_path):
    matrix = cls.from_dense(np.eye(3))
    with pytest.raises(TypeError, match=r"use to_dense\(\)"):
        np.asarray(matrix)
    with pytest.raises(TypeError, match=r"use to_dense\(\)"):
        np.save(tmp_path / "matrix.npy", matrix)
    with pytest.raises(TypeError, match="unsupported operand"):
        np.eye(3) @ matrix


@every_class
def test_devices(cls):
    matrix = cls.from_dense(np.eye(3))
    assert matrix.to("cpu") is matrix
    for device in ("cuda", "cuda:1"):
        with pytest.raises(TwellError, match="GPU support is not there yet"):
            matrix.to(device)
    with pytest.raises(ValueError, match="'cpu' wanted"):
        matrix.to("tpu")


# ---------------------------------------------------------------------- comparison, measures


@every_layout
def test_equality_is_by_value(layout):
    dense = sparse_example()
    dense[0, 0] = np.nan
    matrix = build(layout, dense)
    for other in LAYOUTS.values():
        assert matrix == build(other, dense)
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


def with_a_stored_zero(cls: type[SparseMatrix]) -> SparseMatrix:
    matrix = cls.from_dense(np.array([[5.0, 1.0, 0.0], [0.0, 0.0, 2.0]]))
    assert isinstance(matrix, ELLMatrix)
    matrix.values[matrix.values == 5.0] = 0.0
    return matrix


@every_class
def test_stored_zeros_are_stored_but_not_nonzero(cls):
    matrix = with_a_stored_zero(cls)
    assert matrix.nnz == 3
    assert matrix.count_nonzero() == 2
    assert matrix.density == pytest.approx(2 / 6)
    assert matrix == cls.from_dense(matrix.to_dense())


@every_class
def test_measures(cls):
    matrix = cls.from_dense(sparse_example())
    assert matrix.density == matrix.count_nonzero() / (7 * 13)
    assert matrix.nbytes == sum(getattr(matrix, name).nbytes for name in matrix.array_names)
    assert cls.from_dense(np.zeros((0, 5))).density == 0.0


def test_counts_and_bytes_do_not_wrap_at_32_bits():
    slots, rows = 2**30, 8
    values = np.broadcast_to(np.float32(1), (rows, slots))
    columns = np.broadcast_to(np.int32(0), (rows, slots))
    counts = np.full(rows, slots, np.int32)
    matrix = HybridELLMatrix.__new__(HybridELLMatrix)
    matrix.shape = (rows, slots)
    matrix.values, matrix.columns, matrix.counts = values, columns, counts
    matrix.tail_rows, matrix.tail_values = np.zeros(0, np.int64), np.zeros((0, slots), np.float32)
    assert matrix.nnz == 2**33
    assert matrix.nbytes == 2**36 + counts.nbytes


@pytest.mark.parametrize(
    ("matrix", "wanted"),
    [
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
    assert matrix.nnz == matrix.count_nonzero() == np.count_nonzero(dense.astype(np.float64))
    assert matrix == build(layout, dense)
    assert_same_matrix(matrix.to_dense(), dense)
    assert_same_matrix(matrix.T.to_dense(), dense.T)
    assert_same_matrix(matrix.astype(np.float64).to_dense(), dense.astype(np.float64))
    np.testing.assert_array_equal(matrix.to_scipy().toarray(), dense.astype(np.float64))


def twell_arrays() -> dict:
    """A valid matrix of 4 rows and 10 columns in tiles of 4; row 2 is in the tail."""
    dense = np.zeros((4, 10), np.float32)
    dense[0, [1, 2]] = [1, 2]
    dense[1, 9] = 3
    dense[2] = 1
    matrix = TwELLMatrix.from_dense(dense, tile=4, slots=2)
    return {name: getattr(matrix, name) for name in matrix.array_names} | {
        "shape": (4, 10),
        "tile": 4,
    }


def hybrid_ell_arrays() -> dict:
    """The same matrix in hybrid ELL of width 2."""
    matrix = HybridELLMatrix.from_dense(TwELLMatrix(**twell_arrays()).to_dense(), width=2)
    return {name: getattr(matrix, name) for name in matrix.array_names} | {"shape": (4, 10)}


@pytest.mark.parametrize(
    ("array", "place", "value", "message"),
    [
        ("counts", (1, 2), 3, r"row 1, tile 2: count 3 given, 0 to 2 wanted"),
        ("counts", (3, 0), -1, r"row 3, tile 0: count -1 given, 0 to 2 wanted"),
        ("columns", (0, 0, 1), 4, r"row 0, tile 0: column 4 given, 0 to 3 wanted"),
        ("columns", (1, 2, 0), 2, r"row 1, tile 2: column 2 given, 0 to 1 wanted"),
        ("columns", (0, 0, 1), 1, r"row 0, tile 0: column 1 given after 1, ascending"),
        ("columns", (0, 0, 0), 3, r"row 0, tile 0: column 2 given after 3, ascending"),
        ("counts", (2, 1), 1, r"row 2, tile 1: count 1 given for a row that is in the tail"),
        ("tail_rows", 0, 4, r"tail row 4 given, 0 to 3 wanted"),
        ("tail_rows", 0, -1, r"tail row -1 given, 0 to 3 wanted"),
    ],
)
def test_twell_validation_names_the_row(array, place, value, message):
    arguments = twell_arrays()
    TwELLMatrix(**arguments)
    arguments[array][place] = value
    with pytest.raises(ValueError, match=message):
        TwELLMatrix(**arguments)
    TwELLMatrix(**arguments, validate=False)


@pytest.mark.parametrize(
    ("array", "place", "value", "message"),
    [
        ("counts", 1, 3, r"row 1: count 3 given, 0 to 2 wanted"),
        ("columns", (1, 0), 10, r"row 1: column 10 given, 0 to 9 wanted"),
        ("columns", (1, 0), -1, r"row 1: column -1 given, 0 to 9 wanted"),
        ("columns", (0, 1), 0, r"row 0: column 0 given after 1, ascending"),
        ("counts", 2, 1, r"row 2: count 1 given for a row that is in the tail"),
    ],
)
def test_hybrid_ell_validation_names_the_row(array, place, value, message):
    arguments = hybrid_ell_arrays()
    HybridELLMatrix(**arguments)
    arguments[array][place] = value
    with pytest.raises(ValueError, match=message):
        HybridELLMatrix(**arguments)


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [(TwELLMatrix, twell_arrays), (HybridELLMatrix, hybrid_ell_arrays)],
)
class TestWrongArrays:
    @pytest.mark.parametrize("name", ["values", "columns", "counts", "tail_rows", "tail_values"])
    def test_too_long(self, cls, arguments, name):
        given = arguments()
        given[name] = np.concatenate([given[name], given[name]])
        with pytest.raises(ValueError, match=r"of shape \(.*\) given, \(.*\) wanted"):
            cls(**given)

    def test_columns_with_other_slots_than_values(self, cls, arguments):
        given = arguments()
        given["columns"] = given["columns"][..., :1]
        with pytest.raises(ValueError, match="columns of shape"):
            cls(**given)

    @pytest.mark.parametrize("name", ["values", "columns", "counts", "tail_rows", "tail_values"])
    def test_wrong_dtype(self, cls, arguments, name):
        given = arguments()
        given[name] = given[name].astype(np.int16)
        with pytest.raises(TypeError, match=f"{name}.* given, .* wanted"):
            cls(**given)

    def test_tail_rows_out_of_order(self, cls, arguments):
        given = arguments()
        given["tail_rows"] = np.array([3, 2])
        given["tail_values"] = np.ones((2, 10), np.float32)
        with pytest.raises(ValueError, match="tail row 2 given after 3, ascending rows wanted"):
            cls(**given)

    def test_half_a_tail(self, cls, arguments):
        given = arguments()
        del given["tail_values"]
        with pytest.raises(ValueError, match="both or none wanted"):
            cls(**given)

    def test_no_tail(self, cls, arguments):
        given = arguments()
        del given["tail_values"], given["tail_rows"]
        assert cls(**given).nnz == 3

    @pytest.mark.parametrize("shape", [(4,), (4, -1), (4.5, 10), None])
    def test_wrong_shape(self, cls, arguments, shape):
        with pytest.raises(ValueError, match="shape .* given, .* wanted"):
            cls(**arguments() | {"shape": shape})


def test_importing_formats_does_not_import_numba():
    command = "import sys, twell_numba.formats; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", command], check=True)
