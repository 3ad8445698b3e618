import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.gguf_files import byte_metadata
from tests.models.real_tokenizers import BYTE_LEVEL, LINES, SENTENCEPIECE, tokenizer_of
from twell_numba.errors import TwellError
from twell_numba.models.gguf_file import GGUFFile
from twell_numba.models.gguf_tokenizer import tokenizer_from_gguf
from twell_numba.models.gguf_vocabulary import vocabulary_metadata
from twell_numba.models.pre_tokenizers import WORD_SPLITS
from twell_numba.models.tokenizer import BPETokenizer, ByteTokenizer
from twell_numba.models.tokenizer_settings import TokenizerSettings

TEXTS = [
    *LINES,
    "",
    " ",
    "  two  blanks ",
    "Hvor er grøden? 1234567 ½",
    "don't I'LL we've\r\n\n\n  x",
    "a<|im_end|>b</s>c<s>",
    "\u0301e\u0301 \U0001f9d1\u200d\U0001f680 漢字",
    "<0x41> [PAD3]",
]


def as_read(metadata: dict[str, Any]) -> GGUFFile:
    """Return metadata as it comes out of a file."""
    read = {
        key: np.array(value) if isinstance(value, list) and not isinstance(value[0], str) else value
        for key, value in metadata.items()
    }
    return GGUFFile(Path("model.gguf"), read, {})


def metadata_of(kind: str, **settings: Any) -> dict[str, Any]:
    tokenizer = BPETokenizer(tokenizer_of(kind), TokenizerSettings(**settings))
    return vocabulary_metadata(tokenizer, tokenizer.vocab_size + 5)


@pytest.mark.parametrize("kind", [*BYTE_LEVEL, *SENTENCEPIECE])
@pytest.mark.parametrize("allow_special", [False, True])
def test_what_is_written_is_read(kind: str, allow_special: bool) -> None:
    ours = BPETokenizer(tokenizer_of(kind))
    read = tokenizer_from_gguf(as_read(metadata_of(kind)))
    assert read.vocab_size == ours.vocab_size
    assert read.special_tokens == ours.special_tokens
    for text in TEXTS:
        for adds in (False, True):
            options = {"allow_special": allow_special, "add_special_tokens": adds}
            tokens = ours.encode(text, **options)
            assert read.encode(text, **options).tolist() == tokens.tolist()
            assert read.decode_bytes(tokens) == ours.decode_bytes(tokens)


@pytest.mark.parametrize("kind", BYTE_LEVEL)
@pytest.mark.parametrize("allow_special", [False, True])
def test_tokens_and_merges_alone_give_the_same_ids(kind: str, allow_special: bool) -> None:
    """As files of other tools have them, which hold no ``tokenizer.json``."""
    ours = BPETokenizer(tokenizer_of(kind))
    metadata = metadata_of(kind)
    assert metadata["tokenizer.ggml.pre"] == kind
    del metadata["tokenizer.huggingface.json"]
    read = tokenizer_from_gguf(as_read(metadata))
    assert read.special_tokens == ours.special_tokens
    for text in TEXTS:
        if "[PAD3]" in text:
            continue
        tokens = ours.encode(text, allow_special=allow_special)
        assert read.encode(text, allow_special=allow_special).tolist() == tokens.tolist()
        assert read.decode_bytes(tokens) == ours.decode_bytes(tokens)


def sentencepiece_ids(text: str, scores: dict[str, float], ids: dict[str, int]) -> list[int]:
    """Merge the pair whose token has the best score, the leftmost of equals, until none is left."""
    pieces = list(text)
    while True:
        best = None
        for place in range(len(pieces) - 1):
            merged = pieces[place] + pieces[place + 1]
            if merged in scores and (best is None or scores[merged] > best[0]):
                best = (scores[merged], place)
        if best is None:
            break
        pieces[best[1] : best[1] + 2] = [pieces[best[1]] + pieces[best[1] + 1]]
    tokens = []
    for piece in pieces:
        if piece in ids:
            tokens.append(ids[piece])
        else:
            tokens += [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return tokens


@pytest.mark.parametrize("kind", ["legacy", "plain"])
def test_scores_alone_merge_as_sentencepiece_does(kind: str) -> None:
    metadata = metadata_of(kind)
    del metadata["tokenizer.huggingface.json"]
    read = tokenizer_from_gguf(as_read(metadata))
    texts = metadata["tokenizer.ggml.tokens"]
    ids = {text: token for token, text in enumerate(texts)}
    scores = {
        text: score
        for text, score, of_type in zip(
            texts,
            metadata["tokenizer.ggml.scores"],
            metadata["tokenizer.ggml.token_type"],
            strict=True,
        )
        if of_type == 1
    }
    for text in TEXTS:
        escaped = text.replace(" ", "▁")
        if kind == "legacy" and text:
            escaped = "▁" + escaped
        assert read.encode(text).tolist() == sentencepiece_ids(escaped, scores, ids)
        assert read.decode_bytes(read.encode(text), at_start=True).decode() == text
    assert read.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}
    assert read.bos_token == 1


def test_settings_are_kept() -> None:
    settings = {
        "bos_token": 0,
        "eos_tokens": (2, 0, 7, 8),
        "adds_bos": True,
        "chat_template": "{{ messages }}",
        "named_tokens": {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
    }
    metadata = metadata_of("smollm", **settings)
    assert metadata["tokenizer.ggml.eos_token_id"] == 2
    assert metadata["tokenizer.ggml.eot_token_id"] == 0
    assert metadata["tokenizer.ggml.bos_token_id"] == 0
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    for without_json in (False, True):
        if without_json:
            del metadata["tokenizer.huggingface.json"]
        read = tokenizer_from_gguf(as_read(metadata))
        assert isinstance(read, BPETokenizer)
        assert read.bos_token == 0
        assert read.eos_tokens == (2, 0, 7, 8)
        assert read.chat_template == "{{ messages }}"
        assert read.named_tokens["eos_token"] == "<|im_end|>"
        assert read.encode("", add_special_tokens=True).tolist() == [0]


def test_tokens_that_end_an_answer_are_known_by_their_text() -> None:
    metadata = metadata_of("smollm", eos_tokens=(0,))
    del metadata["twell.eos_token_ids"]
    assert tokenizer_from_gguf(as_read(metadata)).eos_tokens == (0, 2)


def test_bytes_stay_bytes() -> None:
    read = tokenizer_from_gguf(as_read(vocabulary_metadata(ByteTokenizer("{{ 1 }}"), 300)))
    assert isinstance(read, ByteTokenizer)
    assert read.chat_template == "{{ 1 }}"


@pytest.mark.parametrize(
    ("pre", "kind", "adds"),
    [("llama-bpe", "gpt2", True), ("qwen2", "gpt2", False), (None, "gpt2", False)],
)
def test_whether_a_text_begins_with_bos_where_a_file_does_not_say(
    pre: str | None, kind: str, adds: bool
) -> None:
    metadata = {**byte_metadata(), "tokenizer.ggml.bos_token_id": 65}
    metadata["tokenizer.ggml.pre"] = pre
    if pre is None:
        del metadata["tokenizer.ggml.pre"]
    read = tokenizer_from_gguf(as_read(metadata))
    assert read.encode("a", add_special_tokens=True).tolist() == [65, 97][not adds :]


@pytest.mark.parametrize("name", WORD_SPLITS)
def test_every_split_gives_back_the_text(name: str) -> None:
    read = tokenizer_from_gguf(as_read({**byte_metadata(), "tokenizer.ggml.pre": name}))
    for text in TEXTS:
        if not WORD_SPLITS[name].composes:
            assert read.decode_bytes(read.encode(text)).decode() == text


def test_splits_are_where_they_should_be() -> None:
    """A merge of two digits is made where digits are not split off, and only there."""
    metadata = byte_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "12", "Ġa"]
    metadata["tokenizer.ggml.token_type"] = [1] * 258
    metadata["tokenizer.ggml.merges"] = ["1 2", "Ġ a"]
    for name, merged in (("gpt-2", True), ("llama-bpe", True), ("smollm", False), ("qwen2", False)):
        metadata["tokenizer.ggml.pre"] = name
        tokens = tokenizer_from_gguf(as_read(metadata)).encode("12 a").tolist()
        assert (256 in tokens) == merged
        assert 257 in tokens


def test_unused_and_repeated_tokens_do_no_harm() -> None:
    metadata = byte_metadata()
    metadata["tokenizer.ggml.tokens"] = [
        *metadata["tokenizer.ggml.tokens"],
        "a",
        "",
        "[PAD]",
        "x y",
    ]
    metadata["tokenizer.ggml.token_type"] = [1] * 256 + [1, 1, 5, 4]
    metadata["tokenizer.ggml.merges"] = ["q q", "", "a", " "]
    read = tokenizer_from_gguf(as_read(metadata))
    assert read.encode("a").tolist() == [97]
    assert read.encode("[PAD]").size == 5
    assert read.encode("-x y-").tolist() == [45, 259, 45]
    assert read.decode_bytes([256, 257]) == b""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.scores": None}, "no tokenizer.ggml.scores"),
        ({"tokenizer.ggml.scores": [1.0]}, "1 scores given for"),
        ({"tokenizer.ggml.tokens": [""]}, "without tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    metadata = metadata_of("legacy") | changes
    del metadata["tokenizer.huggingface.json"]
    if changes.get("tokenizer.ggml.tokens"):
        metadata["tokenizer.ggml.token_type"] = [1]
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(TwellError, match=message) as caught:
        tokenizer_from_gguf(as_read(metadata))
    assert "\n" not in str(caught.value)
    assert "model.gguf" in str(caught.value)


def test_written_metadata_is_what_other_tools_expect() -> None:
    """One text, one type and one score for each of the model's rows."""
    metadata = metadata_of("llama-bpe")
    rows = json.loads(metadata["tokenizer.huggingface.json"])["added_tokens"][-1]["id"] + 6
    texts, types = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    assert len(texts) == len(types) == rows
    assert len(set(texts)) == rows
    assert types[texts.index("<|im_end|>")] == 3
    assert types[texts.index("<tool>")] == 4
    assert types[-1] == 5
    metadata = metadata_of("legacy")
    assert metadata["tokenizer.ggml.add_space_prefix"] is True
    assert metadata_of("plain")["tokenizer.ggml.add_space_prefix"] is False
    types = metadata["tokenizer.ggml.token_type"]
    assert types[:4] == [2, 3, 3, 6]
    assert len(metadata["tokenizer.ggml.scores"]) == len(types)


def test_a_very_long_token_takes_no_time() -> None:
    metadata = metadata_of("legacy")
    del metadata["tokenizer.huggingface.json"]
    metadata["tokenizer.ggml.tokens"][-1] = "a" * 3_000_000
    metadata["tokenizer.ggml.token_type"][-1] = 1
    tokenizer = tokenizer_from_gguf(as_read(metadata))
    assert tokenizer.decode_bytes(tokenizer.encode("aaa"), at_start=True) == b"aaa"
