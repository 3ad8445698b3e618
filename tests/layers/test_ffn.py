"""The feedforward layers: every path gives the same numbers and the right gradients."""

import numpy as np
import pytest

from twell_numba.formats import CSRMatrix
from twell_numba.layers.ffn import (
    AUTO_DENSITY,
    PATHS_OF_ACTIVATION,
    TOKENS_A_MEASUREMENT,
    AutoState,
    GatedFFN,
    TwoMatrixFFN,
)

NEURONS, WIDTH = 300, 16


def make_layer(rng, gated, path, dtype=np.float64, threshold=2.0, activation="relu"):
    """Return a layer of which few neurons fire when x[:, 0] is 1."""
    weights = rng.standard_normal((3, NEURONS, WIDTH)) * WIDTH**-0.5
    weights[0, :, 0] = -threshold
    gate, up, down = weights.astype(dtype)
    if gated:
        return GatedFFN("mlp", gate, up, down, path, activation)
    return TwoMatrixFFN("mlp", gate, down, path, activation)


def make_input(rng, rows, dtype=np.float64):
    x = rng.standard_normal((rows, WIDTH)).astype(dtype)
    x[:, 0] = 1
    return x


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("activation", "path"),
    [(name, path) for name, paths in PATHS_OF_ACTIVATION.items() for path in paths[1:3]],
)
@pytest.mark.parametrize("threshold", [2.0, -1.0])
def test_gradients(rng, gradient_check, away_from_kinks, gated, activation, path, threshold):
    ffn = make_layer(rng, gated, path, threshold=threshold, activation=activation)
    x, dy = make_input(rng, 9), rng.standard_normal((9, WIDTH))
    away_from_kinks(rng, x, [parameter.value for parameter in ffn.parameters()[:-1]])

    def loss():
        return np.sum(ffn(x)[0] * dy) + 0.3 * ffn.statistics.absolute_sum

    dx = ffn(x, l1_scale=0.3)[1](dy)
    parameters = ffn.parameters()
    gradient_check(
        loss,
        [x, *(parameter.value for parameter in parameters)],
        [dx, *(parameter.grad for parameter in parameters)],
        rng,
    )


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_paths_agree_in_float32(rng, gated, activation):
    x, dy = make_input(rng, 200, np.float32), make_input(rng, 200, np.float32)
    results = {}
    for path in ("dense", "twell"):
        ffn = make_layer(np.random.default_rng(1), gated, path, np.float32, activation=activation)
        y, backprop = ffn(x, l1_scale=1e-3)
        dx = backprop(dy)
        results[path] = [y, dx, *(parameter.grad for parameter in ffn.parameters())]
        assert ffn.statistics.path == path
    for twell, dense in zip(results["twell"], results["dense"], strict=True):
        assert np.linalg.norm(twell - dense) <= 1e-5 * np.linalg.norm(dense)


@pytest.mark.parametrize("path", ["dense", "twell"])
def test_statistics(rng, path):
    ffn = make_layer(rng, True, path)
    x = make_input(rng, 50)
    ffn(x)
    hidden = np.maximum(x @ ffn.gate.value.T, 0) * (x @ ffn.up.value.T)
    statistics = ffn.statistics
    assert (statistics.tokens, statistics.neurons) == (50, NEURONS)
    assert statistics.nonzeros == np.count_nonzero(hidden)
    assert statistics.absolute_sum == pytest.approx(np.abs(hidden).sum())
    np.testing.assert_array_equal(statistics.fired, hidden.any(axis=0))
    assert statistics.density == pytest.approx(np.count_nonzero(hidden) / hidden.size)


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_auto_follows_the_measured_density(rng, activation):
    x = make_input(rng, 50)
    ffn = make_layer(rng, True, "auto", activation=activation)
    assert ffn.auto_state.density is None
    paths = []
    for _ in range(2):
        ffn(x)
        paths.append(ffn.statistics.path)
    assert ffn.auto_state.density < AUTO_DENSITY
    ffn.gate.value[:, 0] = 0  # half the neurons fire now
    for _ in range(2):
        ffn(x)
        paths.append(ffn.statistics.path)
    assert ffn.auto_state.density > AUTO_DENSITY
    assert paths == ["dense", "twell", "twell", "dense"]


def test_auto_takes_the_path_of_a_density_that_was_set(rng):
    ffn = make_layer(rng, True, "auto")
    ffn.auto_state = AutoState(0.01)
    ffn(make_input(rng, 3))
    assert ffn.statistics.path == "twell"


@pytest.mark.parametrize(
    ("tokens", "width", "density", "path"),
    [
        (16384, 2048, 0.012, "twell"),
        (16384, 2048, 0.013, "dense"),
        (16384, 768, 0.009, "twell"),
        (16384, 768, 0.011, "dense"),
        (512, 16, 0.0, "dense"),  # too small to fill a GPU
        (9, 2048, 0.0, "dense"),
        (8, 16, 0.027, "twell"),  # kernels of their own
        (8, 16, 0.029, "dense"),
        (1, 16, 0.09, "twell"),
        (1, 16, 0.1, "dense"),
    ],
)
def test_auto_on_a_gpu_depends_on_the_shape(tokens, width, density, path):
    ffn = TwoMatrixFFN("mlp", *np.zeros((2, 5632, width), np.float16))
    assert ffn.next_path(tokens) == "dense"  # nothing is known
    ffn.auto_state = AutoState(density)
    assert ffn.next_path(tokens) == path


def test_silu_is_dense_and_nothing_is_measured(rng):
    ffn = make_layer(rng, True, "auto", activation="silu")
    ffn.auto_state = AutoState(0.0)
    assert ffn.next_path() == ffn.next_path(1) == "dense"
    ffn(make_input(rng, 50))
    assert ffn.auto_state == AutoState(0.0)
    assert ffn.statistics.path == "dense"
    assert ffn.statistics.density == 1


def test_squared_relu_is_dense_on_a_gpu(rng):
    ffn = make_layer(rng, True, "auto", activation="relu2")
    ffn.auto_state = AutoState(0.0)
    assert ffn.next_path() == "twell"
    assert ffn.next_path(1) == "dense"
    ffn.path = "twell"
    assert ffn.next_path() == "twell"
    with pytest.raises(ValueError, match="'twell' given for the activation relu2 on a GPU"):
        ffn.next_path(1)


def test_paths_and_formats_that_do_not_fit_the_activation_are_refused(rng):
    gate, up, down = rng.standard_normal((3, NEURONS, WIDTH))
    with pytest.raises(ValueError, match="'gelu' given, one of relu, silu, relu2 wanted"):
        GatedFFN("mlp", gate, up, down, activation="gelu")
    with pytest.raises(ValueError, match="one of auto, dense wanted for the activation silu: SiLU"):
        TwoMatrixFFN("mlp", up, down, "twell", "silu")
    sparse = [CSRMatrix.from_dense(weight) for weight in (up, down)]
    with pytest.raises(ValueError, match="'csr' given, dense wanted for the activation relu2"):
        TwoMatrixFFN("mlp", *sparse, activation="relu2")
    for activation in ("silu", "relu2"):
        ffn = GatedFFN("mlp", gate, up, down, activation=activation)
        for weight_format in ("csr", "block_ell"):
            with pytest.raises(ValueError, match="dense wanted for the activation"):
                ffn.hold_weights(weight_format)
        with pytest.raises(ValueError, match="8-bit floats asked for with the activation"):
            ffn.hold_float8()
        ffn.hold_weights("dense")
        gate[:] = 0
        ffn.hold_fastest()
        assert ffn.weight_format == "dense"
    with pytest.raises(ValueError, match="`twell sparsify` makes a ReLU model"):
        GatedFFN("mlp", gate, up, down, activation="silu").path = "twell"


def test_auto_measures_single_tokens_now_and_then(rng):
    ffn = make_layer(rng, True, "auto")
    paths = []
    ffn(make_input(rng, 1))
    ffn.gate.value[:, 0] = 9  # now every neuron fires
    for _ in range(TOKENS_A_MEASUREMENT + 1):
        ffn(make_input(rng, 1))
        paths.append(ffn.statistics.path)
    assert paths == ["twell"] * TOKENS_A_MEASUREMENT + ["dense"]


def test_no_token_leaves_the_measured_density(rng):
    ffn = make_layer(rng, True, "auto")
    ffn.auto_state = AutoState(0.25)
    y, backprop = ffn(make_input(rng, 0))
    assert y.shape == backprop(y).shape == (0, WIDTH)
    assert ffn.auto_state == AutoState(0.25)


def test_weights_of_another_byte_order_get_gradients(rng):
    weights = rng.standard_normal((3, 6, 4)).astype(np.float32)
    x = rng.standard_normal((5, 4)).astype(np.float32)
    layers = [GatedFFN("mlp", *weights), GatedFFN("mlp", *weights.astype(">f4"))]
    inputs = [layer(x)[1](x) for layer in layers]
    np.testing.assert_array_equal(*inputs)
    for ours, other in zip(*(layer.parameters() for layer in layers), strict=True):
        np.testing.assert_array_equal(ours.grad, other.grad)


def test_wrong_arguments_are_refused(rng):
    with pytest.raises(
        ValueError, match=r"gate_proj.weight of shape \(4,\) given, \(F, D\) wanted"
    ):
        GatedFFN("mlp", *np.ones((3, 4), np.float32))
    gate, up, down = rng.standard_normal((3, NEURONS, WIDTH))
    with pytest.raises(ValueError, match=r"mlp.down_proj.weight of shape \(16, 300\)"):
        GatedFFN("mlp", gate, up, down.T)
    with pytest.raises(ValueError, match="'sparse' given, one of auto, dense, twell wanted"):
        GatedFFN("mlp", gate, up, down, "sparse")
    with pytest.raises(RuntimeError, match="before its first call"):
        _ = GatedFFN("mlp", gate, up, down).statistics
