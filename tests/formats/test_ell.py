"""TwELL and hybrid ELL alone: their layouts, tails and invariants."""

import numpy as np
import pytest

from twell_numba.formats import HybridELLMatrix, TwELLMatrix


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
    np.testing.assert_array_equal(matrix.to_dense(), dense)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 64, 256])
def test_no_entry_of_a_tile_is_lost(count):
    dense = np.zeros((3, 600), np.float32)
    dense[1, 256 : 256 + count] = np.arange(1, count + 1)
    dense[2, 599] = 5
    matrix = TwELLMatrix.from_dense(dense)
    assert matrix.tail_rows.tolist() == ([1] if count > matrix.slots else [])
    assert matrix.nnz == count + 1
    np.testing.assert_array_equal(matrix.to_dense(), dense)


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
