"""What is particular to CSR products; what all formats share is in test_sparse_products.py."""

import numpy as np
import pytest

from twell_numba.formats import CSRMatrix
from twell_numba.kernels.packed_rows import cpu


def skewed(rows, columns):
    """Return a dense array of which one row is full and the others are almost empty."""
    dense = np.zeros((rows, columns), np.float32)
    dense[rows // 2] = np.arange(1, columns + 1)
    dense[:, 1] = 1
    return dense


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("width", [1, 40])
def test_one_full_row_and_either_index_dtype(index_dtype, width):
    dense = skewed(101, 300)
    given = CSRMatrix.from_dense(dense)
    matrix = CSRMatrix(
        given.data, given.indices.astype(index_dtype), given.indptr.astype(index_dtype), given.shape
    )
    X = np.random.default_rng(0).integers(-9, 9, (300, width)).astype(np.float32)
    Y = np.random.default_rng(1).integers(-9, 9, (101, width)).astype(np.float32)
    np.testing.assert_array_equal(matrix @ X, dense @ X)
    np.testing.assert_array_equal(matrix.transposed_matmul(Y), dense.T @ Y)
    np.testing.assert_array_equal(
        matrix.sampled_product(Y, X).to_dense(), np.where(dense != 0, Y @ X.T, 0)
    )


def test_rows_are_shared_out_by_entries(monkeypatch):
    monkeypatch.setattr(cpu, "thread_count", lambda: 2)
    monkeypatch.setattr(cpu, "PARTS_PER_THREAD", 2)
    monkeypatch.setattr(
        cpu, "run_ranges", lambda task, parts, **_: [task(i, i + 1) for i in range(parts)]
    )
    lengths = np.array([0] * 50 + [100_000] * 4 + [0] * 50)
    ranges = []
    cpu._run_balanced(lambda start, stop: ranges.append((start, stop)), lengths, 256)
    assert [lengths[start:stop].sum() for start, stop in ranges] == [100_000] * 4
    assert ranges[0][0] == 0
    assert ranges[-1][1] == lengths.size
    assert all(before[1] == after[0] for before, after in zip(ranges[:-1], ranges[1:], strict=True))


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 320, 511, 1000])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float64)])
def test_strips_cover_all_columns_and_nothing_else(columns, dtype):
    if columns < cpu.register_lanes(dtype):
        pytest.skip("fewer columns are filled up to a register first")
    covered = np.zeros(columns, int)
    for registers, first, lanes in cpu._strips(columns, dtype):
        assert lanes == registers * cpu.register_lanes(dtype)
        assert 0 <= first <= columns - lanes
        covered[first : first + lanes] += 1
    assert covered.min() >= 1


@pytest.mark.parametrize("entries", [0.02, 0.3])
def test_blocks_of_columns_change_no_bit(entries, monkeypatch):
    rng = np.random.default_rng(0)
    dense = (rng.standard_normal((40, 3000)) * (rng.random((40, 3000)) < entries)).astype(
        np.float32
    )
    matrix = CSRMatrix.from_dense(dense)
    X, Y = (rng.standard_normal((size, 256)).astype(np.float32) for size in (3000, 40))
    results = []
    for least, size in ((0, 4096), (0, 300_000), (10**9, 1)):
        monkeypatch.setattr(cpu, "BLOCK_ENTRIES", least)
        monkeypatch.setattr(cpu, "BLOCK_BYTES", size)
        sampled = matrix.sampled_product(Y, X).data
        results.append((matrix @ X, matrix.transposed_matmul(Y), sampled))
    np.testing.assert_allclose(results[0][0], dense @ X, atol=1e-3)
    for result in results[1:]:
        for part, first in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(part, first)


def test_a_column_of_the_result_does_not_depend_on_the_others():
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((30, 50)) * (rng.random((30, 50)) < 0.3)
    matrix, X = CSRMatrix.from_dense(dense), rng.standard_normal((50, 100))
    product = matrix @ X
    for first, last in ((0, 2), (7, 20), (40, 100)):
        np.testing.assert_array_equal(matrix @ X[:, first:last], product[:, first:last])
