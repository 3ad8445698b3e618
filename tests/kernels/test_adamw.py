import numpy as np
import pytest

from twell_numba.device import set_thread_count, thread_count
from twell_numba.kernels.adamw import cpu, reference

SETTINGS = {
    "learning_rate": 1e-2,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-13)])
@pytest.mark.parametrize("shape", [(0,), (), (1,), (3, 5), (100, 1003)])
def test_matches_the_reference(rng, shape, dtype, tolerance):
    actual = [np.asarray(rng.standard_normal(shape), dtype), np.zeros(shape, dtype)]
    actual.append(actual[1].copy())
    expected = [array.astype(np.float64) for array in actual]
    for step in (1, 2, 3):
        grad = np.asarray(rng.standard_normal(shape), dtype)
        cpu.adamw_step(actual[0], grad, actual[1], actual[2], **SETTINGS, step=step, grad_scale=0.5)
        reference.adamw_step(
            expected[0],
            grad.astype(np.float64),
            expected[1],
            expected[2],
            **SETTINGS,
            step=step,
            grad_scale=0.5,
        )
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * 1e-2)


def test_first_step_moves_by_the_learning_rate_and_decays():
    value, zeros = np.array([2.0, -2.0]), np.zeros(2)
    cpu.adamw_step(value, np.array([5.0, -0.1]), zeros, zeros.copy(), **SETTINGS, step=1)
    np.testing.assert_allclose(value, [2 * 0.999 - 0.01, -2 * 0.999 + 0.01], rtol=1e-6)


def test_decay_is_not_scaled_by_the_gradient():
    value, zeros = np.array([2.0]), np.zeros(1)
    cpu.adamw_step(value, np.zeros(1), zeros, zeros.copy(), **SETTINGS, step=7)
    np.testing.assert_allclose(value, [2 * 0.999], rtol=1e-14)


def test_a_nan_gradient_is_seen():
    value, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    grad = np.array([1, np.nan, 1], np.float32)
    assert np.isnan(cpu.sum_of_squares(grad))
    cpu.adamw_step(value, grad, zeros, zeros.copy(), **SETTINGS, step=1)
    np.testing.assert_array_equal(np.isnan(value), [False, True, False])


@pytest.mark.parametrize("shape", [(0,), (), (7, 3), (3, 50_001)])
def test_sum_of_squares(rng, shape):
    grad = np.asarray(rng.standard_normal(shape), np.float32)
    np.testing.assert_allclose(cpu.sum_of_squares(grad), reference.sum_of_squares(grad), rtol=1e-12)


def test_sum_of_squares_does_not_overflow_float32():
    assert cpu.sum_of_squares(np.full(4, 1e30, np.float32)) == pytest.approx(4e60, rel=1e-6)


def test_same_bits_for_every_thread_count(rng, monkeypatch):
    monkeypatch.setattr(cpu, "GRAIN", 1)
    grad = rng.standard_normal(100_001).astype(np.float32)
    before = thread_count()
    sums, values = [], []
    try:
        for threads in (1, 2, 3):
            set_thread_count(threads)
            sums.append(cpu.sum_of_squares(grad))
            value, zeros = np.ones_like(grad), np.zeros_like(grad)
            cpu.adamw_step(value, grad, zeros, zeros.copy(), **SETTINGS, step=1)
            values.append(value)
    finally:
        set_thread_count(before)
    assert sums[0] == sums[1] == sums[2]
    np.testing.assert_array_equal(values[0], values[1])
    np.testing.assert_array_equal(values[0], values[2])


def test_gradient_of_any_memory_layout(rng):
    grad = rng.standard_normal((4, 6))
    results = []
    for variant in (grad, np.asfortranarray(grad), grad[::-1].copy()[::-1], grad.astype(">f8")):
        value, zeros = np.ones_like(grad), np.zeros_like(grad)
        cpu.adamw_step(value, variant, zeros, zeros.copy(), **SETTINGS, step=1)
        results.append(value)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_refuses_what_it_cannot_change_in_place():
    good = np.ones((4, 6))
    read_only = good.copy()
    read_only.flags.writeable = False
    for value, error in (
        (good.astype(np.float32), TypeError),
        (good.astype(">f8"), TypeError),
        (np.ones((6, 4)), ValueError),
        (np.asfortranarray(good), ValueError),
        (read_only, ValueError),
    ):
        with pytest.raises(error, match="value"):
            cpu.adamw_step(value, good, good.copy(), good.copy(), **SETTINGS, step=1)


def test_refuses_step_zero():
    ones = np.ones(2)
    with pytest.raises(ValueError, match="step 0"):
        cpu.adamw_step(ones, ones.copy(), ones.copy(), ones.copy(), **SETTINGS, step=0)
