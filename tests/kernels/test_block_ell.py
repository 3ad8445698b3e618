"""What is particular to block-ELL products; the rest is in test_sparse_products.py."""

import numpy as np
import pytest

from twell_numba.formats import BlockELLMatrix


def blocks(rows, columns, b, seed=0):
    rng = np.random.default_rng(seed)
    mask = rng.random((-(-rows // b), -(-columns // b))) < 0.4
    mask = np.repeat(np.repeat(mask, b, 0), b, 1)[:rows, :columns]
    return rng.standard_normal((rows, columns)).astype(np.float32) * mask


@pytest.mark.parametrize("b", [1, 2, 3, 4, 7, 8, 9, 12, 15, 16, 17, 32, 33, 64, 100])
@pytest.mark.parametrize("edge", [-1, 0, 1])
def test_every_block_size_and_edges_that_do_not_divide(b, edge):
    rows, columns = max(2 * b + edge, 1), max(3 * b + edge, 1)
    dense = blocks(rows, columns, b)
    matrix = BlockELLMatrix.from_dense(dense, block_size=b)
    padding = matrix._padding()["values"]
    matrix.values[padding] = np.nan
    rng = np.random.default_rng(1)
    X, Y = (rng.standard_normal((size, 37)).astype(np.float32) for size in (columns, rows))
    np.testing.assert_allclose(matrix @ X, dense @ X, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(matrix.transposed_matmul(Y), dense.T @ Y, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(Y.T @ matrix, Y.T @ dense, rtol=1e-4, atol=1e-4)
    sampled = matrix.sampled_product(Y, X)
    sampled.validate()
    entry_rows, entry_columns, values = sampled.coordinates()
    wanted = (Y @ X.T)[entry_rows, entry_columns]
    np.testing.assert_allclose(values, wanted, rtol=1e-4, atol=1e-4)
    assert not sampled.values[padding].any()


@pytest.mark.parametrize("product", ["matmul", "transposed_matmul"])
@pytest.mark.parametrize("b", [4, 8, 16, 20])
def test_a_number_that_is_not_finite_changes_no_bit_elsewhere(product, b):
    # It is what makes the kernel look for zeros.
    dense = blocks(60, 60, b)
    dense[5, 5] = 1
    matrix = BlockELLMatrix.from_dense(dense, block_size=b)
    X = np.random.default_rng(1).standard_normal((60, 70)).astype(np.float32)
    clean = getattr(matrix, product)(X)
    X[5, 9] = np.inf
    result = getattr(matrix, product)(X)
    others = np.arange(70) != 9
    np.testing.assert_array_equal(result[:, others], clean[:, others])
    assert not np.isfinite(result[:, 9]).all()


def test_a_matrix_without_blocks():
    matrix = BlockELLMatrix.from_dense(np.zeros((5, 7)), block_size=2)
    assert matrix.blocks_per_row == 0
    out = np.full((5, 3), np.nan)
    np.testing.assert_array_equal(matrix.matmul(np.full((7, 3), np.nan), out=out), np.zeros((5, 3)))
    np.testing.assert_array_equal(matrix.transposed_matmul(np.ones(5)), np.zeros(7))
    assert matrix.sampled_product(np.ones((5, 2)), np.ones((7, 2))).nnz == 0
