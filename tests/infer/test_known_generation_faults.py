"""Faults that other packages have had in generating text, none of which is to happen here."""

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import tokenizers

from twell_numba.errors import TwellError, UsageError
from twell_numba.infer import engine as engine_module
from twell_numba.infer.engine import Engine
from twell_numba.infer.generate import generate
from twell_numba.infer.request import GenerationSettings, Request
from twell_numba.infer.sampling import sample
from twell_numba.models.cache import KVCache
from twell_numba.models.paged_cache import PagedKVCache
from twell_numba.models.ragged import Chunk, decode_logits, prefill_logits, stacked
from twell_numba.models.tokenizer import BPETokenizer, ByteTokenizer, TextTokenizer
from twell_numba.models.transformer import Transformer

CONTEXT = 48


def greedy(length: int = 20) -> GenerationSettings:
    return GenerationSettings(temperature=0.0, max_new_tokens=length)


def encoded(text: str) -> np.ndarray:
    return ByteTokenizer().encode(text)


def exhaust(pieces: Iterable[str]) -> str:
    return "".join(pieces)


# google-deepmind/gemma#562: temperature 0 divides by zero.


def test_temperature_0_takes_the_likeliest_token(byte_model: Transformer) -> None:
    logits = byte_model.logits(encoded("abc")[None])[-1]
    assert sample(logits, np.random.default_rng(0), temperature=0.0) == logits.argmax()
    (request,) = Engine(byte_model, ByteTokenizer()).generate([encoded("abc")], greedy(1))
    assert request.tokens == [logits.argmax()]


@pytest.mark.parametrize("temperature", [-1.0, -1e-9, float("nan"), float("inf")])
def test_temperatures_out_of_range_are_refused(byte_model: Transformer, temperature: float) -> None:
    engine = Engine(byte_model, ByteTokenizer())
    with pytest.raises(UsageError, match="temperature .* given, a finite number of at least 0"):
        engine.submit(encoded("a"), GenerationSettings(temperature=temperature))
    with pytest.raises(UsageError, match="temperature .* given"):
        sample(np.zeros(3), np.random.default_rng(0), temperature)


# huggingface/transformers#13707: a constraint and top-k leave no token, and the sampler crashes.


@pytest.mark.parametrize("settings", [{}, {"top_k": 1}, {"top_p": 0.1}, {"temperature": 0.0}])
def test_no_token_left_is_an_error_with_a_reason(settings: dict) -> None:
    with pytest.raises(TwellError, match="every logit is -inf, which forbids all tokens"):
        sample(np.full(9, -np.inf), np.random.default_rng(0), **settings)


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_the_one_token_left_is_drawn_by_any_cut(settings: dict) -> None:
    logits = np.full(9, -np.inf)
    logits[4] = -1e30
    assert sample(logits, np.random.default_rng(0), **settings) == 4


# karpathy/nanochat#581: a history longer than the context makes a tensor of no length.


@pytest.mark.parametrize("length", [CONTEXT + 1, 3 * CONTEXT])
def test_a_history_longer_than_the_context_is_refused(byte_model: Transformer, length: int) -> None:
    with pytest.raises(UsageError, match=f"prompt of {length} tokens .* context of {CONTEXT}"):
        generate(byte_model, ByteTokenizer(), "a" * length)
    engine = Engine(byte_model, ByteTokenizer())
    with pytest.raises(UsageError, match=f"prompt of {length} tokens .* room for {CONTEXT}"):
        engine.submit(encoded("a" * length), greedy(1))


# huggingface/transformers#25420 and others: cached and uncached decoding differ.


@pytest.mark.parametrize("path", ["dense", "twell"])
def test_greedy_tokens_are_the_same_by_every_way(byte_model: Transformer, path: str) -> None:
    """Without a cache, with one, and beside other requests; the latter with one FFN path for one
    token and the other for many, too."""
    byte_model.ffn_path = path
    prompts = ["def ", "x", "the whole of a longer prompt"]
    tokens: dict[bool, list[list[int]]] = {}
    for use_cache in (False, True):
        tokens[use_cache] = []
        for prompt in prompts:
            generation = generate(
                byte_model,
                ByteTokenizer(),
                prompt,
                temperature=0.0,
                max_new_tokens=20,
                use_cache=use_cache,
            )
            exhaust(generation)
            tokens[use_cache].append(generation.tokens)
    engine = Engine(byte_model, ByteTokenizer(), prefill_chunk=10)
    requests = engine.generate([encoded(prompt) for prompt in prompts], greedy())
    assert tokens[True] == tokens[False]
    assert [request.tokens for request in requests] == tokens[False]


@pytest.mark.parametrize("many_path", ["dense", "twell"])
@pytest.mark.parametrize("one_path", ["dense", "twell"])
def test_logits_are_the_same_by_every_way(
    byte_model: Transformer, rng: np.random.Generator, one_path: str, many_path: str
) -> None:
    """At every position of three texts: all at once, token by token, in pages beside others."""
    texts = [rng.integers(0, 256, length) for length in (40, 33, 17)]
    byte_model.ffn_path = many_path
    expected = [byte_model.logits(text[None]) for text in texts]
    tolerance = 1e-5 * max(np.abs(logits).max() for logits in expected)

    cache = PagedKVCache(byte_model.config, 480)
    tables = [cache.take(len(text)) for text in texts]
    chunks = [Chunk(text[:9], 0, table) for text, table in zip(texts, tables, strict=True)]
    prefill_logits(byte_model, cache, chunks, [])
    for text, own_expected in zip(texts, expected, strict=True):
        byte_model.ffn_path = one_path
        contiguous = KVCache(byte_model.config, 1, len(text))
        for position, token in enumerate(text):
            logits = byte_model.step(token[None, None], contiguous)[0]
            np.testing.assert_allclose(logits, own_expected[position], atol=tolerance, rtol=0)
    byte_model.ffn_path = many_path
    for position in range(9, 40):
        going = [n for n, text in enumerate(texts) if len(text) > position]
        logits = decode_logits(
            byte_model,
            cache,
            np.array([texts[n][position] for n in going]),
            np.full(len(going), position),
            stacked([tables[n] for n in going]),
        )
        for n, row in zip(going, logits, strict=True):
            np.testing.assert_allclose(row, expected[n][position], atol=tolerance, rtol=0)


# antonellof/ferrox#124 and others: half an emoji a token becomes U+FFFD.


@pytest.mark.parametrize("lead", range(4))
@pytest.mark.parametrize("cuts", range(8))
def test_an_emoji_over_several_tokens_is_given_out_whole(
    byte_model: Transformer, monkeypatch: pytest.MonkeyPatch, lead: int, cuts: int
) -> None:
    """Every way to split its four bytes over tokens, after every number of characters."""
    parts = split("🙂".encode(), cuts)
    words = [b"a"] * lead + parts + [b"b"] + parts
    pieces: list[str] = []
    engine = Engine(byte_model, WordTokenizer(words))
    write_numbers(monkeypatch)
    request = engine.submit([0], greedy(len(words)), lambda piece: pieces.append(piece.text))
    engine.run()
    assert request.text == "a" * lead + "🙂b🙂"
    assert [piece for piece in pieces if piece] == [*"a" * lead, "🙂", "b", "🙂"]


def split(data: bytes, cuts: int) -> list[bytes]:
    """Cut bytes before those whose bit is set, counted from the second."""
    parts = [data[:1]]
    for place in range(1, len(data)):
        if cuts >> (place - 1) & 1:
            parts.append(b"")
        parts[-1] += data[place : place + 1]
    return parts


class WordTokenizer(ByteTokenizer):
    """The n-th token is the n-th of some words."""

    def __init__(self, words: list[bytes]) -> None:
        super().__init__()
        self.words = words

    def decode_bytes(self, tokens: Iterable[int] | np.ndarray, *, at_start: bool = False) -> bytes:
        return b"".join(self.words[token] for token in tokens)


def write_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every request draw the tokens 0, 1, 2 and so on."""

    def advance(sequences: list, logits: np.ndarray) -> None:
        for sequence in sequences:
            sequence.accept(len(sequence.request.tokens))

    monkeypatch.setattr(engine_module, "advance", advance)


# cgbur/llama2.zig#5: a prompt with letters beyond ASCII fails, for it has no token.


@pytest.mark.parametrize("prompt", ["blåbærgrød", "日本", "🙂\u0301", "\x00\uffff"])
@pytest.mark.parametrize("make_tokenizer", [ByteTokenizer, lambda: bpe_without_merges()])
def test_prompts_beyond_ascii(
    byte_model: Transformer, make_tokenizer: Callable[[], TextTokenizer], prompt: str
) -> None:
    tokenizer = make_tokenizer()
    tokens = tokenizer.encode(prompt)
    assert tokenizer.decode_bytes(tokens) == prompt.encode()
    generation = generate(byte_model, tokenizer, prompt, max_new_tokens=5)
    exhaust(generation)
    (request,) = Engine(byte_model, tokenizer).generate(
        [tokens], GenerationSettings(max_new_tokens=5)
    )
    assert request.tokens == generation.tokens
    assert len(request.tokens) == 5


def bpe_without_merges() -> BPETokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({character: n for n, character in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return BPETokenizer(tokenizer)


# ggml-org/llama.cpp#8098: a prompt a little longer than a chunk ends without being read.

CHUNK = 16


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 9, CONTEXT])
@pytest.mark.parametrize("beside", [0, 5, CHUNK])
def test_prompts_around_the_size_of_a_chunk(
    byte_model: Transformer, length: int, beside: int
) -> None:
    """Also where a chunk is shared with another prompt, and up to the whole context."""
    engine = Engine(byte_model, ByteTokenizer(), prefill_chunk=CHUNK)
    text = "".join(chr(97 + n * n % 26) for n in range(length))
    new = min(10, CONTEXT - length + 1)
    other: list[Request] = []
    if beside:
        other.append(engine.submit(encoded("o" * beside), greedy(10)))
    request = engine.submit(encoded(text), greedy(new))
    engine.run()
    for own, prompt in ((request, text), *((own, "o" * beside) for own in other)):
        generation = generate(
            byte_model,
            ByteTokenizer(),
            prompt,
            use_cache=False,
            temperature=0.0,
            max_new_tokens=own.settings.max_new_tokens,
        )
        exhaust(generation)
        assert own.tokens == generation.tokens
        assert own.finish_reason == "length"
    assert engine.prompt_tokens == length + beside
