"""The group of commands: lazy imports, and one line instead of a traceback for a user's mistake."""

import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from twell_numba import __version__
from twell_numba.cli.text import note
from twell_numba.errors import TwellError

INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C

# What needs less memory, by command.
_SMALLER = {
    "train": "a smaller preset, batch_size or context_length needs less",
    "sparsify": "a smaller batch_size or context_length, or recompute=true, needs less",
    "generate": "a shorter prompt or a smaller model needs less",
    "chat": "a smaller model needs less",
    "serve": "a smaller model, or less for --cache-tokens, needs less",
    "convert": "a smaller model or fewer --windows needs less",
    "eval": "a smaller model or smaller --data needs less",
    "bench": "smaller sizes need less",
}


class LazyGroup(click.Group):
    """A group that imports ``package.NAME`` only when its command NAME is asked for.

    Parameters
    ----------
    name : str
    commands : mapping of str to str
        Command name to the line shown for it in the group's help. The module ``package.NAME`` holds
        a click command of that name, under any variable.
    package : str
    """

    def __init__(self, name: str, commands: Mapping[str, str], *, package: str, help: str) -> None:
        super().__init__(name, help=help, context_settings={"help_option_names": ["-h", "--help"]})
        self._summaries = dict(commands)
        self._package = package
        version_option = click.version_option(__version__, prog_name="twell_numba")
        version_option(self)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._summaries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._summaries:
            return None
        module = importlib.import_module(f"{self._package}.{cmd_name}")
        for value in vars(module).values():
            if isinstance(value, click.Command) and value.name == cmd_name:
                return value
        raise LookupError(f"{module.__name__} defines no click command named {cmd_name!r}")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self._summaries.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and name not in self._summaries:
            raise click.UsageError(
                f"no command {name!r}{suggestion(name, self._summaries)}; "
                f"commands: {', '.join(self._summaries)}",
                ctx,
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MemoryError as error:
            advice = _SMALLER.get(ctx.invoked_subcommand or "", "something smaller needs less")
            given = f" ({error})" if str(error) else ""
            message = f"not enough memory{given}; {advice}, or end other programs"
            raise TwellError(message) from error

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line and return its exit code, or exit with it in ``standalone_mode``.

        Whatever is the user's to mend (a :class:`TwellError`, wrong use, a refused file, too little
        memory, an interrupt) becomes one line on stderr. Any other exception is a fault of this
        program and keeps its traceback.
        """
        try:
            result = super().main(
                args,
                prog_name,
                complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
            sys.stdout.flush()
            code = result if isinstance(result, int) else 0
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except click.ClickException as error:
            code = _report(_with_help_hint(error), error.exit_code)
        except click.Abort:
            code = _report("interrupted", INTERRUPTED)
        except TwellError as error:
            code = _report(str(error), error.exit_code)
        except BrokenPipeError:
            # The reader (``head``, a closed pager) has what it wanted.
            _discard_unwritable_output()
            code = 1
        except OSError as error:
            code = _report(_describe_os_error(error), 1)
            _discard_unwritable_output()
        if standalone_mode:
            sys.exit(code)
        return code


def suggestion(given: str, known: Mapping[str, object] | Sequence[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the nearest known name, or nothing if none is near."""
    near = difflib.get_close_matches(given, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _discard_unwritable_output() -> None:
    """Drop what a full or closed stdout did not take: Python would fail on it at its exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(message: str, code: int) -> int:
    one_line = " ".join(message.split())
    note(f"Error: {one_line}")
    return code


def _with_help_hint(error: click.ClickException) -> str:
    message = error.format_message()
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    return f"{message.rstrip('.')} (see '{context.command_path} --help')"


def _describe_os_error(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename is not None else reason
