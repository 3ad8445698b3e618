import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.kernels import cuda_scalars  # noqa: E402
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


def coefficients(learning_rate, beta1, beta2, eps, weight_decay, step, grad_scale):
    del grad_scale
    correction = learning_rate / (1 - beta1**step), (1 - beta2**step) ** -0.5
    decay = learning_rate * weight_decay
    return np.float32([beta1, 1 - beta1, beta2, 1 - beta2, eps, decay, *correction])


@pytest.mark.parametrize("copy_dtype", [None, ml_dtypes.bfloat16, np.float16])
def test_a_recorded_step_matches_the_reference(rng, machine, relative_error, copy_dtype):
    for shape in machine.shapes([*SMALL, (2056,)], LARGE):
        host = [array.astype(np.float32) for array in make(rng, shape)]
        arrays = [machine.upload(array) for array in host]
        copy = None if copy_dtype is None else machine.upload(np.zeros(shape, copy_dtype))
        settings = machine.upload(coefficients(**SETTINGS))
        scale = machine.upload(np.float32([SETTINGS["grad_scale"]]))
        cuda.adamw_step_recorded(*arrays, copy, settings, scale)
        expected = [array.astype(np.float64) for array in host]
        reference.adamw_step(*expected, **SETTINGS)
        for actual, wanted in zip(arrays, expected, strict=True):
            assert relative_error(actual, wanted) <= 1e-6, shape
        if copy is not None:
            rounded = arrays[0].to_numpy().astype(copy_dtype)
            np.testing.assert_array_equal(copy.to_numpy(), rounded)


def test_a_scale_of_nan_changes_nothing(rng, machine):
    host = [array.astype(np.float32) for array in make(rng, 300)]
    arrays = [machine.upload(array) for array in host]
    copy = machine.upload(np.ones(300, np.float16))
    settings = machine.upload(coefficients(**SETTINGS))
    cuda.adamw_step_recorded(*arrays, copy, settings, machine.upload(np.float32([np.nan])))
    for actual, before in zip(arrays, host, strict=True):
        np.testing.assert_array_equal(actual.to_numpy(), before)
    np.testing.assert_array_equal(copy.to_numpy(), 1)


@pytest.mark.parametrize("offset", [4, 1])
def test_a_recorded_step_of_parts_of_longer_arrays(rng, machine, offset):
    host = [array.astype(np.float32) for array in make(rng, 64)]
    settings = machine.upload(coefficients(**SETTINGS))
    scale = machine.upload(np.float32([1]))
    whole = [machine.upload(array) for array in host]
    cuda.adamw_step_recorded(*whole, None, settings, scale)
    arrays = [machine.upload(array) for array in host]
    cuda.adamw_step_recorded(*(array[offset:] for array in arrays), None, settings, scale)
    for actual, before, wanted in zip(arrays, host, whole, strict=True):
        np.testing.assert_array_equal(actual.to_numpy()[offset:], wanted.to_numpy()[offset:])
        np.testing.assert_array_equal(actual.to_numpy()[:offset], before[:offset])


def test_clip_scale(machine):
    def scale(squares, loss, limit):
        arrays = (machine.upload(np.array([number])) for number in (squares, loss))
        return float(cuda.clip_scale_on_gpu(*arrays, limit).to_numpy()[0])

    assert scale(4.0, 1.0, 1.0) == 0.5
    assert scale(4.0, -1.0, 2.0) == scale(0.25, 1.0, 1.0) == scale(4.0, 1.0, 0.0) == 1.0
    for squares, loss in ((np.nan, 1.0), (np.inf, 1.0), (4.0, np.nan), (4.0, -np.inf)):
        assert np.isnan(scale(squares, loss, 1.0))


def test_sum(rng, machine, precision):
    dtype, _ = precision
    for size in machine.shapes([0, 1, 257, 1100], [2**23 + 5]):
        numbers = rng.standard_normal(size).astype(dtype)
        total = cuda_scalars.sum_on_gpu(machine.upload(numbers))
        assert (total.shape, total.dtype) == ((1,), np.float64)
        wanted = numbers.astype(np.float64)
        np.testing.assert_allclose(
            total.to_numpy()[0], wanted.sum(), rtol=0, atol=1e-12 * np.abs(wanted).sum()
        )


def test_a_recorded_step_refuses_what_does_not_fit(machine):
    ones = [machine.upload(np.ones(8, np.float32)) for _ in range(5)]
    one = machine.upload(np.ones(1, np.float32))
    with pytest.raises(ValueError, match=r"scale of shape \(8,\) given"):
        cuda.adamw_step_recorded(*ones[:4], None, ones[4], ones[4])
    with pytest.raises(TypeError, match="copy of dtype"):
        cuda.adamw_step_recorded(*ones[:4], ones[4], ones[4], one)
    with pytest.raises(TypeError, match="grad of dtype float64 given, float32 wanted"):
        cuda.adamw_step_recorded(
            ones[0], machine.upload(np.ones(8)), *ones[2:4], None, ones[4], one
        )
    with pytest.raises(TypeError, match="loss_sum of dtype float32 given, float64 wanted"):
        cuda.clip_scale_on_gpu(machine.upload(np.ones(1)), one, 1.0)
