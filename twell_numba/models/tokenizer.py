"""Text to token ids and back, in bytes.

Decoding gives bytes, not text, because a token may hold a part of a character;
:mod:`twell_numba.infer.text_stream` puts characters together again.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from twell_numba.errors import TwellError, shown
from twell_numba.models.bpe_tokenizer import FILE_NAME, BPETokenizer, valid_unicode
from twell_numba.models.reading import is_file, is_gguf, unreadable
from twell_numba.models.token_bytes import byte_alphabet
from twell_numba.models.tokenizer_settings import TokenizerSettings, read_settings

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "TextTokenizer",
    "byte_alphabet",
    "load_tokenizer",
    "valid_unicode",
]


class TextTokenizer(Protocol):
    """What the package needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        ...

    @property
    def bos_token(self) -> int | None:
        """The token that begins a text, if the model has one."""
        ...

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """All tokens that end a text; the first is the one that chat templates name."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of control tokens by their text."""
        ...

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """The texts of special tokens by the names that chat templates use."""
        ...

    @property
    def chat_template(self) -> str | None:
        """A Jinja template that writes a list of messages as one text."""
        ...

    def encode(
        self, text: str, *, add_special_tokens: bool = False, allow_special: bool = False
    ) -> np.ndarray:
        """Return the token ids (int64) of a text.

        With ``add_special_tokens``, what the model wants before a text is put there. With
        ``allow_special``, texts of special tokens become these tokens; otherwise they are text.
        """
        ...

    def decode_bytes(self, tokens: Iterable[int] | np.ndarray, *, at_start: bool = False) -> bytes:
        """Return the bytes that the tokens stand for.

        With ``at_start`` they begin a text: what encoding puts in front of a text is left out.
        """
        ...

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``tokenizer.json``, and what else there is to say, into a folder."""
        ...


class ByteTokenizer:
    """256 tokens: the id of a byte is its value; text is taken as UTF-8.

    Parameters
    ----------
    chat_template : str, optional
        A Jinja template that writes a list of messages as one text.
    """

    vocab_size = 256
    bos_token: int | None = None
    eos_tokens: tuple[int, ...] = ()

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template
        self.special_tokens: dict[str, int] = {}
        self.named_tokens: dict[str, str] = {}

    def encode(
        self, text: str, *, add_special_tokens: bool = False, allow_special: bool = False
    ) -> np.ndarray:
        """Return the UTF-8 bytes of ``text`` as token ids (int64); there are no special tokens."""
        return np.frombuffer(valid_unicode(text).encode(), np.uint8).astype(np.int64)

    def decode_bytes(self, tokens: Iterable[int] | np.ndarray, *, at_start: bool = False) -> bytes:
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
        BPETokenizer(tokenizer, TokenizerSettings(chat_template=self.chat_template)).save(folder)


def load_tokenizer(folder: str | os.PathLike[str]) -> ByteTokenizer | BPETokenizer:
    """Read the ``tokenizer.json`` of a folder, and the settings that may stand beside it.

    Those are ``tokenizer_config.json``, ``special_tokens_map.json``, ``generation_config.json``,
    ``config.json`` and ``chat_template.jinja``. A GGUF file has all of it in its header.

    Raises
    ------
    TwellError
        If it is missing, cannot be read, or is of a kind that is not supported.
    """
    if is_gguf(folder):
        from twell_numba.models.gguf_file import open_gguf
        from twell_numba.models.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(open_gguf(folder))
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
    return tokenizer_from_json(
        text, str(path), lambda tokenizer: _settings_beside(path.parent, tokenizer)
    )


def tokenizer_from_json(
    text: str, source: str, settings_of: Callable[[tokenizers.Tokenizer], TokenizerSettings]
) -> ByteTokenizer | BPETokenizer:
    """Return the tokenizer that the contents of a ``tokenizer.json`` describe.

    Parameters
    ----------
    text : str
    source : str
        Where it comes from, for messages.
    settings_of : callable
        Returns what else there is to say about the tokenizer of the library that it is given.

    Raises
    ------
    TwellError
        If it cannot be read, or is of a kind that is not supported.
    """
    with _errors_of_the_library(source):
        content = json.loads(text)
        _refuse_word_parts(content)
        is_bytes = _is_byte_vocabulary(content)
        tokenizer = tokenizers.Tokenizer.from_str(text)
    settings = settings_of(tokenizer)
    if is_bytes:
        return ByteTokenizer(settings.chat_template)
    with _errors_of_the_library(source):
        return BPETokenizer(tokenizer, settings)


@contextmanager
def _errors_of_the_library(source: str) -> Iterator[None]:
    """Say in one line what a tokenizer cannot be read for."""
    try:
        yield
    except TwellError as error:
        raise TwellError(f"{source}: {error}") from None
    except BaseException as error:
        # The library raises nothing more special; what it panics of is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())
        raise TwellError(
            f"{source} cannot be read as a tokenizer: {reason}; fetch or save it again"
        ) from error


def _settings_beside(folder: Path, tokenizer: tokenizers.Tokenizer) -> TokenizerSettings:
    return read_settings(
        folder,
        token_id=tokenizer.token_to_id,
        known=lambda token: 0 <= token < 1 << 32 and tokenizer.id_to_token(token) is not None,
    )


def _refuse_word_parts(content: object) -> None:
    """Refuse vocabularies that mark parts of words, on which the library may abort."""
    match content:
        case {"model": dict(model)}:
            for key in ("continuing_subword_prefix", "end_of_word_suffix"):
                if model.get(key):
                    raise ValueError(f"{key} {shown(model[key])} is not supported")


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
