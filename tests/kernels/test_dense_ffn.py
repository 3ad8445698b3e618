"""The dense feedforward kernels against their plain NumPy reference."""

import numpy as np
import pytest

from twell_numba.kernels.dense_ffn import cpu, reference

PROBLEMS = [(0, 8, 40), (1, 5, 7), (3, 16, 33), (600, 64, 130)]
TOLERANCE = {np.float32: 2e-6, np.float64: 1e-13}


def assert_close(actual, wanted, dtype):
    assert actual.dtype == dtype
    error = np.linalg.norm(actual - wanted)
    assert error <= TOLERANCE[dtype] * max(np.linalg.norm(wanted), 1e-30)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_against_reference(rng, problem, gated, dtype):
    rows, width, neurons = problem
    x, dy = rng.standard_normal((2, rows, width)).astype(dtype)
    weights = list(rng.standard_normal((3 if gated else 2, neurons, width)).astype(dtype))
    name = "gated_ffn" if gated else "ffn"
    forward, backward = f"{name}_forward", f"{name}_backward"
    y, activations = getattr(cpu, forward)(x, *weights)
    wanted_y, wanted = getattr(reference, forward)(x, *weights)
    assert_close(y, wanted_y, dtype)
    assert_close(activations.hidden, wanted.hidden, dtype)
    gradients = [np.ones_like(weight) for weight in weights]
    wanted_gradients = [np.ones_like(weight) for weight in weights]
    dx = getattr(cpu, backward)(dy, x, *weights, activations, 0.3, *gradients)
    wanted_dx = getattr(reference, backward)(dy, x, *weights, wanted, 0.3, *wanted_gradients)
    assert_close(dx, wanted_dx, dtype)
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        assert_close(gradient, wanted_gradient, dtype)


@pytest.mark.parametrize("gated", [True, False])
def test_reference_gradients(rng, gated, gradient_check, away_from_kinks):
    x, dy = rng.standard_normal((2, 6, 8))
    weights = list(rng.standard_normal((3 if gated else 2, 20, 8)))
    away_from_kinks(rng, x, weights[:2])
    forward = reference.gated_ffn_forward if gated else reference.ffn_forward
    backward = reference.gated_ffn_backward if gated else reference.ffn_backward

    def loss():
        y, activations = forward(x, *weights)
        return np.sum(y * dy) + 0.3 * np.abs(activations.hidden).sum()

    gradients = [np.zeros_like(weight) for weight in weights]
    dx = backward(dy, x, *weights, forward(x, *weights)[1], 0.3, *gradients)
    gradient_check(loss, [x, *weights], [dx, *gradients], rng)


def test_statistics(rng):
    x = rng.standard_normal((30, 8))
    weights = rng.standard_normal((3, 20, 8))
    weights[0, 4] = 0  # never fires
    activations = cpu.gated_ffn_forward(x, *weights)[1]
    nonzeros, absolute_sum, fired = cpu.activation_statistics(activations)
    wanted = reference.activation_statistics(activations)
    assert nonzeros == wanted[0]
    assert absolute_sum == pytest.approx(wanted[1], rel=1e-12)
    np.testing.assert_array_equal(fired, wanted[2])
    assert not fired[4]


def test_nan_is_kept(rng):
    x = rng.standard_normal((3, 8))
    x[1, 2] = np.nan
    weights = rng.standard_normal((3, 20, 8))
    y, activations = cpu.gated_ffn_forward(x, *weights)
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2]]).all()
    assert np.isnan(activations.hidden[1]).all()


def test_wrong_arguments_are_refused(rng):
    x = rng.standard_normal((3, 8))
    weights = rng.standard_normal((3, 20, 8))
    with pytest.raises(ValueError, match=r"down_weight of shape \(8, 20\)"):
        cpu.gated_ffn_forward(x, weights[0], weights[1], weights[2].T)
    gradients = np.zeros((3, 20, 8))
    _, activations = cpu.gated_ffn_forward(x, *weights)
    with pytest.raises(ValueError, match=r"activations of shape \(3, 20\) given, \(2, 20\) wanted"):
        cpu.gated_ffn_backward(x[:2], x[:2], *weights, activations, 0.0, *gradients)
    with pytest.raises(TypeError, match="activations of type NoneType given"):
        cpu.gated_ffn_backward(x, x, *weights, None, 0.0, *gradients)
    with pytest.raises(ValueError, match="one array given for several"):
        cpu.ffn_backward(x, x, *weights[1:], activations, 0.0, gradients[0], gradients[0])
    with pytest.raises(TypeError, match="float32 or float64 wanted"):
        cpu.ffn_forward(x.astype(int), weights[0], weights[1])
