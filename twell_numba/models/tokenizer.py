"""Text to token ids and back, in bytes: every text can be encoded, whatever its alphabet.

Decoding gives bytes, not text, because a token may hold a part of a character;
:mod:`twell_numba.infer.text_stream` puts characters together again.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from twell_numba.atomic import write_file_atomically
from twell_numba.errors import TwellError
from twell_numba.models.reading import is_file, unreadable

FILE_NAME = "tokenizer.json"


class TextTokenizer(Protocol):
    """What the package needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids (int64) of a text."""
        ...

    def decode_bytes(self, tokens: Iterable[int] | np.ndarray) -> bytes:
        """Return the bytes that the tokens stand for."""
        ...

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``tokenizer.json`` into a folder."""
        ...


class ByteTokenizer:
    """256 tokens: the id of a byte is its value; text is taken as UTF-8."""

    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        """Return the UTF-8 bytes of ``text`` as token ids (int64)."""
        return np.frombuffer(valid_unicode(text).encode(), np.uint8).astype(np.int64)

    def decode_bytes(self, tokens: Iterable[int] | np.ndarray) -> bytes:
        """Return the bytes that the tokens stand for.

        Raises
        ------
        ValueError
            If a token is not in [0, 256).
        """
        return bytes(int(token) for token in tokens)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``tokenizer.json``, which other tools open to the same ids: a BPE of no merges."""
        vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        BPETokenizer(tokenizer).save(folder)


class BPETokenizer:
    """Byte-level byte-pair encoding (as in GPT-2), by the ``tokenizers`` library.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
        Its vocabulary must hold all 256 single bytes, so that no text is beyond it.

    Raises
    ------
    TwellError
        If it is of another kind.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        vocabulary = {
            text: token for text, token in tokenizer.get_vocab().items() if token not in added
        }
        if not isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel) or not all(
            character in vocabulary for character in byte_alphabet()
        ):
            raise TwellError(
                "this tokenizer is not a byte-level BPE over all 256 bytes, the only kind that is "
                "supported: train one with the byte-level alphabet, or use the byte tokenizer"
            )
        self._tokenizer = tokenizer
        byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
        self._bytes_of = {
            token: bytes(byte_of[character] for character in text)
            for text, token in vocabulary.items()
        }
        for token, special in added.items():
            self._bytes_of[token] = special.content.encode()
        self.vocab_size = 1 + max(self._bytes_of)

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids (int64) of ``text``; nothing is put before or after it."""
        encoding = self._tokenizer.encode(valid_unicode(text), add_special_tokens=False)
        return np.array(encoding.ids, np.int64)

    def decode_bytes(self, tokens: Iterable[int] | np.ndarray) -> bytes:
        """Return the bytes that the tokens stand for.

        Raises
        ------
        ValueError
            If a token is not in the vocabulary.
        """
        try:
            return b"".join(self._bytes_of[int(token)] for token in tokens)
        except KeyError as error:
            raise ValueError(f"token {error} given, one of the vocabulary wanted") from None

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``tokenizer.json`` into ``folder``."""
        with write_file_atomically(Path(folder, FILE_NAME)) as temporary:
            temporary.write_text(self._tokenizer.to_str(pretty=True), encoding="utf-8")


def load_tokenizer(folder: str | os.PathLike[str]) -> ByteTokenizer | BPETokenizer:
    """Read the ``tokenizer.json`` of a folder.

    Raises
    ------
    TwellError
        If it is missing, cannot be read, or is of a kind that is not supported.
    """
    path = Path(folder, FILE_NAME)
    if not is_file(path):
        raise TwellError(f"{path} is missing: a checkpoint's tokenizer wanted, check the path")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise TwellError(
            f"{path} cannot be read as a tokenizer: {error}; fetch or save it again"
        ) from error
    try:
        if _is_byte_vocabulary(json.loads(text)):
            return ByteTokenizer()
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more special
        reason = " ".join(str(error).split())
        raise TwellError(
            f"{path} cannot be read as a tokenizer: {reason}; fetch or save it again"
        ) from error
    try:
        return BPETokenizer(tokenizer)
    except TwellError as error:
        raise TwellError(f"{path}: {error}") from None


def byte_alphabet() -> list[str]:
    """Return the printable character that byte-level BPE writes for each byte, by byte value.

    A byte that prints stands for itself; the others take the characters from U+0100 on
    (``bytes_to_unicode`` of GPT-2).
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _is_byte_vocabulary(content: object) -> bool:
    match content:
        case {
            "model": {"type": "BPE", "vocab": dict(vocabulary), "merges": []},
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
            "normalizer": None,
            "added_tokens": [],
        }:
            return vocabulary == {character: byte for byte, character in enumerate(byte_alphabet())}
    return False


def valid_unicode(text: str) -> str:
    """Replace lone surrogates, which undecodable command-line bytes turn into, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
