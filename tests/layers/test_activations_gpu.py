"""Layers with SiLU, squared ReLU and biases on a GPU, against the CPU."""

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.layers import GatedFFN, Linear, TwoMatrixFFN  # noqa: E402


def move(layer, machine):
    for parameter in layer.parameters():
        parameter.move_to_gpu(machine.gpu.stream, np.float64)


def run(layer, x, dy, **options):
    """Return everything that a layer computes, in the host's memory."""
    y, backprop = layer(x, **options)
    results = [y, backprop(dy), *(parameter.grad for parameter in layer.parameters())]
    return [array if isinstance(array, np.ndarray) else array.to_numpy() for array in results]


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrix"])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_feedforward_layers(rng, machine, activation, gated):
    weights = rng.standard_normal((3 if gated else 2, 9, 5))
    x, dy = rng.standard_normal((2, 3, 5))
    ffn = (GatedFFN if gated else TwoMatrixFFN)("mlp", *weights, activation=activation)
    wanted = run(ffn, x, dy, l1_scale=0.25)
    counted = ffn.statistics
    move(ffn, machine)
    for actual, expected in zip(
        run(ffn, machine.upload(x), machine.upload(dy), l1_scale=0.25), wanted, strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)
    assert ffn.statistics.path == "dense"
    assert ffn.statistics.nonzeros == counted.nonzeros
    assert ffn.statistics.absolute_sum == pytest.approx(counted.absolute_sum)


def test_squared_relu_has_no_sparse_path(rng, machine):
    ffn = TwoMatrixFFN("mlp", *rng.standard_normal((2, 9, 5)), "twell", "relu2")
    move(ffn, machine)
    with pytest.raises(ValueError, match="'twell' given for the activation relu2 on a GPU"):
        ffn(machine.upload(rng.standard_normal((3, 5))))


def test_a_linear_layer_with_a_bias(rng, machine):
    layer = Linear("proj.weight", rng.standard_normal((4, 3)), rng.standard_normal(4))
    x, dy = rng.standard_normal((5, 3)), rng.standard_normal((5, 4))
    wanted = run(layer, x, dy)
    move(layer, machine)
    for actual, expected in zip(
        run(layer, machine.upload(x), machine.upload(dy)), wanted, strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-10)
