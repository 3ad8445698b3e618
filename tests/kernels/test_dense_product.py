import numpy as np
import pytest

from twell_numba.kernels.dense_product import cpu, reference

SHAPES = [(0, 3, 4), (1, 1, 1), (3, 0, 2), (5, 7, 3), (200, 130, 90)]


def make(rng, rows, inputs, outputs, dtype):
    x, dx = rng.standard_normal((2, rows, inputs)).astype(dtype)
    weight, grad = rng.standard_normal((2, outputs, inputs)).astype(dtype)
    return x, weight, rng.standard_normal((rows, outputs)).astype(dtype), grad, dx


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-13)])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_reference(rng, shape, dtype, tolerance):
    x, weight, dy, grad, dx = make(rng, *shape, dtype)
    x64, weight64, dy64, grad64, dx64 = (a.astype(np.float64) for a in (x, weight, dy, grad, dx))
    expected_dx = reference.linear_backward(dy64, x64, weight64, grad64)
    reference.linear_backward(dy64, x64, weight64, None, dx64)
    y = cpu.linear(x, weight)
    new_dx = cpu.linear_backward(dy, x, weight, grad)
    assert cpu.linear_backward(dy, x, weight, None, dx) is dx
    for actual, expected in (
        (y, reference.linear(x64, weight64)),
        (new_dx, expected_dx),
        (dx, dx64),
        (grad, grad64),
    ):
        assert actual.dtype == dtype
        largest = np.abs(expected).max(initial=0)
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * largest)


def test_reference_gradient(rng, gradient_check):
    x, weight, dy, grad, _ = make(rng, 4, 3, 5, np.float64)
    grad[...] = 0
    dx = reference.linear_backward(dy, x, weight, grad)
    gradient_check(lambda: np.sum(dy * reference.linear(x, weight)), [x, weight], [dx, grad], rng)


def test_refuses_what_does_not_fit(rng):
    x, weight, dy, grad, dx = make(rng, 3, 4, 5, np.float64)
    with pytest.raises(ValueError, match=r"weight of shape \(5, 4\) given, shape \(K, 3\) wanted"):
        cpu.linear(x[:, :3], weight)
    with pytest.raises(ValueError, match=r"dy of shape \(2, 5\) given, shape \(3, 5\) wanted"):
        cpu.linear_backward(dy[:2], x, weight, grad)
    with pytest.raises(TypeError, match="weight_grad of float32 given, float64 wanted"):
        cpu.linear_backward(dy, x, weight, grad.astype(np.float32))
    with pytest.raises(ValueError, match="dx is changed in place"):
        cpu.linear_backward(dy, x, weight, grad, np.asfortranarray(dx))
