"""The bytes that each token of a vocabulary stands for, by the vocabulary's kind."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from twell_numba.errors import TwellError

# Bytes of which printable text is made, in UTF-8. The others are control characters, bytes that
# UTF-8 never has, and the first bytes of planes in which no character is assigned; vocabularies
# that were trained on real text may lack them.
PRINTABLE_BYTES = (9, 10, *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1))
MOST_TOKENS = 1 << 24
# How sentencepiece writes a blank inside a token.
METASPACE = "\u2581"

_WANTED = (
    "a BPE over bytes wanted: byte-level as of GPT-2, or with byte fallback as of Llama 2; other "
    "kinds lose characters that they do not know"
)


@dataclass(frozen=True)
class TokenBytes:
    """What the tokens of a vocabulary stand for.

    Attributes
    ----------
    bytes_of : dict of int to bytes
    blanks_put_in_front : int
        How many blanks encoding puts in front of a text, which are no part of it.
    """

    bytes_of: dict[int, bytes]
    blanks_put_in_front: int


def token_bytes(tokenizer: tokenizers.Tokenizer) -> TokenBytes:
    """Return what the tokens stand for; an added token stands for its own text.

    Raises
    ------
    TwellError
        If the tokenizer is of a kind of which single tokens have no bytes, or cannot encode every
        text.
    """
    if not isinstance(tokenizer.model, tokenizers.models.BPE):
        raise TwellError(f"this tokenizer is a {type(tokenizer.model).__name__}, {_WANTED}")
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = {
        text: token for text, token in tokenizer.get_vocab().items() if token not in added
    }
    if is_byte_level(tokenizer):
        result = TokenBytes(_byte_level(vocabulary), 0)
    else:
        blanks = _blanks(_decoder_steps(tokenizer))
        result = TokenBytes(_sentencepiece(vocabulary, tokenizer.model), blanks)
    result.bytes_of.update({token: each.content.encode() for token, each in added.items()})
    if max(result.bytes_of) >= MOST_TOKENS:
        raise TwellError(
            f"this tokenizer has a token with the id {max(result.bytes_of)}, at most "
            f"{MOST_TOKENS - 1} wanted: fetch it again"
        )
    return result


def is_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    """Say whether the characters of tokens stand for bytes, as GPT-2's do."""
    return [step["type"] for step in _decoder_steps(tokenizer)] == ["ByteLevel"]


def byte_alphabet() -> list[str]:
    """Return the printable character that byte-level BPE writes for each byte, by byte value.

    A byte that prints stands for itself; the others take the characters from U+0100 on
    (``bytes_to_unicode`` of GPT-2).
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _byte_level(vocabulary: Mapping[str, int]) -> dict[int, bytes]:
    """Return the bytes by token id where each character of a token stands for a byte.

    A token that has another character stands for its own text, as in the ``tokenizers`` library.
    """
    alphabet = byte_alphabet()
    if missing := [byte for byte in PRINTABLE_BYTES if alphabet[byte] not in vocabulary]:
        raise TwellError(
            f"this tokenizer has no token for the byte 0x{missing[0]:02X} ({len(missing)} are "
            f"missing), so that some texts cannot be encoded: a vocabulary with all bytes of "
            f"printable text wanted"
        )
    # A Latin-1 character that stands for no byte becomes one that Latin-1 lacks.
    to_latin1 = dict.fromkeys(range(256), 65535)
    to_latin1 |= {ord(character): byte for byte, character in enumerate(alphabet)}
    bytes_of = {}
    for text, token in vocabulary.items():
        try:
            bytes_of[token] = text.translate(to_latin1).encode("latin-1")
        except UnicodeEncodeError:
            bytes_of[token] = text.encode()
    return bytes_of


def _sentencepiece(vocabulary: Mapping[str, int], model: tokenizers.models.BPE) -> dict[int, bytes]:
    """Return the bytes by token id where a token is text, with a sign for blanks, or one byte."""
    single_bytes = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    if not model.byte_fallback or not all(text in vocabulary for text in single_bytes):
        raise TwellError(
            f"this tokenizer is neither byte-level nor falls back to single bytes, {_WANTED}"
        )
    return {
        token: single_bytes.get(text) or text.replace(METASPACE, " ").encode()
        for text, token in vocabulary.items()
    }


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        raise TwellError(f"this tokenizer has no decoder, {_WANTED}")
    content = json.loads(tokenizer.decoder.__getstate__())
    return content["decoders"] if content["type"] == "Sequence" else [content]


def _blanks(steps: Iterable[Mapping[str, Any]]) -> int:
    """Return how many leading blanks a decoder takes away, after what all of this kind do."""
    blanks = 0
    for step in steps:
        match step:
            case {"type": "ByteFallback" | "Fuse"}:
                continue
            case {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}:
                continue
            case {"type": "Metaspace", "replacement": "\u2581", **settings}:
                blanks += settings.get("prepend_scheme", "always") != "never"
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                blanks += start
            case _:
                raise TwellError(
                    f"this tokenizer decodes by a step that is not supported "
                    f"({re.sub(r'[^ -~]', '?', json.dumps(step))[:80]}), {_WANTED}"
                )
    return blanks
