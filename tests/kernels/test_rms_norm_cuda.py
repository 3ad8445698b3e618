import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.kernels.rms_norm import cuda, reference  # noqa: E402

EPS = 1e-5
# On a GPU rows of 264 to 2048 stay in registers, in the emulator those of 264 to 512.
SMALL = [
    (0, 4),
    (1, 1),
    (2, 31),
    (3, 33),
    (9, 64),
    (67, 5),
    (0, 264),
    (18, 264),
    (3, 512),
    (2, 520),
]
LARGE = [(1, 2048), (65535, 3), (65536, 2), (65537, 33), (1000, 5632), (16385, 2048), (300, 2056)]


def make(rng, rows, width):
    return (
        rng.standard_normal((rows, width)),
        rng.standard_normal(width),
        rng.standard_normal((rows, width)),
    )


def test_matches_the_reference(rng, machine, precision, relative_error, rounded):
    dtype, tolerance = precision
    sums = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    random = machine.share([tuple(rng.integers(1, 700, 2)) for _ in range(200)], dtype)
    for rows, width in machine.shapes(SMALL, LARGE + random):
        (x, x64), (weight, weight64), (dy, dy64) = (
            rounded(array, dtype) for array in make(rng, rows, width)
        )
        x, weight, dy = map(machine.upload, (x, weight, dy))
        dweight = machine.upload(np.ones(width, sums))
        y, inverse_rms = cuda.rms_norm(x, weight, EPS)
        dx = cuda.rms_norm_backward(dy, x, weight, inverse_rms, dweight)
        expected_y, expected_inverse = reference.rms_norm(x64, weight64, EPS)
        expected_dweight = np.ones(width)
        expected_dx = reference.rms_norm_backward(
            dy64, x64, weight64, expected_inverse, expected_dweight
        )
        for actual, expected, terms in (
            (y, expected_y, None),
            (inverse_rms, expected_inverse, None),
            (dx, expected_dx, expected_inverse[:, None] * dy64 * weight64),
            (dweight, expected_dweight, None),
        ):
            assert relative_error(actual, expected, terms) <= tolerance, (rows, width)
        assert (y.dtype, dx.dtype, dweight.dtype) == (dtype, dtype, sums)


def test_a_residual_stream_is_added(rng, machine, precision, relative_error, rounded):
    dtype, tolerance = precision
    for rows, width in machine.shapes(SMALL, LARGE):
        (x, _), (weight, weight64), (dy, dy64) = (
            rounded(array, dtype) for array in make(rng, rows, width)
        )
        (addend, _), _, (residual, residual64) = (
            rounded(array, dtype) for array in make(rng, rows, width)
        )
        wanted = x + addend  # rounded to the dtype
        x, addend, weight, dy, residual = map(machine.upload, (x, addend, weight, dy, residual))
        total, y, inverse_rms = cuda.add_rms_norm(x, addend, weight, EPS)
        np.testing.assert_array_equal(total.to_numpy(), wanted)
        total64 = wanted.astype(np.float64)
        expected_y, expected_inverse = reference.rms_norm(total64, weight64, EPS)
        assert relative_error(y, expected_y) <= tolerance
        assert relative_error(inverse_rms, expected_inverse) <= tolerance

        dweight, expected_dweight = machine.upload(np.ones(width, dtype)), np.ones(width)
        dx = cuda.rms_norm_backward(dy, total, weight, inverse_rms, dweight, residual)
        expected_dx = reference.rms_norm_backward(
            dy64, total64, weight64, expected_inverse, expected_dweight, residual64
        )
        terms = np.abs(residual64) + np.abs(expected_inverse[:, None] * dy64 * weight64)
        assert relative_error(dx, expected_dx, terms) <= tolerance
        assert relative_error(dweight, expected_dweight) <= tolerance
        assert dweight.dtype == dtype


def test_a_nan_stays_in_its_row(rng, machine):
    for width in (40, 264):
        x, weight, dy = make(rng, 3, width)
        x[1, 7] = np.nan
        x, weight, dy, grad = map(machine.upload, (x, weight, dy, np.zeros(width)))
        y, inverse_rms = cuda.rms_norm(x, weight, EPS)
        dx = cuda.rms_norm_backward(dy, x, weight, inverse_rms, grad)
        for array in (y.to_numpy(), dx.to_numpy()):
            assert np.isnan(array).all(axis=1).tolist() == [False, True, False]
            assert np.isnan(array).any(axis=1).tolist() == [False, True, False]


@pytest.mark.parametrize("width", [24, 264])
def test_same_bits_on_every_run(rng, machine, width):
    rows = 70000 if machine.is_real else 35
    x, weight, dy = (machine.upload(a.astype(np.float32)) for a in make(rng, rows, width))
    _, inverse_rms = cuda.rms_norm(x, weight, EPS)
    runs = []
    for _ in range(3):
        grad = machine.upload(np.zeros(width, np.float32))
        runs.append((cuda.rms_norm_backward(dy, x, weight, inverse_rms, grad), grad))
    for dx, dweight in runs[1:]:
        np.testing.assert_array_equal(dx.to_numpy(), runs[0][0].to_numpy())
        np.testing.assert_array_equal(dweight.to_numpy(), runs[0][1].to_numpy())


def test_refuses_what_does_not_fit(machine):
    x = machine.upload(np.ones((2, 3), np.float32))
    weight = machine.upload(np.ones(3, np.float32))
    with pytest.raises(TypeError, match="x of type ndarray given, a DeviceArray wanted"):
        cuda.rms_norm(np.ones((2, 3), np.float32), weight, EPS)
    with pytest.raises(TypeError, match="weight of dtype float64 given beside x of float32"):
        cuda.rms_norm(x, machine.upload(np.ones(3)), EPS)
    with pytest.raises(ValueError, match=r"weight of shape \(2,\) given, shape \(3,\) wanted"):
        cuda.rms_norm(x, machine.upload(np.ones(2, np.float32)), EPS)
    inverse_rms = machine.upload(np.ones(2, np.float32))
    with pytest.raises(ValueError, match=r"addend of shape \(3,\) given"):
        cuda.add_rms_norm(x, weight, weight, EPS)
    with pytest.raises(TypeError, match="weight_grad of dtype float64 given, float32 wanted"):
        cuda.rms_norm_backward(x, x, weight, inverse_rms, machine.upload(np.ones(3)))
    with pytest.raises(ValueError, match="residual of shape"):
        cuda.rms_norm_backward(x, x, weight, inverse_rms, weight, weight)
