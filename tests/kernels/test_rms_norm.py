import numpy as np
import pytest

from twell_numba.device import set_thread_count, thread_count
from twell_numba.kernels.rms_norm import cpu, reference

EPS = 1e-5
SHAPES = [(0, 4), (1, 2), (2, 3), (3, 17), (129, 16), (64, 100)]


def make(rng, rows, width, dtype=np.float64):
    x = rng.standard_normal((rows, width)).astype(dtype)
    weight = rng.standard_normal(width).astype(dtype)
    dy = rng.standard_normal((rows, width)).astype(dtype)
    return x, weight, dy


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-13)])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_matches_the_reference(rng, rows, width, dtype, tolerance):
    x, weight, dy = make(rng, rows, width, dtype)
    y, inverse_rms = cpu.rms_norm(x, weight, EPS)
    dx, dweight = cpu.rms_norm_backward(dy, x, weight, inverse_rms)

    x, weight, dy = (array.astype(np.float64) for array in (x, weight, dy))
    expected_y, expected_inverse = reference.rms_norm(x, weight, EPS)
    expected_dx, expected_dweight = reference.rms_norm_backward(dy, x, weight, expected_inverse)
    for actual, expected in (
        (y, expected_y),
        (inverse_rms, expected_inverse),
        (dx, expected_dx),
        (dweight, expected_dweight),
    ):
        assert actual.dtype == dtype
        np.testing.assert_allclose(
            actual, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max(initial=0)
        )


def test_reference_gradient(rng, gradient_check):
    x, weight, dy = make(rng, 5, 7)
    _, inverse_rms = reference.rms_norm(x, weight, EPS)
    gradients = reference.rms_norm_backward(dy, x, weight, inverse_rms)
    gradient_check(
        lambda: np.sum(dy * reference.rms_norm(x, weight, EPS)[0]), [x, weight], gradients, rng
    )


def test_same_bits_for_every_thread_count(rng, monkeypatch):
    monkeypatch.setattr(cpu, "GRAIN", 1)
    x, weight, dy = make(rng, 500, 64, np.float32)
    before = thread_count()
    results = []
    try:
        for threads in (1, 2, 3):
            set_thread_count(threads)
            y, inverse_rms = cpu.rms_norm(x, weight, EPS)
            results.append((y, *cpu.rms_norm_backward(dy, x, weight, inverse_rms)))
    finally:
        set_thread_count(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_any_memory_layout(rng):
    x, weight, _ = make(rng, 6, 8)
    expected, _ = cpu.rms_norm(x, weight, EPS)
    read_only = x.copy()
    read_only.flags.writeable = False
    for variant in (
        np.asfortranarray(x),
        x[::-1].copy()[::-1],
        np.repeat(x, 2, axis=1)[:, ::2],
        read_only,
        x.astype(">f8"),
    ):
        np.testing.assert_array_equal(cpu.rms_norm(variant, weight, EPS)[0], expected)


def test_nan_stays_in_its_row(rng):
    x, weight, _ = make(rng, 3, 8)
    x[1, 2] = np.nan
    y, _ = cpu.rms_norm(x, weight, EPS)
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2]]).all()


def test_a_row_of_zeros_gives_zeros():
    y, _ = cpu.rms_norm(np.zeros((1, 4)), np.ones(4), EPS)
    np.testing.assert_array_equal(y, 0)


@pytest.mark.parametrize(
    ("x", "weight", "error"),
    [
        (np.ones((2, 3)), np.ones(4), ValueError),
        (np.ones(3), np.ones(3), ValueError),
        (np.ones((2, 3), np.float16), np.ones(3, np.float16), TypeError),
        (np.ones((2, 3), np.int64), np.ones(3), TypeError),
        (np.ones((2, 3), np.float32), np.ones(3), TypeError),
        ([[1.0]], np.ones(1), TypeError),
    ],
)
def test_refuses(x, weight, error):
    with pytest.raises(error, match="given"):
        cpu.rms_norm(x, weight, EPS)


def test_backward_refuses_other_shapes():
    x, weight, inverse_rms = np.ones((2, 3)), np.ones(3), np.ones(2)
    with pytest.raises(ValueError, match="dy"):
        cpu.rms_norm_backward(np.ones((3, 2)), x, weight, inverse_rms)
    with pytest.raises(ValueError, match="inverse_rms"):
        cpu.rms_norm_backward(x, x, weight, np.ones(3))
