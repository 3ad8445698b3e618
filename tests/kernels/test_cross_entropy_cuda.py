import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.kernels.cross_entropy import cuda, reference  # noqa: E402

SMALL = [(0, 3), (1, 1), (2, 63), (3, 64), (5, 65), (4, 300)]
LARGE = [(65537, 5), (64, 50257), (2048, 256)]


def test_matches_the_reference(rng, machine, precision, relative_error, rounded):
    dtype, tolerance = precision
    tolerance = max(tolerance, 1e-12)  # the C library's exponential of float64 is not NumPy's
    random = machine.share([tuple(rng.integers(1, 700, 2)) for _ in range(200)], dtype)
    for rows, vocabulary in machine.shapes(SMALL, LARGE + random):
        logits, logits64 = rounded(3 * rng.standard_normal((rows, vocabulary)), dtype)
        targets = rng.integers(-1, vocabulary, rows)
        on_gpu = machine.upload(logits)
        losses, log_sum_exp = cuda.cross_entropy(on_gpu, targets)
        dlogits = cuda.cross_entropy_backward(on_gpu, machine.upload(targets), log_sum_exp, 0.25)
        expected_losses, expected_sum = reference.cross_entropy(logits64, targets)
        gradient = reference.cross_entropy_backward(logits64, targets, expected_sum, 0.25)
        largest = np.maximum(np.abs(expected_sum), 1)
        assert relative_error(log_sum_exp, expected_sum, largest) <= tolerance, (rows, vocabulary)
        assert relative_error(losses, expected_losses, largest) <= tolerance, (rows, vocabulary)
        assert relative_error(dlogits, gradient, np.maximum(np.abs(gradient), 0.25)) <= tolerance
        assert dlogits.dtype == dtype


def test_large_logits_do_not_overflow(machine):
    logits = np.array([[1e4, 0.0], [-1e4, -1e4], [-np.inf, 2.0]], np.float32)
    losses, _ = cuda.cross_entropy(machine.upload(logits), np.array([0, 1, 1]))
    np.testing.assert_allclose(losses.to_numpy(), [0, np.log(2), 0], atol=1e-3)


@pytest.mark.parametrize("place", [0, 70])
def test_a_nan_makes_its_row_nan(rng, machine, place):
    logits = rng.standard_normal((3, 90)).astype(np.float32)
    logits[1, place] = np.nan
    targets = np.array([5, 5, 5])
    on_gpu = machine.upload(logits)
    losses, log_sum_exp = cuda.cross_entropy(on_gpu, targets)
    dlogits = cuda.cross_entropy_backward(on_gpu, targets, log_sum_exp, 1.0).to_numpy()
    assert np.isnan(losses.to_numpy()).tolist() == [False, True, False]
    assert np.isnan(dlogits).all(axis=1).tolist() == [False, True, False]
    assert np.isnan(dlogits).any(axis=1).tolist() == [False, True, False]


def test_targets_out_of_range(machine):
    logits = machine.upload(np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match=r"targets: 4 given, numbers in \[-1, 4\) wanted"):
        cuda.cross_entropy(logits, np.array([0, 4, 0]))
    on_gpu = machine.upload(np.array([0, 4, -2]))
    losses, log_sum_exp = cuda.cross_entropy(logits, on_gpu)
    assert np.isnan(losses.to_numpy()).tolist() == [False, True, True]
    dlogits = cuda.cross_entropy_backward(logits, on_gpu, log_sum_exp, 1.0)
    assert np.isnan(dlogits.to_numpy()).all(axis=1).tolist() == [False, True, True]


def test_same_bits_on_every_run(rng, machine):
    rows = 500 if machine.is_real else 2
    logits = machine.upload(rng.standard_normal((rows, 1000)).astype(np.float32))
    targets = machine.upload(rng.integers(0, 1000, rows))
    runs = [cuda.cross_entropy(logits, targets)[0].to_numpy() for _ in range(3)]
    np.testing.assert_array_equal(runs[1], runs[0])
    np.testing.assert_array_equal(runs[2], runs[0])


def test_in_place_matches_the_reference(rng, machine, precision, relative_error, rounded):
    dtype, tolerance = precision
    tolerance = max(tolerance, 1e-12)
    random = machine.share([tuple(rng.integers(1, 700, 2)) for _ in range(200)], dtype)
    # rows of whole eights, and of others; in the emulator a block has 512 numbers at once
    small = [*SMALL, (0, 8), (2, 8), (3, 520), (2, 1040)]
    for rows, vocabulary in machine.shapes(small, [*LARGE, (300, 49152)] + random):
        logits, logits64 = rounded(3 * rng.standard_normal((rows, vocabulary)), dtype)
        targets = rng.integers(-1, vocabulary, rows)
        on_gpu = machine.upload(logits)
        losses = cuda.cross_entropy_in_place(on_gpu, machine.upload(targets), 0.25)
        expected = reference.cross_entropy_in_place(logits64, targets, 0.25)
        largest = np.abs(expected) + 1
        assert relative_error(losses, expected, largest) <= tolerance, (rows, vocabulary)
        terms = np.maximum(np.abs(logits64), 0.25)
        assert relative_error(on_gpu, logits64, terms) <= tolerance, (rows, vocabulary)
        np.testing.assert_array_equal(on_gpu.to_numpy()[targets < 0], 0)


def test_in_place_with_a_scale_on_the_gpu(rng, machine):
    logits = rng.standard_normal((3, 24)).astype(np.float32)
    targets = np.array([0, 23, -1])
    results = []
    for scale in (0.125, machine.upload(np.float32([0.125]))):
        on_gpu = machine.upload(logits)
        cuda.cross_entropy_in_place(on_gpu, targets, scale)
        results.append(on_gpu.to_numpy())
    np.testing.assert_array_equal(*results)
    with pytest.raises(ValueError, match=r"scale of shape \(2,\) given"):
        cuda.cross_entropy_in_place(on_gpu, targets, machine.upload(np.zeros(2, np.float32)))


@pytest.mark.parametrize("vocabulary", [1040, 1041])
def test_in_place_with_numbers_that_are_not_finite(machine, vocabulary):
    logits = np.zeros((6, vocabulary), np.float32)
    logits[0] = -np.inf
    logits[0, 1000] = 3  # the only token that is not forbidden
    logits[1, 700] = np.nan
    logits[2, 5] = np.inf
    logits[3, 8:16] = -np.inf
    logits[4] = -1e30
    logits[4, -1] = 1e30
    targets = np.array([1000, 3, 3, 3, vocabulary - 1, vocabulary])
    expected = logits[:5].astype(np.float64)
    with np.errstate(invalid="ignore"):
        expected_losses = reference.cross_entropy_in_place(expected, targets[:5], 1.0)
    on_gpu = machine.upload(logits)
    losses = cuda.cross_entropy_in_place(on_gpu, machine.upload(targets), 1.0).to_numpy()
    gradients = on_gpu.to_numpy()
    np.testing.assert_allclose(losses[:5], expected_losses, rtol=1e-5, atol=1e-6)
    assert np.isnan(losses).tolist() == [False, True, True, False, False, True]
    assert np.isnan(gradients).all(axis=1).tolist() == np.isnan(losses).tolist()
    finite = [0, 3, 4]
    np.testing.assert_allclose(gradients[finite], expected[finite], atol=1e-6)
