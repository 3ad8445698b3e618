import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.kernels.embedding import cuda, reference  # noqa: E402

SMALL = [(0, 3, 2), (1, 1, 1), (3, 2, 65), (70, 5, 3), (130, 4, 70), (32, 64, 8), (40, 3, 264)]
LARGE = [(65537, 300, 33), (16384, 32000, 128), (5000, 1, 300), (16384, 49152, 520), (7, 65, 2048)]


def test_matches_the_reference(rng, machine, precision, relative_error, rounded):
    dtype, tolerance = precision
    random = machine.share([tuple(rng.integers(1, 700, 3)) for _ in range(200)], dtype)
    for rows, vocabulary, width in machine.shapes(SMALL, LARGE + random):
        tokens = rng.integers(0, vocabulary, rows)
        table, _ = rounded(rng.standard_normal((vocabulary, width)), dtype)
        x = cuda.embedding(tokens, machine.upload(table))
        np.testing.assert_array_equal(x.to_numpy(), reference.embedding(tokens, table))

        dx, dx64 = rounded(rng.standard_normal((rows, width)), dtype)
        dtable, expected = rounded(rng.standard_normal((vocabulary, width)), dtype)
        on_gpu = machine.upload(dtable)
        cuda.embedding_backward(machine.upload(dx), machine.upload(tokens), on_gpu)
        reference.embedding_backward(dx64, tokens, expected)
        assert relative_error(on_gpu, expected) <= tolerance, (rows, vocabulary, width)


@pytest.mark.parametrize("token_dtype", [np.int32, np.int64, np.uint8])
def test_tokens_of_any_integers(rng, machine, token_dtype):
    table = rng.standard_normal((5, 3)).astype(np.float32)
    tokens = np.array([4, 0, 4], token_dtype)
    x = cuda.embedding(tokens, machine.upload(table))
    np.testing.assert_array_equal(x.to_numpy(), table[tokens])


def test_gradients_of_16_bits_are_added_in_float32(rng, machine):
    dx = rng.standard_normal((40, 3)).astype(ml_dtypes.bfloat16)
    dtable = machine.upload(np.zeros((1, 3), np.float32))
    cuda.embedding_backward(machine.upload(dx), np.zeros(40, np.int64), dtable)
    expected = dx.astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(dtable.to_numpy()[0], expected, rtol=1e-5, atol=1e-5)


def test_runs_of_tokens_that_straddle_chunks(rng, machine):
    """Runs that end at, begin at, go over and hold several chunks of the sorted list."""
    chunk = cuda.CHUNK
    counts = [chunk, 3, chunk - 3, chunk + 1, 2 * chunk, 0, 3 * chunk - 2, 1, 1, 5]
    tokens = rng.permutation(np.repeat(np.arange(len(counts)) * 30, counts))
    tokens[rng.integers(0, tokens.size, 5)] = [-1, 400, 2**40, 65, -(2**40)]
    dx = rng.integers(-8, 9, (tokens.size, 16)).astype(np.float32)  # sums are exact
    dtable = rng.integers(-8, 9, (300, 16)).astype(np.float32)
    on_gpu = machine.upload(dtable)
    cuda.embedding_backward(machine.upload(dx), machine.upload(tokens), on_gpu)
    in_range = (tokens >= 0) & (tokens < 300)
    reference.embedding_backward(dx[in_range], tokens[in_range], dtable)
    np.testing.assert_array_equal(on_gpu.to_numpy(), dtable)


def test_same_bits_on_every_run(rng, machine):
    rows = 20000 if machine.is_real else 200
    dx = machine.upload(rng.standard_normal((rows, 7)).astype(np.float32))
    tokens = machine.upload(rng.integers(0, 5, rows))
    results = []
    for _ in range(3):
        dtable = machine.upload(np.zeros((5, 7), np.float32))
        cuda.embedding_backward(dx, tokens, dtable)
        results.append(dtable.to_numpy())
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])


def test_tokens_out_of_range(machine):
    table = machine.upload(np.ones((3, 2), np.float32))
    with pytest.raises(ValueError, match=r"tokens: 3 given, numbers in \[0, 3\) wanted"):
        cuda.embedding(np.array([0, 3]), table)
    on_gpu = machine.upload(np.array([0, 3, -1, 2]))
    x = cuda.embedding(on_gpu, table).to_numpy()
    np.testing.assert_array_equal(np.isnan(x), [[False] * 2, [True] * 2, [True] * 2, [False] * 2])
    dtable = machine.upload(np.zeros((3, 2), np.float32))
    cuda.embedding_backward(machine.upload(np.ones((4, 2), np.float32)), on_gpu, dtable)
    np.testing.assert_array_equal(dtable.to_numpy(), [[1, 1], [0, 0], [1, 1]])


def test_refuses_what_does_not_fit(machine):
    table = machine.upload(np.ones((3, 2), np.float32))
    with pytest.raises(TypeError, match="tokens of dtype float64 given, integers wanted"):
        cuda.embedding(np.ones(2), table)
    with pytest.raises(ValueError, match=r"dtable of shape \(3, 2\) given, shape \(V, 4\) wanted"):
        cuda.embedding_backward(
            machine.upload(np.ones((2, 4), np.float32)), np.zeros(2, np.int64), table
        )
