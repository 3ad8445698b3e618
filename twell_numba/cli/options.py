"""Options that several commands share."""

import re
from collections.abc import Callable
from typing import Any

import click

from twell_numba.cli.text import note
from twell_numba.errors import UsageError

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class DeviceType(click.ParamType):
    """``auto``, ``cpu`` or ``cuda[:N]``, as it was given."""

    name = "device"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "[auto|cpu|cuda[:N]]"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", value):
            return value
        return self.fail(f"{value!r} given; auto, cpu, cuda or cuda:N wanted", param, ctx)


def device_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--device``, passed on as ``device="cpu"`` or ``device="cuda:N"``.

    One line says what is missing for a GPU that is asked for, and where ``auto`` took one. An
    environment in which nothing can be computed is refused before the command runs.
    """
    return _device_option(_choose_device, "Where to compute; auto takes a GPU that can be used.")(
        command
    )


def any_device_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """As :func:`device_option`, for a command whose work is the CPU's wherever models run.

    Every device is accepted, and ``device="cpu"`` passed on.
    """
    return _device_option(
        lambda wanted: "cpu", "Accepted as by every command; the work is done on the CPU."
    )(command)


def _device_option(choose: Callable[[str], str], help: str) -> Decorator:
    def callback(context: click.Context, parameter: click.Parameter, value: str) -> str:
        if context.resilient_parsing:
            return value
        from twell_numba.device.machine import require_usable_environment

        require_usable_environment()
        return choose(value)

    return click.option(
        "--device",
        type=DeviceType(),
        default="auto",
        show_default=True,
        callback=callback,
        help=help,
    )


def _choose_device(wanted: str) -> str:
    from twell_numba.device.choice import choose_device

    device, line = choose_device(wanted)
    if line is not None:
        note(line)
    return device


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


rounds_option = click.option(
    "--rounds",
    type=click.IntRange(20),
    default=20,
    show_default=True,
    help="Timed calls of each path, in turn; their median counts.",
)


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


def float8_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--float8``: 8-bit feedforward weights where few rows are read."""
    return click.option(
        "--float8",
        is_flag=True,
        help="Hold the feedforward weights behind the ReLU as 8-bit floats: a GPU reads half the "
        "bytes, and results change a little.",
    )(command)


def dtype_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--dtype``: what a model on a GPU computes in."""
    return click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16", "float16"]),
        default="float32",
        show_default=True,
        help="Of weights and activations on a GPU; 16 bits are faster and take half the memory.",
    )(command)


def dtype_of(name: str, device: str) -> Any:
    """Return the dtype of this name, unless the device cannot compute in it.

    Raises
    ------
    UsageError
    """
    if device == "cpu" and name != "float32":
        raise UsageError(f"--dtype {name} given with the CPU, float32 wanted, or --device cuda")
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return name


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options by which the next token is chosen, in the order of the help."""
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


_SAMPLING = (
    click.option(
        "--temperature",
        type=float,
        default=0.8,
        show_default=True,
        help="0 always takes the likeliest token; higher values vary more.",
    ),
    click.option(
        "--top-k",
        type=int,
        default=0,
        show_default=True,
        help="Choose among so many likeliest tokens; 0: among all.",
    ),
    click.option(
        "--top-p",
        type=float,
        default=1.0,
        show_default=True,
        help="Choose among the likeliest tokens that together have this probability.",
    ),
    click.option(
        "--min-p",
        type=float,
        default=0.0,
        show_default=True,
        help="Choose among tokens with at least this fraction of the likeliest one's probability.",
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        default=1.0,
        show_default=True,
        help="Above 1: tokens that have been in the text become less likely.",
    ),
)
