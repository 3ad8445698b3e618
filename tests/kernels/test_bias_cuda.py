"""The bias of a linear layer on a GPU, against its reference."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.kernels.bias import cuda, reference  # noqa: E402

SMALL = [(0, 3), (1, 1), (2, 0), (3, 8), (33, 9), (70, 16)]
LARGE = [(65537, 33), (1, 65537), (16384, 2048), (129, 1)]


def test_matches_the_reference(rng, machine, precision, relative_error, rounded):
    dtype, tolerance = precision
    for rows, width in machine.shapes(SMALL, LARGE):
        (y, y64), (dy, dy64) = (
            rounded(rng.standard_normal((rows, width)), dtype) for _ in range(2)
        )
        (bias, bias64), (grad, grad64) = (
            rounded(rng.standard_normal(width), dtype) for _ in range(2)
        )
        y, dy, bias, grad = map(machine.upload, (y, dy, bias, grad))
        cuda.add_bias(y, bias)
        cuda.bias_backward(dy, grad)
        reference.add_bias(y64, bias64)
        reference.bias_backward(dy64, grad64)
        assert y.dtype == grad.dtype == dtype
        assert relative_error(y, y64) <= tolerance
        assert relative_error(grad, grad64, np.sqrt(rows) + np.abs(grad64)) <= tolerance


def test_gradient_in_float32_of_numbers_in_16_bits(rng, machine, relative_error, rounded):
    dy, dy64 = rounded(rng.standard_normal((40, 8)), np.dtype(ml_dtypes.bfloat16))
    grad, wanted = machine.upload(np.ones(8, np.float32)), np.ones(8)
    cuda.bias_backward(machine.upload(dy), grad)
    reference.bias_backward(dy64, wanted)
    assert grad.dtype == np.float32
    assert relative_error(grad, wanted) <= 1e-6


def test_same_bits_on_every_run(rng, machine):
    rows = 70000 if machine.is_real else 100
    dy = machine.upload(rng.standard_normal((rows, 24)).astype(np.float32))
    runs = []
    for _ in range(3):
        runs.append(machine.upload(np.zeros(24, np.float32)))
        cuda.bias_backward(dy, runs[-1])
    for other in runs[1:]:
        np.testing.assert_array_equal(other.to_numpy(), runs[0].to_numpy())


def test_a_nan_stays_in_its_column(rng, machine):
    for width in (5, 16):
        y = rng.standard_normal((40, width))
        y[35, 1] = np.nan
        y, grad = machine.upload(y), machine.upload(np.zeros(width))
        cuda.bias_backward(y, grad)
        assert np.flatnonzero(np.isnan(grad.to_numpy())).tolist() == [1]
        cuda.add_bias(y, machine.upload(np.ones(width)))
        assert np.argwhere(np.isnan(y.to_numpy())).tolist() == [[35, 1]]


def test_refuses_what_does_not_fit(machine):
    y = machine.upload(np.ones((2, 3), np.float32))
    bias = machine.upload(np.ones(3, np.float32))
    with pytest.raises(TypeError, match="bias of type ndarray given, a DeviceArray wanted"):
        cuda.add_bias(y, np.ones(3, np.float32))
    with pytest.raises(TypeError, match="bias of dtype float64 given beside y of float32"):
        cuda.add_bias(y, machine.upload(np.ones(3)))
    with pytest.raises(ValueError, match=r"bias of shape \(2,\) given, shape \(3,\) wanted"):
        cuda.add_bias(y, machine.upload(np.ones(2, np.float32)))
    with pytest.raises(ValueError, match=r"y of shape \(3,\) given"):
        cuda.add_bias(bias, bias)
    with pytest.raises(TypeError, match="bias_grad of dtype float64 given, float32 wanted"):
        cuda.bias_backward(y, machine.upload(np.ones(3)))
    with pytest.raises(ValueError, match=r"bias_grad of shape \(2,\) given"):
        cuda.bias_backward(y, machine.upload(np.ones(2, np.float32)))
