import numpy as np
import pytest

from twell_numba.device import set_thread_count, thread_count
from twell_numba.kernels.embedding import cpu, reference


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 500])
def test_matches_the_reference(rng, rows, dtype):
    table = rng.standard_normal((11, 40)).astype(dtype)
    tokens = rng.integers(0, 11, rows)
    np.testing.assert_array_equal(cpu.embedding(tokens, table), reference.embedding(tokens, table))

    dx = rng.standard_normal((rows, 40)).astype(dtype)
    actual, expected = table.copy(), table.astype(np.float64)
    cpu.embedding_backward(dx, tokens, actual)
    reference.embedding_backward(dx.astype(np.float64), tokens, expected)
    tolerance = 1e-5 if dtype == np.float32 else 1e-13
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * 10)


def test_reference_gradient(rng, gradient_check):
    table, dx = rng.standard_normal((5, 3)), rng.standard_normal((8, 3))
    tokens = rng.integers(0, 5, 8)
    dtable = np.zeros_like(table)
    reference.embedding_backward(dx, tokens, dtable)
    gradient_check(lambda: np.sum(dx * reference.embedding(tokens, table)), [table], [dtable], rng)


def test_same_bits_for_every_thread_count(rng, monkeypatch):
    monkeypatch.setattr(cpu, "GRAIN", 1)
    dx = rng.standard_normal((3000, 100)).astype(np.float32)
    tokens = rng.integers(0, 7, 3000)
    before = thread_count()
    results = []
    try:
        for threads in (1, 2, 3):
            set_thread_count(threads)
            dtable = np.zeros((7, 100), np.float32)
            cpu.embedding_backward(dx, tokens, dtable)
            results.append(dtable)
    finally:
        set_thread_count(before)
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64, ">i8"])
def test_any_integer_dtype_and_layout(rng, dtype):
    table = rng.standard_normal((9, 4))
    tokens = np.array([0, 8, 3, 1], dtype)
    np.testing.assert_array_equal(cpu.embedding(tokens, table), table[[0, 8, 3, 1]])
    np.testing.assert_array_equal(cpu.embedding(tokens[::-1], table), table[[1, 3, 8, 0]])
    fortran = np.asfortranarray(table)
    np.testing.assert_array_equal(cpu.embedding(tokens, fortran), table[[0, 8, 3, 1]])


@pytest.mark.parametrize("token", [-1, 9, 2**40])
def test_refuses_a_token_out_of_range(token):
    tokens = np.array([0, token])
    with pytest.raises(ValueError, match=f"token {token} given"):
        cpu.embedding(tokens, np.ones((9, 4)))
    dtable = np.zeros((9, 4))
    with pytest.raises(ValueError, match=f"token {token} given"):
        cpu.embedding_backward(np.ones((2, 4)), tokens, dtable)
    np.testing.assert_array_equal(dtable, 0)


def test_refuses_a_huge_unsigned_token():
    with pytest.raises(ValueError, match="given"):
        cpu.embedding(np.array([2**64 - 1], np.uint64), np.ones((9, 4)))


def test_refuses_tokens_that_are_not_integers():
    with pytest.raises(TypeError, match="integers"):
        cpu.embedding(np.array([0.0]), np.ones((9, 4)))


def test_backward_refuses_what_it_cannot_change_in_place():
    dx, tokens = np.ones((2, 4)), np.array([0, 1])
    read_only = np.zeros((9, 4))
    read_only.flags.writeable = False
    for dtable, error in (
        (np.zeros((9, 4), np.float32), TypeError),
        (np.zeros((9, 5)), ValueError),
        (np.zeros((9, 4), order="F"), ValueError),
        (read_only, ValueError),
    ):
        with pytest.raises(error, match="wanted"):
            cpu.embedding_backward(dx, tokens, dtable)
