from collections.abc import Iterable

import numpy as np
import pytest

from twell_numba.errors import UsageError
from twell_numba.infer.generate import generate
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.models.transformer import Transformer


class FixedModel:
    """Stands in for a model: gives the bytes of a text one after the other, whatever it reads."""

    def __init__(self, model: Transformer, data: bytes) -> None:
        self.config = model.config
        self.dtype = model.dtype
        self.stream = None
        self.data = iter(data)
        self.steps: list[int] = []

    def step(self, tokens: np.ndarray, cache: object) -> np.ndarray:
        self.steps.append(tokens.shape[1])
        logits = np.zeros((1, 256), np.float32)
        logits[0, next(self.data)] = 9
        return logits


def greedy(model: Transformer, prompt: str = "def ", **settings: object) -> list[int]:
    generation = generate(model, ByteTokenizer(), prompt, temperature=0.0, **settings)  # type: ignore[arg-type]
    exhaust(generation)
    return generation.tokens


def exhaust(pieces: Iterable[str]) -> str:
    return "".join(pieces)


@pytest.mark.parametrize("prompt", ["def ", "x", "grød 🙂"])
def test_greedy_text_is_the_same_by_every_way(byte_model: Transformer, prompt: str) -> None:
    """With and without the cache, with every path: the same tokens up to the context's end."""
    results = {}
    for path in ("auto", "dense", "twell"):
        byte_model.ffn_path = path
        for use_cache in (True, False):
            results[path, use_cache] = greedy(
                byte_model, prompt, max_new_tokens=100, use_cache=use_cache
            )
    expected = results["dense", False]
    assert len(expected) == byte_model.config.context_length - len(prompt.encode()) + 1
    assert len(set(expected)) > 3
    for way, tokens in results.items():
        assert tokens == expected, way


def test_greedy_takes_the_largest_logit(byte_model: Transformer) -> None:
    tokens = ByteTokenizer().encode("def ")
    expected = int(np.argmax(byte_model.logits(tokens[None])[-1]))
    assert greedy(byte_model, max_new_tokens=1) == [expected]


def test_a_seed_fixes_the_text(byte_model: Transformer) -> None:
    first, second, other = (
        exhaust(generate(byte_model, ByteTokenizer(), "a", max_new_tokens=30, seed=seed))
        for seed in (3, 3, 4)
    )
    assert first == second
    assert first != other


def test_end_at_the_length_asked_for(byte_model: Transformer) -> None:
    generation = generate(byte_model, ByteTokenizer(), "abc", max_new_tokens=5)
    assert generation.reason is None
    exhaust(generation)
    assert generation.reason == "length"
    assert len(generation.tokens) == 5


def test_no_new_tokens(byte_model: Transformer) -> None:
    generation = generate(byte_model, ByteTokenizer(), "abc", max_new_tokens=0)
    assert exhaust(generation) == ""
    assert generation.reason == "length"


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(("prompt_length", "new"), [(48, 1), (47, 2), (1, 48)])
def test_end_of_the_context(
    byte_model: Transformer, prompt_length: int, new: int, use_cache: bool
) -> None:
    """Even a prompt as long as the context is read whole and followed by a token."""
    generation = generate(
        byte_model, ByteTokenizer(), "a" * prompt_length, max_new_tokens=200, use_cache=use_cache
    )
    exhaust(generation)
    assert len(generation.tokens) == new
    assert generation.reason == "context"


def test_a_prompt_beyond_the_context_names_both_numbers(byte_model: Transformer) -> None:
    with pytest.raises(UsageError, match="prompt of 49 tokens given, at most .* context of 48"):
        generate(byte_model, ByteTokenizer(), "a" * 49)


def test_an_empty_prompt_is_refused(byte_model: Transformer) -> None:
    with pytest.raises(UsageError, match="empty prompt"):
        generate(byte_model, ByteTokenizer(), "")


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"max_new_tokens": -1},
        {"seed": -1},
    ],
)
def test_settings_are_refused_before_anything_runs(byte_model: Transformer, settings: dict) -> None:
    with pytest.raises(UsageError, match="given"):
        generate(byte_model, ByteTokenizer(), "a", **settings)


@pytest.mark.parametrize("lead", range(4))
def test_pieces_hold_whole_characters(byte_model: Transformer, lead: int) -> None:
    """The model writes byte by byte, so that every split of a 4-byte character occurs."""
    text = "a" * lead + "🙂ø日"
    model = FixedModel(byte_model, text.encode())
    pieces = list(
        generate(
            model,  # type: ignore[arg-type]
            ByteTokenizer(),
            "p",
            max_new_tokens=len(text.encode()),
            temperature=0.0,
        )
    )
    assert pieces == list(text)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_character_cut_off_at_the_end(byte_model: Transformer, kept: int) -> None:
    model = FixedModel(byte_model, "ab🙂".encode())
    generation = generate(
        model,  # type: ignore[arg-type]
        ByteTokenizer(),
        "p",
        max_new_tokens=2 + kept,
        temperature=0.0,
    )
    assert list(generation) == ["a", "b", "\ufffd"]


def test_the_prompt_is_read_once_then_token_by_token(byte_model: Transformer) -> None:
    model = FixedModel(byte_model, b"abcd")
    exhaust(
        generate(model, ByteTokenizer(), "hello", max_new_tokens=4, temperature=0.0)  # type: ignore[arg-type]
    )
    assert model.steps == [5, 1, 1, 1]


def test_tokens_unknown_to_the_tokenizer_are_never_drawn(byte_model: Transformer) -> None:
    class Tokenizer(ByteTokenizer):
        vocab_size = 7

    generation = generate(byte_model, Tokenizer(), "\x00", max_new_tokens=40)
    exhaust(generation)
    assert max(generation.tokens) < 7
