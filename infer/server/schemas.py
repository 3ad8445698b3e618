"""What a client may ask for: the bodies of both endpoints, checked field by field.

Fields are OpenAI's, with ``top_k``, ``min_p``, ``repetition_penalty`` and ``ignore_eos`` beside
them. Those that cannot change the answer are ignored; those that would, but are not supported, are
refused with their name, and so are unknown ones.
"""

from dataclasses import dataclass
from typing import Any

from twell_numba.infer.request import (
    LARGEST_PENALTY,
    LARGEST_TOP_K,
    LEAST_PENALTY,
    GenerationSettings,
)
from twell_numba.infer.server.errors import invalid
from twell_numba.infer.server.fields import Fields, shown

Prompt = str | tuple[int, ...]
Message = dict[str, str]

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
MOST_CHOICES = 128
MOST_STOP_TEXTS = 64
LONGEST_STOP_TEXT = 1000  # characters
MOST_LOGPROBS = 20
LARGEST_TOKEN_COUNT = 2**31 - 1
LARGEST_SEED = 2**63 - 1

_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prediction",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
)
# What would change the answer, and the values that leave it as it is.
_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "suffix": ("",),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "moderation": (),
    "web_search_options": (),
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class Call:
    """What both endpoints have in common.

    Attributes
    ----------
    model : str, optional
        The name of the model asked for.
    n : int
        How many texts for each prompt.
    settings : GenerationSettings
        But for ``max_new_tokens`` and ``seed``, which stand below.
    max_tokens : int, optional
        None if the client leaves it open.
    seed : int, optional
        None if any will do.
    stream : bool
        Whether to send the text as it is made.
    include_usage : bool
        Whether a stream ends with the numbers of tokens.
    """

    model: str | None
    n: int
    settings: GenerationSettings
    max_tokens: int | None
    seed: int | None
    stream: bool
    include_usage: bool

    @property
    def text_count(self) -> int:
        """How many texts are wanted in all."""
        return self.n


@dataclass(frozen=True)
class CompletionCall(Call):
    """The body of ``/v1/completions``.

    Attributes
    ----------
    prompts : tuple of str or of tuple of int
        Texts, or token ids, at least one.
    echo : bool
        Whether each text starts with its prompt.
    """

    prompts: tuple[Prompt, ...]
    echo: bool

    @property
    def text_count(self) -> int:
        """How many texts are wanted in all."""
        return self.n * len(self.prompts)


@dataclass(frozen=True)
class ChatCall(Call):
    """The body of ``/v1/chat/completions``.

    Attributes
    ----------
    messages : tuple of dict
        Each with ``role`` (system, user or assistant) and ``content``; at least one.
    """

    messages: tuple[Message, ...]


def parse_completion(content: dict[str, Any]) -> CompletionCall:
    """Check the body of ``/v1/completions``.

    Raises
    ------
    ApiError
        Of status 400, naming the first field that does not fit.
    """
    fields = Fields(content)
    prompts = _take_prompts(fields)
    echo = fields.flag("echo")
    logprobs = fields.whole("logprobs", 0, MOST_LOGPROBS)
    if echo and logprobs is not None:
        raise invalid("echo and logprobs given, which are not supported together", "echo")
    best_of = fields.whole("best_of", 1, MOST_CHOICES)
    shared = _take_shared(fields, logprobs, ("max_tokens",))
    if best_of is not None and best_of != shared["n"]:
        raise invalid(f"best_of {best_of} with n {shared['n']} given, n wanted", "best_of")
    if shared["max_tokens"] is None:
        shared["max_tokens"] = DEFAULT_COMPLETION_TOKENS
    fields.finish()
    return CompletionCall(prompts=prompts, echo=echo, **shared)


def parse_chat(content: dict[str, Any]) -> ChatCall:
    """Check the body of ``/v1/chat/completions``.

    Raises
    ------
    ApiError
        Of status 400, naming the first field that does not fit.
    """
    fields = Fields(content)
    messages = _take_messages(fields)
    wants_logprobs = fields.flag("logprobs")
    top_logprobs = fields.whole("top_logprobs", 0, MOST_LOGPROBS)
    if top_logprobs is not None and not wants_logprobs:
        raise invalid("top_logprobs given, logprobs true wanted beside it", "top_logprobs")
    logprobs = (top_logprobs or 0) if wants_logprobs else None
    shared = _take_shared(fields, logprobs, ("max_completion_tokens", "max_tokens"))
    fields.finish()
    return ChatCall(messages=messages, **shared)


def _take_shared(
    fields: Fields, logprobs: int | None, token_limits: tuple[str, ...]
) -> dict[str, Any]:
    """Take the fields of :class:`Call`."""
    model = fields.text("model")
    stream = fields.flag("stream")
    include_usage = _take_stream_options(fields, stream)
    settings = GenerationSettings(
        temperature=fields.number("temperature", 1.0, 0, 2),
        top_k=fields.whole("top_k", 0, LARGEST_TOP_K) or 0,
        top_p=fields.number("top_p", 1.0, 0, 1, above_low=True),
        min_p=fields.number("min_p", 0.0, 0, 1),
        repetition_penalty=fields.number("repetition_penalty", 1.0, LEAST_PENALTY, LARGEST_PENALTY),
        stop=_take_stop(fields),
        ignore_eos=fields.flag("ignore_eos"),
        logprobs=logprobs,
    )
    limits = [fields.whole(name, 1, LARGEST_TOKEN_COUNT) for name in token_limits]
    given = {limit for limit in limits if limit is not None}
    if len(given) > 1:
        raise invalid(f"{' and '.join(token_limits)} differ, one of them wanted", token_limits[0])
    seed = fields.whole("seed", -LARGEST_SEED - 1, LARGEST_SEED)
    fields.ignore(_IGNORED)
    fields.refuse(_NOT_SUPPORTED)
    return {
        "model": model,
        "n": fields.whole("n", 1, MOST_CHOICES) or 1,
        "settings": settings,
        "max_tokens": given.pop() if given else None,
        "seed": seed,
        "stream": stream,
        "include_usage": include_usage,
    }


def _take_stream_options(fields: Fields, stream: bool) -> bool:
    options = fields.take("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise fields.unfit("stream_options", options, "an object wanted")
    if not stream:
        raise invalid("stream_options given, stream true wanted beside it", "stream_options")
    inner = Fields(options, "stream_options.")
    include_usage = inner.flag("include_usage")
    inner.ignore(("include_obfuscation",))
    inner.finish()
    return include_usage


def _take_stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.take("stop")
    if stop is None:
        return ()
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(
        isinstance(text, str) and 1 <= len(text) <= LONGEST_STOP_TEXT for text in texts
    ):
        wanted = f"a string of 1 to {LONGEST_STOP_TEXT} characters, or a list of such, wanted"
        raise fields.unfit("stop", stop, wanted)
    if len(texts) > MOST_STOP_TEXTS:
        raise invalid(f"{len(texts)} stop texts given, at most {MOST_STOP_TEXTS} wanted", "stop")
    return tuple(texts)


def _take_prompts(fields: Fields) -> tuple[Prompt, ...]:
    prompt = fields.take("prompt")
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return tuple(prompt)
        if _is_tokens(prompt):
            return (tuple(prompt),)
        if all(isinstance(item, list) and item and _is_tokens(item) for item in prompt):
            return tuple(tuple(item) for item in prompt)
    wanted = "a string, a list of strings, a list of token ids, or a list of such lists, wanted"
    raise fields.unfit("prompt", prompt, wanted)


def _is_tokens(items: list[Any]) -> bool:
    # A token id that is larger than any vocabulary would not fit the engine's arrays either.
    return all(type(item) is int and 0 <= item <= LARGEST_TOKEN_COUNT for item in items)


def _take_messages(fields: Fields) -> tuple[Message, ...]:
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.unfit("messages", messages, "a list of at least one message wanted")
    return tuple(_parse_message(message, index) for index, message in enumerate(messages))


def _parse_message(message: Any, index: int) -> Message:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise invalid(f"{where} {shown(message)} given, an object wanted", where)
    # The answer of a client library, sent back, has fields that hold nothing.
    fields = Fields({name: value for name, value in message.items() if value != []}, f"{where}.")
    role = fields.take("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise fields.unfit("role", role, f"one of {', '.join(_ROLES)} wanted")
    content = _parse_content(message.get("content"), f"{where}.content")
    fields.ignore(("content",))
    fields.finish()
    return {"role": _ROLES[role], "content": content}


def _parse_content(content: Any, where: str) -> str:
    """Return a message's text, which stands in one string or in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where} {shown(content)} given, a string or a list of parts wanted", where)
    texts = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text), **rest} if not rest:
                texts.append(text)
            case _:
                wanted = 'parts {"type": "text", "text": string} wanted'
                raise invalid(f"{where} has the part {shown(part)}, {wanted}", where)
    return "".join(texts)
