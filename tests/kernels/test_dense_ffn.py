"""The dense feedforward kernels against their plain NumPy reference."""

import numpy as np
import pytest

from twell_numba.device import set_thread_count, thread_count
from twell_numba.device.few_rows import FEW_ROWS
from twell_numba.kernels.activation_functions import ACTIVATIONS
from twell_numba.kernels.dense_ffn import cpu, reference
from twell_numba.kernels.twell import cpu as twell

PROBLEMS = [
    *((0, 8, 40), (1, 5, 7), (2, 4, 0), (3, 16, 33), (1, 40, 260), (2, 17, 300), (600, 64, 130)),
    *((FEW_ROWS, 24, 129), (FEW_ROWS + 1, 24, 129)),
]
TOLERANCE = {np.float32: 2e-6, np.float64: 1e-13}

every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
gated_or_not = pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrix"])


def functions(family, gated):
    name = "gated_ffn" if gated else "ffn"
    return getattr(family, f"{name}_forward"), getattr(family, f"{name}_backward")


def assert_close(actual, wanted, dtype):
    assert actual.dtype == dtype
    error = np.linalg.norm(actual - wanted)
    assert error <= TOLERANCE[dtype] * max(np.linalg.norm(wanted), 1e-30)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@gated_or_not
@every_activation
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_against_reference(rng, problem, activation, gated, dtype):
    rows, width, neurons = problem
    x, dy = rng.standard_normal((2, rows, width)).astype(dtype)
    weights = list(rng.standard_normal((3 if gated else 2, neurons, width)).astype(dtype))
    forward, backward = functions(cpu, gated)
    wanted_forward, wanted_backward = functions(reference, gated)
    y, activations = forward(x, *weights, activation=activation)
    wanted_y, wanted = wanted_forward(x, *weights, activation=activation)
    assert_close(y, wanted_y, dtype)
    assert_close(activations.hidden, wanted.hidden, dtype)
    gradients = [np.ones_like(weight) for weight in weights]
    wanted_gradients = [np.ones_like(weight) for weight in weights]
    options = {"activation": activation}
    dx = backward(dy, x, *weights, activations, 0.3, *gradients, **options)
    wanted_dx = wanted_backward(dy, x, *weights, wanted, 0.3, *wanted_gradients, **options)
    assert_close(dx, wanted_dx, dtype)
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        assert_close(gradient, wanted_gradient, dtype)


@gated_or_not
@every_activation
def test_reference_gradients(rng, activation, gated, gradient_check, away_from_kinks):
    x, dy = rng.standard_normal((2, 6, 8))
    weights = list(rng.standard_normal((3 if gated else 2, 20, 8)))
    away_from_kinks(rng, x, weights[:2])
    forward, backward = functions(reference, gated)

    def loss():
        y, activations = forward(x, *weights, activation=activation)
        return np.sum(y * dy) + 0.3 * np.abs(activations.hidden).sum()

    gradients = [np.zeros_like(weight) for weight in weights]
    _, activations = forward(x, *weights, activation=activation)
    dx = backward(dy, x, *weights, activations, 0.3, *gradients, activation=activation)
    gradient_check(loss, [x, *weights], [dx, *gradients], rng)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_silu_of_numbers_of_any_size(dtype):
    from scipy.special import expit

    largest = np.finfo(dtype).max / 4
    x = np.array([[0, -0.0, 1e-3, -1e-3, 1, -1, 20, -20, 80, -80, 1e4, -1e4, largest, -largest]])
    x = x.astype(dtype)
    x = np.repeat(x, 2, axis=1)  # enough for a vector, and for what is left beside it
    one = np.eye(x.shape[1], dtype=dtype)
    _, activations = cpu.ffn_forward(x, one, one, activation="silu")
    wide = x.astype(np.float64)
    wanted = wide * expit(wide)
    np.testing.assert_allclose(activations.hidden, wanted, rtol=1e-6, atol=1e-33)
    _, (_, _, of_reference) = reference.ffn_forward(wide, one, one, activation="silu")
    np.testing.assert_allclose(of_reference, wanted, rtol=1e-13)
    # its derivative, from dh = 1
    dx = cpu.ffn_backward(
        np.ones_like(x), x, one, one, activations, 0.0, *np.zeros((2, *one.shape), dtype),
        activation="silu",
    )  # fmt: skip
    slope = expit(wide) * (1 + wide * expit(-wide))
    np.testing.assert_allclose(dx, slope, rtol=1e-6, atol=1e-33)


@gated_or_not
@every_activation
def test_a_row_of_few_depends_on_no_other(rng, activation, gated):
    x = rng.standard_normal((FEW_ROWS, 21)).astype(np.float32)
    weights = list(rng.standard_normal((3 if gated else 2, 301, 21)).astype(np.float32))
    forward, _ = functions(cpu, gated)
    whole, _ = forward(x, *weights, activation=activation)
    for rows in (slice(1), slice(3, 5), slice(2, FEW_ROWS)):
        part, _ = forward(x[rows], *weights, activation=activation)
        np.testing.assert_array_equal(part, whole[rows])


@gated_or_not
def test_few_rows_give_the_same_bits_with_any_number_of_threads(rng, gated):
    x = rng.standard_normal((3, 600)).astype(np.float32)
    weights = list(rng.standard_normal((3 if gated else 2, 2000, 600)).astype(np.float32))
    threads, results = thread_count(), []
    try:
        for count in (1, 3):
            set_thread_count(count)
            results.append(functions(cpu, gated)[0](x, *weights)[0])
    finally:
        set_thread_count(threads)
    np.testing.assert_array_equal(*results)


@every_activation
def test_takes_any_arrangement(rng, activation):
    x, weights = rng.standard_normal((5, 8)), list(rng.standard_normal((3, 20, 8)))
    wanted, _ = cpu.gated_ffn_forward(x, *weights, activation=activation)
    arranged = [np.asfortranarray(weights[0]), weights[1][::-1, ::-1], weights[2].astype(">f8")]
    arranged[1] = arranged[1][::-1, ::-1]
    y, _ = cpu.gated_ffn_forward(np.repeat(x, 2, 0)[::2], *arranged, activation=activation)
    np.testing.assert_allclose(y, wanted, rtol=1e-12)


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


@pytest.mark.parametrize("rows", [3, FEW_ROWS + 3])
@gated_or_not
@every_activation
def test_nan_is_kept(rng, activation, gated, rows):
    x, dy = rng.standard_normal((2, rows, 8))
    x[1, 2] = np.nan
    weights = rng.standard_normal((3 if gated else 2, 20, 8))
    gradients = np.zeros_like(weights)
    forward, backward = functions(cpu, gated)
    y, activations = forward(x, *weights, activation=activation)
    dx = backward(dy, x, *weights, activations, 0.1, *gradients, activation=activation)
    for array in (y, activations.hidden, dx):
        assert np.isnan(array[1]).all()
        assert np.isfinite(np.delete(array, 1, axis=0)).all()


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_nothing_of_a_neuron_that_is_cut_off_counts(activation):
    x = np.array([[1.0, np.nan]])
    gate, up, down = np.array([[[-1.0, 0.0]], [[0.0, 1.0]], [[1.0, 1.0]]])
    with np.errstate(invalid="ignore"):
        x[0, 1] = np.inf
        gate[0, 1] = -1.0
        up[0, 1] = 0.0  # inf * 0
        y, activations = cpu.gated_ffn_forward(x, gate, up, down, activation=activation)
    np.testing.assert_array_equal(activations.hidden, 0)
    np.testing.assert_array_equal(y, 0)


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
    for name, weight in (("gate_grad", 0), ("up_grad", 1), ("down_grad", 2)):
        given = {"gate_grad": gradients[0], "up_grad": gradients[1], "down_grad": gradients[2]}
        given[name] = weights[weight]
        for kernels in (cpu, twell):
            _, kept = kernels.gated_ffn_forward(x, *weights)
            with pytest.raises(ValueError, match=f"{name} shares memory with a weight, x or dy"):
                kernels.gated_ffn_backward(x, x, *weights, kept, 0.0, *given.values())
    with pytest.raises(ValueError, match="one array given for several"):
        cpu.ffn_backward(x, x, *weights[1:], activations, 0.0, gradients[0], gradients[0])
    with pytest.raises(ValueError, match="'gelu' given, one of relu, silu, relu2 wanted"):
        cpu.ffn_forward(x, *weights[1:], activation="gelu")
    with pytest.raises(ValueError, match="'gelu' given"):
        cpu.gated_ffn_backward(x, x, *weights, activations, 0.0, *gradients, activation="gelu")
    with pytest.raises(TypeError, match="float32 or float64 wanted"):
        cpu.ffn_forward(x.astype(int), weights[0], weights[1])
