"""Drawing tokens without sorting, against the definition; and the definition itself."""

import numpy as np
import pytest

from twell_numba.infer.sampling import sample
from twell_numba.kernels.sampling import cpu, reference, sample_token

# temperature, top-k, top-p, min-p
SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.0, 3, 0.5, 0.5),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (0.9, 12, 0.6, 0.0),
    (1.0, 0, 1.0, 0.1),
    (2.0, 200, 0.9, 0.05),
    (1e-3, 0, 1.0, 0.0),
    (1e3, 0, 0.999, 0.0),
    (1e-300, 0, 1.0, 1.0),
]


@pytest.mark.parametrize("vocabulary", [1, 2, 90, 5000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_draws_what_the_reference_draws(rng, dtype, vocabulary):
    """Rows of many settings at once; of the logits many are equal or forbidden."""
    logits = (3 * rng.standard_normal((300, vocabulary))).astype(dtype)
    logits[:, ::3] = np.round(logits[:, ::3])
    logits[:, 1:][rng.random((300, vocabulary - 1)) < 0.1] = -np.inf
    logits[7], logits[8] = 0, -0.0
    settings = [np.array(setting) for setting in zip(*SETTINGS * 30, strict=True)]
    uniform = rng.random(300)
    uniform[:10], uniform[10:20] = 0, 1 - 2**-53
    expected = reference.sample_token(logits, uniform, *settings)
    np.testing.assert_array_equal(cpu.sample_token(logits, uniform, *settings), expected)


def test_logits_far_below_the_largest(rng):
    """More of them than any bucket is meant for, and some without any weight."""
    logits = np.concatenate([[0.0, -1.0], np.linspace(-60, -900, 3000)])
    for number in (0.0, 0.5, 0.9, 1 - 1e-14):
        uniform = np.array([number])
        expected = reference.sample_token(logits, uniform)
        np.testing.assert_array_equal(cpu.sample_token(logits, uniform), expected)


@pytest.mark.parametrize("temperature", [1e-300, 1.0, 1e305, 1.7e308])
def test_logits_that_are_as_good_as_equal(temperature):
    """By how little they differ, nothing can be divided."""
    for logits in ([0.0, -5e-324, -1e-310], [-1.0, 0.0, -5.0]):
        for number in (0.1, 0.5, 0.9):
            given = np.array([logits]), np.array([number]), temperature
            np.testing.assert_array_equal(cpu.sample_token(*given), reference.sample_token(*given))


def test_min_p_keeps_what_has_a_fraction_of_the_largest_probability():
    logits = np.log([[0.5, 0.2, 0.26, 0.04]])
    drawn = {
        int(cpu.sample_token(logits, np.array([number]), 1.0, 0, 1.0, 0.5)[0])
        for number in np.linspace(0, 1, 99, endpoint=False)
    }
    assert drawn == {0, 2}


def test_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"uniform of shape \(1,\) given, shape \(2,\) wanted"):
        cpu.sample_token(np.zeros((2, 3)), np.zeros(1))
    with pytest.raises(ValueError, match=r"logits of shape \(2, 0\) given"):
        cpu.sample_token(np.zeros((2, 0)), np.zeros(2))
    with pytest.raises(TypeError, match="float32 or float64 wanted"):
        cpu.sample_token(np.zeros(3, np.int64), np.zeros(1))


@pytest.mark.parametrize("settings", [(1.0, 0, 1.0), (0.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 9, 0.8)])
def test_draws_what_generation_draws(rng, settings):
    logits = 2 * rng.standard_normal((50, 30)).astype(np.float32)
    uniform = np.random.default_rng(7).random(50)
    generator = np.random.default_rng(7)
    if settings[0] == 0:
        expected = logits.argmax(axis=1)
    else:
        expected = np.array([sample(row, generator, *settings) for row in logits])
    np.testing.assert_array_equal(sample_token(logits, uniform, *settings), expected)
    assert sample_token(logits[3], uniform[3:4], *settings) == expected[3:4]


def test_frequencies_are_the_probabilities():
    logits = np.log(np.float32([[0.5, 0.2, 0.3]]))
    uniform = np.linspace(0, 1, 1000, endpoint=False)
    tokens = [int(sample_token(logits, np.array([number]))[0]) for number in uniform]
    np.testing.assert_allclose(np.bincount(tokens), [500, 200, 300], atol=1)


def test_what_no_token_can_be_drawn_from():
    logits = np.zeros((4, 3), np.float32)
    logits[0, 2], logits[1, 0], logits[2] = np.nan, np.inf, -np.inf
    np.testing.assert_array_equal(sample_token(logits, np.zeros(4)), [-1, -1, -1, 0])
