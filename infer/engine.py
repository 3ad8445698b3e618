"""Many texts continued at once by one model: continuous batching.

A step reads a bounded part of the prompts that are not read yet, all in one pass through the
model, and then draws one token for every text that goes on, in another. So a long prompt delays
the others by a bounded time, and requests come and go at any step. Keys and values lie in the pages
of a cache of fixed size (:mod:`twell_numba.models.paged_cache`); a request starts when there are
pages for all that it may need, so that none has to be stopped on its way.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from twell_numba.device.arrays import Array
from twell_numba.device.blas import single_threaded_blas
from twell_numba.errors import UsageError
from twell_numba.infer.request import GenerationSettings, Piece, Request, check_prompt
from twell_numba.infer.sequence import RunningSequence, advance, described
from twell_numba.models.paged_cache import PagedKVCache, default_cache_tokens
from twell_numba.models.ragged import Chunk, decode_logits, prefill_logits, stacked
from twell_numba.models.tokenizer import TextTokenizer
from twell_numba.models.transformer import Transformer


@dataclass(eq=False)
class _Running:
    """A sequence, its pages, and how many of its tokens they hold."""

    sequence: RunningSequence
    table: np.ndarray
    stored: int = 0

    @property
    def request(self) -> Request:
        return self.sequence.request

    @property
    def unread(self) -> int:
        """Tokens of the prompt that are not read yet."""
        return max(0, len(self.request.prompt_tokens) - self.stored)


class Engine:
    """Continues many prompts at once.

    ``submit`` and ``cancel`` may be called from any thread, also from a callback; ``step``, ``run``
    and ``generate`` from one.

    Parameters
    ----------
    model, tokenizer
        As ``load_model`` returns them. The model is used by nothing else meanwhile.
    cache_tokens : int, optional
        For how many tokens the cache has room, in whole pages of 16: ``max_sequences`` texts of the
        context's length if not given, but no more than a GiB, or one such text.
    max_sequences : int
        The most requests that run at once; others wait.
    prefill_chunk : int
        The most tokens of prompts that are read in one step.

    Attributes
    ----------
    prompt_tokens, generated_tokens : int
        Read and drawn since the engine was made.

    Raises
    ------
    UsageError
        If a size is out of range.

    Notes
    -----
    A request draws its tokens by its own seed, and attention gives it the same bits alone and
    beside others. Dense products round differently for other numbers of rows, by about 1e-7: a
    text could change where two tokens are as close to each other as that.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: TextTokenizer,
        *,
        cache_tokens: int | None = None,
        max_sequences: int = 64,
        prefill_chunk: int = 256,
    ) -> None:
        for name, value, least in (
            ("max-sequences", max_sequences, 1),
            ("prefill-chunk", prefill_chunk, 1),
            ("cache-tokens", cache_tokens, PagedKVCache.page_size),
        ):
            if value is not None and value < least:
                raise UsageError(f"{name} {value} given, at least {least} wanted")
        self.model, self.tokenizer = model, tokenizer
        self.max_sequences, self.prefill_chunk = max_sequences, prefill_chunk
        if cache_tokens is None:
            cache_tokens = default_cache_tokens(model.config, model.dtype, max_sequences)
        self._cache = PagedKVCache(model.config, cache_tokens, model.dtype, model.stream)
        self.prompt_tokens = self.generated_tokens = 0
        self._lock = threading.Lock()  # of the queue
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[_Running] = []

    def submit(
        self,
        prompt_tokens: Sequence[int] | np.ndarray,
        settings: GenerationSettings,
        on_piece: Callable[[Piece], None] | None = None,
    ) -> Request:
        """Take a request; the next steps work on it as soon as there is room.

        Parameters
        ----------
        prompt_tokens : sequence of int, or ndarray of integers
        settings : GenerationSettings
        on_piece : callable, optional
            Gets the text as it is made, in the thread that takes the steps. If it raises an
            exception, the request ends with an error.

        Returns
        -------
        Request
            It changes as the text is made.

        Raises
        ------
        UsageError
            If the prompt or a setting is out of range, or the request can never fit.
        """
        settings.validate()
        prompt = check_prompt(prompt_tokens, self.model.config.vocab_size)
        self._require_room(len(prompt), settings.max_new_tokens)
        request = Request(prompt, settings)
        with self._lock:
            self._waiting.append(RunningSequence(request, self.tokenizer, on_piece))
        return request

    def most_new_tokens(self, prompt_length: int) -> int:
        """Return for how many new tokens there can be room after a prompt; less than 0 if none."""
        # The last token is not fed back, so it needs no place.
        return min(self.model.config.context_length, self.cache_tokens) - prompt_length + 1

    def cancel(self, request: Request) -> None:
        """Let a request end at the next step with the reason ``cancelled``, if it still runs."""
        request.is_cancelled = True

    def step(self) -> bool:
        """Read a part of the prompts, and draw a token for every text that goes on.

        Returns
        -------
        bool
            Whether anything is left to do.

        Raises
        ------
        Exception
            If the model cannot compute a pass. All running requests end with that error first.
        """
        self._finish_without_work()
        self._admit()
        try:
            # BLAS's own threads are slow for the small products of a step: they wait for each other
            # and, where other programs run, for a core (64 x 128 x 128: 7 ms instead of 0.02).
            with single_threaded_blas():
                self._prefill()
                self._decode()
        except BaseException as error:
            for entry in self._running:
                if not entry.request.is_finished:
                    entry.sequence.finish("error", error=described(error))
            raise
        finally:
            self._release_finished()
        return bool(self._running or self._waiting)

    def run(self) -> None:
        """Take steps until nothing is left to do."""
        while self.step():
            pass

    def generate(
        self, prompts: Sequence[Sequence[int] | np.ndarray], settings: GenerationSettings
    ) -> list[Request]:
        """Continue prompts side by side, each to its end.

        Raises
        ------
        UsageError
            As :meth:`submit`; nothing is generated then.
        """
        requests: list[Request] = []
        try:
            for prompt in prompts:
                requests.append(self.submit(prompt, settings))
        except UsageError:
            for request in requests:
                self.cancel(request)
            raise
        self.run()
        return requests

    @property
    def running(self) -> int:
        """Requests that run now."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for others to end."""
        return len(self._waiting)

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache has room for."""
        return self._cache.tokens

    @property
    def cache_tokens_used(self) -> int:
        """Tokens of the cache that running requests have reserved."""
        return self._cache.tokens - self._cache.free_pages * self._cache.page_size

    def _require_room(self, prompt_length: int, new_tokens: int) -> None:
        """Refuse a request that can never fit, with all the numbers."""
        if max(new_tokens, 1) <= self.most_new_tokens(prompt_length):
            return
        context = self.model.config.context_length
        fits_context = prompt_length + max(new_tokens, 1) - 1 <= context
        raise UsageError(
            f"a prompt of {prompt_length} tokens and {new_tokens} new ones given, but the model's "
            f"context has room for {context} tokens and the cache for {self.cache_tokens}: shorten "
            f"the prompt{', make the cache larger' if fits_context else ''} or ask for fewer new "
            f"tokens"
        )

    def _finish_without_work(self) -> None:
        """End requests that are cancelled, or want no token."""
        ended = [own.sequence for own in self._running if _needs_no_work(own.request)]
        with self._lock:
            # Each is looked at once: it may be cancelled at any moment.
            waiting = [(own, _needs_no_work(own.request)) for own in self._waiting]
            ended += [own for own, is_over in waiting if is_over]
            self._waiting = deque(own for own, is_over in waiting if not is_over)
        for sequence in ended:
            sequence.finish("cancelled" if sequence.request.is_cancelled else "length")
        self._release_finished()

    def _admit(self) -> None:
        """Let requests begin, in the order in which they came, while there is room."""
        with self._lock:
            while self._waiting and len(self._running) < self.max_sequences:
                request = self._waiting[0].request
                if _needs_no_work(request):
                    return  # it came, or was cancelled, just now: the next step ends it
                # The last token is not fed back, so it needs no place.
                tokens = len(request.prompt_tokens) + request.settings.max_new_tokens - 1
                table = self._cache.take(tokens)
                if table is None:
                    return
                self._running.append(_Running(self._waiting.popleft(), table))

    def _prefill(self) -> None:
        """Read as much of the prompts as a step may, the oldest request's first."""
        entries, chunks, room = [], [], self.prefill_chunk
        for entry in self._running:
            if count := min(entry.unread, room):
                tokens = entry.request.prompt_tokens[entry.stored : entry.stored + count]
                entries.append(entry)
                chunks.append(Chunk(tokens, entry.stored, entry.table))
                room -= count
        if not chunks:
            return
        read = [n for n, e in enumerate(entries) if e.unread == len(chunks[n].tokens)]
        logits = prefill_logits(self.model, self._cache, chunks, read)
        for entry, chunk in zip(entries, chunks, strict=True):
            entry.stored += len(chunk.tokens)
            self.prompt_tokens += len(chunk.tokens)
        self._advance([entries[n] for n in read], logits)

    def _decode(self) -> None:
        """Take each text's newest token, and draw the next."""
        entries = [e for e in self._running if not (e.unread or e.request.is_finished)]
        if not entries:
            return
        logits = decode_logits(
            self.model,
            self._cache,
            np.array([entry.request.tokens[-1] for entry in entries]),
            np.array([entry.stored for entry in entries]),
            stacked([entry.table for entry in entries]),
        )
        for entry in entries:
            entry.stored += 1
        self._advance(entries, logits)

    def _advance(self, entries: list[_Running], logits: Array) -> None:
        if entries:
            advance([entry.sequence for entry in entries], logits)
            self.generated_tokens += len(entries)

    def _release_finished(self) -> None:
        for entry in self._running:
            if entry.request.is_finished:
                self._cache.give_back(entry.table)
        self._running = [entry for entry in self._running if not entry.request.is_finished]


def _needs_no_work(request: Request) -> bool:
    return request.is_cancelled or request.settings.max_new_tokens == 0
