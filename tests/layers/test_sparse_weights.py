"""Feedforward layers of which the weights are held in a sparse format."""

import itertools

import numpy as np
import pytest

from twell_numba.formats import BlockELLMatrix, CSRMatrix
from twell_numba.layers import GatedFFN, SparseParameter, TwoMatrixFFN
from twell_numba.layers import ffn as ffn_module
from twell_numba.layers.ffn import (
    BLOCK_ELL_DENSITY,
    CSR_DENSITY,
    PATHS_OF_FORMAT,
    fastest_format,
    stored_in_blocks,
)

# Neither is a multiple of the block sizes used below.
NEURONS, WIDTH = 77, 21
BLOCK_SIZE = 4
FORMATS = ["csr", "block_ell"]
PARTS = {True: ("gate", "up", "down"), False: ("up", "down")}


def sparse_arrays(rng, count, dtype=np.float64, block_size=1, density=0.2):
    """Return arrays (F, D) of which a fraction of the entries, or of the blocks, is not zero."""
    block_shape = (-(-NEURONS // block_size), -(-WIDTH // block_size))
    arrays = []
    for _ in range(count):
        kept = np.kron(rng.random(block_shape) < density, np.ones((block_size, block_size)))
        values = rng.standard_normal((NEURONS, WIDTH)) * 0.5
        arrays.append((values * kept[:NEURONS, :WIDTH]).astype(dtype))
    return arrays


def make_layer(rng, gated, dtype=np.float64, path="auto", block_size=1, density=0.2):
    arrays = sparse_arrays(rng, 2 + gated, dtype, block_size, density)
    layer = GatedFFN if gated else TwoMatrixFFN
    return layer("mlp", *arrays, path=path)


def dense_copies(ffn):
    return [np.array(p.matrix.to_dense()) for p in ffn.parameters()]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 9, 31, 33])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_numbers_are_those_of_the_dense_path(rng, weight_format, gated, rows):
    """Output, input gradient and the weights' gradients at the entries that are stored."""
    ffn = make_layer(rng, gated, np.float32)
    dense = make_layer(np.random.default_rng(0), gated, np.float32, "dense")
    for name in PARTS[gated]:
        getattr(dense, name).value = getattr(ffn, name).value
    ffn.hold_weights(weight_format, BLOCK_SIZE)
    x, dy = rng.standard_normal((2, rows, WIDTH)).astype(np.float32)
    results = {}
    for layer in (ffn, dense):
        y, backprop = layer(x, l1_scale=1e-2)
        results[layer] = [y, backprop(dy)]
    for name in PARTS[gated]:
        sparse, reference = getattr(ffn, name), getattr(dense, name)
        at_entries = sparse.matrix.with_values(sparse.grad).to_dense()
        stored = sparse.matrix.with_values(np.ones_like(sparse.value)).to_dense()
        results[ffn].append(at_entries)
        results[dense].append(reference.grad * stored)
        if weight_format == "block_ell":
            padding = ~sparse.matrix.stored_places()
            assert padding.any()
            np.testing.assert_array_equal(sparse.grad[padding], 0)
    for ours, theirs in zip(results[ffn], results[dense], strict=True):
        assert ours.dtype == np.float32
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)
    assert ffn.statistics.path == weight_format
    assert ffn.statistics.nonzeros == dense.statistics.nonzeros
    assert ffn.statistics.absolute_sum == pytest.approx(dense.statistics.absolute_sum, rel=1e-5)
    np.testing.assert_array_equal(ffn.statistics.fired, dense.statistics.fired)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_gradients(rng, gradient_check, away_from_kinks, weight_format, gated):
    ffn = make_layer(rng, gated, density=0.9)  # so that no neuron sees x only through zeros
    x, dy = rng.standard_normal((2, 9, WIDTH))
    away_from_kinks(rng, x, [parameter.value for parameter in ffn.parameters()[:-1]])
    ffn.hold_weights(weight_format, BLOCK_SIZE)

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


@pytest.mark.parametrize("weight_format", FORMATS)
def test_gradients_add_up_and_are_the_same_bits_every_run(rng, weight_format):
    ffn = make_layer(rng, True, np.float32)
    ffn.hold_weights(weight_format, BLOCK_SIZE)
    x, dy = rng.standard_normal((2, 65, WIDTH)).astype(np.float32)
    runs = []
    for _ in range(3):
        for parameter in ffn.parameters():
            parameter.zero_grad()
        dx = ffn(x)[1](dy)
        runs.append([dx, *(parameter.grad.copy() for parameter in ffn.parameters())])
    for first, other in itertools.product(runs[:1], runs[1:]):
        for ours, theirs in zip(first, other, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    ffn(x)[1](dy)
    for once, parameter in zip(runs[0][1:], ffn.parameters(), strict=True):
        np.testing.assert_allclose(parameter.grad, 2 * once, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_layer_without_any_weight(rng, weight_format, gated):
    ffn = make_layer(rng, gated, density=0)
    ffn.hold_weights(weight_format, BLOCK_SIZE)
    x, dy = rng.standard_normal((2, 5, WIDTH))
    y, backprop = ffn(x)
    np.testing.assert_array_equal(y, 0)
    np.testing.assert_array_equal(backprop(dy), 0)
    assert all(not parameter.grad.any() for parameter in ffn.parameters())
    assert ffn.statistics.nonzeros == ffn.weight_density == 0


@pytest.mark.parametrize("weight_format", FORMATS)
def test_nan_is_not_hidden(rng, weight_format):
    ffn = make_layer(rng, True, density=1.0)
    ffn.hold_weights(weight_format, BLOCK_SIZE)
    x = rng.standard_normal((3, WIDTH))
    x[1, 2] = np.nan
    y, _ = ffn(x)
    assert np.isfinite(y[[0, 2]]).all()
    assert np.isnan(y[1]).all()


@pytest.mark.parametrize("gated", [True, False])
def test_weights_are_held_in_every_format_and_back(rng, gated):
    ffn = make_layer(rng, gated)
    original = {name: getattr(ffn, name).value for name in PARTS[gated]}
    names = [parameter.name for parameter in ffn.parameters()]
    for weight_format in ("csr", "block_ell", "csr", "dense", "block_ell", "dense"):
        ffn.hold_weights(weight_format, BLOCK_SIZE)
        assert ffn.weight_format == weight_format
        assert ffn.parameters() == [getattr(ffn, name) for name in PARTS[gated]]
        assert [parameter.name for parameter in ffn.parameters()] == names
        for name, dense in original.items():
            parameter = getattr(ffn, name)
            assert parameter.shape == dense.shape
            assert parameter.size == dense.size
            assert parameter.count_nonzero() == np.count_nonzero(dense)
            assert parameter.decay
            assert parameter.grad is None
            held = parameter.value if weight_format == "dense" else parameter.matrix.to_dense()
            np.testing.assert_array_equal(held, dense)
            if weight_format == "csr":
                assert parameter.value.shape == (np.count_nonzero(dense),)
    assert ffn.weight_density == pytest.approx(
        np.mean([np.count_nonzero(dense) / dense.size for dense in original.values()])
    )


def test_weights_held_so_already_are_left_alone(rng):
    ffn = make_layer(rng, True)
    before = ffn.parameters()
    ffn.hold_weights("dense")
    assert ffn.parameters() == before
    ffn.hold_weights("block_ell", BLOCK_SIZE)
    ffn.up.value[0, 0] = 0
    before = ffn.parameters()
    ffn.hold_weights("block_ell", BLOCK_SIZE)
    assert ffn.parameters() == before
    ffn.hold_weights("block_ell", 3)
    assert {parameter.matrix.block_size for parameter in ffn.parameters()} == {3}


def test_matrices_are_held_without_a_copy(rng):
    for cls, layout in ((CSRMatrix, {}), (BlockELLMatrix, {"block_size": 4})):
        up, down = (cls.from_dense(array, **layout) for array in sparse_arrays(rng, 2))
        ffn = TwoMatrixFFN("mlp", up, down)
        assert ffn.up.operand is ffn.up.matrix is up
        assert ffn.down.value is down.stored_values
        assert ffn.up.nbytes == up.nbytes
        ffn.down.value *= 2  # in place, as an optimizer does
        assert ffn.down.matrix is down


def test_a_sparse_parameter_takes_other_values(rng):
    matrix = CSRMatrix.from_dense(sparse_arrays(rng, 1)[0])
    parameter = SparseParameter("weight", matrix)
    parameter.value = np.arange(matrix.nnz, dtype=np.float64)
    np.testing.assert_array_equal(parameter.matrix.data, np.arange(matrix.nnz))
    assert parameter.matrix.indices is matrix.indices
    assert parameter.count_nonzero() == matrix.nnz - 1
    with pytest.raises(ValueError, match="values of shape"):
        parameter.value = np.zeros(3)
    assert repr(parameter).startswith("SparseParameter('weight', shape=(77, 21)")


@pytest.mark.parametrize("weight_format", PATHS_OF_FORMAT)
def test_paths_are_those_of_the_format(rng, weight_format):
    ffn = make_layer(rng, True)
    ffn.hold_weights(weight_format, BLOCK_SIZE)
    for path in ffn_module.PATHS:
        if path in PATHS_OF_FORMAT[weight_format]:
            ffn.path = path
            ffn(np.zeros((1, WIDTH)))
            assert ffn.statistics.path == (path if path != "auto" else ffn.statistics.path)
        else:
            with pytest.raises(ValueError, match=f"'{path}' given.*held as {weight_format}; hold_"):
                ffn.path = path


def test_a_path_that_no_longer_fits_becomes_auto(rng):
    ffn = make_layer(rng, True, path="twell")
    ffn.hold_weights("csr")
    assert ffn.path == "auto"
    ffn.path = "csr"
    ffn.hold_weights("csr")
    assert ffn.path == "csr"
    ffn.hold_weights("dense")
    assert ffn.path == "auto"


def test_wrong_formats_are_refused(rng):
    ffn = make_layer(rng, True)
    with pytest.raises(ValueError, match="'coo' given, one of dense, csr, block_ell wanted"):
        ffn.hold_weights("coo")
    for block_size in (0, WIDTH + 1):
        with pytest.raises(ValueError, match=f"block_size {block_size} given, 1 to 21 wanted"):
            ffn.hold_weights("block_ell", block_size)
    assert ffn.weight_format == "dense"
    up, down = sparse_arrays(rng, 2)
    with pytest.raises(ValueError, match="down_proj.weight held as csr given beside"):
        TwoMatrixFFN("mlp", up, CSRMatrix.from_dense(down))
    blocks = [BlockELLMatrix.from_dense(up, block_size=size) for size in (2, 4)]
    with pytest.raises(ValueError, match="blocks of 4 given beside .* blocks of 2"):
        TwoMatrixFFN("mlp", *blocks)
    with pytest.raises(ValueError, match=r"down_proj.weight of shape \(21, 77\)"):
        TwoMatrixFFN("mlp", CSRMatrix.from_dense(up), CSRMatrix.from_dense(down.T))
    with pytest.raises(ValueError, match="'twell' given, one of auto, csr wanted"):
        TwoMatrixFFN("mlp", CSRMatrix.from_dense(up), CSRMatrix.from_dense(down), "twell")


def blocks_of(share, rng):
    """Return an array of which a share of the 4 x 4 blocks is full."""
    full = rng.random((32, 32)) < share
    return np.kron(full, np.ones((4, 4), np.float32))


def test_the_fastest_format_follows_the_measured_density(rng):
    scattered = (rng.random((128, 128)) < CSR_DENSITY / 4).astype(np.float32)
    blocks = blocks_of(BLOCK_ELL_DENSITY / 4, rng)
    cases = [
        (np.ones((128, 128), np.float32), "dense"),
        (blocks_of(1.5 * max(BLOCK_ELL_DENSITY, CSR_DENSITY), rng), "dense"),
        (scattered, "csr"),
        (blocks, "block_ell"),
    ]
    for weights, wanted in cases:
        for held in (
            weights,
            CSRMatrix.from_dense(weights),
            BlockELLMatrix.from_dense(weights, block_size=4),
            BlockELLMatrix.from_dense(weights, block_size=8),
        ):
            assert fastest_format([held, held], 4) == wanted
            ffn = TwoMatrixFFN("mlp", held, held)
            ffn.hold_fastest(4)
            assert ffn.weight_format == wanted


@pytest.mark.parametrize("block_size", [1, 2, 4, 5, 21])
def test_elements_in_blocks_are_counted_to_the_edge(rng, block_size):
    array = sparse_arrays(rng, 1, density=0.05)[0]
    matrix = BlockELLMatrix.from_dense(array, block_size=block_size)
    for held in (array, matrix, CSRMatrix.from_dense(array)):
        assert stored_in_blocks(held, block_size) == matrix.nnz


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_layer_without_neurons(weight_format, gated):
    layer = GatedFFN if gated else TwoMatrixFFN
    ffn = layer("mlp", *[np.zeros((0, WIDTH))] * (2 + gated))
    assert ffn.weight_density == 0
    ffn.hold_weights(weight_format, 1)
    assert ffn.weight_format == weight_format
    y, backprop = ffn(np.ones((3, WIDTH)))
    np.testing.assert_array_equal(y, np.zeros((3, WIDTH)))
    np.testing.assert_array_equal(backprop(y), np.zeros((3, WIDTH)))
    with pytest.raises(ValueError, match=r"block_size 2 given, 1 to 1 wanted .* \(0, 21\)"):
        ffn.hold_weights("block_ell", 2)
    ffn.hold_fastest()
    assert ffn.weight_format == "dense"


@pytest.mark.parametrize("given", ["4", 2.5, None, [4], np.array([4, 4])], ids=repr)
def test_a_block_size_of_another_type_is_refused(rng, given):
    ffn = make_layer(rng, True)
    with pytest.raises(TypeError, match="^block_size .* given, a whole number wanted$"):
        ffn.hold_weights("block_ell", given)
    if given is not None:
        with pytest.raises(TypeError, match="^block_size .* given, a whole number wanted$"):
            ffn.hold_fastest(given)


@pytest.mark.parametrize("given", [0, -1, WIDTH + 1])
def test_a_fastest_format_of_impossible_blocks_is_refused(rng, given):
    with pytest.raises(ValueError, match=f"block_size {given} given, 1 to 21 wanted"):
        make_layer(rng, True).hold_fastest(given)


def test_the_fastest_format_of_a_narrow_layer_has_blocks_that_fit():
    weights = np.zeros((400, 8), np.float32)
    weights[:8] = 1
    ffn = TwoMatrixFFN("mlp", weights, weights)
    ffn.hold_fastest()
    assert (ffn.weight_format, ffn.block_size) == ("block_ell", 8)


@pytest.mark.parametrize("weights", [[[1.0]], None, "weights"], ids=repr)
def test_weights_of_another_type_are_refused(weights):
    message = f"^m.gate_proj.weight of type {type(weights).__name__} given, a NumPy array, CSRM"
    with pytest.raises(TypeError, match=message):
        GatedFFN("m", weights, weights, weights)
