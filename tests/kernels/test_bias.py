"""The bias of a linear layer, against its reference."""

import numpy as np
import pytest

from twell_numba.device import set_thread_count, thread_count
from twell_numba.kernels.bias import cpu, reference

SHAPES = [(0, 3), (1, 1), (2, 0), (3, 5), (64, 7), (65, 100), (700, 1001)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-13)])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_matches_the_reference(rng, rows, width, dtype, tolerance):
    y, dy = rng.standard_normal((2, rows, width)).astype(dtype)
    bias, grad = rng.standard_normal((2, width)).astype(dtype)
    wanted_y, wanted_grad = y.copy(), grad.astype(np.float64)
    cpu.add_bias(y, bias)
    cpu.bias_backward(dy, grad)
    reference.add_bias(wanted_y, bias)
    reference.bias_backward(dy.astype(np.float64), wanted_grad)
    np.testing.assert_array_equal(y, wanted_y)
    assert grad.dtype == dtype
    scale = np.sqrt(max(rows, 1))
    np.testing.assert_allclose(grad, wanted_grad, rtol=tolerance, atol=tolerance * scale)


def test_gradient_takes_any_arrangement(rng):
    dy = rng.standard_normal((70, 6))
    wanted = np.zeros(6)
    reference.bias_backward(dy, wanted)
    for arranged in (np.asfortranarray(dy), np.repeat(dy, 2, 0)[::2], dy.astype(">f8")):
        grad = np.zeros(6)
        cpu.bias_backward(arranged, grad)
        np.testing.assert_allclose(grad, wanted, rtol=1e-13)


def test_same_bits_with_any_number_of_threads(rng):
    dy = rng.standard_normal((3000, 700)).astype(np.float32)
    threads, results = thread_count(), []
    try:
        for count in (1, 3):
            set_thread_count(count)
            grad = np.zeros(700, np.float32)
            cpu.bias_backward(dy, grad)
            results.append(grad)
    finally:
        set_thread_count(threads)
    np.testing.assert_array_equal(*results)


def test_a_nan_stays_in_its_column(rng):
    y = rng.standard_normal((5, 4))
    y[2, 1] = np.nan
    grad = np.zeros(4)
    cpu.bias_backward(y, grad)
    assert np.isnan(grad).tolist() == [False, True, False, False]
    cpu.add_bias(y, np.ones(4))
    assert np.isnan(y).sum() == 1


def test_wrong_arguments_are_refused():
    y, bias = np.ones((2, 3)), np.ones(3)
    with pytest.raises(ValueError, match=r"y of shape \(2, 3\) given, shape \(M, 4\) wanted"):
        cpu.add_bias(y, np.ones(4))
    with pytest.raises(TypeError, match="y of float32 given, float64 wanted"):
        cpu.add_bias(y.astype(np.float32), bias)
    with pytest.raises(ValueError, match="y is changed in place: a C-contiguous"):
        cpu.add_bias(np.ones((3, 2)).T, bias)
    with pytest.raises(TypeError, match="bias of dtype int64 given, float32 or float64 wanted"):
        cpu.add_bias(y, np.ones(3, int))
    with pytest.raises(ValueError, match=r"bias_grad of shape \(2,\) given, shape \(3,\) wanted"):
        cpu.bias_backward(y, np.ones(2))
    with pytest.raises(ValueError, match="dy of shape"):
        cpu.bias_backward(bias, bias)
