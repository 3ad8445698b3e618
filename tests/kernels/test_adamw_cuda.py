import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.kernels.adamw import cuda, reference  # noqa: E402

SETTINGS = {
    "learning_rate": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1,
    "step": 3, "grad_scale": 0.5,
}  # fmt: skip
SMALL = [(0,), (1,), (255,), (256,), (257,), (3, 7, 2)]
LARGE = [(65535,), (65537,), (1000, 1003), (2**23 + 1,)]


def make(rng, shape):
    value, grad, first = (rng.standard_normal(shape) for _ in range(3))
    return value, grad, first, rng.random(shape)


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "tolerance"),
    [
        (np.float32, np.float32, 1e-6),
        (np.float64, np.float64, 1e-14),
        (np.float32, ml_dtypes.bfloat16, 1e-6),
        (np.float32, np.float16, 1e-6),
    ],
)
def test_matches_the_reference(rng, machine, relative_error, dtype, grad_dtype, tolerance):
    for shape in machine.shapes(SMALL, LARGE):
        value, grad, first, second = make(rng, shape)
        grad = grad.astype(grad_dtype)
        host = [value.astype(dtype), grad, first.astype(dtype), second.astype(dtype)]
        arrays = [machine.upload(array) for array in host]
        cuda.adamw_step(*arrays, **SETTINGS)
        expected = [array.astype(np.float64) for array in host]
        reference.adamw_step(*expected, **SETTINGS)
        for actual, wanted in zip(arrays, expected, strict=True):
            assert relative_error(actual, wanted) <= tolerance, shape


def test_sum_of_squares(rng, machine, precision):
    dtype, _ = precision
    for shape in machine.shapes([(0,), (1,), (257,), (40, 33)], [(2**23 + 5,), (30, 70001)]):
        grad = rng.standard_normal(shape).astype(dtype)
        array = machine.upload(grad)
        sums = [cuda.sum_of_squares(array) for _ in range(3 if machine.is_real else 1)]
        assert len(set(sums)) == 1, "other bits in another run"
        assert sums[0] == pytest.approx(
            reference.sum_of_squares(grad.astype(np.float64)), rel=1e-12
        )


def test_sum_of_squares_is_not_rounded_to_float32(machine):
    grad = np.full(3, 2.0**-60, np.float32)
    grad[0] = 1e30  # its square is more than float32 holds
    assert cuda.sum_of_squares(machine.upload(grad)) == pytest.approx(1e60)


def test_a_nan_in_the_gradient_reaches_the_value(machine):
    grad = np.array([1.0, np.nan, 1.0], np.float32)
    arrays = [
        machine.upload(a) for a in (np.ones(3, np.float32), grad, *np.zeros((2, 3), np.float32))
    ]
    cuda.adamw_step(*arrays, **SETTINGS)
    assert np.isnan(arrays[0].to_numpy()).tolist() == [False, True, False]
    assert np.isnan(cuda.sum_of_squares(machine.upload(grad)))


def test_refuses_what_does_not_fit(machine):
    ones = [machine.upload(np.ones(3, np.float32)) for _ in range(4)]
    with pytest.raises(ValueError, match="step 0 given"):
        cuda.adamw_step(*ones, **(SETTINGS | {"step": 0}))
    low = machine.upload(np.ones(3, ml_dtypes.bfloat16))
    with pytest.raises(TypeError, match="value of dtype bfloat16 given, float32 or float64 wanted"):
        cuda.adamw_step(low, ones[1], low, low, **SETTINGS)
    with pytest.raises(TypeError, match="grad of dtype float64 given, float32 wanted"):
        cuda.adamw_step(ones[0], machine.upload(np.ones(3)), *ones[2:], **SETTINGS)
    short = machine.upload(np.ones(2, np.float32))
    with pytest.raises(ValueError, match="first_moment of shape"):
        cuda.adamw_step(ones[0], ones[1], short, ones[3], **SETTINGS)
