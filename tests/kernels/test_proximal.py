"""Soft and hard thresholds, of elements and of blocks."""

import functools

import numpy as np
import pytest

from twell_numba.device import set_thread_count, thread_count
from twell_numba.kernels.proximal import cpu, reference

OPERATIONS = {
    "soft": lambda family: lambda value, amount: family.soft_threshold(value, amount),
    "hard": lambda family: lambda value, amount: family.hard_threshold(value, amount),
    "block": lambda family: lambda value, amount: family.block_soft_threshold(value, 4, amount),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (3, 5), (4, 4), (5, 8), (33, 1003)])
@pytest.mark.parametrize("amount", [0.0, 0.9, 5.0])
def test_matches_the_reference(rng, name, dtype, shape, amount):
    given = rng.standard_normal(shape).astype(dtype)
    actual, expected = given.copy(), given.copy()
    left = OPERATIONS[name](cpu)(actual, amount)
    assert left == OPERATIONS[name](reference)(expected, amount)
    tolerance = 4 * np.finfo(dtype).eps
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(actual == 0, expected == 0)
    assert not np.signbit(actual[actual == 0]).any()


@pytest.mark.parametrize("family", [cpu, reference])
def test_the_soft_threshold_is_the_proximal_operator_of_the_sum_of_absolute_values(rng, family):
    """It minimizes (x - w)^2 / 2 + amount |x|, whatever else is tried."""
    given = rng.standard_normal(200)
    found = given.copy()
    left = family.soft_threshold(found, 0.4)
    assert left == np.count_nonzero(np.abs(given) > 0.4)

    def objective(x):
        return (x - given) ** 2 / 2 + 0.4 * np.abs(x)

    for offset in (-0.1, -1e-3, 1e-3, 0.1):
        assert (objective(found) < objective(found + offset)).all()


@pytest.mark.parametrize("family", [cpu, reference])
def test_the_block_soft_threshold_is_the_proximal_operator_of_the_group_lasso(rng, family):
    """Along its own direction, and along any other, for whole blocks and for those at an edge."""
    for shape in ((3, 3), (3, 2), (1, 3)):
        given = rng.standard_normal(shape)
        found = given.copy()
        assert family.block_soft_threshold(found, 3, 0.3) == given.size

        def objective(x, given=given):
            return ((x - given) ** 2).sum() / 2 + 0.3 * np.sqrt(x.size) * np.linalg.norm(x)

        for direction in (given, rng.standard_normal(shape)):
            for step in (-1e-2, 1e-2):
                assert objective(found) < objective(found + step * direction)


@pytest.mark.parametrize("family", [cpu, reference])
def test_blocks_become_zero_as_a_whole(rng, family):
    value = rng.standard_normal((8, 12)).astype(np.float32)
    value[:4, 4:8] *= 0.01
    value[4:, 8:] *= 0.01
    kept = value.copy()
    assert family.block_soft_threshold(value, 4, 0.1) == 4 * 16
    zero_blocks = (value == 0).reshape(2, 4, 3, 4).all(axis=(1, 3))
    np.testing.assert_array_equal(zero_blocks, [[False, True, False], [False, False, True]])
    assert np.count_nonzero(value) == 4 * 16, "no zero but in whole blocks"
    assert (np.sign(value) == np.sign(kept))[value != 0].all()


@pytest.mark.parametrize("family", [cpu, reference])
def test_an_edge_block_counts_by_its_own_size(family):
    """All entries are alike, so all blocks shrink alike and go at the same amount."""
    value = np.full((5, 7), 0.5, np.float32)
    assert family.block_soft_threshold(value, 4, 0.25) == 35
    np.testing.assert_allclose(value, 0.25, rtol=1e-6)
    assert family.block_soft_threshold(value, 4, 0.26) == 0
    assert not value.any()


def test_a_block_just_above_the_threshold_shrinks_to_what_is_left():
    """1 - amount sqrt(size) / norm is then a small difference; of a rounded amount it is wrong."""
    amount = 0.1  # no float32
    value = np.full((4, 4), 0.1001, np.float32)
    expected = value.astype(np.float64) - amount
    assert cpu.block_soft_threshold(value, 4, amount) == 16
    np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize("family", [cpu, reference])
def test_a_hard_threshold_changes_nothing_that_it_keeps(rng, family):
    value = rng.standard_normal(1000).astype(np.float32)
    value[7] = 0.5
    before = value.copy()
    left = family.hard_threshold(value, 0.5)
    is_kept = np.abs(before) >= 0.5
    assert left == is_kept.sum()
    assert value[7] == 0.5, "what is just as large as the limit stays"
    np.testing.assert_array_equal(value, np.where(is_kept, before, 0))


@pytest.mark.parametrize("family", [cpu, reference])
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_not_finite_stays_and_is_counted(name, family):
    """Fault 61: a diverged weight must not be turned into a zero."""
    value = np.array([[np.nan, np.inf, -np.inf, 0.1, -0.0]], np.float32)
    with np.errstate(invalid="ignore"):
        left = OPERATIONS[name](family)(value, 0.2)
    assert np.isnan(value[0, 0])
    if name == "block":
        assert np.isnan(value[0, :4]).all(), "the block is not finite as a whole"
        assert left == 4
    else:
        np.testing.assert_array_equal(value[0, 1:], [np.inf, -np.inf, 0, 0])
        assert left == 3


@pytest.mark.parametrize("name", OPERATIONS)
def test_same_bits_and_counts_for_every_thread_count(rng, name, monkeypatch):
    monkeypatch.setattr(cpu, "GRAIN", 1)
    given = rng.standard_normal((101, 37)).astype(np.float32)
    before = thread_count()
    results = []
    try:
        for threads in (1, 2, 3):
            set_thread_count(threads)
            value = given.copy()
            results.append((OPERATIONS[name](cpu)(value, 0.8), value))
    finally:
        set_thread_count(before)
    for count, value in results[1:]:
        assert count == results[0][0]
        np.testing.assert_array_equal(value, results[0][1])
    assert 0 < results[0][0] < given.size


@pytest.mark.parametrize("name", OPERATIONS)
def test_refuses_what_it_cannot_change_in_place(name):
    good = np.ones((4, 6))
    read_only = good.copy()
    read_only.flags.writeable = False
    for value, error in (
        (good.astype(np.float16), TypeError),
        (good.astype(">f8"), TypeError),
        ([[1.0]], TypeError),
        (np.asfortranarray(good), ValueError),
        (good[:, ::2], ValueError),
        (read_only, ValueError),
    ):
        with pytest.raises(error, match="value"):
            OPERATIONS[name](cpu)(value, 0.1)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("amount", [-0.1, np.nan, np.inf])
def test_refuses_amounts_that_mean_nothing(name, amount):
    value = np.ones((2, 2))
    with pytest.raises(ValueError, match="a finite number of at least 0 wanted"):
        OPERATIONS[name](cpu)(value, amount)
    assert (value == 1).all()


def test_refuses_blocks_that_mean_nothing():
    threshold = functools.partial(cpu.block_soft_threshold, amount=0.1)
    with pytest.raises(ValueError, match="block_size 0 given"):
        threshold(np.ones((2, 2)), 0)
    with pytest.raises(ValueError, match="a matrix"):
        threshold(np.ones(4), 2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("family", [cpu, reference])
def test_the_magnitude_of_a_rank(rng, dtype, family):
    values = [rng.standard_normal((30, 7)).astype(dtype), np.zeros((4, 5), dtype)]
    values[1][2, 3] = -100
    values[1][0, 0] = -0.0
    values[0][3, :3] = values[0][4, :3]  # equal ones
    ordered = np.sort(np.abs(np.concatenate([value.ravel() for value in values])))[::-1]
    for rank in (1, 2, 3, 17, 100, 210, 211, 230):
        assert family.largest_magnitude(values, rank) == ordered[rank - 1]


@pytest.mark.parametrize("family", [cpu, reference])
def test_what_is_not_finite_ranks_above_all_else(family):
    value = np.array([1, -np.nan, np.inf, -2, 1e-45, 0], np.float32)
    ranked = [family.largest_magnitude([value], rank) for rank in range(1, 7)]
    np.testing.assert_array_equal(ranked, np.array([np.nan, np.inf, 2, 1, 1e-45, 0], np.float32))


def test_the_limit_of_a_rank_leaves_that_many(rng):
    values = [rng.standard_normal((50, 40)).astype(np.float32) for _ in range(3)]
    limit = cpu.largest_magnitude(values, 123)
    assert sum(cpu.hard_threshold(value, limit) for value in values) == 123


def test_refuses_a_rank_that_there_is_not():
    for rank in (0, 5):
        with pytest.raises(ValueError, match=f"rank {rank} given, 1 to 4 wanted"):
            cpu.largest_magnitude([np.ones(3), np.ones(1)], rank)
    with pytest.raises(TypeError, match="one dtype"):
        cpu.largest_magnitude([np.ones(3), np.ones(1, np.float32)], 1)
