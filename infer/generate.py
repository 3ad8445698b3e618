"""Text from a model, piece by piece."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from twell_numba.device.arrays import Array
from twell_numba.errors import UsageError
from twell_numba.infer.sampling import check_sampling, sample
from twell_numba.infer.text_stream import TextStream
from twell_numba.models.cache import KVCache
from twell_numba.models.recorded_decoding import RecordedDecoding
from twell_numba.models.tokenizer import TextTokenizer
from twell_numba.models.transformer import Transformer


class Generation:
    """Text being generated: iterate over it for the pieces, once.

    Attributes
    ----------
    prompt_tokens : ndarray of int64
    tokens : list of int
        What has been generated so far.
    reason : {None, "length", "context"}
        Why it ended: as many tokens as asked for, or the model's context is full. None until then.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: TextTokenizer,
        prompt_tokens: np.ndarray,
        *,
        max_new_tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        seed: int,
        use_cache: bool,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.tokens: list[int] = []
        self.reason: str | None = None
        self._model = model
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._sample = partial(
            sample,
            rng=np.random.default_rng(seed),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )
        self._use_cache = use_cache
        self._pieces = self._generate()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def _generate(self) -> Iterator[str]:
        stream = TextStream()
        # The last token need not be fed back, so it may stand one beyond the context.
        room = self._model.config.context_length - len(self.prompt_tokens) + 1
        next_logits = self._cached_logits() if self._use_cache else self._recomputed_logits()
        for _ in range(min(self._max_new_tokens, room)):
            # The head may have rows for tokens that the tokenizer does not know.
            logits = next(next_logits)[0 : self._tokenizer.vocab_size]
            token = self._sample(logits)
            self.tokens.append(token)
            if piece := stream.push(self._tokenizer.decode_bytes([token])):
                yield piece
        self.reason = "length" if self._max_new_tokens <= room else "context"
        if rest := stream.finish():
            yield rest

    def _cached_logits(self) -> Iterator[Array]:
        """Yield logits (V,) of the next token, each time computing only the newest token."""
        config = self._model.config
        longest = len(self.prompt_tokens) + self._max_new_tokens
        capacity = min(config.context_length, longest)
        model = self._model
        cache = KVCache(config, 1, capacity, model.dtype, model.stream)
        yield model.step(self.prompt_tokens[None, :], cache).reshape(-1)
        step: Callable[[np.ndarray], Array] = partial(model.step, cache=cache)
        if model.stream is not None:
            step = RecordedDecoding(model, cache)
        while True:
            yield step(np.array([[self.tokens[-1]]])).reshape(-1)

    def _recomputed_logits(self) -> Iterator[Array]:
        """Yield logits (V,) of the next token, each time computing the whole sequence anew."""
        while True:
            sequence = np.concatenate([self.prompt_tokens, np.array(self.tokens, np.int64)])
            logits = self._model.logits(sequence[None, :])
            yield logits[len(sequence) - 1 : len(sequence)].reshape(-1)


def generate(
    model: Transformer,
    tokenizer: TextTokenizer,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    use_cache: bool = True,
) -> Generation:
    """Go on from a prompt.

    Parameters
    ----------
    model, tokenizer
        As ``load_model`` returns them.
    prompt : str
        Of 1 to context_length tokens. It is not repeated in what is generated.
    max_new_tokens : int
        Generation ends earlier where the model's context does; ``reason`` then says so.
    temperature, top_k, top_p
        See :func:`twell_numba.infer.sampling.sample`; temperature 0 is greedy.
    seed : int
        The same seed gives the same text.
    use_cache : bool
        False computes the whole sequence anew for every token: slow, to check the cache by.

    Returns
    -------
    Generation
        ``for piece in generate(...)`` gives the text as it is made, in whole characters.

    Raises
    ------
    UsageError
        At once, before anything is generated, if the prompt or a setting is out of range.
    """
    check_sampling(temperature, top_k, top_p)
    if max_new_tokens < 0:
        raise UsageError(f"max-new-tokens {max_new_tokens} given, at least 0 wanted")
    if seed < 0:
        raise UsageError(f"seed {seed} given, at least 0 wanted")
    prompt_tokens = tokenizer.encode(prompt)
    context = model.config.context_length
    if len(prompt_tokens) == 0:
        raise UsageError("an empty prompt given, at least one character wanted")
    if len(prompt_tokens) > context:
        raise UsageError(
            f"a prompt of {len(prompt_tokens)} tokens given, at most the model's context of "
            f"{context} wanted: shorten it"
        )
    return Generation(
        model,
        tokenizer,
        prompt_tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        use_cache=use_cache,
    )
