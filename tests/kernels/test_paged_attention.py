import numpy as np
import pytest

from twell_numba.device import set_thread_count, thread_count
from twell_numba.kernels.paged_attention import cpu, reference

PAGE_SIZE = 16

# (queries, tokens) of each sequence, H, G, w: pages and blocks of 64 less and more one, sequences
# of one token, heads that share and do not, widths that are no multiple of 4
PREFILLS = [
    ([(1, 1)], 1, 1, 1),
    ([(3, 3), (16, 16), (17, 40)], 4, 2, 8),
    ([(1, 15), (2, 2), (5, 100), (1, 1)], 6, 2, 5),
    ([(63, 63), (64, 64), (65, 65)], 2, 2, 4),
    ([(31, 95), (70, 200), (1, 129)], 6, 2, 10),
    ([(0, 5), (21, 22), (22, 22)], 3, 1, 32),
]
DECODES = [
    ([1], 1, 1, 1),
    ([15, 16, 17], 4, 2, 8),
    ([100, 1, 33, 64], 6, 2, 5),
    ([7] * 9, 3, 1, 32),
]


def make(rng, parts, heads, groups, width, dtype=np.float64, pages=64):
    """Make q, pages that hold NaN where no token is stored, tables with wrong padding, and so on.

    Tokens stored are the same numbers whatever the pages are.
    """
    counts, lengths = np.array(parts).T
    q = rng.standard_normal((counts.sum(), heads, width)).astype(dtype)
    needed = -(-lengths // PAGE_SIZE)
    order = rng.permutation(pages)
    tables = np.full((len(parts), needed.max() + 2), -1)
    keys, values = np.full((2, pages, PAGE_SIZE, groups, width), np.nan, dtype)
    for s, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        tables[s, :count], order = order[:count], order[count:]
        slots = (
            tables[s, np.arange(length) // PAGE_SIZE] * PAGE_SIZE + np.arange(length) % PAGE_SIZE
        )
        for pages_of in (keys, values):
            rows = np.random.default_rng(s).standard_normal((length, groups, width)).astype(dtype)
            cpu.store_tokens(pages_of, rows, slots)
    return q, keys, values, tables, np.concatenate([[0], np.cumsum(counts)]), lengths


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-12)])
@pytest.mark.parametrize("shape", PREFILLS)
def test_prefill_matches_the_reference(rng, shape, dtype, tolerance):
    q, keys, values, tables, starts, lengths = make(rng, *shape, dtype)
    y = cpu.prefill_attention(q, keys, values, tables, starts, lengths)
    assert y.dtype == dtype
    q, keys, values = (array.astype(np.float64) for array in (q, keys, values))
    expected = reference.prefill_attention(q, keys, values, tables, starts, lengths)
    np.testing.assert_allclose(y, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-12)])
@pytest.mark.parametrize("shape", DECODES)
def test_decode_matches_the_reference(rng, shape, dtype, tolerance):
    lengths, *heads = shape
    q, keys, values, tables, _, lengths = make(rng, [(1, n) for n in lengths], *heads, dtype)
    y = cpu.decode_attention(q, keys, values, tables, lengths)
    assert y.dtype == dtype
    q, keys, values = (array.astype(np.float64) for array in (q, keys, values))
    expected = reference.decode_attention(q, keys, values, tables, lengths)
    np.testing.assert_allclose(y, expected, rtol=tolerance, atol=tolerance)


def test_reference_attends_to_the_tokens_of_a_table(rng):
    """Against the formula written out for one query."""
    keys, values = rng.standard_normal((2, 4, PAGE_SIZE, 1, 3))
    q = rng.standard_normal((1, 2, 3))
    y = reference.decode_attention(q, keys, values, np.array([[2, 0]]), np.array([19]))
    k, v = (np.concatenate([pages[2, :, 0], pages[0, :3, 0]]) for pages in (keys, values))
    for head in range(2):
        p = np.exp(k @ q[0, head] / np.sqrt(3))
        np.testing.assert_allclose(y[0, head], p @ v / p.sum(), rtol=1e-12)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_sequence_is_the_same_to_the_last_bit_alone_and_beside_others(rng, threads):
    parts = [(40, 140), (1, 1), (64, 64), (5, 77)]
    q, keys, values, tables, starts, lengths = make(rng, parts, 6, 2, 16, np.float32)
    before = thread_count()
    set_thread_count(threads)
    try:
        together = cpu.prefill_attention(q, keys, values, tables, starts, lengths)
        last = starts[1:] - 1
        decoded = cpu.decode_attention(q[last], keys, values, tables, lengths)
    finally:
        set_thread_count(before)
    for s in range(len(parts)):
        own = slice(starts[s], starts[s + 1])
        one = slice(s, s + 1)
        alone = cpu.prefill_attention(
            q[own], keys, values, tables[one, :9], np.array([0, parts[s][0]]), lengths[one]
        )
        np.testing.assert_array_equal(alone, together[own])
        alone = cpu.decode_attention(q[last[one]], keys, values, tables[one, :9], lengths[one])
        np.testing.assert_array_equal(alone, decoded[one])


@pytest.mark.parametrize("cut", [1, 17, 63, 64, 65, 99])
def test_a_prompt_in_two_chunks_gives_the_same_bits(rng, cut):
    q, keys, values, tables, starts, lengths = make(rng, [(100, 100)], 3, 1, 8, np.float32)
    whole = cpu.prefill_attention(q, keys, values, tables, starts, lengths)
    first = cpu.prefill_attention(
        q[:cut], keys, values, tables, np.array([0, cut]), np.array([cut])
    )
    second = cpu.prefill_attention(q[cut:], keys, values, tables, np.array([0, 100 - cut]), lengths)
    np.testing.assert_array_equal(np.concatenate([first, second]), whole)


@pytest.mark.parametrize("shift", [-1000.0, 1000.0])
def test_large_scores_do_not_overflow(rng, shift):
    q, keys, values, tables, starts, lengths = make(rng, [(9, 70)], 2, 1, 4, np.float32)
    q[:, :, 0], keys[..., 0] = 1, shift
    y = cpu.prefill_attention(q, keys, values, tables, starts, lengths)
    assert np.isfinite(y).all()
    assert np.isfinite(cpu.decode_attention(q[-1:], keys, values, tables, lengths)).all()


def test_nan_stays_in_its_sequence(rng):
    q, keys, values, tables, starts, lengths = make(rng, [(3, 20), (4, 30)], 2, 1, 4)
    keys[tables[0, 0], 2] = np.nan
    y = cpu.prefill_attention(q, keys, values, tables, starts, lengths)
    assert np.isnan(y[:3]).all()
    assert np.isfinite(y[3:]).all()
    y = cpu.decode_attention(q[[2, 6]], keys, values, tables, lengths)
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1]).all()


def test_no_sequence_and_no_query():
    pages = np.zeros((1, PAGE_SIZE, 1, 4))
    q, none = np.zeros((0, 2, 4)), np.zeros(0, np.int64)
    assert cpu.decode_attention(q, pages, pages, np.zeros((0, 3), np.int64), none).shape == q.shape
    y = cpu.prefill_attention(
        q, pages, pages, np.zeros((0, 3), np.int64), np.zeros(1, np.int64), none
    )
    assert y.shape == q.shape


def test_tokens_are_stored_in_their_slots(rng):
    pages = np.zeros((3, PAGE_SIZE, 2, 4))
    rows = rng.standard_normal((3, 2, 4))
    cpu.store_tokens(pages, rows, np.array([47, 0, 16]))
    expected = np.zeros_like(pages)
    reference.store_tokens(expected, rows, np.array([47, 0, 16]))
    np.testing.assert_array_equal(pages, expected)
    np.testing.assert_array_equal(pages[2, 15], rows[0])


def test_refuses_what_does_not_fit(rng):
    q, keys, values, tables, starts, lengths = make(rng, [(3, 20), (4, 30)], 2, 1, 4)
    with pytest.raises(ValueError, match="tables for 16 tokens given, 20 wanted for sequence 0"):
        cpu.prefill_attention(q, keys, values, tables[:, :1], starts, lengths)
    with pytest.raises(ValueError, match="pages 64 to 64 given .* of sequence 0, 0 to 63 wanted"):
        cpu.prefill_attention(q, keys, values, np.full_like(tables, 64), starts, lengths)
    with pytest.raises(ValueError, match="pages -1 to -1 given"):
        cpu.decode_attention(q[:2], keys, values, np.full_like(tables, -1), lengths)
    with pytest.raises(ValueError, match="rising from 0 to the 7 rows of q wanted"):
        cpu.prefill_attention(q, keys, values, tables, starts + 1, lengths)
    with pytest.raises(ValueError, match="4 queries and 3 tokens of sequence 1 given"):
        cpu.prefill_attention(q, keys, values, tables, starts, np.array([20, 3]))
    with pytest.raises(ValueError, match="1 queries and 0 tokens of sequence 0 given"):
        cpu.decode_attention(q[:2], keys, values, tables, np.array([0, 30]))
    with pytest.raises(ValueError, match="divisible by key/value heads wanted"):
        cpu.decode_attention(q[:2, :1], *[np.repeat(keys, 2, 2)] * 2, tables, lengths)
    with pytest.raises(TypeError, match="float32 or float64 wanted"):
        cpu.decode_attention(q[:2].astype(int), keys, values, tables, lengths)
    with pytest.raises(ValueError, match="slot -1 given, 0 to 1023 wanted"):
        cpu.store_tokens(keys, keys[0, :1], np.array([-1]))
