import ml_dtypes
import numpy as np
import pytest

from twell_numba.kernels.transpose import cpu, reference

every_implementation = pytest.mark.parametrize("module", [cpu, reference])


@every_implementation
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (7, 16), (8, 17), (9, 15), (700, 311)])
def test_transpose(module, dtype, shape):
    X = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    Y = module.transpose(X)
    assert Y.flags.c_contiguous
    assert Y.dtype == dtype
    np.testing.assert_array_equal(Y, X.T)


@every_implementation
def test_row_major_takes_any_arrangement(module):
    X = np.random.default_rng(0).standard_normal((9, 21))
    read_only = X.copy()
    read_only.flags.writeable = False
    unaligned = np.zeros(X.nbytes + 1, np.uint8)[1:].view(np.float64).reshape(X.shape)
    unaligned[...] = X
    for arranged in (X, np.asfortranarray(X), X[::-1, ::-1], X.astype(">f8"), read_only, unaligned):
        result = module.row_major(arranged, np.float64)
        assert result.flags.c_contiguous
        assert result.dtype.isnative
        np.testing.assert_array_equal(result, arranged)
    half = np.asfortranarray(X.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(module.row_major(half, np.float32), half.astype(np.float32))
