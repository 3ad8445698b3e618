"""Errors that are the user's to mend.

Each message is one line that says what was given, what is wanted and what to do. The command line
prints it without a traceback and exits with ``exit_code``; a program that uses the library can
catch :class:`TwellError`.
"""


class TwellError(Exception):
    """Something the user asked for cannot be done (exit code 1)."""

    exit_code = 1


class UsageError(TwellError):
    """The request itself is wrong: an unknown name, key, value or combination (exit code 2)."""

    exit_code = 2
