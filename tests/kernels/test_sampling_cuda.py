"""Tokens drawn on a GPU are those that the reference draws."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.kernels.sampling import cuda, reference  # noqa: E402

SETTINGS = [
    (1.0, 0, 1.0),
    (0.7, 5, 1.0),
    (1.3, 0, 0.8),
    (0.9, 12, 0.6),
    (1.5, 0, 1.0, 0.2),
    (1.2, 20, 0.9, 0.1),
]


def draw(machine, logits, uniform, *settings):
    tokens = cuda.sample_token(machine.upload(logits), machine.upload(uniform), *settings)
    assert (tokens.shape, tokens.dtype) == ((uniform.size,), np.int64)
    return tokens.to_numpy()


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_draws_what_the_reference_draws(rng, machine, dtype, settings):
    for rows, vocabulary in machine.shapes([(1, 1), (2, 90), (1, 520)], [(64, 49152), (200, 1000)]):
        logits = (2 * rng.standard_normal((rows, vocabulary))).astype(dtype)
        logits[:, ::3] = np.round(logits[:, ::3].astype(np.float32))  # many are equal
        logits[rng.random(logits.shape) < 0.1] = 0
        logits[rng.random(logits.shape) < 0.1] = -0.0
        logits[:, 1:][rng.random((rows, vocabulary - 1)) < 0.1] = -np.inf
        uniform = rng.random(rows)
        expected = reference.sample_token(logits.astype(np.float32), uniform, *settings)
        np.testing.assert_array_equal(draw(machine, logits, uniform, *settings), expected)


def test_the_edges_of_the_interval(machine):
    logits = np.float32([[0.0, -np.inf, 0.0, 0.0, 0.0]] * 6)
    uniform = np.array([0.0, 0.2499, 0.25, 0.5, 0.7499, 1 - 2**-53])
    assert draw(machine, logits, uniform).tolist() == [0, 0, 2, 3, 3, 4]
    assert draw(machine, logits, uniform, 1.0, 2).tolist() == [0, 0, 0, 2, 2, 2]
    assert draw(machine, logits, uniform, 1.0, 0, 0.75).tolist() == [0, 0, 0, 2, 3, 3]
    assert draw(machine, logits, uniform, 1.0, 0, 1e-9).tolist() == [0] * 6


def test_temperature_0_takes_the_first_of_the_likeliest(machine):
    logits = np.float32([[1, 3, 2, 3], [-5, -np.inf, -5, -6], [-0.0, 0.0, -1, -1]])
    assert draw(machine, logits, np.array([0.9] * 3), 0.0, 2, 0.5).tolist() == [1, 0, 0]


def test_min_p(machine):
    logits = np.log(np.float32([[0.5, 0.2, 0.26, 0.04]] * 5))
    uniform = np.array([0.0, 0.65, 0.66, 0.9, 0.99])
    assert draw(machine, logits, uniform, 1.0, 0, 1.0, 0.5).tolist() == [0, 0, 2, 2, 2]
    assert draw(machine, logits, uniform, 1.0, 0, 1.0, 1.0).tolist() == [0] * 5
    assert draw(machine, np.zeros((1, 9), np.float32), uniform[3:4], 1.0, 0, 1.0, 1.0) == [8]


def test_a_tiny_temperature_takes_the_likeliest(machine):
    logits = np.float32([1, 1.0001, 1])
    assert draw(machine, logits, np.array([0.99]), 1e-300).tolist() == [1]


def test_what_no_token_can_be_drawn_from(machine):
    logits = np.zeros((4, 70), np.float32)
    logits[0, 69] = np.nan
    logits[1, 3] = np.inf
    logits[2] = -np.inf
    for temperature in (1.0, 0.0):
        tokens = draw(machine, logits, np.full(4, 0.5), temperature)
        np.testing.assert_array_equal(tokens[:3], -1)
        assert tokens[3] >= 0


def test_refuses_what_does_not_fit(machine):
    logits, uniform = machine.upload(np.zeros((2, 3), np.float32)), machine.upload(np.zeros(1))
    with pytest.raises(ValueError, match=r"uniform of shape \(1,\) given, shape \(2,\) wanted"):
        cuda.sample_token(logits, uniform)
    with pytest.raises(TypeError, match="uniform of dtype float32 given, float64 wanted"):
        cuda.sample_token(logits, machine.upload(np.zeros(2, np.float32)))
    with pytest.raises(TypeError, match="logits of dtype float64 given"):
        cuda.sample_token(machine.upload(np.zeros(3)), uniform)
    with pytest.raises(ValueError, match=r"logits of shape \(0,\) given"):
        cuda.sample_token(machine.upload(np.zeros(0, np.float32)), uniform)
