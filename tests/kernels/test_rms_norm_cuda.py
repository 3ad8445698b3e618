import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.kernels.rms_norm import cuda, reference  # noqa: E402

EPS = 1e-5
SMALL = [(0, 4), (1, 1), (2, 31), (3, 33), (9, 64), (67, 5)]
LARGE = [(1, 2048), (65535, 3), (65536, 2), (65537, 33), (1000, 5632)]


def make(rng, rows, width):
    return (
        rng.standard_normal((rows, width)),
        rng.standard_normal(width),
        rng.standard_normal((rows, width)),
    )


def test_matches_the_reference(rng, machine, precision, relative_error, rounded):
    dtype, tolerance = precision
    random = machine.share([tuple(rng.integers(1, 700, 2)) for _ in range(200)], dtype)
    for rows, width in machine.shapes(SMALL, LARGE + random):
        (x, x64), (weight, weight64), (dy, dy64) = (
            rounded(array, dtype) for array in make(rng, rows, width)
        )
        x, weight, dy = map(machine.upload, (x, weight, dy))
        y, inverse_rms = cuda.rms_norm(x, weight, EPS)
        dx, dweight = cuda.rms_norm_backward(dy, x, weight, inverse_rms)
        expected_y, expected_inverse = reference.rms_norm(x64, weight64, EPS)
        gradients = reference.rms_norm_backward(dy64, x64, weight64, expected_inverse)
        for actual, expected, terms in (
            (y, expected_y, None),
            (inverse_rms, expected_inverse, None),
            (dx, gradients[0], expected_inverse[:, None] * dy64 * weight64),
            (dweight, gradients[1], None),
        ):
            assert relative_error(actual, expected, terms) <= tolerance, (rows, width)
        assert (y.dtype, dx.dtype, dweight.dtype) == (dtype, dtype, dtype)


def test_a_nan_stays_in_its_row(rng, machine):
    x, weight, _ = make(rng, 3, 40)
    x[1, 7] = np.nan
    y, _ = cuda.rms_norm(machine.upload(x), machine.upload(weight), EPS)
    assert np.isnan(y.to_numpy()).all(axis=1).tolist() == [False, True, False]


def test_same_bits_on_every_run(rng, machine):
    rows = 70000 if machine.is_real else 70
    x, weight, dy = (machine.upload(a.astype(np.float32)) for a in make(rng, rows, 24))
    _, inverse_rms = cuda.rms_norm(x, weight, EPS)
    runs = [cuda.rms_norm_backward(dy, x, weight, inverse_rms) for _ in range(3)]
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
