import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.kernels import dense_product  # noqa: E402
from twell_numba.kernels.dense_product import cuda, reference  # noqa: E402

SMALL = [(0, 3, 4), (1, 1, 1), (3, 0, 2), (5, 7, 3), (17, 33, 20)]
LARGE = [(65537, 8, 16), (1000, 256, 130), (64, 2048, 5000)]


def make(rng, rows, inputs, outputs):
    x, dx = rng.standard_normal((2, rows, inputs))
    weight, grad = rng.standard_normal((2, outputs, inputs))
    return x, weight, rng.standard_normal((rows, outputs)), grad, dx


def test_matches_the_reference(rng, machine, precision, relative_error, rounded):
    dtype, tolerance = precision
    for shape in machine.shapes(SMALL, LARGE):
        host, wide = zip(*(rounded(array, dtype) for array in make(rng, *shape)), strict=True)
        x, weight, dy, grad, dx = map(machine.upload, host)
        x64, weight64, dy64, grad64, dx64 = wide
        y = cuda.linear(x, weight)
        new_dx = cuda.linear_backward(dy, x, weight, grad)
        assert cuda.linear_backward(dy, x, weight, None, dx) is dx
        expected_dx = reference.linear_backward(dy64, x64, weight64, grad64)
        reference.linear_backward(dy64, x64, weight64, None, dx64)
        for actual, expected in (
            (y, reference.linear(x64, weight64)),
            (new_dx, expected_dx),
            (dx, dx64),
            (grad, grad64),
        ):
            assert actual.dtype == dtype
            assert relative_error(actual, expected) <= tolerance, shape


def test_gradient_in_float32_of_a_weight_in_16_bits(rng, machine, relative_error, rounded):
    dtype = np.dtype(ml_dtypes.bfloat16)
    host, wide = zip(*(rounded(array, dtype) for array in make(rng, 9, 16, 24)), strict=True)
    x, weight, dy, _, _ = map(machine.upload, host)
    grad = machine.upload(wide[3].astype(np.float32))
    cuda.linear_backward(dy, x, weight, grad)
    reference.linear_backward(wide[2], wide[0], wide[1], wide[3])
    assert relative_error(grad, wide[3]) <= 1e-5


def test_the_package_computes_where_the_arrays_are(rng, machine):
    x, weight, dy, grad, _ = make(rng, 3, 4, 5)
    expected = dense_product.linear(x, weight)
    expected_dx = dense_product.linear_backward(dy, x, weight, grad.copy())
    x, weight, dy, grad = map(machine.upload, (x, weight, dy, grad))
    np.testing.assert_allclose(dense_product.linear(x, weight).to_numpy(), expected, rtol=1e-12)
    dx = dense_product.linear_backward(dy, x, weight, grad)
    np.testing.assert_allclose(dx.to_numpy(), expected_dx, rtol=1e-12)


def test_refuses_what_does_not_fit(rng, machine):
    x, weight, dy, grad, dx = map(machine.upload, make(rng, 3, 4, 5))
    with pytest.raises(ValueError, match=r"weight of shape \(4, 5\) given, shape \(K, 4\) wanted"):
        cuda.linear(x, weight.reshape(4, 5))
    with pytest.raises(ValueError, match=r"dy of shape \(2, 5\) given, shape \(3, 5\) wanted"):
        cuda.linear_backward(dy[:2], x, weight, grad)
    with pytest.raises(TypeError, match="out of dtype float32 given, float64 wanted"):
        cuda.linear_backward(dy, x, weight, machine.upload(np.ones((5, 4), np.float32)))
    with pytest.raises(ValueError, match="out that shares memory with"):
        cuda.linear_backward(x, x, machine.upload(np.ones((4, 4))), None, x)
    with pytest.raises(ValueError, match=r"dx of shape \(2, 4\) given"):
        cuda.linear_backward(dy, x, weight, grad, dx[:2])
