"""Block-ELL alone: blocks, edges, and the arrays of cuSPARSE."""

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_numba.formats import BlockELLMatrix


def arguments() -> dict:
    """A valid matrix of 5 rows and 7 columns in blocks of 2 x 2; block row 1 has one block."""
    return {
        "values": np.arange(24, dtype=np.float32).reshape(3, 2, 2, 2),
        "block_columns": np.array([[0, 3], [1, -1], [2, 3]], np.int32),
        "shape": (5, 7),
        "block_size": 2,
    }


def test_blocks_lie_where_their_columns_say():
    dense = BlockELLMatrix(**arguments()).to_dense()
    wanted = np.zeros((5, 7), np.float32)
    wanted[0:2, 0:2] = [[0, 1], [2, 3]]
    wanted[0:2, 6] = [4, 6]
    wanted[2:4, 2:4] = [[8, 9], [10, 11]]
    wanted[4, 4:6] = [16, 17]
    wanted[4, 6] = 20
    np.testing.assert_array_equal(dense, wanted)


def test_entries_are_the_elements_of_blocks_inside_the_matrix():
    matrix = BlockELLMatrix(**arguments())
    assert matrix.blocks == 5
    assert matrix.nnz == 4 + 2 + 4 + 2 + 1
    assert matrix.count_nonzero() == matrix.nnz - 1  # a zero inside the first block
    assert matrix.row_lengths().tolist() == [3, 3, 2, 2, 3]
    rows, columns, values = matrix.coordinates()
    assert rows.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 4]
    assert columns.tolist() == [0, 1, 6, 0, 1, 6, 2, 3, 2, 3, 4, 5, 6]
    assert values.tolist() == [0, 1, 4, 2, 3, 6, 8, 9, 10, 11, 16, 17, 20]


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 8, 16, 31, 32, 64])
def test_any_block_size_and_shape(block_size):
    rng = np.random.default_rng(block_size)
    for rows in (block_size - 1, block_size, block_size + 1):
        for columns in (2 * block_size - 1, 2 * block_size, 2 * block_size + 1):
            dense = rng.standard_normal((rows, columns)) * (rng.random((rows, columns)) < 0.1)
            matrix = BlockELLMatrix.from_dense(dense, block_size=block_size)
            matrix.validate()
            np.testing.assert_array_equal(matrix.to_dense(), dense)


def test_blocks_without_entries_are_not_stored():
    dense = np.kron(np.array([[1, 0, 2], [0, 0, 0]]), np.ones((4, 4)))
    matrix = BlockELLMatrix.from_dense(dense, block_size=4)
    assert matrix.block_columns.tolist() == [[0, 2], [-1, -1]]
    assert matrix.blocks == 2


def test_room_for_more_blocks():
    matrix = BlockELLMatrix.from_dense(np.eye(4), block_size=2, blocks_per_row=3)
    assert matrix.block_columns.tolist() == [[0, -1, -1], [1, -1, -1]]
    entries = np.nonzero(np.eye(4))
    same = BlockELLMatrix.from_coordinates(
        *entries, np.ones(4), (4, 4), block_size=2, blocks_per_row=3
    )
    assert same.block_columns.tolist() == matrix.block_columns.tolist()


@pytest.mark.parametrize(
    ("layout", "error", "message"),
    [
        ({"block_size": 0}, ValueError, "block_size: 0 given, 1 to 65536 wanted"),
        ({"block_size": 2.0}, TypeError, "block_size: 2.0 given, a whole number wanted"),
        ({"blocks_per_row": -1}, ValueError, "blocks_per_row: -1 given, at least 0 wanted"),
        (
            {"block_size": 1, "blocks_per_row": 2},
            ValueError,
            "block row 1 holds 3 blocks, blocks_per_row 2 given, at least 3 wanted",
        ),
    ],
)
def test_wrong_layouts_are_refused(layout, error, message):
    dense = np.array([[1.0, 0, 0], [1, 2, 3]])
    with pytest.raises(error, match=message):
        BlockELLMatrix.from_dense(dense, **layout)
    entries = np.nonzero(dense)
    with pytest.raises(error, match=message):
        BlockELLMatrix.from_coordinates(*entries, dense[entries], dense.shape, **layout)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((0, 1), 4, r"block row 0: block column 4 given, 0 to 3 wanted, or -1"),
        ((1, 1), -2, r"block row 1: block column -2 given, 0 to 3 wanted, or -1"),
        ((2, 1), 2, r"block row 2: block column 2 given after 2, ascending"),
        ((2, 1), 1, r"block row 2: block column 1 given after 2, ascending"),
        ((0, 0), -1, r"block row 0: block column 3 given after -1, blocks before"),
    ],
)
def test_validation_names_the_block_row(place, value, message):
    given = arguments()
    given["block_columns"][place] = value
    with pytest.raises(ValueError, match=message):
        BlockELLMatrix(**given)
    BlockELLMatrix(**given, validate=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 3}, r"block_columns of shape \(3, 2\) given, \(2, 2\) wanted"),
        ({"block_size": 1}, r"block_columns of shape \(3, 2\) given, \(5, 2\) wanted"),
        ({"shape": (7, 7)}, r"block_columns of shape \(3, 2\) given, \(4, 2\) wanted"),
        ({"shape": (5, 6)}, r"block row 0: block column 3 given, 0 to 2 wanted"),
        ({"values": np.zeros((3, 2, 2), np.float32)}, r"values of shape .* blocks of 2 x 2"),
        ({"values": np.zeros(24, np.float32)}, r"values of shape \(24,\) given, \(3, 2, 2, 2\)"),
        ({"block_columns": np.zeros(6, np.int32)}, r"block_columns of shape \(6,\) given"),
    ],
)
def test_wrong_shapes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        BlockELLMatrix(**arguments() | change)


@pytest.mark.parametrize(("name", "dtype"), [("values", np.int32), ("block_columns", np.uint32)])
def test_wrong_dtypes_are_refused(name, dtype):
    given = arguments()
    given[name] = given[name].astype(dtype)
    with pytest.raises(TypeError, match=f"{name}.* given, .* wanted"):
        BlockELLMatrix(**given)


def test_scipy_bsr_keeps_blocks_of_shapes_that_they_divide():
    dense = np.kron(np.array([[1.0, 0], [1, 2], [0, 0]]), [[1, 0], [2, 3]])
    matrix = BlockELLMatrix.from_dense(dense, block_size=2)
    bsr = matrix.to_scipy("bsr")
    assert isinstance(bsr, scipy.sparse.bsr_array)
    assert bsr.blocksize == (2, 2)
    assert bsr.nnz == matrix.nnz == 12
    bsr.check_format(full_check=True)
    np.testing.assert_array_equal(bsr.toarray(), dense)
    assert BlockELLMatrix.from_scipy(bsr, block_size=2) == matrix
    edged = BlockELLMatrix.from_dense(dense[:5], block_size=2).to_scipy("bsr")
    np.testing.assert_array_equal(edged.toarray(), dense[:5])


def test_transposition_keeps_blocks_of_zeros():
    given = arguments()
    given["values"][1, 0] = 0
    matrix = BlockELLMatrix(**given)
    transpose = matrix.T
    transpose.validate()
    assert transpose.blocks == 5
    np.testing.assert_array_equal(transpose.to_dense(), matrix.to_dense().T)


# ---------------------------------------------------------------------- cuSPARSE


def test_the_arrays_of_nvidias_example():
    """The matrix and the arrays in NVIDIA's ``dense2sparse_blockedell_example.c``."""
    dense = np.array(
        [[0, 0, 1, 2, 0, 0], [0, 0, 3, 4, 0, 0], [5, 6, 0, 0, 7, 8], [9, 10, 0, 0, 11, 12]],
        np.float32,
    )
    column_indices = np.array([[1, -1], [0, 2]], np.int32)
    values = np.array([[1, 2, 0, 0], [3, 4, 0, 0], [5, 6, 7, 8], [9, 10, 11, 12]], np.float32)
    matrix = BlockELLMatrix.from_dense(dense, block_size=2)
    given = matrix.to_blocked_ell_arrays()
    assert given[:4] == (4, 6, 2, 4)
    for array, wanted in ((given.column_indices, column_indices), (given.values, values)):
        assert array.dtype == wanted.dtype
        np.testing.assert_array_equal(array, wanted)
        assert array.flags.c_contiguous
    back = BlockELLMatrix.from_blocked_ell_arrays(column_indices, values, (4, 6), block_size=2)
    np.testing.assert_array_equal(back.to_dense(), dense)


@settings(derandomize=True, max_examples=300, database=None, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 7), st.integers(0, 9)),
    block_size=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
def test_blocked_ell_arrays_round_trip(shape, block_size, seed):
    rng = np.random.default_rng(seed)
    dense = rng.integers(0, 2, shape) * rng.standard_normal(shape)
    matrix = BlockELLMatrix.from_dense(dense, block_size=block_size)
    for padding in matrix._padding().values():
        matrix.values[padding] = np.nan
    exported = matrix.to_blocked_ell_arrays()
    assert not np.isnan(exported.values).any()
    # cuSPARSE wants neither order nor the blocks first.
    order = rng.permutation(matrix.blocks_per_row)
    indices = exported.column_indices[:, order]
    blocks = exported.values.reshape(matrix.block_rows, block_size, order.size, block_size)
    values = blocks[:, :, order].reshape(exported.values.shape)
    back = BlockELLMatrix.from_blocked_ell_arrays(indices, values, shape, block_size=block_size)
    assert back == matrix
    assert back.block_columns.tolist() == matrix.block_columns.tolist()


def test_wrong_blocked_ell_arrays_are_refused():
    indices, values = np.array([[1, 1]], np.int32), np.ones((2, 4))
    build = BlockELLMatrix.from_blocked_ell_arrays
    with pytest.raises(ValueError, match="block row 0: block column 1 given after 1"):
        build(indices, values, (2, 4), block_size=2)
    with pytest.raises(ValueError, match=r"values of shape \(1, 4\) given"):
        build(indices, values[:1], (2, 4), block_size=2)
    with pytest.raises(TypeError, match="column_indices of dtype uint16 given"):
        build(indices.astype(np.uint16), values, (2, 4), block_size=2)
    with pytest.raises(TypeError, match="values: dtype int64 given"):
        build(indices, values.astype(np.int64), (2, 4), block_size=2)


def test_other_values_for_the_same_pattern() -> None:
    dense = np.zeros((5, 7))
    dense[4, 6] = 1.0
    matrix = BlockELLMatrix.from_dense(dense, block_size=4)
    assert matrix.stored_values is matrix.values
    other = matrix.with_values(np.full(matrix.values.shape, 2.0))
    other.validate()
    assert other.block_columns is matrix.block_columns
    assert other.count_nonzero() == 1 * 3  # of the block, what lies inside the matrix
    assert np.count_nonzero(matrix.stored_places()) == matrix.nnz == 3
    with pytest.raises(ValueError, match=r"values of shape \(3,\) given, \(2, 1, 4, 4\) wanted"):
        matrix.with_values(np.zeros(3))
