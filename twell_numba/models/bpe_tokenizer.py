"""Byte-pair encoding as models come with it, by the ``tokenizers`` library."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock

import numpy as np
import tokenizers

from twell_numba.atomic import write_file_atomically
from twell_numba.errors import TwellError
from twell_numba.models.token_bytes import PRINTABLE_BYTES, byte_alphabet, byte_level_bytes
from twell_numba.models.tokenizer_settings import TokenizerSettings

FILE_NAME = "tokenizer.json"


class BPETokenizer:
    """Byte-level byte-pair encoding (as in GPT-2), by the ``tokenizers`` library.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
        Its vocabulary must hold all single bytes of printable text. It is kept, not copied.
    settings : TokenizerSettings, optional
        Which tokens begin and end a text, and the template of chats.

    Raises
    ------
    TwellError
        If it is of another kind.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, settings: TokenizerSettings | None = None
    ) -> None:
        self.settings = settings or TokenizerSettings()
        added = tokenizer.get_added_tokens_decoder()
        vocabulary = {
            text: token for text, token in tokenizer.get_vocab().items() if token not in added
        }
        alphabet = byte_alphabet()
        if not isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel) or not all(
            alphabet[byte] in vocabulary for byte in PRINTABLE_BYTES
        ):
            raise TwellError(
                "this tokenizer is not a byte-level BPE over all bytes of printable text, the only "
                "kind that is supported: train one with the byte-level alphabet, or use the byte "
                "tokenizer"
            )
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._bytes_of = byte_level_bytes(vocabulary)
        for token, special in added.items():
            self._bytes_of[token] = special.content.encode()
        self.vocab_size = 1 + max(self._bytes_of)
        self.special_tokens = {
            special.content: token for token, special in added.items() if special.special
        }
        self._prefix = self._tokens_before_a_text()

    @property
    def bos_token(self) -> int | None:
        """The token that begins a text, if the model has one."""
        return self.settings.bos_token

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """All tokens that end a text; the first is the one that chat templates name."""
        return self.settings.eos_tokens

    @property
    def chat_template(self) -> str | None:
        """A Jinja template that writes a list of messages as one text."""
        return self.settings.chat_template

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """The texts of special tokens by the names that chat templates use."""
        return self.settings.named_tokens

    def encode(
        self, text: str, *, add_special_tokens: bool = False, allow_special: bool = False
    ) -> np.ndarray:
        """Return the token ids (int64) of ``text``.

        Parameters
        ----------
        text : str
        add_special_tokens : bool
            Begin with what the model wants before a text.
        allow_special : bool
            Take ``<|im_end|>`` in the text for the token of that name; otherwise it is text like
            any other, so that nobody can write control tokens into a text.
        """
        text = valid_unicode(text)
        with self._lock:
            self._tokenizer.encode_special_tokens = not allow_special
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array([*self._prefix, *ids] if add_special_tokens else ids, np.int64)

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
        """Write ``tokenizer.json``, and the settings beside it where there are any."""
        with self._lock:
            self._tokenizer.encode_special_tokens = False  # it is written with the rest
            text = self._tokenizer.to_str(pretty=True)
        with write_file_atomically(Path(folder, FILE_NAME)) as temporary:
            temporary.write_text(text, encoding="utf-8")
        self.settings.save(folder)

    def _tokens_before_a_text(self) -> list[int]:
        """Return what the settings want before a text, or else the file's post-processor."""
        if self.settings.adds_bos is not None:
            bos = self.settings.bos_token
            return [bos] if self.settings.adds_bos and bos is not None else []
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(full)):
            if full[start : start + len(plain)] == plain:
                return full[:start]
        return []


def valid_unicode(text: str) -> str:
    """Replace lone surrogates, which undecodable command-line bytes turn into, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
