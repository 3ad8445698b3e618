"""The learning rate's and the L1 strength's course."""

import pytest

from twell_numba.train.schedule import l1_strength, learning_rate


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
