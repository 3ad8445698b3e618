"""Feedforward layers of which some weights are held as 8-bit floats."""

import numpy as np
import pytest

from twell_numba.formats import CSRMatrix
from twell_numba.kernels.twell.float8_weights import Float8Weights
from twell_numba.layers import GatedFFN, TwoMatrixFFN

GATED = pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrices"])


def make_layer(rng, gated, path="auto", dtype=np.float32):
    weights = (rng.standard_normal((3, 40, 32)) * 0.2).astype(dtype)
    return GatedFFN("mlp", *weights, path) if gated else TwoMatrixFFN("mlp", *weights[:2], path)


def rounded(layer):
    """Return a layer that holds the rounded weights as arrays."""
    first, *others = [parameter.value for parameter in layer.parameters()]
    others = [Float8Weights.from_dense(weight).to_dense() for weight in others]
    return type(layer)("mlp", first, *others, path="dense")


@GATED
def test_is_the_layer_of_the_rounded_weights(rng, relative_error, gated):
    layer = make_layer(rng, gated)
    wanted = rounded(layer)
    layer.hold_float8()
    x = rng.standard_normal((9, 32)).astype(np.float32)
    y, _ = layer(x)
    assert relative_error(y, wanted(x)[0]) <= 1e-5
    assert layer.statistics.path == "twell"
    assert layer.statistics.nonzeros == wanted.statistics.nonzeros
    assert layer.auto_state.density is None  # there is nothing to choose
    for held, parameter in zip(layer.parameters(), wanted.parameters(), strict=True):
        np.testing.assert_array_equal(held.value, parameter.value)
        assert held.name == parameter.name
        assert held.shape == parameter.shape
        assert held.count_nonzero() == parameter.count_nonzero()
    assert [held.nbytes for held in layer.parameters()[1:]] == [40 * 32 + 40 * 4] * (1 + gated)
    layer.hold_float8()  # again
    np.testing.assert_array_equal(layer(x)[0], y)


@GATED
def test_a_gpu_computes_the_same(rng, machine, relative_error, gated):
    layer = make_layer(rng, gated)
    wanted = rounded(layer)
    layer.hold_float8()
    x = rng.standard_normal((3, 32)).astype(np.float32)
    for parameter in layer.parameters():
        parameter.move_to_gpu(machine.gpu.stream, np.float32)
    assert relative_error(layer(machine.upload(x))[0], wanted(x)[0]) <= 2e-3
    assert layer.statistics.nonzeros == wanted.statistics.nonzeros
    for parameter in layer.parameters():
        parameter.move_to_host()
    assert relative_error(layer(x)[0], wanted(x)[0]) <= 1e-5


@GATED
def test_weights_on_a_gpu_are_rounded_there(rng, machine, relative_error, gated):
    layer = make_layer(rng, gated)
    wanted = rounded(layer)
    for parameter in layer.parameters():
        parameter.move_to_gpu(machine.gpu.stream, np.float32)
    layer.hold_float8()
    x = rng.standard_normal((3, 32)).astype(np.float32)
    assert relative_error(layer(machine.upload(x))[0], wanted(x)[0]) <= 2e-3


@GATED
def test_refuses_to_train(rng, gated):
    layer = make_layer(rng, gated)
    layer.hold_float8()
    x = rng.standard_normal((2, 32)).astype(np.float32)
    _, backprop = layer(x)
    with pytest.raises(TypeError, match=r"mlp.\w+_proj.weight is held as 8-bit floats, for infer"):
        backprop(x)
    with pytest.raises(TypeError, match="8-bit floats"):
        layer.down.value = np.zeros((40, 32), np.float32)
    with pytest.raises(TypeError, match="8-bit floats"):
        layer.down.train_on_gpu(None, None, None)


@GATED
def test_can_be_held_otherwise_again(rng, gated):
    layer = make_layer(rng, gated, path="dense")
    wanted = rounded(layer)
    layer.hold_float8()
    assert layer.path == "auto"
    assert layer.next_path() == "twell"
    with pytest.raises(ValueError, match="'dense' given, one of auto, twell wanted for weights he"):
        layer.path = "dense"
    for weight_format in ("csr", "dense"):
        layer.hold_weights(weight_format)
        assert not layer.is_float8
        assert layer.weight_format == weight_format
    layer.path = "dense"
    for held, parameter in zip(layer.parameters(), wanted.parameters(), strict=True):
        np.testing.assert_array_equal(held.value, parameter.value)
    layer.hold_float8()
    layer.hold_fastest()
    assert layer.weight_format == "dense"


def test_weights_of_a_sparse_format_are_refused(rng):
    layer = make_layer(rng, True)
    layer.hold_weights("csr")
    assert isinstance(layer.up.operand, CSRMatrix)
    with pytest.raises(ValueError, match="weights held as csr given, dense ones wanted"):
        layer.hold_float8()
