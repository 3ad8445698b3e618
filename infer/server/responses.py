"""Generated pieces as OpenAI's objects, whole and in chunks."""

import json
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from twell_numba.infer.request import Piece, TokenLogprob
from twell_numba.infer.text_stream import TextStream
from twell_numba.models.tokenizer import TextTokenizer

# What stands for the logarithm of 0, which JSON cannot hold; OpenAI's number.
_NEVER = -9999.0

DONE = b"data: [DONE]\n\n"


def event(content: dict[str, Any]) -> bytes:
    """Return an object as a server-sent event."""
    return b"data: " + to_bytes(content) + b"\n\n"


def to_bytes(content: dict[str, Any]) -> bytes:
    """Return an object as JSON in UTF-8, on one line."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A name that the client wrote may hold half a surrogate pair.
    return text.encode("utf-8", "replace")


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return the numbers of tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def token_bytes(tokenizer: TextTokenizer, token: int) -> bytes:
    """Return what a token stands for, nothing if the tokenizer does not know it.

    A model may have rows for tokens that its tokenizer leaves out.
    """
    try:
        return tokenizer.decode_bytes([token])
    except ValueError:
        return b""


def token_text(data: bytes) -> str:
    r"""Return a token's bytes as text, or as ``bytes:\xf0\x9f`` where they are no whole text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionAnswer:
    """The answer of ``/v1/completions``, in one object or in chunks.

    Parameters
    ----------
    model : str
        Its name.
    tokenizer
    wants_logprobs : bool
    prefixes : sequence of str
        What each text starts with: its prompt if that is to be echoed, else nothing.
    """

    def __init__(
        self, model: str, tokenizer: TextTokenizer, wants_logprobs: bool, prefixes: Sequence[str]
    ) -> None:
        self._head = _head("cmpl", "text_completion", model)
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs
        self._prefixes = prefixes
        self._texts = [TextStream() for _ in prefixes]
        self._offsets = [0] * len(prefixes)

    def whole(self, pieces: Sequence[Piece], usage: dict[str, int]) -> dict[str, Any]:
        """Return the answer, of one piece a text."""
        choices = [
            self._choice(index, piece, self._prefixes[index] + piece.text)
            for index, piece in enumerate(pieces)
        ]
        return {**self._head, "choices": choices, "usage": usage}

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return what a stream begins with."""
        return [
            {**self._head, "choices": [self._choice(index, Piece(""), prefix)]}
            for index, prefix in enumerate(self._prefixes)
            if prefix
        ]

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the chunk for a piece of the text ``index``."""
        return {**self._head, "choices": [self._choice(index, piece, piece.text)]}

    def last_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """Return what a stream ends with where the numbers of tokens are wanted."""
        return {**self._head, "choices": [], "usage": usage}

    def _choice(self, index: int, piece: Piece, text: str) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, piece.logprobs) if self._wants_logprobs else None,
            "finish_reason": piece.finish_reason,
        }

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        for entry in logprobs:
            offsets.append(self._offsets[index])
            data = token_bytes(self._tokenizer, entry.token)
            self._offsets[index] += len(self._texts[index].push(data))
        return {
            "tokens": [self._text(entry.token) for entry in logprobs],
            "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [
                {self._text(token): _finite(logprob) for token, logprob in entry.top}
                for entry in logprobs
            ],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return token_text(token_bytes(self._tokenizer, token))


class ChatAnswer:
    """The answer of ``/v1/chat/completions``, in one object or in chunks.

    Parameters
    ----------
    model : str
        Its name.
    tokenizer
    wants_logprobs : bool
    n : int
        How many texts there are.
    """

    def __init__(self, model: str, tokenizer: TextTokenizer, wants_logprobs: bool, n: int) -> None:
        self._whole_head = _head("chatcmpl", "chat.completion", model)
        self._chunk_head = {**self._whole_head, "object": "chat.completion.chunk"}
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs
        self._n = n

    def whole(self, pieces: Sequence[Piece], usage: dict[str, int]) -> dict[str, Any]:
        """Return the answer, of one piece a text."""
        choices = [
            self._choice(index, piece, "message", _spoken(piece.text))
            for index, piece in enumerate(pieces)
        ]
        return {**self._whole_head, "choices": choices, "usage": usage}

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return what a stream begins with."""
        return [self._chunk(index, Piece(""), _spoken("")) for index in range(self._n)]

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the chunk for a piece of the text ``index``."""
        return self._chunk(index, piece, {"content": piece.text} if piece.text else {})

    def last_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """Return what a stream ends with where the numbers of tokens are wanted."""
        return {**self._chunk_head, "choices": [], "usage": usage}

    def _chunk(self, index: int, piece: Piece, delta: dict[str, str]) -> dict[str, Any]:
        return {**self._chunk_head, "choices": [self._choice(index, piece, "delta", delta)]}

    def _choice(
        self, index: int, piece: Piece, key: str, message: dict[str, str]
    ) -> dict[str, Any]:
        logprobs = {"content": [self._logprob(entry) for entry in piece.logprobs]}
        return {
            "index": index,
            key: message,
            "logprobs": logprobs if self._wants_logprobs else None,
            "finish_reason": piece.finish_reason,
        }

    def _logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        likeliest = [self._token(token, logprob) for token, logprob in entry.top]
        return {**self._token(entry.token, entry.logprob), "top_logprobs": likeliest}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(self._tokenizer, token)
        return {"token": token_text(data), "bytes": list(data), "logprob": _finite(logprob)}


Answer = CompletionAnswer | ChatAnswer


def _spoken(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NEVER
