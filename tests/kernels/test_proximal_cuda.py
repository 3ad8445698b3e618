"""Thresholds and cuts on a GPU, against their reference and the CPU."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.infer.weight_cut import cut_below, cut_to_density, entries_left  # noqa: E402
from twell_numba.kernels.proximal import cpu, cuda, reference  # noqa: E402

DTYPES = [np.float32, np.float64]
OPERATIONS = {
    "soft": lambda family: lambda value, amount: family.soft_threshold(value, amount),
    "hard": lambda family: lambda value, amount: family.hard_threshold(value, amount),
    "block": lambda family: lambda value, amount: family.block_soft_threshold(value, 4, amount),
}
SMALL = [(0, 5), (5, 0), (1, 1), (3, 5), (4, 8), (9, 67)]
LARGE = [(65537, 3), (5632, 2048), (1000, 1003)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("amount", [0.0, 0.9])
def test_matches_the_reference(rng, machine, name, dtype, amount):
    for shape in machine.shapes(SMALL, LARGE if name != "block" else LARGE[2:]):
        expected = rng.standard_normal(shape).astype(dtype)
        on_gpu = machine.upload(expected)
        left = OPERATIONS[name](cuda)(on_gpu, amount)
        assert left == OPERATIONS[name](reference)(expected, amount)
        actual = on_gpu.to_numpy()
        tolerance = 4 * np.finfo(dtype).eps
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(actual == 0, expected == 0)
        assert not np.signbit(actual[actual == 0]).any()


def test_a_block_just_above_the_threshold_shrinks_to_what_is_left(machine):
    amount = 0.1  # no float32
    value = np.full((4, 4), 0.1001, np.float32)
    on_gpu = machine.upload(value)
    assert cuda.block_soft_threshold(on_gpu, 4, amount) == 16
    expected = value.astype(np.float64) - amount
    np.testing.assert_allclose(on_gpu.to_numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_not_finite_stays_and_is_counted(machine, name):
    on_gpu = machine.upload(np.array([[np.nan, np.inf, -np.inf, 0.1, -0.0]], np.float32))
    left = OPERATIONS[name](cuda)(on_gpu, 0.2)
    value = on_gpu.to_numpy()
    if name == "block":
        assert np.isnan(value[0, :4]).all()
        assert left == 4
    else:
        np.testing.assert_array_equal(value, [[np.nan, np.inf, -np.inf, 0, 0]])
        assert left == 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_magnitude_of_a_rank(rng, machine, dtype):
    values = [rng.standard_normal((30, 7)).astype(dtype), np.zeros((4, 5), dtype)]
    values[1][2, 3] = -100
    values[1][0, 0] = -0.0
    values[0][3, :3] = values[0][4, :3]  # equal ones
    ordered = np.sort(np.abs(np.concatenate([value.ravel() for value in values])))[::-1]
    on_gpu = [machine.upload(value) for value in values]
    for rank in (1, 2, 17, 210, 211, 230):
        assert cuda.largest_magnitude(on_gpu, rank) == ordered[rank - 1]
    assert cuda.largest_magnitudes(on_gpu) == cpu.largest_magnitudes(values)
    for rank in (0, 231):
        with pytest.raises(ValueError, match=f"rank {rank} given, 1 to 230 wanted"):
            cuda.largest_magnitude(on_gpu, rank)


def test_what_is_not_finite_ranks_above_all_else(machine):
    value = machine.upload(np.array([1, -np.nan, np.inf, -2, 1e-45, 0], np.float32))
    ranked = [cuda.largest_magnitude([value], rank) for rank in range(1, 7)]
    np.testing.assert_array_equal(ranked, np.array([np.nan, np.inf, 2, 1, 1e-45, 0], np.float32))


def test_equal_ones_are_cut_in_order(rng, machine):
    values = [rng.choice([-0.5, 0.25, 1.0], size).astype(np.float32) for size in (700, 3, 90)]
    values[1][:] = 1.0
    for excess in (0, 1, 100, 10**6):
        expected = [value.copy() for value in values]
        on_gpu = [machine.upload(value) for value in values]
        cpu.cut_alike(expected, [0.5] * 3, excess)
        cuda.cut_alike(on_gpu, [0.5] * 3, excess)
        for actual, wanted in zip(on_gpu, expected, strict=True):
            np.testing.assert_array_equal(actual.to_numpy(), wanted)


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("density", [0.07, 0.5])
def test_cuts_as_on_the_cpu(rng, machine, block_size, density):
    values = [scale * rng.standard_normal((20, 18)).astype(np.float32) for scale in (1, 0.5)]
    values[0] = np.round(values[0] * 4) / 4  # many are equal
    on_gpu = [machine.upload(value) for value in values]
    for actual, expected in zip(on_gpu, values, strict=True):
        left = cut_below(expected, block_size, 0.3)
        assert cut_below(actual, block_size, 0.3) == left == entries_left(actual, block_size)
        np.testing.assert_array_equal(actual.to_numpy(), expected)
    cut_to_density(values, block_size, density)
    cut_to_density(on_gpu, block_size, density)
    for actual, expected in zip(on_gpu, values, strict=True):
        np.testing.assert_array_equal(actual.to_numpy(), expected)


def test_refuses_what_it_cannot_do(machine):
    narrow = machine.upload(np.ones((2, 2), ml_dtypes.bfloat16))
    with pytest.raises(TypeError, match="value of dtype bfloat16 given, float32 or float64 wanted"):
        cuda.soft_threshold(narrow, 0.1)
    value = machine.upload(np.ones((2, 2)))
    for amount in (-0.1, np.nan, np.inf):
        with pytest.raises(ValueError, match="a finite number of at least 0 wanted"):
            cuda.hard_threshold(value, amount)
    with pytest.raises(ValueError, match="block_size 0 given"):
        cuda.block_soft_threshold(value, 0, 0.1)
    with pytest.raises(ValueError, match="a matrix"):
        cuda.block_soft_threshold(value.reshape(4), 2, 0.1)
