import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.kernels.paged_attention import cuda, reference  # noqa: E402

# page size, (queries, tokens) of each sequence, H, G, w: one query, several sequences over pages'
# borders, more keys than a block takes at a time, wider heads than a block has columns
SMALL = [
    (4, [(1, 1)], 1, 1, 1),
    (4, [(2, 3), (1, 5), (3, 3)], 4, 2, 5),
    (16, [(1, 66)], 2, 1, 3),
    (4, [(1, 4), (1, 2)], 1, 1, 65),
]
LARGE = [
    (16, [(1, 500), (70, 300), (16, 16), (17, 1000)], 6, 2, 64),
    (16, [(1, 37), (1, 2000), (1, 1), (1, 129)], 9, 3, 128),
    (64, [(100, 100), (1, 63), (5, 4000)], 4, 4, 96),
    (16, [(1, 700)] * 64, 8, 1, 256),
]


def make(rng, page_size, parts, heads, groups, width):
    """Make q, pages that hold NaN where no token is, tables with wrong padding, and so on."""
    counts, lengths = np.array(parts).T
    needed = -(-lengths // page_size)
    pages = needed.sum() + 2
    order = rng.permutation(pages)
    tables = np.full((len(parts), needed.max() + 1), -1)
    keys, values = np.full((2, pages, page_size, groups, width), np.nan)
    for s, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        tables[s, :count], order = order[:count], order[count:]
        for stored in (keys, values):
            rows = rng.standard_normal((length, groups, width))
            positions = np.arange(length)
            slots = tables[s, positions // page_size] * page_size + positions % page_size
            reference.store_tokens(stored, rows, slots)
    q = rng.standard_normal((counts.sum(), heads, width))
    return q, keys, values, tables, np.concatenate([[0], np.cumsum(counts)]), lengths


def test_matches_the_reference(rng, machine, precision, relative_error, rounded):
    """With indices in the host's memory, and on the GPU."""
    dtype, tolerance = precision
    small = SMALL if dtype.itemsize == 8 else SMALL[1:2]
    for shape in machine.shapes(small, LARGE):
        q, keys, values, *indices = make(rng, *shape)
        (q, q64), (keys, keys64), (values, values64) = (
            rounded(a, dtype) for a in (q, keys, values)
        )
        expected = reference.prefill_attention(q64, keys64, values64, *indices)
        arrays = [machine.upload(array) for array in (q, keys, values)]
        y = cuda.prefill_attention(*arrays, *indices)
        assert y.dtype == dtype
        assert relative_error(y, expected) <= tolerance, shape
        again = cuda.prefill_attention(*arrays, *map(machine.upload, indices))
        np.testing.assert_array_equal(again.to_numpy(), y.to_numpy())

        tables, starts, lengths = indices
        last = machine.upload(q[starts[1:] - 1])
        decoded = cuda.decode_attention(last, *arrays[1:], tables, lengths)
        np.testing.assert_array_equal(decoded.to_numpy(), y.to_numpy()[starts[1:] - 1])


def test_a_sequence_is_the_same_to_the_last_bit_alone(rng, machine):
    parts = machine.shapes([[(2, 5), (1, 3)]], [[(70, 300), (1, 40), (129, 129)]])[-1]
    q, keys, values, tables, starts, lengths = make(rng, 4, parts, 2, 1, 4)
    keys, values = machine.upload(keys), machine.upload(values)
    together = cuda.prefill_attention(machine.upload(q), keys, values, tables, starts, lengths)
    for s, (count, _) in enumerate(parts):
        own = slice(starts[s], starts[s + 1])
        alone = cuda.prefill_attention(
            machine.upload(q[own]), keys, values, tables[s : s + 1], [0, count], lengths[s : s + 1]
        )
        np.testing.assert_array_equal(alone.to_numpy(), together.to_numpy()[own])


def test_tokens_are_stored_in_their_slots(rng, machine, precision, rounded):
    """A slot that is not there is left out where nobody can check it."""
    dtype, _ = precision
    pages, rows = rng.standard_normal((3, 4, 2, 5)), rng.standard_normal((3, 2, 5))
    (pages, _), (rows, _) = rounded(pages, dtype), rounded(rows, dtype)
    on_gpu = machine.upload(pages)
    cuda.store_tokens(on_gpu, machine.upload(rows), np.array([11, 0, 4]))
    expected = pages.copy()
    reference.store_tokens(expected, rows, np.array([11, 0, 4]))
    np.testing.assert_array_equal(on_gpu.to_numpy(), expected)
    slots = machine.upload(np.array([12, -1, 5]))
    cuda.store_tokens(on_gpu, machine.upload(rows), slots)
    expected[1, 1] = rows[2]
    np.testing.assert_array_equal(on_gpu.to_numpy(), expected)


def test_a_page_that_is_not_there_is_left_out(rng, machine):
    q, keys, values, tables, starts, lengths = make(rng, 4, [(1, 6)], 1, 1, 4)
    expected = reference.decode_attention(q, keys, values, tables, np.array([4]))
    tables[0, 1] = 99
    arrays = [machine.upload(array) for array in (q, keys, values, tables, lengths)]
    y = cuda.decode_attention(*arrays).to_numpy()
    np.testing.assert_allclose(y, expected, rtol=1e-12)


def test_nothing(machine):
    pages = machine.upload(np.zeros((1, 4, 1, 4), np.float32))
    q = machine.upload(np.zeros((0, 2, 4), np.float32))
    tables, none = np.zeros((0, 2), np.int64), np.zeros(0, np.int64)
    assert cuda.decode_attention(q, pages, pages, tables, none).shape == (0, 2, 4)
    cuda.store_tokens(pages, machine.upload(np.zeros((0, 1, 4), np.float32)), none)


def test_refuses_what_does_not_fit(rng, machine):
    q, keys, values, tables, starts, lengths = make(rng, 4, [(2, 5), (1, 3)], 2, 1, 4)
    on_gpu = [machine.upload(array) for array in (q, keys, values)]
    with pytest.raises(ValueError, match=r"starts of shape \(2,\) given, shape \(3,\) wanted"):
        cuda.prefill_attention(*on_gpu, tables, starts[:2], lengths)
    with pytest.raises(ValueError, match=r"starts: 4 given, numbers in \[0, 4\) wanted"):
        cuda.prefill_attention(*on_gpu, tables, np.array([0, 2, 4]), lengths)
    with pytest.raises(ValueError, match=r"tables of shape \(1, 3\) given"):
        cuda.prefill_attention(*on_gpu, tables[:1], starts, lengths)
    with pytest.raises(TypeError, match="int64 wanted"):
        cuda.prefill_attention(*on_gpu, machine.upload(tables.astype(np.int32)), starts, lengths)
    with pytest.raises(TypeError, match="one dtype for all wanted"):
        cuda.prefill_attention(
            machine.upload(q.astype(np.float32)), *on_gpu[1:], tables, starts, lengths
        )
    with pytest.raises(ValueError, match="divisible by key/value heads wanted"):
        cuda.prefill_attention(
            machine.upload(q[:, :1]),
            *[machine.upload(np.repeat(a, 2, 2)) for a in (keys, values)],
            tables,
            starts,
            lengths,
        )
    with pytest.raises(ValueError, match=r"slots: 20 given, numbers in \[0, 20\) wanted"):
        cuda.store_tokens(on_gpu[1], machine.upload(keys[0, :1]), np.array([20]))
