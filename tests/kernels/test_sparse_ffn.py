"""Feedforward layers with CSR and block-ELL weights: compiled, against definition and dense."""

import numpy as np
import pytest

from twell_numba.device import threads
from twell_numba.device.vectors import register_lanes
from twell_numba.formats import BlockELLMatrix, CSRMatrix
from twell_numba.kernels import block_ell, csr, dense_ffn
from twell_numba.kernels.block_ell import cpu as block_ell_cpu
from twell_numba.kernels.block_ell import reference as block_ell_reference
from twell_numba.kernels.csr import cpu as csr_cpu
from twell_numba.kernels.csr import reference as csr_reference

TOLERANCE = {np.float32: 2e-6, np.float64: 1e-13}
# Strips of both families hold up to so many tokens.
STRIP = csr_cpu.STRIP_REGISTERS * register_lanes(np.dtype(np.float32))


class Family:
    """A format of weights with its compiled functions and its definition."""

    def __init__(self, name, block_size=None):
        self.name = name if block_size is None else f"{name}-{block_size}"
        self.cpu = {"csr": csr_cpu, "block_ell": block_ell_cpu}[name]
        self.reference = {"csr": csr_reference, "block_ell": block_ell_reference}[name]
        self.format = {"csr": CSRMatrix, "block_ell": BlockELLMatrix}[name]
        self.layout = {} if block_size is None else {"block_size": block_size}

    def matrix(self, dense):
        return self.format.from_dense(dense, **self.layout)

    def weights(self, rng, count, neurons, width, density, dtype=np.float64):
        """Return random matrices, whole blocks of them zero where the format has blocks."""
        b = self.layout.get("block_size", 1)
        dense = rng.standard_normal((count, neurons, width))
        keep = rng.random((count, -(-neurons // b), -(-width // b))) < density
        dense *= keep.repeat(b, axis=1).repeat(b, axis=2)[:, :neurons, :width]
        return [self.matrix(weight.astype(dtype)) for weight in dense]

    def __repr__(self):
        return self.name


CSR = Family("csr")
BLOCKS_OF_EIGHT = Family("block_ell", 8)
FAMILIES = [CSR, BLOCKS_OF_EIGHT]
FAMILIES += [Family("block_ell", block_size) for block_size in (1, 3, 12, 16, 64)]

both_families = pytest.mark.parametrize("family", FAMILIES[:2], ids=str)
both_kinds = pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrix"])


def run(module, weights, x, dy, l1_scale=0.3):
    """Return y, dx, the gradients (added to ones) and the activations."""
    name = "gated_ffn" if len(weights) == 3 else "ffn"
    y, activations = getattr(module, f"{name}_forward")(x, *weights)
    gradients = [np.ones_like(weight.stored_values) for weight in weights]
    dx = getattr(module, f"{name}_backward")(dy, x, *weights, activations, l1_scale, *gradients)
    return y, dx, gradients, activations


def assert_close(actual, wanted, tolerance):
    assert actual.dtype == wanted.dtype
    assert actual.shape == wanted.shape
    error = np.linalg.norm(actual - wanted)
    assert error <= tolerance * max(np.linalg.norm(wanted), 1e-30)


def assert_same_results(actual, wanted, tolerance):
    for first, second in zip(actual[:2], wanted[:2], strict=True):
        assert_close(first, second, tolerance)
    for first, second in zip(actual[2], wanted[2], strict=True):
        assert_close(first, second, tolerance)
    counted, expected = actual[3], wanted[3]
    assert counted.shape == expected.shape
    assert counted.nonzeros == expected.nonzeros
    assert counted.absolute_sum == pytest.approx(expected.absolute_sum, rel=10 * tolerance)
    np.testing.assert_array_equal(counted.fired, expected.fired)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, STRIP - 1, STRIP, STRIP + 1, 5 * STRIP + 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@both_kinds
@both_families
def test_against_definition(rng, family, gated, dtype, rows):
    weights = family.weights(rng, 3 if gated else 2, 45, 37, 0.2, dtype)
    x, dy = rng.standard_normal((2, rows, 37)).astype(dtype)
    wanted = run(family.reference, weights, x, dy)
    assert_same_results(run(family.cpu, weights, x, dy), wanted, TOLERANCE[dtype])
    for weight in weights:
        weight.validate()


@pytest.mark.parametrize("shape", [(1, 1), (7, 9), (8, 8), (16, 33), (70, 17), (130, 65)], ids=str)
@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
@both_kinds
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_shapes_and_densities(rng, family, density, gated, shape):
    weights = family.weights(rng, 3 if gated else 2, *shape, density)
    for rows in (1, 20):
        x, dy = rng.standard_normal((2, rows, shape[1]))
        wanted = run(family.reference, weights, x, dy)
        assert_same_results(run(family.cpu, weights, x, dy), wanted, 1e-12)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
@both_kinds
@both_families
def test_nothing_to_compute(family, gated, shape):
    weights = [family.matrix(np.zeros(shape)) for _ in range(3 if gated else 2)]
    for rows in (0, 1, 3):
        x = np.ones((rows, shape[1]))
        y, dx, _, activations = run(family.cpu, weights, x, x)
        assert y.shape == dx.shape == x.shape
        assert not y.any()
        assert not dx.any()
        assert activations.nonzeros == 0


@pytest.mark.parametrize("rows", [1, 50, 3 * STRIP])
@both_kinds
@both_families
def test_gradients_are_the_dense_ones_on_the_pattern(rng, family, gated, rows):
    weights = family.weights(rng, 3 if gated else 2, 96, 40, 0.1, np.float32)
    x, dy = rng.standard_normal((2, rows, 40)).astype(np.float32)
    y, dx, gradients, _ = run(family.cpu, weights, x, dy)
    name = "gated_ffn" if gated else "ffn"
    dense = [weight.to_dense() for weight in weights]
    dense_y, activations = getattr(dense_ffn, f"{name}_forward")(x, *dense)
    dense_gradients = [np.ones_like(weight) for weight in dense]
    dense_dx = getattr(dense_ffn, f"{name}_backward")(
        dy, x, *dense, activations, 0.3, *dense_gradients
    )
    assert_close(y, dense_y, 1e-5)
    assert_close(dx, dense_dx, 1e-5)
    for weight, gradient, wanted in zip(weights, gradients, dense_gradients, strict=True):
        stored = weight.with_values(np.ones_like(weight.stored_values)).to_dense() != 0
        assert_close(weight.with_values(gradient).to_dense(), np.where(stored, wanted, 0), 1e-5)


@pytest.mark.parametrize("rows", [1, 6])
@both_kinds
@pytest.mark.parametrize("family", [CSR, Family("block_ell", 4), BLOCKS_OF_EIGHT], ids=str)
def test_finite_differences(rng, family, gated, rows, gradient_check, away_from_kinks):
    weights = family.weights(rng, 3 if gated else 2, 30, 18, 0.4)
    x, dy = rng.standard_normal((2, rows, 18))
    # A row without entries gives 0 whatever moves: no kink to stay away from.
    dense = [weight.to_dense() for weight in weights[:2]]
    away_from_kinks(rng, x, [weight[weight.any(axis=1)] for weight in dense])
    name = "gated_ffn" if gated else "ffn"
    forward = getattr(family.cpu, f"{name}_forward")

    def loss():
        y, activations = forward(x, *weights)
        return np.sum(y * dy) + 0.3 * activations.absolute_sum

    values = [weight.stored_values for weight in weights]
    gradients = [np.zeros_like(array) for array in values]
    backward = getattr(family.cpu, f"{name}_backward")
    dx = backward(dy, x, *weights, forward(x, *weights)[1], 0.3, *gradients)
    gradient_check(loss, [x, *values], [dx, *gradients], rng)


@pytest.mark.parametrize("firing", [0.0, 0.01, 0.2])
@both_families
def test_sparse_activations(rng, family, firing):
    """Few neurons fire, so that single registers of tokens, or none, go through a neuron."""
    weights = family.weights(rng, 3, 64, 24, 0.3)
    x, dy = rng.standard_normal((2, 2 * STRIP + 5, 24))
    gate = weights[0].to_dense()
    gate[:, 0] = -100
    weights[0] = family.matrix(gate)
    x[:, 0] = np.where(rng.random(len(x)) < firing, 0, 1)
    actual = run(family.cpu, weights, x, dy)
    assert actual[3].nonzeros <= firing * 2 * actual[3].shape[0] * 64
    assert_same_results(actual, run(family.reference, weights, x, dy), 1e-12)
    for row in range(4):
        one = slice(row, row + 1)
        assert_close(family.cpu.gated_ffn_forward(x[one], *weights)[0], actual[0][one], 1e-12)


@both_kinds
@both_families
def test_same_bits_for_any_number_of_threads(rng, family, gated, monkeypatch):
    monkeypatch.setattr("twell_numba.kernels.sparse_ffn.cpu.GRAIN", 0)
    weights = family.weights(rng, 3 if gated else 2, 64, 48, 0.2, np.float32)
    x, dy = rng.standard_normal((2, 11 * STRIP + 7, 48)).astype(np.float32)
    before = threads.thread_count()
    results = []
    try:
        for count in (1, 2, 3, 3):
            threads.set_thread_count(count)
            results.append(run(family.cpu, weights, x, dy))
    finally:
        threads.set_thread_count(before)
    for y, dx, gradients, activations in results[1:]:
        assert y.tobytes() == results[0][0].tobytes()
        assert dx.tobytes() == results[0][1].tobytes()
        for gradient, first in zip(gradients, results[0][2], strict=True):
            assert gradient.tobytes() == first.tobytes()
        assert activations.absolute_sum == results[0][3].absolute_sum


@pytest.mark.parametrize("rows", [1, 9])
@both_families
def test_any_memory_layout(rng, family, rows):
    weights = family.weights(rng, 3, 33, 20, 0.3)
    x, dy = rng.standard_normal((2, rows, 20))
    wanted = run(family.reference, weights, x, dy)
    frozen = x.copy()
    frozen.flags.writeable = False
    reversed_columns = np.ascontiguousarray(x[:, ::-1])[:, ::-1]
    for given in (np.asfortranarray(x), reversed_columns, x.astype(">f8"), frozen):
        assert_same_results(run(family.cpu, weights, given, dy[::-1].copy()[::-1]), wanted, 1e-12)


@both_families
def test_read_only_weights_and_wide_indices(rng, family):
    weights = family.weights(rng, 3, 33, 20, 0.3)
    x, dy = rng.standard_normal((2, 5, 20))
    wanted = run(family.reference, weights, x, dy)
    for weight in weights:
        for name in weight.array_names:
            array = getattr(weight, name)
            if array.dtype.kind == "i":
                array = array.astype(np.int64)
            array.flags.writeable = False
            setattr(weight, name, array)
        weight.validate()
    assert_same_results(run(family.cpu, weights, x, dy), wanted, 1e-12)
    assert_close(family.cpu.gated_ffn_forward(x[:1], *weights)[0], wanted[0][:1], 1e-12)


@pytest.mark.parametrize("rows", [1, 30])
def test_padding_of_blocks_is_neither_read_nor_changed(rng, rows):
    weights = BLOCKS_OF_EIGHT.weights(rng, 3, 45, 37, 0.3)
    x, dy = rng.standard_normal((2, rows, 37))
    wanted = run(block_ell_reference, weights, x, dy)
    for weight in weights:
        weight.values[~weight.stored_places()] = np.nan
    actual = run(block_ell_cpu, weights, x, dy)
    assert_same_results(actual, wanted, 1e-12)
    for weight, gradient in zip(weights, actual[2], strict=True):
        assert (gradient[~weight.stored_places()] == 1).all()


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [1, 40])
@both_kinds
@both_families
def test_zero_weights_contribute_nothing(rng, family, gated, rows, number):
    """Whatever they meet: entries that are not stored, stored zeros, zeros inside blocks."""
    weights = family.weights(rng, 3 if gated else 2, 40, 24, 0.5)
    for weight in weights:
        weight.stored_values[rng.random(weight.stored_values.shape) < 0.3] = 0
    x, dy = rng.standard_normal((2, rows, 24))
    x[rows // 2, 5] = number
    dy[rows // 2, 7] = number
    wanted = run(family.reference, weights, x, dy)
    actual = run(family.cpu, weights, x, dy)
    assert not np.isfinite(actual[0][rows // 2]).all()
    # Not the gradients: whether 0 * NaN is added depends on which zeros of h are skipped.
    for first, second in zip(actual[:2], wanted[:2], strict=True):
        np.testing.assert_array_equal(np.isnan(first), np.isnan(second))
    others = np.arange(rows) != rows // 2
    assert np.isfinite(actual[0][others]).all()
    assert np.isfinite(actual[1][others]).all()


@both_families
def test_nan_is_kept(rng, family):
    weights = family.weights(rng, 3, 40, 24, 1.0)
    x = rng.standard_normal((40, 24))
    x[3, 2] = np.nan
    for given in (x, x[3:4]):
        y, activations = family.cpu.gated_ffn_forward(given, *weights)
        assert np.isnan(y[np.isnan(given).any(axis=1)]).all()
        assert np.isfinite(y[~np.isnan(given).any(axis=1)]).all()
        assert activations.fired.all()
        assert np.isnan(activations.absolute_sum)


@both_families
def test_stored_zeros_are_trained(rng, family):
    weights = family.weights(rng, 3, 16, 8, 1.0)
    weights[2].stored_values[...] = 0
    x, dy = rng.standard_normal((2, 10, 8))
    y, _, gradients, _ = run(family.cpu, weights, x, dy)
    assert not y.any()
    assert np.count_nonzero(gradients[2] != 1) > 100


@both_families
def test_wrong_arguments_are_refused(rng, family):
    gate, up, down = family.weights(rng, 3, 20, 8, 1.0)
    x = rng.standard_normal((3, 8))
    forward, backward = family.cpu.gated_ffn_forward, family.cpu.gated_ffn_backward
    with pytest.raises(TypeError, match="up_weight of type ndarray given"):
        forward(x, gate, up.to_dense(), down)
    with pytest.raises(ValueError, match=r"down_weight of shape \(8, 20\) given, shape \(20, 8\)"):
        forward(x, gate, up, down.T)
    with pytest.raises(TypeError, match="gate_weight of dtype float32 given beside x of float64"):
        forward(x, gate.astype(np.float32), up, down)
    with pytest.raises(ValueError, match=r"x of shape \(8,\) given"):
        forward(x[0], gate, up, down)
    with pytest.raises(TypeError, match="x of dtype int64 given"):
        forward(x.astype(int), gate, up, down)
    _, activations = forward(x, gate, up, down)
    gradients = [np.zeros_like(weight.stored_values) for weight in (gate, up, down)]
    with pytest.raises(ValueError, match=r"activations of shape \(3, 20\) given, \(2, 20\) wanted"):
        backward(x[:2], x[:2], gate, up, down, activations, 0.0, *gradients)
    with pytest.raises(TypeError, match="activations of type NoneType given"):
        backward(x, x, gate, up, down, None, 0.0, *gradients)
    with pytest.raises(ValueError, match="up_grad of shape"):
        backward(
            x, x, gate, up, down, activations, 0.0, gradients[0], np.zeros((20, 8)), gradients[2]
        )
    with pytest.raises(ValueError, match="one array given for several"):
        family.cpu.ffn_backward(x, x, up, up, activations, 0.0, gradients[1], gradients[1])
    with pytest.raises(ValueError, match="up_grad shares memory with a weight, x or dy"):
        backward(
            x, x, gate, up, down, activations, 0.0, gradients[0], up.stored_values, gradients[2]
        )
    with pytest.raises(ValueError, match="l1_scale nan given, a finite number wanted"):
        backward(x, x, gate, up, down, activations, np.nan, *gradients)
    with pytest.raises(TypeError, match="l1_scale None given, a number wanted"):
        backward(x, x, gate, up, down, activations, None, *gradients)
    assert not any(gradient.any() for gradient in gradients)


def test_weights_in_blocks_of_several_sizes_are_refused(rng):
    weights = [
        BlockELLMatrix.from_dense(dense, block_size=size)
        for dense, size in zip(rng.standard_normal((3, 8, 6)), (2, 2, 4), strict=True)
    ]
    x = rng.standard_normal((4, 6))
    with pytest.raises(ValueError, match="up_weight in blocks of 2, down_weight in blocks of 4"):
        block_ell.gated_ffn_forward(x, *weights)
    with pytest.raises(ValueError, match="one block size for all wanted"):
        block_ell.ffn_forward(x, *weights[1:])
    activations = block_ell.ffn_forward(x, *weights[:2])[1]
    gradients = [np.zeros_like(weight.stored_values) for weight in weights[1:]]
    with pytest.raises(ValueError, match="one block size for all wanted"):
        block_ell.ffn_backward(x, x, *weights[1:], activations, 0.0, *gradients)


def test_a_format_is_not_taken_for_another(rng):
    weights = CSR.weights(rng, 3, 20, 8, 0.5)
    with pytest.raises(TypeError, match="CSRMatrix given, BlockELLMatrix wanted"):
        block_ell.gated_ffn_forward(rng.standard_normal((3, 8)), *weights)
    with pytest.raises(TypeError, match="BlockELLMatrix given, CSRMatrix wanted"):
        csr.ffn_forward(rng.standard_normal((3, 8)), *BLOCKS_OF_EIGHT.weights(rng, 2, 20, 8, 0.5))


@both_families
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("tokens", [1, 5, 17, STRIP + 2])
def test_a_weight_that_is_not_finite_fires_for_real_tokens_only(rng, family, bad, tokens):
    """Where a strip is not full, 0 * inf would be one more NaN that fires."""
    weights = family.weights(rng, 3, 24, 16, 1.0, np.float32)
    weights[0].stored_values.reshape(-1)[2] = bad
    x, dy = rng.standard_normal((2, tokens, 16)).astype(np.float32)
    with np.errstate(all="ignore"):
        results = [run(module, weights, x, dy) for module in (family.cpu, family.reference)]
        counted = [family.cpu.activation_statistics(result[-1]) for result in results]
    assert counted[0][0] == counted[1][0]
    np.testing.assert_array_equal(counted[0][2], counted[1][2])
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-4, atol=1e-5)
