"""Text from a model, piece by piece."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from twell_numba.device.arrays import Array, is_on_gpu
from twell_numba.device.blas import single_threaded_blas
from twell_numba.errors import TwellError, UsageError
from twell_numba.infer.request import GenerationSettings, Request, TokenLogprob
from twell_numba.infer.sampling import sample
from twell_numba.infer.sequence import RunningSequence, advance
from twell_numba.models.cache import KVCache
from twell_numba.models.recorded_decoding import RecordedDecoding
from twell_numba.models.tokenizer import TextTokenizer
from twell_numba.models.transformer import Transformer


class Generation:
    """Text being generated: iterate over it for the pieces, once."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: TextTokenizer,
        prompt_tokens: np.ndarray,
        settings: GenerationSettings,
        use_cache: bool,
    ) -> None:
        # The last token need not be fed back, so it may stand one beyond the context.
        room = model.config.context_length - len(prompt_tokens) + 1
        self._is_short_of_room = room < settings.max_new_tokens
        self._settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, room))
        self._request = Request(prompt_tokens, self._settings)
        self._sequence = RunningSequence(self._request, tokenizer)
        self._model = model
        self._use_cache = use_cache
        self._pieces = self._generate()

    @property
    def prompt_tokens(self) -> np.ndarray:
        """What the text goes on from."""
        return self._request.prompt_tokens

    @property
    def tokens(self) -> list[int]:
        """What has been generated so far."""
        return self._request.tokens

    @property
    def token_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of these tokens, where asked for."""
        return self._request.token_logprobs

    @property
    def reason(self) -> str | None:
        """Why it ended; None until then.

        ``length``: as many tokens as asked for; ``context``: the model's context is full; ``stop``:
        a stop text, or a token that ends a text.
        """
        reason = self._request.finish_reason
        return "context" if reason == "length" and self._is_short_of_room else reason

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def _generate(self) -> Iterator[str]:
        request = self._request
        next_logits = self._cached_logits() if self._use_cache else self._recomputed_logits()
        if self._settings.max_new_tokens == 0:
            self._sequence.finish("length")
        given = 0
        while not request.finish_reason:
            with single_threaded_blas():  # as in the engine's steps
                self._advance(next(next_logits))
            if piece := request.text[given:]:
                given = len(request.text)
                yield piece
        if request.error is not None:
            raise TwellError(request.error)

    def _advance(self, logits: Array) -> None:
        """Take a token that follows, given logits (1, V)."""
        settings, sequence = self._settings, self._sequence
        is_plain = settings.repetition_penalty == 1 and settings.logprobs is None
        if not (is_plain and is_on_gpu(logits)):
            advance([sequence], logits)
            return
        # The head may have rows for tokens that the tokenizer does not know.
        row = logits.reshape(-1)[0 : sequence.tokenizer.vocab_size]
        sequence.accept(
            sample(
                row,
                sequence.rng,
                settings.temperature,
                settings.top_k,
                settings.top_p,
                settings.min_p,
            )
        )

    def _cached_logits(self) -> Iterator[Array]:
        """Yield logits (1, V) of the next token, each time computing only the newest token."""
        model, prompt = self._model, self.prompt_tokens
        capacity = min(model.config.context_length, len(prompt) + self._settings.max_new_tokens)
        cache = KVCache(model.config, 1, capacity, model.dtype, model.stream)
        yield model.step(prompt[None, :], cache)
        step: Callable[[np.ndarray], Array] = partial(model.step, cache=cache)
        if model.stream is not None:
            step = RecordedDecoding(model, cache)
        while True:
            yield step(np.array([[self.tokens[-1]]]))

    def _recomputed_logits(self) -> Iterator[Array]:
        """Yield logits (1, V) of the next token, each time computing the whole sequence anew."""
        while True:
            sequence = np.concatenate([self.prompt_tokens, np.array(self.tokens, np.int64)])
            logits = self._model.logits(sequence[None, :])
            yield logits[len(sequence) - 1 : len(sequence)]


def generate(
    model: Transformer,
    tokenizer: TextTokenizer,
    prompt: str,
    *,
    use_cache: bool = True,
    **settings: Any,
) -> Generation:
    """Go on from a prompt.

    Parameters
    ----------
    model, tokenizer
        As ``load_model`` returns them.
    prompt : str
        Of 1 to context_length tokens. It is not repeated in what is generated.
    use_cache : bool
        False computes the whole sequence anew for every token: slow, to check the cache by.
    **settings
        The fields of :class:`twell_numba.infer.request.GenerationSettings`: ``max_new_tokens``,
        ``temperature``, ``seed`` and so on. Generation ends earlier than asked for where the
        model's context does; ``reason`` then says so.

    Returns
    -------
    Generation
        ``for piece in generate(...)`` gives the text as it is made, in whole characters.

    Raises
    ------
    UsageError
        At once, before anything is generated, if the prompt or a setting is out of range.
    """
    wanted = GenerationSettings(**settings)
    wanted.validate()
    prompt_tokens = tokenizer.encode(prompt, add_special_tokens=True)
    context = model.config.context_length
    if not prompt or len(prompt_tokens) == 0:
        raise UsageError("an empty prompt given, at least one character wanted")
    if len(prompt_tokens) > context:
        raise UsageError(
            f"a prompt of {len(prompt_tokens)} tokens given, at most the model's context of "
            f"{context} wanted: shorten it"
        )
    return Generation(model, tokenizer, prompt_tokens, wanted, use_cache)
