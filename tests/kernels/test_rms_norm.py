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
    dweight = np.ones(width, dtype)
    dx = cpu.rms_norm_backward(dy, x, weight, inverse_rms, dweight)

    x, weight, dy = (array.astype(np.float64) for array in (x, weight, dy))
    expected_y, expected_inverse = reference.rms_norm(x, weight, EPS)
    expected_dweight = np.ones(width)
    expected_dx = reference.rms_norm_backward(dy, x, weight, expected_inverse, expected_dweight)
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


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-13)])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_a_residual_stream_is_added(rng, rows, width, dtype, tolerance):
    x, weight, dy = make(rng, rows, width, dtype)
    addend, _, residual = make(rng, rows, width, dtype)
    total, y, inverse_rms = cpu.add_rms_norm(x, addend, weight, EPS)
    np.testing.assert_array_equal(total, x + addend)
    expected_y, expected_inverse = cpu.rms_norm(total, weight, EPS)
    np.testing.assert_allclose(y, expected_y, rtol=tolerance)
    np.testing.assert_allclose(inverse_rms, expected_inverse, rtol=tolerance)

    dweight, expected_dweight = np.zeros((2, width), dtype)
    dx = cpu.rms_norm_backward(dy, total, weight, inverse_rms, dweight, residual)
    alone = cpu.rms_norm_backward(dy, total, weight, inverse_rms, expected_dweight)
    np.testing.assert_allclose(dx, alone + residual, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(dweight, expected_dweight)


def test_reference_gradient(rng, gradient_check):
    x, weight, dy = make(rng, 5, 7)
    _, inverse_rms = reference.rms_norm(x, weight, EPS)
    dweight = np.zeros(7)
    dx = reference.rms_norm_backward(dy, x, weight, inverse_rms, dweight)
    gradient_check(
        lambda: np.sum(dy * reference.rms_norm(x, weight, EPS)[0]), [x, weight], [dx, dweight], rng
    )


def test_reference_gradient_of_a_residual_stream(rng, gradient_check):
    x, weight, dy = make(rng, 5, 7)
    addend, _, residual = make(rng, 5, 7)

    def loss():
        total, y, _ = reference.add_rms_norm(x, addend, weight, EPS)
        return np.sum(dy * y) + np.sum(residual * total)

    total, _, inverse_rms = reference.add_rms_norm(x, addend, weight, EPS)
    dweight = np.zeros(7)
    dx = reference.rms_norm_backward(dy, total, weight, inverse_rms, dweight, residual)
    gradient_check(loss, [x, addend, weight], [dx, dx, dweight], rng)


def test_same_bits_for_every_thread_count(rng, monkeypatch):
    monkeypatch.setattr(cpu, "GRAIN", 1)
    x, weight, dy = make(rng, 500, 64, np.float32)
    before = thread_count()
    results = []
    try:
        for threads in (1, 2, 3):
            set_thread_count(threads)
            y, inverse_rms = cpu.rms_norm(x, weight, EPS)
            dweight = np.zeros_like(weight)
            dx = cpu.rms_norm_backward(dy, x, weight, inverse_rms, dweight)
            results.append((y, dx, dweight))
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


def test_backward_refuses_what_does_not_fit():
    x, weight, inverse_rms, grad = np.ones((2, 3)), np.ones(3), np.ones(2), np.ones(3)
    with pytest.raises(ValueError, match="dy"):
        cpu.rms_norm_backward(np.ones((3, 2)), x, weight, inverse_rms, grad)
    with pytest.raises(ValueError, match="inverse_rms"):
        cpu.rms_norm_backward(x, x, weight, np.ones(3), grad)
    with pytest.raises(ValueError, match="residual of shape"):
        cpu.rms_norm_backward(x, x, weight, inverse_rms, grad, np.ones((3, 3)))
    with pytest.raises(TypeError, match="weight_grad of float32 given, float64 wanted"):
        cpu.rms_norm_backward(x, x, weight, inverse_rms, grad.astype(np.float32))
