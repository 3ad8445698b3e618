"""Conversations with a model: messages as a prompt, and a history that fits the context."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from twell_numba.device.blas import single_threaded_blas
from twell_numba.errors import TwellError, UsageError
from twell_numba.infer.engine import Engine
from twell_numba.infer.request import GenerationSettings, Piece
from twell_numba.models.chat_template import encode_chat
from twell_numba.models.tokenizer import TextTokenizer

Message = dict[str, str]

NO_TEMPLATE = (
    "This model has no chat template; it is given plain text, in lines that begin with User: and "
    "Assistant:"
)
# The part of the context that a history leaves free for an answer, if that may be so long.
_ANSWER_PART = 4

_SPEAKERS = {"user": "User", "assistant": "Assistant"}
_PLAIN_STOP = ("\nUser:",)


@dataclass(frozen=True)
class ChatPrompt:
    """What a model goes on from to answer.

    Attributes
    ----------
    tokens : ndarray of int64
    stop : tuple of str
        Texts that end the answer, beside the model's own tokens that do.
    """

    tokens: np.ndarray
    stop: tuple[str, ...]


def chat_prompt(tokenizer: TextTokenizer, messages: Sequence[Message]) -> ChatPrompt:
    """Return messages as the model's chat template writes them, or as plain text without one.

    Parameters
    ----------
    tokenizer : TextTokenizer
    messages : sequence of dict
        Each with ``role`` (system, user or assistant) and ``content``.

    Raises
    ------
    TwellError
        If the template does not take these messages, or jinja2 is not installed.
    """
    if tokenizer.chat_template is not None:
        return ChatPrompt(encode_chat(tokenizer, messages), ())
    text = plain_chat(messages)
    return ChatPrompt(tokenizer.encode(text, add_special_tokens=True), _PLAIN_STOP)


def plain_chat(messages: Sequence[Message]) -> str:
    """Return messages as plain text, for models that were never taught to chat.

    System messages come first, as a paragraph each. Then every message is a line that begins with
    ``User:`` or ``Assistant:``, and a last ``Assistant:`` asks for the answer.
    """
    system = [message["content"] for message in messages if message["role"] == "system"]
    turns = [message for message in messages if message["role"] != "system"]
    lines = [f"{_SPEAKERS[turn['role']]}: {turn['content'].strip()}\n" for turn in turns]
    return "".join(f"{text}\n\n" for text in system) + "".join(lines) + "Assistant:"


class Conversation:
    """Questions, and a model's answers to them.

    Parameters
    ----------
    engine : Engine
        Used by nothing else meanwhile.
    settings : GenerationSettings
        Of every answer; the seed grows by one from answer to answer.
    system : str, optional
        What the model is told first, and never forgets.
    on_notice : callable
        Gets a line when the oldest messages are dropped, or an answer fills the context.

    Attributes
    ----------
    messages : list of dict
        The history, but for the system message.
    """

    def __init__(
        self,
        engine: Engine,
        settings: GenerationSettings,
        system: str | None = None,
        on_notice: Callable[[str], None] = lambda line: None,
    ) -> None:
        settings.validate()
        self.messages: list[Message] = []
        self._engine = engine
        self._settings = settings
        self._system: list[Message] = []
        if system is not None:
            self._system.append({"role": "system", "content": system})
        self._on_notice = on_notice
        self._answers = 0
        self._capacity = min(engine.model.config.context_length, engine.cache_tokens)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages.clear()

    def ask(
        self,
        text: str,
        on_text: Callable[[str], None] = lambda text: None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> str:
        """Return the answer to a message; both become part of the history.

        Parameters
        ----------
        text : str
            The user's message.
        on_text : callable
            Gets the answer piece by piece, as it is made.
        is_interrupted : callable
            Asked after every token; True ends the answer where it is.

        Raises
        ------
        UsageError
            If the message alone is longer than the context.
        TwellError
            If the model cannot go on. The history is then as it was.
        """
        question = {"role": "user", "content": text}
        kept, prompt = self._fit(question)
        settings = self._settings_for(prompt)
        answer = self._generate(prompt, settings, on_text, is_interrupted)
        self.messages = [*kept, question, {"role": "assistant", "content": answer.strip()}]
        self._answers += 1
        return answer

    def _fit(self, question: Message) -> tuple[list[Message], ChatPrompt]:
        """Drop the oldest turns until the rest leaves room for an answer."""
        wanted = self._settings.max_new_tokens
        most = self._capacity - min(wanted, max(1, self._capacity // _ANSWER_PART))
        kept = list(self.messages)
        while True:
            prompt = chat_prompt(self._engine.tokenizer, [*self._system, *kept, question])
            if len(prompt.tokens) <= most:
                break
            if not kept:
                raise UsageError(
                    f"a message of {len(prompt.tokens)} tokens given (with the system message), at "
                    f"most {most} of the context's {self._capacity} wanted: shorten it"
                )
            kept = kept[2:]
        if dropped := len(self.messages) - len(kept):
            self._on_notice(
                f"The context of {self._capacity} tokens is full: the oldest {dropped} messages "
                f"are forgotten."
            )
        return kept, prompt

    def _settings_for(self, prompt: ChatPrompt) -> GenerationSettings:
        room = self._engine.most_new_tokens(len(prompt.tokens))
        return replace(
            self._settings,
            max_new_tokens=min(self._settings.max_new_tokens, room),
            seed=self._settings.seed + self._answers,
            stop=self._settings.stop + prompt.stop,
        )

    def _generate(
        self,
        prompt: ChatPrompt,
        settings: GenerationSettings,
        on_text: Callable[[str], None],
        is_interrupted: Callable[[], bool],
    ) -> str:
        def show(piece: Piece) -> None:
            pieces.append(piece.text)

        pieces: list[str] = []
        request = self._engine.submit(prompt.tokens, settings, show)
        try:
            # A step's many small products are done sooner than BLAS's own threads have met.
            with single_threaded_blas():
                while self._engine.step():
                    _give(pieces, on_text)
                    if is_interrupted():
                        self._engine.cancel(request)
        finally:
            self._engine.cancel(request)
        _give(pieces, on_text)
        if request.finish_reason == "error":
            raise TwellError(request.error or "the engine has failed")
        is_shortened = settings.max_new_tokens < self._settings.max_new_tokens
        if request.finish_reason == "length" and is_shortened:
            self._on_notice(f"The context of {self._capacity} tokens is full.")
        return request.text


def _give(pieces: list[str], on_text: Callable[[str], None]) -> None:
    """Hand on the pieces that have come, outside of the engine, which would take their errors."""
    while pieces:
        if text := pieces.pop(0):
            on_text(text)
