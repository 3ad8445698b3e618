"""A request while it runs: its next token drawn, and tokens becoming text."""

from collections.abc import Callable, Sequence

import numpy as np

from twell_numba.device.arrays import Array, to_host
from twell_numba.infer.request import Piece, Request, TokenLogprob
from twell_numba.infer.sampling import log_probability, no_token_error, penalize_repetition
from twell_numba.infer.stop_text import StopTextFilter
from twell_numba.infer.text_stream import TextStream
from twell_numba.kernels.sampling import sample_token
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
        self.tokenizer = tokenizer
        self._on_piece = on_piece
        self.rng = np.random.default_rng(request.settings.seed)
        self._stream = TextStream()
        self._filter = StopTextFilter(request.settings.stop)
        self._eos_tokens = frozenset(() if request.settings.ignore_eos else tokenizer.eos_tokens)
        self._pending = 0  # tokens that no piece holds yet

    def uniform(self) -> float:
        """Return the random number in [0, 1) that the next token is drawn by."""
        return float(self.rng.random()) if self.request.settings.temperature else 0.0

    def seen_tokens(self) -> np.ndarray:
        """Return the tokens of the prompt and the text so far, each once."""
        return np.union1d(self.request.prompt_tokens, np.array(self.request.tokens, np.int64))

    def accept(self, token: int, logprob: TokenLogprob | None = None) -> None:
        """Take a drawn token, and give out the text that is certain now.

        ``request.finish_reason`` says then whether it was the last.
        """
        request = self.request
        request.tokens.append(token)
        self._pending += 1
        if logprob is not None:
            request.token_logprobs.append(logprob)
        if token in self._eos_tokens:
            self.finish("stop")
            return
        text = self._filter.push(self._stream.push(self.tokenizer.decode_bytes([token])))
        if self._filter.is_stopped:
            self.finish("stop", text)
        elif len(request.tokens) >= request.settings.max_new_tokens:
            self.finish("length", text)
        elif text:
            self._give_out(text)

    def finish(self, reason: str, text: str = "", error: str | None = None) -> None:
        """End the request, and give out ``text`` and what was kept back."""
        text += self._filter.push(self._stream.finish())
        if self._filter.is_stopped and error is None:
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


def advance(sequences: Sequence[RunningSequence], logits: Array) -> None:
    """Draw the next token of each sequence, each by its own settings and random numbers.

    A sequence for which none can be chosen ends with an error.

    Parameters
    ----------
    sequences : sequence of RunningSequence
    logits : array, shape (len(sequences), V)
        V may be more than the tokenizer knows: these tokens are never drawn.
    """
    rows = _float_rows(logits, sequences[0].tokenizer.vocab_size)
    for sequence, token, row in zip(sequences, _drawn(sequences, rows), rows, strict=True):
        count = sequence.request.settings.logprobs
        if token < 0:
            sequence.finish("error", error=str(no_token_error(row)))
            continue
        logprob = None if count is None else log_probability(row, token, count)
        try:
            sequence.accept(token, logprob)
        except ValueError as error:  # the tokenizer has no such token
            sequence.finish("error", error=described(error))


def _float_rows(logits: Array, vocabulary: int) -> np.ndarray:
    rows = to_host(logits)[:, :vocabulary]
    return rows if rows.dtype == np.float64 else np.asarray(rows, np.float32)


def _drawn(sequences: Sequence[RunningSequence], logits: np.ndarray) -> list[int]:
    """Return a token for each row; -1 where none can be chosen."""
    settings = [sequence.request.settings for sequence in sequences]
    if any(own.repetition_penalty != 1 for own in settings):
        logits = logits.copy()
        for sequence, own, row in zip(sequences, settings, logits, strict=True):
            if own.repetition_penalty != 1:
                penalize_repetition(row, sequence.seen_tokens(), own.repetition_penalty)
    return sample_token(
        logits,
        np.array([sequence.uniform() for sequence in sequences]),
        np.array([own.temperature for own in settings]),
        np.array([own.top_k for own in settings]),
        np.array([own.top_p for own in settings]),
        np.array([own.min_p for own in settings]),
    ).tolist()
