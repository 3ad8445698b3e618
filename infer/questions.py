"""Files of multiple-choice questions: JSON lines, one question each.

======================  =======================================================================
``context``             what comes before the choice; or ``question``, which means the same
``choices``             a list of at least two texts
``answer``              the right one: its index, from 0, or its letter, from A
``id``                  a text or a whole number; may be left out
======================  =======================================================================

Other fields and blank lines are passed over.
"""

import json
import os
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twell_numba.errors import TwellError, shown
from twell_numba.models.reading import unreadable

_CONTEXT_NAMES = ("context", "question")
_MOST_CHOICES = len(string.ascii_uppercase)


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes
    ----------
    context : str
    choices : tuple of str
        At least two, none of them blank.
    answer : int
        Index of the right choice.
    name : str
        How messages call it: its file, line and, if it has one, id.
    """

    context: str
    choices: tuple[str, ...]
    answer: int
    name: str

    def is_right(self, choice: int) -> bool:
        """Say whether a choice reads as the right one does: a text may stand there twice."""
        return self.choices[choice] == self.choices[self.answer]


class _Damaged(Exception):
    """What is wrong with a line, and what is wanted."""


def read_questions(path: str | os.PathLike[str], limit: int | None = None) -> list[Question]:
    """Read a file of questions.

    Parameters
    ----------
    path : path
    limit : int, optional
        Read only so many, from the first on; what follows is not looked at.

    Raises
    ------
    TwellError
        If the file cannot be read, holds no question, or a line is damaged: one line naming the
        file, the number of the line and what is wanted there.
    """
    file = Path(path)
    questions: list[Question] = []
    for number, line in _lines(file):
        if limit is not None and len(questions) == limit:
            break
        try:
            questions.append(_parsed(line, f"{file} line {number}"))
        except _Damaged as error:
            raise TwellError(f"{file} line {number}: {error}") from None
    if not questions:
        raise TwellError(
            f"{file} holds no question; lines of JSON with context, choices and answer wanted"
        )
    return questions


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, and their numbers."""
    try:
        with file.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise unreadable(file, error) from error


def _parsed(line: bytes, name: str) -> Question:
    try:
        # Some editors begin a file with a byte order mark.
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise _Damaged("it is not UTF-8 text, one JSON object a line wanted") from None
    except (ValueError, RecursionError) as error:
        raise _Damaged(f"it is not JSON ({error}), one JSON object a line wanted") from None
    if not isinstance(fields, dict):
        raise _Damaged(f"{shown(fields)} given, an object with context, choices and answer wanted")
    choices = _choices(fields)
    return Question(
        context=_context(fields),
        choices=choices,
        answer=_answer(fields, len(choices)),
        name=name + _id_text(fields),
    )


def _context(fields: Mapping[str, Any]) -> str:
    given = [name for name in _CONTEXT_NAMES if name in fields]
    if len(given) != 1:
        found = "both context and question" if given else "neither context nor question"
        raise _Damaged(f"{found} given, one of them wanted")
    text = fields[given[0]]
    if not isinstance(text, str) or not text:
        raise _Damaged(f"{given[0]} {shown(text)} given, a text of at least one character wanted")
    return text


def _choices(fields: Mapping[str, Any]) -> tuple[str, ...]:
    choices = fields.get("choices")
    if not isinstance(choices, list) or not 2 <= len(choices) <= _MOST_CHOICES:
        given = "no choices" if "choices" not in fields else f"choices {shown(choices)}"
        raise _Damaged(f"{given} given, a list of 2 to {_MOST_CHOICES} texts wanted")
    for index, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice.strip():
            raise _Damaged(f"choice {index} is {shown(choice)}, a text that is not blank wanted")
    return tuple(choices)


def _answer(fields: Mapping[str, Any], count: int) -> int:
    letters = string.ascii_uppercase[:count]
    answer = fields.get("answer")
    if isinstance(answer, str) and len(answer) == 1 and answer.upper() in letters:
        return letters.index(answer.upper())
    if type(answer) is int and 0 <= answer < count:
        return answer
    given = "no answer" if "answer" not in fields else f"answer {shown(answer)}"
    raise _Damaged(
        f"{given} given, an index from 0 to {count - 1} or a letter from A to {letters[-1]} wanted"
    )


def _id_text(fields: Mapping[str, Any]) -> str:
    identifier = fields.get("id")
    if identifier is None:
        return ""
    if isinstance(identifier, bool) or not isinstance(identifier, str | int):
        raise _Damaged(f"id {shown(identifier)} given, a text or a whole number wanted")
    return f" (id {shown(identifier)})"
