"""Many texts continued at once, by one model."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from twell_numba.device.arrays import to_host
from twell_numba.errors import TwellError, UsageError
from twell_numba.infer.request import GenerationSettings, Piece, Request, check_prompt
from twell_numba.infer.sampling import sample
from twell_numba.infer.sequence import RunningSequence, described
from twell_numba.models.cache import KVCache
from twell_numba.models.tokenizer import TextTokenizer
from twell_numba.models.transformer import Transformer


@dataclass(eq=False)
class _Entry:
    sequence: RunningSequence
    cache: KVCache | None = None
    is_cancelled: bool = False
    reserved: int = field(default=0)


class Engine:
    """Continues many prompts at once.

    Parameters
    ----------
    model, tokenizer
        As ``load_model`` returns them. The model is used by nothing else meanwhile.
    cache_tokens : int, optional
        The most tokens whose keys and values are kept at once.
    max_sequences : int
        The most requests that run at once; others wait.
    prefill_chunk : int
        The most tokens of prompts that are read in one step.

    Attributes
    ----------
    prompt_tokens, generated_tokens : int
        Read and drawn since the engine was made.

    Notes
    -----
    ``submit`` and ``cancel`` may be called from any thread, ``step`` from one.
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
        self.model, self.tokenizer = model, tokenizer
        self.cache_tokens = cache_tokens or max_sequences * model.config.context_length
        self.max_sequences, self.prefill_chunk = max_sequences, prefill_chunk
        self.prompt_tokens = self.generated_tokens = 0
        self._lock = threading.Lock()
        self._waiting: deque[_Entry] = deque()
        self._running: list[_Entry] = []

    def submit(
        self,
        prompt_tokens: Sequence[int] | np.ndarray,
        settings: GenerationSettings,
        on_piece: Callable[[Piece], None] | None = None,
    ) -> Request:
        """Take a request, which then waits for a step.

        Raises
        ------
        UsageError
            If the prompt or a setting is out of range, or the request can never fit.
        """
        settings.validate()
        prompt = check_prompt(prompt_tokens, self.model.config.vocab_size)
        context = self.model.config.context_length
        wanted = len(prompt) + settings.max_new_tokens
        if len(prompt) > context or wanted > context + 1:
            raise UsageError(
                f"a prompt of {len(prompt)} tokens and {settings.max_new_tokens} new ones given, "
                f"at most the model's context of {context} wanted: shorten one of them"
            )
        if wanted > self.cache_tokens:
            raise UsageError(
                f"a prompt of {len(prompt)} tokens and {settings.max_new_tokens} new ones given, "
                f"at most the cache's {self.cache_tokens} wanted: shorten one or enlarge the cache"
            )
        request = Request(prompt, settings)
        entry = _Entry(RunningSequence(request, self.tokenizer, on_piece), reserved=wanted)
        with self._lock:
            self._waiting.append(entry)
        return request

    def cancel(self, request: Request) -> None:
        """End a request at the next step, if it has not ended by then."""
        with self._lock:
            for entry in (*self._waiting, *self._running):
                if entry.sequence.request is request:
                    entry.is_cancelled = True

    def step(self) -> bool:
        """Draw a token for every request that runs; return whether anything is left to do."""
        self._admit()
        for entry in self._running:
            if entry.is_cancelled:
                entry.sequence.finish("cancelled")
            else:
                self._advance(entry)
        with self._lock:
            self._running = [e for e in self._running if not e.sequence.request.is_finished]
            return bool(self._running or self._waiting)

    def run(self) -> None:
        """Take steps until nothing is left to do."""
        while self.step():
            pass

    def generate(
        self, prompts: Sequence[Sequence[int] | np.ndarray], settings: GenerationSettings
    ) -> list[Request]:
        """Continue prompts, each to its end."""
        requests = [self.submit(prompt, settings) for prompt in prompts]
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
    def cache_tokens_used(self) -> int:
        """Tokens of the cache that running requests have reserved."""
        return sum(entry.reserved for entry in self._running)

    def _admit(self) -> None:
        with self._lock:
            while self._waiting and len(self._running) < self.max_sequences:
                entry = self._waiting[0]
                if self.cache_tokens_used + entry.reserved > self.cache_tokens:
                    break
                self._running.append(self._waiting.popleft())

    def _advance(self, entry: _Entry) -> None:
        request, model = entry.sequence.request, self.model
        if request.settings.max_new_tokens == 0:
            entry.sequence.finish("length")
            return
        tokens = np.array(request.tokens[-1:], np.int64)
        if entry.cache is None:
            tokens = request.prompt_tokens
            self.prompt_tokens += len(tokens)
            capacity = len(tokens) + request.settings.max_new_tokens
            entry.cache = KVCache(model.config, 1, capacity, model.dtype, model.stream)
        logits = to_host(model.step(tokens[None], entry.cache))[0]
        settings = request.settings
        try:
            rng = np.random.default_rng([settings.seed, len(request.tokens)])
            logits = logits[: self.tokenizer.vocab_size]
            token = sample(logits, rng, settings.temperature, settings.top_k, settings.top_p)
            self.generated_tokens += 1
            entry.sequence.accept(token)
        except (TwellError, ValueError) as error:
            entry.sequence.finish("error", error=described(error))
