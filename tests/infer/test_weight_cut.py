"""What is left of weights, and cutting them by magnitude."""

import numpy as np
import pytest

from twell_numba.infer.weight_cut import cut_below, cut_to_density, entries_left, magnitudes


def blocks_of(value, b):
    return [
        value[top : top + b, left : left + b]
        for top in range(0, value.shape[0], b)
        for left in range(0, value.shape[1], b)
    ]


@pytest.mark.parametrize("density", [0.01, 0.07, 0.29, 0.5, 1.0])
def test_exactly_the_wanted_part_is_left_and_it_is_the_largest(rng, density):
    values = [scale * rng.standard_normal((20, 50)).astype(np.float32) for scale in (1, 1.1, 0.9)]
    before = [value.copy() for value in values]
    cut_to_density(values, 1, density)
    together = np.concatenate([value.ravel() for value in values])
    given = np.concatenate([value.ravel() for value in before])
    assert np.count_nonzero(together) == round(density * 3000)
    is_kept = together != 0
    np.testing.assert_array_equal(together[is_kept], given[is_kept])
    assert np.abs(given[is_kept]).min() > np.abs(given[~is_kept]).max(initial=0)


def test_the_largest_of_each_weight_is_left(rng):
    values = [scale * rng.standard_normal((8, 8)) for scale in (1, 1e-9)]
    largest = np.abs(values[1]).max()
    cut_to_density(values, 1, 0.5)
    assert np.count_nonzero(values[0]) == 63
    assert np.abs(values[1]).sum() == largest


def test_the_largest_block_of_each_weight_is_left():
    values = [np.ones((8, 8)), np.ones((8, 8))]
    values[0][:, 4:] = 1e-3  # the other two blocks are above the mean, those of values[1] are not
    values[1][4:, 4:] = 1.01
    cut_to_density(values, 4, 0.25)
    assert entries_left(values[0], 4) == entries_left(values[1], 4) == 16
    assert (values[1][4:, 4:] == 1.01).all()


@pytest.mark.parametrize("b", [1, 4])
def test_equal_magnitudes_are_cut_to_exactly_the_wanted_part(b):
    values = [np.full((8, 8), 0.5), np.full((8, 8), -0.5)]
    cut_to_density(values, b, 0.25)
    assert sum(entries_left(value, b) for value in values) == 32


@pytest.mark.parametrize("b", [1, 4])
def test_nothing_is_cut_where_no_more_is_left(rng, b):
    value = np.zeros((8, 8))
    value[:4, :4] = rng.standard_normal((4, 4))
    before = value.copy()
    cut_to_density([value], b, 0.25)
    np.testing.assert_array_equal(value, before)


@pytest.mark.parametrize("shape", [(8, 12), (7, 10), (5, 9), (4, 8)])
def test_blocks_go_as_a_whole_by_their_mean_square_relative_to_their_weight_s(rng, shape):
    b = 4
    spread = rng.uniform(0.1, 3, shape)
    values = [scale * rng.standard_normal(shape) * spread for scale in (1, 100)]
    before = [value.copy() for value in values]
    cut_to_density(values, b, 0.6)
    kept, gone = [], []
    for value, given in zip(values, before, strict=True):
        for block, old in zip(blocks_of(value, b), blocks_of(given, b), strict=True):
            assert (block == old).all() or not block.any()
            (kept if block.any() else gone).append(np.sqrt((old**2).mean() / (given**2).mean()))
    assert min(kept, default=np.inf) >= max(gone)
    left = sum(entries_left(value, b) for value in values)
    assert left == sum(
        block.size for value in values for block in blocks_of(value, b) if block.any()
    )
    total = sum(value.size for value in values)
    assert 0.6 * total - b * b < left <= 0.6 * total


def test_a_single_weight_keeps_its_block():
    value = np.zeros((5, 6))
    assert entries_left(value, 4) == 0
    value[4, 5] = 1e-30
    assert entries_left(value, 4) == 2, "the block at the corner has one row of two columns"
    assert entries_left(value, 1) == 1


@pytest.mark.parametrize("b", [1, 2])
def test_what_is_not_finite_is_never_cut(b):
    """Fault 73: a diverged weight must be found, not zeroed."""
    value = np.ones((4, 4))
    value[2, 3] = np.nan
    cut_to_density([value], b, 0.25)
    assert np.isnan(value[2, 3])


@pytest.mark.parametrize("b", [1, 3, 4, 7])
def test_blocks_of_a_smaller_root_mean_square_are_cut(rng, b):
    value = rng.standard_normal((10, 13))
    value[:b, :b] = 0
    before = value.copy()
    expected = [np.sqrt(np.square(block).mean()) for block in blocks_of(before, b)]
    np.testing.assert_allclose(magnitudes(before, b).ravel(), expected)
    limit = np.sort(expected)[len(expected) // 2 - 1 :][:2].mean()
    left = cut_below(value, b, limit)
    assert left == entries_left(value, b) > 0
    for block, old, magnitude in zip(
        blocks_of(value, b), blocks_of(before, b), expected, strict=True
    ):
        np.testing.assert_array_equal(block, old if magnitude >= limit else 0)


@pytest.mark.parametrize("b", [1, 4])
def test_a_limit_of_nothing_cuts_nothing(rng, b):
    value = np.zeros((8, 8))
    value[:4, :4] = rng.standard_normal((4, 4))
    before = value.copy()
    assert cut_below(value, b, 0.0) == 16
    np.testing.assert_array_equal(value, before)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_blocks_that_are_not_finite_are_not_cut(bad):
    value = np.full((8, 8), 0.1)
    value[5, 5] = bad
    assert cut_below(value, 4, 10.0) == 16
    np.testing.assert_array_equal(value[5, 5], bad)
    assert not value[:4].any()
