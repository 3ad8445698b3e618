"""The definition of sampling, against that of text generation."""

import numpy as np
import pytest

from twell_numba.infer.sampling import sample
from twell_numba.kernels.sampling import sample_token


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
