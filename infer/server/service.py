"""A model to be served: calls become requests of the engine."""

import secrets
import time
from dataclasses import replace

import numpy as np

from twell_numba.errors import TwellError
from twell_numba.infer.chat import chat_prompt
from twell_numba.infer.engine import Engine
from twell_numba.infer.request import GenerationSettings
from twell_numba.infer.server.errors import ApiError, invalid
from twell_numba.infer.server.metrics import ServerMetrics
from twell_numba.infer.server.responses import ChatAnswer, CompletionAnswer, token_bytes
from twell_numba.infer.server.schemas import LARGEST_SEED, Call, ChatCall, CompletionCall, Prompt
from twell_numba.models.tokenizer import valid_unicode

EngineCalls = list[tuple[np.ndarray, GenerationSettings]]


class Service:
    """A model under a name.

    Parameters
    ----------
    engine : Engine
    model_name : str
        What clients call it.
    chat_tokens : int
        The longest answer in a chat where the client sets no limit.
    seed : int, optional
        Of requests that give none; None draws one for each.

    Attributes
    ----------
    created : int
        When, in seconds since 1970.
    metrics : ServerMetrics
    """

    def __init__(
        self, engine: Engine, model_name: str, *, chat_tokens: int = 1024, seed: int | None = None
    ) -> None:
        self.engine = engine
        self.model_name = model_name
        self.created = int(time.time())
        self.metrics = ServerMetrics()
        self._chat_tokens = chat_tokens
        self._seed = seed
        _measure_engine(self.metrics, engine)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 unless this is the model's name, or none."""
        if name is not None and name != self.model_name:
            shown = name if len(name) <= 100 else f"{name[:97]}..."
            raise ApiError(
                404,
                f"model {shown!r} given, {self.model_name!r} is the one that is served",
                field="model",
                code="model_not_found",
            )

    def prepare_completion(self, call: CompletionCall) -> tuple[EngineCalls, CompletionAnswer]:
        """Return what the engine is to do, and how to write its answer.

        Raises
        ------
        ApiError
            If a prompt does not fit the model.
        """
        prompts = [self._prompt_tokens(prompt) for prompt in call.prompts]
        texts = [self._prompt_text(prompt) if call.echo else "" for prompt in call.prompts]
        requests = [request for tokens in prompts for request in self._choices(call, tokens)]
        prefixes = [text for text in texts for _ in range(call.n)]
        wants_logprobs = call.settings.logprobs is not None
        tokenizer = self.engine.tokenizer
        return requests, CompletionAnswer(self.model_name, tokenizer, wants_logprobs, prefixes)

    def prepare_chat(self, call: ChatCall) -> tuple[EngineCalls, ChatAnswer]:
        """Return what the engine is to do, and how to write its answer.

        Raises
        ------
        ApiError
            If the model's chat template does not take the messages.
        """
        try:
            prompt = chat_prompt(self.engine.tokenizer, call.messages)
        except TwellError as error:
            raise invalid(str(error), "messages") from None
        requests = self._choices(call, prompt.tokens, prompt.stop)
        wants_logprobs = call.settings.logprobs is not None
        tokenizer = self.engine.tokenizer
        return requests, ChatAnswer(self.model_name, tokenizer, wants_logprobs, call.n)

    def _prompt_tokens(self, prompt: Prompt) -> np.ndarray:
        tokenizer = self.engine.tokenizer
        if not prompt:
            raise invalid("an empty prompt given, at least one character wanted", "prompt")
        if isinstance(prompt, str):
            return tokenizer.encode(prompt, add_special_tokens=True)
        if max(prompt) >= tokenizer.vocab_size:
            raise invalid(
                f"token {max(prompt)} given, one below {tokenizer.vocab_size} wanted", "prompt"
            )
        return np.array(prompt, np.int64)

    def _prompt_text(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return valid_unicode(prompt)
        data = b"".join(token_bytes(self.engine.tokenizer, token) for token in prompt)
        return data.decode(errors="replace")

    def _choices(self, call: Call, tokens: np.ndarray, stop: tuple[str, ...] = ()) -> EngineCalls:
        """Return the requests for one prompt, whose seeds follow each other."""
        seed = self._first_seed(call)
        settings = replace(
            call.settings,
            max_new_tokens=call.max_tokens or self._room(tokens),
            stop=call.settings.stop + stop,
        )
        # The engine takes no negative seeds.
        seeds = [(seed + index) % (LARGEST_SEED + 1) for index in range(call.n)]
        return [(tokens, replace(settings, seed=choice_seed)) for choice_seed in seeds]

    def _first_seed(self, call: Call) -> int:
        if call.seed is not None:
            return call.seed
        return secrets.randbits(63) if self._seed is None else self._seed

    def _room(self, tokens: np.ndarray) -> int:
        """Return how long an answer may be; 1 if there is no room, which the engine then refuses.

        Room for all of it is kept free, so without a limit few clients would fill the cache.
        """
        return max(1, min(self._chat_tokens, self.engine.most_new_tokens(len(tokens))))


def _measure_engine(metrics: ServerMetrics, engine: Engine) -> None:
    # What the engine did before, to warm up, was for no client.
    read_before, drawn_before = engine.prompt_tokens, engine.generated_tokens
    for name, kind, help, read in (
        ("requests_running", "gauge", "Texts being generated.", lambda: engine.running),
        ("requests_waiting", "gauge", "Texts waiting for others.", lambda: engine.waiting),
        ("prompt_tokens_total", "counter", "Tokens of prompts read.",
         lambda: engine.prompt_tokens - read_before),
        ("generated_tokens_total", "counter", "Tokens generated.",
         lambda: engine.generated_tokens - drawn_before),
        ("cache_tokens_used", "gauge", "Tokens that room in the cache is taken for.",
         lambda: engine.cache_tokens_used),
        ("cache_tokens", "gauge", "Tokens that the cache has room for.",
         lambda: engine.cache_tokens),
    ):  # fmt: skip
        metrics.measure(f"twell_{name}", help, kind, read)


def warm_up(engine: Engine) -> None:
    """Compile what a first request would otherwise wait for."""
    settings = GenerationSettings(max_new_tokens=2, ignore_eos=True)
    length = min(8, engine.model.config.context_length - 1, engine.cache_tokens - 2)
    if length > 0:
        engine.generate([[0] * length, [0]], settings)
