"""The controller of the L1 strength on weights."""

import math

import pytest

from twell_numba.train.density_controller import LARGEST_FACTOR, SMALLEST_PART, DensityController


def test_the_strength_falls_below_the_wanted_density_and_rises_above_it():
    controller = DensityController(2.0)
    controller.update(0.39, 0.4)
    assert controller.strength == pytest.approx(2.0 * 0.39 / 0.4)
    controller.update(0.408, 0.4)
    assert controller.strength == pytest.approx(2.0 * 0.39 / 0.4 * 1.02)


def test_at_the_wanted_density_the_strength_stays():
    controller = DensityController(2.0)
    controller.update(0.39, 0.4)
    before = controller.strength
    for wanted in (1.0, 0.5, 0.01):
        controller.update(wanted, wanted)
    assert controller.strength == before


def test_a_step_changes_the_strength_by_a_bounded_factor_and_within_bounds():
    controller = DensityController(2.0)
    controller.update(1e-6, 1.0)
    assert controller.strength == pytest.approx(2.0 / LARGEST_FACTOR)
    for _ in range(1000):
        controller.update(1e-6, 1.0)
    assert controller.strength == 2.0 * SMALLEST_PART
    controller.update(1.0, 1e-6)
    assert controller.strength == pytest.approx(2.0 * SMALLEST_PART * LARGEST_FACTOR)
    for _ in range(1000):
        controller.update(1.0, 1e-6)
    assert controller.strength == 2.0


def test_a_restored_controller_goes_on_as_the_original():
    controller, restored = DensityController(0.1), DensityController(0.1)
    for density in (0.49, 0.48):
        controller.update(density, 0.5)
    restored.restore(controller.strength)
    for one in (controller, restored):
        one.update(0.51, 0.5)
    assert restored.strength == controller.strength


@pytest.mark.parametrize("strength", [None, 1, True, "0.5", 0.0, -0.5, 0.6, 1e-9, math.nan, [0.5]])
def test_a_strength_that_cannot_be_is_refused(strength):
    controller = DensityController(0.5)
    with pytest.raises(ValueError, match="L1 strength"):
        controller.restore(strength)
    assert controller.strength == 0.5
