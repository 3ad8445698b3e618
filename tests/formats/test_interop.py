"""Sparse matrices in other libraries' hands: SciPy's solvers, DLPack."""

import ml_dtypes
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse.linalg

from twell_numba.formats.base import FORMATS

every_class = pytest.mark.parametrize("cls", FORMATS.values())


def positive_definite(size: int = 60) -> np.ndarray:
    rng = np.random.default_rng(11)
    dense = rng.standard_normal((size, size)) * (rng.random((size, size)) < 0.05)
    return dense @ dense.T + np.eye(size)


def rectangular(dtype: type = np.float64) -> np.ndarray:
    rng = np.random.default_rng(12)
    return (rng.standard_normal((50, 37)) * (rng.random((50, 37)) < 0.2)).astype(dtype)


@every_class
def test_conjugate_gradients(cls):
    dense = positive_definite()
    wanted = np.linspace(-1, 1, dense.shape[0])
    operator = cls.from_dense(dense).aslinearoperator()
    solution, status = scipy.sparse.linalg.cg(operator, dense @ wanted, rtol=1e-10)
    assert status == 0
    np.testing.assert_allclose(solution, wanted, atol=1e-7)


@every_class
def test_singular_values(cls):
    dense = rectangular()
    operator = cls.from_dense(dense).aslinearoperator()
    found = scipy.sparse.linalg.svds(operator, k=3, v0=np.ones(37), return_singular_vectors=False)
    np.testing.assert_allclose(np.sort(found)[::-1], scipy.linalg.svdvals(dense)[:3])


@every_class
def test_least_squares(cls):
    dense = rectangular()
    wanted = np.linspace(-1, 1, 37)
    operator = cls.from_dense(dense).aslinearoperator()
    found = scipy.sparse.linalg.lsqr(operator, dense @ wanted, atol=1e-12, btol=1e-12)[0]
    np.testing.assert_allclose(found, wanted, atol=1e-8)


@every_class
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_operator_multiplies_as_the_dense_matrix(cls, dtype):
    dense = rectangular(dtype)
    operator = cls.from_dense(dense).aslinearoperator()
    assert operator.shape == dense.shape
    assert operator.dtype == (np.float64 if dtype is np.float64 else np.float32)
    rng = np.random.default_rng(13)
    exact = dense.astype(np.float64)
    for columns in ((), (1,), (4,)):
        X, Y = rng.standard_normal((37, *columns)), rng.standard_normal((50, *columns))
        np.testing.assert_allclose(operator @ X, exact @ X, atol=1e-12)
        np.testing.assert_allclose(operator.H @ Y, exact.T @ Y, atol=1e-12)
        np.testing.assert_allclose(operator.T @ Y, exact.T @ Y, atol=1e-12)
    ones = np.ones(37, np.int64)
    np.testing.assert_allclose(operator @ ones, exact.sum(axis=1), rtol=1e-5, atol=1e-5)
    composed = 2 * operator.T @ operator
    np.testing.assert_allclose(composed @ X, 2 * exact.T @ exact @ X, atol=1e-9)


@every_class
def test_arrays_are_shared_through_dlpack(cls):
    matrix = cls.from_dense(rectangular(np.float32))
    for name in matrix.array_names:
        array = getattr(matrix, name)
        shared = np.from_dlpack(array)
        assert np.shares_memory(shared, array) or array.size == 0
        np.testing.assert_array_equal(shared, array)
