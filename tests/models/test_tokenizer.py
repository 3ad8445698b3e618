import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from twell_numba.errors import TwellError
from twell_numba.models.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    TextTokenizer,
    byte_alphabet,
    load_tokenizer,
)

TEXTS = [
    "",
    "def f(x):\n\treturn x\n",
    "blåbærgrød",
    "日本語",
    "a 🙂 b",
    "\x00\x7f",
    "  two  spaces ",
]


def trained_bpe(special: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300 + len(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def return self, the cat and the dog; grød"] * 20, trainer)
    return tokenizer


@pytest.fixture(params=["byte", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> TextTokenizer:
    return ByteTokenizer() if request.param == "byte" else BPETokenizer(trained_bpe())


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_comes_back(tokenizer: TextTokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int64
    assert tokens.ndim == 1
    assert all(0 <= token < tokenizer.vocab_size for token in tokens)
    assert tokenizer.decode_bytes(tokens) == text.encode()


@pytest.mark.parametrize("text", TEXTS)
def test_saved_tokenizer_gives_the_same_ids(
    tokenizer: TextTokenizer, text: str, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    elsewhere = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    expected = tokenizer.encode(text).tolist()
    assert type(loaded) is type(tokenizer)
    assert loaded.vocab_size == tokenizer.vocab_size == elsewhere.get_vocab_size()
    assert loaded.encode(text).tolist() == expected
    assert elsewhere.encode(text).ids == expected
    assert elsewhere.decode(expected) == text


def test_byte_ids_are_byte_values() -> None:
    assert ByteTokenizer().encode("a\nø").tolist() == [97, 10, 0xC3, 0xB8]
    assert ByteTokenizer().decode_bytes(range(256)) == bytes(range(256))


def test_bpe_merges() -> None:
    tokens = BPETokenizer(trained_bpe()).encode("the cat")
    assert len(tokens) < len("the cat")


def test_alphabet_is_that_of_the_library() -> None:
    assert len(set(byte_alphabet())) == 256
    assert set(byte_alphabet()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def test_special_tokens_decode_to_their_text() -> None:
    tokenizer = BPETokenizer(trained_bpe(special=("<|end|>",)))
    assert tokenizer.decode_bytes(tokenizer.encode("a<|end|>b")) == b"a<|end|>b"
    assert tokenizer.decode_bytes([0]) == b"<|end|>"


def test_undecodable_command_line_bytes(tokenizer: TextTokenizer) -> None:
    """Python hands over an argument that is not UTF-8 with lone surrogates in it."""
    argument = b"a\xffb".decode("utf-8", "surrogateescape")
    assert tokenizer.decode_bytes(tokenizer.encode(argument)).decode() == "a\ufffdb"


@pytest.mark.parametrize("token", [-1, 70_000])
def test_unknown_token_is_refused(tokenizer: TextTokenizer, token: int) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        tokenizer.decode_bytes([token])


def word_tokenizer() -> str:
    return tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).to_str()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "tokenizer.json is missing"),
        ("", "cannot be read as a tokenizer"),
        ("[1, 2]", "cannot be read as a tokenizer"),
        (json.dumps({"version": "1.0"}), "cannot be read as a tokenizer"),
        (word_tokenizer(), "a WordLevel, a BPE over bytes wanted"),
    ],
)
def test_bad_file_is_one_line(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TwellError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
