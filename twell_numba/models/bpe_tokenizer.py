"""Byte-pair encoding as models come with it, by the ``tokenizers`` library."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock

import numpy as np
import tokenizers

from twell_numba.atomic import write_file_atomically
from twell_numba.models.token_bytes import token_bytes
from twell_numba.models.tokenizer_settings import TokenizerSettings

FILE_NAME = "tokenizer.json"


class BPETokenizer:
    """Byte-pair encoding, by the ``tokenizers`` library.

    Byte-level as of GPT-2, Llama 3 and Qwen2, or sentencepiece's with byte fallback as of Llama 2.
    Either encodes every text, but for bytes that a byte-level vocabulary lacks (control
    characters, see :data:`twell_numba.models.token_bytes.PRINTABLE_BYTES`), which it leaves out.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
        It is kept, not copied.
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
        kind = token_bytes(tokenizer)
        self._tokenizer = tokenizer
        self._lock = Lock()
        self.vocab_size = 1 + max(kind.bytes_of)
        self._bytes_of = [kind.bytes_of.get(token, b"") for token in range(self.vocab_size)]
        self._blanks_put_in_front = kind.blanks_put_in_front
        self.special_tokens = {
            each.content: token
            for token, each in tokenizer.get_added_tokens_decoder().items()
            if each.special
        }
        self._prefix = self._tokens_before_a_text()

    @property
    def bos_token(self) -> int | None:
        """The token that begins a text, if the model has one."""
        if self.settings.bos_token is None and self._prefix:
            return self._prefix[0]
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
            # In a batch of one, which lets other threads of Python run meanwhile: a long text takes
            # seconds.
            ids = self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
        return np.array([*self._prefix, *ids] if add_special_tokens else ids, np.int64)

    def decode_bytes(self, tokens: Iterable[int] | np.ndarray, *, at_start: bool = False) -> bytes:
        """Return the bytes that the tokens stand for; an id that is not in use has none.

        Parameters
        ----------
        tokens : ints
        at_start : bool
            The tokens begin a text: leave out the blank that sentencepiece puts in front of a text.
            Otherwise the bytes of some tokens and of those that follow are those of all of them.

        Raises
        ------
        ValueError
            If a token is not in [0, vocab_size).
        """
        tokens = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens), np.int64)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise ValueError(f"tokens in [0, {self.vocab_size}) wanted, others given")
        decoded = b"".join([self._bytes_of[token] for token in tokens.tolist()])
        for _ in range(self._blanks_put_in_front if at_start else 0):
            decoded = decoded.removeprefix(b" ")
        return decoded

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
