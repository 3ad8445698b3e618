import numpy as np
import pytest

from twell_numba.device import set_thread_count, thread_count
from twell_numba.kernels.rotary import cpu, reference, rotary_tables


def tables(length, width, dtype=np.float64, first=0):
    return rotary_tables(np.arange(first, first + length), width, 10000.0, dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-13)])
@pytest.mark.parametrize(
    "shape", [(0, 3, 2, 4), (2, 0, 2, 4), (1, 1, 1, 2), (2, 5, 3, 6), (3, 70, 4, 32)]
)
def test_matches_the_reference(rng, shape, dtype, tolerance):
    x = rng.standard_normal(shape).astype(dtype)
    cos, sin = tables(shape[1], shape[3], dtype)
    for name in ("rotary", "rotary_backward"):
        actual = getattr(cpu, name)(x, cos, sin)
        expected = getattr(reference, name)(*(a.astype(np.float64) for a in (x, cos, sin)))
        assert actual.dtype == dtype
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def test_reference_gradient(rng, gradient_check):
    x, dy = rng.standard_normal((2, 2, 5, 3, 6))
    cos, sin = tables(5, 6)
    dx = reference.rotary_backward(dy, cos, sin)
    gradient_check(lambda: np.sum(dy * reference.rotary(x, cos, sin)), [x], [dx], rng)


def test_in_place(rng):
    x = rng.standard_normal((2, 3, 2, 16)).astype(np.float32)
    cos, sin = reference.rotary_tables(np.arange(3), 16, 10000.0)
    expected = cpu.rotary(x, cos, sin)
    actual = x.copy()
    assert cpu.rotary(actual, cos, sin, actual) is actual
    np.testing.assert_array_equal(actual, expected)
    expected = cpu.rotary_backward(actual, cos, sin)
    assert cpu.rotary_backward(actual, cos, sin, out=actual) is actual
    np.testing.assert_array_equal(actual, expected)
    with pytest.raises(TypeError, match="out of float64 given, float32 wanted"):
        cpu.rotary(x, cos, sin, x.astype(np.float64))


def test_tables_are_the_angles_of_the_definition():
    cos, sin = rotary_tables(np.array([0, 3]), 4, 100.0, np.float64)
    np.testing.assert_allclose(cos, np.cos([[0, 0], [3, 0.3]]))
    np.testing.assert_allclose(sin, np.sin([[0, 0], [3, 0.3]]))


def test_scores_depend_on_the_distance_alone(rng):
    q, k = rng.standard_normal((2, 1, 1, 1, 8))
    near = np.sum(cpu.rotary(q, *tables(1, 8, first=7)) * cpu.rotary(k, *tables(1, 8, first=3)))
    far = np.sum(cpu.rotary(q, *tables(1, 8, first=104)) * cpu.rotary(k, *tables(1, 8, first=100)))
    np.testing.assert_allclose(near, far)


def test_same_bits_for_every_thread_count(rng, monkeypatch):
    monkeypatch.setattr(cpu, "GRAIN", 1)
    x = rng.standard_normal((3, 7, 2, 4))
    before = thread_count()
    results = []
    try:
        for threads in (1, 2, 3):
            set_thread_count(threads)
            results.append(cpu.rotary(x, *tables(7, 4)))
    finally:
        set_thread_count(before)
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_any_memory_layout(rng):
    x = rng.standard_normal((2, 5, 3, 4))
    cos, sin = tables(5, 4)
    expected = cpu.rotary(x, cos, sin)
    read_only = x.copy()
    read_only.flags.writeable = False
    for variant in (np.asfortranarray(x), x[:, ::-1].copy()[:, ::-1], read_only, x.astype(">f8")):
        np.testing.assert_array_equal(cpu.rotary(variant, cos, sin), expected)


@pytest.mark.parametrize(
    ("shape", "length", "width", "dtype", "error"),
    [
        ((2, 5, 3, 4), 4, 4, np.float64, ValueError),
        ((2, 5, 3, 4), 5, 6, np.float64, ValueError),
        ((5, 3, 4), 5, 4, np.float64, ValueError),
        ((2, 5, 3, 4), 5, 4, np.float32, TypeError),
    ],
)
def test_refuses(shape, length, width, dtype, error):
    with pytest.raises(error, match="given"):
        cpu.rotary(np.ones(shape), *tables(length, width, dtype))


def test_refuses_an_odd_width():
    with pytest.raises(ValueError, match="even"):
        rotary_tables(np.arange(3), 5, 10000.0)
    with pytest.raises(ValueError, match="even"):
        cpu.rotary(np.ones((1, 2, 1, 3)), np.ones((2, 1)), np.ones((2, 1)))


def test_refuses_a_base_that_is_not_positive():
    with pytest.raises(ValueError, match="positive"):
        rotary_tables(np.arange(3), 4, 0.0)
