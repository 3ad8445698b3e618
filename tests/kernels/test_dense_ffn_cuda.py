"""Dense feedforward layers on a GPU, against their reference."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.kernels.activation_functions import ACTIVATIONS  # noqa: E402
from twell_numba.kernels.dense_ffn import cuda, reference  # noqa: E402

# M, D, F
SMALL = [(0, 8, 40), (1, 5, 7), (3, 16, 33), (34, 3, 9), (2, 4, 0)]
LARGE = [(65537, 8, 24), (1, 2048, 5632), (1000, 256, 1030), (257, 1, 1)]


def make(rng, rows, width, neurons, *, is_gated):
    x, dy = rng.standard_normal((2, rows, width))
    weights = rng.standard_normal((3 if is_gated else 2, neurons, width))
    # Quarters times a power of 2: what decides whether a neuron fires has no rounding error, which
    # could change its sign, and with it a whole row of the gradients.
    x = np.round(4 * x) / 4
    weights[0] = np.round(4 * weights[0]) / 4
    weights *= 2.0 ** np.round(np.log2(width**-0.5))
    gradients = rng.standard_normal(weights.shape)
    if width == neurons == 1:  # a sum over all rows into one number, of which all could cancel
        x, dy, weights, gradients = map(np.abs, (x, dy, weights, gradients))
    return x, dy, list(weights), list(gradients)


def functions(family, *, is_gated):
    name = "gated_ffn" if is_gated else "ffn"
    return getattr(family, f"{name}_forward"), getattr(family, f"{name}_backward")


@pytest.mark.parametrize("is_gated", [True, False], ids=["gated", "two_matrix"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_matches_the_reference(
    rng, machine, precision, activation, is_gated, relative_error, rounded
):
    dtype, tolerance = precision
    options = {"activation": activation}
    random = [tuple(rng.integers(1, 400, 3)) for _ in range(200)] if machine.is_real else []
    forward, backward = functions(cuda, is_gated=is_gated)
    wanted_forward, wanted_backward = functions(reference, is_gated=is_gated)
    for shape in machine.shapes(SMALL, LARGE + random):
        x, dy, weights, gradients = make(rng, *shape, is_gated=is_gated)
        (x, x64), (dy, dy64) = rounded(x, dtype), rounded(dy, dtype)
        weights, weights64 = zip(*(rounded(weight, dtype) for weight in weights), strict=True)
        gradients, grads64 = zip(*(rounded(array, dtype) for array in gradients), strict=True)
        x, dy = machine.upload(x), machine.upload(dy)
        weights = [machine.upload(weight) for weight in weights]
        gradients = [machine.upload(gradient) for gradient in gradients]
        y, activations = forward(x, *weights, **options)
        dx = backward(dy, x, *weights, activations, 0.25, *gradients, **options)
        expected_y, expected = wanted_forward(x64, *weights64, **options)
        expected_dx = wanted_backward(dy64, x64, *weights64, expected, 0.25, *grads64, **options)
        assert activations.shape == expected.shape
        # a chain of products, each rounded to 16 bits: of a few numbers many may cancel
        allowed = 3 * tolerance if dtype.itemsize == 2 and min(shape) < 16 else tolerance
        if dtype.itemsize == 2 and activation == "relu2":
            allowed = max(allowed, 1.5 * tolerance)  # what g is rounded by counts twice
        for actual, wanted in zip(
            (y, activations.hidden, dx, *gradients),
            (expected_y, expected.hidden, expected_dx, *grads64),
            strict=True,
        ):
            assert actual.dtype == dtype
            assert relative_error(actual, wanted) <= allowed, shape


def test_gradients_in_float32_of_weights_in_16_bits(rng, machine, relative_error, rounded):
    dtype = np.dtype(ml_dtypes.bfloat16)
    x, dy, weights, gradients = make(rng, 5, 8, 20, is_gated=True)
    (x, x64), (dy, dy64) = rounded(x, dtype), rounded(dy, dtype)
    weights, weights64 = zip(*(rounded(weight, dtype) for weight in weights), strict=True)
    sums = [machine.upload(gradient.astype(np.float32)) for gradient in gradients]
    weights = [machine.upload(weight) for weight in weights]
    x, dy = machine.upload(x), machine.upload(dy)
    _, activations = cuda.gated_ffn_forward(x, *weights)
    cuda.gated_ffn_backward(dy, x, *weights, activations, 0.0, *sums)
    _, expected = reference.gated_ffn_forward(x64, *weights64)
    reference.gated_ffn_backward(dy64, x64, *weights64, expected, 0.0, *gradients)
    for actual, wanted in zip(sums, gradients, strict=True):
        assert relative_error(actual, wanted) <= 5e-3


def test_l1_scale_from_the_gpu(rng, machine):
    for is_gated in (True, False):
        x, dy, weights, gradients = make(rng, 3, 8, 24, is_gated=is_gated)
        x, dy, *weights = (machine.upload(a.astype(np.float32)) for a in (x, dy, *weights))
        forward, backward = functions(cuda, is_gated=is_gated)
        _, activations = forward(x, *weights)
        results = []
        for scale in (0.375, machine.upload(np.float32([0.375])), 0.0):
            sums = [machine.upload(gradient.astype(np.float32)) for gradient in gradients]
            dx = backward(dy, x, *weights, activations, scale, *sums)
            results.append([array.to_numpy() for array in (dx, *sums)])
        for first, second in zip(*results[:2], strict=True):
            np.testing.assert_array_equal(first, second)
        assert np.any(results[0][0] != results[2][0])
        with pytest.raises(TypeError, match="l1_scale of dtype float64 given, float32 wanted"):
            backward(dy, x, *weights, activations, machine.upload(np.ones(1)), *sums)
        scale = machine.upload(np.ones(2, np.float32))
        with pytest.raises(ValueError, match=r"l1_scale of shape \(2,\) given"):
            backward(dy, x, *weights, activations, scale, *sums)


def test_statistics(rng, machine, precision):
    dtype, _ = precision
    for rows, neurons in machine.shapes(
        [(0, 3), (1, 1), (70, 9), (5, 0), (40, 72)], [(65537, 300)]
    ):
        hidden = np.maximum(rng.standard_normal((rows, neurons)), 0).astype(dtype)
        hidden[:, neurons // 2 : neurons // 2 + 1] = 0  # never fires
        on_gpu = machine.upload(hidden)
        actual = cuda.activation_statistics(cuda.DenseActivations(on_gpu, None, on_gpu))
        wide = hidden.astype(np.float64)
        wanted = reference.activation_statistics(reference.DenseActivations(wide, None, wide))
        assert actual[0] == wanted[0]
        assert actual[1] == pytest.approx(wanted[1], rel=1e-12)
        np.testing.assert_array_equal(actual[2], wanted[2])
        assert actual[2].dtype == np.bool_


@pytest.mark.parametrize("is_gated", [True, False], ids=["gated", "two_matrix"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_is_kept(rng, machine, activation, is_gated):
    forward, backward = functions(cuda, is_gated=is_gated)
    x, dy, weights, gradients = make(rng, 3, 8, 20, is_gated=is_gated)
    x[1, 2] = np.nan
    weights = [machine.upload(weight) for weight in weights]
    gradients = [machine.upload(gradient) for gradient in gradients]
    x, dy = machine.upload(x), machine.upload(dy)
    y, activations = forward(x, *weights, activation=activation)
    dx = backward(dy, x, *weights, activations, 0.1, *gradients, activation=activation)
    for array in (y, activations.hidden, dx):
        nan = np.isnan(array.to_numpy())
        assert nan.all(axis=1).tolist() == nan.any(axis=1).tolist() == [False, True, False]


def test_silu_of_numbers_of_any_size(machine):
    largest = np.finfo(np.float32).max / 4
    x = np.array([[0, -0.0, 1e-3, -1e-3, 1, -1, 20, -20, 80, -80, 1e4, -1e4, largest, -largest]])
    x = x.astype(np.float32)
    one = np.eye(x.shape[1], dtype=np.float32)
    x64, one64 = x.astype(np.float64), one.astype(np.float64)
    _, wanted = reference.ffn_forward(x64, one64, one64, "silu")
    wanted_dx = reference.ffn_backward(
        np.ones_like(x64), x64, one64, one64, wanted, 0.0, *np.zeros((2, *one.shape)), "silu"
    )
    x, dy, one, *gradients = map(
        machine.upload, (x, np.ones_like(x), one, *np.zeros((2, *one.shape), np.float32))
    )
    _, activations = cuda.ffn_forward(x, one, one, "silu")
    dx = cuda.ffn_backward(dy, x, one, one, activations, 0.0, *gradients, "silu")
    hidden = activations.hidden.to_numpy()
    np.testing.assert_allclose(hidden, wanted.hidden, rtol=1e-6, atol=1e-33)
    np.testing.assert_allclose(dx.to_numpy(), wanted_dx, rtol=1e-6, atol=1e-33)


def test_same_bits_on_every_run(rng, machine):
    rows = 3000 if machine.is_real else 12
    x, dy, weights, _ = make(rng, rows, 8, 33, is_gated=True)
    x, dy = (machine.upload(array.astype(np.float32)) for array in (x, dy))
    weights = [machine.upload(weight.astype(np.float32)) for weight in weights]
    runs = []
    for _ in range(3):
        gradients = [machine.upload(np.zeros((33, 8), np.float32)) for _ in range(3)]
        y, activations = cuda.gated_ffn_forward(x, *weights)
        dx = cuda.gated_ffn_backward(dy, x, *weights, activations, 0.1, *gradients)
        totals, _ = cuda.activation_statistics_on_gpu(activations)
        runs.append([array.to_numpy() for array in (y, dx, totals, *gradients)])
    for other in runs[1:]:
        for actual, first in zip(other, runs[0], strict=True):
            np.testing.assert_array_equal(actual, first)


def test_refuses_what_does_not_fit(rng, machine):
    x = machine.upload(np.ones((3, 8)))
    weights = [machine.upload(weight) for weight in np.ones((3, 20, 8))]
    gradients = [machine.upload(gradient) for gradient in np.ones((3, 20, 8))]
    with pytest.raises(ValueError, match="'gelu' given, one of relu, silu, relu2 wanted"):
        cuda.gated_ffn_forward(x, *weights, activation="gelu")
    with pytest.raises(ValueError, match=r"down_weight of shape \(8, 20\)"):
        cuda.gated_ffn_forward(x, *weights[:2], weights[2].reshape(8, 20))
    with pytest.raises(TypeError, match="up_weight of dtype float32 given beside x of float64"):
        cuda.ffn_forward(x, machine.upload(np.ones((20, 8), np.float32)), weights[0])
    with pytest.raises(TypeError, match="x of type ndarray given, a DeviceArray wanted"):
        cuda.ffn_forward(np.ones((3, 8)), *weights[1:])
    _, activations = cuda.gated_ffn_forward(x, *weights)
    with pytest.raises(ValueError, match=r"activations of shape \(3, 20\) given, \(2, 20\) wanted"):
        cuda.gated_ffn_backward(x[:2], x[:2], *weights, activations, 0.0, *gradients)
    with pytest.raises(TypeError, match="activations of type NoneType given"):
        cuda.gated_ffn_backward(x, x, *weights, None, 0.0, *gradients)
    with pytest.raises(ValueError, match="one array given for several of up_grad, down_grad"):
        cuda.ffn_backward(x, x, *weights[1:], activations, 0.0, gradients[0], gradients[0])
    narrow = machine.upload(np.ones((20, 8), np.float32))
    with pytest.raises(TypeError, match="up_grad of dtype float32 given, float64 wanted"):
        cuda.ffn_backward(x, x, *weights[1:], activations, 0.0, narrow, gradients[0])
    with pytest.raises(ValueError, match=r"dy of shape \(2, 8\) given, shape \(3, 8\) wanted"):
        cuda.gated_ffn_backward(x[:2], x, *weights, activations, 0.0, *gradients)
    with pytest.raises(ValueError, match="l1_scale nan given, a finite number wanted"):
        cuda.gated_ffn_backward(x, x, *weights, activations, float("nan"), *gradients)
    square = machine.upload(np.ones((20, 8)))
    _, activations = cuda.ffn_forward(square, *weights[1:])
    dy = square.copy()
    with pytest.raises(ValueError, match="up_grad that shares memory with a weight, x or dy given"):
        cuda.ffn_backward(dy, square, *weights[1:], activations, 0.0, square, gradients[0])
