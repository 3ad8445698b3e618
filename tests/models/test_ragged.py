"""Passes over several sequences give what each sequence gives on its own."""

import numpy as np
import pytest

from twell_numba.models.cache import KVCache
from twell_numba.models.config import ModelConfig
from twell_numba.models.paged_cache import PagedKVCache, default_cache_tokens
from twell_numba.models.ragged import Chunk, decode_logits, prefill_logits, stacked
from twell_numba.models.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=97,
    d_model=24,
    d_ffn=64,
    n_layers=3,
    n_heads=6,
    n_kv_heads=2,
    context_length=200,
)


@pytest.fixture(params=[(np.float32, 1e-5), (np.float64, 1e-12)], ids=["float32", "float64"])
def precision(request):
    return request.param


def make(dtype, tokens=640, **changes):
    model = Transformer(CONFIG, np.random.default_rng(1), dtype, **changes)
    cache = PagedKVCache(CONFIG, tokens, dtype)
    for pages in cache.layers:
        for array in pages:
            array[:] = np.nan
    return model, cache


def assert_close(actual, expected, tolerance):
    np.testing.assert_allclose(actual, expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("path", ["dense", "twell", "auto"])
def test_prompts_of_different_lengths_in_one_pass(rng, precision, path):
    dtype, tolerance = precision
    model, cache = make(dtype, ffn_path=path)
    prompts = [rng.integers(0, 97, length) for length in (1, 15, 16, 17, 100)]
    chunks = [Chunk(prompt, 0, cache.take(len(prompt))) for prompt in prompts]
    logits = prefill_logits(model, cache, chunks, [0, 1, 2, 4])
    expected = [model.logits(prompts[place][None])[-1] for place in (0, 1, 2, 4)]
    assert_close(logits, np.stack(expected), tolerance)


def test_prompts_in_chunks_beside_each_other(rng, precision):
    dtype, tolerance = precision
    model, cache = make(dtype)
    prompts = [rng.integers(0, 97, length) for length in (90, 40)]
    tables = [cache.take(len(prompt)) for prompt in prompts]
    for cuts in (((0, 33), (0, 1)), ((33, 70), (1, 40)), ((70, 90), None)):
        parts = [
            Chunk(prompt[slice(*cut)], cut[0], table)
            for prompt, table, cut in zip(prompts, tables, cuts, strict=True)
            if cut
        ]
        logits = prefill_logits(model, cache, parts, range(len(parts)))
        for row, part in zip(logits, parts, strict=True):
            prompt = prompts[0 if part.table is tables[0] else 1]
            expected = model.logits(prompt[None, : part.start + len(part.tokens)])[-1]
            assert_close(row, expected, tolerance)


def test_no_logits_are_wanted_in_the_middle_of_a_prompt(rng):
    model, cache = make(np.float32)
    logits = prefill_logits(model, cache, [Chunk(rng.integers(0, 97, 9), 0, cache.take(20))], [])
    assert logits.shape == (0, 97)


@pytest.mark.parametrize("path", ["dense", "twell", "auto"])
def test_decoding_sequences_at_different_positions(rng, precision, path):
    """As the contiguous cache does it, one sequence after the other, over a page's border."""
    dtype, tolerance = precision
    model, cache = make(dtype, ffn_path=path)
    prompts = [rng.integers(0, 97, length) for length in (1, 14, 15, 16, 31, 60)]
    tables = stacked([cache.take(len(prompt) + 4) for prompt in prompts])
    prefill_logits(
        model, cache, [Chunk(p, 0, t) for p, t in zip(prompts, tables, strict=True)], [0]
    )
    alone = [KVCache(CONFIG, 1, 200, dtype) for _ in prompts]
    for prompt, own in zip(prompts, alone, strict=True):
        model.step(prompt[None], own)
    positions = np.array([len(prompt) for prompt in prompts])
    for step in range(4):
        tokens = rng.integers(0, 97, len(prompts))
        logits = decode_logits(model, cache, tokens, positions + step, tables)
        expected = [
            model.step(token[None, None], own)[0] for token, own in zip(tokens, alone, strict=True)
        ]
        assert_close(logits, np.stack(expected), tolerance)


def test_pages_are_reused_and_what_they_held_does_not_matter(rng):
    model, cache = make(np.float32, tokens=48)
    first = cache.take(40)
    assert cache.free_pages == 0
    assert cache.take(1) is None
    chunk = Chunk(rng.integers(0, 97, 40), 0, first)
    before = prefill_logits(model, cache, [chunk], [0])
    for pages in cache.layers:
        for array in pages:
            array[:] = np.nan
    cache.give_back(first)
    assert cache.free_pages == 3
    again = prefill_logits(model, cache, [chunk._replace(table=cache.take(40))], [0])
    np.testing.assert_array_equal(again, before)


def test_a_table_without_room_is_refused(rng):
    model, cache = make(np.float32)
    chunk = Chunk(rng.integers(0, 97, 17), 0, cache.take(16))
    with pytest.raises(ValueError, match="tables of 1 pages given, 2 wanted"):
        prefill_logits(model, cache, [chunk], [0])
    tables = stacked([cache.take(16), cache.take(40)])
    with pytest.raises(ValueError, match="slot -"):
        decode_logits(model, cache, np.array([1, 2]), np.array([16, 16]), tables)


def test_default_size():
    small = default_cache_tokens(CONFIG, np.float32, 10)
    assert small == 10 * 208  # 200 tokens are 13 pages
    large = ModelConfig(49152, 2048, 8192, 32, 32, 32, 8192)
    assert default_cache_tokens(large, np.float32, 64) == 8192  # one text takes 4 GiB
    grouped = ModelConfig(49152, 576, 1536, 30, 9, 3, 8192)
    assert default_cache_tokens(grouped, np.float32, 64) == 2**30 // (2 * 30 * 3 * 64 * 4)
