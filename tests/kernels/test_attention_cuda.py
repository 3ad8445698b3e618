from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device.gpu import cudnn, determinism, from_numpy, record_graph  # noqa: E402
from twell_numba.kernels.attention import cuda, reference  # noqa: E402

# B, S, T, H, G, w: nothing, few queries (each on its own), a tile of 32 less and more one, more
# keys than queries, grouped heads, and widths around what one block computes
SMALL = [
    (0, 3, 3, 2, 1, 4),
    (2, 0, 3, 2, 1, 4),
    (1, 1, 1, 1, 1, 1),
    (2, 3, 7, 4, 2, 5),
    (1, 2, 260, 1, 1, 3),
    (1, 1, 3, 2, 1, 65),
    (1, 2, 35, 2, 1, 8),
    (1, 1, 5, 1, 1, 64),
    (1, 8, 8, 2, 1, 5),
    (1, 9, 33, 1, 1, 17),
]
LARGER = [(1, 33, 33, 2, 1, 3), (1, 8, 9, 1, 1, 65), (1, 9, 65, 2, 2, 2)]
LARGE = [
    (2, 5, 515, 6, 2, 16),
    (1, 1, 600, 2, 1, 256),
    (1, 7, 300, 2, 1, 32),
    (1, 1, 5000, 8, 2, 128),
    (2, 7, 1030, 4, 1, 64),
    (1, 130, 133, 2, 2, 256),
    (3, 257, 257, 6, 3, 96),
    (2, 1024, 1024, 4, 4, 64),
    (1, 65, 700, 8, 1, 128),
]
# For cuDNN: tiles of 64 and 128 that are full and not, one query more and less, few queries
FUSED = [
    (2, 128, 128, 4, 4, 64),
    (1, 129, 129, 4, 2, 64),
    (1, 127, 127, 2, 1, 128),
    (2, 64, 64, 3, 3, 32),
    (1, 704, 704, 2, 2, 64),
    (1, 1023, 1023, 2, 1, 64),
    (3, 7, 7, 2, 2, 64),
    (2, 2, 2, 2, 1, 8),
    (1, 1, 600, 8, 2, 64),
    (2, 9, 1000, 4, 4, 128),
    (1, 200, 328, 4, 1, 96),
]


def make(rng, batch, queries, keys, heads, groups, width):
    q, dy = rng.standard_normal((2, batch, queries, heads, width))
    k, v = rng.standard_normal((2, batch, keys, groups, width))
    return q, k, v, dy


def random_shapes(rng, count):
    for _ in range(count):
        batch, groups, sharing = (int(number) for number in rng.integers(1, 4, 3))
        queries, later, width = (int(number) for number in rng.integers(1, (150, 150, 257)))
        yield batch, queries, queries + later - 1, groups * sharing, groups, width


def check(rng, machine, precision, shapes, relative_error, rounded, path="tiled"):
    dtype, tolerance = precision
    for shape in shapes:
        (q, q64), (k, k64), (v, v64), (dy, dy64) = (rounded(a, dtype) for a in make(rng, *shape))
        q, k, v, dy = map(machine.upload, (q, k, v, dy))
        y, log_sum_exp = cuda.causal_attention(q, k, v, path=path)
        gradients = cuda.causal_attention_backward(dy, q, k, v, y, log_sum_exp, path=path)
        expected_y, expected_sum = reference.causal_attention(q64, k64, v64)
        expected = reference.causal_attention_backward(
            dy64, q64, k64, v64, expected_y, expected_sum
        )
        assert relative_error(y, expected_y) <= tolerance, shape
        assert relative_error(log_sum_exp, expected_sum) <= min(tolerance, 1e-5), shape
        # where queries see few keys or heads are narrow, dq and dk are differences of large numbers
        scale = np.linalg.norm(expected[2]) if shape[2] < 16 or shape[5] < 4 else 0
        for actual, wanted in zip(gradients, expected, strict=True):
            assert actual.dtype == dtype
            error = np.linalg.norm(actual.to_numpy().astype(np.float64) - wanted)
            assert error <= tolerance * max(np.linalg.norm(wanted), scale), shape


def test_matches_the_reference(rng, machine, precision, relative_error, rounded):
    small = SMALL if precision[0].itemsize == 8 else SMALL[3:4] + SMALL[6:7]
    shapes = machine.shapes(small, SMALL + LARGER + LARGE + list(random_shapes(rng, 200)))
    check(rng, machine, precision, shapes, relative_error, rounded)


@pytest.fixture
def machine_with_cudnn(real_gpu):
    """A real GPU for which cuDNN has attention."""
    is_there, text = cudnn.available()
    if not is_there:
        pytest.skip(text)
    if real_gpu.capability < cudnn.OLDEST_CAPABILITY:
        pytest.skip("cuDNN has no fused attention for so old a GPU, or is not wanted")
    return SimpleNamespace(gpu=real_gpu, upload=lambda array: from_numpy(array, real_gpu.stream))


@pytest.mark.gpu
@pytest.mark.parametrize("is_required", [True, False], ids=["fixed order", "any order"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.dtype(ml_dtypes.bfloat16), 5e-3), (np.dtype(np.float16), 1e-3)]
)
def test_cudnn_matches_the_reference(
    rng, machine_with_cudnn, relative_error, rounded, monkeypatch, dtype, tolerance, is_required
):
    monkeypatch.setattr(determinism, "_is_required", is_required)
    random = [
        (*shape[:5], 8 * -(-min(shape[5], 128) // 8))
        for shape in random_shapes(rng, 25)
        if shape[2] > 1  # one query and one key: no plan
    ]
    precision = dtype, tolerance
    check(rng, machine_with_cudnn, precision, FUSED + random, relative_error, rounded, "cudnn")


@pytest.mark.gpu
@pytest.mark.parametrize("is_required", [True, False], ids=["fixed order", "any order"])
@pytest.mark.parametrize("queries", [2, 64, 192, 704, 1000, 1280])
def test_cudnn_with_very_negative_scores(
    rng, machine_with_cudnn, relative_error, rounded, monkeypatch, queries, is_required
):
    """All scores near -120, where exp(0 - L) of what is past the ends is infinite."""
    monkeypatch.setattr(determinism, "_is_required", is_required)
    upload = machine_with_cudnn.upload
    for keys in (queries, queries + 64):
        q, k, v, dy = make(rng, 1, queries, keys, 2, 2, 64)
        q, k = 0.1 * q, 0.1 * k
        q[..., 0], k[..., 0] = 1, -120 * 64**0.5
        (q, q64), (k, k64), (v, v64), (dy, dy64) = (
            rounded(array, np.dtype(np.float16)) for array in (q, k, v, dy)
        )
        q, k, v, dy = map(upload, (q, k, v, dy))
        y, log_sum_exp = cuda.causal_attention(q, k, v, path="cudnn")
        gradients = cuda.causal_attention_backward(dy, q, k, v, y, log_sum_exp, path="cudnn")
        expected_y, expected_sum = reference.causal_attention(q64, k64, v64)
        expected = reference.causal_attention_backward(
            dy64, q64, k64, v64, expected_y, expected_sum
        )
        assert relative_error(y, expected_y) <= 5e-3
        for actual, wanted in zip(gradients, expected, strict=True):
            # in column 0 dq is the difference of numbers a thousand times larger
            actual, wanted = actual.to_numpy()[..., 1:], wanted[..., 1:]
            assert relative_error(actual, wanted) <= 5e-3, keys


@pytest.mark.gpu
@pytest.mark.parametrize("length", [9, 200, 256, 300])
def test_cudnn_reads_a_cache_as_far_as_it_is_filled(
    rng, machine_with_cudnn, relative_error, length
):
    q, k, v, _ = (array.astype(np.float16) for array in make(rng, 2, 9, 300, 4, 2, 64))
    k[:, length:] = v[:, length:] = np.nan
    arrays = map(machine_with_cudnn.upload, (q, k, v))
    y, log_sum_exp = cuda.causal_attention(*arrays, length=length, path="cudnn")
    expected_y, expected_sum = reference.causal_attention(
        *(array.astype(np.float64) for array in (q, k[:, :length], v[:, :length]))
    )
    assert relative_error(y, expected_y) <= 1e-3
    assert relative_error(log_sum_exp, expected_sum) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [128, 200])
def test_cudnn_gives_the_same_bits_and_can_be_recorded(
    rng, machine_with_cudnn, monkeypatch, queries
):
    monkeypatch.setattr(determinism, "_is_required", True)
    stream = machine_with_cudnn.gpu.stream
    first, second = (
        [array.astype(np.float16) for array in make(rng, 2, queries, queries, 4, 2, 64)]
        for _ in range(2)
    )
    arrays = q, k, v, dy = list(map(machine_with_cudnn.upload, first))

    def step():
        y, log_sum_exp = cuda.causal_attention(q, k, v, path="cudnn")
        gradients = cuda.causal_attention_backward(dy, q, k, v, y, log_sum_exp, path="cudnn")
        return y, log_sum_exp, *gradients

    expected = {}
    for number, contents in enumerate((first, second)):
        for array, content in zip(arrays, contents, strict=True):
            array.copy_from(content)
        expected[number] = [array.to_numpy() for array in step()]
    with record_graph(stream) as graph:
        results = step()
    for number, contents in ((0, first), (1, second), (0, first)):
        for array, content in zip(arrays, contents, strict=True):
            array.copy_from(content)
        graph.replay()
        for actual, wanted in zip(results, expected[number], strict=True):
            np.testing.assert_array_equal(actual.to_numpy(), wanted)


def test_several_tiles_match_the_reference(rng, machine, relative_error, rounded):
    check(rng, machine, (np.dtype(np.float32), 1e-5), LARGER, relative_error, rounded)


def test_later_keys_change_nothing(rng, machine):
    q, k, v, _ = make(rng, 1, 10, 10, 2, 1, 4)
    before, _ = cuda.causal_attention(*map(machine.upload, (q, k, v)))
    k[:, 5:] += 10
    v[:, 5:] -= 5
    after, _ = cuda.causal_attention(*map(machine.upload, (q, k, v)))
    before, after = before.to_numpy(), after.to_numpy()
    np.testing.assert_allclose(after[:, :5], before[:, :5], rtol=1e-13)
    assert not np.allclose(after[:, 5:], before[:, 5:])


@pytest.mark.parametrize("queries", [1, 7, 8])
def test_the_last_queries_alone_give_the_same(rng, machine, queries):
    q, k, v, _ = make(rng, 1, 12, 12, 2, 1, 4)
    everything, _ = cuda.causal_attention(*map(machine.upload, (q, k, v)))
    last = machine.upload(np.ascontiguousarray(q[:, -queries:]))
    y, _ = cuda.causal_attention(last, *map(machine.upload, (k, v)))
    np.testing.assert_allclose(y.to_numpy(), everything.to_numpy()[:, -queries:], rtol=1e-12)


@pytest.mark.parametrize("queries", [1, 3, 9])
def test_a_cache_is_read_as_far_as_it_is_filled(rng, machine, queries):
    q, k, v, _ = make(rng, 2, queries, 40, 2, 1, 4)
    for length in (34, 11, queries):
        k[:, length:] = v[:, length:] = np.nan
        arrays = list(map(machine.upload, (q, k, v)))
        y, log_sum_exp = cuda.causal_attention(*arrays, length=length)
        expected_y, expected_sum = reference.causal_attention(q, k[:, :length], v[:, :length])
        np.testing.assert_allclose(y.to_numpy(), expected_y, rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(log_sum_exp.to_numpy(), expected_sum, rtol=1e-12)
        on_gpu = machine.upload(np.array([length]))
        for actual, wanted in zip(
            cuda.causal_attention(*arrays, length=on_gpu), (y, log_sum_exp), strict=True
        ):
            np.testing.assert_array_equal(actual.to_numpy(), wanted.to_numpy())


def test_appending_to_a_cache(rng, machine, precision):
    dtype, _ = precision
    rows = rng.standard_normal((2, 3, 2, 5)).astype(dtype)
    for position in (0, 4, 6):
        expected = np.zeros((2, 9, 2, 5), dtype)
        expected[:, position : position + 3] = rows
        for given in (position, machine.upload(np.array([position]))):
            cache = machine.upload(np.zeros((2, 9, 2, 5), dtype))
            cuda.append_to_cache(cache, machine.upload(rows), given)
            np.testing.assert_array_equal(cache.to_numpy(), expected)


def test_a_cache_has_an_end(machine):
    cache = machine.upload(np.zeros((2, 4, 1, 2)))
    rows = machine.upload(np.ones((2, 3, 1, 2)))
    with pytest.raises(ValueError, match="position 2 given, 0 to 1 wanted for 3 tokens in a cache"):
        cuda.append_to_cache(cache, rows, 2)
    with pytest.raises(ValueError, match=r"rows of shape \(2, 3, 1, 2\) given, shape \(1, S, 1"):
        cuda.append_to_cache(cache[:1], rows, 0)
    cuda.append_to_cache(cache, rows, machine.upload(np.array([2])))
    assert cache.to_numpy()[:, :, 0, 0].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]


@pytest.mark.parametrize("length", [3, 9])
@pytest.mark.parametrize("size", [1e-3, 30.0])
def test_large_scores_do_not_overflow(rng, machine, length, size):
    q, k, v, _ = make(rng, 1, length, length, 1, 1, 16)
    arrays = (q * size, k * size, v)
    y, log_sum_exp = cuda.causal_attention(*map(machine.upload, arrays))
    expected_y, expected_sum = reference.causal_attention(*arrays)
    np.testing.assert_allclose(y.to_numpy(), expected_y, rtol=1e-11)
    np.testing.assert_allclose(log_sum_exp.to_numpy(), expected_sum, rtol=1e-12)


@pytest.mark.parametrize("length", [3, 9])
def test_nan_is_kept(rng, machine, length):
    q, k, v, dy = make(rng, 1, length, length, 1, 1, 4)
    q[0, 1, 0, 2] = np.nan
    q, k, v, dy = map(machine.upload, (q, k, v, dy))
    y, log_sum_exp = cuda.causal_attention(q, k, v)
    assert np.isnan(y.to_numpy()[0, 1]).all()
    assert np.isnan(log_sum_exp.to_numpy()[0, 0, 1])
    assert np.isfinite(y.to_numpy()[0, [0, 2]]).all()
    dq, dk, _ = cuda.causal_attention_backward(dy, q, k, v, y, log_sum_exp)
    assert np.isnan(dq.to_numpy()[0, 1]).all()
    assert np.isnan(dk.to_numpy()[0, 0]).all()


def test_same_bits_on_every_run(rng, machine):
    length = 300 if machine.is_real else 9
    for queries in (length, 3):
        q, k, v, dy = (
            machine.upload(array.astype(np.float32))
            for array in make(rng, 1, queries, length, 2, 1, 8)
        )
        runs = []
        for _ in range(3):
            y, log_sum_exp = cuda.causal_attention(q, k, v)
            gradients = cuda.causal_attention_backward(dy, q, k, v, y, log_sum_exp)
            runs.append([array.to_numpy() for array in (y, log_sum_exp, *gradients)])
        for other in runs[1:]:
            for actual, first in zip(other, runs[0], strict=True):
                np.testing.assert_array_equal(actual, first)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((1, 3, 2, 4), (1, 2, 2, 4), (1, 2, 2, 4)),
        ((1, 3, 3, 4), (1, 3, 2, 4), (1, 3, 2, 4)),
        ((1, 3, 2, 4), (1, 3, 0, 4), (1, 3, 0, 4)),
        ((1, 3, 2, 4), (2, 3, 2, 4), (2, 3, 2, 4)),
        ((1, 3, 2, 4), (1, 3, 2, 4), (1, 4, 2, 4)),
        ((1, 3, 2, 4), (1, 3, 2, 5), (1, 3, 2, 5)),
        ((3, 2, 4), (3, 2, 4), (3, 2, 4)),
    ],
)
def test_refuses_shapes(machine, q, k, v):
    with pytest.raises(ValueError, match="given"):
        cuda.causal_attention(*(machine.upload(np.ones(shape)) for shape in (q, k, v)))


def test_refuses_other_arrays(rng, machine):
    q, k, v, dy = map(machine.upload, make(rng, 1, 3, 3, 2, 1, 4))
    y, log_sum_exp = cuda.causal_attention(q, k, v)
    with pytest.raises(TypeError, match="k of type ndarray given, a DeviceArray wanted"):
        cuda.causal_attention(q, k.to_numpy(), v)
    narrow = machine.upload(np.ones(v.shape, np.float32))
    with pytest.raises(TypeError, match="v of dtype float32 given beside q of float64"):
        cuda.causal_attention(q, k, narrow)
    with pytest.raises(ValueError, match="length 2 given, 3 to 3 wanted for 3 queries and 3 keys"):
        cuda.causal_attention(q, k, v, length=2)
    with pytest.raises(TypeError, match="length of dtype int32 given, int64 wanted"):
        cuda.causal_attention(q, k, v, length=machine.upload(np.zeros(1, np.int32)))
    with pytest.raises(ValueError, match="dy"):
        cuda.causal_attention_backward(dy.reshape(1, 2, 3, 4), q, k, v, y, log_sum_exp)
    with pytest.raises(ValueError, match="log_sum_exp"):
        cuda.causal_attention_backward(dy, q, k, v, y, log_sum_exp.reshape(1, 3, 2))


@pytest.mark.gpu
def test_a_recorded_step_of_decoding_follows_the_cache(rng, real_gpu):
    stream = real_gpu.stream
    q, k, v, _ = make(rng, 2, 6, 600, 4, 2, 32)
    query, key, value = (from_numpy(array[:, :1].copy(), stream) for array in (q, k, v))
    keys, values = (from_numpy(np.full_like(k, np.nan), stream) for _ in range(2))
    position, length = (from_numpy(np.array([number]), stream) for number in (0, 1))

    def step():
        cuda.append_to_cache(keys, key, position)
        cuda.append_to_cache(values, value, position)
        return cuda.causal_attention(query, keys, values, length=length)

    step()
    with record_graph(stream) as graph:
        y, _ = step()
    for token in range(600):
        query.copy_from(q[:, token % 6, None].copy())
        key.copy_from(k[:, token, None].copy())
        value.copy_from(v[:, token, None].copy())
        position.copy_from(np.array([token]))
        length.copy_from(np.array([token + 1]))
        graph.replay()
        if token % 97 == 0 or token == 599:
            expected, _ = reference.causal_attention(
                q[:, token % 6, None], k[:, : token + 1], v[:, : token + 1]
            )
            np.testing.assert_allclose(y.to_numpy(), expected, rtol=1e-10, atol=1e-12)
