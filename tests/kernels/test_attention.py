import numpy as np
import pytest

from twell_numba.device import set_thread_count, thread_count
from twell_numba.kernels.attention import cpu, reference

# B, S, T, H, G, w: one query, few queries, a block of 64 less and more one, more keys than queries,
# grouped heads, widths that are no multiple of 4
SHAPES = [
    (0, 3, 3, 2, 1, 4),
    (2, 0, 3, 2, 1, 4),
    (1, 1, 1, 1, 1, 1),
    (2, 1, 7, 4, 2, 8),
    (2, 3, 5, 3, 1, 6),
    (1, 8, 8, 2, 2, 5),
    (1, 63, 63, 1, 1, 4),
    (1, 64, 64, 2, 1, 8),
    (2, 65, 65, 4, 2, 16),
    (1, 20, 150, 6, 3, 10),
    (1, 130, 133, 2, 2, 32),
]


def make(rng, batch, queries, keys, heads, groups, width, dtype=np.float64):
    q, dy = rng.standard_normal((2, batch, queries, heads, width)).astype(dtype)
    k, v = rng.standard_normal((2, batch, keys, groups, width)).astype(dtype)
    return q, k, v, dy


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-12)])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_reference(rng, shape, dtype, tolerance):
    q, k, v, dy = make(rng, *shape, dtype)
    y, log_sum_exp = cpu.causal_attention(q, k, v)
    gradients = cpu.causal_attention_backward(dy, q, k, v, y, log_sum_exp)

    q, k, v, dy = (array.astype(np.float64) for array in (q, k, v, dy))
    expected_y, expected_sum = reference.causal_attention(q, k, v)
    expected_gradients = reference.causal_attention_backward(dy, q, k, v, expected_y, expected_sum)
    for actual, expected in zip(
        (y, log_sum_exp, *gradients), (expected_y, expected_sum, *expected_gradients), strict=True
    ):
        assert actual.dtype == dtype
        assert actual.shape == expected.shape
        np.testing.assert_allclose(
            actual, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max(initial=0)
        )


def test_reference_gradient(rng, gradient_check):
    q, k, v, dy = make(rng, 2, 4, 6, 4, 2, 3)
    y, log_sum_exp = reference.causal_attention(q, k, v)
    gradients = reference.causal_attention_backward(dy, q, k, v, y, log_sum_exp)
    gradient_check(
        lambda: np.sum(dy * reference.causal_attention(q, k, v)[0]), [q, k, v], gradients, rng
    )


@pytest.mark.parametrize("length", [5, 100])
def test_later_keys_change_nothing(rng, length):
    q, k, v, _ = make(rng, 1, length, length, 2, 1, 8)
    before, _ = cpu.causal_attention(q, k, v)
    k[:, 3:] += 10
    v[:, 3:] -= 5
    after, _ = cpu.causal_attention(q, k, v)
    np.testing.assert_allclose(after[:, :3], before[:, :3], rtol=1e-13)
    assert not np.allclose(after[:, 3:], before[:, 3:])


@pytest.mark.parametrize("queries", [1, 7, 8, 66])
def test_the_last_queries_alone_give_the_same(rng, queries):
    q, k, v, _ = make(rng, 2, 70, 70, 4, 2, 8, np.float32)
    everything, _ = cpu.causal_attention(q, k, v)
    last, _ = cpu.causal_attention(q[:, -queries:], k, v)
    np.testing.assert_allclose(last, everything[:, -queries:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [2, 70])
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_large_scores_do_not_overflow(rng, length, size):
    q, k, v, _ = make(rng, 1, length, length, 1, 1, 16, np.float32)
    y, log_sum_exp = cpu.causal_attention(q * np.float32(size), k * np.float32(size), v)
    wide = [array.astype(np.float64) for array in (q * np.float32(size), k * np.float32(size), v)]
    expected_y, expected_sum = reference.causal_attention(*wide)
    # a score of 1000 is itself rounded to 6e-5
    np.testing.assert_allclose(y, expected_y, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(log_sum_exp, expected_sum, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [3, 70])
def test_nan_is_kept(rng, length):
    q, k, v, dy = make(rng, 1, length, length, 1, 1, 4, np.float32)
    q[0, 1, 0, 2] = np.nan
    y, log_sum_exp = cpu.causal_attention(q, k, v)
    assert np.isnan(y[0, 1]).all()
    assert np.isnan(log_sum_exp[0, 0, 1])
    assert np.isfinite(y[0, [0, 2]]).all()
    dq, dk, _ = cpu.causal_attention_backward(dy, q, k, v, y, log_sum_exp)
    assert np.isnan(dq[0, 1]).all()
    assert np.isnan(dk[0, 0]).all()


def test_same_bits_for_every_thread_count(rng, monkeypatch):
    monkeypatch.setattr(cpu, "GRAIN", 1)
    q, k, v, dy = make(rng, 3, 130, 130, 4, 2, 16, np.float32)
    before = thread_count()
    results = []
    try:
        for threads in (1, 2, 3):
            set_thread_count(threads)
            y, log_sum_exp = cpu.causal_attention(q, k, v)
            gradients = cpu.causal_attention_backward(dy, q, k, v, y, log_sum_exp)
            results.append((y, log_sum_exp, *gradients))
    finally:
        set_thread_count(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_any_memory_layout(rng):
    q, k, v, _ = make(rng, 2, 9, 9, 2, 1, 4)
    expected, _ = cpu.causal_attention(q, k, v)
    read_only = k.copy()
    read_only.flags.writeable = False
    for variant in (np.asfortranarray(k), k[:, ::-1].copy()[:, ::-1], read_only, k.astype(">f8")):
        np.testing.assert_array_equal(cpu.causal_attention(q, variant, v)[0], expected)


@pytest.mark.parametrize(
    ("q", "k", "v", "error"),
    [
        ((1, 3, 2, 4), (1, 2, 2, 4), (1, 2, 2, 4), ValueError),
        ((1, 3, 3, 4), (1, 3, 2, 4), (1, 3, 2, 4), ValueError),
        ((1, 3, 2, 4), (1, 3, 0, 4), (1, 3, 0, 4), ValueError),
        ((1, 3, 2, 4), (2, 3, 2, 4), (2, 3, 2, 4), ValueError),
        ((1, 3, 2, 4), (1, 3, 2, 4), (1, 4, 2, 4), ValueError),
        ((1, 3, 2, 4), (1, 3, 2, 5), (1, 3, 2, 5), ValueError),
        ((3, 2, 4), (3, 2, 4), (3, 2, 4), ValueError),
    ],
)
def test_refuses_shapes(q, k, v, error):
    with pytest.raises(error, match="given"):
        cpu.causal_attention(np.ones(q), np.ones(k), np.ones(v))


def test_refuses_mixed_dtypes():
    q = np.ones((1, 2, 1, 4))
    with pytest.raises(TypeError, match="one dtype"):
        cpu.causal_attention(q, q.astype(np.float32), q)


def test_backward_refuses_other_shapes(rng):
    q, k, v, dy = make(rng, 1, 3, 3, 2, 1, 4)
    y, log_sum_exp = cpu.causal_attention(q, k, v)
    with pytest.raises(ValueError, match="dy"):
        cpu.causal_attention_backward(dy[:, :2], q, k, v, y, log_sum_exp)
    with pytest.raises(ValueError, match="log_sum_exp"):
        cpu.causal_attention_backward(dy, q, k, v, y, log_sum_exp[:, :1])
