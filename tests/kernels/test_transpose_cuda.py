import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.kernels.transpose import cuda, reference  # noqa: E402

SMALL = [(0, 3), (3, 0), (1, 1), (31, 2), (33, 32), (3, 70)]
LARGE = [(65537, 33), (1, 65537), (2049, 513)]


def test_matches_the_reference(rng, machine, precision):
    dtype, _ = precision
    random = machine.share([tuple(rng.integers(1, 400, 2)) for _ in range(200)], dtype)
    for shape in machine.shapes(SMALL, LARGE + random):
        X = rng.standard_normal(shape).astype(dtype)
        X[:, shape[1] // 2 :] *= -1
        np.testing.assert_array_equal(
            cuda.transpose(machine.upload(X)).to_numpy(), reference.transpose(X)
        )


def test_into_another_dtype(rng, machine):
    X = rng.standard_normal((3, 5)).astype(np.float32)
    result = cuda.transpose(machine.upload(X), np.dtype(np.float16)).to_numpy()
    np.testing.assert_array_equal(result, X.T.astype(np.float16))


def test_refuses_what_is_no_matrix(machine):
    with pytest.raises(ValueError, match=r"X of shape \(3,\) given, shape \(M, N\) wanted"):
        cuda.transpose(machine.upload(np.ones(3, np.float32)))
