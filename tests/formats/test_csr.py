"""CSR alone: what its constructor accepts and refuses."""

import numpy as np
import pytest
import scipy.sparse

from twell_numba.formats import CSRMatrix


def arguments() -> dict:
    """A valid matrix of 4 rows and 5 columns; row 1 is empty."""
    return {
        "data": np.array([1, 2, 3, 4, 5], np.float32),
        "indices": np.array([0, 4, 1, 2, 0], np.int32),
        "indptr": np.array([0, 2, 2, 4, 5], np.int32),
        "shape": (4, 5),
    }


def test_it_holds_what_scipy_holds():
    matrix = CSRMatrix(**arguments())
    wanted = scipy.sparse.csr_array(
        (matrix.data, matrix.indices, matrix.indptr), shape=matrix.shape
    )
    np.testing.assert_array_equal(matrix.to_dense(), wanted.toarray())
    assert matrix.row_lengths().tolist() == [2, 0, 2, 1]


@pytest.mark.parametrize("indices", [np.int32, np.int64])
@pytest.mark.parametrize("indptr", [np.int32, np.int64])
def test_each_width_of_indices_by_itself(indices, indptr):
    given = arguments()
    given["indices"] = given["indices"].astype(indices)
    given["indptr"] = given["indptr"].astype(indptr)
    matrix = CSRMatrix(**given)
    assert matrix.indices.dtype == indices
    assert matrix.indptr.dtype == indptr
    assert matrix == CSRMatrix(**arguments())
    assert matrix == matrix.T.T


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("indptr", 0, 1, r"row 0: begins at pointer 1, 0 wanted"),
        ("indptr", 1, 3, r"row 1: ends at pointer 2 given, at least 3 wanted"),
        ("indptr", 3, -4, r"row 2: ends at pointer -4 given, at least 2 wanted"),
        ("indptr", 4, 6, r"row 3: ends at pointer 6 given, 5 wanted"),
        ("indices", 2, 5, r"row 2: column 5 given, 0 to 4 wanted"),
        ("indices", 4, -1, r"row 3: column -1 given, 0 to 4 wanted"),
        ("indices", 3, 1, r"row 2: column 1 given after 1, ascending"),
        ("indices", 2, 3, r"row 2: column 2 given after 3, ascending"),
    ],
)
def test_validation_names_the_row(name, place, value, message):
    given = arguments()
    given[name][place] = value
    with pytest.raises(ValueError, match=f"CSRMatrix: {message}"):
        CSRMatrix(**given)
    CSRMatrix(**given, validate=False)


@pytest.mark.parametrize("name", ["data", "indices", "indptr"])
def test_arrays_longer_than_the_last_pointer_are_refused(name):
    given = arguments()
    given[name] = np.append(given[name], given[name][-1:])
    with pytest.raises(ValueError, match=r"of shape \(\d,\) given, \(\d,\) wanted|row 3: ends at"):
        CSRMatrix(**given)


def test_unfilled_arrays_are_refused():
    given = arguments()
    given["data"] = np.append(given["data"], np.float32(0))
    given["indices"] = np.append(given["indices"], np.int32(12345))
    with pytest.raises(ValueError, match="row 3: ends at pointer 5 given, 6 wanted"):
        CSRMatrix(**given)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("data", np.int32),
        ("indices", np.uint16),
        ("indices", np.float32),
        ("indptr", np.uint64),
        ("indptr", np.int16),
    ],
)
def test_wrong_dtypes_are_refused(name, dtype):
    given = arguments()
    given[name] = given[name].astype(dtype)
    with pytest.raises(TypeError, match=f"{name}.* given, .* wanted"):
        CSRMatrix(**given)


@pytest.mark.parametrize("name", ["data", "indices", "indptr"])
def test_wrong_dimensions_are_refused(name):
    given = arguments()
    given[name] = given[name][np.newaxis]
    with pytest.raises(ValueError, match=f"{name} of shape"):
        CSRMatrix(**given)


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_pointers_of_empty_matrices(shape):
    matrix = CSRMatrix.from_dense(np.zeros(shape))
    assert matrix.indptr.tolist() == [0] * (shape[0] + 1)
    assert matrix.T.indptr.tolist() == [0] * (shape[1] + 1)


def test_the_transpose_is_the_matrix_by_columns():
    matrix = CSRMatrix(**arguments())
    by_columns = scipy.sparse.csr_array(matrix.to_dense()).tocsc()
    transpose = matrix.T
    for ours, scipys in (
        (transpose.data, by_columns.data),
        (transpose.indices, by_columns.indices),
        (transpose.indptr, by_columns.indptr),
    ):
        np.testing.assert_array_equal(ours, scipys)


def test_one_full_row_among_empty_ones():
    dense = np.zeros((50, 3000), np.float32)
    dense[20] = np.arange(1, 3001)
    matrix = CSRMatrix.from_dense(dense)
    assert matrix.row_lengths().tolist() == [0] * 20 + [3000] + [0] * 29
    np.testing.assert_array_equal(matrix.to_dense(), dense)


def test_sizes_that_no_index_can_reach_are_refused():
    with pytest.raises(ValueError, match=r"shape .* given, sizes of 0 to 2\^63 - 1 wanted"):
        CSRMatrix.from_coordinates([], [], np.zeros(0), (1, 2**63))
    matrix = CSRMatrix.from_coordinates([0], [2**63 - 2], [1.0], (1, 2**63 - 1))
    matrix.validate()
    assert matrix.indices.tolist() == [2**63 - 2]


def test_other_values_for_the_same_pattern() -> None:
    matrix = CSRMatrix.from_dense(np.array([[0.0, 2.0], [3.0, 0.0]]))
    assert matrix.stored_values is matrix.data
    values = np.array([5.0, 0.0], np.float32)
    other = matrix.with_values(values)
    other.validate()
    assert other.stored_values is values
    assert other.indices is matrix.indices
    assert other.indptr is matrix.indptr
    np.testing.assert_array_equal(other.to_dense(), [[0, 5], [0, 0]])
    with pytest.raises(ValueError, match=r"values of shape \(3,\) given, \(2,\) wanted"):
        matrix.with_values(np.zeros(3))
    with pytest.raises(TypeError, match="dtype int64 given"):
        matrix.with_values(np.zeros(2, np.int64))
