"""Conversations as one text or its tokens, by the template that a model came with."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from twell_numba.errors import TwellError, UsageError
from twell_numba.models.tokenizer import TextTokenizer

EXTRA = "pip install 'twell_numba[chat]'"

Messages = Sequence[Mapping[str, Any]]


def render_chat(
    tokenizer: TextTokenizer,
    messages: Messages,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """Return a conversation as the one text that a model was trained to go on from.

    Texts of special tokens that stand in a message stand in the result too; for tokens use
    :func:`encode_chat`, which tells them from those that the template writes.

    Parameters
    ----------
    tokenizer : TextTokenizer
        With a chat template.
    messages : list of dict
        Each with ``role`` (usually system, user or assistant) and ``content``, plain JSON values.
        Values that are None are left out.
    add_generation_prompt : bool
        End with what begins an answer.
    **variables
        What else the template knows, for example ``tools``.

    Raises
    ------
    UsageError
        If there are no messages, or they are no objects.
    TwellError
        If there is no template, jinja2 is not installed, or the template refuses the messages or
        takes too long: one line.
    """
    template = tokenizer.chat_template
    if template is None:
        raise TwellError(
            "this model has no chat template: put its chat_template.jinja beside its "
            "tokenizer.json, or give it plain text to go on from"
        )
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        raise UsageError("at least one message wanted, each an object with a role and a content")
    try:
        from twell_numba.models.template_sandbox import render
    except ImportError as error:
        raise TwellError(
            f"chat templates need the package jinja2, which is not installed ({error}); "
            f"install it with: {EXTRA}"
        ) from error
    given = {
        "tools": None,
        "documents": None,
        **tokenizer.named_tokens,
        **variables,
        "messages": [_without_none(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return render(template, given)
    except Exception as error:  # a template can run into anything
        reason = " ".join(str(error).split())[:300]
        raise TwellError(
            f"the model's chat template does not take these messages: {reason}; change the "
            f"messages, or the template"
        ) from error


def encode_chat(
    tokenizer: TextTokenizer,
    messages: Messages,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> np.ndarray:
    """Return the tokens (int64) of a conversation.

    Only what the template itself writes becomes special tokens. ``<|im_end|>`` in a message is
    text, so nobody can end their message and go on in another's name.

    Parameters and errors are those of :func:`render_chat`.
    """
    special = list(tokenizer.special_tokens)
    mark = _unused_character("".join(_texts([*messages, variables])))
    marked = [_with_marks(message, special, mark) for message in messages]
    variables = _with_marks(variables, special, mark)
    text = render_chat(tokenizer, marked, add_generation_prompt, **variables)
    if mark not in text:
        return tokenizer.encode(text, allow_special=True)
    pieces = [
        tokenizer.encode(piece.replace(mark, ""), allow_special=is_special)
        for piece, is_special in _split(text, special, mark)
    ]
    return np.concatenate(pieces)


def _without_none(message: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out keys without a value, which templates would write as the word None."""
    return {key: value for key, value in message.items() if value is not None}


def _with_marks(value: Any, special: Sequence[str], mark: str) -> Any:
    """Put a mark behind each text of a special token that occurs in a value's texts."""
    if isinstance(value, str):
        for text in special:
            value = value.replace(text, text + mark)
        return value
    if isinstance(value, Mapping):
        return {
            _with_marks(key, special, mark): _with_marks(item, special, mark)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_with_marks(item, special, mark) for item in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value, whatever holds them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _unused_character(text: str) -> str:
    """Return a character, of those for private use, that does not occur in a text."""
    characters = map(chr, range(0xF0000, 0xFFFFE))
    return next(character for character in characters if character not in text)


def _split(text: str, special: Sequence[str], mark: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a text, and whether each is a special token's text without a mark."""
    longest_first = sorted(special, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first))
    for number, piece in enumerate(re.split(f"((?:{pattern})(?!{mark}))", text)):
        if piece:
            yield piece, number % 2 == 1
