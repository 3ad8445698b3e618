import numpy as np
import pytest

from twell_numba.device import set_thread_count, thread_count
from twell_numba.kernels.cross_entropy import cpu, reference

SHAPES = [(0, 5), (1, 1), (2, 3), (3, 63), (3, 64), (3, 65), (300, 257)]


def make(rng, rows, vocabulary, dtype=np.float64):
    logits = (3 * rng.standard_normal((rows, vocabulary))).astype(dtype)
    targets = rng.integers(-1, vocabulary, rows)
    return logits, targets


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-13)])
@pytest.mark.parametrize(("rows", "vocabulary"), SHAPES)
def test_matches_the_reference(rng, rows, vocabulary, dtype, tolerance):
    logits, targets = make(rng, rows, vocabulary, dtype)
    losses, log_sum_exp = cpu.cross_entropy(logits, targets)
    dlogits = cpu.cross_entropy_backward(logits, targets, log_sum_exp, 0.25)

    wide = logits.astype(np.float64)
    expected_losses, expected_sum = reference.cross_entropy(wide, targets)
    expected_gradient = reference.cross_entropy_backward(wide, targets, expected_sum, 0.25)
    for actual, expected in (
        (losses, expected_losses),
        (log_sum_exp, expected_sum),
        (dlogits, expected_gradient),
    ):
        assert actual.dtype == dtype
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
    assert not losses[targets < 0].any()
    assert not dlogits[targets < 0].any()


def test_reference_gradient(rng, gradient_check):
    logits, targets = make(rng, 6, 5)
    _, log_sum_exp = reference.cross_entropy(logits, targets)
    gradient = reference.cross_entropy_backward(logits, targets, log_sum_exp, 0.5)
    gradient_check(
        lambda: 0.5 * reference.cross_entropy(logits, targets)[0].sum(), [logits], [gradient], rng
    )


@pytest.mark.parametrize("vocabulary", [5, 100])
@pytest.mark.parametrize("position", [0, -1])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_logit_that_is_not_finite_gives_a_loss_of_nan(vocabulary, position, value):
    logits = np.zeros((2, vocabulary), np.float32)
    logits[1, position] = value
    targets = np.array([1, 1])
    losses, log_sum_exp = cpu.cross_entropy(logits, targets)
    assert np.isnan(losses[1])
    np.testing.assert_allclose(losses[0], np.log(vocabulary), rtol=1e-6)
    assert np.isnan(cpu.cross_entropy_backward(logits, targets, log_sum_exp, 1.0)[1]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_logits_do_not_overflow(dtype):
    logits = np.array([[1e4, 0, -1e4], [-1e4, -1e4, -1e4], [-np.inf, 0, -200]], dtype)
    losses, _ = cpu.cross_entropy(logits, np.array([0, 1, 1]))
    np.testing.assert_allclose(losses, [0, np.log(3), 0], rtol=1e-3)


def test_same_bits_for_every_thread_count(rng, monkeypatch):
    monkeypatch.setattr(cpu, "GRAIN", 1)
    logits, targets = make(rng, 100, 70, np.float32)
    before = thread_count()
    results = []
    try:
        for threads in (1, 2, 3):
            set_thread_count(threads)
            losses, log_sum_exp = cpu.cross_entropy(logits, targets)
            gradient = cpu.cross_entropy_backward(logits, targets, log_sum_exp, 0.1)
            results.append((losses, log_sum_exp, gradient))
    finally:
        set_thread_count(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_any_memory_layout(rng):
    logits, targets = make(rng, 6, 8)
    expected, log_sum_exp = cpu.cross_entropy(logits, targets)
    read_only = logits.copy()
    read_only.flags.writeable = False
    for variant in (
        np.asfortranarray(logits),
        logits[::-1].copy()[::-1],
        read_only,
        logits.astype(">f8"),
    ):
        np.testing.assert_array_equal(cpu.cross_entropy(variant, targets)[0], expected)


@pytest.mark.parametrize("target", [-2, 5])
def test_refuses_a_target_out_of_range(target):
    with pytest.raises(ValueError, match=f"target {target} given"):
        cpu.cross_entropy(np.zeros((2, 5)), np.array([0, target]))


@pytest.mark.parametrize(
    ("logits", "targets", "error"),
    [
        (np.zeros((2, 5)), np.zeros(3, np.int64), ValueError),
        (np.zeros(5), np.zeros(5, np.int64), ValueError),
        (np.zeros((2, 5)), np.zeros(2), TypeError),
        (np.zeros((2, 5), np.float16), np.zeros(2, np.int64), TypeError),
    ],
)
def test_refuses(logits, targets, error):
    with pytest.raises(error, match="given"):
        cpu.cross_entropy(logits, targets)


@pytest.mark.parametrize(("rows", "vocabulary"), [(0, 3), (1, 1), (5, 17), (300, 50)])
def test_in_place_gives_the_same(rng, rows, vocabulary):
    logits = rng.standard_normal((rows, vocabulary)).astype(np.float32)
    targets = rng.integers(-1, vocabulary, rows)
    expected, log_sum_exp = cpu.cross_entropy(logits, targets)
    gradient = cpu.cross_entropy_backward(logits, targets, log_sum_exp, 0.25)
    other = logits.copy()
    losses = cpu.cross_entropy_in_place(logits, targets, 0.25)
    np.testing.assert_array_equal(losses, expected)
    np.testing.assert_array_equal(logits, gradient)
    np.testing.assert_allclose(
        reference.cross_entropy_in_place(other, targets, 0.25), losses, rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(other, logits, atol=1e-6)


def test_in_place_refuses_what_it_cannot_change():
    logits = np.zeros((4, 6))
    with pytest.raises(ValueError, match="C-contiguous, writable array wanted"):
        cpu.cross_entropy_in_place(logits[:, ::2], np.zeros(4, int), 1.0)
    with pytest.raises(ValueError, match="target 6 given"):
        cpu.cross_entropy_in_place(logits, np.full(4, 6), 1.0)
    with pytest.raises(TypeError, match="float32 or float64 wanted"):
        cpu.cross_entropy_in_place(logits.astype(np.int64), np.zeros(4, int), 1.0)
