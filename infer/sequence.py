"""A request while it runs: its random numbers, and tokens becoming text."""

from collections.abc import Callable

import numpy as np

from twell_numba.infer.request import Piece, Request, TokenLogprob
from twell_numba.infer.stop_text import StopTextFilter
from twell_numba.infer.text_stream import TextStream
from twell_numba.models.tokenizer import TextTokenizer


class RunningSequence:
    """What a running request needs beside the model.

    Parameters
    ----------
    request : Request
        Changed in place as tokens come.
    tokenizer
    on_piece : callable, optional
        Gets each Piece as soon as it is certain.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: TextTokenizer,
        on_piece: Callable[[Piece], None] | None = None,
    ) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._on_piece = on_piece
        self._rng = np.random.default_rng(request.settings.seed)
        self._stream = TextStream()
        self._filter = StopTextFilter(request.settings.stop)
        self._eos_tokens = frozenset(getattr(tokenizer, "eos_tokens", ()))
        self._pending = 0  # tokens that no piece holds yet

    def uniform(self) -> float:
        """Return the random number in [0, 1) that the next token is drawn by."""
        return float(self._rng.random()) if self.request.settings.temperature else 0.0

    def seen_tokens(self) -> np.ndarray:
        """Return the tokens of the prompt and the text so far, each once."""
        return np.union1d(self.request.prompt_tokens, np.array(self.request.tokens, np.int64))

    def accept(self, token: int, logprob: TokenLogprob | None = None) -> None:
        """Take a drawn token, and give out the text that is certain now.

        ``request.finish_reason`` says then whether it was the last.
        """
        request, settings = self.request, self.request.settings
        request.tokens.append(token)
        self._pending += 1
        if logprob is not None:
            request.token_logprobs.append(logprob)
        if token in self._eos_tokens and not settings.ignore_eos:
            self.finish("stop")
            return
        text = self._filter.push(self._stream.push(self._tokenizer.decode_bytes([token])))
        if self._filter.is_stopped:
            self.finish("stop", text)
        elif len(request.tokens) >= settings.max_new_tokens:
            self.finish("length", text)
        elif text:
            self._give_out(text)

    def finish(self, reason: str, text: str = "", error: str | None = None) -> None:
        """End the request, and give out ``text`` and what was kept back."""
        text += self._filter.push(self._stream.finish())
        if self._filter.is_stopped:
            reason = "stop"  # a stop text may hold the replacement character
        text += self._filter.finish()
        self.request.error = error
        self._give_out(text, reason)

    def _give_out(self, text: str, finish_reason: str | None = None) -> None:
        request = self.request
        first = len(request.tokens) - self._pending
        self._pending = 0
        request.text += text
        request.finish_reason = finish_reason
        if self._on_piece is not None:
            tokens, logprobs = request.tokens[first:], request.token_logprobs[first:]
            self._call(self._on_piece, Piece(text, tuple(tokens), tuple(logprobs), finish_reason))

    def _call(self, on_piece: Callable[[Piece], None], piece: Piece) -> None:
        """Hand out a piece. If the callback fails, so does the request, and nothing else."""
        try:
            on_piece(piece)
        except Exception as error:
            self._on_piece = None
            self.request.finish_reason = "error"
            self.request.error = f"the callback of the request failed: {described(error)}"


def described(error: BaseException) -> str:
    """Return an error in one line, with its kind."""
    return " ".join(f"{type(error).__name__}: {error}".split())
