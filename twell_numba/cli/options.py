"""Options that several commands share."""

import re
from collections.abc import Callable
from typing import Any

import click

from twell_numba.errors import TwellError

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class DeviceType(click.ParamType):
    """``auto``, ``cpu`` or ``cuda[:N]``; this version computes on the CPU only."""

    name = "device"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "[auto|cpu|cuda[:N]]"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in ("auto", "cpu"):
            return "cpu"
        if re.fullmatch(r"cuda(:\d+)?", value):
            raise TwellError(
                f"--device {value} given, but this version computes on the CPU only; "
                "use --device cpu ('twell doctor' shows what this machine has)"
            )
        return self.fail(f"{value!r} given; auto, cpu, cuda or cuda:N wanted", param, ctx)


def device_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--device``, passed on as ``device="cpu"``; a GPU is refused with one line.

    So is, before the command runs, an environment in which nothing can be computed.
    """
    return click.option(
        "--device",
        type=DeviceType(),
        default="auto",
        show_default=True,
        callback=_in_usable_environment,
        help="Where to compute.",
    )(command)


def _in_usable_environment(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not context.resilient_parsing:
        from twell_numba.device.machine import require_usable_environment

        require_usable_environment()
    return value


def seed_option(default: int | None, help: str = "Seed of all random choices.") -> Decorator:
    """Add ``--seed``: a whole number of at least 0."""
    return click.option(
        "--seed",
        type=click.IntRange(min=0),
        default=default,
        show_default=default is not None,
        help=help,
    )


def ignored_seed_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--seed``, checked but not passed on: for a command in which nothing is random.

    Every command takes it, so that a script can give all its commands the same options.
    """
    return click.option(
        "--seed",
        type=click.IntRange(min=0),
        expose_value=False,
        help="Accepted as by every command; nothing is random here.",
    )(command)


def common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--device`` and ``--seed``, checked but not passed on: neither is needed."""
    command = click.option(
        "--device",
        type=DeviceType(),
        default="auto",
        expose_value=False,
        help="Accepted as by every command; nothing is computed here.",
    )(command)
    return ignored_seed_option(command)


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json``, passed on as ``as_json``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print the result to stdout as JSON."
    )(command)


def ffn_path_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--ffn-path``: which of the FFN's equivalent implementations runs.

    Weights are held as the path needs them, however they are stored.
    """
    return click.option(
        "--ffn-path",
        type=click.Choice(["auto", "dense", "twell", "csr", "block_ell"]),
        default="auto",
        show_default=True,
        help="How feedforward layers are computed; auto takes the fastest exact path.",
    )(command)
