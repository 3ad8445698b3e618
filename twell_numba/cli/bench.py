"""``twell bench``: times of the sparse paths against the dense alternative, in one process."""

import json
import math
from collections.abc import Callable
from typing import Any

import click

from twell_numba.cli.options import device_option, json_option, seed_option
from twell_numba.cli.text import print_table
from twell_numba.errors import UsageError


@click.group("bench")
def bench() -> None:
    """Time each path against dense in one run and check its numbers.

    \b
    Example:
      twell bench ffn
      twell bench weights
      twell bench formats
    """


SIZE = click.IntRange(2, 2**20)


class Density(click.FloatRange):
    """A fraction between 0 and 1, neither included; NaN, which no comparison catches, refused."""

    def __init__(self) -> None:
        super().__init__(0, 1, min_open=True, max_open=True)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        density = super().convert(value, param, ctx)
        if math.isnan(density):
            self.fail(f"{value!r} given; a number between 0 and 1 wanted", param, ctx)
        return density


rounds_option = click.option(
    "--rounds",
    type=click.IntRange(20),
    default=20,
    show_default=True,
    help="Timed calls of each path, in turn; their median counts.",
)

block_size_option = click.option(
    "--block-size",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Rows and columns of a block of block-ELL.",
)


def layer_size_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the sizes of a feedforward layer and its input."""
    for option, default, letter in (
        ("--hidden-width", 2048, "F, neurons."),
        ("--width", 512, "D."),
        ("--tokens", 1024, "M."),
    ):
        added = click.option(option, type=SIZE, default=default, show_default=True, help=letter)
        command = added(command)
    return command


@bench.command("ffn")
@layer_size_options
@click.option(
    "--density",
    "densities",
    type=Density(),
    multiple=True,
    default=(0.01, 0.05, 0.5),
    show_default=True,
    help="Fraction of neurons that fire for a token; may be given several times.",
)
@rounds_option
@device_option
@seed_option(0)
@json_option
def bench_ffn(
    tokens: int,
    width: int,
    hidden_width: int,
    densities: tuple[float, ...],
    rounds: int,
    device: str,
    seed: int,
    as_json: bool,
) -> None:
    """Time a gated ReLU FFN in float32 through every path, against NumPy's BLAS.

    For each density: the forward pass and forward with backward over all tokens. For the first
    density also one token, on its own and right after a large BLAS product. `auto (twell)` means
    that auto took the TwELL path. Errors are norm-wise, against float64.

    \b
    Example:
      twell bench ffn --density 0.01 --density 0.1
    """
    from twell_numba.device.memory import keep_freed_memory
    from twell_numba.infer.benchmark import benchmark_ffn, benchmark_one_token
    from twell_numba.infer.ffn_problem import FFNShape

    keep_freed_memory()  # as in training

    rows: list[dict[str, Any]] = []
    for density in densities:
        shape = FFNShape(tokens, width, hidden_width, density * hidden_width)
        for backward in (False, True):
            rows += benchmark_ffn(shape, rounds, seed, backward)
            if not as_json:
                click.echo(f"measured: {rows[-1]['operation']} at density {density:g}", err=True)
    rows += benchmark_one_token(width, hidden_width, densities[0] * hidden_width, rounds, seed)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        click.echo(f"D = {width}, F = {hidden_width}, float32, cpu; milliseconds, medians")
        print_table(
            ("operation", "M", "nonzeros/token", "path", "NumPy", "this", "speed-up", "error"),
            [
                (
                    row["operation"],
                    row["shape"]["M"],
                    f"{row['nonzeros_per_token']:.1f}",
                    row["path"],
                    f"{row['dense_ms']:.3f}",
                    f"{row['sparse_ms']:.3f}",
                    f"{row['speedup']:.2f}x",
                    f"{row['max_relative_error']:.1e}",
                )
                for row in rows
            ],
        )


@bench.command("weights")
@layer_size_options
@click.option(
    "--density",
    "densities",
    type=Density(),
    multiple=True,
    default=(0.01, 0.1, 0.2, 0.4),
    show_default=True,
    help="Fraction of weights, or of blocks, that are not zero; may be given several times.",
)
@block_size_option
@rounds_option
@device_option
@seed_option(0)
@json_option
def bench_weights(
    tokens: int,
    width: int,
    hidden_width: int,
    densities: tuple[float, ...],
    block_size: int,
    rounds: int,
    device: str,
    seed: int,
    as_json: bool,
) -> None:
    """Time a gated ReLU FFN with sparse weights in float32, against the dense layer in NumPy.

    For each density: the forward pass and forward with backward over all tokens, and one token,
    with weights in CSR and, whole blocks at a time, in block-ELL. Then the density below which each
    is faster than dense. About half of the neurons fire. Errors are norm-wise, against float64.

    \b
    Example:
      twell bench weights --density 0.01 --block-size 32
    """
    from twell_numba.device.memory import keep_freed_memory
    from twell_numba.infer.benchmark_weights import benchmark_weights, break_even_density
    from twell_numba.infer.ffn_problem import FFNShape

    smallest = min(width, hidden_width)
    if block_size > smallest:
        raise UsageError(
            f"--block-size {block_size} given, at most {smallest} wanted for weights of "
            f"{hidden_width} x {width}"
        )
    keep_freed_memory()  # as in training
    rows: list[dict[str, Any]] = []
    for density in densities:
        for count, backward in ((tokens, False), (tokens, True), (1, False)):
            shape = FFNShape(count, width, hidden_width, hidden_width / 2)
            rows += benchmark_weights(shape, density, block_size, rounds, seed, backward)
            if not as_json:
                note = f"measured: {rows[-1]['operation']}, M = {count}, density {density:g}"
                click.echo(note, err=True)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    click.echo(
        f"D = {width}, F = {hidden_width}, blocks of {block_size}, float32, cpu; milliseconds, "
        "medians"
    )
    print_table(
        ("operation", "M", "stored", "path", "NumPy", "this", "speed-up", "error"),
        [
            (
                row["operation"],
                row["shape"]["M"],
                f"{row['density']:.2%}",
                row["path"],
                f"{row['dense_ms']:.3f}",
                f"{row['sparse_ms']:.3f}",
                f"{row['speedup']:.2f}x",
                f"{row['max_relative_error']:.1e}",
            )
            for row in rows
        ],
    )
    click.echo()
    cases: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        case = (row["operation"], row["shape"]["M"], row["path"])
        cases.setdefault(case, []).append(row)
    print_table(
        ("operation", "M", "path", "faster than dense"),
        [(*case, _break_even_text(of_case, break_even_density)) for case, of_case in cases.items()],
    )


def _break_even_text(
    rows: list[dict[str, Any]], break_even: Callable[[list[dict[str, Any]]], float | None]
) -> str:
    density = break_even(rows)
    if density is not None:
        return f"below {density:.1%} stored"
    if all(row["speedup"] >= 1 for row in rows):
        return f"up to {max(row['density'] for row in rows):.1%} stored, the most measured"
    return "at none of the densities measured"


@bench.command("formats")
@click.option("--rows", type=click.IntRange(1), default=4096, show_default=True, help="M.")
@click.option("--columns", type=click.IntRange(1), default=4096, show_default=True, help="K.")
@click.option("--right-columns", type=click.IntRange(1), default=256, show_default=True, help="N.")
@click.option(
    "--density",
    "densities",
    type=click.FloatRange(0, 1, min_open=True),
    multiple=True,
    default=(0.1, 0.01, 0.001),
    show_default=True,
    help="Fraction of nonzeros, and of nonzero blocks; may be given several times.",
)
@block_size_option
@rounds_option
@device_option
@seed_option(0)
@json_option
def bench_formats(
    rows: int,
    columns: int,
    right_columns: int,
    densities: tuple[float, ...],
    block_size: int,
    rounds: int,
    device: str,
    seed: int,
    as_json: bool,
) -> None:
    """Time the products of every sparse format in float32, against SciPy and dense NumPy.

    A is M x K and X has N columns; `sampled` is Y @ X.T at the entries of A, which SciPy has no
    function for: the fastest of what its user can write is taken. For `from_dense`, NumPy's time is
    that of a copy, so that the speed-up is the fraction of a copy's speed. Errors are norm-wise,
    against float64.

    \b
    Example:
      twell bench formats --density 0.05 --right-columns 64
    """
    from twell_numba.infer.benchmark_formats import ProductShape, benchmark_formats

    measured: list[dict[str, Any]] = []
    for density in densities:
        shape = ProductShape(rows, columns, right_columns, density, block_size)
        for part in benchmark_formats(shape, rounds, seed):
            measured += part
            if not as_json:
                names = ", ".join(row["path"] for row in part)
                note = f"measured: {part[0]['operation']} of {names} at density {density:g}"
                click.echo(note, err=True)
    if as_json:
        click.echo(json.dumps(measured, indent=2))
        return
    click.echo(
        f"A {rows} x {columns}, N = {right_columns}, float32, cpu; milliseconds, medians; "
        "speed-ups over NumPy and SciPy"
    )
    print_table(
        ("operation", "density", "format", "NumPy", "SciPy", "this", "/NumPy", "/SciPy", "error"),
        [
            (
                row["operation"],
                f"{row['density']:.4f}",
                row["path"],
                f"{row['dense_ms']:.3f}",
                f"{row['scipy_ms']:.3f}",
                f"{row['sparse_ms']:.3f}",
                f"{row['speedup']:.2f}x",
                f"{row['speedup_over_scipy']:.2f}x",
                f"{row['max_relative_error']:.1e}",
            )
            for row in measured
        ],
    )
