"""Errors that are the user's to mend.

Each message is one line that says what was given, what is wanted and what to do. The command line
prints it without a traceback and exits with ``exit_code``; a program that uses the library can
catch :class:`TwellError`.
"""

from typing import Any


class TwellError(Exception):
    """Something the user asked for cannot be done (exit code 1)."""

    exit_code = 1


class UsageError(TwellError):
    """The request itself is wrong: an unknown name, key, value or combination (exit code 2)."""

    exit_code = 2


def shown(value: Any) -> str:
    """Return a value as a message shows it: in one line, cut off where it is long."""
    try:
        # arrays are written over several lines
        text = " ".join(map(str.strip, repr(value).splitlines()))
    except (ValueError, RecursionError):
        # Python writes out no whole number of thousands of digits, and nothing nested too deeply.
        return f"a value of type {type(value).__name__} too large to show"
    return text if len(text) <= 80 else f"{text[:77]}..."
