"""The course of the learning rate, of the L1 strength, and of the density of weights."""

import pytest

from twell_numba.train.schedule import l1_strength, learning_rate, weight_density


def rate(step, warmup_steps=10, total_steps=110):
    return learning_rate(
        step, peak=2.0, warmup_steps=warmup_steps, total_steps=total_steps, minimum_fraction=0.1
    )


@pytest.mark.parametrize(
    ("step", "expected"), [(1, 0.2), (5, 1.0), (10, 2.0), (60, 1.1), (110, 0.2), (500, 0.2)]
)
def test_learning_rate_rises_linearly_then_falls_as_a_cosine(step, expected):
    assert rate(step) == pytest.approx(expected)


def test_learning_rate_falls_at_every_step_after_the_warmup():
    rates = [rate(step) for step in range(10, 111)]
    assert all(later < earlier for earlier, later in zip(rates, rates[1:], strict=False))


def test_learning_rate_without_warmup_and_with_nothing_but_warmup():
    assert rate(1, warmup_steps=0, total_steps=1) == pytest.approx(0.2)
    assert rate(3, warmup_steps=3, total_steps=3) == pytest.approx(2.0)
    assert rate(4, warmup_steps=8, total_steps=4) == pytest.approx(1.0)


def test_l1_strength_rises_linearly_then_stays():
    strengths = [l1_strength(step, strength=8.0, warmup_steps=4) for step in range(1, 7)]
    assert strengths == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert l1_strength(1, strength=8.0, warmup_steps=0) == 8.0


@pytest.mark.parametrize(
    ("step", "expected"),
    [(1, 1.0), (10, 1.0), (60, 0.2 + 0.8 * 0.125), (110, 0.2), (111, 0.2)],
)
def test_density_falls_as_a_cubic_after_the_warmup(step, expected):
    assert weight_density(step, target=0.2, begin=10, end=110) == pytest.approx(expected)


def test_density_falls_at_every_step_and_less_and_less():
    densities = [weight_density(step, target=0.01, begin=0, end=50) for step in range(51)]
    falls = [before - after for before, after in zip(densities, densities[1:], strict=False)]
    assert all(later < earlier for earlier, later in zip(falls, falls[1:], strict=False))
    assert falls[-1] > 0
